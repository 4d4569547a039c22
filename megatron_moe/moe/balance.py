"""Losses that keep the experts evenly used, how they enter the gradient, and the update once per global batch.

All balancing losses are L = E * sum_e f_e P_e (Switch Transformer, arXiv 2101.03961 eq. 4): f_e the share of expert e
among all choices, P_e its mean score. L is 1 when the choices are even and E / K when all tokens choose the same K
experts alone. They differ in what f and P are taken over:

  aux_loss          one rank's microbatch
  seq_aux_loss      each sequence by itself; mean over the sequences
  global_aux_loss   f: all ranks and all microbatches of the global batch so far; P: one rank's microbatch

Choices and scores are those of a plain top-k, without groups, bias or dropping. Padding counts nowhere.
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


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, scale: Tensor | float) -> Tensor:
        ctx.scale, ctx.loss_dtype = scale, loss.dtype
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight = torch.ones((), dtype=ctx.loss_dtype, device=grads[0].device) * ctx.scale
        return grads[0], weight.to(ctx.loss_dtype), None


def attach_loss(carrier: Tensor, loss: Tensor, scale: Tensor | float) -> Tensor:
    """`carrier`, unchanged; in the backward the scalar `loss` takes part in the objective with weight `scale`."""
    return _AttachLoss.apply(carrier, loss, scale)  # type: ignore[no-untyped-call,no-any-return]


def z_loss(logits_TE: Tensor, valid_T: Tensor | None) -> Tensor:
    """Mean over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906 eq. 5). Scalar, without coefficient."""
    squares_T = logits_TE.to(internal_dtype(logits_TE.dtype)).logsumexp(dim=-1).square()
    if valid_T is None:
        return squares_T.mean()
    return torch.where(valid_T, squares_T, 0).sum() / valid_T.sum().clamp(min=1)


def load_balancing_loss(counts_GE: Tensor, score_sums_GE: Tensor, num_tokens_G: Tensor) -> Tensor:
    """E * sum_e f_e P_e for each set of tokens G; 0 for a set without tokens.

    counts_GE: choices per expert, of whichever tokens f is taken over; score_sums_GE: sum of the scores over the
    `num_tokens_G` tokens that P is taken over.
    """
    counts_GE = counts_GE.to(score_sums_GE.dtype)
    share_GE = counts_GE / counts_GE.sum(dim=-1, keepdim=True).clamp(min=1)
    mean_GE = score_sums_GE / num_tokens_G.clamp(min=1)[..., None]
    return counts_GE.shape[-1] * (share_GE * mean_GE).sum(dim=-1)


class BalancingLosses:
    """What one microbatch's balancing losses are computed from: scores [T, E] that sum to 1 per token, and choices."""

    def __init__(
        self, kernels: Kernels, scores_TE: Tensor, ids_TK: Tensor, valid_T: Tensor | None, batch_size: int
    ) -> None:
        self._kernels = kernels
        self._batch_size = batch_size
        self._num_experts = scores_TE.shape[1]
        if valid_T is None:
            valid_T = torch.ones(len(scores_TE), dtype=torch.bool, device=scores_TE.device)
        else:
            scores_TE = scores_TE * valid_T[:, None]
            ids_TK = ids_TK.masked_fill(~valid_T[:, None], -1)
        self._scores_TE = scores_TE
        self._ids_TK = ids_TK
        self._valid_T = valid_T

    def counts(self) -> Tensor:
        """Choices per expert, int64 [E]."""
        return self._kernels.count_tokens(self._ids_TK, self._num_experts)

    def over_microbatch(self, counts_E: Tensor) -> Tensor:
        """The loss with the mean scores of this microbatch and the shares of `counts_E`."""
        return load_balancing_loss(counts_E, self._scores_TE.sum(dim=0), self._valid_T.sum())

    def over_sequences(self) -> Tensor:
        """Mean of the losses of the sequences. A sequence of padding alone is no sequence."""
        batch, experts = self._batch_size, self._num_experts
        # every sequence gets experts of its own: token t belongs to sequence t % B
        sequence_T = torch.arange(len(self._ids_TK), device=self._ids_TK.device) % batch
        ids_TK = torch.where(self._ids_TK < 0, -1, self._ids_TK + (sequence_T * experts)[:, None])
        counts_BE = self._kernels.count_tokens(ids_TK, batch * experts).view(batch, experts)
        score_sums_BE = self._scores_TE.view(-1, batch, experts).sum(dim=0)
        num_tokens_B = self._valid_T.view(-1, batch).sum(dim=0)
        losses_B = load_balancing_loss(counts_BE, score_sums_BE, num_tokens_B)
        return losses_B.sum() / (num_tokens_B > 0).sum().clamp(min=1)


def add_global_counts_(running_E: Tensor, counts_E: Tensor, group: Group) -> Tensor:
    """Adds the counts of all ranks to the running counts of this global batch, in place."""
    # tp x dp x cp: 8 * E bytes per layer and microbatch; no gradient flows through counts
    return running_E.add_(all_reduce_(counts_E.clone(), group))


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
