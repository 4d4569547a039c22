"""What attention's kernels share: sizes, the load of some rows of a head, products, and which pairs see each other."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import power_of_two
from megatron_moe.specs.attention import CoreAttentionSpec


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention, and the window in the kernels' terms."""

    seq: int
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
    def of(cls, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, spec: CoreAttentionSpec) -> "Shape":
        seq, batch, heads, width = q_SBND.shape
        left, right = (seq if side < 0 else side for side in spec.window or (-1, -1))
        return cls(
            seq, batch, heads, k_SBGD.shape[2], width, v_SBGE.shape[3], spec.softmax_scale, left,
            0 if spec.causal else right,
        )  # fmt: skip

    @property
    def sizes(self) -> tuple[int | float, ...]:
        """As every kernel takes them."""
        per_group = self.heads // self.groups
        return (
            self.seq, self.heads, per_group, self.batch, self.width, self.value_width, self.scale, self.left, self.right
        )  # fmt: skip


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
def dot(a, b, total, WIDEN: tl.constexpr):
    """a b, plus the total if there is one, in fp32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def visible(rows, keys, of_rows, segments_ptr, seq, left, right, SEGMENTS: tl.constexpr):
    """bool [rows, keys]: which keys each row sees."""
    ahead = keys[None, :] - rows[:, None]
    seen = (ahead <= right) & (ahead >= -left) & (keys < seq)[None, :]
    if SEGMENTS:
        of_keys = tl.load(segments_ptr + keys, mask=keys < seq, other=-2)
        seen = seen & (of_rows[:, None] == of_keys[None, :])
    return seen


@triton.jit
def stretches(first, TILE: tl.constexpr, left, right, seq, STEP: tl.constexpr, SEGMENTS: tl.constexpr):
    """Four ends of the three stretches that a tile sees, which a caller walks in steps up to the last end: every place
    of the tile sees all of the middle one, so that it needs no mask. With left and right changed, who sees a tile."""
    begin = tl.maximum(first - left, 0) // STEP * STEP
    end = tl.minimum(first + TILE + right, seq)
    inner_begin, inner_end = begin, begin
    if not SEGMENTS:
        inner_begin = tl.maximum(tl.cdiv(tl.maximum(first + TILE - 1 - left, 0), STEP) * STEP, begin)
        inner_end = tl.maximum(tl.minimum(first + right + 1, seq) // STEP * STEP, inner_begin)
    return begin, inner_begin, inner_end, end
