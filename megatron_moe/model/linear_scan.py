"""Ops of linear-attention mixers over whole sequences, or over the chunks of this rank (chunkwise context parallelism).

A chunk of positions changes the recurrent state of a head from S to P S + Q. Ranks compute P and Q of their chunks and
all-gather them. Each rank then adds to its outputs the contribution of the state before each of its chunks (arXiv
2404.02882, 2501.08313).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_moe.kernels.ops import Kernels, internal_dtype
from megatron_moe.parallel.context import ProcessGroup
from megatron_moe.parallel.context_parallel import SequencePart
from megatron_moe.parallel.tensor_parallel import all_gather

_LONG = 2.0**20
"""Norm of basis vectors that are passed as rows of q or k; large enough that the epsilon of their normalisation is
negligible."""


class Scan(Protocol):
    """The ops of a recurrence on this rank's positions and heads."""

    num_shares: int
    """Number of context-parallel ranks over which the heads of this tensor-parallel rank are divided equally."""

    def slice_for_local_heads(self, parameter: Tensor, sections: Sequence[int] = ()) -> Tensor:
        """Slice of a parameter of this tensor-parallel rank for the heads that this rank computes. `sections`: sizes of
        parts of dim 0, each of which is divided equally over the ranks; empty: dim 0 is one part."""

    def short_conv(self, x_SBC: Tensor, weight_CK: Tensor, bias_C: Tensor | None) -> Tensor: ...

    def linear_attention(
        self,
        q_SBND: Tensor,
        k_SBND: Tensor,
        v_SBME: Tensor,
        log_decay_SBM: Tensor,
        beta_SBM: Tensor | None,
        scale: float,
        eps: float | None = None,
    ) -> Tensor:
        """See `Kernels.linear_attention`. Decays per channel need `beta_SBM`."""


class WholeSequences:
    """Ops over whole sequences. This rank computes all local heads or, with `group`, its share of them."""

    def __init__(self, kernels: Kernels, segments_BS: Tensor | None, group: ProcessGroup | None = None) -> None:
        self._kernels, self._segments_BS, self._group = kernels, segments_BS, group
        self.num_shares = 1 if group is None else group.size

    def slice_for_local_heads(self, parameter: Tensor, sections: Sequence[int] = ()) -> Tensor:
        if self._group is None:
            return parameter
        parts = parameter.split(list(sections)) if sections else [parameter]
        return torch.cat([part.chunk(self._group.size)[self._group.rank] for part in parts])

    def short_conv(self, x_SBC: Tensor, weight_CK: Tensor, bias_C: Tensor | None) -> Tensor:
        return self._kernels.short_conv(x_SBC, weight_CK, bias_C, self._segments_BS)

    def linear_attention(
        self,
        q_SBND: Tensor,
        k_SBND: Tensor,
        v_SBME: Tensor,
        log_decay_SBM: Tensor,
        beta_SBM: Tensor | None,
        scale: float,
        eps: float | None = None,
    ) -> Tensor:
        inputs = (q_SBND, k_SBND, v_SBME, log_decay_SBM, beta_SBM, self._segments_BS)
        return self._kernels.linear_attention(*inputs, scale, eps)


class _Transition(NamedTuple):
    """Effect of the state [D, E] before a chunk on its outputs, and on the state after it. R: chunks times
    sequences."""

    rows: Tensor
    """[L, R, M, D]: a token's row times the state is the state's contribution to its output; 0 once a new document
    begins."""
    whole: Tensor
    """P as matrices [R, M, D, D], or as factors [R, M, 1, 1]."""

    def then(self, state: Tensor) -> Tensor:
        return self.whole * state if self.whole.shape[-1] == 1 else self.whole @ state


class ChunksOverRanks:
    """Ops over this rank's chunks of sequences, with all local heads. States and the last tokens of chunks are
    gathered.

    The n chunks of a rank have equal lengths and are separate sequences for the ops, so B sequences become n * B rows.
    Gathered states have the dtype of v. Communication over the ranks of a sequence: an all-gather of n * B * (K - 1) *
    C elements, and one of n * B * M * D * (D + E), or of n * B * M * (D * E + 1) without `beta`; backward:
    reduce-scatters.
    """

    num_shares = 1

    def __init__(
        self, kernels: Kernels, part: SequencePart, group: ProcessGroup, segments_BS: Tensor | None, batch: int
    ) -> None:
        """`segments_BS`: document ids of all positions of the sequences. `batch`: number of sequences B."""
        self._kernels, self._group = kernels, group
        chunks, self._length = part.chunks, len(part.chunks[0])
        self._num = len(chunks)
        starts = [chunk.start for of_rank in part.of_ranks for chunk in of_rank]
        self._order = sorted(range(len(starts)), key=starts.__getitem__)
        """For each chunk in sequence order, its index in rank order."""
        ordered = [starts[index] for index in self._order]
        self._own = [ordered.index(chunk.start) for chunk in chunks]
        self._starts = [chunk.start for chunk in chunks]
        self._segments_BS, self._batch = segments_BS, batch

    def slice_for_local_heads(self, parameter: Tensor, sections: Sequence[int] = ()) -> Tensor:
        return parameter

    def short_conv(self, x_SBC: Tensor, weight_CK: Tensor, bias_C: Tensor | None) -> Tensor:
        seen = weight_CK.shape[1] - 1
        assert seen <= self._length, f"convolution of width {seen + 1} on chunks of {self._length} tokens"
        x = x_SBC.unflatten(0, (self._num, self._length))
        ends = self._gathered(x[:, self._length - seen :])
        before = _selected(torch.cat([torch.zeros_like(ends[:1]), ends[:-1]]), self._own)
        rows = _as_rows(torch.cat([before, x], dim=1))
        out = self._kernels.short_conv(rows, weight_CK, bias_C, self._segments(seen))
        return self._as_positions(out[seen:])

    def linear_attention(
        self,
        q_SBND: Tensor,
        k_SBND: Tensor,
        v_SBME: Tensor,
        log_decay_SBM: Tensor,
        beta_SBM: Tensor | None,
        scale: float,
        eps: float | None = None,
    ) -> Tensor:
        inputs = (q_SBND, k_SBND, v_SBME, log_decay_SBM, beta_SBM)
        q, k, v, decay, beta = (
            None if x is None else _as_rows(x.unflatten(0, (self._num, self._length))) for x in inputs
        )
        assert q is not None and k is not None and v is not None and decay is not None
        length, width = self._length, q.shape[-1]
        unit = torch.eye(width, dtype=q.dtype, device=q.device) * (1.0 if eps is None else _LONG)
        basis = unit[:, None, None].expand(-1, *q.shape[1:])
        # appended tokens whose q are the basis vectors read the state after the chunk and do not change it
        segments = self._segments(0, width)
        none, still = torch.zeros_like(basis), decay.new_zeros(width, *decay.shape[1:])
        reading = (torch.cat([q, basis]), torch.cat([k, none]))
        decays = torch.cat([decay, still])
        betas = None if beta is None else torch.cat([beta, beta.new_zeros(width, *beta.shape[1:])])
        values = torch.cat([v, v.new_zeros(width, *v.shape[1:])])
        out = self._kernels.linear_attention(*reading, values, decays, betas, segments, scale, eps)
        added = out[length:].movedim(0, 2) / scale
        if beta is None:
            transition = self._decayed(q, decay, scale)
        else:
            # prepended tokens whose k are the basis vectors, with beta 1, set the state to the identity
            ones = torch.ones(width, *beta.shape[1:], dtype=beta.dtype, device=beta.device)
            identity = torch.eye(width, dtype=v.dtype, device=v.device)[:, None, None].expand(-1, *v.shape[1:3], -1)
            no_values = v.new_zeros(length + width, *v.shape[1:3], width)
            response = self._kernels.linear_attention(
                torch.cat([none, reading[0]]),
                torch.cat([basis, reading[1]]),
                torch.cat([identity, no_values]),
                torch.cat([still, decays]),
                torch.cat([ones, *([] if betas is None else [betas])]),
                self._segments(1, width, before=width),
                scale,
                eps,
            )
            rows, after = response[width:].split([length, width])
            transition = _Transition(rows, after.movedim(0, 2) / scale)
        state = self._states_before(transition, added)
        carried = transition.rows.movedim(0, 2).to(state.dtype) @ state
        return self._as_positions(out[:length] + carried.movedim(2, 0).to(out.dtype))

    def _decayed(self, q: Tensor, log_decay: Tensor, scale: float) -> _Transition:
        """Transition of a chunk whose tokens only decay the state."""
        assert log_decay.dim() == 3, f"decays per channel without beta: {list(log_decay.shape)}"
        total = log_decay.to(internal_dtype(log_decay.dtype)).cumsum(0)
        segments = self._segments(1)
        if segments is not None:
            total = total.masked_fill((segments[:, 1:] != segments[:, :1]).T[..., None], -torch.inf)
        factor = total.exp()
        heads = q.repeat_interleave(factor.shape[2] // q.shape[2], dim=2)
        return _Transition(scale * factor[..., None] * heads, factor[-1][..., None, None])

    def _states_before(self, transition: _Transition, added: Tensor) -> Tensor:
        """State before each chunk of this rank [R, M, D, E]."""
        own = (transition.whole, added)
        wholes, sums = (self._gathered(x.unflatten(0, (self._num, self._batch))) for x in own)
        states = [torch.zeros_like(sums[0])]
        for whole, added_by in zip(wholes[:-1], sums[:-1], strict=True):
            states.append((_Transition(whole, whole).then(states[-1]) + added_by).to(added_by.dtype))
        # selected from the states of all chunks, so that the backward of the all-gather runs on every rank
        return _selected(torch.stack(states), self._own).flatten(0, 1)

    def _gathered(self, x: Tensor) -> Tensor:
        """Gathers a per-chunk tensor [n, ...] over the group and returns it for all chunks, in sequence order."""
        return _selected(all_gather(x.contiguous(), self._group), self._order)

    def _segments(self, seen: int, after: int = 0, *, before: int | None = None) -> Tensor | None:
        """Document ids of the tokens around each local chunk: `seen` tokens before it (with `before`, only the last of
        them, repeated `before` times), the chunk, and its last id repeated `after` times. Positions before the sequence
        have the id of its first token."""
        if self._segments_BS is None:
            return None
        rows = []
        for start in self._starts:
            positions = torch.arange(start - seen, start + self._length, device=self._segments_BS.device).clamp_min(0)
            chunk = self._segments_BS[:, positions]
            if before is not None:
                chunk = torch.cat([chunk[:, :1].expand(-1, before), chunk[:, 1:]], dim=1)
            rows.append(torch.cat([chunk, chunk[:, -1:].expand(-1, after)], dim=1))
        return torch.cat(rows)

    def _as_positions(self, x: Tensor) -> Tensor:
        """[L, n * B, ...] -> [n * L, B, ...]"""
        return x.unflatten(1, (self._num, self._batch)).transpose(0, 1).flatten(0, 1)


def _selected(x: Tensor, indices: Sequence[int]) -> Tensor:
    """Selects rows (dim 0). A list as an index would be copied to the device, for which the host waits."""
    rows = x.unbind()
    return torch.stack([rows[index] for index in indices])


def _as_rows(x: Tensor) -> Tensor:
    """[n, L, B, ...] -> [L, n * B, ...]"""
    return x.transpose(0, 1).flatten(1, 2)
