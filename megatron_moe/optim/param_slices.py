"""Slices of parameters in ranges of flat buffers, as matrices with their role, splits and shards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from megatron_moe.config.param_meta import ParamBox, ParamMeta, local_boxes
from megatron_moe.optim.param_layout import ParamSlot
from megatron_moe.parallel.collectives import all_gather_flat
from megatron_moe.parallel.context import ProcessGroup
from megatron_moe.parallel.parameter import Parameter


@dataclass(frozen=True)
class ParamSlice:
    """Elements of one parameter in a range of a flat buffer.

    The matrices of a parameter are the experts of a stack, or the parameter itself; a vector is a matrix of one row.
    """

    slot: ParamSlot
    parameter: Parameter
    start: int
    """Offset of the first element in the buffer."""
    end: int
    shards: ProcessGroup
    """Tensor-parallel group (tp, for experts etp), over which each matrix is sharded or replicated."""

    @property
    def name(self) -> str:
        """Global name of the parameter."""
        return self.slot.name

    @property
    def meta(self) -> ParamMeta:
        """Metadata of the parameter: role, `splits` (q, k and v; gate and up), sharded dim, number of experts."""
        return self.parameter.meta

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of this rank's shard of one matrix."""
        return _rows_and_columns(self.slot.shape, self.meta)

    @cached_property
    def whole_shape(self) -> tuple[int, int]:
        """(rows, columns) of one matrix, before tensor parallelism."""
        return _rows_and_columns(self.parameter.global_shape, self.meta)

    @cached_property
    def first_matrix(self) -> int:
        """Index of the first matrix of this slice among those of this rank's shard of the parameter."""
        rows, columns = self.shape
        index, rest = divmod(self.start - self.slot.start, rows * columns)
        assert rest == 0, f"{self.name}: a range starts {rest} elements after the start of a matrix"
        return index

    @cached_property
    def num_matrices(self) -> int:
        """Number of matrices in this slice."""
        rows, columns = self.shape
        number, rest = divmod(self.end - self.start, rows * columns)
        assert rest == 0, f"{self.name}: a range ends {rest} elements after the start of a matrix"
        return number

    def chunks(self, most_elements: int) -> Iterator["ParamSlice"]:
        """Yields slices of whole matrices of this slice that have at most `most_elements` elements before tensor
        parallelism, but at least one matrix."""
        number = max(1, most_elements // prod(self.whole_shape)) * prod(self.shape)
        for start in range(self.start, self.end, number):
            yield replace(self, start=start, end=min(start + number, self.end))

    def matrices(self, flat: Tensor, first: int) -> Tensor:
        """View [n, rows, columns] of this slice in `flat`, whose first element has the offset `first` in the buffer."""
        return flat[self.start - first : self.end - first].view(self.num_matrices, *self.shape)

    def gathered(self, shard: Tensor) -> Tensor:
        """All-gathers shards of n matrices like those of this slice into whole matrices [n, rows, columns]. Collective
        over `shards`."""
        if not self.is_sharded:
            return shard
        flat = shard.new_empty(self.shards.size * shard.numel())
        # collective over tp or etp: the matrices of one parameter
        all_gather_flat(flat, shard.contiguous().view(-1), self.shards)
        whole = shard.new_empty(len(shard), *self.whole_shape)
        for rank, part in enumerate(flat.view(self.shards.size, *shard.shape)):
            for box, values in zip(self._boxes(rank), self._parts_of(part, rank), strict=True):
                whole[_inside(box)] = values
        return whole

    def shard_of(self, whole: Tensor) -> Tensor:
        """This rank's shard [n, rows, columns] of whole matrices."""
        if not self.is_sharded:
            return whole
        dim = -2 if self.meta.tp_dim == 0 else -1
        return torch.cat([whole[_inside(box)] for box in self._boxes(self.shards.rank)], dim=dim)

    def split(self, matrices: Tensor) -> list[Tensor]:
        """Splits matrices [n, rows, columns] along the rows into q, k and v (each with the rows of all query groups),
        or into gate and up. Matrices of other parameters are returned as a single part."""
        sizes = self._split_sizes(matrices.shape[-2])
        grouped = matrices.unflatten(-2, (-1, sum(sizes)))
        return [part.flatten(-3, -2) for part in grouped.split(sizes, dim=-2)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Inverse of `split`."""
        sizes = self._split_sizes(sum(part.shape[-2] for part in parts))
        grouped = [part.unflatten(-2, (-1, size)) for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(grouped, dim=-2).flatten(-3, -2)

    @property
    def is_sharded(self) -> bool:
        """True if tensor-parallel ranks hold different parts of each matrix."""
        return self.meta.tp_dim is not None and self.shards.size > 1

    def _split_sizes(self, rows: int) -> list[int]:
        """Row counts of the concatenated matrices (`ParamMeta.splits`: q, k, v or gate, up) in `rows` rows of a shard.
        If they sum to less than `rows`, the sequence repeats, once per query group."""
        splits = self.meta.splits if self.meta.tp_dim == 0 else ()
        total = sum(splits)
        if not total:
            return [rows]
        if rows % total:  # rows of a shard: every part is sharded
            return [split * rows // total for split in splits]
        return list(splits)

    def _boxes(self, rank: int) -> tuple[ParamBox, ...]:
        """Boxes of a whole matrix that a tensor-parallel rank holds."""
        meta, shape = replace(self.meta, num_experts=None), self.whole_shape
        assert len(self.slot.shape) - (self.meta.num_experts is not None) == 2, f"{self.name} is not a matrix"
        return local_boxes(shape, meta, tp=(rank, self.shards.size), ep=(0, 1))

    def _parts_of(self, shard: Tensor, rank: int) -> tuple[Tensor, ...]:
        """Parts of a rank's shard [n, rows, columns], one per box."""
        dim = self.meta.tp_dim or 0
        return shard.split([box.size[dim] for box in self._boxes(rank)], dim=dim - 2)


def _rows_and_columns(shape: Sequence[int], meta: ParamMeta) -> tuple[int, int]:
    matrix = shape if meta.num_experts is None else shape[1:]
    rows, columns = (1, *matrix)[-2:]
    return rows, columns


def _inside(box: ParamBox) -> tuple[slice, ...]:
    """Slices of a box in stacked matrices [n, rows, columns]."""
    return (slice(None), *(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True)))
