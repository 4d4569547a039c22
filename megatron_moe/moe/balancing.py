"""Balancing losses, their path into the gradient, and the update of expert biases once per global batch.

All balancing losses are L = E * sum_e f_e P_e (Switch Transformer, arXiv 2101.03961 eq. 4): f_e the share of expert e
among all choices, P_e its mean score. L is 1 when the choices are even and E / K when all tokens choose the same K
experts alone. They differ in what f and P are taken over:

  aux_loss          one microbatch
  seq_aux_loss      each sequence by itself; mean over the sequences
  global_aux_loss   f: all ranks and all microbatches of the global batch so far; P: one microbatch

Choices and scores are those of a plain top-k, without groups, bias or dropping; their sums over tokens come from the
kernel that routes. Padding counts nowhere.

Tensor and context parallel ranks (the group "tp_cp") hold parts of one microbatch. Each has the whole f and the whole
number of tokens, but the scores of its own tokens alone: what it computes is its part of the loss, the sum over ranks
is the loss, and each rank's gradient is that of its own tokens.
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
"""Kind of balancing, and Megatron's name of its loss in the log."""


class _AttachLosses(torch.autograd.Function):
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


def attach_losses(carrier: Tensor, losses: Sequence[Tensor], coeffs: Sequence[float], scale: Tensor | float) -> Tensor:
    """Returns `carrier` unchanged; backward adds the gradient of the scalar `losses` (of one dtype), each times `scale`
    and its coefficient."""
    return _AttachLosses.apply(carrier, coeffs, scale, *losses)  # type: ignore[no-untyped-call,no-any-return]


class BatchTokens:
    """Which tokens of a microbatch are real: `valid_T` of this rank's tokens (None: all of them), and how many in every
    sequence on all ranks of `group`, which share the microbatch."""

    def __init__(self, valid_T: Tensor | None, num_local: int, batch_size: int, group: ProcessGroup) -> None:
        self.valid_T = valid_T
        self.group = group
        self.batch_size = batch_size
        self.num_whole = num_local * group.size
        """Tokens of the microbatch on all ranks of the group, padding among them."""
        self._per_sequence_B: Tensor | None = None

    def number(self) -> int | Tensor:
        """Real tokens of the microbatch, at least 1; on the device where padding hides it from the host."""
        return max(self.num_whole, 1) if self.valid_T is None else self.per_sequence().sum().clamp(min=1)

    def per_sequence(self) -> Tensor:
        """int64 [B] valid tokens per sequence, for microbatches with padding; computed on first use."""
        if self._per_sequence_B is None:
            assert self.valid_T is not None, "without padding all sequences are as long"
            # tp x cp: 8 * B bytes per layer and microbatch; no gradient flows through counts
            self._per_sequence_B = all_reduce_(self.valid_T.view(-1, self.batch_size).sum(dim=0), self.group)
        return self._per_sequence_B


class BalancingLosses:
    """One microbatch's balancing losses, from sums over this rank's tokens: of one set G of them, or per sequence.

    The shares f have no gradient, so every loss is the product of sums and weights per set and expert.
    """

    def __init__(self, sums: BalanceSums, topk: int, tokens: BatchTokens) -> None:
        self._tokens = tokens
        self._topk = topk
        self._scores_GE, self._counts_GE = sums
        self._whole_counts_GE: Tensor | None = None

    def _whole_counts(self) -> Tensor:
        """Choices per set and expert, int64 [G, E], of the whole microbatch."""
        if self._whole_counts_GE is None:
            self._whole_counts_GE = self._counts_GE
            if self._tokens.group.size > 1:
                # tp x cp: 8 * G * E bytes per layer and microbatch; no gradient flows through counts
                self._whole_counts_GE = all_reduce_(self._counts_GE.clone(), self._tokens.group)
        return self._whole_counts_GE

    def over_microbatch(self) -> Tensor:
        """The loss with shares and mean scores of this microbatch."""
        counts_GE = self._whole_counts()
        return self._mean_loss(counts_GE if len(counts_GE) == 1 else counts_GE.sum(dim=0, keepdim=True), self._topk)

    def over_sequences(self) -> Tensor:
        """Mean of the losses of the sequences, without sequences of padding alone."""
        return self._mean_loss(self._whole_counts(), self._topk)

    def with_shares_of(self, counts_E: Tensor) -> Tensor:
        """The loss with the mean scores of this microbatch and the shares of `counts_E`."""
        return self._mean_loss(counts_E[None], None)

    def _mean_loss(self, counts_GE: Tensor, choices: int | None) -> Tensor:
        """E * sum_e f_e P_e, mean over those of the sets of tokens G, which are one microbatch or its sequences, that
        have tokens.

        counts_GE: choices, of whichever tokens f is taken over; `choices`: per token of the set, None: they are others.
        """
        num_sets, num_experts = counts_GE.shape
        counts_GE = counts_GE.to(self._scores_GE.dtype)
        if self._tokens.valid_T is None:
            # sizes are known to the host, and few small kernels are left
            num_tokens = max(self._tokens.num_whole // num_sets, 1)
            scale = num_experts / (num_tokens * num_sets)
            total = counts_GE.sum().clamp(min=1) if choices is None else num_tokens * choices
            weights_GE = counts_GE * (scale / total)
        else:
            num_tokens_G = self._tokens.per_sequence()
            if num_sets == 1:
                num_tokens_G = num_tokens_G.sum(dim=0, keepdim=True)
            share_GE = counts_GE / counts_GE.sum(dim=-1, keepdim=True).clamp(min=1)
            num_held = (num_tokens_G > 0).sum().clamp(min=1)
            divisor_G = (num_tokens_G.clamp(min=1) * num_held).to(share_GE.dtype)
            weights_GE = share_GE * (num_experts / divisor_G)[:, None]
        return (self._scores_GE * weights_GE).sum()

    def counts_over(self, group: ProcessGroup) -> Tensor:
        """Choices per expert, int64 [E], over all ranks of a group that holds other microbatches too."""
        # tp x dp x cp: 8 * E bytes per layer and microbatch; no gradient flows through counts
        return all_reduce_(self._counts_GE.sum(dim=0), group)


class BalancedRouter(Protocol):
    """What `update_routers` needs of a router."""

    def batch_sums(self) -> Tensor:
        """fp64 [n]: what was counted since the last update, to be summed over ranks; n may be 0."""
        ...

    def end_batch(self, sums: Tensor, proceed: Tensor | None) -> None:
        """Updates expert bias and thresholds from the summed counts unless `proceed` is False; clears the counts."""
        ...


def update_routers(
    routers: Sequence[BalancedRouter], context: ParallelContext, *, proceed: Tensor | None = None
) -> None:
    """Updates the routers' biases and thresholds; called once per global batch, after the last backward.

    `proceed`: bool scalar on the device, False after a bad step: no update. Counts are cleared in any case.
    """
    parts = [router.batch_sums() for router in routers]
    if not parts:
        return
    flat = torch.cat(parts)
    if flat.numel():
        # tp x dp x cp: 8 bytes per expert and MoE layer of this stage
        all_reduce_(flat, context.group("tp_dp_cp"))
    for router, sums in zip(routers, torch.split(flat, [len(part) for part in parts]), strict=True):
        router.end_batch(sums, proceed)
