"""Hugging Face folders written as a run goes (`--save-hf-interval`), whatever its layout.

One parameter, or one expert of it, at a time is gathered to the first rank, which writes it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_moe.checkpoint.directory import iteration_folder
from megatron_moe.checkpoint.huggingface.export import Export, write_folder
from megatron_moe.checkpoint.huggingface.folder import read_config
from megatron_moe.checkpoint.huggingface.load import weight_tensors
from megatron_moe.checkpoint.huggingface.weight_map import WeightMapping
from megatron_moe.checkpoint.tensor_shards import (
    SavedTensor,
    intersection,
    tensor_key,
)
from megatron_moe.config.run import RunPlan
from megatron_moe.kernels.reference import bundle
from megatron_moe.logs.reporter import Reporter
from megatron_moe.model.gpt import GPT
from megatron_moe.parallel.collectives import broadcast_, gather_objects
from megatron_moe.parallel.context import ParallelContext

FOLDER = "hf"
"""In the folder of checkpoints."""


@dataclass(frozen=True)
class _Place:
    """A block of a tensor, and the lowest rank that holds it."""

    rank: int
    number: int
    """Among the boxes of that rank."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class HuggingFaceExport:
    """Writes the exports of one run.

    Args:
        template: folder with the config.json that describes the model; tokenizer files go along.
        folder: the exports are its subfolders `iter_NNNNNNN`.
    Raises:
        CheckpointProblem: the config.json does not describe the model of the plan.
    """

    def __init__(
        self, plan: RunPlan, context: ParallelContext, template: Path, folder: Path, reporter: Reporter
    ) -> None:
        self._template, self._folder = template, folder
        self._context, self._reporter = context, reporter
        whole = GPT(plan.model, ParallelContext.single(dtype=context.dtype, device="meta"), bundle())
        self._export = Export(weight_tensors(whole), plan.model, read_config(template))
        for note in self._export.notes:
            reporter.note(f"exports to Hugging Face: {note}")
        self._last: int | None = None

    @classmethod
    def of(cls, plan: RunPlan, context: ParallelContext, reporter: Reporter) -> "HuggingFaceExport | None":
        """None for a run that exports nothing."""
        config = plan.checkpoint
        if config.hf_interval is None:
            return None
        assert config.save is not None and config.hf_config is not None, f"refused by the flags: {config}"
        return cls(plan, context, config.hf_config, config.save / FOLDER, reporter)

    def save(self, iteration: int, tensors: Mapping[str, SavedTensor]) -> None:
        """Writes the export of an iteration, in place of an earlier one; all ranks call it.

        `tensors`: what this rank holds of the weights, by `shards.tensor_key`. A failure is reported and training
        goes on.
        """
        if self._last == iteration:
            return
        self._last = iteration
        gatherer = _Gatherer(tensors, self._context)
        values = self._export.stream(gatherer.read)
        if not self._context.is_first:
            for mapping in self._export.mappings:
                gatherer.read(mapping)
            return
        path = self._folder / iteration_folder(iteration)
        try:
            write_folder(path, self._export, values, self._template, replace=True)
            self._reporter.note(f"exported iteration {iteration} as a Hugging Face folder to {path}")
        except OSError as error:
            self._reporter.note(f"the export of iteration {iteration} to {path} failed: {error}; training goes on")
        _exhaust(values)


def _exhaust(values: Iterator[Tensor]) -> None:
    """Takes part in what is left after a failure: the other ranks do not know of it."""
    for _ in values:
        pass


class _Gatherer:
    """Brings tensors together on the first rank. All ranks make one and read the same mappings in one order."""

    def __init__(self, tensors: Mapping[str, SavedTensor], context: ParallelContext) -> None:
        self._tensors = tensors
        self._context = context
        self._world = context.group("world")
        mine = {
            key: (tensor.shape, tensor.dtype, [(box.offset, tuple(box.data.shape)) for box in tensor.boxes])
            for key, tensor in tensors.items()
        }
        self._facts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._places: dict[str, list[_Place]] = {}
        # world: some 100 bytes per tensor
        for rank, held in enumerate(gather_objects(mine, self._world)):
            for key, (shape, dtype, boxes) in held.items():
                self._facts[key] = (shape, dtype)
                places = self._places.setdefault(key, [])
                known = {(place.offset, place.shape) for place in places}
                places += [_Place(rank, n, *box) for n, box in enumerate(boxes) if box not in known]

    def read(self, mapping: WeightMapping) -> Tensor:
        """The parameter, or the slice of one expert, in the first rank's host memory. Elsewhere its values are
        undefined."""
        key = tensor_key("model", mapping.name)
        shape, dtype = self._facts[key]
        offset = (0,) * len(shape)
        if mapping.expert is not None:
            shape, offset = (1, *shape[1:]), (mapping.expert, *offset[1:])
        first = self._context.is_first
        data = torch.empty(shape, dtype=dtype, device="cpu" if first else "meta")
        for place in self._places[key]:
            part = intersection(offset, shape, place.offset, place.shape)
            if part is not None:
                self._bring(key, place, part, data, offset)
        return data if mapping.expert is None else data[0]

    def _bring(
        self,
        key: str,
        place: _Place,
        part: tuple[tuple[int, ...], tuple[int, ...]],
        data: Tensor,
        offset: tuple[int, ...],
    ) -> None:
        """Copies the elements from part[0] to part[1] of a tensor from their rank into `data`, which begins at
        `offset`."""
        if place.rank == self._context.rank:
            box = self._tensors[key].boxes[place.number]
            values = box.data[_within(part, box.offset)].detach().contiguous()
        else:
            size = [end - begin for begin, end in zip(*part, strict=True)]
            values = torch.empty(size, dtype=data.dtype, device=self._context.device)
        if place.rank != 0:
            # world: one box of one parameter or expert. Broadcast, since a pair of ranks would need a communicator.
            broadcast_(values, self._world, source=place.rank)
        if self._context.is_first:
            data[_within(part, offset)].copy_(values)


def _within(part: tuple[tuple[int, ...], tuple[int, ...]], offset: tuple[int, ...]) -> tuple[slice, ...]:
    """Where a part of a tensor stands in a block that begins at `offset`."""
    return tuple(slice(begin - o, end - o) for begin, end, o in zip(*part, offset, strict=True))
