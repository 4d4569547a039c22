"""Sparse attention with a lightning indexer (DSA), as in DeepSeek-V3.2 and GLM-5.

1. multi-latent attention in absorbed form: its latents (`model/mla.py`), and q multiplied by the up-projection of keys,
   so that all heads attend to rows of kv latent and rotated key, whose first channels are also the values
2. the indexer: q from the normed q latent, one key and a weight per head from the hidden state, scores of all keys
3. attention of each query to the keys with the highest scores
4. the up-projection of values, applied to the output of attention
5. the indexer's loss, with which attention trains the indexer and nothing else

Layers without an indexer (`DSAConfig.reuses_topk`) attend to the keys that the last layer with one has selected.
Every tensor-parallel rank has the whole indexer. With sequence parallelism, it scores the queries of its positions.
"""

from functools import partial

import torch
from torch import Tensor, nn

from megatron_moe.config.dsa import DSAConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.layers.components import Site
from megatron_moe.layers.declared import DeclaredParameters
from megatron_moe.layers.norm import Norm
from megatron_moe.layers.resources import ModelResources
from megatron_moe.model.attention import rotate
from megatron_moe.model.mla import MLA
from megatron_moe.model.sparse_attention import KeySelection, QueryRows, raise_maxima_, select_keys
from megatron_moe.moe.balancing import AttachLosses, BatchTokens
from megatron_moe.parallel.context import ProcessGroup
from megatron_moe.parallel.tensor_parallel import (
    all_gather,
    enter_tensor_parallel,
    select_local_positions,
    sequence_part,
)


class Indexer(nn.Module):
    """Queries, keys and weights of the indexer, for the positions of this rank's residual stream."""

    def __init__(self, config: DSAConfig, resources: ModelResources) -> None:
        super().__init__()
        self.config, self.ctx, self.kernels = config.indexer, resources.ctx, resources.kernels
        heads, width = config.indexer.num_heads, config.indexer.head_dim
        declared = DeclaredParameters.of(config, resources)
        self.linear_wq_b = declared.linear("indexer.linear_wq_b")
        self.linear_wk = declared.linear("indexer.linear_wk")
        self.k_norm = Norm(config.indexer.norm, width, self.ctx, self.kernels)
        self.linear_weights_proj = declared.linear("indexer.linear_weights_proj")
        self.scale = (heads * width) ** -0.5

    def forward(self, hidden_SBH: Tensor, latent_SBQ: Tensor, mb: MicrobatchContext) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q [S, B, I, D], k [S, B, D] and the weights of the I heads, [S, B, I]."""
        q_SBID = self.linear_wq_b(latent_SBQ).unflatten(-1, (self.config.num_heads, -1))
        k_SB1D = self.k_norm(self.linear_wk(hidden_SBH))[:, :, None]
        assert mb.rotary is not None, "the rotary tables are not attached to the context"
        index, number = sequence_part(self.ctx)
        cos_SBD, sin_SBD = (table.chunk(number)[index] for table in mb.rotary[self.config.rope])
        interleaved = self.config.rope.interleaved
        q_SBID, k_SB1D = (self.kernels.rope(x, cos_SBD, sin_SBD, interleaved, 0) for x in (q_SBID, k_SB1D))
        if self.config.rotate_activation:
            q_SBID, k_SB1D = (x @ hadamard(self.config.head_dim, x) for x in (q_SBID, k_SB1D))
        return q_SBID, k_SB1D.squeeze(2), self.linear_weights_proj(hidden_SBH) * self.scale


def hadamard(size: int, like: Tensor) -> Tensor:
    """Orthogonal Hadamard matrix [size, size] of entries +-size^-1/2, in dtype and device of `like`. `size`: a power of
    two."""
    matrix = like.new_full((1, 1), size**-0.5)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix


class DSA(MLA):
    """Multi-latent self-attention in which each query attends to the keys that an indexer selects."""

    config: DSAConfig

    def __init__(self, config: DSAConfig, site: Site, resources: ModelResources) -> None:
        super().__init__(config, site, resources)
        self.indexer = None if config.reuses_topk else Indexer(config, resources)

    def _up(
        self, mb: MicrobatchContext, q_latent: Tensor, kv_latent: Tensor, q: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Returns q [S, B, N, L + P], multiplied by the up-projection of keys, and the rows [S, B, L + P] of normed kv
        latent and rotated key, which are both keys and values of all heads."""
        config = self.config
        nope_SBND, rotated = self._queries(mb, q_latent, q).split((config.qk_head_dim, config.qk_rope_dim), dim=-1)
        q_SBNL = torch.einsum("sbnd,ndl->sbnl", nope_SBND, self._up_weights()[0])
        latent, key = kv_latent.split((config.kv_lora_rank, config.qk_rope_dim), dim=-1)
        # collective over tp: S * B * (L + P) elements; the gradient is partial, because each rank's heads read all rows
        rows = enter_tensor_parallel(torch.cat([self.kv_layernorm(latent), key], dim=-1), self.ctx)
        rows_SB1L = rotate(self.kernels, rows[:, :, None], config.rope, mb, start=config.kv_lora_rank)
        return torch.cat([q_SBNL, rotated], dim=-1), rows_SB1L.squeeze(2)

    def _up_weights(self) -> tuple[Tensor, Tensor]:
        """Up-projections of keys [N, D, L] and values [N, E, L]."""
        weight_NCL = self.linear_kv_up_proj.weight.unflatten(0, (self.num_heads, -1))
        of_keys, of_values = weight_NCL.split((self.config.qk_head_dim, self.config.v_head_dim), dim=1)
        return of_keys, of_values

    def _core(self, mb: MicrobatchContext, hidden_SBH: Tensor, q_latent: Tensor, *projected: Tensor) -> Tensor:
        coeff, part = self.config.loss_coeff, mb.tokens.part
        q_UBND, rows_SBD = projected
        is_split, segments_BS = part is not None and len(part.of_ranks) > 1, mb.tokens.segments_BS
        own: tuple[range, ...] = (range(len(q_UBND)),)
        if part is not None and is_split:
            own, segments_BS = part.chunks, mb.tokens.whole_segments_BS
            # collective over cp: all-gather of S * B * (L + P) elements per rank; backward: reduce-scatter of their
            # gradients
            rows_SBD = self.context_peers.gather(rows_SBD, part, self.ctx)
        queries = QueryRows(own, segments_BS, q_UBND.device)
        trains = bool(coeff) and mb.training and (torch.is_grad_enabled() or mb.metrics is not None)
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains):
            ids_UBK, loss = self._chosen(mb, hidden_SBH.detach(), q_latent.detach(), q_UBND, rows_SBD, queries, trains)
        if self.max_logits is not None and mb.training:
            raise_maxima_(self.max_logits, q_UBND.detach(), rows_SBD.detach(), ids_UBK, self.core.softmax_scale)
        latent_UBNL = self.saved_tensors.run("core_attn", partial(self._attend_to, ids_UBK), q_UBND, rows_SBD)
        context_UBNE = torch.einsum("sbnl,nel->sbne", latent_UBNL, self._up_weights()[1])
        if not trains:
            return context_UBNE
        if mb.metrics is not None:
            # scaled so that the mean over ranks of the recorded values is the sum of the ranks' terms
            mb.metrics.record("indexer_loss", loss.detach() * self._token_group().size, layer=self.layer)
        if not torch.is_grad_enabled():
            return context_UBNE
        return AttachLosses.apply(context_UBNE, (coeff,), mb.aux_loss_scale, loss)

    def _token_group(self) -> ProcessGroup:
        """Process group whose ranks score different queries of the microbatch."""
        return self.ctx.group("tp_cp" if self.ctx.config.sequence_parallel else "cp")

    def _chosen(
        self,
        mb: MicrobatchContext,
        hidden_SBH: Tensor,
        q_latent: Tensor,
        q_UBND: Tensor,
        rows_SBD: Tensor,
        queries: QueryRows,
        trains: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns the result of `select_keys`: selected keys and loss. The loss is computed only if `trains`. Without
        an indexer, returns the keys that the last layer with one has selected, and no loss."""
        selected = mb.selected_keys
        if self.indexer is None:
            assert selected is not None, "the context is not attached to a model chunk"
            # recomputed layers find the keys of later layers, too
            return selected[max(layer for layer in selected if layer < self.layer)], rows_SBD.new_zeros(())
        with torch.no_grad():
            norm = self.q_layernorm
            latent_SBQ = norm.forward_unquantized(q_latent) if isinstance(norm, Norm) else q_latent
            assert isinstance(latent_SBQ, Tensor)
        q_RBID, k_SBD, w_RBI = self.indexer(hidden_SBH, latent_SBQ, mb)
        if self.ctx.config.sequence_parallel:
            # collective over tp: S * B * D elements of one key head; backward: reduce-scatter, which sums the gradients
            # of all queries
            k_SBD = all_gather(k_SBD, self.ctx.group("tp"))
        part = mb.tokens.part
        if part is not None and len(part.of_ranks) > 1:
            # collective over cp: the same elements, all-gathered; backward: reduce-scatter
            k_SBD = self.context_peers.gather(k_SBD, part, self.ctx)
        weight_BR = self._weights(mb, q_RBID) if trains else None
        state = self.config.indexer, queries, sequence_part(self.ctx), self.ctx.group("tp")
        job = KeySelection(*state, self.core.softmax_scale, weight_BR)
        ids_UBK, loss = select_keys(q_RBID, k_SBD, w_RBI, q_UBND, rows_SBD, job)
        if selected is not None and self.config.indexer.topk_freq > 1:
            selected[self.layer] = ids_UBK
        return ids_UBK, loss

    def _weights(self, mb: MicrobatchContext, q_RBID: Tensor) -> Tensor:
        """Weight in the indexer loss of every query that this rank scores, [B, R]: 1 / number of valid tokens of the
        microbatch; 0 for padding."""
        (rows, batch), valid_BS = q_RBID.shape[:2], mb.tokens.valid_BS
        valid_BR = None if valid_BS is None else select_local_positions(valid_BS, self.ctx)
        valid_T = None if valid_BR is None else valid_BR.t().reshape(-1)
        number = BatchTokens(valid_T, rows * batch, batch, self._token_group()).num_tokens()
        ones = q_RBID.new_ones(batch, rows, dtype=internal_dtype(q_RBID.dtype))
        return (ones if valid_BR is None else ones * valid_BR) / number

    def _attend_to(self, ids_UBK: Tensor, q_UBND: Tensor, rows_SBD: Tensor) -> Tensor:
        width, scale = self.config.kv_lora_rank, self.core.softmax_scale
        return self.kernels.sparse_attention(q_UBND, rows_SBD, ids_UBK, None, width, scale)[0]
