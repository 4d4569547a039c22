"""Helpers of the linear attention kernels: sizes, tile loads, decays and masks of a chunk.

One program works on a chunk of `CHUNK` tokens of one value head. q and k are [S, B, N, D] and v [S, B, M, E]; their
rows [N, D] and [M, E] are contiguous and evenly spaced, so that they may be parts of one tensor. All other tensors are
contiguous: log decay and beta [S, B, M], results of chunks [B * M, chunks, ...].
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.config.linear_attention import CHUNK
from megatron_moe.kernels.backends.triton.launch import cdiv, power_of_two

WIDEST_HEAD = 128
"""Largest head dim that the kernels support."""


@dataclass(frozen=True)
class ScanShape:
    """Sizes of linear attention."""

    length: int
    batch: int
    groups: int
    """Number of heads of q and k."""
    heads: int
    """Number of heads of v, a multiple of `groups`."""
    width: int
    value_width: int

    strides: tuple[int, int, int]
    """Numbers of elements between consecutive rows, for q, k and v."""
    eps: float | None
    """Epsilon of the L2 normalisation of the rows of q and k; None for no normalisation."""
    decayed_keys: bool = False
    """Whether q and k contain the decays within the chunk (`channels.py`)."""

    @classmethod
    def of(cls, q_SBND: Tensor, k_SBND: Tensor, v_SBME: Tensor, eps: float | None) -> "ScanShape":
        length, batch, heads, value_width = v_SBME.shape
        strides = row_stride(q_SBND), row_stride(k_SBND), row_stride(v_SBME)
        return cls(length, batch, q_SBND.shape[2], heads, q_SBND.shape[3], value_width, strides, eps)

    def of_decayed_keys(self) -> "ScanShape":
        """Sizes for q and k [S, B, M, D] that are normalised and contain the decays within the chunk."""
        row = self.heads * self.width
        strides = row, row, self.strides[2]
        return replace(self, groups=self.heads, strides=strides, eps=None, decayed_keys=True)

    @property
    def num_chunks(self) -> int:
        return cdiv(self.length, CHUNK)

    @property
    def sizes(self) -> tuple[int | float, ...]:
        """Sizes in the order of the kernels' arguments."""
        eps = self.eps or 0.0
        return (*self.strides, eps, self.length, self.batch, self.groups, self.heads, self.width, self.value_width)

    @property
    def tiles(self) -> dict[str, int]:
        """Constants of the kernels: whether keys are normalised, whether q and k contain the decays within the chunk,
        and tile sizes of tokens, keys and values."""
        value = max(power_of_two(self.value_width), 16)
        return {
            "NORMS": self.eps is not None,
            "DECAYED": self.decayed_keys,
            "CHUNK": CHUNK,
            "WIDTH": max(power_of_two(self.width), 16),
            "VALUE": min(value, 64),
        }

    @property
    def value_tiles(self) -> int:
        return cdiv(self.value_width, self.tiles["VALUE"])


class ScanKeys(NamedTuple):
    """Queries, keys and decays of the kernels for states and outputs. With a decay per head, q and k themselves; with a
    decay per channel, q and k multiplied by the decays within the chunk (`channels.py`)."""

    reading_q: Tensor
    reading_k: Tensor
    """Keys with which the delta rule reads the state before the chunk."""
    writing_k: Tensor
    """Keys with which tokens write to the state after the chunk."""
    decay: Tensor
    """Log decays [S, B, M], or for decayed keys those of whole chunks, [B * M, chunks, D]."""
    shape: ScanShape


def row_stride(x: Tensor) -> int:
    """Elements between consecutive rows [N, D] of x [S, B, N, D]. For B = 1 the stride of that dim is arbitrary: views
    of a part of a tensor have the width of the part."""
    return x.stride(1) if x.shape[1] > 1 else x.stride(0)


def with_even_row_stride(x: Tensor) -> Tensor:
    """x [S, B, N, D] with contiguous rows [N, D] that are evenly spaced; copies only if necessary."""
    _, batch, _, width = x.shape
    spaced = x.stride(3) == 1 and x.stride(2) == width and x.stride(0) == batch * row_stride(x)
    return x if spaced else x.contiguous()


@triton.jit
def token_offsets(chunk, head, length, batch, heads, CHUNK: tl.constexpr):
    """Returns (offsets of a chunk's tokens in [S, B, heads], bool mask of tokens that exist). `head`: index in
    [B, heads]."""
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    return (tokens.to(tl.int64) * batch) * heads + head, tokens < length


@triton.jit
def load_keys(
    ptr, stride, eps, chunk, head, length, batch, groups, heads, width,
    NORMS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Loads the rows of q or k, [CHUNK, WIDTH], that value head `head` (index in [B, heads]) reads. `stride`: elements
    between the rows of [S, B]. `NORMS`: divides each row by its norm."""
    rows, mask = token_offsets(chunk, head // heads, length, batch, 1, CHUNK)
    dims = tl.arange(0, WIDTH)
    ptr += (head % heads) // (heads // groups) * width
    x = tl.load(ptr + rows[:, None] * stride + dims[None, :], mask=mask[:, None] & (dims < width)[None, :], other=0.0)
    if NORMS:
        wide = x.to(tl.float32)
        x = (wide * tl.rsqrt(tl.sum(wide * wide, axis=1) + eps)[:, None]).to(x.dtype)
    return x


@triton.jit
def grad_of_keys(
    grad, ptr, stride, eps, chunk, head, length, batch, groups, heads, width,
    NORMS: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradient of rows of q or k before normalisation. `grad`: gradient of the rows that `load_keys` returns, fp32
    [CHUNK, WIDTH]."""
    if NORMS:
        x = load_keys(ptr, stride, eps, chunk, head, length, batch, groups, heads, width, False, CHUNK, WIDTH).to(
            tl.float32
        )
        scale = tl.rsqrt(tl.sum(x * x, axis=1) + eps)[:, None]
        normed = x * scale
        grad = scale * (grad - normed * tl.sum(grad * normed, axis=1)[:, None])
    return grad


@triton.jit
def load_values(
    ptr, stride, chunk, head, length, batch, heads, width, first, CHUNK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Loads the rows of v of value head `head` (index in [B, heads]), from channel `first` on; see `load_keys`."""
    rows, mask = token_offsets(chunk, head // heads, length, batch, 1, CHUNK)
    dims = first + tl.arange(0, WIDTH)
    ptr += (head % heads) * width
    return tl.load(
        ptr + rows[:, None] * stride + dims[None, :], mask=mask[:, None] & (dims < width)[None, :], other=0.0
    )


@triton.jit
def load_tile(ptr, rows, mask, width, first, WIDTH: tl.constexpr):
    """Loads a tile [CHUNK, WIDTH] from channel `first` on, padded with 0. `rows`: offsets of the rows in units of
    `width` elements."""
    dims = first + tl.arange(0, WIDTH)
    return tl.load(ptr + rows[:, None] * width + dims[None, :], mask=mask[:, None] & (dims < width)[None, :], other=0.0)


@triton.jit
def store_tile(ptr, rows, held, width, first, tile, WIDTH: tl.constexpr):
    """Stores a tile [CHUNK, WIDTH] at the offsets of `load_tile`."""
    dims = first + tl.arange(0, WIDTH)
    mask = held[:, None] & (dims < width)[None, :]
    tl.store(ptr + rows[:, None] * width + dims[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def chunk_number(chunk, head, length, CHUNK: tl.constexpr):
    """Index of a chunk's result in [B * M, chunks]."""
    return (head * tl.cdiv(length, CHUNK) + chunk).to(tl.int64)


@triton.jit
def state_offsets(number, width, value_width, first, WIDTH: tl.constexpr, VALUE: tl.constexpr):
    """Returns (offsets [WIDTH, VALUE], mask) of the state [width, value_width] with index `number`, from value channel
    `first` on."""
    keys, values = tl.arange(0, WIDTH), first + tl.arange(0, VALUE)
    offsets = number * width * value_width + keys[:, None] * value_width + values[None, :]
    return offsets, (keys < width)[:, None] & (values < value_width)[None, :]


@triton.jit
def open_chunk(
    decay_ptr, segments_ptr, chunk, head, length, batch, heads, width,
    DECAYED: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Loads the offsets and decays of a chunk, which all kernels need.

    Returns (offsets of its tokens in [S, B, heads], bool mask of tokens that exist, offsets of its rows in results of
    chunks, all-true mask of these rows, cumulative log decay [CHUNK], document ids [CHUNK], decay from the state before
    the chunk to each token, decay from each token to the chunk's end, decay over the whole chunk). Tokens beyond the
    end belong to the last document and have a log decay of 0. The last three are 0 where another document lies between.
    `DECAYED`: q and k contain the decays within the chunk, so that all but the last, [WIDTH, 1], are 1.
    """
    tokens, mask = token_offsets(chunk, head, length, batch, heads, CHUNK)
    at = tl.arange(0, CHUNK)
    number = chunk_number(chunk, head, length, CHUNK)
    rows = number * CHUNK + at
    if DECAYED:
        dims = tl.arange(0, WIDTH)
        whole = tl.load(decay_ptr + number * width + dims, mask=dims < width, other=0.0)[:, None]
        total = tl.zeros((CHUNK,), tl.float32)
        from_state, to_end = tl.exp(total), tl.exp(total)
    else:
        total = tl.cumsum(tl.load(decay_ptr + tokens, mask=mask, other=0.0), axis=0)
        whole = tl.sum(tl.where(at == CHUNK - 1, total, 0.0), axis=0)
        from_state, to_end = tl.exp(total), tl.exp(whole - total)
    carry = tl.exp(whole)
    ids = tl.zeros((CHUNK,), tl.int64)
    if segments_ptr is not None:
        segments_ptr += head // heads * length
        first = chunk * CHUNK
        ids = tl.load(segments_ptr + tl.minimum(first + at, length - 1)).to(tl.int64)
        before = tl.load(segments_ptr + tl.maximum(first - 1, 0)).to(tl.int64)
        last = tl.load(segments_ptr + tl.minimum(first + CHUNK, length) - 1).to(tl.int64)
        from_state = tl.where(ids == before, from_state, 0.0)
        to_end = tl.where(ids == last, to_end, 0.0)
        carry = tl.where(before == last, carry, 0.0)
    return tokens, mask, rows, at < CHUNK, total, ids, from_state, to_end, carry


@triton.jit
def pair_decays(total, ids, CHUNK: tl.constexpr, STRICT: tl.constexpr):
    """Decay from token j to token i, fp32 [i, j]: 0 unless j <= i (`STRICT`: j < i) is in the same document."""
    tokens = tl.arange(0, CHUNK)
    seen = (ids[:, None] == ids[None, :]) & (tokens[:, None] >= tokens[None, :] + (1 if STRICT else 0))
    return tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))


@triton.jit
def pair_decays_transposed(total, ids, CHUNK: tl.constexpr, STRICT: tl.constexpr):
    """`pair_decays` transposed, [j, i]."""
    tokens = tl.arange(0, CHUNK)
    seen = (ids[:, None] == ids[None, :]) & (tokens[None, :] >= tokens[:, None] + (1 if STRICT else 0))
    return tl.exp(tl.where(seen, total[None, :] - total[:, None], float("-inf")))
