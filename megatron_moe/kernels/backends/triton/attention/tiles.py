"""Helpers of the attention kernels: sizes, loads of rows of a head, products, and masks."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import INTERPRETED, power_of_two

WIDEST_HEAD = 256
"""Largest head dim of the kernels."""
BAND = ("left", "right")
"""Arguments that differ between the rectangles of a ring: one compiled kernel takes any."""

Segments = tuple[Tensor, Tensor]
"""Number of the document of every row and of every key, [B, S] each; attention stays inside of one."""


@dataclass(frozen=True)
class Shape:
    """Sizes of attention between some rows and some keys, and their band of the mask in the kernels' terms."""

    rows: int
    keys: int
    batch: int
    heads: int
    groups: int
    width: int
    value_width: int
    scale: float
    left: int
    """Row i sees the keys from i - left ..."""
    right: int
    """... to i + right."""

    @classmethod
    def of(
        cls, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, scale: float, left: int | None, right: int | None
    ) -> "Shape":
        """None: as far as there is anything."""
        rows, batch, heads, width = q_SBND.shape
        keys, _, groups, value_width = v_SBGE.shape
        left, right = rows if left is None else left, keys if right is None else right
        return cls(rows, keys, batch, heads, groups, width, value_width, scale, left, right)

    @property
    def sizes(self) -> tuple[int | float, ...]:
        """Sizes and strides in the order of the kernels' arguments."""
        per_group = self.heads // self.groups
        return (
            self.rows, self.keys, self.heads, per_group, self.batch, self.width, self.value_width, self.scale,
            self.left, self.right,
        )  # fmt: skip


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels can, and should, compute attention of these, without dropout."""
    narrow = max(q.shape[-1], v.shape[-1]) <= WIDEST_HEAD and q.numel() > 0 and k.numel() > 0
    # offsets are 32-bit; the output and its gradient are as large as the queries are with the values' width
    places = *(x.shape[0] * x.stride(0) for x in (q, k, v)), q.shape[:-1].numel() * v.shape[-1]
    near = max(places) < 2**31
    slow = q.dtype is torch.float32 and not INTERPRETED  # matrix units have no fp32
    return narrow and near and not slow


def strided(x: Tensor) -> Tensor:
    """What kernels can read: the numbers of a row are neighbours."""
    return x if x.stride(-1) == 1 else x.contiguous()


def of_both(segments_BS: Tensor | None) -> Segments | None:
    """Where rows and keys are the same places."""
    if segments_BS is None:
        return None
    segments_BS = strided(segments_BS)
    return segments_BS, segments_BS


def tile_width(width: int) -> int:
    """Dims of a tile: a power of two, and no fewer than the matrix units take."""
    return max(power_of_two(width), 16)


@triton.jit
def load_rows(base, stride, rows, num_rows, width, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """[rows, WIDTH] of one head; zeros past the last row and the last dim. `MASKED` False: all rows are there.

    Offsets are 32-bit, which halves the registers that hold them.
    """
    dims = tl.arange(0, WIDTH)
    place = base + (rows[:, None] * stride + dims[None, :])
    if MASKED:
        return tl.load(place, mask=(rows < num_rows)[:, None] & (dims < width)[None, :], other=0.0)
    else:
        return tl.load(place, mask=(dims < width)[None, :], other=0.0)


@triton.jit
def visible(rows, keys, of_rows, segments_ptr, num_keys, left, right, SEGMENTS: tl.constexpr):
    """bool [rows, keys]: which keys each row sees."""
    ahead = keys[None, :] - rows[:, None]
    seen = (ahead <= right) & (ahead >= -left) & (keys < num_keys)[None, :]
    if SEGMENTS:
        of_keys = tl.load(segments_ptr + keys, mask=keys < num_keys, other=-2)
        seen = seen & (of_rows[:, None] == of_keys[None, :])
    return seen


@triton.jit
def stretches(first, TILE: tl.constexpr, left, right, num_keys, STEP: tl.constexpr, SEGMENTS: tl.constexpr):
    """Four ends of the three stretches that a tile sees, which a caller walks in steps up to the last end: every place
    of the tile sees all of the middle one, so that it needs no mask. With left and right changed, who sees a tile."""
    begin = tl.maximum(first - left, 0) // STEP * STEP
    end = tl.minimum(first + TILE + right, num_keys)
    inner_begin, inner_end = begin, begin
    if not SEGMENTS:
        inner_begin = tl.maximum(tl.cdiv(tl.maximum(first + TILE - 1 - left, 0), STEP) * STEP, begin)
        inner_end = tl.maximum(tl.minimum(first + right + 1, num_keys) // STEP * STEP, inner_begin)
    return begin, inner_begin, inner_end, end
