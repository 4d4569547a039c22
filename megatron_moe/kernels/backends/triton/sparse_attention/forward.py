"""Forward of sparse attention, in which each query attends to selected rows of one key-value head that all query heads
share.

One program computes up to 64 heads of one query: the heads are the rows of the matmuls, so every chosen row is
read once per 64 heads. Rows are gathered by index, with an online softmax over blocks of them.

Per query of N heads and K chosen rows, widths D of keys and E of values: 2 N K (D + E) FLOPs and ceil(N / 64) K D
gathered elements, most of which are in the L2 cache. For N = 128, K = 2048, D = 576, E = 512 these are 0.57 GFLOP and
4.7 MB: 1.4 us at 400 TFLOP/s over the whole GPU, 0.9 us at 5.5 TB/s from L2.
"""

import triton
import triton.language as tl

from megatron_moe.kernels.backends.triton.launch import dot


@triton.jit
def attend_to_chosen(
    q_ptr, kv_ptr, ids_ptr, sinks_ptr, out_ptr, lse_ptr,
    batch, num_heads, num_ids, scale, q_u, q_b, q_n, kv_s, kv_b,
    SINKS: tl.constexpr, WIDEN: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, VALUE: tl.constexpr, REST: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr,
):  # fmt: skip
    # the last queries, which have the most ids, are processed first
    query = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    u, b = query // batch, query % batch
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims, rest = tl.arange(0, VALUE), tl.arange(0, REST)
    q_ptr += u * q_u + b * q_b
    kv_ptr += b * kv_b
    ids_ptr += query * num_ids
    there = (heads < num_heads)[:, None]
    of_value, of_rest = (dims < VALUE_WIDTH)[None, :], (rest < REST_WIDTH)[None, :]
    q_from = q_ptr + heads[:, None] * q_n
    q = tl.load(q_from + dims[None, :], mask=there & of_value, other=0.0)
    if REST_WIDTH > 0:
        q_rest = tl.load(q_from + VALUE_WIDTH + rest[None, :], mask=there & of_rest, other=0.0)
    factor = scale * 1.4426950408889634
    total = tl.zeros((HEADS,), dtype=tl.float32)
    peak = tl.full((HEADS,), -3.4028234663852886e38, dtype=tl.float32)
    if SINKS:
        sink = tl.load(sinks_ptr + heads, mask=heads < num_heads, other=0.0).to(tl.float32)
        peak = sink * 1.4426950408889634
        total += 1.0
    out = tl.zeros((HEADS, VALUE), dtype=tl.float32)
    for at in range(0, num_used(ids_ptr, num_ids), KEYS):
        places = at + tl.arange(0, KEYS)
        ids = tl.load(ids_ptr + places, mask=places < num_ids, other=-1)
        found = ids >= 0
        rows = kv_ptr + tl.maximum(ids, 0)[:, None] * kv_s
        kv = tl.load(rows + dims[None, :], mask=found[:, None] & of_value, other=0.0)
        logits = dot(q, tl.trans(kv), None, WIDEN)
        if REST_WIDTH > 0:
            kv_rest = tl.load(rows + VALUE_WIDTH + rest[None, :], mask=found[:, None] & of_rest, other=0.0)
            logits = dot(q_rest, tl.trans(kv_rest), logits, WIDEN)
        logits = tl.where(found[None, :], logits * factor, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, axis=1))
        probs = tl.exp2(logits - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(probs, axis=1)
        out = dot(probs.to(kv.dtype), kv, out * shrink[:, None], WIDEN)
        peak = new_peak
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    lse = tl.where(seen, (peak + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    to_ptr = out_ptr + (query * num_heads + heads)[:, None] * VALUE_WIDTH + dims[None, :]
    tl.store(to_ptr, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=there & of_value)
    tl.store(lse_ptr + query * num_heads + heads, lse, mask=heads < num_heads)


@triton.jit
def num_used(ids_ptr, num_ids):
    """Number of ids of a query up to its last one that is not -1."""
    last = tl.zeros((256,), dtype=tl.int32)
    for at in range(0, num_ids, 256):
        places = at + tl.arange(0, 256)
        ids = tl.load(ids_ptr + places, mask=places < num_ids, other=-1)
        last = tl.maximum(last, tl.where(ids >= 0, places + 1, 0))
    return tl.max(last, axis=0)
