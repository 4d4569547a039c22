"""Op `route`: autograd Function and launches of the forward and backward kernels."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from megatron_moe.config.moe import RouterConfig
from megatron_moe.kernels.backends.torch_native import backend as torch_native
from megatron_moe.kernels.backends.triton.launch import cdiv, num_sms, power_of_two
from megatron_moe.kernels.backends.triton.routing.backward import route_backward
from megatron_moe.kernels.backends.triton.routing.forward import route_forward
from megatron_moe.kernels.ops import BalanceSums, RoutedTokens, internal_dtype
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.reference.routing import EPSILON
from megatron_moe.parallel.autograd_function import AutogradFunction

FORWARD_TILE, BACKWARD_TILE = 2048, 1024
"""Number of elements (tokens times columns) of an fp32 tile. An fp64 tile has half as many elements."""
FORWARD_PROGRAMS = 4
"""Forward programs per SM. Their number is small: the last program to finish adds all partial sums."""


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    config: RouterConfig,
    *,
    forced_ids_TK: Tensor | None = None,
    valid_T: Tensor | None = None,
    balance_sets: int = 0,
    z: bool = False,
) -> RoutedTokens:
    if not len(logits_TE) or not config.scores.fused:
        plain = torch_native.recomputed_route if len(logits_TE) else reference.route
        return plain(
            logits_TE, bias_E, config, forced_ids_TK=forced_ids_TK, valid_T=valid_T, balance_sets=balance_sets, z=z
        )
    probs_TK, scores_GE, z_sum, ids_TK, counts = _Route.apply(
        logits_TE, bias_E, forced_ids_TK, valid_T, config, balance_sets, z
    )
    num_experts = config.num_experts
    balance = None
    if balance_sets:
        balance = BalanceSums(scores_GE, counts[num_experts:-1].view(balance_sets, num_experts))
    return RoutedTokens(ids_TK, probs_TK, counts[:num_experts], balance, z_sum)


class _Route(AutogradFunction):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        bias_E: Tensor | None,
        forced_ids_TK: Tensor | None,
        valid_T: Tensor | None,
        config: RouterConfig,
        balance_sets: int,
        z: bool,
    ) -> tuple[Tensor | None, ...]:
        logits_TE = logits_TE.contiguous()
        valid_T = None if valid_T is None else valid_T.contiguous()
        (num_tokens, num_experts), device, sets = logits_TE.shape, logits_TE.device, max(balance_sets, 1)
        assert num_tokens % sets == 0, f"{num_tokens} tokens in {sets} sets"
        groups = config.num_groups or 1 if config.group_topk else 1
        columns = power_of_two(groups), power_of_two(num_experts // groups)
        wide = internal_dtype(logits_TE.dtype)
        tokens = _tokens(FORWARD_TILE, columns[0] * columns[1], wide)
        most_programs = FORWARD_PROGRAMS * num_sms(device)
        # every set of tokens gets the same number of programs
        programs = sets * max(min(cdiv(num_tokens // sets, tokens), most_programs // sets), 1)
        # counts per expert, plain top-k counts per set for balancing, and the counter of finished programs
        counts = torch.zeros((1 + balance_sets) * num_experts + 1, device=device, dtype=torch.int64)
        ids_TK = torch.empty(num_tokens, config.topk, device=device, dtype=torch.int64)
        probs_TK = torch.empty(num_tokens, config.topk, device=device, dtype=logits_TE.dtype)
        scores_GE = torch.empty(balance_sets, num_experts, device=device, dtype=wide) if balance_sets else None
        z_sum = torch.empty((), device=device, dtype=wide) if z else None
        with_sums = balance_sets > 0 or z
        shares = torch.empty(programs * (num_experts + 1), device=device, dtype=wide) if with_sums else None
        route_forward[(programs,)](
            logits_TE, bias_E, forced_ids_TK if forced_ids_TK is None else forced_ids_TK.contiguous(), valid_T,
            ids_TK, probs_TK, counts, shares, scores_GE, z_sum, num_tokens, num_experts, sets,
            BIASED=bias_E is not None, REPLAYED=forced_ids_TK is not None, MASKED=valid_T is not None,
            BALANCE=balance_sets > 0, Z=z, CHOICES=power_of_two(config.topk), NUM_GROUPS=groups,
            GROUP_TOPK=config.group_topk or 0, TOKENS=tokens, GROUPS=columns[0], SIZE=columns[1],
            INT=tl.int64 if wide is torch.float64 else tl.int32, HIGHEST=2 ** (8 * wide.itemsize - 1) - 1,
            **_kind(config, wide),
        )  # fmt: skip
        ctx.save_for_backward(logits_TE, ids_TK, valid_T)
        ctx.config, ctx.sets = config, sets
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ids_TK, counts)
        return probs_TK, scores_GE, z_sum, ids_TK, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_probs_TK, grad_scores_GE, grad_z = (None if grad is None else grad.contiguous() for grad in grads[:3])
        logits_TE, ids_TK, valid_T = ctx.saved_tensors
        num_tokens, num_experts = logits_TE.shape
        experts, wide = power_of_two(num_experts), internal_dtype(logits_TE.dtype)
        tokens = _tokens(BACKWARD_TILE, experts, wide)
        grad_TE = torch.empty_like(logits_TE)
        route_backward[(cdiv(num_tokens, tokens),)](
            grad_probs_TK, grad_scores_GE, grad_z, logits_TE, ids_TK, valid_T, grad_TE,
            num_tokens, num_experts, ctx.sets,
            PROBS=grad_probs_TK is not None, BALANCE=grad_scores_GE is not None, Z=grad_z is not None,
            MASKED=valid_T is not None, TOKENS=tokens, EXPERTS=experts,
            **_kind(ctx.config, wide),
        )  # fmt: skip
        return grad_TE, None, None, None, None, None, None


def _tokens(tile: int, columns: int, wide: torch.dtype) -> int:
    """Number of tokens per tile."""
    return max(tile * torch.float32.itemsize // wide.itemsize // columns, 1)


def _kind(config: RouterConfig, wide: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments that the forward and the backward kernel share."""
    return {
        "TOPK": config.topk,
        "SCORE": config.score_function,
        "ON_LOGITS": config.selects_on_logits,
        "NORMALISED": not config.scores.over_experts and config.topk > 1,
        "SCALING": 1.0 if config.scaling_factor is None else float(config.scaling_factor),
        "EPSILON": EPSILON,
        "WIDE": tl.float64 if wide is torch.float64 else tl.float32,
    }
