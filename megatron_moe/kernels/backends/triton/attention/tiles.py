"""Helpers of the attention kernels: sizes, row loads, and masks."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import INTERPRETED, power_of_two

WIDEST_HEAD = 256
"""Largest head dim that the attention kernels support."""
BAND = ("left", "right")
"""Kernel arguments that Triton must not specialise, so that one compiled kernel serves all rectangles."""

Segments = tuple[Tensor, Tensor]
"""Document id of each query row and of each key, [B, S] each; attention does not cross documents."""


@dataclass(frozen=True)
class Shape:
    """Sizes and mask band of attention between query rows and keys, as passed to the kernels."""

    rows: int
    keys: int
    batch: int
    heads: int
    groups: int
    width: int
    value_width: int
    scale: float
    left: int
    """Query row i attends to no key before key i - left."""
    right: int
    """Query row i attends to no key after key i + right."""

    @classmethod
    def of(
        cls, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, scale: float, left: int | None, right: int | None
    ) -> "Shape":
        """Sizes of the given tensors; None for `left` or `right` means no limit on that side."""
        rows, batch, heads, width = q_SBND.shape
        keys, _, groups, value_width = v_SBGE.shape
        left, right = rows if left is None else left, keys if right is None else right
        return cls(rows, keys, batch, heads, groups, width, value_width, scale, left, right)

    @property
    def sizes(self) -> tuple[int | float, ...]:
        """Sizes and mask band in the order of the kernels' arguments."""
        per_group = self.heads // self.groups
        return (
            self.rows, self.keys, self.heads, per_group, self.batch, self.width, self.value_width, self.scale,
            self.left, self.right,
        )  # fmt: skip


def supports_inputs(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether sizes and dtype are suitable for the kernels. Callers must check for dropout, which is not supported."""
    narrow = max(q.shape[-1], v.shape[-1]) <= WIDEST_HEAD and q.numel() > 0 and k.numel() > 0
    # Offsets are 32-bit. The output and its gradient are [S, B, N, E].
    positions = *(x.shape[0] * x.stride(0) for x in (q, k, v)), q.shape[:-1].numel() * v.shape[-1]
    near = max(positions) < 2**31
    slow = q.dtype is torch.float32 and not INTERPRETED  # tensor cores do not support fp32
    return narrow and near and not slow


def unit_stride(x: Tensor) -> Tensor:
    """Returns x with a contiguous last dimension (stride 1), as the kernels require; copies only if necessary."""
    return x if x.stride(-1) == 1 else x.contiguous()


def self_attention_segments(segments_BS: Tensor | None) -> Segments | None:
    """Document ids for self-attention, where query rows and keys have the same ids; None if `segments_BS` is None."""
    if segments_BS is None:
        return None
    segments_BS = unit_stride(segments_BS)
    return segments_BS, segments_BS


def tile_width(width: int) -> int:
    """Columns of a tile for a head dim: a power of two, at least the tensor cores' minimum of 16."""
    return max(power_of_two(width), 16)


@triton.jit
def load_rows(base, stride, rows, num_rows, width, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Loads a tile [rows, WIDTH] of one head, padded with 0 beyond `num_rows` and `width`. `MASKED` False: all rows are
    below `num_rows`. Offsets are 32-bit, which halves their registers."""
    dims = tl.arange(0, WIDTH)
    offsets = base + (rows[:, None] * stride + dims[None, :])
    if MASKED:
        return tl.load(offsets, mask=(rows < num_rows)[:, None] & (dims < width)[None, :], other=0.0)
    else:
        return tl.load(offsets, mask=(dims < width)[None, :], other=0.0)


@triton.jit
def visible(rows, keys, of_rows, segments_ptr, num_keys, left, right, SEGMENTS: tl.constexpr):
    """Returns the mask, bool [rows, keys]: True where the row attends to the key."""
    ahead = keys[None, :] - rows[:, None]
    seen = (ahead <= right) & (ahead >= -left) & (keys < num_keys)[None, :]
    if SEGMENTS:
        of_keys = tl.load(segments_ptr + keys, mask=keys < num_keys, other=-2)
        seen = seen & (of_rows[:, None] == of_keys[None, :])
    return seen


@triton.jit
def visible_ranges(first, TILE: tl.constexpr, left, right, num_keys, STEP: tl.constexpr, SEGMENTS: tl.constexpr):
    """Returns key ranges (begin, inner_begin, inner_end, end) for a tile of rows. Rows see no key outside [begin, end).
    All rows see all keys in [inner_begin, inner_end). To get row ranges for a tile of keys, swap left and right."""
    begin = tl.maximum(first - left, 0) // STEP * STEP
    end = tl.minimum(first + TILE + right, num_keys)
    inner_begin, inner_end = begin, begin
    if not SEGMENTS:
        inner_begin = tl.maximum(tl.cdiv(tl.maximum(first + TILE - 1 - left, 0), STEP) * STEP, begin)
        inner_end = tl.maximum(tl.minimum(first + right + 1, num_keys) // STEP * STEP, inner_begin)
    return begin, inner_begin, inner_end, end
