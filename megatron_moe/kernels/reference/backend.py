"""Reference implementation of every op in plain torch. Backends are tested against it; fp64 verification runs on it.

Written for readability, not speed. Runs on CPU and GPU; the three grouped GEMMs copy the offsets to the host. The other
modules of this package implement the ops that are imported here.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.precision import OperandFormat
from megatron_moe.config.registry import ACTIVATIONS
from megatron_moe.kernels.kernel_set import OPS, KernelSet, Selection
from megatron_moe.kernels.ops import (
    AdamWState,
    AdamWStep,
    AttentionInputs,
    GroupedPart,
    PositionSpan,
    QuantizedActivationGrads,
    QueryKeyTransform,
    RowIndex,
    VocabShard,
    internal_dtype,
    mark_nonfinite,
)
from megatron_moe.kernels.reference.attention_blocks import attention_block as attention_block
from megatron_moe.kernels.reference.attention_blocks import attention_block_grad as attention_block_grad
from megatron_moe.kernels.reference.attention_blocks import max_logits_ as max_logits_
from megatron_moe.kernels.reference.attention_blocks import visible_between
from megatron_moe.kernels.reference.hyper_connections import hyper_connection_read as hyper_connection_read
from megatron_moe.kernels.reference.hyper_connections import hyper_connection_sum as hyper_connection_sum
from megatron_moe.kernels.reference.hyper_connections import hyper_connection_write as hyper_connection_write
from megatron_moe.kernels.reference.linear_attention import gated_rms_norm as gated_rms_norm
from megatron_moe.kernels.reference.linear_attention import linear_attention as linear_attention
from megatron_moe.kernels.reference.linear_attention import short_conv as short_conv
from megatron_moe.kernels.reference.low_precision import dequantize_rows as dequantize_rows
from megatron_moe.kernels.reference.low_precision import quantize_weight_part as quantize_weight_part
from megatron_moe.kernels.reference.low_precision import quantized_grouped_forward as quantized_grouped_forward
from megatron_moe.kernels.reference.low_precision import quantized_grouped_input_grad as quantized_grouped_input_grad
from megatron_moe.kernels.reference.low_precision import quantized_grouped_weight_grad as quantized_grouped_weight_grad
from megatron_moe.kernels.reference.low_precision import quantized_linear_forward as quantized_linear_forward
from megatron_moe.kernels.reference.low_precision import quantized_linear_input_grad as quantized_linear_input_grad
from megatron_moe.kernels.reference.low_precision import quantized_linear_weight_grad as quantized_linear_weight_grad
from megatron_moe.kernels.reference.low_precision import transpose_weight as transpose_weight
from megatron_moe.kernels.reference.low_precision import weight_amax_ as weight_amax_
from megatron_moe.kernels.reference.matrices import apply_direction_ as apply_direction_
from megatron_moe.kernels.reference.matrices import momentum_ as momentum_
from megatron_moe.kernels.reference.matrices import syrk as syrk
from megatron_moe.kernels.reference.pages import free_pages as free_pages
from megatron_moe.kernels.reference.pages import pack_rows as pack_rows
from megatron_moe.kernels.reference.pages import unpack_rows as unpack_rows
from megatron_moe.kernels.reference.push import acknowledge as acknowledge
from megatron_moe.kernels.reference.push import mark_ranks as mark_ranks
from megatron_moe.kernels.reference.push import push_sums as push_sums
from megatron_moe.kernels.reference.push import push_tokens as push_tokens
from megatron_moe.kernels.reference.push import sum_partials as sum_partials
from megatron_moe.kernels.reference.push import wait_for_peers as wait_for_peers
from megatron_moe.kernels.reference.routing import count_tokens as count_tokens
from megatron_moe.kernels.reference.routing import gather_probs as gather_probs
from megatron_moe.kernels.reference.routing import permute as permute
from megatron_moe.kernels.reference.routing import route as route
from megatron_moe.kernels.reference.routing import router_logits as router_logits
from megatron_moe.kernels.reference.routing import sort_rows as sort_rows
from megatron_moe.kernels.reference.routing import sort_rows_dense as sort_rows_dense
from megatron_moe.kernels.reference.routing import unpermute as unpermute
from megatron_moe.kernels.reference.sparse_attention import sparse_attention as sparse_attention
from megatron_moe.parallel import rng
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.parameter import store
from megatron_moe.precision.dither import dither
from megatron_moe.precision.optimizer_state import FIRST_SALT, SECOND_SALT, pack, round_weights, unpack
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor, dequantize
from megatron_moe.precision.quantizers import quantize_rows as quantize_rows
from megatron_moe.precision.quantizers import quantize_weight as quantize_weight

NAME = "reference"
REASON = "plain torch reference"


def bundle() -> KernelSet:
    """Kernel set with the plain torch implementation of every op."""
    return KernelSet.of({op: globals()[op] for op in OPS}, tuple(Selection(op, NAME, REASON) for op in OPS))


# matrix multiplications


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    if out is None:
        return F.linear(x, weight, bias)
    rows, out_RO = x.flatten(0, -2), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(rows, weight.T, out=out_RO)
    else:
        torch.addmm(bias, rows, weight.T, out=out_RO)
    return out


def linear_input_grad(grad: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    if out is None:
        return grad @ weight
    torch.mm(grad.flatten(0, -2), weight, out=out.view(-1, out.shape[-1]))
    return out


def linear_weight_grad(grad: Tensor, x: Tensor, out: Tensor, accumulate: bool) -> None:
    weight_grad = grad.flatten(0, -2).to(out.dtype).T @ x.flatten(0, -2).to(out.dtype)
    store(weight_grad, out, accumulate)


def grouped_forward(rows: Tensor, weight: Tensor, offsets_e: Tensor) -> Tensor:
    out_RO = rows.new_zeros(rows.shape[0], weight.shape[1])
    for expert, held in enumerate(slices(offsets_e)):
        out_RO[held] = rows[held] @ weight[expert].T
    return out_RO


def grouped_input_grad(grad: Tensor, weight: Tensor, offsets_e: Tensor) -> Tensor:
    out_RI = grad.new_zeros(grad.shape[0], weight.shape[2])
    for expert, held in enumerate(slices(offsets_e)):
        out_RI[held] = grad[held] @ weight[expert]
    return out_RI


def grouped_weight_grad(parts: Sequence[GroupedPart], out: Tensor, accumulate: bool) -> None:
    for (grad, rows, offsets_e), adds in with_accumulate(parts, accumulate):
        for expert, held in enumerate(slices(offsets_e)):
            weight_grad = grad[held].to(out.dtype).T @ rows[held].to(out.dtype)
            store(weight_grad, out[expert], adds)


def embedding_grad(grad_TH: Tensor, ids_T: Tensor, out: Tensor, accumulate: bool) -> None:
    if not accumulate:
        out.zero_()
    out.index_put_((ids_T,), grad_TH.to(out.dtype), accumulate=True)  # deterministic, unlike index_add_ on a GPU


def with_accumulate(parts: Sequence[GroupedPart], accumulate: bool) -> Iterator[tuple[GroupedPart, bool]]:
    """Yields (part, `accumulate` flag of its GEMM): the given flag for the first part, True for the others."""
    for number, part in enumerate(parts):
        yield part, accumulate or number > 0


def slices(offsets_e: Tensor) -> list[slice]:
    """Row slice of every expert. Copies the offsets to the host."""
    ends = offsets_e.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


# norms, RoPE, attention


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """RMSNorm (Zhang and Sennrich, arXiv 1910.07467)."""
    wide = x.to(internal_dtype(x.dtype))
    scale = weight.to(wide.dtype) + (1.0 if zero_centered else 0.0)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * scale).to(x.dtype)


def add_rms_norm(
    residual: Tensor | None, x: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else residual + x
    return total, rms_norm(total, weight, eps, zero_centered)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """LayerNorm (Ba, Kiros and Hinton, arXiv 1607.06450)."""
    wide = x.to(internal_dtype(x.dtype))
    scale = weight.to(wide.dtype) + (1.0 if zero_centered else 0.0)
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (normed * scale + bias.to(wide.dtype)).to(x.dtype)


def rope(x_SBND: Tensor, cos_SBD: Tensor, sin_SBD: Tensor, interleaved: bool, start: int = 0) -> Tensor:
    """Rotary position embedding (Su et al., arXiv 2104.09864 section 3.4.2)."""
    width = cos_SBD.shape[-1]
    before, rotated, rest = x_SBND.split((start, width, x_SBND.shape[-1] - start - width), dim=-1)
    rotated = rotated.to(internal_dtype(x_SBND.dtype))
    cos, sin = cos_SBD[:, :, None, : width // 2], sin_SBD[:, :, None, : width // 2]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    halves = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack(halves, dim=-1).flatten(-2) if interleaved else torch.cat(halves, dim=-1)
    return torch.cat([before, joined.to(x_SBND.dtype), rest], dim=-1)


def query_key_value(
    qkv_SBGC: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, transform: QueryKeyTransform
) -> tuple[Tensor, Tensor, Tensor]:
    return split_heads(qkv_SBGC, q_weight, k_weight, transform, rms_norm)


def split_heads(
    qkv_SBGC: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    transform: QueryKeyTransform,
    norm: Callable[[Tensor, Tensor, float, bool], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements `Kernels.query_key_value` with `norm` as the implementation of `rms_norm`."""
    eps, zero_centered, cos_SBD, sin_SBD, interleaved, heads_per_group = transform
    width = qkv_SBGC.shape[-1] // (heads_per_group + 2)
    q_SBGC, k_SBGD, v_SBGD = qkv_SBGC.split((heads_per_group * width, width, width), dim=-1)
    q_SBND = q_SBGC.flatten(2).unflatten(-1, (-1, width))
    if q_weight is not None and k_weight is not None:
        q_SBND = norm(q_SBND, q_weight, eps, zero_centered)
        k_SBGD = norm(k_SBGD, k_weight, eps, zero_centered)
    q_SBND, k_SBGD = (rope(x, cos_SBD, sin_SBD, interleaved) for x in (q_SBND, k_SBGD))
    return q_SBND, k_SBGD, v_SBGD


def latent_key_value(kv_SBNC: Tensor, shared_SBR: Tensor, key_width: int) -> tuple[Tensor, Tensor]:
    """Keys and values of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1.2)."""
    key_SBND, value_SBNE = kv_SBNC.split((key_width, kv_SBNC.shape[-1] - key_width), dim=-1)
    shared_SBNR = shared_SBR[:, :, None].expand(-1, -1, kv_SBNC.shape[2], -1)
    return torch.cat([key_SBND, shared_SBNR], dim=-1), value_SBNE


def attention(inputs: AttentionInputs) -> Tensor:
    """Attention: Vaswani et al., arXiv 1706.03762 section 3.2. Grouped queries: Ainslie et al., arXiv 2305.13245."""
    q_SBND, k_SBGD, v_SBGE, config, sinks_N, segments_BS, dropout_key, head_part = inputs
    wide = internal_dtype(q_SBND.dtype)
    heads_per_group = q_SBND.shape[2] // k_SBGD.shape[2]
    q_BNSD = q_SBND.to(wide).permute(1, 2, 0, 3)
    k_BNSD = k_SBGD.to(wide).permute(1, 2, 0, 3).repeat_interleave(heads_per_group, dim=1)
    v_BNSE = v_SBGE.to(wide).permute(1, 2, 0, 3).repeat_interleave(heads_per_group, dim=1)
    logits_BNSS = q_BNSD @ k_BNSD.transpose(-1, -2) * config.softmax_scale
    visible = visible_pairs(q_SBND.shape[0], config, segments_BS, q_SBND.device)
    logits_BNSS = logits_BNSS.masked_fill(~visible, -math.inf)
    probs_BNSS = softmax_with_sink(logits_BNSS, sinks_N, config.off_by_one)
    probs_BNSS = rng.dropout(probs_BNSS, config.dropout, dropout_key, dim=1, part=head_part)
    return (probs_BNSS @ v_BNSE).permute(2, 0, 1, 3).to(q_SBND.dtype)


def visible_pairs(seq: int, config: CoreAttentionConfig, segments_BS: Tensor | None, device: torch.device) -> Tensor:
    """Attention mask, bool [S, S] or [B, 1, S, S]: True where query i (dim -2) attends to key j (dim -1)."""
    whole = PositionSpan(chunks=(range(seq),), segments_BS=segments_BS)
    return visible_between(whole, whole, config, device)


def softmax_with_sink(logits_BNSS: Tensor, sinks_N: Tensor | None, off_by_one: bool) -> Tensor:
    """Probabilities of the keys. The softmax may include another logit per head: `sinks_N`, or 0 if `off_by_one`."""
    if sinks_N is None and not off_by_one:
        return logits_BNSS.softmax(dim=-1)
    sinks_N = logits_BNSS.new_zeros(logits_BNSS.shape[1]) if sinks_N is None else sinks_N.to(logits_BNSS.dtype)
    column = sinks_N[None, :, None, None].expand(*logits_BNSS.shape[:-1], 1)
    return torch.cat([logits_BNSS, column], dim=-1).softmax(dim=-1)[..., :-1]


# elementwise and loss


def activation(x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig) -> Tensor:
    """Activation of an MLP, multiplied by probs if given. Gated activations follow Shazeer, arXiv 2002.05202."""
    wide = x_RF.to(internal_dtype(x_RF.dtype))
    if probs_R is not None:
        probs = probs_R.to(wide.dtype)[..., None]
        wide = torch.where(probs != 0, wide, 0)  # masked first, because padding rows may contain nan
    out = gated(wide, config) if config.gated else nonlinearity(wide, config)
    return (out if probs_R is None else out * probs).to(x_RF.dtype)


def gated(x_RF: Tensor, config: ActivationConfig) -> Tensor:
    """Gated activation act(gate) * (up + offset). If `config.clamp` is set, gate and up are clamped first."""
    gate, up = x_RF.chunk(2, dim=-1)
    if config.clamp is not None:
        gate, up = gate.clamp(max=config.clamp), up.clamp(-config.clamp, config.clamp)
    return nonlinearity(gate, config) * (up + config.linear_offset)


def nonlinearity(x: Tensor, config: ActivationConfig) -> Tensor:
    """The configured function of registry `ACTIVATIONS`."""
    return ACTIVATIONS.get(config.kind).bound(config.options)(x)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def quantize_permuted(
    tokens_TH: Tensor, index: RowIndex, fmt: OperandFormat, *, rowwise: bool = True, columnwise: bool = False
) -> QuantizedTensor:
    rows_RH = permute(tokens_TH, index)
    return quantize_rows(rows_RH, fmt, rowwise=rowwise, columnwise=columnwise, offsets_e=index.offsets_E)


def permute_quantized(tokens: QuantizedTensor, index: RowIndex) -> tuple[Tensor, QuantizedTensor]:
    data, scales, _ = tokens.row_copy
    is_padding_R, token_R = index.token_R < 0, index.token_R.clamp_min(0)
    rows = data.view(torch.uint8)[token_R].masked_fill_(is_padding_R[:, None], 0).view(data.dtype)
    of_zeros = 1 if scales.is_floating_point() else 0
    copy = QuantizedCopy(rows, scales[:, token_R].masked_fill_(is_padding_R, of_zeros))
    values_RH = dequantize(copy, tokens.block, internal_dtype(tokens.dtype)).to(tokens.dtype)
    return values_RH, QuantizedTensor(copy, None, tokens.block, tokens.dtype)


def quantize_activation(
    x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig, fmt: OperandFormat
) -> QuantizedTensor:
    return quantize_rows(activation(x_RF, probs_R, config), fmt, rowwise=True, columnwise=False)


def quantize_activation_grad(
    grad_RF: Tensor,
    x_RF: Tensor,
    probs_R: Tensor | None,
    config: ActivationConfig,
    fmt: OperandFormat,
    *,
    columns: OperandFormat | None = None,
    offsets_e: Tensor | None = None,
    quantize: Callable[..., QuantizedTensor] = quantize_rows,
) -> QuantizedActivationGrads:
    """See `Kernels.quantize_activation_grad`. `quantize`: `quantize_rows` of a backend."""
    inputs = [each.detach().requires_grad_() for each in (x_RF, probs_R) if each is not None]
    with torch.enable_grad():
        out_RF = activation(inputs[0], None if probs_R is None else inputs[1], config)
    grad_x_RF, *grad_probs_R = torch.autograd.grad(out_RF, inputs, grad_RF)
    grad_probs, out_RF = grad_probs_R[0] if grad_probs_R else None, out_RF.detach()
    grad_x_q = quantize(grad_x_RF, fmt, rowwise=True, columnwise=columns is not None, offsets_e=offsets_e)
    if columns is None:
        return QuantizedActivationGrads(grad_x_q, grad_x_RF, grad_probs, out_RF)
    out_q = quantize(out_RF, columns, rowwise=False, columnwise=True, offsets_e=offsets_e)
    return QuantizedActivationGrads(grad_x_q, None, grad_probs, out_q)


def rms_norm_quantized(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool, fmt: OperandFormat
) -> tuple[Tensor, Tensor, QuantizedTensor]:
    total = x if residual is None else residual + x
    normed = rms_norm(total, weight, eps, zero_centered)
    return total, normed, quantize_rows(normed.detach().flatten(0, -2), fmt, rowwise=True, columnwise=False)


def cross_entropy(logits_TV: Tensor, labels_T: Tensor, shard: VocabShard | None = None) -> Tensor:
    if shard is not None:
        return _ShardedCrossEntropy.apply(logits_TV, labels_T, shard)
    logits_TV = logits_TV.to(internal_dtype(logits_TV.dtype))
    chosen_T = logits_TV.gather(-1, labels_T[:, None]).squeeze(-1)
    return logits_TV.logsumexp(dim=-1) - chosen_T


class _ShardedCrossEntropy(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, shard: VocabShard) -> Tensor:
        wide_TV = logits_TV.to(internal_dtype(logits_TV.dtype))
        num_held = wide_TV.shape[1]
        ids_T = labels_T - shard.first
        held_T = (ids_T >= 0) & (ids_T < num_held)
        ids_T = ids_T.clamp(0, num_held - 1)
        peak_T = wide_TV.amax(dim=-1)
        total_T = (wide_TV - peak_T[:, None]).exp().sum(dim=-1)
        chosen_T = torch.where(held_T, wide_TV.gather(-1, ids_T[:, None]).squeeze(-1), 0)
        peak_NT, total_NT, chosen_NT = shard.gather(torch.stack([peak_T, total_T, chosen_T])).unbind(1)
        peak_T = peak_NT.amax(dim=0)
        normalizer_T = peak_T + (total_NT * (peak_NT - peak_T).exp()).sum(dim=0).log()
        ctx.save_for_backward(logits_TV, normalizer_T, ids_T, held_T)
        return normalizer_T - chosen_NT.sum(dim=0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, normalizer_T, ids_T, held_T = ctx.saved_tensors
        grad_TV = (logits_TV.to(normalizer_T.dtype) - normalizer_T[:, None]).exp()
        grad_TV.scatter_add_(-1, ids_T[:, None], -held_T.to(grad_TV.dtype)[:, None])
        return (grad_TV * grads[0][:, None]).to(logits_TV.dtype), None, None


# optimizer


def sum_of_squares(flat: Tensor) -> Tensor:
    return flat.to(internal_dtype(flat.dtype)).square().sum()


def sum_contributions_(out: Tensor, own: Tensor, received_PN: Tensor, rank: int, *, accumulate: bool) -> None:
    first, *others = (each.to(internal_dtype(out.dtype)) for each in (*received_PN[:rank], own, *received_PN[rank:]))
    total = sum(others, start=first)
    out.copy_(out + total if accumulate else total)


def adamw_(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, move: AdamWStep, weights: Tensor | None = None
) -> None:
    """AdamW step (Loshchilov and Hutter, arXiv 1711.05101), with the arithmetic of `torch.optim.AdamW`."""
    wide = internal_dtype(master.dtype)
    beta1, beta2 = move.beta1, move.beta2
    grad = grad.to(wide) * move.grad_scale.to(wide)
    first = beta1 * exp_avg.to(wide) + (1 - beta1) * grad
    second = beta2 * exp_avg_sq.to(wide) + (1 - beta2) * grad.square()
    correction1, correction2 = (1 - torch.pow(beta, move.step.double()).to(wide) for beta in (beta1, beta2))
    update = first / correction1 / ((second / correction2).sqrt() + move.eps)
    moved = master.to(wide) * (1 - move.lr * move.weight_decay) - move.lr * update
    for state, new in ((master, moved), (exp_avg, first), (exp_avg_sq, second)):
        state.copy_(torch.where(move.apply_update, new.to(state.dtype), state))
    if weights is not None:
        weights.copy_(torch.where(move.apply_update, round_weights(master, weights.dtype), weights))
    mark_nonfinite(move, exp_avg, exp_avg_sq, master if weights is None else weights)


def adamw_packed_(
    state: AdamWState, grad: Tensor, move: AdamWStep, weights: Tensor | None = None, first: int = 0
) -> None:
    step_unpacked(adamw_, state, grad, move, weights, first)


def step_unpacked(
    adamw_: Callable[..., None], states: AdamWState, grad: Tensor, move: AdamWStep, weights: Tensor | None, first: int
) -> None:
    """Implements `Kernels.adamw_packed_` with `adamw_`: unpacks the state to fp32, applies the step and packs the state
    again."""
    wide = [unpack(state, weights).to(torch.float32, copy=True) for state in states]
    adamw_(wide[0], grad.to(torch.float32, copy=True), *wide[1:], move)
    rounded = None if weights is None else round_weights(wide[0], weights.dtype)
    for state, moved, salt in zip(states, wide, (None, FIRST_SALT, SECOND_SALT), strict=True):
        noise = None if salt is None else dither(state.size, move.step, salt, first, moved.device)
        new = pack(moved, state, rounded, noise)
        if state is states.master and state.format == "fp16" and weights is not None:
            rounded = round_weights(unpack(new), weights.dtype)
        for old_part, new_part in zip(state.parts, new.parts, strict=True):
            old_part.copy_(torch.where(move.apply_update, new_part, old_part))
        if state.format == "plain" and state.data.dtype != moved.dtype:
            mark_nonfinite(move, state.data)  # fp32 results may overflow a narrower dtype
    if weights is not None and rounded is not None:
        weights.copy_(torch.where(move.apply_update, rounded, weights))
        mark_nonfinite(move, weights)
