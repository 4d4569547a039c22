"""Weights stored in FP8 or FP4: bytes and scales that replace the values of a parameter (`--fp8-param-gather`,
`--fp4-param-gather`).

The bytes of a weight are a range of a flat buffer, in the order of the weight's elements, so that a data-parallel rank
can quantise any range of elements and an all-gather can exchange the bytes. The scales are computed from the largest
magnitudes of all blocks. Forward reads the bytes directly; the input gradient reads a transposed copy, which is made
for each use and not stored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.precision import WHOLE, OperandFormat
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor
from megatron_moe.precision.quantizers import element_dtype


@dataclass(frozen=True)
class BlockGrid:
    """Grid of quantisation blocks of a weight [O, I], or of each matrix of a stack [e, O, I]. The elements of a block
    share one scale."""

    block: tuple[int, int]
    """(rows, columns) of a block."""
    num: tuple[int, int, int]
    """Number of (matrices, blocks along O, blocks along I)."""
    columns_first: bool = False
    """True if the values of blocks along O are consecutive, as in the scales of (1, n) blocks."""

    @property
    def size(self) -> int:
        return prod(self.num)

    def view(self, flat: Tensor) -> Tensor:
        """View of one value per block, flat, as [e, blocks along O, blocks along I]."""
        num, along_o, along_i = self.num
        return flat.view(num, along_i, along_o).mT if self.columns_first else flat.view(self.num)


class StoredWeight:
    """Quantised storage of a weight [O, I] or a stack of weights [e, O, I]."""

    def __init__(
        self,
        shape: tuple[int, ...],
        fmt: OperandFormat,
        dtype: torch.dtype,
        scale: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`dtype`: dtype of the values, to which master weights are rounded before they are quantised. `scale`: returns
        the factor of each matrix, [] or [e], for a format whose factors do not depend on the weight."""
        self.shape = shape
        self.fmt = fmt
        self.dtype = dtype
        self.scale = scale
        self.grids = tuple(_grids(shape, fmt))
        """Blocks of each stored copy. Formats with blocks (1, n) have one copy for each direction."""
        self._codes: tuple[Tensor, ...] = ()
        self._scales: tuple[Tensor, ...] = ()
        self._factor: Tensor | None = None
        self._amax = torch.zeros(0)

    def attach(self, codes: tuple[Tensor, ...], scales: tuple[Tensor, ...], factor: Tensor | None = None) -> None:
        """Sets the flat tensors, one per copy, that contain bytes (uint8) and scales. `factor`: flat tensor of the
        factors of the matrices' scales (nvfp4)."""
        self._codes = tuple(code.view(element_dtype(self.fmt.element)) for code in codes)
        self._scales = scales
        self._factor = None if factor is None else factor.view(self.shape[:-2])
        self._amax = torch.zeros_like(scales[0] if self.scale is not None else scales[0][:0])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Bytes and scales of all copies, flat."""
        return (*self._codes, *self._scales, *(() if self._factor is None else (self._factor,)))

    @property
    def code_bits(self) -> tuple[int, ...]:
        """Bits per element of each quantised copy, in the order of `grids`."""
        return (self.fmt.bits,) * len(self.grids)

    @property
    def amax(self) -> Tensor:
        """Largest magnitude of each matrix when it was last quantised, fp32 [] or [e]; only with `scale`."""
        return self._amax.view(self.shape[:-2])

    @property
    def delayed_factors(self) -> Tensor:
        """Flat factors of the matrices for delayed scaling, computed from earlier steps."""
        assert self.scale is not None, f"the scales of {self.fmt} depend on the weight"
        return self.scale(self.amax).flatten()

    def operand(self) -> QuantizedTensor:
        """Weight as an operand of GEMMs, without the transposed copy."""
        scales = self._scales[0].view(self._scales_shape(self.grids[0]))
        row = QuantizedCopy(self._codes[0].view(*self.shape[:-1], -1), scales, self._factor)
        return QuantizedTensor(row, None, self.fmt.block, self.dtype)

    def with_columns(self, transpose: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """Weight as an operand of GEMMs, with the transposed copy, which `transpose` makes from the bytes [..., O, I],
        or [..., O, I / 2] of packed elements, whose rows O are padded to whole blocks."""
        grid, scales, data = self.grids[-1], self._scales[-1], self._codes[-1].view(*self.shape[:-1], -1)
        if self.fmt.element == "e2m1":
            data = F.pad(data, (0, 0, 0, -self.shape[-2] % self.fmt.block[0]))
        scales = scales.view(self._scales_shape(grid))
        if self.fmt.block[0] > 1:
            scales = scales.mT.contiguous()
        column = QuantizedCopy(transpose(data), scales, self._factor)
        return QuantizedTensor(self.operand().row_copy, column, self.fmt.block, self.dtype)

    def _scales_shape(self, grid: BlockGrid) -> tuple[int, ...]:
        _, along_o, along_i = grid.num
        if self.fmt.block == WHOLE:
            return self.shape[:-2]
        return (*self.shape[:-2], *((along_i, along_o) if grid.columns_first else (along_o, along_i)))


def _grids(shape: tuple[int, ...], fmt: OperandFormat) -> list[BlockGrid]:
    *stack, outputs, inputs = shape
    height, width = (outputs, inputs) if fmt.block == WHOLE else fmt.block

    def block_grid(block: tuple[int, int], *, columns_first: bool = False) -> BlockGrid:
        return BlockGrid(block, (prod(stack), -(-outputs // block[0]), -(-inputs // block[1])), columns_first)

    if fmt.block[0] == 1:
        return [block_grid((1, width), columns_first=True), block_grid((width, 1))]
    return [block_grid((height, width))]
