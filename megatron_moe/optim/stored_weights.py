"""Quantises master weights to the FP8 or FP4 bytes that replace the weights of parameters (`--fp8-param-gather`,
`--fp4-param-gather`).

Each data-parallel rank owns the master weights of a range of every bucket, which may begin or end inside a block of
elements with a common scale. The ranks therefore compute the largest magnitudes of the blocks in their ranges and
combine them in one all-reduce; then each rank quantises its range. The bytes equal those of a quantised bf16 weight,
whatever the number of ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.config.param_meta import Grid
from megatron_moe.config.precision import OperandFormat
from megatron_moe.kernels.ops import WeightPart
from megatron_moe.optim.grad_buffers import FlatBuffer, GradBuffers, replica_group_name
from megatron_moe.optim.param_layout import ParamSlot
from megatron_moe.optim.state import OptimizerState
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.precision.nvfp4 import weight_scales
from megatron_moe.precision.quantizers import SCALE_DTYPES, block_scales, element_dtype
from megatron_moe.precision.stored_weight import StoredWeight


@dataclass(frozen=True)
class _SameForm:
    """Weights with the same format and the same replica group, whose scales are reduced together."""

    weights: tuple[StoredWeight, ...]
    scales: Tensor
    """Scales of all blocks of all weights, flat, as GEMMs read them."""
    matrix_factors: Tensor
    """Factor of the scales of every matrix, flat in fp32 (nvfp4); empty for other formats."""

    def split(self, flat: Tensor) -> list[tuple[Tensor, ...]]:
        """Splits flat values, one per block, into one view per weight."""
        views = iter(flat.split([grid.size for weight in self.weights for grid in weight.grids]))
        return [tuple(next(views) for _ in weight.grids) for weight in self.weights]

    def set_scales(self, amax: Tensor) -> Tensor:
        """Sets the scales for the largest magnitudes `amax` of all blocks. Returns the factors by which elements are
        multiplied."""
        first, pairs = self.weights[0], zip(self.weights, self.split(amax), strict=True)
        if first.scale is not None:  # the format has one copy, whose block is the whole matrix
            for weight, (found,) in pairs:
                weight.amax.copy_(found.view_as(weight.amax))
            factors = torch.cat([weight.delayed_factors for weight in self.weights])
            scales = 1 / factors
        # nvfp4: one copy; the largest magnitude of a matrix is the maximum over its blocks
        elif first.fmt.element == "e2m1":
            made = [weight_scales(weight.grids[0].view(found)) for weight, (found,) in pairs]
            factors, scales, of_matrices = (
                torch.cat([each.flatten() for each in flats]) for flats in zip(*made, strict=True)
            )
            self.matrix_factors.copy_(of_matrices)
        else:
            factors, scales = block_scales(amax, first.fmt, first.dtype)
        self.scales.copy_(scales)
        return factors


class StoredWeights:
    """All weights of this rank that are stored in FP8 or FP4."""

    def __init__(self, buffers: GradBuffers, states: Sequence[OptimizerState]) -> None:
        self.buffers = tuple(buffer for buffer in buffers.buffers if buffer.codes)
        self.states = tuple(state for state in states if state.buffer.codes)
        self._kernels, self._context = buffers.kernels, buffers.context
        self._sharded = buffers.data_parallel.use_distributed_optimizer
        self._groups: dict[Grid, list[_SameForm]] = {}
        """Weights by grid. The magnitudes of a grid's weights are reduced together."""
        found: dict[tuple[Grid, OperandFormat, bool], list[tuple[StoredWeight, tuple[Tensor, ...]]]] = {}
        for buffer in self.buffers:
            for param, weight in _weights_of(buffer):
                codes = buffer.storage_views(param.start, param.end)
                key = buffer.key.grid, weight.fmt, weight.scale is None
                found.setdefault(key, []).append((weight, codes))
        for (grid, fmt, _), members in found.items():
            size = sum(grid.size for weight, _ in members for grid in weight.grids)
            scales = torch.zeros(size, dtype=SCALE_DTYPES[fmt.scale], device=buffers.device)
            num_matrices = [weight.grids[0].num[0] if fmt.element == "e2m1" else 0 for weight, _ in members]
            factors = torch.zeros(sum(num_matrices), device=buffers.device)
            same = _SameForm(tuple(weight for weight, _ in members), scales, factors)
            rows = zip(members, same.split(scales), factors.split(num_matrices), strict=True)
            for (weight, codes), views, factor in rows:
                weight.attach(codes, views, factor if len(factor) else None)
            self._groups.setdefault(grid, []).append(same)

    @torch.no_grad()
    def update(self) -> None:
        """Quantises the master weights of the ranges that this rank owns. Collective over the replica groups."""
        for grid, forms in self._groups.items():
            amax = torch.zeros(sum(len(same.scales) for same in forms), device=self.buffers[0].weights.device)
            by_form = amax.split([len(same.scales) for same in forms])
            of_weight = self._by_weight(forms, by_form)
            for buffer, start, weight, part in self._parts(grid):
                for blocks, found in zip(weight.grids, of_weight[weight], strict=True):
                    self._kernels.weight_amax_(found, part, blocks.block)
                # scales still have the values of earlier steps, so that masters in host memory are copied only once
                if weight.scale is not None:
                    self._quantize(buffer, start, weight, part, [weight.grids[0].view(weight.delayed_factors)])
            if self._sharded:
                # collective over dp_cp or edp: 2 or 4 bytes per block of all weights; magnitudes of bf16 weights are
                # exact in bf16
                dtype = forms[0].weights[0].dtype
                narrow = amax.to(dtype) if dtype.itemsize < amax.itemsize else amax
                amax.copy_(all_reduce_(narrow, self._context.group(replica_group_name(grid)), "max"))
            factors = [same.set_scales(part) for same, part in zip(forms, by_form, strict=True)]
            if all(weight.scale is not None for same in forms for weight in same.weights):
                continue
            of_weight = self._by_weight(forms, factors)
            for buffer, start, weight, part in self._parts(grid):
                if weight.scale is None:
                    self._quantize(buffer, start, weight, part, of_weight[weight])

    def _by_weight(self, forms: Sequence[_SameForm], flats: Sequence[Tensor]) -> dict[StoredWeight, list[Tensor]]:
        """Splits flat per-block values into one tensor per weight, [e, blocks along O, blocks along I]."""
        return {
            weight: [grid.view(view) for grid, view in zip(weight.grids, views, strict=True)]
            for same, flat in zip(forms, flats, strict=True)
            for weight, views in zip(same.weights, same.split(flat), strict=True)
        }

    def _quantize(
        self, buffer: FlatBuffer, start: int, weight: StoredWeight, part: WeightPart, factors: Sequence[Tensor]
    ) -> None:
        """Quantises a part of a weight, from element `start` of the buffer on. `factors`: see `_by_weight`."""
        codes = buffer.owned_storage_views(start, start + len(part.values))
        for grid, values, out in zip(weight.grids, factors, codes, strict=True):
            self._kernels.quantize_weight_part(part, values, grid.block, out.view(element_dtype(weight.fmt.element)))

    def _parts(self, of_grid: Grid) -> Iterator[tuple[FlatBuffer, int, StoredWeight, WeightPart]]:
        """Yields (buffer, offset in the buffer, weight, part of the weight) of the master weights of this rank."""
        for state in self.states:
            if state.buffer.key.grid != of_grid:
                continue
            for first, values in state.masters():
                begin, end = state.start + first, state.start + first + len(values)
                for param, weight in _weights_of(state.buffer):
                    start, stop = max(param.start, begin), min(param.end, end)
                    if start < stop:
                        held = values[start - begin : stop - begin]
                        yield (
                            state.buffer,
                            start,
                            weight,
                            WeightPart(held, start - param.start, param.shape, weight.dtype),
                        )


def _weights_of(buffer: FlatBuffer) -> Iterator[tuple[ParamSlot, StoredWeight]]:
    for param, each in zip(buffer.layout.params, buffer.main_grads, strict=True):
        assert each.parameter.stored is not None, f"{param.name} is stored in its own dtype"
        yield param, each.parameter.stored
