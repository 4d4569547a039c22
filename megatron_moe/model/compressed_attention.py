"""Compressed attention, the mixer of DeepSeek-V4.

1. q from a low-rank latent, with a norm per head; one key head, which is also the value
2. entries, which summarise groups of tokens (`model/token_groups.py`)
3. the indexer, which has smaller entries as keys, selects the entries to which a query attends
4. rotary positions on the last channels of q, keys and entries; an entry has the position of its first token
5. softmax attention to the last tokens and to entries, with a learned sink per head
6. the opposite rotation of the output, so that it depends on relative positions only
7. output projection: a low-rank projection of each group of heads, then one of all groups

Every context-parallel rank computes all entries, from keys, values and gates that are gathered.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megatron_moe.config.compressed_attention import CompressedAttentionConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.layers.components import Mixer, Site
from megatron_moe.layers.declared import DeclaredParameters
from megatron_moe.layers.linear import norm_copy_format
from megatron_moe.layers.norm import Norm
from megatron_moe.layers.resources import ModelResources
from megatron_moe.memory.recompute import checkpoint
from megatron_moe.model.attention import rotate
from megatron_moe.model.dsa import hadamard
from megatron_moe.model.entry_choice import AttentionTarget, entry_mask, indexer_loss, select_entries
from megatron_moe.model.query_rotation import QueryRotation, SavedQueries, grouped_output, normed_and_rotated
from megatron_moe.model.rope import cos_and_sin, inverse_frequencies
from megatron_moe.model.token_groups import TokenGroups, entries
from megatron_moe.moe.balancing import AttachLosses, BatchTokens


@dataclass(frozen=True)
class VisibleTokens:
    """Positions and documents of the tokens of one microbatch, whose sequences context-parallel ranks may share."""

    own_U: Tensor
    """Position in its sequence of each of this rank's tokens, int64."""
    positions_BS: Tensor
    """Rotary positions of all tokens of the sequences."""
    segments_BS: Tensor | None
    """Document ids of all tokens of the sequences; None if every sequence is one document."""

    def window(self, width: int) -> Tensor:
        """Sliding window of each token: positions of the last `width` tokens of its document, itself included, int32
        [U, B, width]; -1 for none."""
        ids_UW = self.own_U[:, None] - torch.arange(width, device=self.own_U.device)
        ids_UBW = ids_UW[:, None].expand(-1, len(self.positions_BS), -1)
        if self.segments_BS is not None:
            same_BUW = self.segments_BS[:, ids_UW.clamp(min=0)] == self.segments_BS[:, self.own_U, None]
            ids_UBW = ids_UBW.masked_fill(~same_BUW.transpose(0, 1), -1)
        return ids_UBW.clamp(min=-1).to(torch.int32)


class Compressor(nn.Module):
    """Compresses groups of tokens into entries."""

    frequencies: Tensor

    def __init__(self, config: CompressedAttentionConfig, name: str, width: int, resources: ModelResources) -> None:
        """`name`: path of the module; `width`: channels of an entry."""
        super().__init__()
        declared = DeclaredParameters.of(config, resources)
        self.linear_wkv, self.linear_wgate = (
            declared.linear(f"{name}.{kind}") for kind in ("linear_wkv", "linear_wgate")
        )
        self.ape = declared.parameter(f"{name}.ape")
        self.norm = Norm(config.norm, width, resources.ctx, resources.kernels)
        self.config, self.width, self.kernels = config, width, resources.kernels
        frequencies = inverse_frequencies(config.rope).to(resources.ctx.device)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def projections(self, hidden_SBH: Tensor) -> tuple[Tensor, Tensor]:
        """Projects hidden states to the values and gates of this rank's tokens."""
        return self.linear_wkv(hidden_SBH), self.linear_wgate(hidden_SBH)

    def forward(self, values_SBC: Tensor, gates_SBC: Tensor, groups: TokenGroups, positions_BS: Tensor) -> Tensor:
        """Computes the entries [E, B, width] from the projections of all tokens."""
        make = partial(entries, groups=groups, width=self.width)
        pooled_EBD = self.norm(checkpoint(make, make, values_SBC, gates_SBC, self.ape))
        assert isinstance(pooled_EBD, Tensor)
        rope, starts_BE = self.config.rope, groups.first_token_values(positions_BS)
        tables = cos_and_sin(rope, self.frequencies, starts_BE, internal_dtype(pooled_EBD.dtype))
        return self.kernels.rope(pooled_EBD[:, :, None], *tables, rope.interleaved, self.width - rope.dim).squeeze(2)


class EntryIndexer(nn.Module):
    """Selects the entries to which each query attends."""

    def __init__(self, config: CompressedAttentionConfig, resources: ModelResources) -> None:
        super().__init__()
        assert config.indexer is not None
        self.config, self.rope, self.kernels = config.indexer, config.rope, resources.kernels
        declared = DeclaredParameters.of(config, resources)
        self.linear_wq_b = declared.linear("indexer.linear_wq_b")
        self.linear_weights_proj = declared.linear("indexer.linear_weights_proj")
        self.compressor = Compressor(config, "indexer.compressor", config.indexer.head_dim, resources)

    def queries(self, hidden_SBH: Tensor, latent_SBQ: Tensor, mb: MicrobatchContext) -> tuple[Tensor, Tensor]:
        """Returns queries [U, B, I, D] and head weights [U, B, I] of this rank's tokens, for I indexer heads."""
        q_UBID = self.linear_wq_b(latent_SBQ).unflatten(-1, (self.config.num_heads, -1))
        q_UBID = self.rotated(rotate(self.kernels, q_UBID, self.rope, mb, start=self.config.head_dim - self.rope.dim))
        scale = (self.config.num_heads * self.config.head_dim) ** -0.5
        return q_UBID, self.linear_weights_proj(hidden_SBH) * scale

    def rotated(self, x: Tensor) -> Tensor:
        """Multiplies queries or keys by the Hadamard matrix, if this is enabled."""
        return x @ hadamard(self.config.head_dim, x) if self.config.rotate_activation else x


class CompressedAttention(Mixer):
    """Attention to a window of tokens and to entries of earlier tokens."""

    def __init__(self, config: CompressedAttentionConfig, site: Site, resources: ModelResources) -> None:
        super().__init__(site, resources)
        self.config, self.context_peers = config, resources.context_peers
        declared, norm = DeclaredParameters.of(config, resources), partial(Norm, config.norm)
        down = partial(declared.linear, saves_input=self.saved_tensors.is_recomputed("layernorm"), common_input=True)
        self.linear_q_down_proj, self.linear_kv_proj = down("linear_q_down_proj"), down("linear_kv_proj")
        self.input_linears = (self.linear_q_down_proj, self.linear_kv_proj)
        self.linear_q_up_proj = declared.linear("linear_q_up_proj")
        fmt = norm_copy_format([self.linear_q_up_proj])
        self.q_layernorm = norm(config.q_lora_rank, self.ctx, self.kernels, copy_format=fmt)
        self.kv_layernorm = norm(config.head_dim, self.ctx, self.kernels)
        self.sinks = declared.parameter("sinks")
        self.compressor = Compressor(config, "compressor", config.head_dim, resources) if config.ratio else None
        self.indexer = EntryIndexer(config, resources) if config.indexer is not None else None
        self.linear_o_group_proj = declared.parameter("linear_o_group_proj")
        self.linear_proj = declared.linear("linear_proj")

    def forward(self, hidden_SBH: Tensor, mb: MicrobatchContext) -> Tensor:
        """Applies the mixer to the hidden states [S, B, H] of this rank; returns the same shape."""
        config, produced = self.config, SavedQueries()
        with self.saved_tensors.offload_scope("qkv_linear"):
            latent_SBQ, kv_SBD = self.linear_q_down_proj(hidden_SBH), self.linear_kv_proj(hidden_SBH)
            rotation = QueryRotation(self.kernels, *self._tables(mb), config)
            q_SBND = normed_and_rotated(self._raw_q(latent_SBQ), rotation, produced)
            make = partial(self._make_q, rotation)
            discard = self.saved_tensors.discard_output("mla_up_proj", make, (latent_SBQ,), q_SBND)
            kv_SB1D = rotate(self.kernels, self.kv_layernorm(kv_SBD)[:, :, None], config.rope, mb, start=rotation.start)
        with self.saved_tensors.offload_scope("core_attn"), discard:
            produced.packed = self.saved_tensors.pack(q_SBND.detach())
            context_SBND = self._attend(mb, hidden_SBH, latent_SBQ, q_SBND, kv_SB1D.squeeze(2))
        with self.saved_tensors.offload_scope("attn_proj"):
            weight, groups = self.linear_o_group_proj, config.o_groups
            out_SBC = grouped_output(context_SBND, weight, rotation, groups)
            return self.linear_proj(out_SBC)

    def _attend(
        self, mb: MicrobatchContext, hidden_SBH: Tensor, latent_SBQ: Tensor, q_SBND: Tensor, kv_SBD: Tensor
    ) -> Tensor:
        """Computes attention and returns its output [S, B, N, D]. `kv_SBD`: keys of this rank's tokens."""
        tokens, rows_SBD = self._tokens(mb), self._whole(kv_SBD, mb)
        window = tokens.window(min(self.config.csa_window_size, len(rows_SBD)))
        if self.compressor is None:
            return self._attention(q_SBND, rows_SBD, window)[0]
        entries_EBD, groups = self._entries(self.compressor, hidden_SBH, mb, tokens)
        visible_BUE = groups.visible(tokens.own_U).expand(len(tokens.positions_BS), -1, -1)
        if self.indexer is None:
            numbers_E = torch.arange(len(entries_EBD), device=window.device, dtype=torch.int32)
            chosen_UBK = torch.where(visible_BUE, numbers_E, -1).transpose(0, 1)
            return self._attention(q_SBND, rows_SBD, window, entries_EBD, chosen_UBK)[0]
        indexer = self.indexer.config
        trains = bool(indexer.indexer_loss_coeff) and mb.training
        trains = trains and (torch.is_grad_enabled() or mb.metrics is not None)
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains):
            index = self._index(self.indexer, hidden_SBH.detach(), latent_SBQ, mb, tokens)
        with torch.no_grad():
            chosen_UBK = select_entries(*index, visible_BUE, indexer.topk, indexer.relu)
        context_SBND, lse_SBN = self._attention(q_SBND, rows_SBD, window, entries_EBD, chosen_UBK)
        if not trains:
            return context_SBND
        with torch.no_grad():
            allowed_BUE, sparse = visible_BUE, indexer.sparse_indexer_loss
            if sparse:
                allowed_BUE = entry_mask(chosen_UBK, len(entries_EBD))
            else:
                lse_SBN = self._attention(q_SBND, rows_SBD, window)[1]
            given = q_SBND.detach(), entries_EBD.detach(), lse_SBN, not sparse, allowed_BUE
            target = AttentionTarget(*given, self._weights(mb, lse_SBN), self.config.softmax_scale)
        return self._with_loss(mb, context_SBND, indexer_loss(*index, target, indexer.relu))

    def _attention(
        self,
        q_SBND: Tensor,
        rows_SBD: Tensor,
        window: Tensor,
        entries_EBD: Tensor | None = None,
        chosen_UBK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of attention to the tokens in `window` and, if given, to the entries `chosen_UBK`."""
        ids = window
        if entries_EBD is not None and chosen_UBK is not None:
            ids = torch.cat([window, torch.where(chosen_UBK < 0, chosen_UBK, chosen_UBK + len(rows_SBD))], dim=-1)
            rows_SBD = torch.cat([rows_SBD, entries_EBD])
        state = self.sinks, self.config.head_dim, self.config.softmax_scale
        return self.kernels.sparse_attention(q_SBND, rows_SBD, ids, *state)

    def _with_loss(self, mb: MicrobatchContext, context_SBND: Tensor, loss: Tensor) -> Tensor:
        """Records the indexer's loss and attaches its gradients to the output of attention."""
        assert self.config.indexer is not None
        if mb.metrics is not None:
            # scaled so that the mean over ranks of the recorded values is the sum of the ranks' terms
            mb.metrics.record("indexer_loss", loss.detach() * self.ctx.group("cp").size, layer=self.layer)
        if not torch.is_grad_enabled():
            return context_SBND
        coeffs = (self.config.indexer.indexer_loss_coeff,)
        return AttachLosses.apply(context_SBND, coeffs, mb.aux_loss_scale, loss)

    def _weights(self, mb: MicrobatchContext, lse_UBN: Tensor) -> Tensor:
        """Weight of every query in the indexer loss, [U, B]: 1 / number of valid tokens of the microbatch; 0 for
        padding."""
        (rows, batch), valid_BS = lse_UBN.shape[:2], mb.tokens.valid_BS
        valid_T = None if valid_BS is None else valid_BS.t().reshape(-1)
        number = BatchTokens(valid_T, rows * batch, batch, self.ctx.group("cp")).num_tokens()
        ones = lse_UBN.new_ones(rows, batch)
        return (ones if valid_BS is None else ones * valid_BS.t()) / number

    def _raw_q(self, latent_SBQ: Tensor) -> Tensor:
        return self.linear_q_up_proj(self.q_layernorm(latent_SBQ)).unflatten(-1, (self.config.num_heads, -1))

    def _make_q(self, rotation: "QueryRotation", latent_SBQ: Tensor) -> Tensor:
        return rotation.apply(self._raw_q(latent_SBQ))[0]

    def _tables(self, mb: MicrobatchContext) -> tuple[Tensor, Tensor]:
        assert mb.rotary is not None, "the rotary tables are not attached to the context"
        return mb.rotary[self.config.rope]

    def _tokens(self, mb: MicrobatchContext) -> VisibleTokens:
        meta, device = mb.tokens, mb.tokens.positions_BS.device
        if meta.part is None or len(meta.part.of_ranks) == 1:
            own_U = torch.arange(meta.positions_BS.shape[1], device=device)
            return VisibleTokens(own_U, meta.positions_BS, meta.segments_BS)
        own_U = torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in meta.part.chunks])
        positions_BS = self._whole(meta.positions_BS.T.contiguous(), mb).T
        return VisibleTokens(own_U, positions_BS, meta.whole_segments_BS)

    def _whole(self, x_SBC: Tensor, mb: MicrobatchContext) -> Tensor:
        """Gathers the rows of all context-parallel ranks and orders them by position."""
        part = mb.tokens.part
        if part is None or len(part.of_ranks) == 1:
            return x_SBC
        # collective over cp: all-gather of all rows; backward: reduce-scatter of their gradients
        return self.context_peers.gather(x_SBC, part, self.ctx)

    def _entries(
        self, compressor: Compressor, hidden_SBH: Tensor, mb: MicrobatchContext, tokens: VisibleTokens
    ) -> tuple[Tensor, TokenGroups]:
        values_SBC, gates_SBC = (self._whole(x, mb) for x in compressor.projections(hidden_SBH))
        groups = TokenGroups.of(self.config.ratio, len(values_SBC), tokens.segments_BS, values_SBC.device)
        return compressor(values_SBC, gates_SBC, groups, tokens.positions_BS), groups

    def _index(
        self,
        indexer: EntryIndexer,
        hidden_SBH: Tensor,
        latent_SBQ: Tensor,
        mb: MicrobatchContext,
        tokens: VisibleTokens,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the indexer's queries, its keys for all entries, and its head weights."""
        with torch.no_grad():
            latent = self.q_layernorm.forward_unquantized(latent_SBQ.detach())
            assert isinstance(latent, Tensor)
        q_UBID, w_UBI = indexer.queries(hidden_SBH, latent, mb)
        keys_EBD, _ = self._entries(indexer.compressor, hidden_SBH, mb, tokens)
        return q_UBID, indexer.rotated(keys_EBD), w_UBI
