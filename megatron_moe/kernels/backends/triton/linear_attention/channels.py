"""Decays per channel of the keys (Kimi delta attention, arXiv 2510.26692).

Let G be the cumulative log decays of a chunk. The factors exp(G_i) of q_i and k_i, which read the state before the
chunk, and exp(G_end - G_j) of k_j, which writes to the state after it, are multiplied by q and k here. The kernels for
one decay per head then take the products in place of q and k, and decay nothing but the states.

Scores within a chunk contain exp(G_i - G_j), which is not a product of two bounded factors. Chunks are therefore
divided into blocks of 16 tokens. If j is in an earlier block than i, both exp(G_i - G_s) and exp(G_s - G_j) are at most
1, where s is the first token of i's block (for gradients of k_j: the last one of j's block). Within a block, the
exponential is computed for every pair. Log decays of tokens beyond the end are read as 0, so differences are limited to
0.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.config.linear_attention import CHUNK
from megatron_moe.kernels.backends.triton.linear_attention.backward import DecayedGradients
from megatron_moe.kernels.backends.triton.linear_attention.tiles import (
    ScanKeys,
    ScanShape,
    chunk_number,
    load_keys,
    load_tile,
    store_tile,
    token_offsets,
)

BLOCK = 16
"""Tokens per block of a chunk."""
_BLOCK = tl.constexpr(BLOCK)


class ChannelDecays(NamedTuple):
    """Results of `decayed_keys`."""

    keys: ScanKeys
    """q and k, normalised and multiplied by the decays between their tokens and the ends of the chunk."""
    total: Tensor
    """Cumulative log decays within chunks, fp32 [S, B, M, D]."""
    norms: Tensor | None
    """Reciprocal norms of the rows of q and k, fp32 [2, S, B, M]; None if they are not normalised."""


def decayed_keys(q: Tensor, k: Tensor, log_decay: Tensor, shape: ScanShape) -> ChannelDecays:
    total = torch.empty_like(log_decay)
    whole = log_decay.new_empty(shape.batch * shape.heads, shape.num_chunks, shape.width)
    norms = None if shape.eps is None else log_decay.new_empty(2, *log_decay.shape[:3])
    reading_q, reading_k, writing_k = (k.new_empty(log_decay.shape) for _ in range(3))
    _decayed_keys[(shape.num_chunks, shape.batch * shape.heads)](
        q, k, log_decay, total, whole, norms, reading_q, reading_k, writing_k, *shape.sizes,
        **_key_tiles(shape), num_warps=8,
    )  # fmt: skip
    return ChannelDecays(ScanKeys(reading_q, reading_k, writing_k, whole, shape.of_decayed_keys()), total, norms)


def pair_products(
    q: Tensor, k: Tensor, decays: ChannelDecays, shape: ScanShape, *, delta: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the scores q_i k_j, in the dtype of k, and for the delta rule also k_i k_j in fp32, both with the decay
    from token j to token i: [B * M, chunks, CHUNK, CHUNK]. Entries for j > i are finite, but have no meaning."""
    scores = k.new_empty(shape.batch * shape.heads, shape.num_chunks, CHUNK, CHUNK)
    products = torch.empty_like(scores, dtype=torch.float32) if delta else None
    _pair_products[(shape.num_chunks * (CHUNK // BLOCK), shape.batch * shape.heads)](
        q, k, decays.total, decays.norms, scores, products, *shape.sizes, **_key_tiles(shape), num_warps=4
    )
    return scores, products


def gradients(
    found: DecayedGradients, q: Tensor, k: Tensor, beta: Tensor | None, grad_beta: Tensor | None,
    decays: ChannelDecays, shape: ScanShape,
) -> Tensor:  # fmt: skip
    """Completes the gradients of q and k in `found.reading_q` and `found.writing_k`, and that of beta in `grad_beta`;
    returns the gradient of the log decays, fp32 [S, B, M, D], in the storage of `found.reading_k` if there is one."""
    grad_decay = torch.empty_like(decays.total) if found.reading_k is None else found.reading_k
    _pair_grads[(shape.num_chunks, shape.batch * shape.heads)](
        q, k, decays.total, decays.keys.decay, decays.norms, beta, found.scores, found.products, found.whole,
        found.reading_q, found.writing_k, grad_decay, grad_beta, *shape.sizes,
        DELTA=beta is not None, **_key_tiles(shape), num_warps=8,
    )  # fmt: skip
    return grad_decay


def _key_tiles(shape: ScanShape) -> dict[str, int]:
    return {name: shape.tiles[name] for name in ("NORMS", "CHUNK", "WIDTH")}


@triton.jit
def _decayed_keys(
    q_ptr, k_ptr, decay_ptr, total_ptr, whole_ptr, norms_ptr, reading_q_ptr, reading_k_ptr, writing_k_ptr,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    NORMS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    chunk, head = tl.program_id(0), tl.program_id(1)
    tokens, mask = token_offsets(chunk, head, length, batch, heads, CHUNK)
    total = tl.cumsum(load_tile(decay_ptr, tokens, mask, width, 0, WIDTH), axis=0)
    store_tile(total_ptr, tokens, mask, width, 0, total, WIDTH)
    whole = _row(total, CHUNK - 1, CHUNK)
    dims = tl.arange(0, WIDTH)[None, :]
    tl.store(whole_ptr + chunk_number(chunk, head, length, CHUNK) * width + dims, whole, mask=dims < width)
    q = load_keys(q_ptr, q_stride, eps, chunk, head, length, batch, groups, heads, width, False, CHUNK, WIDTH)
    k = load_keys(k_ptr, k_stride, eps, chunk, head, length, batch, groups, heads, width, False, CHUNK, WIDTH)
    q, k = q.to(tl.float32), k.to(tl.float32)
    if NORMS:
        norm_q, norm_k = tl.rsqrt(tl.sum(q * q, axis=1) + eps), tl.rsqrt(tl.sum(k * k, axis=1) + eps)
        tl.store(norms_ptr + tokens, norm_q, mask=mask)
        tl.store(norms_ptr + length * batch * heads + tokens, norm_k, mask=mask)
        q, k = q * norm_q[:, None], k * norm_k[:, None]
    from_state = tl.exp(total)
    store_tile(reading_q_ptr, tokens, mask, width, 0, from_state * q, WIDTH)
    store_tile(reading_k_ptr, tokens, mask, width, 0, from_state * k, WIDTH)
    store_tile(writing_k_ptr, tokens, mask, width, 0, tl.exp(whole - total) * k, WIDTH)


@triton.jit
def _row(tile, number, ROWS: tl.constexpr):
    """Row `number` of a tile [ROWS, WIDTH], as [1, WIDTH]."""
    return tl.sum(tl.where((tl.arange(0, ROWS) == number)[:, None], tile, 0.0), axis=0)[None, :]


@triton.jit
def _load_block(
    ptr, norms_ptr, stride, block, head, length, batch, groups, heads, width,
    NORMS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Loads rows of q or k, normalised, fp32 [BLOCK, WIDTH]. `norms_ptr`: reciprocal norms of the rows."""
    x = load_keys(ptr, stride, 0.0, block, head, length, batch, groups, heads, width, False, BLOCK, WIDTH)
    x = x.to(tl.float32)
    if NORMS:
        tokens, mask = token_offsets(block, head, length, batch, heads, BLOCK)
        x *= tl.load(norms_ptr + tokens, mask=mask, other=0.0)[:, None]
    return x


@triton.jit
def _decay(later, earlier):
    """Decay between tokens from their cumulative log decays."""
    return tl.exp(tl.minimum(later - earlier, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _pair_products(
    q_ptr, k_ptr, total_ptr, norms_ptr, scores_ptr, products_ptr,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    NORMS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    BLOCKS: tl.constexpr = CHUNK // _BLOCK
    SLICE: tl.constexpr = min(WIDTH, 32)
    chunk = block // BLOCKS
    start, at = chunk * BLOCKS, tl.arange(0, _BLOCK)
    rows, held = chunk_number(chunk, head, length, CHUNK) * CHUNK + (block - start) * _BLOCK + at, at < _BLOCK
    tokens, mask = token_offsets(block, head, length, batch, heads, _BLOCK)
    norms_k_ptr = norms_ptr
    if NORMS:
        norms_k_ptr = norms_ptr + length * batch * heads
    # earlier blocks
    total = load_tile(total_ptr, tokens, mask, width, 0, WIDTH)
    first = _row(total, 0, _BLOCK)
    from_first = _decay(total, first)
    q = _load_block(q_ptr, norms_ptr, q_stride, block, head, length, batch, groups, heads, width, NORMS, _BLOCK, WIDTH)
    k = _load_block(
        k_ptr, norms_k_ptr, k_stride, block, head, length, batch, groups, heads, width, NORMS, _BLOCK, WIDTH
    )
    q, k = q * from_first, k * from_first
    for other in range(start, block):
        keys = _load_block(
            k_ptr, norms_k_ptr, k_stride, other, head, length, batch, groups, heads, width, NORMS, _BLOCK, WIDTH
        )
        others, exist = token_offsets(other, head, length, batch, heads, _BLOCK)
        keys = tl.trans(keys * _decay(first, load_tile(total_ptr, others, exist, width, 0, WIDTH)))
        column = (other - start) * _BLOCK
        store_tile(scores_ptr, rows, held, CHUNK, column, tl.dot(q, keys, input_precision="tf32"), _BLOCK)
        if products_ptr is not None:
            store_tile(products_ptr, rows, held, CHUNK, column, tl.dot(k, keys, input_precision="tf32"), _BLOCK)
    # pairs within the block, in slices of the channels; in this order of dims, each thread sums over channels
    scores, products = tl.zeros((_BLOCK, _BLOCK), tl.float32), tl.zeros((_BLOCK, _BLOCK), tl.float32)
    sequences, _ = token_offsets(block, head // heads, length, batch, 1, _BLOCK)
    group = (head % heads) // (heads // groups)
    for dim in range(0, width, SLICE):
        dims = (dim + tl.arange(0, SLICE))[:, None]
        part = (dims < width) & mask[None, :]
        some_q = tl.load(q_ptr + sequences[None, :] * q_stride + group * width + dims, mask=part, other=0.0)
        some_k = tl.load(k_ptr + sequences[None, :] * k_stride + group * width + dims, mask=part, other=0.0)
        some_q, some_k = some_q.to(tl.float32), some_k.to(tl.float32)
        totals = tl.load(total_ptr + tokens[None, :] * width + dims, mask=part, other=0.0)
        decayed = some_k[:, None, :] * tl.exp(-tl.abs(totals[:, :, None] - totals[:, None, :]))
        scores += tl.sum(some_q[:, :, None] * decayed, axis=0)
        products += tl.sum(some_k[:, :, None] * decayed, axis=0)
    if NORMS:
        norm_k = tl.load(norms_k_ptr + tokens, mask=mask, other=0.0)
        scores *= tl.load(norms_ptr + tokens, mask=mask, other=0.0)[:, None] * norm_k[None, :]
        products *= norm_k[:, None] * norm_k[None, :]
    # stores the products within the block, and zeros for the later blocks of the chunk
    for other in range(block, start + BLOCKS):
        column, inside = (other - start) * _BLOCK, other == block
        store_tile(scores_ptr, rows, held, CHUNK, column, tl.where(inside, scores, 0.0), _BLOCK)
        if products_ptr is not None:
            store_tile(products_ptr, rows, held, CHUNK, column, tl.where(inside, products, 0.0), _BLOCK)


@triton.jit
def _add_block_grads(
    of_q, of_k, of_rows, total, q_ptr, k_ptr, total_ptr, norms_ptr, norms_k_ptr, beta_ptr, grad_scores_ptr,
    grad_products_ptr, q_stride, k_stride, block, row, head, length, batch, groups, heads, width,
    DELTA: tl.constexpr, NORMS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds the gradients through pairs of different tokens of a block, one token at a time. `row`: index of the block's
    first row in the gradients of pairs."""
    at, dims = tl.arange(0, _BLOCK), tl.arange(0, WIDTH)[None, :]
    is_dim, column = dims < width, row % CHUNK
    group = (head % heads) // (heads // groups) * width
    for token in range(0, _BLOCK):
        exists = block * _BLOCK + token < length
        sequence = (block * _BLOCK + token).to(tl.int64) * batch + head // heads
        place = sequence * heads + head % heads
        q = tl.load(q_ptr + sequence * q_stride + group + dims, mask=is_dim & exists, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + sequence * k_stride + group + dims, mask=is_dim & exists, other=0.0).to(tl.float32)
        if NORMS:
            q *= tl.load(norms_ptr + place, mask=exists, other=0.0)
            k *= tl.load(norms_k_ptr + place, mask=exists, other=0.0)
        decay = tl.exp(-tl.abs(total - tl.load(total_ptr + place * width + dims, mask=is_dim & exists, other=0.0)))
        with_key, with_query = ((row + at) * CHUNK + column + token, (row + token) * CHUNK + column + at)
        decayed = decay * k
        of_q += tl.load(grad_scores_ptr + with_key, mask=at != token, other=0.0).to(tl.float32)[:, None] * decayed
        scores = tl.load(grad_scores_ptr + with_query, mask=at != token, other=0.0).to(tl.float32)
        of_k += scores[:, None] * (decay * q)
        if DELTA:
            beta = tl.load(beta_ptr + place, mask=exists, other=0.0)
            of_rows += tl.load(grad_products_ptr + with_key).to(tl.float32)[:, None] * decayed
            of_k += (beta * tl.load(grad_products_ptr + with_query).to(tl.float32))[:, None] * decayed
    return of_q, of_k, of_rows


@triton.jit
def _pair_grads(
    q_ptr, k_ptr, total_ptr, whole_ptr, norms_ptr, beta_ptr, grad_scores_ptr, grad_products_ptr, grad_whole_ptr,
    grad_q_ptr, grad_k_ptr, grad_decay_ptr, grad_beta_ptr,
    q_stride, k_stride, v_stride, eps, length, batch, groups, heads, width, value_width,
    DELTA: tl.constexpr, NORMS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds the gradients through pairs of tokens of a chunk, for blocks of tokens from the last to the first. The
    cumulative log decay of a token enters its products as exp(G_i) with q_i and k_i, and as exp(-G_j) with k_j."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    BLOCKS: tl.constexpr = CHUNK // _BLOCK
    number = chunk_number(chunk, head, length, CHUNK)
    at, dims = tl.arange(0, _BLOCK), tl.arange(0, WIDTH)[None, :]
    held, is_dim = at < _BLOCK, dims < width
    norms_k_ptr = norms_ptr
    if NORMS:
        norms_k_ptr = norms_ptr + length * batch * heads
    whole = tl.load(whole_ptr + number * width + dims, mask=is_dim, other=0.0)
    later = tl.load(grad_whole_ptr + number * width + dims, mask=is_dim, other=0.0)
    num_blocks = tl.minimum(tl.cdiv(length - chunk * CHUNK, _BLOCK), BLOCKS)
    for step in range(0, num_blocks):
        index = num_blocks - 1 - step
        block, rows, column = chunk * BLOCKS + index, number * CHUNK + index * _BLOCK + at, index * _BLOCK
        tokens, mask = token_offsets(block, head, length, batch, heads, _BLOCK)
        total = load_tile(total_ptr, tokens, mask, width, 0, WIDTH)
        first, last = _row(total, 0, _BLOCK), _row(total, _BLOCK - 1, _BLOCK)
        # earlier blocks
        of_q, of_rows = tl.zeros((_BLOCK, WIDTH), tl.float32), tl.zeros((_BLOCK, WIDTH), tl.float32)
        for other in range(0, index):
            others, exist = token_offsets(chunk * BLOCKS + other, head, length, batch, heads, _BLOCK)
            keys = _load_block(
                k_ptr, norms_k_ptr, k_stride, chunk * BLOCKS + other, head, length, batch, groups, heads, width,
                NORMS, _BLOCK, WIDTH,
            )  # fmt: skip
            keys *= _decay(first, load_tile(total_ptr, others, exist, width, 0, WIDTH))
            scores = load_tile(grad_scores_ptr, rows, held, CHUNK, other * _BLOCK, _BLOCK).to(tl.float32)
            of_q = tl.dot(scores, keys, of_q, input_precision="tf32")
            if DELTA:
                products = load_tile(grad_products_ptr, rows, held, CHUNK, other * _BLOCK, _BLOCK).to(tl.float32)
                of_rows = tl.dot(products, keys, of_rows, input_precision="tf32")
        of_q *= _decay(total, first)
        of_rows *= _decay(total, first)
        # later blocks
        of_k = tl.zeros((_BLOCK, WIDTH), tl.float32)
        for other in range(index + 1, num_blocks):
            others, exist = token_offsets(chunk * BLOCKS + other, head, length, batch, heads, _BLOCK)
            decay = _decay(load_tile(total_ptr, others, exist, width, 0, WIDTH), last)
            queries = decay * _load_block(
                q_ptr, norms_ptr, q_stride, chunk * BLOCKS + other, head, length, batch, groups, heads, width,
                NORMS, _BLOCK, WIDTH,
            )  # fmt: skip
            # loaded as the transpose
            offsets = (number * CHUNK + other * _BLOCK + at)[None, :] * CHUNK + column + at[:, None]
            of_k = tl.dot(tl.load(grad_scores_ptr + offsets).to(tl.float32), queries, of_k, input_precision="tf32")
            if DELTA:
                keys = decay * _load_block(
                    k_ptr, norms_k_ptr, k_stride, chunk * BLOCKS + other, head, length, batch, groups, heads, width,
                    NORMS, _BLOCK, WIDTH,
                )  # fmt: skip
                keys *= tl.load(beta_ptr + others, mask=exist, other=0.0)[:, None]
                of_k = tl.dot(tl.load(grad_products_ptr + offsets).to(tl.float32), keys, of_k, input_precision="tf32")
        of_k *= _decay(last, total)
        # the same block; pairs of a token with itself, which do not decay, are added at the end
        of_q, of_k, of_rows = _add_block_grads(
            of_q, of_k, of_rows, total, q_ptr, k_ptr, total_ptr, norms_ptr, norms_k_ptr, beta_ptr, grad_scores_ptr,
            grad_products_ptr, q_stride, k_stride, block, number * CHUNK + column, head, length, batch, groups, heads,
            width, DELTA, NORMS, CHUNK, WIDTH,
        )  # fmt: skip
        # states
        q = _load_block(
            q_ptr, norms_ptr, q_stride, block, head, length, batch, groups, heads, width, NORMS, _BLOCK, WIDTH
        )
        k = _load_block(
            k_ptr, norms_k_ptr, k_stride, block, head, length, batch, groups, heads, width, NORMS, _BLOCK, WIDTH
        )
        from_state = tl.exp(total)
        of_q += from_state * load_tile(grad_q_ptr, tokens, mask, width, 0, WIDTH)
        of_k += _decay(whole, total) * load_tile(grad_k_ptr, tokens, mask, width, 0, WIDTH)
        if DELTA:
            beta = tl.load(beta_ptr + tokens, mask=mask, other=0.0)
            grad_beta = tl.load(grad_beta_ptr + tokens, mask=mask, other=0.0) + tl.sum(of_rows * k, axis=1)
            tl.store(grad_beta_ptr + tokens, grad_beta, mask=mask)
            of_rows = beta[:, None] * of_rows + from_state * load_tile(grad_decay_ptr, tokens, mask, width, 0, WIDTH)
        grad_total = q * of_q + k * (of_rows - of_k)
        grad_decay = later + tl.cumsum(grad_total, axis=0, reverse=True)
        later += tl.sum(grad_total, axis=0)[None, :]
        alone = tl.load(grad_scores_ptr + rows * CHUNK + column + at).to(tl.float32)[:, None]
        of_q += alone * k
        of_k += of_rows + alone * q
        if NORMS:
            norm_q = tl.load(norms_ptr + tokens, mask=mask, other=0.0)[:, None]
            norm_k = tl.load(norms_k_ptr + tokens, mask=mask, other=0.0)[:, None]
            of_q = norm_q * (of_q - q * tl.sum(of_q * q, axis=1)[:, None])
            of_k = norm_k * (of_k - k * tl.sum(of_k * k, axis=1)[:, None])
        store_tile(grad_decay_ptr, tokens, mask, width, 0, grad_decay, WIDTH)
        store_tile(grad_q_ptr, tokens, mask, width, 0, of_q, WIDTH)
        store_tile(grad_k_ptr, tokens, mask, width, 0, of_k, WIDTH)
