"""Forward of linear attention in chunks: the delta rule's triangular systems, the states of chunks, and the outputs."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.config.linear_attention import CHUNK
from megatron_moe.kernels.backends.triton.launch import INTERPRETED, dot
from megatron_moe.kernels.backends.triton.linear_attention.tiles import (
    ScanKeys,
    chunk_number,
    load_keys,
    load_tile,
    load_values,
    open_chunk,
    pair_decays,
    state_offsets,
    store_tile,
)

_BLOCK = tl.constexpr(16)
"""Rows of the diagonal blocks that are inverted by substitution."""


def inverse_systems(keys: ScanKeys, beta: Tensor, segments: Tensor | None, products: Tensor | None) -> Tensor:
    """Inverse [B * M, chunks, CHUNK, CHUNK] of I + A of every chunk, in the dtype of k. A_ij is beta_i (k_i k_j) times
    the decay from token j to token i, for j < i. `products`: the decayed products k_i k_j, for decayed keys."""
    k, shape = keys.reading_k, keys.shape
    out = k.new_empty(shape.batch * shape.heads, shape.num_chunks, CHUNK, CHUNK)
    _inverse_systems[(shape.num_chunks, shape.batch * shape.heads)](
        k, keys.decay, beta, segments, products, out, *shape.sizes,
        WIDEN=INTERPRETED, **_without(shape.tiles, "VALUE"), num_warps=4,
    )  # fmt: skip
    return out


class DeltaSystem(NamedTuple):
    """The delta rule's triangular systems and their solutions. A chunk stores values - reads times the state before
    it."""

    beta: Tensor
    inverse: Tensor
    values: Tensor
    """[B * M, chunks, CHUNK, E]"""
    reads: Tensor
    """[B * M, chunks, CHUNK, D]"""


def states(
    keys: ScanKeys, v: Tensor, beta: Tensor | None, segments: Tensor | None, inverse: Tensor | None
) -> tuple[Tensor, Tensor, DeltaSystem | None]:
    """Returns (state before each chunk [B * M, chunks, D, E], stored values [B * M, chunks, CHUNK, E], solved systems)
    in the dtype of v. Without the delta rule, the stored values are v itself."""
    shape = keys.shape
    before = v.new_empty(shape.batch * shape.heads, shape.num_chunks, shape.width, shape.value_width)
    system, values, reads, stored = None, None, None, v
    options = {"WIDEN": INTERPRETED, **shape.tiles}
    if beta is not None and inverse is not None:
        values = v.new_empty(*inverse.shape[:3], shape.value_width)
        reads = keys.reading_k.new_empty(*inverse.shape[:3], shape.width)
        _solutions[(shape.num_chunks, shape.batch * shape.heads)](
            keys.reading_k, v, keys.decay, beta, segments, inverse, values, reads, *shape.sizes, **options, num_warps=4
        )
        system, stored = DeltaSystem(beta, inverse, values, reads), torch.empty_like(values)
    _states[(shape.value_tiles, shape.batch * shape.heads)](
        keys.writing_k, v, keys.decay, segments, values, reads, before, stored, *shape.sizes,
        **options, num_warps=4, num_stages=2,
    )  # fmt: skip
    return before, stored, system


def outputs(
    keys: ScanKeys, stored: Tensor, segments: Tensor | None, before: Tensor, scores: Tensor | None, scale: float,
    *, delta: bool,
) -> Tensor:  # fmt: skip
    """Output [S, B, M, E]. `scores`: decayed products of q and k, for decayed keys. `delta`: True if `stored` is a
    result of `states`, False if it is v."""
    shape = keys.shape
    out = stored.new_empty(shape.length, shape.batch, shape.heads, shape.value_width)
    _outputs[(shape.value_tiles, shape.num_chunks, shape.batch * shape.heads)](
        keys.reading_q, keys.reading_k, stored, keys.decay, segments, before, scores, out, scale, *shape.sizes,
        DELTA=delta, WIDEN=INTERPRETED, **shape.tiles, num_warps=4,
    )  # fmt: skip
    return out


def _without(tiles: dict[str, int], name: str) -> dict[str, int]:
    return {key: value for key, value in tiles.items() if key != name}


@triton.jit
def _inverse_systems(
    k_ptr, decay_ptr, beta_ptr, segments_ptr, products_ptr, out_ptr,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    WIDEN: tl.constexpr, NORMS: tl.constexpr, DECAYED: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, mask, rows, whole, total, ids, _, _, _ = open_chunk(
        decay_ptr, segments_ptr, chunk, head, length, batch, heads, width, DECAYED, CHUNK, WIDTH
    )
    beta = tl.load(beta_ptr + tokens, mask=mask, other=0.0)
    if DECAYED:
        products = load_tile(products_ptr, rows, whole, CHUNK, 0, CHUNK)
    else:
        k = load_keys(k_ptr, k_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
        products = dot(k, tl.trans(k), None, WIDEN)
    system = beta[:, None] * products * pair_decays(total, ids, CHUNK, True)
    inverse = _inverse(system, CHUNK)
    store_tile(out_ptr, rows, whole, CHUNK, 0, inverse, CHUNK)


@triton.jit
def _inverse(system, CHUNK: tl.constexpr):
    """Inverse of I + `system`, strictly lower triangular fp32 [CHUNK, CHUNK].

    The diagonal blocks are inverted row by row. With their inverses in D and the other blocks in O, the result is
    (I + X)^-1 D for X = D O. X is strictly lower triangular in blocks, so (I + X)^-1 = (I - X) (I + X^2) for 4 blocks.
    """
    NUM: tl.constexpr = CHUNK // _BLOCK
    tl.static_assert(NUM == 4)
    blocks = tl.reshape(system, (NUM, _BLOCK, NUM, _BLOCK))
    at = tl.arange(0, NUM)
    is_diagonal = (at[:, None] == at[None, :])[:, None, :, None]
    diagonal = -tl.sum(tl.where(is_diagonal, blocks, 0.0), axis=2)
    rows = tl.arange(0, _BLOCK)
    for number in range(1, _BLOCK):
        is_row = (rows == number)[None, :, None]
        row = tl.sum(tl.where(is_row, diagonal, 0.0), axis=1)
        row += tl.sum(row[:, :, None] * diagonal, axis=1)
        diagonal = tl.where(is_row, row[:, None, :], diagonal)
    diagonal += tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)[None, :, :]
    inverses = tl.reshape(tl.where(is_diagonal, diagonal[:, :, None, :], 0.0), (CHUNK, CHUNK))
    others = tl.reshape(tl.where(is_diagonal, 0.0, blocks), (CHUNK, CHUNK))
    # Three TF32 matmuls are as accurate as one fp32 matmul, which tensor cores do not support.
    x = tl.dot(inverses, others, input_precision="tf32x3")
    squared = tl.dot(x, x, input_precision="tf32x3")
    even = tl.dot(squared, inverses, inverses, input_precision="tf32x3")
    return even - tl.dot(x, even, input_precision="tf32x3")


@triton.jit
def _solutions(
    k_ptr, v_ptr, decay_ptr, beta_ptr, segments_ptr, inverse_ptr, values_ptr, reads_ptr,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    WIDEN: tl.constexpr, NORMS: tl.constexpr, DECAYED: tl.constexpr,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, mask, rows, whole, _, _, from_state, _, _ = open_chunk(
        decay_ptr, segments_ptr, chunk, head, length, batch, heads, width, DECAYED, CHUNK, WIDTH
    )
    beta = tl.load(beta_ptr + tokens, mask=mask, other=0.0)
    inverse = load_tile(inverse_ptr, rows, whole, CHUNK, 0, CHUNK)
    k = load_keys(k_ptr, k_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
    scaled = ((beta * from_state)[:, None] * k.to(tl.float32)).to(k.dtype)
    store_tile(reads_ptr, rows, whole, width, 0, dot(inverse, scaled, None, WIDEN), WIDTH)
    for first in range(0, value_width, VALUE):
        v = load_values(v_ptr, v_stride, chunk, head, length, batch, heads, value_width, first, CHUNK, VALUE)
        scaled_v = (beta[:, None] * v.to(tl.float32)).to(v.dtype)
        store_tile(values_ptr, rows, whole, value_width, first, dot(inverse, scaled_v, None, WIDEN), VALUE)


@triton.jit
def _states(
    k_ptr, v_ptr, decay_ptr, segments_ptr, values_ptr, reads_ptr, before_ptr, stored_ptr,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    WIDEN: tl.constexpr, NORMS: tl.constexpr, DECAYED: tl.constexpr,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0) * VALUE, tl.program_id(1)
    num_chunks = tl.cdiv(length, CHUNK)
    state = tl.zeros((WIDTH, VALUE), tl.float32)
    for chunk in range(0, num_chunks):
        number = chunk_number(chunk, head, length, CHUNK)
        offsets, mask = state_offsets(number, width, value_width, first, WIDTH, VALUE)
        tl.store(before_ptr + offsets, state.to(before_ptr.dtype.element_ty), mask=mask)
        _, _, rows, whole, _, _, _, to_end, carry = open_chunk(
            decay_ptr, segments_ptr, chunk, head, length, batch, heads, width, DECAYED, CHUNK, WIDTH
        )
        k = load_keys(k_ptr, k_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
        if values_ptr is not None:
            reads = load_tile(reads_ptr, rows, whole, width, 0, WIDTH)
            values = load_tile(values_ptr, rows, whole, value_width, first, VALUE)
            stored = values.to(tl.float32) - dot(reads, state.to(reads.dtype), None, WIDEN)
            store_tile(stored_ptr, rows, whole, value_width, first, stored, VALUE)
        else:
            stored = load_values(
                v_ptr, v_stride, chunk, head, length, batch, heads, value_width, first, CHUNK, VALUE
            ).to(tl.float32)
        state = dot(tl.trans(k), (to_end[:, None] * stored).to(k.dtype), carry * state, WIDEN)


@triton.jit
def _outputs(
    q_ptr, k_ptr, stored_ptr, decay_ptr, segments_ptr, before_ptr, scores_ptr, out_ptr, scale,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    DELTA: tl.constexpr, WIDEN: tl.constexpr, NORMS: tl.constexpr, DECAYED: tl.constexpr,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    first, chunk, head = tl.program_id(0) * VALUE, tl.program_id(1), tl.program_id(2)
    tokens, held, rows, whole, total, ids, from_state, _, _ = open_chunk(
        decay_ptr, segments_ptr, chunk, head, length, batch, heads, width, DECAYED, CHUNK, WIDTH
    )
    q = load_keys(q_ptr, q_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
    number = chunk_number(chunk, head, length, CHUNK)
    offsets, mask = state_offsets(number, width, value_width, first, WIDTH, VALUE)
    state = tl.load(before_ptr + offsets, mask=mask, other=0.0)
    if DELTA:
        stored = load_tile(stored_ptr, rows, whole, value_width, first, VALUE)
    else:
        stored = load_values(stored_ptr, v_stride, chunk, head, length, batch, heads, value_width, first, CHUNK, VALUE)
    if DECAYED:
        scores = load_tile(scores_ptr, rows, whole, CHUNK, 0, CHUNK).to(tl.float32)
    else:
        k = load_keys(k_ptr, k_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
        scores = dot(q, tl.trans(k), None, WIDEN)
    scores *= pair_decays(total, ids, CHUNK, False)
    out = from_state[:, None] * dot(q, state.to(q.dtype), None, WIDEN)
    out = dot(scores.to(stored.dtype), stored, out, WIDEN)
    store_tile(out_ptr, tokens, held, value_width, first, scale * out, VALUE)
