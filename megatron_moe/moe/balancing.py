"""Load-balancing losses, their gradient, and the update of expert biases once per global batch.

All balancing losses are L = E * sum_e f_e P_e (Switch Transformer, arXiv 2101.03961 eq. 4): f_e is the fraction of all
choices that select expert e, P_e the mean score of e. L is 1 for a balanced load and E / K if all tokens choose the
same K experts. The losses differ in the tokens over which f and P are computed:

  aux_loss          one microbatch
  seq_aux_loss      each sequence separately; L is the mean over the sequences
  global_aux_loss   f: all microbatches of all ranks in the global batch so far; P: one microbatch

The choices are the top-k of the scores alone, without group limits, expert bias or token dropping. The routing kernel
sums choices and scores over tokens. Padding tokens are not counted.

Tensor and context parallel ranks (the group "tp_cp") hold parts of one microbatch. Each rank has f and the number of
tokens of the whole microbatch, but only the scores of its local tokens. It computes a partial loss and the gradient of
its local tokens; the loss is the sum over ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_moe.kernels.ops import BalanceSums
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.collectives import all_reduce_, sum_counts
from megatron_moe.parallel.context import ParallelContext, ProcessGroup
from megatron_moe.parallel.tensor_parallel import reduce_from


class AttachLosses(AutogradFunction):
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


class WeightedScores(NamedTuple):
    """Loss sum(scores_GE * weights_GE), differentiable only with respect to the scores."""

    scores_GE: Tensor
    weights_GE: Tensor
    """Weight of each score, [G, E] or [1, E]."""

    def terms(self) -> Tensor:
        """Terms of the sum that is the loss, [G, E], without gradients."""
        return self.scores_GE.detach() * self.weights_GE


class AttachWeightedScores(AutogradFunction):
    """Variant of `AttachLosses` for one `WeightedScores`, which does not compute the sum."""

    @staticmethod
    def forward(
        ctx: Any, carrier: Tensor, coeff: float, scale: Tensor | float, scores_GE: Tensor, weights_GE: Tensor
    ) -> Tensor:
        ctx.coeff, ctx.scale, ctx.weights_GE = coeff, scale, weights_GE.expand_as(scores_GE)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = ctx.scale.to(ctx.weights_GE.dtype) if isinstance(ctx.scale, Tensor) else ctx.scale
        return grads[0], None, None, ctx.weights_GE * (scale * ctx.coeff), None


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

    def num_tokens(self) -> int | Tensor:
        """Number of valid tokens of the microbatch, at least 1. With a padding mask, it is a scalar on the device."""
        return max(self.num_whole, 1) if self.valid_T is None else self.per_sequence().sum().clamp(min=1)

    def per_sequence(self) -> Tensor:
        """Number of valid tokens of each sequence, int32 [B], computed at the first call. Requires a padding mask."""
        if self._per_sequence_B is None:
            assert self.valid_T is not None, "counts per sequence need a padding mask"
            own_B = self.valid_T.view(-1, self.batch_size).sum(dim=0, dtype=torch.int32)
            # collective over tp x cp: 4 * B bytes per layer and microbatch; no gradient flows through counts
            self._per_sequence_B = all_reduce_(own_B, self.group)
        return self._per_sequence_B


class BalancingLosses:
    """Load of the experts in one microbatch, from which registered balancing losses are computed (`Balancing`).

    It has sums of scores and choices over G sets of this rank's tokens; G is 1 (all tokens are one set) or B (each
    sequence is one set). The built-in losses are weighted sums of the local score sums, because the fractions f have no
    gradient. A loss that is not linear in the mean scores uses `fractions` and `mean_scores`."""

    def __init__(
        self, sums: BalanceSums, topk: int, tokens: BatchTokens, batch_counts: Callable[[Tensor], Tensor]
    ) -> None:
        """`batch_counts`: adds this microbatch's choices, int32 [E], of all ranks and returns those of the global
        batch. It may overwrite its argument."""
        self._tokens = tokens
        self._topk = topk
        self._scores_GE, self._counts_GE = sums
        self._batch_counts = batch_counts
        self._whole_counts_GE: Tensor | None = None

    def fractions(self, *, per_sequence: bool = False) -> Tensor:
        """f [G, E]: fraction of the choices in the microbatch, or in each sequence, that select expert e; sums to 1."""
        counts_GE = self._whole_counts() if per_sequence else self._whole_counts().sum(dim=0, keepdim=True)
        return counts_GE.to(self._scores_GE.dtype) / counts_GE.sum(dim=-1, keepdim=True).clamp(min=1)

    def mean_scores(self, *, per_sequence: bool = False) -> Tensor:
        """P [G, E]: mean normalised score of expert e over the tokens of the microbatch, or of each sequence.
        Differentiable; its backward gives the gradients of this rank's tokens."""
        scores_GE = self._scores_GE if per_sequence else self._scores_GE.sum(dim=0, keepdim=True)
        # collective over tp x cp: G * E values in the internal dtype per layer and microbatch; backward: identity
        scores_GE = reduce_from(scores_GE, self._tokens.group)
        if self._tokens.valid_T is None:
            return scores_GE / max(self._tokens.num_whole // len(scores_GE), 1)
        num_tokens_G = self._tokens.per_sequence() if per_sequence else self._tokens.per_sequence().sum(0, keepdim=True)
        return scores_GE / num_tokens_G.clamp(min=1)[:, None]

    def _whole_counts(self) -> Tensor:
        """Number of choices of each expert per set of tokens, summed over the ranks of the microbatch, [G, E]."""
        if self._whole_counts_GE is None:
            # collective over tp x cp: 4 * G * E bytes per layer and microbatch; no gradient flows through counts
            self._whole_counts_GE = sum_counts(self._counts_GE, self._tokens.group)
        return self._whole_counts_GE

    def aux_loss(self) -> WeightedScores:
        """Loss of `aux_loss`: load fractions f and mean scores P are both computed over this microbatch."""
        counts_GE = self._whole_counts()
        return self._mean_loss(counts_GE if len(counts_GE) == 1 else counts_GE.sum(dim=0, keepdim=True), self._topk)

    def seq_aux_loss(self) -> WeightedScores:
        """Loss of `seq_aux_loss`: mean of the losses of the individual sequences that have valid tokens."""
        return self._mean_loss(self._whole_counts(), self._topk)

    def global_aux_loss(self) -> WeightedScores:
        """Loss of `global_aux_loss`: P is computed over this microbatch, f over the global batch so far."""
        return self._mean_loss(self._batch_counts(self._counts_GE.sum(dim=0, dtype=torch.int32))[None], None)

    def _mean_loss(self, counts_GE: Tensor, choices: int | None) -> WeightedScores:
        """E * sum_e f_e P_e, averaged over the sets (the microbatch or its sequences) that have valid tokens.

        `counts_GE`: choices per set and expert, from which f is computed. `choices`: K if `counts_GE` counts only the
        choices of this microbatch; None if it includes other microbatches.
        """
        num_sets, num_experts = counts_GE.shape
        dtype = self._scores_GE.dtype
        if self._tokens.valid_T is None:
            # the number of tokens is available on the host, which saves small kernels
            num_tokens = max(self._tokens.num_whole // num_sets, 1)
            scale = num_experts / (num_tokens * num_sets)
            if choices is None:
                counts_GE = counts_GE.to(dtype)
                return WeightedScores(self._scores_GE, counts_GE * (scale / counts_GE.sum().clamp(min=1)))
            # the dtype of an integer tensor times a number is torch's default dtype
            if dtype is not torch.get_default_dtype():
                counts_GE = counts_GE.to(dtype)
            return WeightedScores(self._scores_GE, counts_GE * (scale / (num_tokens * choices)))
        counts_GE = counts_GE.to(dtype)
        num_tokens_G = self._tokens.per_sequence()
        if num_sets == 1:
            num_tokens_G = num_tokens_G.sum(dim=0, keepdim=True)
        share_GE = counts_GE / counts_GE.sum(dim=-1, keepdim=True).clamp(min=1)
        num_held = (num_tokens_G > 0).sum().clamp(min=1)
        divisor_G = (num_tokens_G.clamp(min=1) * num_held).to(share_GE.dtype)
        return WeightedScores(self._scores_GE, share_GE * (num_experts / divisor_G)[:, None])


class BalancedRouter(Protocol):
    """Interface of a router that `update_routers` updates."""

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
        # collective over tp x dp x cp: 8 bytes per expert and MoE layer of this stage
        all_reduce_(flat, context.group("tp_dp_cp"))
    for router, sums in zip(routers, flat.split([len(part) for part in parts]), strict=True):
        router.end_batch(sums, apply_update)
