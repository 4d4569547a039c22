"""Input embedding: word embedding, optional learned position embedding, and dropout."""

from torch import Tensor, nn

from megatron_moe.config.component import ParamSpec
from megatron_moe.config.model import ModelConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels import autograd
from megatron_moe.kernels.ops import Kernels
from megatron_moe.parallel import rng
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import new_parameter
from megatron_moe.parallel.tensor_parallel import leave_tensor_parallel, select_local_positions, sequence_part


class Table(nn.Module):
    """Embedding table with one learned row per id, sharded by rows (vocabulary-parallel) if its `tp_dim` is 0."""

    def __init__(self, weight: ParamSpec, ctx: ParallelContext, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = new_parameter(weight.shape, weight.meta, ctx)

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
        words, *positions = config.embedding_parameters(ctx.config)
        self.word_embeddings = Table(words, ctx, kernels)
        self.position_embeddings = Table(positions[0], ctx, kernels) if positions else None

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, mb: MicrobatchContext) -> Tensor:
        """Maps tokens and positions [B, S] to [S, B, H], or with sequence parallelism to this rank's [S / tp, B, H]."""
        words_SBH = self.word_embeddings(tokens_BS).transpose(0, 1).contiguous()
        hidden_SBH = leave_tensor_parallel(words_SBH, self.ctx)
        if self.position_embeddings is not None:
            hidden_SBH = hidden_SBH + self.position_embeddings(
                select_local_positions(positions_BS, self.ctx)
            ).transpose(0, 1)
        return rng.dropout(hidden_SBH, self.dropout, mb.key("embedding"), part=sequence_part(self.ctx))
