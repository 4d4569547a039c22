"""Megatron's older checkpoints: a folder `mp_rank_TT[_PPP][_EEE]` for every rank of tensor, pipeline and expert
parallelism, each with what `torch.save` wrote of its part of the model.

Weights only: the optimizer's state lies there by bucket, whose order only the run that wrote it knew.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_moe.checkpoint.megatron.pickles import Stored, load_archive
from megatron_moe.config.exit_codes import CheckpointProblem

FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(?P<tp>\d{2})(?P<rest>(_\d{3}){0,2})")
_LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(
    r"(?P<head>.+\.mlp\.experts)\.(local_experts\.(?P<one>\d+)\.(?P<matrix>linear_fc[12])\.weight"
    r"|(?P<grouped>linear_fc[12])\.weight(?P<other>\d+))"
)
_BY_ROWS = re.compile(
    r".*(linear_qkv|linear_fc1|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|word_embeddings|output_layer|eh_proj)"
    r"\.(weight|bias)"
)
_BY_COLUMNS = re.compile(r".*(linear_proj|linear_fc2)\.weight")


@dataclass
class Parts:
    """One tensor: what each tensor-parallel rank has of it, by expert."""

    pieces: dict[tuple[int, int], dict[int, Stored]] = field(default_factory=dict)
    """(expert-parallel rank, number of the expert there) -> tensor-parallel rank -> piece; (0, 0) where there are no
    experts"""
    stacked: bool = False
    """Experts along a first dim."""
    dim: int | None = None
    """Along which tensor parallelism cuts; None: every rank has all of it."""
    halves: int = 1
    """Gate and up are cut apart: 2."""

    @property
    def dtype(self) -> torch.dtype:
        return self._first[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self._first[0].shape)
        if self.dim is not None:
            shape[self.dim] *= len(self._first)
        return (len(self.pieces), *shape) if self.stacked else tuple(shape)

    def load(self, expert: int) -> Tensor:
        """The whole matrix of one expert; they are numbered through the expert-parallel ranks."""
        held = self.pieces[sorted(self.pieces)[expert]]
        ranks = [held[rank].load() for rank in sorted(held)]
        if self.dim is None or len(ranks) == 1:
            return ranks[0]
        chunks = [piece.chunk(self.halves, dim=self.dim) for piece in ranks]
        return torch.cat([part for half in zip(*chunks, strict=True) for part in half], dim=self.dim)

    @property
    def _first(self) -> dict[int, Stored]:
        return self.pieces[min(self.pieces)]


class PerRank:
    """One checkpoint folder `iter_NNNNNNN`. Raises CheckpointProblem for what it cannot read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = sorted(path.name for path in folder.iterdir() if _FOLDER.fullmatch(path.name))
        files = {name: load_archive(folder / name / FILE, f"{folder / name / FILE}") for name in names}
        for name, content in files.items():
            if not isinstance(content, dict):
                raise CheckpointProblem(f"{folder / name / FILE} holds no table")
            for chunk in self._chunks(content):
                if not isinstance(content[chunk], dict):
                    raise CheckpointProblem(
                        f"{folder / name / FILE}: {chunk} is no table of tensors; copy the file again"
                    )
        self.common: dict[str, Any] = files[names[0]]
        args = self.common.get("args")
        self._pp = int(getattr(args, "pipeline_model_parallel_size", 1) or 1)
        self._gated = bool(getattr(args, "swiglu", False) or getattr(args, "gated_linear_unit", False))
        self.tensors: dict[str, Parts] = {}
        num_tp = 1 + max(self._rank(name)[0] for name in names)
        # older programs tell no size for the experts, which then is that of the rest
        if int(getattr(args, "expert_tensor_parallel_size", None) or num_tp) != num_tp:
            raise CheckpointProblem(
                f"{folder}: experts are cut over other ranks than the rest of the model; convert it with Megatron's "
                "own --ckpt-convert-format torch_dist"
            )
        for name in names:
            tp, _, ep = self._rank(name)
            for their_name, stored in self._model(name, files):
                self._add(their_name, stored, tp, ep)

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A box of one tensor."""
        parts = self.tensors[name]
        box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        if not parts.stacked:
            return parts.load(0)[box]
        return torch.stack([parts.load(e)[box[1:]] for e in range(box[0].start, box[0].stop)])

    def _rank(self, name: str) -> tuple[int, int, int]:
        """(tp, pp, ep) of a folder."""
        match = _FOLDER.fullmatch(name)
        assert match is not None, name
        rest = [int(part) for part in match["rest"].split("_")[1:]]
        pp = rest.pop(0) if self._pp > 1 and rest else 0
        return int(match["tp"]), pp, rest[0] if rest else 0

    def _model(self, name: str, files: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Stored]]:
        """The tensors of a rank, with the layers numbered over the whole model."""
        tp, pp, ep = self._rank(name)
        for chunk in self._chunks(files[name]):
            first = 0
            for other, stage in ((c, p) for c in self._chunks(files[name]) for p in range(self._pp)):
                if (other, stage) == (chunk, pp):
                    break
                at = next((n for n in files if self._rank(n) == (tp, stage, ep)), None)
                if at is None or other not in files[at]:
                    raise CheckpointProblem(
                        f"{self.folder}: the part of stage {stage} that belongs to {name} is absent"
                    )
                first += _num_layers(files[at][other])
            for key, value in files[name][chunk].items():
                if isinstance(value, Stored):
                    layer = _LAYER.fullmatch(key)
                    yield (f"decoder.layers.{int(layer['layer']) + first}.{layer['rest']}" if layer else key), value

    @staticmethod
    def _chunks(content: dict[str, Any]) -> list[str]:
        """Where the parts of the model are: one, or one for every virtual stage."""
        if "model" in content:
            return ["model"]
        return sorted((key for key in content if re.fullmatch(r"model\d{1,4}", str(key))), key=lambda key: int(key[5:]))

    def _add(self, name: str, stored: Stored, tp: int, ep: int) -> None:
        expert, place = _EXPERT.fullmatch(name), (0, 0)
        if expert is not None:
            name = f"{expert['head']}.{expert['matrix'] or expert['grouped']}.weight"
            place = (ep, int(expert["one"] or expert["other"]))
        parts = self.tensors.setdefault(name, Parts(stacked=expert is not None))
        parts.pieces.setdefault(place, {})[tp] = stored
        if _BY_ROWS.fullmatch(name):
            parts.dim = 0
            parts.halves = 2 if self._gated and "linear_fc1" in name else 1
        elif _BY_COLUMNS.fullmatch(name):
            parts.dim = 1


def _num_layers(state: dict[str, Any]) -> int:
    return len({match["layer"] for key in state if (match := _LAYER.fullmatch(key))})
