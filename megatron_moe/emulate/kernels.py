"""What the kernels of a GPU take and keep, without computing anything: for emulation on a machine that has none.

Every op here takes the memory that the backend takes that `kernels/choose.py` prefers on that GPU, in the same order,
and keeps the same tensors for its backward. Values are whatever was in memory. Ops that are missing here, and are plain
torch on the GPU too, are taken from the reference. `tests/emulate/test_kernels.py` compares with the kernels' own code.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_moe.kernels import reference
from megatron_moe.kernels.backends import torch_native
from megatron_moe.kernels.bundle import OPS, Bundle, Choice
from megatron_moe.kernels.ops import Operand, RowIndex, internal_dtype
from megatron_moe.kernels.packed import Packed
from megatron_moe.kernels.row_copies import RowCopies
from megatron_moe.specs.attention import CoreAttentionSpec
from megatron_moe.specs.exitcodes import EnvironmentProblem
from megatron_moe.specs.moe import ActivationSpec, RouterSpec
from megatron_moe.specs.params import Part
from megatron_moe.specs.run import KernelSpec

OURS, NATIVE = "as triton", "as torch_native"
_MOST_PROGRAMS = 4 * 132
"""Partial sums of a norm's weight gradient: four for each multiprocessor of a Hopper GPU, but no more than tiles."""
_RMS_TILE = 4096
_ROW_BLOCK = 8192


def emulated_bundle(spec: KernelSpec, dtype: torch.dtype) -> Bundle:
    """The bundle whose memory is that of the backends that a GPU would get.

    Raises EnvironmentProblem for backends whose memory is not known.
    """
    wishes, functions, choices = dict(spec.per_op), {}, []
    for op in OPS:
        wish = wishes.get(op, spec.backend)
        name, function = _chosen(op, wish, dtype)
        functions[op] = function
        choices.append(
            Choice(op, name, "memory only, nothing is computed" if name != reference.NAME else "plain torch")
        )
    return Bundle.of(functions, tuple(choices))


def _chosen(op: str, wish: str, dtype: torch.dtype) -> tuple[str, Callable[..., Any]]:
    if wish not in ("auto", "triton", torch_native.NAME, reference.NAME):
        raise EnvironmentProblem(
            f"what kernel backend '{wish}' takes for '{op}' is not known to the emulation on a CPU; leave it to auto, "
            f"triton, {torch_native.NAME} or {reference.NAME}, or emulate on a GPU"
        )
    plain = wish == reference.NAME or dtype is torch.float64
    if op in _HOST_READS and plain:
        return reference.NAME, _HOST_READS[op]
    if plain:
        return reference.NAME, getattr(reference, op)
    if wish == torch_native.NAME and op in torch_native.PROVIDES and op not in _NATIVE:
        return NATIVE, getattr(torch_native, op)
    for name, known in ((OURS, _TRITON), (NATIVE, _NATIVE)):
        if op in known:
            return name, known[op]
    if op in torch_native.PROVIDES:
        return torch_native.NAME, getattr(torch_native, op)
    return reference.NAME, getattr(reference, op)


# matrix products


def linear_weight_grad(grad: Operand, x: Operand, out: Tensor, accumulate: bool) -> None:
    """Accumulates in place."""
    reference.valid_rows(grad)
    reference.valid_rows(x)


def grouped_forward(rows: Operand, weight: Operand, offsets_e: Tensor) -> Tensor:
    return rows.plain().new_empty(rows.plain().shape[0], weight.plain().shape[1])


def grouped_input_grad(grad: Operand, weight: Operand, offsets_e: Tensor) -> Tensor:
    grad_RO = grad.plain().contiguous()
    return grad_RO.new_empty(grad_RO.shape[0], weight.plain().shape[2])


def grouped_weight_grad(grad: Operand, rows: Operand, offsets_e: Tensor, out: Tensor, accumulate: bool) -> None:
    """Accumulates in place; factors whose rows have gaps are copied."""
    grad_RO, rows_RI = grad.plain(), rows.plain()
    grad_RO = grad_RO if grad_RO.stride(-1) == 1 else grad_RO.contiguous()
    rows_RI = rows_RI if rows_RI.stride(-1) == 1 else rows_RI.contiguous()


def embedding_grad(grad_TH: Tensor, ids_T: Tensor, out: Tensor, accumulate: bool) -> None:
    _rows_of(grad_TH)
    torch.sort(ids_T, stable=True)


# norms, positions, attention


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    return _RMSNorm.apply(x, weight)  # type: ignore[no-untyped-call,no-any-return]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x_RH = _rows_of(x)
        out_RH, scale_R = _normed(x_RH)
        ctx.save_for_backward(x_RH, weight, scale_R)
        return out_RH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_RH, grad_weight = _norm_backward(grads[0], *ctx.saved_tensors[:2])
        return grad_x_RH.view(grads[0].shape), grad_weight


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    total, normed = _AddRMSNorm.apply(residual, x, weight)  # type: ignore[no-untyped-call]
    return total, normed


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x_RH = _rows_of(x)
        _rows_of(residual)
        total_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
        out_RH, scale_R = _normed(x_RH)
        ctx.save_for_backward(total_RH, weight, scale_R)
        ctx.set_materialize_grads(False)
        return total_RH.view(x.shape), out_RH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_total, grad_out = grads
        if grad_out is None:
            return grad_total, grad_total, None
        grad_RH, grad_weight = _norm_backward(grad_out, *ctx.saved_tensors[:2])
        grad = grad_RH.view(grad_out.shape)
        return grad, grad, grad_weight


def _normed(x_RH: Tensor) -> tuple[Tensor, Tensor]:
    out_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
    return out_RH, torch.empty(x_RH.shape[0], device=x_RH.device, dtype=torch.float32)


def _norm_backward(grad: Tensor, x_RH: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    _rows_of(grad)
    num_rows, width = x_RH.shape
    grad_x_RH = torch.empty_like(x_RH, memory_format=torch.contiguous_format)
    tile_rows = max(_RMS_TILE // _power_of_two(width), 1)
    num_programs = max(min(-(-num_rows // tile_rows), _MOST_PROGRAMS), 1)
    shares_PH = torch.empty(num_programs, width, device=x_RH.device, dtype=torch.float32)
    return grad_x_RH, shares_PH.sum(dim=0).to(weight.dtype)


def query_key_value(
    qkv_SBGC: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    zero_centered: bool,
    cos_SBD: Tensor,
    sin_SBD: Tensor,
    interleaved: bool,
    heads_per_group: int,
) -> tuple[Tensor, Tensor, Tensor]:
    angles = cos_SBD.contiguous(), sin_SBD.contiguous()
    q, k, v = _QueryKeyValue.apply(qkv_SBGC, q_weight, k_weight, *angles, heads_per_group)  # type: ignore[no-untyped-call]
    return q, k, v


class _QueryKeyValue(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_SBGC: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos_SBD: Tensor,
        sin_SBD: Tensor,
        heads_per_group: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv_SBGC = qkv_SBGC.contiguous()
        length, batch, groups, width = qkv_SBGC.shape
        width //= heads_per_group + 2
        q_SBND = qkv_SBGC.new_empty(length, batch, groups * heads_per_group, width)
        k_SBGD = qkv_SBGC.new_empty(length, batch, groups, width)
        ctx.save_for_backward(qkv_SBGC, q_weight, k_weight, cos_SBD, sin_SBD)
        ctx.width = width
        return q_SBND, k_SBGD, qkv_SBGC[..., -width:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv_SBGC, q_weight, k_weight, *_ = ctx.saved_tensors
        strided = [grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads]
        grad_qkv = torch.empty_like(qkv_SBGC)
        num_programs = max(min(qkv_SBGC.shape[0] * qkv_SBGC.shape[1], _MOST_PROGRAMS), 1)
        shares_P2D = torch.zeros(num_programs, 2, ctx.width, device=qkv_SBGC.device, dtype=torch.float32)
        del strided
        if q_weight is None or k_weight is None:
            return grad_qkv, None, None, None, None, None
        grad_weights = shares_P2D.sum(dim=0)
        return grad_qkv, grad_weights[0].to(q_weight.dtype), grad_weights[1].to(k_weight.dtype), None, None, None


def rope(x_SBND: Tensor, cos_SBD: Tensor, sin_SBD: Tensor, interleaved: bool, start: int = 0) -> Tensor:
    return _Rope.apply(x_SBND, cos_SBD, sin_SBD)  # type: ignore[no-untyped-call,no-any-return]


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SBND: Tensor, cos_SBD: Tensor, sin_SBD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SBD, sin_SBD)
        return _rotated(x_SBND)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _rotated(grads[0]), None, None


def _rotated(x_SBND: Tensor) -> Tensor:
    if x_SBND.stride(-1) != 1:
        x_SBND = x_SBND.contiguous()
    return torch.empty(x_SBND.shape, device=x_SBND.device, dtype=x_SBND.dtype)


def latent_key_value(kv_SBNC: Tensor, shared_SBR: Tensor, key_width: int) -> tuple[Tensor, Tensor]:
    key, value = _KeyValue.apply(kv_SBNC, shared_SBR, key_width)  # type: ignore[no-untyped-call]
    return key, value


class _KeyValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kv_SBNC: Tensor, shared_SBR: Tensor, key_width: int) -> tuple[Tensor, Tensor]:
        kv_SBNC, shared_SBR = kv_SBNC.contiguous(), shared_SBR.contiguous()
        ctx.sizes = kv_SBNC.shape[-1], shared_SBR.shape[-1]
        key = kv_SBNC.new_empty(*kv_SBNC.shape[:3], key_width + shared_SBR.shape[-1])
        return key, kv_SBNC[..., key_width:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        width, turned = ctx.sizes
        grad_key, _ = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        return grad_key.new_empty(*grad_key.shape[:3], width), grad_key.new_empty(*grad_key.shape[:2], turned), None


def attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGE: Tensor,
    spec: CoreAttentionSpec,
    sinks_N: Tensor | None,
    segments_BS: Tensor | None,
    dropout_key: tuple[int | str, ...] | None,
    head_part: Part = (0, 1),
) -> Tensor:
    """cuDNN's: one log-sum-exp per query, and no logits. What it does not know is plain torch, as on a GPU."""
    drops = spec.dropout > 0.0 and dropout_key is not None
    if sinks_N is not None or spec.off_by_one or drops:
        return reference.attention(q_SBND, k_SBGD, v_SBGE, spec, sinks_N, segments_BS, dropout_key, head_part)
    mask = None
    if spec.window is not None or segments_BS is not None:
        mask = reference.visible_pairs(q_SBND.shape[0], spec, segments_BS, q_SBND.device)
    return _Attention.apply(q_SBND, k_SBGD, v_SBGE, mask)  # type: ignore[no-untyped-call,no-any-return]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, mask: Tensor | None) -> Tensor:
        seq, batch, heads, _ = q_SBND.shape
        out_SBNE = q_SBND.new_empty(seq, batch, heads, v_SBGE.shape[-1])
        lse_BNS = q_SBND.new_empty(batch, heads, seq, 1, dtype=torch.float32)
        seed, offset = (q_SBND.new_empty((), dtype=torch.int64) for _ in range(2))
        ctx.save_for_backward(q_SBND, k_SBGD, v_SBGE, mask, out_SBNE, lse_BNS, seed, offset)
        return out_SBNE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_SBND, k_SBGD, v_SBGE, *_ = ctx.saved_tensors
        # between the two: sums of the queries' gradients in fp32, and one number per query
        grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q_SBND, k_SBGD, v_SBGE))
        wide_q = q_SBND.new_empty(q_SBND.shape, dtype=torch.float32)
        del wide_q
        return grad_q, grad_k, grad_v, None


# elementwise and loss


def activation(x_RF: Tensor, probs_R: Tensor | None, spec: ActivationSpec) -> Tensor:
    return _Activation.apply(x_RF, probs_R, spec)  # type: ignore[no-untyped-call,no-any-return]


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, spec: ActivationSpec) -> Tensor:
        x_RF, probs_R = _rows_of(x), None if probs is None else probs.reshape(-1).contiguous()
        width = x_RF.shape[1] // spec.fan
        ctx.save_for_backward(x_RF, probs_R)
        return x_RF.new_empty(x_RF.shape[0], width).view(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_RF, probs_R = ctx.saved_tensors
        _rows_of(grads[0])
        shape = grads[0].shape[:-1]
        grad_x = torch.empty_like(x_RF, memory_format=torch.contiguous_format).view(*shape, x_RF.shape[1])
        return grad_x, None if probs_R is None else torch.zeros_like(probs_R).view(shape), None


def cross_entropy(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return _CrossEntropy.apply(logits_TV, labels_T)  # type: ignore[no-untyped-call,no-any-return]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels_T: Tensor) -> Tensor:
        logits_TV = _rows_of(logits)
        loss_T = torch.empty(logits_TV.shape[0], device=logits.device, dtype=torch.float32)
        ctx.save_for_backward(logits_TV, labels_T, torch.empty_like(loss_T))
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, *_ = ctx.saved_tensors
        return torch.empty_like(logits_TV, memory_format=torch.contiguous_format), None


# routing


def gate_product(hidden_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
    if not hidden_TH.dtype is weight_EH.dtype is torch.bfloat16 or dtype is not torch.float32:
        return reference.gate_product(hidden_TH, weight_EH, dtype)
    return _GateProduct.apply(hidden_TH, weight_EH)  # type: ignore[no-untyped-call,no-any-return]


class _GateProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_EH: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TH, weight_EH)
        return hidden_TH.new_empty(hidden_TH.shape[0], weight_EH.shape[0], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_EH = ctx.saved_tensors
        parts_T3E = torch.cat(torch_native.bf16_parts(grads[0]), dim=1)
        grad_hidden_TH = parts_T3E @ weight_EH.repeat(3, 1)
        grad_3EH = hidden_TH.new_empty(3, *weight_EH.shape, dtype=torch.float32)
        return grad_hidden_TH, grad_3EH.sum(dim=0).to(weight_EH.dtype)


def select_experts(
    logits_TE: Tensor, bias_E: Tensor | None, spec: RouterSpec, given_ids_TK: Tensor | None
) -> tuple[Tensor, Tensor]:
    if given_ids_TK is not None or not _groups_fit(spec):
        return reference.select_experts(logits_TE, bias_E, spec, given_ids_TK)
    ids_TK, probs_TK = _SelectExperts.apply(logits_TE, spec)  # type: ignore[no-untyped-call]
    return ids_TK, probs_TK


def _groups_fit(spec: RouterSpec) -> bool:
    sizes = (spec.num_groups or 1, spec.num_experts)
    return spec.group_topk is None or all(_power_of_two(size) == size for size in sizes)


class _SelectExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
        logits_TE = logits_TE.contiguous()
        ids_TK = torch.empty(logits_TE.shape[0], spec.topk, device=logits_TE.device, dtype=torch.int64)
        probs_TK = torch.empty(logits_TE.shape[0], spec.topk, device=logits_TE.device, dtype=logits_TE.dtype)
        ctx.save_for_backward(logits_TE, ids_TK)
        ctx.mark_non_differentiable(ids_TK)
        return ids_TK, probs_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_TE, _ = ctx.saved_tensors
        return torch.empty_like(logits_TE), None


def balance_scores(logits_TE: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    scores_TE, ids_TK = _BalanceScores.apply(logits_TE, spec)  # type: ignore[no-untyped-call]
    return scores_TE, ids_TK


class _BalanceScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, spec: RouterSpec) -> tuple[Tensor, Tensor]:
        logits_TE = logits_TE.contiguous()
        ids_TK = torch.empty(logits_TE.shape[0], spec.topk, device=logits_TE.device, dtype=torch.int64)
        scores_TE = torch.empty(logits_TE.shape, device=logits_TE.device, dtype=torch.float32)
        ctx.save_for_backward(logits_TE)
        ctx.mark_non_differentiable(ids_TK)
        return scores_TE, ids_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (logits_TE,) = ctx.saved_tensors
        return torch.empty_like(logits_TE), None


def count_tokens(ids_TK: Tensor, num_experts: int) -> Tensor:
    return _counts(ids_TK.contiguous(), num_experts).sum(dim=1)


def _counts(ids: Tensor, num_experts: int) -> Tensor:
    """One column per program."""
    block = max(_ROW_BLOCK // _power_of_two(num_experts), 16)
    return torch.empty(num_experts, -(-ids.numel() // block), device=ids.device, dtype=torch.int32)


# rows


def sort_rows(ids_TK: Tensor, num_experts: int, capacity: int | None) -> RowIndex:
    if capacity is not None or not ids_TK.numel():
        return reference.sort_rows(ids_TK, num_experts, capacity)
    ids = ids_TK.contiguous()
    counts_EB = _counts(ids, num_experts)
    ends_EB = counts_EB.flatten().cumsum(dim=0, dtype=torch.int32).view_as(counts_EB)
    offsets_E = ends_EB[:, -1].contiguous()
    starts_EB = ends_EB - counts_EB
    token_R = torch.full((ids.numel(),), -1, device=ids.device, dtype=torch.int64)
    choice_R = torch.full_like(token_R, -1)
    del starts_EB
    return RowIndex(token_R=token_R, choice_R=choice_R, offsets_E=offsets_E, rows_TK=torch.empty_like(ids))


def permute(tokens_TH: Tensor, index: RowIndex) -> Tensor:
    return RowCopies(_gather, _sum).permute(tokens_TH, index)


def unpermute(rows_RH: Tensor, index: RowIndex, num_tokens: int) -> Tensor:
    return RowCopies(_gather, _sum).unpermute(rows_RH, index, num_tokens)


def _gather(tokens_TH: Tensor, index: RowIndex) -> Tensor:
    tokens_TH = _rows_of(tokens_TH)
    return tokens_TH.new_empty(len(index.token_R), tokens_TH.shape[1])


def _sum(rows_RH: Tensor, index: RowIndex) -> Tensor:
    assert index.rows_TK is not None, "a dense form has no rows per choice"
    rows_RH = _rows_of(rows_RH)
    return rows_RH.new_empty(index.rows_TK.shape[0], rows_RH.shape[1])


def gather_probs(probs: Tensor, index: RowIndex) -> Tensor:
    if index.rows_TK is None:
        return reference.gather_probs(probs, index)
    return _GatherProbs.apply(probs, index)  # type: ignore[no-untyped-call,no-any-return]


class _GatherProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs_TK: Tensor, index: RowIndex) -> Tensor:
        ctx.rows_TK = index.rows_TK
        probs_TK.contiguous()
        return probs_TK.new_empty(index.choice_R.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].contiguous().new_empty(ctx.rows_TK.shape), None


# optimizer


def sum_of_squares(flat: Tensor) -> Tensor:
    return flat.new_empty((), dtype=internal_dtype(flat.dtype))


def adamw_(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, **given: Any) -> None:
    """In place; two corrections and a flag."""
    torch.empty(2, device=master.device, dtype=torch.float32)
    given["proceed"].to(torch.int32)


def adamw_packed_(master: Packed, grad: Tensor, exp_avg: Packed, exp_avg_sq: Packed, **given: Any) -> None:
    """In place; the same."""
    adamw_(grad, grad, grad, grad, **given)


def _rows_of(x: Tensor) -> Tensor:
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(-1) == 1 or matrix.shape[-1] == 1 else matrix.contiguous()


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


_TRITON: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            grouped_weight_grad, embedding_grad, rms_norm, add_rms_norm, rope, query_key_value, latent_key_value,
            activation, cross_entropy, select_experts, balance_scores, count_tokens, sort_rows, permute, unpermute,
            gather_probs, adamw_,
        )
    }
)  # fmt: skip
_NATIVE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            linear_weight_grad, grouped_forward, grouped_input_grad, attention, gate_product, sum_of_squares,
        )
    }
)  # fmt: skip
_HOST_READS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {function.__name__: function for function in (grouped_forward, grouped_input_grad, grouped_weight_grad)}
)
"""Ops of which plain torch reads sizes on the host."""
