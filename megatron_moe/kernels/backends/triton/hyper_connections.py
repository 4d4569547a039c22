"""Kernels of hyper-connections, without temporary tensors of the size of the residual streams.

A product of two bf16 numbers is exact in fp32, and an fp32 number is the sum of three bf16 numbers. bf16 tensor cores
with fp32 accumulation therefore give products of fp32 accuracy. The coefficients of tokens are computed in
`hyper_coefficients.py`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.config.hyper_connections import MAX_SHARES, TOKENS_PER_SHARE, HyperConnectionsConfig
from megatron_moe.kernels.backends.triton.hyper_coefficients import coefficients, coefficients_backward
from megatron_moe.kernels.backends.triton.launch import INTERPRETED, cdiv, dot, num_sms, power_of_two, weight_grad
from megatron_moe.kernels.reference import hyper_connections as reference
from megatron_moe.parallel.autograd_function import AutogradFunction

_MAX_STREAMS = 4
"""Largest number of streams, that of all published models. On an H200, results for 8 streams differ from fp64 by more
than rounding."""
_ELEMENTS = 1024
"""Channels of one token that a program of the forward kernels sums."""
_ROWS = 32
"""Rows of a matmul of streams: n rows per token."""
_LEAST = 16
"""Minimum number of rows and columns of a matmul."""


class _StreamTile(NamedTuple):
    """Tile sizes of a program, with launch options."""

    tokens: int
    columns: int
    warps: int
    stages: int


_PROJECT = _StreamTile(tokens=64, columns=128, warps=4, stages=4)
_READ_BACKWARD = _StreamTile(tokens=64, columns=64, warps=4, stages=3)
_WRITE_BACKWARD = _StreamTile(tokens=_ROWS, columns=128, warps=4, stages=3)
_STAGE_BYTES = 24576
"""Maximum bytes that the projection loads into shared memory per pipeline stage."""
_PROGRAMS = 4
"""Programs per SM among which the projection divides the channels of a token."""


def hyper_connection_read(
    stream_SBW: Tensor, matrix_MW: Tensor, scale: Tensor, bias: Tensor, config: HyperConnectionsConfig
) -> tuple[Tensor, ...]:
    if config.num_streams > _MAX_STREAMS or matrix_MW.dtype is not stream_SBW.dtype:
        return reference.hyper_connection_read(stream_SBW, matrix_MW, scale, bias, config)
    return _FusedRead.apply(stream_SBW, matrix_MW, scale, bias, config)


def hyper_connection_sum(stream_SBW: Tensor, pre_TN: Tensor) -> Tensor:
    n = pre_TN.shape[1]
    if n > _MAX_STREAMS:
        return reference.hyper_connection_sum(stream_SBW, pre_TN)
    stream_SBW = stream_SBW.contiguous()
    hidden_size = stream_SBW.shape[2] // n
    out_SBH = torch.empty(*stream_SBW.shape[:2], hidden_size, device=stream_SBW.device, dtype=stream_SBW.dtype)
    if out_SBH.numel():
        grid, columns = _forward_grid(len(pre_TN), hidden_size)
        _sum_forward[grid](stream_SBW, pre_TN, out_SBH, hidden_size, N=n, COLUMNS=columns, num_warps=4)
    return out_SBH


def hyper_connection_write(stream_SBW: Tensor, out_SBH: Tensor, post_TN: Tensor, mix_TNN: Tensor) -> Tensor:
    if post_TN.shape[1] > _MAX_STREAMS:
        return reference.hyper_connection_write(stream_SBW, out_SBH, post_TN, mix_TNN)
    return _FusedWrite.apply(stream_SBW, out_SBH, post_TN, mix_TNN)


class _FusedRead(AutogradFunction):
    @staticmethod
    def forward(
        ctx: Any, stream_SBW: Tensor, matrix_MW: Tensor, scale: Tensor, bias: Tensor, config: HyperConnectionsConfig
    ) -> tuple[Tensor, ...]:
        stream_SBW = stream_SBW.contiguous()
        sums = _projection(stream_SBW, matrix_MW)
        projected_TM, factor_T, *weights = coefficients(sums, scale, bias, stream_SBW.shape[2], config)
        ctx.save_for_backward(stream_SBW, projected_TM, factor_T, weights[0])
        ctx.parameters, ctx.config = (matrix_MW, scale, bias), config
        ctx.set_materialize_grads(False)
        return stream_SBW.view_as(stream_SBW), hyper_connection_sum(stream_SBW, weights[0]), *weights

    @staticmethod
    def backward(
        ctx: Any, grad_stream: Tensor | None, grad_out: Tensor, *grad_weights: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        stream_SBW, projected_TM, factor_T, pre_TN = ctx.saved_tensors
        matrix_MW, scale, bias = ctx.parameters
        grad_out, width = grad_out.contiguous(), stream_SBW.shape[2]
        grad_pre_TN = _grad_of_pre(stream_SBW, grad_out, pre_TN)
        if grad_weights[0] is not None:
            grad_pre_TN += grad_weights[0]
        grad_weights = (grad_pre_TN, *(each if each is None else each.contiguous() for each in grad_weights[1:]))
        found = coefficients_backward(projected_TM, factor_T, scale, bias, grad_weights, width, ctx.config)
        grad_projected_TM, pull_T, grad_scale, grad_bias = found
        if grad_stream is not None:
            grad_stream = grad_stream.contiguous()
        others = grad_projected_TM, pull_T, pre_TN, grad_out, grad_stream
        grad_SBW, grad_matrix = _grad_of_streams(stream_SBW, matrix_MW, *others)
        return grad_SBW, grad_matrix, grad_scale, grad_bias, None


class _FusedWrite(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, stream_SBW: Tensor, out_SBH: Tensor, post_TN: Tensor, mix_TNN: Tensor) -> Tensor:
        stream_SBW, out_SBH = stream_SBW.contiguous(), out_SBH.contiguous()
        (num_tokens, n), hidden_size = post_TN.shape, out_SBH.shape[2]
        new_SBW = torch.empty_like(stream_SBW)
        if new_SBW.numel():
            grid, columns = _forward_grid(num_tokens, hidden_size)
            _write_forward[grid](
                stream_SBW, out_SBH, post_TN, mix_TNN, new_SBW, hidden_size, N=n, COLUMNS=columns, num_warps=4
            )
        ctx.save_for_backward(stream_SBW, out_SBH, post_TN, mix_TNN)
        return new_SBW

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        stream_SBW, out_SBH, post_TN, mix_TNN = ctx.saved_tensors
        grad_SBW, (num_tokens, n), hidden_size = grads[0].contiguous(), post_TN.shape, out_SBH.shape[2]
        found = tuple(torch.empty_like(each) for each in (stream_SBW, out_SBH, post_TN, mix_TNN))
        if num_tokens:
            grid, sizes = _matmul_grid(num_tokens, n, hidden_size)
            _write_backward[grid](
                stream_SBW, out_SBH, post_TN, mix_TNN, grad_SBW, *found, num_tokens, hidden_size, N=n,
                PARTS=_parts(stream_SBW), WIDEN=INTERPRETED, STAGES=_WRITE_BACKWARD.stages, **sizes,
            )  # fmt: skip
        return found


def _projection(stream_SBW: Tensor, matrix_MW: Tensor) -> Tensor:
    """Partial sums of the projection and, in the last column, of the squares of the streams, fp32 [P, T, M + 1], over
    P parts of the channels."""
    num_tokens, width, num_weights = stream_SBW.shape[:2].numel(), stream_SBW.shape[2], len(matrix_MW)
    tile, weights = _PROJECT, max(power_of_two(num_weights), _LEAST)
    fitting = power_of_two(_STAGE_BYTES // ((tile.tokens + weights) * stream_SBW.itemsize) + 1) // 2
    columns = min(tile.columns, fitting, max(power_of_two(width), _LEAST))
    blocks = cdiv(num_tokens, tile.tokens)
    parts = max(min(_PROGRAMS * num_sms(stream_SBW.device) // max(blocks, 1), cdiv(width, 8 * columns)), 1)
    span = cdiv(cdiv(width, parts), columns) * columns
    parts = cdiv(width, span)
    sums_PTM = torch.empty(parts, num_tokens, num_weights + 1, device=stream_SBW.device, dtype=torch.float32)
    if num_tokens:
        _project[(blocks, parts)](
            stream_SBW, matrix_MW, sums_PTM, num_tokens, num_weights, width, matrix_MW.stride(0), span,
            WIDEN=INTERPRETED, TOKENS=tile.tokens, WEIGHTS=weights, COLUMNS=columns,
            WHOLE=width % columns == 0, STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    return sums_PTM


def _grad_of_pre(stream_SBW: Tensor, grad_SBH: Tensor, pre_TN: Tensor) -> Tensor:
    """Sums over the channels of the streams times the gradient of their weighted sum, fp32 [T, n]."""
    (num_tokens, n), hidden_size = pre_TN.shape, grad_SBH.shape[2]
    grad_pre_TN = torch.empty_like(pre_TN)
    if num_tokens:
        grid, sizes = _matmul_grid(num_tokens, n, hidden_size)
        _sum_backward[grid](
            stream_SBW, grad_SBH, grad_pre_TN, num_tokens, hidden_size, N=n, WIDEN=INTERPRETED,
            STAGES=_WRITE_BACKWARD.stages, **sizes,
        )  # fmt: skip
    return grad_pre_TN


def _grad_of_streams(
    stream_SBW: Tensor,
    matrix_MW: Tensor,
    grad_projected_TM: Tensor,
    pull_T: Tensor,
    pre_TN: Tensor,
    grad_out: Tensor,
    grad_stream: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of the streams and of the projection matrix; the second is None if it was added to the
    gradient buffer."""
    (num_tokens, n), num_weights, hidden_size = pre_TN.shape, len(matrix_MW), grad_out.shape[2]
    tile, weights = _READ_BACKWARD, max(power_of_two(num_weights), _LEAST)
    columns = min(tile.columns, max(power_of_two(hidden_size), _LEAST))
    blocks = cdiv(hidden_size, columns)
    segments = max(min(MAX_SHARES, cdiv(num_tokens, TOKENS_PER_SHARE)), 1)
    grad_SBW = torch.empty_like(stream_SBW)
    shares_PMW = torch.empty(segments, *matrix_MW.shape, device=stream_SBW.device, dtype=torch.float32)
    # programs of the same tokens are adjacent in the grid, so that all but the first read gradients from the cache
    _read_backward[(n * blocks, segments)](
        stream_SBW, matrix_MW, grad_projected_TM, pull_T, pre_TN, grad_out, grad_stream, grad_SBW, shares_PMW,
        num_tokens, num_weights, hidden_size, blocks, matrix_MW.stride(0), N=n, PARTS=_parts(stream_SBW),
        WIDEN=INTERPRETED, TOKENS=tile.tokens, WEIGHTS=weights, COLUMNS=columns,
        STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    return grad_SBW, weight_grad(shares_PMW.flatten(1), matrix_MW)


def _parts(stream_SBW: Tensor) -> int:
    """Number of values in the dtype of the streams into which fp32 operands are split: 3 x 8 bits of bf16 represent the
    24 bits of the mantissa."""
    return 3 if stream_SBW.dtype is torch.bfloat16 else 1


def _forward_grid(num_tokens: int, hidden_size: int) -> tuple[tuple[int], int]:
    """Returns (grid with a program per token and block of channels, channels of a block)."""
    columns = min(_ELEMENTS, power_of_two(hidden_size))
    return (num_tokens * cdiv(hidden_size, columns),), columns


def _matmul_grid(num_tokens: int, n: int, hidden_size: int) -> tuple[tuple[int], dict[str, int]]:
    """Returns (grid, tile sizes and number of warps) of a kernel that multiplies all streams of its tokens."""
    per_token = power_of_two(n)
    tokens, columns = _ROWS // per_token, min(_WRITE_BACKWARD.columns, max(power_of_two(hidden_size), _LEAST))
    sizes = {"PER_TOKEN": per_token, "ROWS": _ROWS, "TOKENS": max(tokens, _LEAST), "COLUMNS": columns}
    return (cdiv(num_tokens, tokens),), sizes | {"num_warps": _WRITE_BACKWARD.warps}


@triton.jit
def _project(
    stream_ptr, weight_ptr, sums_ptr, num_tokens, num_weights, width, weight_stride, span,
    WIDEN: tl.constexpr, TOKENS: tl.constexpr, WEIGHTS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    tokens, weights, columns = tl.arange(0, TOKENS), tl.arange(0, WEIGHTS), tl.arange(0, COLUMNS)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    start = tl.program_id(1) * span
    held_tokens, held_weights = (tokens < num_tokens - first)[:, None], (weights < num_weights)[None, :]
    projected = tl.zeros((TOKENS, WEIGHTS), dtype=tl.float32)
    squares = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    stream_ptr += first * width + tokens[:, None] * width
    for column in tl.range(start, tl.minimum(start + span, width), COLUMNS, num_stages=STAGES):
        here = column + columns
        held_stream, held_matrix = held_tokens, held_weights
        if not WHOLE:
            held_stream &= (here < width)[None, :]
            held_matrix &= (here < width)[:, None]
        stream = tl.load(stream_ptr + here[None, :], mask=held_stream, other=0.0)
        weight = tl.load(weight_ptr + weights[None, :] * weight_stride + here[:, None], mask=held_matrix, other=0.0)
        projected = dot(stream, weight, projected, WIDEN)
        wide = stream.to(tl.float32)
        squares += wide * wide
    sums_ptr += (tl.program_id(1).to(tl.int64) * num_tokens + first) * (num_weights + 1)
    pointers = sums_ptr + tokens[:, None] * (num_weights + 1) + weights[None, :]
    tl.store(pointers, projected, mask=held_tokens & held_weights)
    pointers = sums_ptr + tokens * (num_weights + 1) + num_weights
    tl.store(pointers, tl.sum(squares, axis=1), mask=tokens < num_tokens - first)


@triton.jit
def _sum_forward(stream_ptr, pre_ptr, out_ptr, hidden_size, N: tl.constexpr, COLUMNS: tl.constexpr):
    blocks = tl.cdiv(hidden_size, COLUMNS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < hidden_size
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for j in tl.static_range(N):
        row = token * N + j
        total += tl.load(pre_ptr + row) * tl.load(stream_ptr + row * hidden_size + columns, mask=mask, other=0.0)
    tl.store(out_ptr + token * hidden_size + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _write_forward(
    stream_ptr, out_ptr, post_ptr, mix_ptr, new_ptr, hidden_size, N: tl.constexpr, COLUMNS: tl.constexpr
):
    blocks = tl.cdiv(hidden_size, COLUMNS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < hidden_size
    out = tl.load(out_ptr + token * hidden_size + columns, mask=mask, other=0.0).to(tl.float32)
    streams = ()
    for j in tl.static_range(N):
        offsets = (token * N + j) * hidden_size + columns
        stream = tl.load(stream_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        streams = streams + (stream,)  # type: ignore[assignment]
    for k in tl.static_range(N):
        new = tl.load(post_ptr + token * N + k) * out
        for j in tl.static_range(N):
            new += tl.load(mix_ptr + (token * N + j) * N + k) * streams[j]
        offsets = (token * N + k) * hidden_size + columns
        tl.store(new_ptr + offsets, new.to(new_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _split_dot(wide, narrow, total, PARTS: tl.constexpr, WIDEN: tl.constexpr):
    """Matmul of an fp32 operand, split into `PARTS` numbers of the dtype of `narrow`, and `narrow`, plus `total`."""
    for _ in tl.static_range(PARTS):
        part = wide.to(narrow.dtype)
        wide -= part.to(tl.float32)
        total = dot(part, narrow, total, WIDEN)
    return total


@triton.jit
def _write_backward(
    stream_ptr, out_ptr, post_ptr, mix_ptr, grad_ptr, grad_stream_ptr, grad_out_ptr, grad_post_ptr, grad_mix_ptr,
    num_tokens, hidden_size, N: tl.constexpr, PARTS: tl.constexpr, WIDEN: tl.constexpr, STAGES: tl.constexpr,
    PER_TOKEN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # The rows of a tile are the streams of several tokens. Mixing matrices are block-diagonal with one block per token,
    # so one matmul mixes the streams of every token. The gradients of the coefficients are products of all pairs of
    # rows, of which only pairs of the same token are stored.
    rows, tokens, columns = tl.arange(0, ROWS), tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    first = tl.program_id(0).to(tl.int64) * (ROWS // PER_TOKEN)
    token, stream = rows // PER_TOKEN, rows % PER_TOKEN
    held = (stream < N) & (token < num_tokens - first)
    held_tokens = (tokens < ROWS // PER_TOKEN) & (tokens < num_tokens - first)
    row = (first + token) * N + stream  # of the streams as a matrix [T n, H]
    same = (token[:, None] == token[None, :]) & held[:, None] & held[None, :]
    mix_offsets = row[:, None] * N + stream[None, :]
    mix = tl.load(mix_ptr + mix_offsets, mask=same, other=0.0)
    same_token = (tokens[:, None] == token[None, :]) & held[None, :]
    post = tl.load(post_ptr + row[None, :] + 0 * tokens[:, None], mask=same_token, other=0.0)
    of_streams, of_tokens = row[:, None] * hidden_size, (first + tokens)[:, None] * hidden_size
    grad_mix = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    grad_post = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for start in tl.range(0, hidden_size, COLUMNS, num_stages=STAGES):
        here = start + columns
        mask = held[:, None] & (here < hidden_size)[None, :]
        mask_out = held_tokens[:, None] & (here < hidden_size)[None, :]
        x = tl.load(stream_ptr + of_streams + here[None, :], mask=mask, other=0.0)
        grad = tl.load(grad_ptr + of_streams + here[None, :], mask=mask, other=0.0)
        out = tl.load(out_ptr + of_tokens + here[None, :], mask=mask_out, other=0.0)
        grad_mix = dot(x, tl.trans(grad), grad_mix, WIDEN)
        grad_post = dot(grad, tl.trans(out), grad_post, WIDEN)
        grad_stream = _split_dot(mix, grad, tl.zeros((ROWS, COLUMNS), tl.float32), PARTS, WIDEN)
        tl.store(grad_stream_ptr + of_streams + here[None, :], grad_stream.to(x.dtype), mask=mask)
        grad_out = _split_dot(post, grad, tl.zeros((TOKENS, COLUMNS), tl.float32), PARTS, WIDEN)
        tl.store(grad_out_ptr + of_tokens + here[None, :], grad_out.to(x.dtype), mask=mask_out)
    tl.store(grad_mix_ptr + mix_offsets, grad_mix, mask=same)
    own = (token[:, None] == tokens[None, :]) & held[:, None]
    tl.store(grad_post_ptr + row[:, None] + 0 * tokens[None, :], grad_post, mask=own)


@triton.jit
def _sum_backward(
    stream_ptr, grad_ptr, grad_pre_ptr, num_tokens, hidden_size, N: tl.constexpr, WIDEN: tl.constexpr,
    STAGES: tl.constexpr, PER_TOKEN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # rows of tiles and products as in `_write_backward`
    rows, tokens, columns = tl.arange(0, ROWS), tl.arange(0, TOKENS), tl.arange(0, COLUMNS)
    first = tl.program_id(0).to(tl.int64) * (ROWS // PER_TOKEN)
    token, stream = rows // PER_TOKEN, rows % PER_TOKEN
    held = (stream < N) & (token < num_tokens - first)
    held_tokens = (tokens < ROWS // PER_TOKEN) & (tokens < num_tokens - first)
    row = (first + token) * N + stream
    grad_pre = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    for start in tl.range(0, hidden_size, COLUMNS, num_stages=STAGES):
        here = start + columns
        mask = held[:, None] & (here < hidden_size)[None, :]
        mask_out = held_tokens[:, None] & (here < hidden_size)[None, :]
        x = tl.load(stream_ptr + row[:, None] * hidden_size + here[None, :], mask=mask, other=0.0)
        pointers = grad_ptr + (first + tokens)[:, None] * hidden_size + here[None, :]
        grad_pre = dot(x, tl.trans(tl.load(pointers, mask=mask_out, other=0.0)), grad_pre, WIDEN)
    own = (token[:, None] == tokens[None, :]) & held[:, None]
    tl.store(grad_pre_ptr + row[:, None] + 0 * tokens[None, :], grad_pre, mask=own)


@triton.jit
def _read_backward(
    stream_ptr, weight_ptr, grad_projected_ptr, pull_ptr, pre_ptr, grad_out_ptr, added_ptr, grad_ptr, shares_ptr,
    num_tokens, num_weights, hidden_size, blocks, weight_stride, N: tl.constexpr, PARTS: tl.constexpr,
    WIDEN: tl.constexpr, TOKENS: tl.constexpr, WEIGHTS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tokens, weights = tl.arange(0, TOKENS), tl.arange(0, WEIGHTS)
    stream = tl.program_id(0) // blocks
    channels = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    columns, width = stream * hidden_size + channels, N * hidden_size
    held_channels, held_weights = channels < hidden_size, weights < num_weights
    mask_matrix = held_weights[:, None] & held_channels[None, :]
    matrix = tl.load(weight_ptr + weights[:, None] * weight_stride + columns[None, :], mask=mask_matrix, other=0.0)
    share = tl.zeros((COLUMNS, WEIGHTS), dtype=tl.float32)
    # software pipelining: loads of the next tokens overlap with this tile
    for tile in tl.range(tl.program_id(1), tl.cdiv(num_tokens, TOKENS), tl.num_programs(1), num_stages=STAGES):
        first = tl.cast(tile, tl.int64) * TOKENS
        held_tokens = tokens < num_tokens - first
        mask = held_tokens[:, None] & held_channels[None, :]
        offsets = (first + tokens)[:, None] * width + columns[None, :]
        x = tl.load(stream_ptr + offsets, mask=mask, other=0.0)
        pointers = grad_out_ptr + (first + tokens)[:, None] * hidden_size + channels[None, :]
        grad_out = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        pull = tl.load(pull_ptr + first + tokens, mask=held_tokens, other=0.0)
        pre = tl.load(pre_ptr + (first + tokens) * N + stream, mask=held_tokens, other=0.0)
        pointers = grad_projected_ptr + (first + tokens)[:, None] * num_weights + weights[None, :]
        rest = tl.load(pointers, mask=held_tokens[:, None] & held_weights[None, :], other=0.0)
        grad = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
        for _ in tl.static_range(PARTS):
            part = rest.to(x.dtype)
            rest -= part.to(tl.float32)
            grad = dot(part, matrix, grad, WIDEN)
            share = dot(tl.trans(x), part, share, WIDEN)
        grad += pull[:, None] * x.to(tl.float32) + pre[:, None] * grad_out
        if added_ptr is not None:
            grad += tl.load(added_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_ptr + offsets, grad.to(grad_ptr.dtype.element_ty), mask=mask)
    shares_ptr += tl.program_id(1).to(tl.int64) * num_weights * width
    pointers = shares_ptr + weights[:, None] * width + columns[None, :]
    tl.store(pointers, tl.trans(share), mask=mask_matrix)
