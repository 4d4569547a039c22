"""Backward of linear attention in chunks.

With S the state before a chunk, N the stored values, P = scale (q k^T) decay the scores, and dS' the gradient of the
state after the chunk:

    dN = P^T dO + to_end k dS'        dS = carry dS' + scale (from_state q)^T dO - reads^T dN
    dq = scale from_state dO S^T + scale (dO N^T decay) k
    dk = scale (dO N^T decay)^T q + to_end N dS'^T + what the delta rule's system adds

and for the system with inverse T, N = T (beta v) - T (beta from_state k) S:

    d(beta v) = T^T dN        d(beta from_state k) = -T^T (dN S^T)
    dA = -(d(beta v) values^T + d(beta from_state k) reads^T)

No matmul has the transposed result of another as an operand: Triton 3.4 to 3.7.0 miscompiles those for tiles of 64 on
Hopper, so transposed results are multiplied anew or read from memory.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import INTERPRETED, dot
from megatron_moe.kernels.backends.triton.linear_attention import forward
from megatron_moe.kernels.backends.triton.linear_attention.tiles import (
    ScanKeys,
    chunk_number,
    grad_of_keys,
    load_keys,
    load_tile,
    load_values,
    open_chunk,
    pair_decays,
    pair_decays_transposed,
    state_offsets,
    store_tile,
)


class ScanGradients(NamedTuple):
    """Gradients of linear attention. The gradients of q and k are per value head, [S, B, M, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None


class DecayedGradients(NamedTuple):
    """What `channels.gradients` needs if q and k contain the decays within the chunk. The gradients of scores and of
    the systems' products are 0 unless j <= i, or j < i, is in the same document."""

    reading_q: Tensor
    """Gradient of the queries through the states, fp32 [S, B, M, D], as the next two."""
    reading_k: Tensor | None
    writing_k: Tensor
    whole: Tensor
    """Gradient of the log decays of whole chunks, fp32 [B * M, chunks, D]."""
    scores: Tensor
    products: Tensor | None
    """Gradient of the systems' matrices, without the factor beta; None without the delta rule."""


def gradients(
    grad: Tensor, keys: ScanKeys, v: Tensor, beta: Tensor | None, segments: Tensor | None, inverse: Tensor | None,
    scores: Tensor | None, scale: float,
) -> tuple[ScanGradients, DecayedGradients | None]:  # fmt: skip
    """Gradients for the output gradient `grad` [S, B, M, E]. `inverse`: result of `forward.inverse_systems`. `scores`:
    decayed products of q and k, for decayed keys, whose gradients of q, k and log decay are not complete yet."""
    before, stored, system = forward.states(keys, v, beta, segments, inverse)
    q, shape, decay = keys.reading_q, keys.shape, keys.decay
    chunks, sizes, delta = (shape.num_chunks, shape.batch * shape.heads), shape.sizes, system is not None
    options = {"WIDEN": INTERPRETED, **shape.tiles}
    # gradients of the stored values: first only those through the chunk's outputs; the next kernel adds the rest
    grad_stored = torch.empty_like(stored, memory_format=torch.contiguous_format)
    _local_grads[(shape.value_tiles, *chunks)](
        grad,
        q,
        keys.reading_k,
        decay,
        segments,
        scores,
        grad_stored,
        scale,
        *sizes,
        DELTA=delta,
        **options,
        num_warps=4,
    )
    after = torch.empty_like(before)
    reads = None if system is None else system.reads
    _state_grads[(shape.value_tiles, chunks[1])](
        grad, q, keys.writing_k, decay, segments, reads, grad_stored, after, scale, *sizes,
        **options, num_warps=4, num_stages=2,
    )  # fmt: skip
    per_head = (shape.length, shape.batch, shape.heads, shape.width)
    # fp32 if they are summed later: over the value heads of a key head, and with the delta rule over two kernels
    wide = torch.float32 if delta or shape.decayed_keys or shape.heads > shape.groups else q.dtype
    grad_q, grad_k = q.new_empty(per_head, dtype=wide), q.new_empty(per_head, dtype=wide)
    grad_total = torch.empty_like(decay)
    grad_reads = None if system is None else torch.empty_like(system.reads)
    grad_scores = None if scores is None else torch.empty_like(scores)
    _key_grads[chunks](
        grad, q, keys.writing_k, stored, decay, segments, before, after, grad_stored, grad_q, grad_k, grad_total,
        grad_reads, grad_scores, scale, *sizes, DELTA=delta, **options, num_warps=8,
    )  # fmt: skip
    del before, after, stored
    grad_v, grad_beta, grad_products, grad_reading_k = grad_stored, None, None, None
    if system is not None:
        grad_v, grad_beta = torch.empty_like(v, memory_format=torch.contiguous_format), torch.empty_like(system.beta)
        solved_values, solved_keys = torch.empty_like(system.values), torch.empty_like(system.reads)
        grad_reading_k = torch.empty_like(grad_k) if shape.decayed_keys else grad_k
        _solution_grads[chunks](
            keys.reading_k, v, decay, segments, system.beta, system.inverse, grad_stored, grad_reads, solved_values,
            solved_keys, grad_reading_k, grad_v, grad_total, grad_beta, *sizes, **options, num_warps=8,
        )  # fmt: skip
        del grad_reads
        grad_products = None if scores is None else torch.empty_like(scores)
        _system_grads[chunks](
            keys.reading_k, decay, segments, system.beta, system.values, system.reads, solved_values, solved_keys,
            grad_k, grad_total, grad_beta, grad_products, *sizes, **options, num_warps=4,
        )  # fmt: skip
    decayed = None
    if grad_scores is not None:
        decayed = DecayedGradients(grad_q, grad_reading_k, grad_k, grad_total, grad_scores, grad_products)
    return ScanGradients(grad_q, grad_k, grad_v, grad_total, grad_beta), decayed


@triton.jit
def _local_grads(
    grad_ptr, q_ptr, k_ptr, decay_ptr, segments_ptr, scores_ptr, out_ptr, scale,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    DELTA: tl.constexpr, WIDEN: tl.constexpr, NORMS: tl.constexpr, DECAYED: tl.constexpr,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Gradient of a chunk's values through the outputs of the same chunk: P^T dO."""
    first, chunk, head = tl.program_id(0) * VALUE, tl.program_id(1), tl.program_id(2)
    tokens, mask, rows, whole, total, ids, _, _, _ = open_chunk(
        decay_ptr, segments_ptr, chunk, head, length, batch, heads, width, DECAYED, CHUNK, WIDTH
    )
    grad = load_tile(grad_ptr, tokens, mask, value_width, first, VALUE)
    if DECAYED:  # loaded as their transpose
        scores = tl.load(scores_ptr + rows[None, :] * CHUNK + tl.arange(0, CHUNK)[:, None]).to(tl.float32)
    else:
        q = load_keys(q_ptr, q_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
        k = load_keys(k_ptr, k_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
        scores = dot(k, tl.trans(q), None, WIDEN)
    scores *= scale * pair_decays_transposed(total, ids, CHUNK, False)
    out = dot(scores.to(grad.dtype), grad, None, WIDEN)
    if DELTA:
        store_tile(out_ptr, rows, whole, value_width, first, out, VALUE)
    else:
        store_tile(out_ptr, tokens, mask, value_width, first, out, VALUE)


@triton.jit
def _state_grads(
    grad_ptr, q_ptr, k_ptr, decay_ptr, segments_ptr, reads_ptr, grad_stored_ptr, after_ptr, scale,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    WIDEN: tl.constexpr, NORMS: tl.constexpr, DECAYED: tl.constexpr,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Gradient of the state after each chunk, from the last chunk to the first; also completes the gradient of the
    stored values."""
    first, head = tl.program_id(0) * VALUE, tl.program_id(1)
    num_chunks = tl.cdiv(length, CHUNK)
    state = tl.zeros((WIDTH, VALUE), tl.float32)
    for step in range(0, num_chunks):
        chunk = num_chunks - 1 - step
        number = chunk_number(chunk, head, length, CHUNK)
        offsets, mask = state_offsets(number, width, value_width, first, WIDTH, VALUE)
        tl.store(after_ptr + offsets, state.to(after_ptr.dtype.element_ty), mask=mask)
        tokens, held, rows, whole, _, _, from_state, to_end, carry = open_chunk(
            decay_ptr, segments_ptr, chunk, head, length, batch, heads, width, DECAYED, CHUNK, WIDTH
        )
        k = load_keys(k_ptr, k_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
        later = to_end[:, None] * dot(k, state.to(k.dtype), None, WIDEN)
        q = load_keys(q_ptr, q_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
        grad = load_tile(grad_ptr, tokens, held, value_width, first, VALUE)
        scaled = (scale * from_state)[:, None] * grad.to(tl.float32)
        state = dot(tl.trans(q), scaled.to(q.dtype), carry * state, WIDEN)
        if reads_ptr is not None:
            stored = load_tile(grad_stored_ptr, rows, whole, value_width, first, VALUE).to(tl.float32) + later
            store_tile(grad_stored_ptr, rows, whole, value_width, first, stored, VALUE)
            reads = load_tile(reads_ptr, rows, whole, width, 0, WIDTH)
            state = dot(tl.trans(reads), (-stored).to(reads.dtype), state, WIDEN)
        else:
            stored = load_tile(grad_stored_ptr, tokens, held, value_width, first, VALUE).to(tl.float32) + later
            store_tile(grad_stored_ptr, tokens, held, value_width, first, stored, VALUE)


@triton.jit
def _key_grads(
    grad_ptr, q_ptr, k_ptr, stored_ptr, decay_ptr, segments_ptr, before_ptr, after_ptr, grad_stored_ptr,
    grad_q_ptr, grad_k_ptr, grad_total_ptr, grad_reads_ptr, grad_scores_ptr, scale,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    DELTA: tl.constexpr, WIDEN: tl.constexpr, NORMS: tl.constexpr, DECAYED: tl.constexpr,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k and decay through outputs and states, and of the delta rule's reads. `DECAYED`: gradients of q,
    k and the chunk's decay through states only, and of scores."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, held, rows, whole, total, ids, from_state, to_end, carry = open_chunk(
        decay_ptr, segments_ptr, chunk, head, length, batch, heads, width, DECAYED, CHUNK, WIDTH
    )
    number = chunk_number(chunk, head, length, CHUNK)
    of_q = tl.zeros((CHUNK, WIDTH), tl.float32)
    of_k = tl.zeros((CHUNK, WIDTH), tl.float32)
    of_reads = tl.zeros((CHUNK, WIDTH), tl.float32)
    pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    pairs_transposed = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_carry = 0.0
    of_channels = tl.zeros((WIDTH,), tl.float32)
    for first in range(0, value_width, VALUE):
        offsets, mask = state_offsets(number, width, value_width, first, WIDTH, VALUE)
        before = tl.load(before_ptr + offsets, mask=mask, other=0.0)
        after = tl.load(after_ptr + offsets, mask=mask, other=0.0)
        if DECAYED:
            of_channels += tl.sum(before.to(tl.float32) * after.to(tl.float32), axis=1)
        else:
            of_carry += tl.sum(before.to(tl.float32) * after.to(tl.float32))
        grad = load_tile(grad_ptr, tokens, held, value_width, first, VALUE)
        if DELTA:
            stored = load_tile(stored_ptr, rows, whole, value_width, first, VALUE)
            grad_stored = load_tile(grad_stored_ptr, rows, whole, value_width, first, VALUE)
            of_reads = dot(grad_stored, tl.trans(before), of_reads, WIDEN)
        else:
            stored = load_values(
                stored_ptr, v_stride, chunk, head, length, batch, heads, value_width, first, CHUNK, VALUE
            )
        of_q = dot(grad, tl.trans(before), of_q, WIDEN)
        of_k = dot(stored, tl.trans(after), of_k, WIDEN)
        pairs = dot(grad, tl.trans(stored), pairs, WIDEN)
        if not DECAYED:
            pairs_transposed = dot(stored, tl.trans(grad), pairs_transposed, WIDEN)
    k = load_keys(k_ptr, k_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
    of_q *= (scale * from_state)[:, None]
    of_k *= to_end[:, None]
    pairs *= scale * pair_decays(total, ids, CHUNK, False)
    if DECAYED:
        store_tile(grad_scores_ptr, rows, whole, CHUNK, 0, pairs, CHUNK)
        dims = tl.arange(0, WIDTH)
        whole_grad = tl.sum(of_k * k.to(tl.float32), axis=0)[:, None] + carry * of_channels[:, None]
        tl.store(grad_total_ptr + number * width + dims[:, None], whole_grad, mask=(dims < width)[:, None])
    else:
        q = load_keys(q_ptr, q_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
        wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
        to_last = tl.sum(of_k * wide_k, axis=1)
        grad_total = tl.sum(of_q * wide_q, axis=1) - to_last
        whole_grad = tl.sum(to_last, axis=0) + carry * of_carry
        scores = pairs * dot(q, tl.trans(k), None, WIDEN)
        grad_total += tl.sum(scores, axis=1) - tl.sum(scores, axis=0)
        grad_total += tl.where(tl.arange(0, CHUNK) == CHUNK - 1, whole_grad, 0.0)
        pairs_transposed *= scale * pair_decays_transposed(total, ids, CHUNK, False)
        of_q = dot(pairs.to(k.dtype), k, of_q, WIDEN)
        of_k = dot(pairs_transposed.to(q.dtype), q, of_k, WIDEN)
        of_q = grad_of_keys(
            of_q, q_ptr, q_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH
        )
        if not DELTA:  # with the delta rule, the gradient of k is not complete yet
            of_k = grad_of_keys(
                of_k, k_ptr, k_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH
            )
        # the decay of a token enters the cumulative decay of all later tokens
        tl.store(grad_total_ptr + tokens, tl.cumsum(grad_total, axis=0, reverse=True), mask=held)
    store_tile(grad_q_ptr, tokens, held, width, 0, of_q, WIDTH)
    store_tile(grad_k_ptr, tokens, held, width, 0, of_k, WIDTH)
    if DELTA:
        store_tile(grad_reads_ptr, rows, whole, width, 0, -of_reads, WIDTH)


@triton.jit
def _solution_grads(
    k_ptr, v_ptr, decay_ptr, segments_ptr, beta_ptr, inverse_ptr, grad_stored_ptr, grad_reads_ptr,
    solved_values_ptr, solved_keys_ptr, grad_k_ptr, grad_v_ptr, grad_total_ptr, grad_beta_ptr,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    WIDEN: tl.constexpr, NORMS: tl.constexpr, DECAYED: tl.constexpr,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Gradients through the right-hand sides of the triangular systems, beta v and beta from_state k."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, mask, rows, whole, _, _, from_state, _, _ = open_chunk(
        decay_ptr, segments_ptr, chunk, head, length, batch, heads, width, DECAYED, CHUNK, WIDTH
    )
    beta = tl.load(beta_ptr + tokens, mask=mask, other=0.0)
    # loaded as its transpose
    transposed = tl.load(inverse_ptr + rows[None, :] * CHUNK + tl.arange(0, CHUNK)[:, None])
    grad_beta = tl.zeros((CHUNK,), tl.float32)
    for first in range(0, value_width, VALUE):
        grad_stored = load_tile(grad_stored_ptr, rows, whole, value_width, first, VALUE)
        solved = dot(transposed, grad_stored, None, WIDEN)
        store_tile(solved_values_ptr, rows, whole, value_width, first, solved, VALUE)
        v = load_values(v_ptr, v_stride, chunk, head, length, batch, heads, value_width, first, CHUNK, VALUE).to(
            tl.float32
        )
        grad_beta += tl.sum(solved * v, axis=1)
        store_tile(grad_v_ptr, tokens, mask, value_width, first, beta[:, None] * solved, VALUE)
    grad_reads = load_tile(grad_reads_ptr, rows, whole, width, 0, WIDTH)
    solved = dot(transposed, grad_reads, None, WIDEN)
    store_tile(solved_keys_ptr, rows, whole, width, 0, solved, WIDTH)
    k = load_keys(k_ptr, k_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH).to(
        tl.float32
    )
    product = from_state * tl.sum(solved * k, axis=1)
    grad_k = (beta * from_state)[:, None] * solved
    if not DECAYED:
        grad_k += load_tile(grad_k_ptr, tokens, mask, width, 0, WIDTH)
        later = tl.cumsum(beta * product, axis=0, reverse=True)
        later += tl.load(grad_total_ptr + tokens, mask=mask, other=0.0)
        tl.store(grad_total_ptr + tokens, later, mask=mask)
    store_tile(grad_k_ptr, tokens, mask, width, 0, grad_k, WIDTH)
    tl.store(grad_beta_ptr + tokens, grad_beta + product, mask=mask)


@triton.jit
def _system_grads(
    k_ptr, decay_ptr, segments_ptr, beta_ptr, values_ptr, reads_ptr, solved_values_ptr, solved_keys_ptr,
    grad_k_ptr, grad_total_ptr, grad_beta_ptr, grad_products_ptr,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    WIDEN: tl.constexpr, NORMS: tl.constexpr, DECAYED: tl.constexpr,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Gradients through the matrices of the systems, beta_i (k_i k_j) decay_ij."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, mask, rows, whole, total, ids, _, _, _ = open_chunk(
        decay_ptr, segments_ptr, chunk, head, length, batch, heads, width, DECAYED, CHUNK, WIDTH
    )
    beta = tl.load(beta_ptr + tokens, mask=mask, other=0.0)
    reads = load_tile(reads_ptr, rows, whole, width, 0, WIDTH)
    solved = load_tile(solved_keys_ptr, rows, whole, width, 0, WIDTH)
    pairs = dot(solved, tl.trans(reads), None, WIDEN)
    pairs_transposed = tl.zeros((CHUNK, CHUNK), tl.float32)
    if not DECAYED:
        pairs_transposed = dot(reads, tl.trans(solved), pairs_transposed, WIDEN)
    for first in range(0, value_width, VALUE):
        values = load_tile(values_ptr, rows, whole, value_width, first, VALUE)
        solved_values = load_tile(solved_values_ptr, rows, whole, value_width, first, VALUE)
        pairs = dot(solved_values, tl.trans(values), pairs, WIDEN)
        if not DECAYED:
            pairs_transposed = dot(values, tl.trans(solved_values), pairs_transposed, WIDEN)
    pairs *= -pair_decays(total, ids, CHUNK, True)
    if DECAYED:
        store_tile(grad_products_ptr, rows, whole, CHUNK, 0, pairs, CHUNK)
    else:
        k = load_keys(k_ptr, k_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
        pairs_transposed *= -beta[None, :] * pair_decays_transposed(total, ids, CHUNK, True)
        products = pairs * dot(k, tl.trans(k), None, WIDEN)
        of_rows = tl.sum(products, axis=1)
        grad_total = beta * of_rows - tl.sum(beta[:, None] * products, axis=0)
        grad_k = load_tile(grad_k_ptr, tokens, mask, width, 0, WIDTH).to(tl.float32)
        grad_k = dot((beta[:, None] * pairs).to(k.dtype), k, grad_k, WIDEN)
        grad_k = dot(pairs_transposed.to(k.dtype), k, grad_k, WIDEN)
        grad_k = grad_of_keys(
            grad_k, k_ptr, k_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH
        )
        store_tile(grad_k_ptr, tokens, mask, width, 0, grad_k, WIDTH)
        tl.store(grad_beta_ptr + tokens, tl.load(grad_beta_ptr + tokens, mask=mask, other=0.0) + of_rows, mask=mask)
        later = tl.cumsum(grad_total, axis=0, reverse=True)
        tl.store(grad_total_ptr + tokens, tl.load(grad_total_ptr + tokens, mask=mask, other=0.0) + later, mask=mask)
