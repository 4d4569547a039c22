"""Megatron-FSDP's checkpoint format `fsdp_dtensor`: DCP files with one tensor per parameter and kind of state.

Weights have keys like `model.module.decoder...`, states like `optimizer.state.module.module.decoder... .exp_avg`. The
weights are the master weights. An expert has its global index in its name. The gate and up halves of a fused fc1, and
the sections of a gated delta net's projection and convolution, are separate tensors.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_moe.checkpoint.megatron.per_rank import EXPERT
from megatron_moe.checkpoint.megatron.torch_dist import DCPFiles, StoredTensor
from megatron_moe.config.exit_codes import CheckpointProblem

_WEIGHT = re.compile(r"model\.(module\.)*(?P<name>.+)")
_STATE = re.compile(r"optimizer\.state\.(module\.)*(?P<name>.+)\.(?P<kind>\w+)")
_GROUP_STEP = re.compile(r"optimizer\.param_to_group_meta\..+\.step")
_PARTS = ("_w", "_v", ".query", ".key", ".value", ".z", ".beta", ".alpha")
"""Suffixes of the parts of a tensor that Megatron-FSDP stores separately, in the order of their rows."""
_PART = re.compile(
    r"(?P<whole>.+\.(linear_fc1\.(weight|bias)\d*(?=_[wv]$)|(in_proj|conv1d)\.(weight|bias)(?=\.)))(?P<part>.+)"
)


@dataclass
class JoinedTensor:
    """Stored tensors that together form one tensor: parts along dim 0, or the tensors of all experts, stacked."""

    parts: dict[int, dict[int, tuple[str, StoredTensor]]] = field(default_factory=dict)
    """Expert (0 for tensors without experts) -> index of the part -> (key, stored tensor)."""
    stacked: bool = False
    """True for expert weights: the tensor is the stack of all experts along dim 0."""

    @property
    def dtype(self) -> torch.dtype:
        return self.sections(0)[0][1].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        stored = [each.shape for _, each in self.sections(0)]
        shape = stored[0] if len(stored) == 1 else (sum(each[0] for each in stored), *stored[0][1:])
        return (len(self.parts), *shape) if self.stacked else shape

    def sections(self, expert: int) -> list[tuple[str, StoredTensor]]:
        """Parts of an expert's tensor in the order of their rows."""
        parts = self.parts[expert]
        return [parts[index] for index in sorted(parts)]


class FSDPDTensor:
    """Reads a checkpoint folder `iter_NNNNNNN` in fsdp_dtensor format. Raises CheckpointProblem if it is malformed.

    Names of `tensors` and the content of `common` are those of a torch_dist checkpoint with stacked experts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = DCPFiles(folder)
        self.tensors: dict[str, JoinedTensor] = {}
        steps = [self._files.read_object(name) for name in self._files.objects if _GROUP_STEP.fullmatch(name)]
        for key in self._files.tensors:
            if state := _STATE.fullmatch(key):
                if state["kind"] == "step":
                    steps.append(self._files.read(key, (), ()).item())
                else:
                    self._add(key, f"optimizer.state.{state['kind']}.", state["name"])
            elif weight := _WEIGHT.fullmatch(key):
                self._add(key, "", weight["name"])
        self._check()
        for name in [name for name in self.tensors if f"optimizer.state.exp_avg.{name}" in self.tensors]:
            self.tensors[f"optimizer.state.fp32_param.{name}"] = self.tensors[name]
        self.common: dict[str, Any] = {
            name: self._files.read_object(name) for name in ("args", "iteration") if name in self._files.objects
        }
        self.common["optimizer"] = [{"step": step} for step in steps]

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Reads a box of a tensor: `shape` elements from the index `offset` in each dim."""
        tensor = self.tensors[name]
        if not tensor.stacked:
            return self._read(tensor, 0, offset, shape)
        experts = range(offset[0], offset[0] + shape[0])
        return torch.stack([self._read(tensor, expert, offset[1:], shape[1:]) for expert in experts])

    def _read(self, tensor: JoinedTensor, expert: int, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        sections = tensor.sections(expert)
        if len(sections) == 1:
            return self._files.read(sections[0][0], offset, shape)
        return torch.cat([self._files.read(*box) for box in _boxes(sections, offset, shape)])

    def _add(self, key: str, prefix: str, name: str) -> None:
        part, number, expert = _PART.fullmatch(name), 0, 0
        if part is not None and part["part"] in _PARTS:
            name, number = part["whole"], _PARTS.index(part["part"])
        match = EXPERT.fullmatch(name)
        if match is not None:
            name = f"{match['head']}.{match['matrix'] or match['grouped']}.weight"
            expert = int(match["one"] or match["other"])
        tensor = self.tensors.setdefault(f"{prefix}{name}", JoinedTensor(stacked=match is not None))
        tensor.parts.setdefault(expert, {})[number] = key, self._files.tensors[key]

    def _check(self) -> None:
        if all(name.startswith("optimizer.") for name in self.tensors):
            raise CheckpointProblem(
                f"{self.folder} has no weights in the format fsdp_dtensor (keys `model.module. ...`)"
            )
        for name, tensor in self.tensors.items():
            shapes = [
                [each.shape for _, each in tensor.sections(expert)] if expert in tensor.parts else None
                for expert in range(len(tensor.parts))
            ]
            if any(each != shapes[0] for each in shapes) or shapes[0] is None:
                raise CheckpointProblem(
                    f"{self.folder}: {name} is stored with experts {sorted(tensor.parts)}; others are missing, or "
                    "shapes differ; copy the checkpoint again"
                )


def _boxes(
    sections: list[tuple[str, StoredTensor]], offset: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yields (key, offset, shape) of the boxes of consecutive sections that cover a box of the whole tensor."""
    first = 0
    for key, stored in sections:
        rows = stored.shape[0]
        start, end = max(offset[0], first), min(offset[0] + shape[0], first + rows)
        if start < end:
            yield key, (start - first, *offset[1:]), (end - start, *shape[1:])
        first += rows
