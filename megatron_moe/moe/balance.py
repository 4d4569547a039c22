"""Losses that keep the experts evenly used, how they enter the gradient, and the update once per global batch.

All balancing losses are L = E * sum_e f_e P_e (Switch Transformer, arXiv 2101.03961 eq. 4): f_e the share of expert e
among all choices, P_e its mean score. L is 1 when the choices are even and E / K when all tokens choose the same K
experts alone. They differ in what f and P are taken over:

  aux_loss          one microbatch
  seq_aux_loss      each sequence by itself; mean over the sequences
  global_aux_loss   f: all ranks and all microbatches of the global batch so far; P: one microbatch

Choices and scores are those of a plain top-k, without groups, bias or dropping. Padding counts nowhere.

Tensor and context parallel ranks (the group "tp_cp") hold parts of one microbatch. Each has the whole f and the whole
number of tokens, but the scores of its own tokens alone: what it computes is its part of the loss, the sum over ranks
is the loss, and each rank's gradient is that of its own tokens.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_moe.kernels.ops import Kernels, internal_dtype
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import Group, ParallelContext
from megatron_moe.specs.moe import Balancing

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
        else:
            scale = torch.full((), ctx.scale, dtype=ctx.dtype, device=grads[0].device)
        return grads[0], None, None, *(scale * coeff for coeff in ctx.coeffs)


def attach_losses(carrier: Tensor, losses: Sequence[Tensor], coeffs: Sequence[float], scale: Tensor | float) -> Tensor:
    """`carrier`, unchanged; in the backward the scalars `losses`, of one dtype, take part in the objective, each with
    weight `scale` times its coefficient. Nobody reads their sum, so it is not computed."""
    return _AttachLosses.apply(carrier, coeffs, scale, *losses)  # type: ignore[no-untyped-call,no-any-return]


class BatchTokens:
    """Which tokens of a microbatch are real: `valid_T` of this rank's tokens (None: all of them), and how many in every
    sequence on all ranks of `group`, which share the microbatch."""

    def __init__(self, valid_T: Tensor | None, num_local: int, batch_size: int, group: Group) -> None:
        self.valid_T = valid_T
        self.group = group
        self.batch_size = batch_size
        self.num_whole = num_local * group.size
        """Tokens of the microbatch on all ranks of the group, padding among them."""
        self._per_sequence_B: Tensor | None = None

    def per_sequence(self) -> Tensor:
        """int64 [B]; counted when first asked for."""
        if self._per_sequence_B is None:
            self._per_sequence_B = self._count()
        return self._per_sequence_B

    def _count(self) -> Tensor:
        if self.valid_T is None:
            return torch.full((self.batch_size,), self.num_whole // self.batch_size, device=self.group.device)
        # tp x cp: 8 * B bytes per layer and microbatch; no gradient flows through counts
        return all_reduce_(self.valid_T.view(-1, self.batch_size).sum(dim=0), self.group)


def z_loss(logits_TE: Tensor, tokens: BatchTokens) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906 eq. 5), this rank's part of it. Scalar, without
    coefficient."""
    squares_T = logits_TE.to(internal_dtype(logits_TE.dtype)).logsumexp(dim=-1).square()
    if tokens.valid_T is not None:
        squares_T = torch.where(tokens.valid_T, squares_T, 0)
    return squares_T.sum() / tokens.per_sequence().sum().clamp(min=1)


class _WeightedSum(torch.autograd.Function):
    """sum_t scores_te w_ge of the scores [T, E] of tokens t = s * G + g. The gradient is the weights themselves, which
    autograd would find by a dozen small kernels."""

    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, weights_GE: Tensor) -> Tensor:
        ctx.num_tokens = len(scores_TE)
        ctx.save_for_backward(weights_GE)
        return (scores_TE.view(-1, *weights_GE.shape).sum(dim=0) * weights_GE).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weights_GE,) = ctx.saved_tensors
        weighted_GE = grads[0] * weights_GE
        return weighted_GE.expand(ctx.num_tokens // len(weights_GE), *weights_GE.shape).flatten(0, 1), None


class BalancingLosses:
    """What one microbatch's balancing losses are computed from: scores [T, E] that sum to 1 per token, and choices, of
    this rank's tokens.

    The shares f have no gradient, so every loss is a sum of scores with a weight per set of tokens and expert.
    """

    def __init__(self, kernels: Kernels, scores_TE: Tensor, ids_TK: Tensor, tokens: BatchTokens) -> None:
        self._tokens = tokens
        self._num_experts, self._topk = scores_TE.shape[1], ids_TK.shape[1]
        if tokens.valid_T is not None:
            scores_TE = scores_TE * tokens.valid_T[:, None]
        self._scores_TE = scores_TE
        self._counts_BE = self._count(kernels, ids_TK)
        self._whole_counts_BE: Tensor | None = None

    def _count(self, kernels: Kernels, ids_TK: Tensor) -> Tensor:
        """Choices per sequence and expert on this rank, int64 [B, E]."""
        batch_size, num_experts = self._tokens.batch_size, self._num_experts
        if batch_size > 1:  # every sequence gets experts of its own: token t belongs to sequence t % B
            first_B = torch.arange(0, batch_size * num_experts, num_experts, device=ids_TK.device)
            ids_TK = (ids_TK.view(-1, batch_size, self._topk) + first_B[:, None]).flatten(0, 1)
        if self._tokens.valid_T is not None:
            ids_TK = ids_TK.masked_fill(~self._tokens.valid_T[:, None], -1)
        return kernels.count_tokens(ids_TK, batch_size * num_experts).view(batch_size, num_experts)

    def _whole_counts(self) -> Tensor:
        """Choices per sequence and expert, int64 [B, E], of the whole microbatch."""
        if self._whole_counts_BE is None:
            self._whole_counts_BE = self._counts_BE
            if self._tokens.group.size > 1:
                # tp x cp: 8 * B * E bytes per layer and microbatch; no gradient flows through counts
                self._whole_counts_BE = all_reduce_(self._counts_BE.clone(), self._tokens.group)
        return self._whole_counts_BE

    def over_microbatch(self) -> Tensor:
        """The loss with shares and mean scores of this microbatch."""
        return self._mean_loss(self._whole_counts().sum(dim=0, keepdim=True), self._topk)

    def over_sequences(self) -> Tensor:
        """Mean of the losses of the sequences. A sequence of padding alone is no sequence."""
        return self._mean_loss(self._whole_counts(), self._topk)

    def with_shares_of(self, counts_E: Tensor) -> Tensor:
        """The loss with the mean scores of this microbatch and the shares of `counts_E`."""
        return self._mean_loss(counts_E[None], None)

    def _mean_loss(self, counts_GE: Tensor, choices: int | None) -> Tensor:
        """E * sum_e f_e P_e, mean over those of the sets of tokens G, which are one microbatch or its sequences, that
        have tokens.

        counts_GE: choices, of whichever tokens f is taken over; `choices`: per token of the set, None: they are others.
        """
        num_sets = len(counts_GE)
        counts_GE = counts_GE.to(self._scores_TE.dtype)
        if self._tokens.valid_T is None:
            # sizes are known to the host, and few small kernels are left
            num_tokens = max(self._tokens.num_whole // num_sets, 1)
            scale = self._num_experts / (num_tokens * num_sets)
            total = counts_GE.sum().clamp(min=1) if choices is None else num_tokens * choices
            weights_GE = counts_GE * (scale / total)
        else:
            num_tokens_G = self._tokens.per_sequence()
            if num_sets == 1:
                num_tokens_G = num_tokens_G.sum(dim=0, keepdim=True)
            share_GE = counts_GE / counts_GE.sum(dim=-1, keepdim=True).clamp(min=1)
            num_held = (num_tokens_G > 0).sum().clamp(min=1)
            divisor_G = (num_tokens_G.clamp(min=1) * num_held).to(share_GE.dtype)
            weights_GE = share_GE * (self._num_experts / divisor_G)[:, None]
        return _WeightedSum.apply(self._scores_TE, weights_GE)  # type: ignore[no-untyped-call,no-any-return]

    def counts_over(self, group: Group) -> Tensor:
        """Choices per expert, int64 [E], over all ranks of a group that holds other microbatches too."""
        # tp x dp x cp: 8 * E bytes per layer and microbatch; no gradient flows through counts
        return all_reduce_(self._counts_BE.sum(dim=0), group)


class BalancedRouter(Protocol):
    """What `update_routers` needs of a router."""

    def batch_sums(self) -> Tensor:
        """fp64 [n]: what was counted since the last update, to be summed over ranks; n may be 0."""
        ...

    def end_batch(self, sums: Tensor, proceed: Tensor | None) -> None:
        """Moves expert bias and thresholds by the summed counts, unless `proceed` is False, and forgets the counts."""
        ...


def update_routers(
    routers: Sequence[BalancedRouter], context: ParallelContext, *, proceed: Tensor | None = None
) -> None:
    """Moves the routers' biases and thresholds; to be called once per global batch, after the last backward.

    `proceed`: bool scalar on the device, False after a bad step: then nothing moves. Counts are forgotten in any case.
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
