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
from megatron_moe.kernels.backends.triton.linear_attention.tiles import (
    ScanShape,
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


class DeltaSystem(NamedTuple):
    """The delta rule's triangular systems and their solutions, which `forward.py` computes."""

    beta: Tensor
    inverse: Tensor
    values: Tensor
    reads: Tensor


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, segments: Tensor | None,
    before: Tensor, stored: Tensor, system: DeltaSystem | None, scale: float, shape: ScanShape,
) -> ScanGradients:  # fmt: skip
    """Gradients for the output gradient `grad` [S, B, M, E]. `before`, `stored`: results of `forward.states`."""
    chunks, sizes, delta = (shape.num_chunks, shape.batch * shape.heads), shape.sizes, system is not None
    options = {"WIDEN": INTERPRETED, **shape.tiles}
    # gradients of the stored values: first only those through the chunk's outputs; the next kernel adds the rest
    grad_stored = torch.empty_like(stored, memory_format=torch.contiguous_format)
    _local_grads[(shape.value_tiles, *chunks)](
        grad, q, k, decay, segments, grad_stored, scale, *sizes, DELTA=delta, **options, num_warps=4
    )
    after = torch.empty_like(before)
    reads = None if system is None else system.reads
    _state_grads[(shape.value_tiles, chunks[1])](
        grad, q, k, decay, segments, reads, grad_stored, after, scale, *sizes, **options, num_warps=4, num_stages=2
    )
    per_head = (shape.length, shape.batch, shape.heads, shape.width)
    # fp32 if they are summed later: over the value heads of a key head, and with the delta rule over two kernels
    wide = torch.float32 if delta or shape.heads > shape.groups else q.dtype
    grad_q, grad_k = q.new_empty(per_head, dtype=wide), q.new_empty(per_head, dtype=wide)
    grad_total = torch.empty_like(decay)
    grad_reads = None if system is None else torch.empty_like(system.reads)
    _key_grads[chunks](
        grad, q, k, stored, decay, segments, before, after, grad_stored, grad_q, grad_k, grad_total, grad_reads,
        scale, *sizes, DELTA=delta, **options, num_warps=8,
    )  # fmt: skip
    if system is None:
        return ScanGradients(grad_q, grad_k, grad_stored, grad_total, None)
    grad_v, grad_beta = torch.empty_like(v, memory_format=torch.contiguous_format), torch.empty_like(system.beta)
    solved_values, solved_keys = torch.empty_like(system.values), torch.empty_like(system.reads)
    _solution_grads[chunks](
        k, v, decay, segments, system.beta, system.inverse, grad_stored, grad_reads, solved_values, solved_keys,
        grad_k, grad_v, grad_total, grad_beta, *sizes, **options, num_warps=8,
    )  # fmt: skip
    _system_grads[chunks](
        k, decay, segments, system.beta, system.values, system.reads, solved_values, solved_keys,
        grad_k, grad_total, grad_beta, *sizes, **options, num_warps=4,
    )  # fmt: skip
    return ScanGradients(grad_q, grad_k, grad_v, grad_total, grad_beta)


@triton.jit
def _local_grads(
    grad_ptr, q_ptr, k_ptr, decay_ptr, segments_ptr, out_ptr, scale,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    DELTA: tl.constexpr, WIDEN: tl.constexpr, NORMS: tl.constexpr,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Gradient of a chunk's values through the outputs of the same chunk: P^T dO."""
    first, chunk, head = tl.program_id(0) * VALUE, tl.program_id(1), tl.program_id(2)
    tokens, mask, rows, whole, total, ids, _, _, _ = open_chunk(
        decay_ptr, segments_ptr, chunk, head, length, batch, heads, CHUNK
    )
    q = load_keys(q_ptr, q_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
    k = load_keys(k_ptr, k_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
    grad = load_tile(grad_ptr, tokens, mask, value_width, first, VALUE)
    scores = scale * dot(k, tl.trans(q), None, WIDEN) * pair_decays_transposed(total, ids, CHUNK, False)
    out = dot(scores.to(grad.dtype), grad, None, WIDEN)
    if DELTA:
        store_tile(out_ptr, rows, whole, value_width, first, out, VALUE)
    else:
        store_tile(out_ptr, tokens, mask, value_width, first, out, VALUE)


@triton.jit
def _state_grads(
    grad_ptr, q_ptr, k_ptr, decay_ptr, segments_ptr, reads_ptr, grad_stored_ptr, after_ptr, scale,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    WIDEN: tl.constexpr, NORMS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
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
            decay_ptr, segments_ptr, chunk, head, length, batch, heads, CHUNK
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
    grad_q_ptr, grad_k_ptr, grad_total_ptr, grad_reads_ptr, scale,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    DELTA: tl.constexpr, WIDEN: tl.constexpr, NORMS: tl.constexpr,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k and decay through outputs and states, and of the delta rule's reads."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, held, rows, whole, total, ids, from_state, to_end, carry = open_chunk(
        decay_ptr, segments_ptr, chunk, head, length, batch, heads, CHUNK
    )
    number = chunk_number(chunk, head, length, CHUNK)
    of_q = tl.zeros((CHUNK, WIDTH), tl.float32)
    of_k = tl.zeros((CHUNK, WIDTH), tl.float32)
    of_reads = tl.zeros((CHUNK, WIDTH), tl.float32)
    pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    pairs_transposed = tl.zeros((CHUNK, CHUNK), tl.float32)
    of_carry = 0.0
    for first in range(0, value_width, VALUE):
        offsets, mask = state_offsets(number, width, value_width, first, WIDTH, VALUE)
        before = tl.load(before_ptr + offsets, mask=mask, other=0.0)
        after = tl.load(after_ptr + offsets, mask=mask, other=0.0)
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
        pairs_transposed = dot(stored, tl.trans(grad), pairs_transposed, WIDEN)
    q = load_keys(q_ptr, q_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
    k = load_keys(k_ptr, k_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
    of_q *= (scale * from_state)[:, None]
    of_k *= to_end[:, None]
    wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
    to_last = tl.sum(of_k * wide_k, axis=1)
    grad_total = tl.sum(of_q * wide_q, axis=1) - to_last
    whole_grad = tl.sum(to_last, axis=0) + carry * of_carry
    pairs *= scale * pair_decays(total, ids, CHUNK, False)
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
    store_tile(grad_q_ptr, tokens, held, width, 0, of_q, WIDTH)
    store_tile(grad_k_ptr, tokens, held, width, 0, of_k, WIDTH)
    if DELTA:
        store_tile(grad_reads_ptr, rows, whole, width, 0, -of_reads, WIDTH)
    # the decay of a token enters the cumulative decay of all later tokens
    later = tl.cumsum(grad_total, axis=0, reverse=True)
    tl.store(grad_total_ptr + tokens, later, mask=held)


@triton.jit
def _solution_grads(
    k_ptr, v_ptr, decay_ptr, segments_ptr, beta_ptr, inverse_ptr, grad_stored_ptr, grad_reads_ptr,
    solved_values_ptr, solved_keys_ptr, grad_k_ptr, grad_v_ptr, grad_total_ptr, grad_beta_ptr,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    WIDEN: tl.constexpr, NORMS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Gradients through the right-hand sides of the triangular systems, beta v and beta from_state k."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, mask, rows, whole, _, _, from_state, _, _ = open_chunk(
        decay_ptr, segments_ptr, chunk, head, length, batch, heads, CHUNK
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
    grad_k = load_tile(grad_k_ptr, tokens, mask, width, 0, WIDTH) + (beta * from_state)[:, None] * solved
    store_tile(grad_k_ptr, tokens, mask, width, 0, grad_k, WIDTH)
    tl.store(grad_beta_ptr + tokens, grad_beta + product, mask=mask)
    later = tl.cumsum(beta * product, axis=0, reverse=True)
    tl.store(grad_total_ptr + tokens, tl.load(grad_total_ptr + tokens, mask=mask, other=0.0) + later, mask=mask)


@triton.jit
def _system_grads(
    k_ptr, decay_ptr, segments_ptr, beta_ptr, values_ptr, reads_ptr, solved_values_ptr, solved_keys_ptr,
    grad_k_ptr, grad_total_ptr, grad_beta_ptr,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    WIDEN: tl.constexpr, NORMS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Gradients through the matrices of the systems, beta_i (k_i k_j) decay_ij."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, mask, rows, whole, total, ids, _, _, _ = open_chunk(
        decay_ptr, segments_ptr, chunk, head, length, batch, heads, CHUNK
    )
    beta = tl.load(beta_ptr + tokens, mask=mask, other=0.0)
    reads = load_tile(reads_ptr, rows, whole, width, 0, WIDTH)
    solved = load_tile(solved_keys_ptr, rows, whole, width, 0, WIDTH)
    pairs = dot(solved, tl.trans(reads), None, WIDEN)
    pairs_transposed = dot(reads, tl.trans(solved), None, WIDEN)
    for first in range(0, value_width, VALUE):
        values = load_tile(values_ptr, rows, whole, value_width, first, VALUE)
        solved_values = load_tile(solved_values_ptr, rows, whole, value_width, first, VALUE)
        pairs = dot(solved_values, tl.trans(values), pairs, WIDEN)
        pairs_transposed = dot(values, tl.trans(solved_values), pairs_transposed, WIDEN)
    k = load_keys(k_ptr, k_stride, eps, chunk, head, length, batch, groups, heads, width, NORMS, CHUNK, WIDTH)
    pairs *= -pair_decays(total, ids, CHUNK, True)
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
