"""Input embedding: word embedding, optional learned position embedding, and dropout."""

from dataclasses import replace

from torch import Tensor, nn

from megatron_moe.config.model import ModelConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels import autograd
from megatron_moe.kernels.ops import Kernels
from megatron_moe.parallel import rng
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import new_parameter
from megatron_moe.parallel.tensor_parallel import leave_tensor_parallel, my_positions, sequence_part


class Table(nn.Module):
    """Embedding table with one learned row per id. If `meta.tp_dim` is 0, rows are sharded (vocabulary-parallel)."""

    def __init__(self, rows: int, width: int, meta: ParamMeta, ctx: ParallelContext, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = new_parameter((rows, width), meta, ctx)

    def forward(self, ids: Tensor) -> Tensor:
        """Maps int64 ids [...] to their rows [..., width], or to zeros if the row is on another rank."""
        if self.weight.shape == self.weight.global_shape:
            return autograd.embedding(self.kernels, ids, self.weight)
        num_held = len(self.weight)
        ids = ids - self.weight.boxes[0].offset[0]
        held = (ids >= 0) & (ids < num_held)
        return autograd.embedding(self.kernels, ids.clamp(0, num_held - 1), self.weight) * held[..., None]


class Embedding(nn.Module):
    """word_embeddings[token] (+ position_embeddings[position]), then dropout.

    `word_embeddings` is vocabulary-parallel: its results are summed over tensor-parallel ranks.
    """

    def __init__(self, config: ModelConfig, ctx: ParallelContext, kernels: Kernels) -> None:
        super().__init__()
        self.ctx = ctx
        self.dropout = config.embedding_dropout
        # As in Megatron, the embedding has no weight decay with --embedding-init-method-std, which sets its scale.
        decay = config.init.embedding_std is None
        # A tied head sums over hidden_size inputs, which decides the fan-in of unit-gain initialisation.
        fan_in = config.hidden_size if config.tied_embeddings else 1
        shared = ctx.group("pp").size > 1 and (config.tied_embeddings or config.mtp is not None)
        meta = ParamMeta(role="embedding", init="embedding", fan_in=fan_in, tp_dim=0, decay=decay, shared_stages=shared)
        self.word_embeddings = Table(config.vocab_size, config.hidden_size, meta, ctx, kernels)
        self.position_embeddings = None
        if config.position_embedding == "learned_absolute":
            partial = ctx.config.sequence_parallel
            meta = replace(meta, role="position", fan_in=1, tp_dim=None, partial_over_tp=partial)
            self.position_embeddings = Table(config.max_positions, config.hidden_size, meta, ctx, kernels)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, mb: MicrobatchContext) -> Tensor:
        """Maps tokens and positions [B, S] to [S, B, H], or with sequence parallelism to this rank's [S / tp, B, H]."""
        words_SBH = self.word_embeddings(tokens_BS).transpose(0, 1).contiguous()
        hidden_SBH = leave_tensor_parallel(words_SBH, self.ctx)
        if self.position_embeddings is not None:
            hidden_SBH = hidden_SBH + self.position_embeddings(my_positions(positions_BS, self.ctx)).transpose(0, 1)
        return rng.dropout(hidden_SBH, self.dropout, mb.key("embedding"), part=sequence_part(self.ctx))
