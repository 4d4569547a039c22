"""Load-balancing losses, their gradient, and the update of expert biases once per global batch.

All balancing losses are L = E * sum_e f_e P_e (Switch Transformer, arXiv 2101.03961 eq. 4): f_e is the fraction of all
choices that select expert e, P_e the mean score of e. L is 1 for an even load and E / K if all tokens choose the same K
experts. The losses differ in the tokens over which f and P are computed:

  aux_loss          one microbatch
  seq_aux_loss      each sequence separately; L is the mean over the sequences
  global_aux_loss   f: all microbatches of all ranks in the global batch so far; P: one microbatch

The choices are the top-k of the scores alone, without group limits, expert bias or token dropping. The routing kernel
sums choices and scores over tokens. Padding tokens are not counted.

Tensor and context parallel ranks (the group "tp_cp") hold parts of one microbatch. Each rank has f and the number of
tokens of the whole microbatch, but only the scores of its local tokens. It computes a partial loss and the gradient of
its local tokens; the loss is the sum over ranks.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_moe.config.moe import Balancing
from megatron_moe.kernels.ops import BalanceSums
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext, ProcessGroup

LOSS_NAMES: tuple[tuple[Balancing, str], ...] = (
    ("aux_loss", "load_balancing_loss"),
    ("seq_aux_loss", "seq_load_balancing_loss"),
    ("global_aux_loss", "global_load_balancing_loss"),
)
"""(balancing method, name of its loss in the log, as in Megatron)."""


class AttachLosses(torch.autograd.Function):
    """Returns its first input unchanged and, in backward, passes `scale * coeffs[i]` as gradient to each scalar loss i,
    as if the weighted losses were added to the objective. All losses have the same dtype."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, coeffs: Sequence[float], scale: Tensor | float, *losses: Tensor) -> Tensor:
        ctx.coeffs, ctx.scale, ctx.dtype = coeffs, scale, losses[0].dtype
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if isinstance(ctx.scale, Tensor):
            scale = ctx.scale.to(ctx.dtype)
            return grads[0], None, None, *(scale * coeff for coeff in ctx.coeffs)
        weights = [ctx.scale * coeff for coeff in ctx.coeffs]
        return grads[0], None, None, *(torch.full((), w, dtype=ctx.dtype, device=grads[0].device) for w in weights)


class BatchTokens:
    """Counts the valid (non-padding) tokens of a microbatch whose tokens are split over the ranks of `group`.
    `valid_T`: bool mask of this rank's tokens; None if all are valid."""

    def __init__(self, valid_T: Tensor | None, num_local: int, batch_size: int, group: ProcessGroup) -> None:
        self.valid_T = valid_T
        self.group = group
        self.batch_size = batch_size
        self.num_whole = num_local * group.size
        """Number of tokens of the microbatch on all ranks of the group, including padding."""
        self._per_sequence_B: Tensor | None = None

    def number(self) -> int | Tensor:
        """Number of valid tokens of the microbatch, at least 1. With a padding mask, it is a scalar on the device."""
        return max(self.num_whole, 1) if self.valid_T is None else self.per_sequence().sum().clamp(min=1)

    def per_sequence(self) -> Tensor:
        """Number of valid tokens of each sequence, int64 [B], computed at the first call. Requires a padding mask."""
        if self._per_sequence_B is None:
            assert self.valid_T is not None, "per-sequence counts need a padding mask"
            # tp x cp: 8 * B bytes per layer and microbatch; no gradient flows through counts
            self._per_sequence_B = all_reduce_(self.valid_T.view(-1, self.batch_size).sum(dim=0), self.group)
        return self._per_sequence_B


class BalancingLosses:
    """Balancing losses of one microbatch, computed from sums of scores and choices over G sets of this rank's tokens.

    G is 1 (all tokens are one set) or B (each sequence is one set). The fractions f have no gradient, so every loss is
    a weighted sum of the score sums."""

    def __init__(self, sums: BalanceSums, topk: int, tokens: BatchTokens) -> None:
        self._tokens = tokens
        self._topk = topk
        self._scores_GE, self._counts_GE = sums
        self._whole_counts_GE: Tensor | None = None

    def _whole_counts(self) -> Tensor:
        """Number of choices of each expert per set of tokens, summed over the ranks of the microbatch: int64 [G, E]."""
        if self._whole_counts_GE is None:
            self._whole_counts_GE = self._counts_GE
            if self._tokens.group.size > 1:
                # tp x cp: 8 * G * E bytes per layer and microbatch; no gradient flows through counts
                self._whole_counts_GE = all_reduce_(self._counts_GE.clone(), self._tokens.group)
        return self._whole_counts_GE

    def over_microbatch(self) -> Tensor:
        """Loss of `aux_loss`: load fractions f and mean scores P are both computed over this microbatch."""
        counts_GE = self._whole_counts()
        return self._mean_loss(counts_GE if len(counts_GE) == 1 else counts_GE.sum(dim=0, keepdim=True), self._topk)

    def over_sequences(self) -> Tensor:
        """Loss of `seq_aux_loss`: mean of the losses of the individual sequences that have valid tokens."""
        return self._mean_loss(self._whole_counts(), self._topk)

    def with_shares_of(self, counts_E: Tensor) -> Tensor:
        """Loss of `global_aux_loss`: mean scores P are of this microbatch; load fractions f follow from `counts_E`."""
        return self._mean_loss(counts_E[None], None)

    def _mean_loss(self, counts_GE: Tensor, choices: int | None) -> Tensor:
        """E * sum_e f_e P_e, averaged over the sets (the microbatch or its sequences) that have valid tokens.

        `counts_GE`: choices per set and expert, from which f is computed. `choices`: K if `counts_GE` counts only the
        choices of this microbatch; None if it includes other microbatches.
        """
        num_sets, num_experts = counts_GE.shape
        counts_GE = counts_GE.to(self._scores_GE.dtype)
        if self._tokens.valid_T is None:
            # the host knows the number of tokens, so fewer small kernels are launched
            num_tokens = max(self._tokens.num_whole // num_sets, 1)
            scale = num_experts / (num_tokens * num_sets)
            total = counts_GE.sum().clamp(min=1) if choices is None else num_tokens * choices
            return (self._scores_GE * (counts_GE * (scale / total))).sum()
        num_tokens_G = self._tokens.per_sequence()
        if num_sets == 1:
            num_tokens_G = num_tokens_G.sum(dim=0, keepdim=True)
        share_GE = counts_GE / counts_GE.sum(dim=-1, keepdim=True).clamp(min=1)
        num_held = (num_tokens_G > 0).sum().clamp(min=1)
        divisor_G = (num_tokens_G.clamp(min=1) * num_held).to(share_GE.dtype)
        return (self._scores_GE * (share_GE * (num_experts / divisor_G)[:, None])).sum()

    def counts_over(self, group: ProcessGroup) -> Tensor:
        """Number of choices per expert, int64 [E], summed over the current microbatches of all ranks of `group`."""
        # tp x dp x cp: 8 * E bytes per layer and microbatch; no gradient flows through counts
        return all_reduce_(self._counts_GE.sum(dim=0), group)


class BalancedRouter(Protocol):
    """Methods of a router that `update_routers` calls."""

    def batch_sums(self) -> Tensor: ...
    def end_batch(self, sums: Tensor, apply_update: Tensor | None) -> None: ...


def update_routers(
    routers: Sequence[BalancedRouter], context: ParallelContext, *, apply_update: Tensor | None = None
) -> None:
    """Updates expert biases and quantile thresholds of all routers; called after the last backward of a global batch.

    `apply_update`: bool scalar on the device; if False (the step is skipped), only the statistics are reset.
    """
    if not routers:
        return
    parts = [router.batch_sums() for router in routers]
    flat = torch.cat(parts)
    if flat.numel():
        # tp x dp x cp: 8 bytes per expert and MoE layer of this stage
        all_reduce_(flat, context.group("tp_dp_cp"))
    for router, sums in zip(routers, flat.split([len(part) for part in parts]), strict=True):
        router.end_batch(sums, apply_update)
