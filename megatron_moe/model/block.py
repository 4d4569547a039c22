"""One transformer layer, as a chain of nodes that a schedule may run apart."""

from torch import Tensor, nn

from megatron_moe.data.batch import TokenMeta
from megatron_moe.kernels.ops import Kernels
from megatron_moe.model.attention import Attention
from megatron_moe.model.mla import MLA
from megatron_moe.model.mlp import MLP
from megatron_moe.model.norm import Norm
from megatron_moe.moe.layer import MoELayer
from megatron_moe.parallel import rng
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.attention import MLASpec
from megatron_moe.specs.model import LayerSpec


class Block(nn.Module):
    """hidden + mixer(norm(hidden)), then the same with the feed-forward block.

    `layer` is the global index, under which an MoE layer reports its metrics; `site` is the module's path in the model,
    which names its dropout.
    """

    def __init__(self, spec: LayerSpec, layer: int, site: str, ctx: ParallelContext, kernels: Kernels) -> None:
        super().__init__()
        self.spec = spec
        self.site = site
        mixer, hidden = spec.mixer, spec.mixer.hidden_size
        attention_site = f"{site}.self_attention"
        self.input_layernorm = Norm(spec.norm, hidden, ctx, kernels)
        self.self_attention: MLA | Attention
        if isinstance(mixer, MLASpec):
            self.self_attention = MLA(mixer, attention_site, ctx, kernels)
        else:
            self.self_attention = Attention(mixer, attention_site, ctx, kernels)
        self.pre_mlp_layernorm = Norm(spec.norm, hidden, ctx, kernels)
        self.mlp: MoELayer | MLP
        if spec.is_moe:
            self.mlp = MoELayer(spec.feed_forward, layer, ctx, kernels)
        else:
            self.mlp = MLP(spec.feed_forward, ctx, kernels)

    def forward(self, hidden_SBH: Tensor, meta: TokenMeta) -> Tensor:
        """[S, B, H] -> [S, B, H]"""
        hidden_SBH = self.attend(hidden_SBH, meta)
        normed_SBH = self.pre_mlp_layernorm(hidden_SBH)
        out_SBH = self.mlp(normed_SBH, meta) if self.spec.is_moe else self.mlp(normed_SBH)
        return self._add(hidden_SBH, out_SBH, "mlp", meta)

    def attend(self, hidden_SBH: Tensor, meta: TokenMeta) -> Tensor:
        """hidden + attention of its norm."""
        out_SBH = self.self_attention(self.input_layernorm(hidden_SBH), meta)
        return self._add(hidden_SBH, out_SBH, "attention", meta)

    def _add(self, hidden_SBH: Tensor, out_SBH: Tensor, part: str, meta: TokenMeta) -> Tensor:
        """The residual connection, with dropout on what is added."""
        return hidden_SBH + rng.dropout(out_SBH, self.spec.hidden_dropout, meta.key(f"{self.site}.{part}_residual"))
