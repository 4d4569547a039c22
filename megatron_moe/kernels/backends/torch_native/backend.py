"""Ops based on fused torch functions: grouped_mm, scaled-dot-product attention, norms, losses and AdamW.

On GPUs, no op synchronises with the host. Measurements with `benchmarks/harness/time_kernels.py` decided which of these
ops `auto` selects; the results are in benchmarks/.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.moe import RouterConfig
from megatron_moe.kernels.attention_blocks import MaskBlock, mask_blocks
from megatron_moe.kernels.backends.torch_native import cudnn
from megatron_moe.kernels.kernel_set import Priority, Support
from megatron_moe.kernels.ops import (
    AdamWState,
    AdamWStep,
    AttentionBlock,
    AttentionInputs,
    AttentionResult,
    BalanceSums,
    GroupedPart,
    QueryKeyTransform,
    RoutedTokens,
    RowIndex,
    VocabShard,
    internal_dtype,
    mark_nonfinite,
)
from megatron_moe.kernels.permute import PermuteKernels
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.reference.attention_blocks import empty_result, merge_, no_gradients
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.precision.optimizer_state import PackedState, round_weights

NAME = "torch_native"
NEEDS = ("torch",)

_ADAMW_CHUNK = 1 << 22
"""Elements per fused AdamW update: small enough for the L2 cache and large enough to hide launch overhead."""
GROUPED = ("grouped_forward", "grouped_input_grad", "grouped_weight_grad")
BEST_ANYWHERE = (
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "query_key_value",
    "attention",
    "cross_entropy",
    "sum_of_squares",
    "adamw_",
    "adamw_packed_",
)
"""Ops that are faster than plain torch both on CPUs and on GPUs."""


def support(op: str, device: torch.device, dtype: torch.dtype) -> Support:
    """Rates this backend for one op on a device and dtype; called by `megatron_moe.kernels.registry`."""
    if dtype is torch.float64:
        return Support(Priority.NO, "fp64 is used for verification only and runs on plain torch")
    if op in GROUPED and device.type == "cuda" and dtype is not torch.bfloat16:
        return Support(Priority.NO, "torch's grouped_mm needs no host synchronisation in bfloat16 only")
    if device.type == "cpu" and op not in BEST_ANYWHERE:
        return Support(Priority.YES, "not faster on the CPU")
    reasons = {
        **dict.fromkeys(GROUPED, "grouped_mm, offsets stay on the device"),
        "linear_weight_grad": "the GEMM accumulates in the gradient buffer, in the buffer's dtype",
        "rms_norm": "fused",
        "add_rms_norm": "fused norm",
        "layer_norm": "fused",
        "query_key_value": "fused norms",
        "attention": "SDPA, on the GPU preferably with cuDNN; sinks with cuDNN; dropout in plain torch",
        "attention_block": "cuDNN on the GPU, if there is no window and no document mask",
        "attention_block_grad": "cuDNN on the GPU, if there is no window and no document mask",
        "activation": "saves only its input and recomputes the rest in backward",
        "cross_entropy": "fused",
        "router_logits": "fp32 GEMMs of bf16 operands on tensor cores",
        "permute": "gathers in forward and backward",
        "unpermute": "gathers in forward and backward",
        "sum_of_squares": "one reduction",
        "adamw_": "fused",
        "adamw_packed_": "fused AdamW between unpacking and packing",
    }
    return Support(Priority.BETTER, reasons[op])


# matrix multiplications


def linear_weight_grad(grad: Tensor, x: Tensor, out: Tensor, accumulate: bool) -> None:
    _gemm_into(out, grad.flatten(0, -2).T, x.flatten(0, -2), accumulate)


def grouped_forward(rows: Tensor, weight: Tensor, offsets_e: Tensor) -> Tensor:
    return _grouped_mm(rows, weight.transpose(1, 2), offsets_e)


def grouped_input_grad(grad: Tensor, weight: Tensor, offsets_e: Tensor) -> Tensor:
    return _grouped_mm(grad.contiguous(), weight, offsets_e)


def grouped_weight_grad(parts: Sequence[GroupedPart], out: Tensor, accumulate: bool) -> None:
    """See `Kernels.grouped_weight_grad`. `F.grouped_mm` rounds results to the operands' dtype before they are added."""
    for (grad, rows, offsets_e), adds in reference.with_accumulate(parts, accumulate):
        weight_grad = _grouped_mm(grad.contiguous().T, rows, offsets_e)
        reference.store(weight_grad, out, adds)


def _grouped_mm(a: Tensor, b: Tensor, offsets_e: Tensor) -> Tensor:
    """Calls `F.grouped_mm`, and returns zeros if `a` is empty. Raises `EnvironmentProblem` for unaligned rows."""
    if a.numel() == 0:
        return a.new_zeros((a.shape[0], b.shape[2]) if b.dim() == 3 else (len(offsets_e), a.shape[0], b.shape[1]))
    for operand in (a, b):
        stride = max(operand.stride()[-2:]) * operand.element_size()
        if stride % 16:
            raise EnvironmentProblem(
                f"Kernel backend '{NAME}' cannot compute the grouped GEMM of {tuple(a.shape)} and {tuple(b.shape)}: a "
                f"row has {stride} bytes, but grouped_mm requires a multiple of 16; make hidden and expert FFN sizes "
                f"multiples of {16 // operand.element_size()}, or use --kernel-backend {reference.NAME}."
            )
    return F.grouped_mm(a, b, offs=offsets_e)


def _gemm_into(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """Writes a @ b to `out`, or adds it if `accumulate`; the sum is computed in the dtype of `out`."""
    if a.dtype is out.dtype:
        torch.addmm(out, a, b, beta=int(accumulate), out=out)
    elif a.is_cuda:  # `out_dtype` is implemented for CUDA only
        torch.addmm(out, a, b, beta=int(accumulate), out_dtype=out.dtype, out=out)
    else:
        reference.store(a.to(out.dtype) @ b.to(out.dtype), out, accumulate)


# norms and attention


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    if zero_centered or weight.dtype is not x.dtype:
        wide = internal_dtype(x.dtype)
        scale = weight.to(wide) + (1.0 if zero_centered else 0.0)
        return F.rms_norm(x.to(wide), weight.shape, scale, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    residual: Tensor | None, x: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else residual + x
    return total, rms_norm(total, weight, eps, zero_centered)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
    if zero_centered or weight.dtype is not x.dtype:
        wide = internal_dtype(x.dtype)
        scale = weight.to(wide) + (1.0 if zero_centered else 0.0)
        return F.layer_norm(x.to(wide), weight.shape, scale, bias.to(wide), eps).to(x.dtype)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def query_key_value(
    qkv_SBGC: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, transform: QueryKeyTransform
) -> tuple[Tensor, Tensor, Tensor]:
    return reference.split_heads(qkv_SBGC, q_weight, k_weight, transform, rms_norm)


def attention(inputs: AttentionInputs) -> Tensor:
    """See `Kernels.attention`. Inputs with neither sinks nor dropout use SDPA. Inputs with sinks, or with too many
    elements for one call of cuDNN, use cuDNN if possible, but not with a window, document mask or dropout. All other
    inputs use plain torch."""
    q_SBND, k_SBGD, v_SBGE, config, sinks_N, segments_BS, *_ = inputs
    masked = config.window is not None or segments_BS is not None
    by_cudnn = not (masked or inputs.has_dropout) and cudnn.cudnn_supports(q_SBND, k_SBGD, v_SBGE, causal=config.causal)
    if by_cudnn and (inputs.has_sinks or cudnn.needs_parts(q_SBND, k_SBGD, v_SBGE)):
        return cudnn.attention_with_sinks(q_SBND, k_SBGD, v_SBGE, sinks_N, config)
    if inputs.has_sinks or inputs.has_dropout:
        return reference.attention(inputs)
    mask = None
    if masked:
        mask = reference.visible_pairs(q_SBND.shape[0], config, segments_BS, q_SBND.device)
    return _dot_product_attention(q_SBND, k_SBGD, v_SBGE, mask, config)


def _dot_product_attention(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, mask: Tensor | None, config: CoreAttentionConfig
) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD, v_SBGE))
    causal = config.causal and mask is None
    with _attention_order(q_SBND.device):
        out_BNSE = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=config.softmax_scale, enable_gqa=True
        )
    return out_BNSE.permute(2, 0, 1, 3)


def _attention_order(device: torch.device) -> AbstractContextManager[None]:
    """Context manager in which SDPA prefers cuDNN, which on Hopper is about twice as fast as torch's default choice.
    No-op on the CPU, where ranks may be threads, because the setting is global to the process."""
    if device.type != "cuda":
        return nullcontext()
    order = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    return sdpa_kernel(list(order), set_priority=True)


def attention_block(
    block: AttentionBlock, out_SBNE: Tensor | None = None, lse_SBN: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rectangles = _rectangles(block)
    if rectangles is None:
        return reference.attention_block(block, out_SBNE, lse_SBN)
    if out_SBNE is None or lse_SBN is None:
        if (alone := cudnn.block_forward(block, rectangles)) is not None:
            return alone
        out_SBNE, lse_SBN = empty_result(block.q_SBND, block.v_SBGE.shape[3])
    wide_SBNE = out_SBNE.to(lse_SBN.dtype)
    for pair in rectangles:
        part_SBNE, lse_BNS = cudnn.forward_pair(block, pair)
        merge_(wide_SBNE[pair.rows], lse_SBN[pair.rows], part_SBNE, lse_BNS.permute(2, 0, 1))
    return out_SBNE if wide_SBNE is out_SBNE else out_SBNE.copy_(wide_SBNE), lse_SBN


def attention_block_grad(
    block: AttentionBlock, found: AttentionResult, into: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    rectangles = _rectangles(block)
    if rectangles is None:
        return reference.attention_block_grad(block, found, into)
    if into is None:
        if (alone := cudnn.block_backward(block, found, rectangles)) is not None:
            return alone
        into = no_gradients(block)
    for pair in rectangles:
        cudnn.backward_pair(block, found, pair, into)
    return into


def _rectangles(block: AttentionBlock) -> tuple[MaskBlock, ...] | None:
    """Rectangles of the block's mask; None with dropout, or if cuDNN does not support all rectangles."""
    found = mask_blocks(block.query.chunks, block.key.chunks, block.config)
    able = not block.has_dropout and all(cudnn.supports_rectangle(block, pair) for pair in found)
    return found if able else None


# elementwise ops and loss


def activation(x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig) -> Tensor:
    return _NativeActivation.apply(x_RF, probs_R, config)


class _NativeActivation(AutogradFunction):
    """Autograd function of an activation that saves only its input and recomputes all other tensors in backward."""

    @staticmethod
    def forward(ctx: Any, x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig) -> Tensor:
        ctx.save_for_backward(x_RF, probs_R)
        ctx.config = config
        return _zero_where_empty(_activate(x_RF, probs_R, config), probs_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [saved.detach().requires_grad_() for saved in ctx.saved_tensors if saved is not None]
        with torch.enable_grad():
            out = _activate(inputs[0], inputs[1] if len(inputs) == 2 else None, ctx.config)
        grad_x, *rest = torch.autograd.grad(out, inputs, grads)
        if not rest:
            return grad_x, None, None
        probs_R, grad_probs = inputs[1], rest[0]
        return _zero_where_empty(grad_x, probs_R), grad_probs.masked_fill_(probs_R == 0, 0), None


def _activate(x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig) -> Tensor:
    wide = x_RF.to(internal_dtype(x_RF.dtype))
    out = reference.gated(wide, config) if config.gated else reference.nonlinearity(wide, config)
    return (out if probs_R is None else out * probs_R.to(wide.dtype)[..., None]).to(x_RF.dtype)


def _zero_where_empty(x_RF: Tensor, probs_R: Tensor | None) -> Tensor:
    return x_RF if probs_R is None else x_RF.masked_fill_((probs_R == 0)[..., None], 0)


def cross_entropy(logits_TV: Tensor, labels_T: Tensor, shard: VocabShard | None = None) -> Tensor:
    if shard is not None:
        return reference.cross_entropy(logits_TV, labels_T, shard)
    return F.cross_entropy(logits_TV.to(internal_dtype(logits_TV.dtype)), labels_T, reduction="none")


# routing


def recomputed_route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    config: RouterConfig,
    *,
    forced_ids_TK: Tensor | None = None,
    valid_T: Tensor | None = None,
    balance_sets: int = 0,
    z: bool = False,
) -> RoutedTokens:
    """`Kernels.route` for score functions that no kernel fuses. Only logits and ids are saved for backward."""
    ids_TK, counts_E, probs_TK, scores_GE, counts_GE, z_sum = _NativeRoute.apply(
        logits_TE, bias_E, config, forced_ids_TK, valid_T, balance_sets, z
    )
    balance = BalanceSums(scores_GE, counts_GE) if balance_sets else None
    return RoutedTokens(ids_TK, probs_TK, counts_E, balance, z_sum)


class _NativeRoute(AutogradFunction):
    """Autograd function that recomputes the reference routing in backward, with the expert ids of forward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        bias_E: Tensor | None,
        config: RouterConfig,
        forced_ids_TK: Tensor | None,
        valid_T: Tensor | None,
        balance_sets: int,
        z: bool,
    ) -> tuple[Tensor | None, ...]:
        ctx.options = {"balance_sets": balance_sets, "z": z}
        found = reference.route(logits_TE, bias_E, config, forced_ids_TK=forced_ids_TK, valid_T=valid_T, **ctx.options)
        ctx.save_for_backward(logits_TE, found.ids_TK, valid_T)
        ctx.config = config
        ctx.set_materialize_grads(False)
        scores_GE, counts_GE = found.balance or (None, None)
        ctx.mark_non_differentiable(*(each for each in (found.ids_TK, found.counts_E, counts_GE) if each is not None))
        return found.ids_TK, found.counts_E, found.probs_TK, scores_GE, counts_GE, found.z_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits_TE, ids_TK, valid_T = ctx.saved_tensors
        logits_TE = logits_TE.detach().requires_grad_()
        with torch.enable_grad():
            found = reference.route(logits_TE, None, ctx.config, forced_ids_TK=ids_TK, valid_T=valid_T, **ctx.options)
        scores_GE = None if found.balance is None else found.balance.scores_GE
        pairs = zip((found.probs_TK, scores_GE, found.z_sum), (grads[2], grads[3], grads[5]), strict=True)
        outputs = [(out, grad) for out, grad in pairs if out is not None and grad is not None]
        if not outputs:
            return None, None, None, None, None, None, None
        (grad_TE,) = torch.autograd.grad([out for out, _ in outputs], logits_TE, [grad for _, grad in outputs])
        return grad_TE, None, None, None, None, None, None


def router_logits(hidden_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
    exact = hidden_TH.dtype is weight_EH.dtype is torch.bfloat16 and dtype is torch.float32
    if not exact or hidden_TH.device.type == "cpu":
        return reference.router_logits(hidden_TH, weight_EH, dtype)
    return _NativeRouterGemm.apply(hidden_TH, weight_EH)


class _NativeRouterGemm(AutogradFunction):
    """Router GEMM with fp32 accuracy on bf16 tensor cores. Products of bf16 operands are exact in fp32. Backward splits
    the fp32 gradient into three bf16 summands, because GEMMs with fp32 operands would not use tensor cores."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_EH: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_EH)
        return _wide_gemm(hidden_TH, weight_EH.T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_EH = ctx.saved_tensors
        parts_T3E = bf16_parts(grads[0])
        grad_hidden_TH = parts_T3E @ weight_EH.repeat(3, 1)
        grad_weight_EH = _wide_gemm(parts_T3E.T, hidden_TH).view(3, *weight_EH.shape).sum(dim=0)
        return grad_hidden_TH, grad_weight_EH.to(weight_EH.dtype)


def _wide_gemm(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies two bf16 matrices on a GPU with an fp32 result."""
    return torch.mm(a, b, out_dtype=torch.float32)


def bf16_parts(x_TE: Tensor) -> Tensor:
    """Splits an fp32 matrix [T, E] into three bf16 summands, concatenated to [T, 3 * E]. The split is exact except for
    underflow: 3 x 8 bits represent the 24 bits of the mantissa."""
    parts_T3E = x_TE.new_empty(x_TE.shape[0], 3 * x_TE.shape[1], dtype=torch.bfloat16)
    high_TE, middle_TE, low_TE = parts_T3E.chunk(3, dim=1)
    high_TE.copy_(x_TE)
    rest_TE = x_TE - high_TE
    middle_TE.copy_(rest_TE)
    low_TE.copy_(rest_TE.sub_(middle_TE))
    return parts_T3E


# rows


def permute(tokens_TH: Tensor, index: RowIndex) -> Tensor:
    return PermuteKernels(_gather_rows, _sum_choices).permute(tokens_TH, index)


def unpermute(rows_RH: Tensor, index: RowIndex, num_tokens: int) -> Tensor:
    return PermuteKernels(_gather_rows, _sum_choices).unpermute(rows_RH, index, num_tokens)


def _gather_rows(tokens_TH: Tensor, index: RowIndex) -> Tensor:
    """Gathers tokens [T, H] to rows [R, H]; padding rows are 0."""
    if tokens_TH.shape[0] == 0:
        return tokens_TH.new_zeros(index.token_R.shape[0], tokens_TH.shape[1])
    rows_RH = tokens_TH.index_select(0, index.token_R.clamp(min=0))
    return rows_RH.masked_fill_((index.token_R < 0)[:, None], 0)


def _sum_choices(rows_RH: Tensor, index: RowIndex) -> Tensor:
    """Sums each token's rows, [R, H] -> [T, H], with accumulation in fp32 or wider."""
    rows_TK = index.rows_TK
    assert rows_TK is not None, "a dense routing index has no row per choice"
    if rows_RH.shape[0] == 0:
        return rows_RH.new_zeros(rows_TK.shape[0], rows_RH.shape[1])
    rows_TKH = rows_RH.index_select(0, rows_TK.clamp(min=0).flatten()).view(*rows_TK.shape, rows_RH.shape[1])
    rows_TKH.masked_fill_((rows_TK < 0)[..., None], 0)
    return rows_TKH.sum(dim=1, dtype=internal_dtype(rows_RH.dtype)).to(rows_RH.dtype)


# optimizer


def sum_of_squares(flat: Tensor) -> Tensor:
    wide = internal_dtype(flat.dtype)
    if flat.device.type != "cpu":
        norm: Tensor = torch.linalg.vector_norm(flat, dtype=wide)
        return norm.square()
    # The CPU sums a long vector sequentially, with a relative error of 2e-3 at 20 million elements. Short chunks avoid
    # that.
    chunk = 1024
    whole = flat.numel() // chunk * chunk
    norms: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, chunk), dim=1, dtype=wide)
    return norms.square().sum() + flat[whole:].to(wide).square().sum()


def adamw_(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, move: AdamWStep, weights: Tensor | None = None
) -> None:
    """See `Kernels.adamw_`. Non-finite results are detected chunk by chunk, while the chunk is still in the L2 cache,
    because torch's fused kernel does not report them."""
    if any(tensor.dtype is not torch.float32 for tensor in (master, grad, exp_avg, exp_avg_sq)):
        # computed in fp32, so that the arithmetic does not depend on the dtype of the state
        state = AdamWState(*(PackedState("plain", tensor) for tensor in (master, exp_avg, exp_avg_sq)))
        adamw_packed_(state, grad, move, weights)
        return
    step, divisor = move.step.to(torch.float32), move.grad_scale.to(torch.float32).reciprocal()
    refused = (~move.apply_update).to(torch.float32)
    for start in range(0, master.numel(), _ADAMW_CHUNK):
        chunk = slice(start, start + _ADAMW_CHUNK)
        new = master[chunk]
        torch._fused_adamw_(
            [new],
            [grad[chunk]],
            [exp_avg[chunk]],
            [exp_avg_sq[chunk]],
            [],
            [step],
            lr=move.lr,
            beta1=move.beta1,
            beta2=move.beta2,
            weight_decay=move.weight_decay,
            eps=move.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=refused,
        )
        if weights is not None:
            new = round_weights(new, weights.dtype)
            weights[chunk].copy_(new)  # a skipped step must leave the weights bitwise unchanged
        # The first moment is not checked, because a non-finite one also makes the weight non-finite.
        mark_nonfinite(move, exp_avg_sq[chunk], new)


def adamw_packed_(
    state: AdamWState, grad: Tensor, move: AdamWStep, weights: Tensor | None = None, first: int = 0
) -> None:
    """See `Kernels.adamw_packed_`. Unpacks the state to fp32, runs `adamw_` and packs the state again."""
    reference.step_unpacked(adamw_, state, grad, move, weights, first)
