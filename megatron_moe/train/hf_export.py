"""Export of Hugging Face folders during training (`--save-hf-interval`), from any parallel layout.

Parameters are gathered to the first rank one at a time (one expert at a time for expert weights) and written there.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_moe.checkpoint.directory import iteration_folder
from megatron_moe.checkpoint.huggingface.config_write import generated_config
from megatron_moe.checkpoint.huggingface.export import Export, write_folder, write_template
from megatron_moe.checkpoint.huggingface.folder import read_config
from megatron_moe.checkpoint.huggingface.load import weight_tensors
from megatron_moe.checkpoint.huggingface.weight_map import WeightMapping
from megatron_moe.checkpoint.tensor_shards import TensorShard, block_slices, intersection, tensor_key
from megatron_moe.config.checkpoint import CheckpointConfig, HFDescription
from megatron_moe.config.model import ModelConfig
from megatron_moe.kernels.reference.backend import bundle
from megatron_moe.logs.reporter import Reporter
from megatron_moe.model.gpt import GPT
from megatron_moe.parallel.collectives import broadcast_, gather_objects
from megatron_moe.parallel.context import ParallelContext

FOLDER = "hf"
"""Subfolder of the checkpoint folder in which exports are written."""
_Part = tuple[tuple[int, ...], tuple[int, ...]]
"""Box in a full tensor: (first indices, end indices), with one index per dim; ends are exclusive."""


class _BoxSource(NamedTuple):
    """Box of a tensor and the lowest rank that holds it."""

    rank: int
    number: int
    """Index of this box in `TensorShard.boxes` on rank `rank`."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class HuggingFaceExport:
    """Writes the Hugging Face exports of one run.

    Args:
        template: folder with the model's config.json and the tokenizer files, which are copied; or the description of
            the files to generate.
        folder: folder in which each export gets a subfolder `iter_NNNNNNN`.

    Raises:
        CheckpointProblem: config.json does not describe the model.
    """

    def __init__(
        self,
        model: ModelConfig,
        context: ParallelContext,
        template: Path | HFDescription,
        folder: Path,
        reporter: Reporter,
    ) -> None:
        self._template, self._folder = template, folder
        self._context, self._reporter = context, reporter
        unsharded = GPT(model, ParallelContext.single(dtype=context.dtype, device="meta"), bundle())
        if isinstance(template, Path):
            values: Mapping[str, Any] = read_config(template)
        else:
            values = generated_config(model, template.vocab_size)
            reporter.note(f"exports to Hugging Face: config.json for {values['architectures'][0]} is generated")
        self._export = Export(weight_tensors(unsharded), model, values)
        for note in self._export.notes:
            reporter.note(f"exports to Hugging Face: {note}")
        self._last: int | None = None

    @classmethod
    def of(
        cls, config: CheckpointConfig, model: ModelConfig, context: ParallelContext, reporter: Reporter
    ) -> "HuggingFaceExport | None":
        """Creates the exporter of a run with `--save-hf-interval`; returns None without this flag."""
        if config.save_hf_interval is None:
            return None
        template = config.save_hf_config or config.hf_description
        assert config.save is not None and template is not None, f"the flag checks should have rejected {config}"
        return cls(model, context, template, config.save / FOLDER, reporter)

    def save(self, iteration: int, tensors: Mapping[str, TensorShard]) -> None:
        """Writes or replaces the export of an iteration. Collective; a write error is reported and training continues.

        `tensors`: this rank's part of the weights; the keys are made by `tensor_shards.tensor_key`.
        """
        if self._last == iteration:
            return
        self._last = iteration
        gatherer = _Gatherer(tensors, self._context)
        values = self._export.stream(gatherer.gather)
        if not self._context.is_first:
            for mapping in self._export.mappings:
                gatherer.gather(mapping)
            return
        path = self._folder / iteration_folder(iteration)
        try:
            with TemporaryDirectory() as name:
                template = self._template
                if isinstance(template, HFDescription):
                    write_template(Path(name), self._export.hf_config, template.tokenizer)
                    template = Path(name)
                write_folder(path, self._export, values, template, replace=True)
            self._reporter.note(f"exported iteration {iteration} as a Hugging Face folder to {path}")
        except OSError as error:
            self._reporter.note(f"the export of iteration {iteration} to {path} failed: {error}; training continues")
        for _ in values:  # after a failure, takes part in the remaining collectives of the other ranks
            pass


class _Gatherer:
    """Gathers tensors to the first rank. Collective: all ranks call `gather` for the same mappings, in the same
    order."""

    def __init__(self, tensors: Mapping[str, TensorShard], context: ParallelContext) -> None:
        self._tensors = tensors
        self._context = context
        self._world = context.group("world")
        own = {
            key: (tensor.shape, tensor.dtype, [(box.offset, tuple(box.data.shape)) for box in tensor.boxes])
            for key, tensor in tensors.items()
        }
        self._shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._sources: dict[str, list[_BoxSource]] = {}
        # gathers about 100 bytes per tensor over the world group
        for rank, held in enumerate(gather_objects(own, self._world)):
            for key, (shape, dtype, boxes) in held.items():
                self._shapes[key] = (shape, dtype)
                sources = self._sources.setdefault(key, [])
                known = {(source.offset, source.shape) for source in sources}
                sources += [_BoxSource(rank, n, *box) for n, box in enumerate(boxes) if box not in known]

    def gather(self, mapping: WeightMapping) -> Tensor:
        """Gathers a parameter, or an expert's slice, to host memory of rank 0. Other ranks return a meta tensor."""
        key = tensor_key("model", mapping.name)
        shape, dtype = self._shapes[key]
        offset = (0,) * len(shape)
        if mapping.expert is not None:
            shape, offset = (1, *shape[1:]), (mapping.expert, *offset[1:])
        first = self._context.is_first
        data = torch.empty(shape, dtype=dtype, device="cpu" if first else "meta")
        for source in self._sources[key]:
            part = intersection(offset, shape, source.offset, source.shape)
            if part is None:
                continue
            values = self._broadcast(key, source, part, dtype)
            if first:
                data[block_slices(part, offset)].copy_(values)
        return data if mapping.expert is None else data[0]

    def _broadcast(self, key: str, source: _BoxSource, part: _Part, dtype: torch.dtype) -> Tensor:
        """Sends the elements of the box `part` of a tensor from the rank of `source`; the result is valid on rank 0."""
        if source.rank == self._context.rank:
            box = self._tensors[key].boxes[source.number]
            values = box.data[block_slices(part, box.offset)].detach().contiguous()
        else:
            size = [end - begin for begin, end in zip(*part, strict=True)]
            values = torch.empty(size, dtype=dtype, device=self._context.device)
        if source.rank != 0:
            # collective over world: one box of one parameter or expert. A send would need a communicator per pair of
            # ranks.
            broadcast_(values, self._world, source=source.rank)
        return values
