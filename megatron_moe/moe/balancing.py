"""Load-balancing losses, their gradient, and the update of expert biases once per global batch.

All balancing losses are L = E * sum_e f_e P_e (Switch Transformer, arXiv 2101.03961 eq. 4): f_e the share of expert e
among all choices, P_e its mean score. L is 1 for an even load and E / K when all tokens choose the same K experts. The
losses differ in the tokens over which f and P are computed:

  aux_loss          one microbatch
  seq_aux_loss      each sequence separately; mean over the sequences
  global_aux_loss   f: all ranks and all microbatches of the global batch so far; P: one microbatch

Choices and scores are those of plain top-k, without groups, bias or dropping; the routing kernel sums them over tokens.
Padding is not counted.

Tensor and context parallel ranks (the group "tp_cp") hold parts of one microbatch. Each rank has the global f and
number of tokens but only the scores of its local tokens. It computes a part of the loss and the gradient of its local
tokens; the loss is the sum over ranks.
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
"""Balancing method and Megatron's name of its loss in the log."""


class AttachLosses(torch.autograd.Function):
    """Identity on `carrier` whose backward adds the scalars `losses` (of one dtype) to the objective, each weighted by
    `scale` times its coefficient. Their sum is not computed."""

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
    """Number of valid tokens of a microbatch that the ranks of `group` share; `valid_T`: this rank's tokens, None if
    all are valid."""

    def __init__(self, valid_T: Tensor | None, num_local: int, batch_size: int, group: ProcessGroup) -> None:
        self.valid_T = valid_T
        self.group = group
        self.batch_size = batch_size
        self.num_whole = num_local * group.size
        """Number of tokens of the microbatch over the group, including padding."""
        self._per_sequence_B: Tensor | None = None

    def number(self) -> int | Tensor:
        """Number of valid tokens of the microbatch, at least 1; a device scalar if there is padding."""
        return max(self.num_whole, 1) if self.valid_T is None else self.per_sequence().sum().clamp(min=1)

    def per_sequence(self) -> Tensor:
        """Valid tokens per sequence, int64 [B]; computed on first use."""
        if self._per_sequence_B is None:
            assert self.valid_T is not None, "without padding all sequences have the same length"
            # tp x cp: 8 * B bytes per layer and microbatch; no gradient flows through counts
            self._per_sequence_B = all_reduce_(self.valid_T.view(-1, self.batch_size).sum(dim=0), self.group)
        return self._per_sequence_B


class BalancingLosses:
    """Balancing losses of one microbatch from sums over this rank's tokens, per set G of tokens (all, or a sequence).

    The shares f have no gradient, so every loss is a product of sums and weights per set and expert.
    """

    def __init__(self, sums: BalanceSums, topk: int, tokens: BatchTokens) -> None:
        self._tokens = tokens
        self._topk = topk
        self._scores_GE, self._counts_GE = sums
        self._whole_counts_GE: Tensor | None = None

    def _whole_counts(self) -> Tensor:
        """Choices per set and expert over the whole microbatch, int64 [G, E]."""
        if self._whole_counts_GE is None:
            self._whole_counts_GE = self._counts_GE
            if self._tokens.group.size > 1:
                # tp x cp: 8 * G * E bytes per layer and microbatch; no gradient flows through counts
                self._whole_counts_GE = all_reduce_(self._counts_GE.clone(), self._tokens.group)
        return self._whole_counts_GE

    def over_microbatch(self) -> Tensor:
        """Loss from the shares and mean scores of this microbatch (aux_loss)."""
        counts_GE = self._whole_counts()
        return self._mean_loss(counts_GE if len(counts_GE) == 1 else counts_GE.sum(dim=0, keepdim=True), self._topk)

    def over_sequences(self) -> Tensor:
        """Mean of the losses of the sequences (seq_aux_loss); sequences without valid tokens are skipped."""
        return self._mean_loss(self._whole_counts(), self._topk)

    def with_shares_of(self, counts_E: Tensor) -> Tensor:
        """Loss from the mean scores of this microbatch and the shares of `counts_E` (global_aux_loss)."""
        return self._mean_loss(counts_E[None], None)

    def _mean_loss(self, counts_GE: Tensor, choices: int | None) -> Tensor:
        """E * sum_e f_e P_e, averaged over the sets G (the microbatch or its sequences) that have tokens.

        counts_GE: choices of the tokens over which f is taken; `choices`: choices per token of the set, None if f is
        taken over other tokens.
        """
        num_sets, num_experts = counts_GE.shape
        counts_GE = counts_GE.to(self._scores_GE.dtype)
        if self._tokens.valid_T is None:
            # host-known sizes leave few small kernels
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
        """Choices per expert over the ranks of a group that holds several microbatches, int64 [E]."""
        # tp x dp x cp: 8 * E bytes per layer and microbatch; no gradient flows through counts
        return all_reduce_(self._counts_GE.sum(dim=0), group)


class BalancedRouter(Protocol):
    """Methods of a router that `update_routers` calls."""

    def batch_sums(self) -> Tensor: ...
    def end_batch(self, sums: Tensor, proceed: Tensor | None) -> None: ...


def update_routers(
    routers: Sequence[BalancedRouter], context: ParallelContext, *, proceed: Tensor | None = None
) -> None:
    """Updates the expert biases and thresholds of all routers, once per global batch after the last backward.

    `proceed`: bool device scalar, False after a bad step: nothing is updated, but the statistics are reset.
    """
    if not routers:
        return
    parts = [router.batch_sums() for router in routers]
    flat = torch.cat(parts)
    if flat.numel():
        # tp x dp x cp: 8 bytes per expert and MoE layer of this stage
        all_reduce_(flat, context.group("tp_dp_cp"))
    for router, sums in zip(routers, flat.split([len(part) for part in parts]), strict=True):
        router.end_batch(sums, proceed)
