"""Backward of sparse attention, in which each query attends to selected rows of one key-value head.

One program computes the gradients of up to 64 heads of one query from the output's log-sum-exp. All matmuls have the
chosen rows as their first dimension: logits [KEYS, HEADS], gradients of rows [KEYS, width], and the transposed gradient
of q [width, HEADS], so no result of a matmul is transposed (Triton 3.4 to 3.7.0 miscompiles matmuls with a transposed
result of a matmul on Hopper). The gradients of rows are added to an fp32 buffer with atomics, in chunks of 128
channels, because those of all channels do not fit into registers next to the gradient of q.

Per query of N heads and K rows: 2 N K (3 D + 2 E) FLOPs, ceil(N / 64) K D gathered elements and as many atomic
additions. For N = 128, K = 2048, D = 576, E = 512: 1.44 GFLOP, 4.8 us at 300 TFLOP/s over the whole GPU, and 9.4 MB of
atomics in L2.
"""

import triton
import triton.language as tl

from megatron_moe.kernels.backends.triton.launch import dot
from megatron_moe.kernels.backends.triton.sparse_attention.forward import num_used


@triton.jit
def chosen_grads(
    q_ptr, kv_ptr, ids_ptr, grad_ptr, out_ptr, lse_ptr, delta_ptr, grad_q_ptr, grad_kv_ptr,
    batch, num_heads, num_ids, scale, q_u, q_b, q_n, kv_s, kv_b, g_u, g_b, g_n,
    WIDEN: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr, REST: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr,
):  # fmt: skip
    query = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    u, b = query // batch, query % batch
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims, rest = tl.arange(0, CHUNK), tl.arange(0, REST)
    there, of_rest = (heads < num_heads)[:, None], (rest < REST_WIDTH)[None, :]
    kv_ptr += b * kv_b
    ids_ptr += query * num_ids
    q_from = q_ptr + u * q_u + b * q_b + heads[:, None] * q_n
    grad_from = grad_ptr + u * g_u + b * g_b + heads[:, None] * g_n
    q_0 = _load_chunk(q_from, there, dims, 0, VALUE_WIDTH)
    q_1 = _load_chunk(q_from, there, dims, CHUNK, VALUE_WIDTH)
    q_2 = _load_chunk(q_from, there, dims, 2 * CHUNK, VALUE_WIDTH)
    q_3 = _load_chunk(q_from, there, dims, 3 * CHUNK, VALUE_WIDTH)
    if REST_WIDTH > 0:
        q_rest = tl.load(q_from + VALUE_WIDTH + rest[None, :], mask=there & of_rest, other=0.0)
        of_q_rest = tl.zeros((REST, HEADS), dtype=tl.float32)
    grad_0 = _load_chunk(grad_from, there, dims, 0, VALUE_WIDTH)
    grad_1 = _load_chunk(grad_from, there, dims, CHUNK, VALUE_WIDTH)
    grad_2 = _load_chunk(grad_from, there, dims, 2 * CHUNK, VALUE_WIDTH)
    grad_3 = _load_chunk(grad_from, there, dims, 3 * CHUNK, VALUE_WIDTH)
    lse = tl.load(lse_ptr + query * num_heads + heads, mask=heads < num_heads, other=0.0) * 1.4426950408889634
    out_from = out_ptr + (query * num_heads + heads)[:, None] * VALUE_WIDTH
    delta = _row_dot(grad_0, _load_chunk(out_from, there, dims, 0, VALUE_WIDTH))
    delta += _row_dot(grad_1, _load_chunk(out_from, there, dims, CHUNK, VALUE_WIDTH))
    delta += _row_dot(grad_2, _load_chunk(out_from, there, dims, 2 * CHUNK, VALUE_WIDTH))
    delta += _row_dot(grad_3, _load_chunk(out_from, there, dims, 3 * CHUNK, VALUE_WIDTH))
    tl.store(delta_ptr + query * num_heads + heads, delta, mask=heads < num_heads)
    of_q_0 = tl.zeros((CHUNK, HEADS), dtype=tl.float32)
    of_q_1 = tl.zeros((CHUNK, HEADS), dtype=tl.float32)
    of_q_2 = tl.zeros((CHUNK, HEADS), dtype=tl.float32)
    of_q_3 = tl.zeros((CHUNK, HEADS), dtype=tl.float32)
    factor = scale * 1.4426950408889634
    for at in range(0, num_used(ids_ptr, num_ids), KEYS):
        places = at + tl.arange(0, KEYS)
        ids = tl.load(ids_ptr + places, mask=places < num_ids, other=-1)
        found = (ids >= 0)[:, None]
        safe = tl.maximum(ids, 0)[:, None]
        rows = kv_ptr + safe * kv_s
        # a chunk of the rows is loaded directly before its dot products, which bounds the registers of loads in flight
        kv_0 = _load_chunk(rows, found, dims, 0, VALUE_WIDTH)
        logits = dot(kv_0, tl.trans(q_0), None, WIDEN)
        of_probs = dot(kv_0, tl.trans(grad_0), None, WIDEN)
        kv_1 = _load_chunk(rows, found, dims, CHUNK, VALUE_WIDTH)
        logits = dot(kv_1, tl.trans(q_1), logits, WIDEN)
        of_probs = dot(kv_1, tl.trans(grad_1), of_probs, WIDEN)
        kv_2 = _load_chunk(rows, found, dims, 2 * CHUNK, VALUE_WIDTH)
        logits = dot(kv_2, tl.trans(q_2), logits, WIDEN)
        of_probs = dot(kv_2, tl.trans(grad_2), of_probs, WIDEN)
        kv_3 = _load_chunk(rows, found, dims, 3 * CHUNK, VALUE_WIDTH)
        logits = dot(kv_3, tl.trans(q_3), logits, WIDEN)
        of_probs = dot(kv_3, tl.trans(grad_3), of_probs, WIDEN)
        if REST_WIDTH > 0:
            kv_rest = tl.load(rows + VALUE_WIDTH + rest[None, :], mask=found & of_rest, other=0.0)
            logits = dot(kv_rest, tl.trans(q_rest), logits, WIDEN)
        probs = tl.where(found & tl.trans(there), tl.exp2(logits * factor - lse[None, :]), 0.0)
        of_logits = (probs * (of_probs - delta[None, :]) * scale).to(kv_0.dtype)
        probs = probs.to(kv_0.dtype)
        of_q_0 = dot(tl.trans(kv_0), of_logits, of_q_0, WIDEN)
        of_q_1 = dot(tl.trans(kv_1), of_logits, of_q_1, WIDEN)
        of_q_2 = dot(tl.trans(kv_2), of_logits, of_q_2, WIDEN)
        of_q_3 = dot(tl.trans(kv_3), of_logits, of_q_3, WIDEN)
        to = grad_kv_ptr + (safe.to(tl.int64) * batch + b) * (VALUE_WIDTH + REST_WIDTH)
        of_rows = dot(of_logits, q_0, dot(probs, grad_0, None, WIDEN), WIDEN)
        tl.atomic_add(to + dims[None, :], of_rows, mask=found & (dims < VALUE_WIDTH)[None, :], sem="relaxed")
        of_rows = dot(of_logits, q_1, dot(probs, grad_1, None, WIDEN), WIDEN)
        columns = CHUNK + dims
        tl.atomic_add(to + columns[None, :], of_rows, mask=found & (columns < VALUE_WIDTH)[None, :], sem="relaxed")
        of_rows = dot(of_logits, q_2, dot(probs, grad_2, None, WIDEN), WIDEN)
        columns = 2 * CHUNK + dims
        tl.atomic_add(to + columns[None, :], of_rows, mask=found & (columns < VALUE_WIDTH)[None, :], sem="relaxed")
        of_rows = dot(of_logits, q_3, dot(probs, grad_3, None, WIDEN), WIDEN)
        columns = 3 * CHUNK + dims
        tl.atomic_add(to + columns[None, :], of_rows, mask=found & (columns < VALUE_WIDTH)[None, :], sem="relaxed")
        if REST_WIDTH > 0:
            of_q_rest = dot(tl.trans(kv_rest), of_logits, of_q_rest, WIDEN)
            of_rows = dot(of_logits, q_rest, None, WIDEN)
            tl.atomic_add(to + VALUE_WIDTH + rest[None, :], of_rows, mask=found & of_rest, sem="relaxed")
    to = grad_q_ptr + (query * num_heads + heads)[None, :] * (VALUE_WIDTH + REST_WIDTH)
    _store_chunk(to, of_q_0, there, dims, 0, VALUE_WIDTH)
    _store_chunk(to, of_q_1, there, dims, CHUNK, VALUE_WIDTH)
    _store_chunk(to, of_q_2, there, dims, 2 * CHUNK, VALUE_WIDTH)
    _store_chunk(to, of_q_3, there, dims, 3 * CHUNK, VALUE_WIDTH)
    if REST_WIDTH > 0:
        mask = tl.trans(there) & (rest < REST_WIDTH)[:, None]
        tl.store(to + VALUE_WIDTH + rest[:, None], of_q_rest.to(grad_q_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_chunk(rows, there, dims, first: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    """Tile [rows, CHUNK] of the value channels from `first` on."""
    columns = first + dims
    return tl.load(rows + columns[None, :], mask=there & (columns < VALUE_WIDTH)[None, :], other=0.0)


@triton.jit
def _store_chunk(to, values, there, dims, first: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    """Stores a transposed chunk [CHUNK, HEADS] of the gradient of q."""
    columns = first + dims
    mask = tl.trans(there) & (columns < VALUE_WIDTH)[:, None]
    tl.store(to + columns[:, None], values.to(to.dtype.element_ty), mask=mask)


@triton.jit
def _row_dot(a, b):
    return tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)
