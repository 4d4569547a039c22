"""Coefficients of hyper-connections, from the projection of the streams, with their backward.

Elements of a token's tile: one per row of the projection, [WEIGHTS], for the gates pre and post; [STREAMS, STREAMS] for
the mixing matrix. Both are padded to powers of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.kernels.backends.triton.launch import cdiv, power_of_two, weight_grad

_TOKENS = 32
"""Tokens of a program, which is one warp: every thread has the mixing matrix of one token in registers."""


def coefficients(
    sums_PTM: Tensor, scale: Tensor, bias: Tensor, width: int, config: HyperConnectionsConfig
) -> tuple[Tensor, ...]:
    """Returns the projection [T, M], the inverse root mean squares of the streams [T], and the coefficients pre, post
    and mix (only pre for the head), all in fp32.

    `sums_PTM`: partial sums of the projection and, in the last column, of the squares of the `width` channels."""
    num_parts, num_tokens, num_weights = sums_PTM.shape
    num_weights, n = num_weights - 1, config.num_streams
    shapes = (num_weights,), (), (n,), *(((n,), (n, n)) if len(scale) > 1 else ())
    found = [torch.empty(num_tokens, *shape, device=sums_PTM.device, dtype=torch.float32) for shape in shapes]
    if num_tokens:
        given = *found, *[None] * (5 - len(found))
        _forward[(cdiv(num_tokens, _TOKENS),)](
            sums_PTM, scale, bias, *given, num_tokens, num_parts, num_weights, width, config.norm_eps, config.eps,
            config.sinkhorn_iterations, **_sizes(n, num_weights),
        )  # fmt: skip
    return tuple(found)


def coefficients_backward(
    projected_TM: Tensor,
    factor_T: Tensor,
    scale: Tensor,
    bias: Tensor,
    grads: tuple[Tensor | None, ...],
    width: int,
    config: HyperConnectionsConfig,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradient of the projection [T, M]; the number [T] that multiplies the streams in the gradient through
    their mean square; and the gradients of scale and bias, None if they were added to gradient buffers.

    `grads`: gradients of pre, post and mix."""
    (num_tokens, num_weights), n, iterations = projected_TM.shape, config.num_streams, config.sinkhorn_iterations
    grad_projected_TM, pull_T = torch.empty_like(projected_TM), torch.empty_like(factor_T)
    grid = (cdiv(num_tokens, _TOKENS),)
    # each program writes a partial sum over its tokens; these are added in a fixed order
    shares_PS = torch.empty(*grid, len(scale) + num_weights, device=factor_T.device, dtype=torch.float32)
    mix_TNN = sums_ITN = None
    sizes = _sizes(n, num_weights)
    if len(scale) > 1:
        # the normalised matrix and the divisors of all normalisations, from which backward computes all others
        mix_TNN = torch.empty(num_tokens, n, n, device=factor_T.device, dtype=torch.float32)
        sums_ITN = torch.empty(2 * iterations - 1, num_tokens, n, device=factor_T.device, dtype=torch.float32)
    if num_tokens:
        if mix_TNN is not None:
            _normalise_again[grid](
                projected_TM, factor_T, scale, bias, mix_TNN, sums_ITN, num_tokens, num_weights, config.eps,
                iterations, **sizes,
            )  # fmt: skip
        given = *grads, *[None] * (3 - len(grads))
        _backward[grid](
            projected_TM, factor_T, scale, bias, *given, mix_TNN, sums_ITN, grad_projected_TM, pull_T, shares_PS,
            num_tokens, num_weights, len(scale), width, iterations, **sizes,
        )  # fmt: skip
    of_scale, of_bias = shares_PS[:, : len(scale)], shares_PS[:, len(scale) :]
    return grad_projected_TM, pull_T, weight_grad(of_scale, scale), weight_grad(of_bias, bias)


def _sizes(n: int, num_weights: int) -> dict[str, int]:
    sizes = {"N": n, "STREAMS": power_of_two(n), "WEIGHTS": power_of_two(num_weights), "TOKENS": _TOKENS}
    return sizes | {"num_warps": 1}


@triton.jit
def _forward(
    sums_ptr, scale_ptr, bias_ptr, projected_ptr, factor_ptr, pre_ptr, post_ptr, mix_ptr,
    num_tokens, num_parts, num_weights, width, norm_eps, eps, iterations,
    N: tl.constexpr, STREAMS: tl.constexpr, WEIGHTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    held = tokens < num_tokens
    weights = tl.arange(0, WEIGHTS)
    mask = held[:, None] & (weights < num_weights)[None, :]
    squares = tl.zeros((TOKENS,), tl.float32)
    projected = tl.zeros((TOKENS, WEIGHTS), tl.float32)
    for part in range(num_parts):
        sums = sums_ptr + (tokens + part * num_tokens) * (num_weights + 1)
        squares += tl.load(sums + num_weights, mask=held, other=0.0)
        projected += tl.load(sums[:, None] + weights[None, :], mask=mask, other=0.0)
    factor = 1.0 / tl.sqrt(squares / width + norm_eps)
    tl.store(factor_ptr + tokens, factor, mask=held)
    tl.store(projected_ptr + tokens[:, None] * num_weights + weights[None, :], projected, mask=mask)
    scale, bias = _scale_and_bias(scale_ptr, bias_ptr, weights, num_weights, N)
    gates = tl.sigmoid(projected * factor[:, None] * scale[None, :] + bias[None, :])
    pointers = pre_ptr + tokens[:, None] * N + weights[None, :]
    tl.store(pointers, gates + eps, mask=held[:, None] & (weights < N)[None, :])
    if mix_ptr is not None:
        pointers = post_ptr + tokens[:, None] * N + weights[None, :] - N
        tl.store(pointers, 2.0 * gates, mask=held[:, None] & ((weights >= N) & (weights < 2 * N))[None, :])
        streams = tl.arange(0, STREAMS)
        inner = streams[:, None] * N + streams[None, :]
        mask_mix = held[:, None, None] & ((streams < N)[:, None] & (streams < N)[None, :])[None, :, :]
        logits = tl.zeros((TOKENS, STREAMS, STREAMS), tl.float32)
        for part in range(num_parts):
            sums = sums_ptr + (tokens + part * num_tokens) * (num_weights + 1)
            logits += tl.load(sums[:, None, None] + 2 * N + inner[None, :, :], mask=mask_mix, other=0.0)
        logits *= factor[:, None, None]
        matrix = _start(logits, scale_ptr, bias_ptr, N, STREAMS)
        matrix = _normalised(matrix, None, tokens, num_tokens, eps, iterations, N, STREAMS)
        tl.store(mix_ptr + tokens[:, None, None] * N * N + inner[None, :, :], matrix, mask=mask_mix)


@triton.jit
def _scale_and_bias(scale_ptr, bias_ptr, weights, num_weights, N: tl.constexpr):
    """Scale and bias of each row of the projection, fp32 [WEIGHTS]."""
    part = (weights >= N).to(tl.int32) + (weights >= 2 * N).to(tl.int32)
    scale = tl.load(scale_ptr + part, mask=weights < num_weights, other=0.0).to(tl.float32)
    return scale, tl.load(bias_ptr + weights, mask=weights < num_weights, other=0.0).to(tl.float32)


@triton.jit
def _start(normed, scale_ptr, bias_ptr, N: tl.constexpr, STREAMS: tl.constexpr):
    """Softmax of the rows of the mixing logits, [TOKENS, STREAMS, STREAMS]; 0 in padding rows and columns.

    `normed`: normed projection of the streams."""
    streams = tl.arange(0, STREAMS)
    held = (streams < N)[:, None] & (streams < N)[None, :]
    bias = tl.load(bias_ptr + 2 * N + streams[:, None] * N + streams[None, :], mask=held, other=0.0).to(tl.float32)
    logits = normed * tl.load(scale_ptr + 2).to(tl.float32) + bias[None, :, :]
    # columns of padding are excluded; rows of padding only have to be finite
    logits = tl.where((streams < N)[None, None, :], logits, float("-inf"))
    exponentials = tl.exp(logits - tl.max(logits, axis=2)[:, :, None])
    probs = exponentials / tl.sum(exponentials, axis=2)[:, :, None]
    return tl.where((streams < N)[None, :, None], probs, 0.0)


@triton.jit
def _normalised(matrix, sums_ptr, tokens, num_tokens, eps, iterations, N: tl.constexpr, STREAMS: tl.constexpr):
    """Alternately normalises columns and rows of the softmax, beginning and ending with columns. Stores the divisors of
    every normalisation in `sums_ptr`, [2 iterations - 1, T, N], if given."""
    streams = tl.arange(0, STREAMS)
    padding = tl.where(streams < N, 0.0, 1.0)[None, :]  # so that nothing is divided by zero
    held = (streams < N)[:, None] & (streams < N)[None, :]
    matrix = tl.where(held[None, :, :], matrix + eps, 0.0)
    divisors = tl.sum(matrix, axis=1) + eps + padding
    _store_divisors(sums_ptr, divisors, 0, tokens, num_tokens, N, STREAMS)
    matrix *= (1.0 / divisors)[:, None, :]
    for iteration in range(1, iterations):
        divisors = tl.sum(matrix, axis=2) + eps + padding
        _store_divisors(sums_ptr, divisors, 2 * iteration - 1, tokens, num_tokens, N, STREAMS)
        matrix *= (1.0 / divisors)[:, :, None]
        divisors = tl.sum(matrix, axis=1) + eps + padding
        _store_divisors(sums_ptr, divisors, 2 * iteration, tokens, num_tokens, N, STREAMS)
        matrix *= (1.0 / divisors)[:, None, :]
    return matrix


@triton.jit
def _divisor_pointers(sums_ptr, number, tokens, num_tokens, N: tl.constexpr, STREAMS: tl.constexpr):
    """Pointers to the divisors of normalisation `number`, [TOKENS, STREAMS], and the mask of those that exist."""
    streams = tl.arange(0, STREAMS)
    pointers = sums_ptr + (tokens + number * num_tokens)[:, None] * N + streams[None, :]
    return pointers, (tokens < num_tokens)[:, None] & (streams < N)[None, :]


@triton.jit
def _store_divisors(sums_ptr, divisors, number, tokens, num_tokens, N: tl.constexpr, STREAMS: tl.constexpr):
    if sums_ptr is not None:
        pointers, mask = _divisor_pointers(sums_ptr, number, tokens, num_tokens, N, STREAMS)
        tl.store(pointers, divisors, mask=mask)


@triton.jit
def _divisors(sums_ptr, number, tokens, num_tokens, N: tl.constexpr, STREAMS: tl.constexpr):
    pointers, mask = _divisor_pointers(sums_ptr, number, tokens, num_tokens, N, STREAMS)
    return tl.load(pointers, mask=mask, other=1.0)


@triton.jit
def _normed_mix(projected_ptr, factor_ptr, tokens, held, num_weights, N: tl.constexpr, STREAMS: tl.constexpr):
    """Normed projection of the mixing matrix, [TOKENS, STREAMS, STREAMS], with its offsets in the projection and its
    mask."""
    streams = tl.arange(0, STREAMS)
    offsets = tokens[:, None, None] * num_weights + (2 * N + streams[:, None] * N + streams[None, :])[None, :, :]
    mask = held[:, None, None] & ((streams < N)[:, None] & (streams < N)[None, :])[None, :, :]
    factor = tl.load(factor_ptr + tokens, mask=held, other=0.0)
    return tl.load(projected_ptr + offsets, mask=mask, other=0.0) * factor[:, None, None], offsets, mask


@triton.jit
def _normalise_again(
    projected_ptr, factor_ptr, scale_ptr, bias_ptr, mix_ptr, sums_ptr, num_tokens, num_weights, eps, iterations,
    N: tl.constexpr, STREAMS: tl.constexpr, WEIGHTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tokens, streams = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, STREAMS)
    held = tokens < num_tokens
    normed, _, mask = _normed_mix(projected_ptr, factor_ptr, tokens, held, num_weights, N, STREAMS)
    matrix = _start(normed, scale_ptr, bias_ptr, N, STREAMS)
    matrix = _normalised(matrix, sums_ptr, tokens, num_tokens, eps, iterations, N, STREAMS)
    inner = streams[:, None] * N + streams[None, :]
    tl.store(mix_ptr + tokens[:, None, None] * N * N + inner[None, :, :], matrix, mask=mask)


@triton.jit
def _backward(
    projected_ptr, factor_ptr, scale_ptr, bias_ptr, grad_pre_ptr, grad_post_ptr, grad_mix_ptr, mix_ptr, sums_ptr,
    grad_projected_ptr, pull_ptr, shares_ptr, num_tokens, num_weights, num_scales, width, iterations,
    N: tl.constexpr, STREAMS: tl.constexpr, WEIGHTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    tokens, weights = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, WEIGHTS)
    held = tokens < num_tokens
    factor = tl.load(factor_ptr + tokens, mask=held, other=0.0)
    # gates
    is_pre, is_post = weights < N, (weights >= N) & (weights < 2 * N) & (weights < num_weights)
    mask = held[:, None] & (is_pre | is_post)[None, :]
    offsets = tokens[:, None] * num_weights + weights[None, :]
    normed = tl.load(projected_ptr + offsets, mask=mask, other=0.0) * factor[:, None]
    scale, bias = _scale_and_bias(scale_ptr, bias_ptr, weights, num_weights, N)
    gates = tl.sigmoid(normed * scale[None, :] + bias[None, :])
    pointers = tokens[:, None] * N + weights[None, :]
    grad = tl.load(grad_pre_ptr + pointers, mask=held[:, None] & is_pre[None, :], other=0.0)
    if mix_ptr is not None:
        grad += 2.0 * tl.load(grad_post_ptr + pointers - N, mask=held[:, None] & is_post[None, :], other=0.0)
    grad *= gates * (1.0 - gates)
    tl.store(grad_projected_ptr + offsets, grad * scale[None, :] * factor[:, None], mask=mask)
    along = tl.sum(grad * scale[None, :] * normed, axis=1)
    shares_ptr += tl.program_id(0).to(tl.int64) * (num_scales + num_weights)
    tl.store(shares_ptr + num_scales + weights, tl.sum(grad, axis=0), mask=is_pre | is_post)
    of_scales = tl.sum(grad * normed, axis=0)
    tl.store(shares_ptr, tl.sum(tl.where(is_pre, of_scales, 0.0), axis=0))
    if mix_ptr is not None:
        tl.store(shares_ptr + 1, tl.sum(tl.where(is_post, of_scales, 0.0), axis=0))
        # mixing matrix: from the last normalisation to the first
        streams = tl.arange(0, STREAMS)
        inner = streams[:, None] * N + streams[None, :]
        normed_mix, offsets_mix, mask_mix = _normed_mix(
            projected_ptr, factor_ptr, tokens, held, num_weights, N, STREAMS
        )
        pointers = tokens[:, None, None] * N * N + inner[None, :, :]
        matrix = tl.load(mix_ptr + pointers, mask=mask_mix, other=0.0)
        grad_mix = tl.load(grad_mix_ptr + pointers, mask=mask_mix, other=0.0)
        for back in range(1, iterations):
            number = 2 * (iterations - back)
            divisors = _divisors(sums_ptr, number, tokens, num_tokens, N, STREAMS)
            grad_mix = (grad_mix - tl.sum(grad_mix * matrix, axis=1)[:, None, :]) * (1.0 / divisors)[:, None, :]
            matrix *= divisors[:, None, :]
            divisors = _divisors(sums_ptr, number - 1, tokens, num_tokens, N, STREAMS)
            grad_mix = (grad_mix - tl.sum(grad_mix * matrix, axis=2)[:, :, None]) * (1.0 / divisors)[:, :, None]
            matrix *= divisors[:, :, None]
        divisors = _divisors(sums_ptr, 0, tokens, num_tokens, N, STREAMS)
        grad_mix = (grad_mix - tl.sum(grad_mix * matrix, axis=1)[:, None, :]) * (1.0 / divisors)[:, None, :]
        probs = _start(normed_mix, scale_ptr, bias_ptr, N, STREAMS)
        grad_mix = probs * (grad_mix - tl.sum(grad_mix * probs, axis=2)[:, :, None])
        grad_mix = tl.where(mask_mix, grad_mix, 0.0)
        scale_mix = tl.load(scale_ptr + 2).to(tl.float32)
        tl.store(grad_projected_ptr + offsets_mix, grad_mix * scale_mix * factor[:, None, None], mask=mask_mix)
        along_mix = grad_mix * normed_mix
        per_token = tl.sum(tl.sum(along_mix, axis=2), axis=1)
        along += scale_mix * per_token
        tl.store(shares_ptr + 2, tl.sum(per_token, axis=0))
        of_bias = shares_ptr + num_scales + 2 * N + inner
        tl.store(of_bias, tl.sum(grad_mix, axis=0), mask=(streams < N)[:, None] & (streams < N)[None, :])
    # d factor / d mean square = -factor^3 / 2, and the mean square has the derivative 2 x / width
    tl.store(pull_ptr + tokens, -along * factor * factor / width, mask=held)
