"""Megatron's older checkpoint format: a `torch.save` file in a folder `mp_rank_TT[_PPP][_EEE]` for every tensor-,
pipeline- and expert-parallel rank.

Only weights are read: optimizer state is stored by bucket, and the checkpoint does not describe the bucket layout.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_moe.checkpoint.megatron.pickles import LazyTensor, load_archive
from megatron_moe.config.exit_codes import CheckpointProblem

FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(?P<tp>\d{2})(?P<rest>(_\d{3}){0,2})")
LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
EXPERT = re.compile(
    r"(?P<head>.+\.mlp\.experts)\.(local_experts\.(?P<one>\d+)\.(?P<matrix>linear_fc[12])\.weight"
    r"|(?P<grouped>linear_fc[12])\.weight(?P<other>\d+))"
)
_SHARDED_ROWS = re.compile(
    r".*(linear_qkv|linear_fc1|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|word_embeddings|output_layer|\.e?h?_proj)"
    r"\.(weight|bias)|.*\.attn_sink"
)
_SHARDED_COLUMNS = re.compile(r".*(linear_proj|linear_fc2)\.weight")


@dataclass
class ShardedTensor:
    """Shards of one tensor, or of the stacked tensors of all experts."""

    shards: dict[tuple[int, int], dict[int, LazyTensor]] = field(default_factory=dict)
    """(expert-parallel rank, local expert) -> tensor-parallel rank -> shard. Non-expert tensors have the key (0, 0)."""
    stacked: bool = False
    """True for expert weights: the tensor is the stack of all experts along dim 0."""
    dim: int | None = None
    """Dim along which tensor parallelism shards the tensor, or each expert's tensor; None if it is replicated."""
    num_chunks: int = 1
    """Number of parts that are sharded separately along `dim`: 2 for fused gate and up, otherwise 1."""

    @property
    def dtype(self) -> torch.dtype:
        return self._first[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self._first[0].shape)
        if self.dim is not None:
            shape[self.dim] *= len(self._first)
        return (len(self.shards), *shape) if self.stacked else tuple(shape)

    def load(self, expert: int) -> Tensor:
        """Loads the unsharded tensor of one expert (global id). For tensors without experts, `expert` is 0."""
        by_rank = self.shards[sorted(self.shards)[expert]]
        shards = [by_rank[rank].load() for rank in sorted(by_rank)]
        if self.dim is None or len(shards) == 1:
            return shards[0]
        chunks = [shard.chunk(self.num_chunks, dim=self.dim) for shard in shards]
        return torch.cat([chunk for same in zip(*chunks, strict=True) for chunk in same], dim=self.dim)

    @property
    def _first(self) -> dict[int, LazyTensor]:
        return self.shards[min(self.shards)]


class PerRank:
    """Checkpoint folder `iter_NNNNNNN` with a subfolder per rank. Raises CheckpointProblem if it is malformed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = sorted(path.name for path in folder.iterdir() if _FOLDER.fullmatch(path.name))
        files = {name: load_archive(folder / name / FILE, f"{folder / name / FILE}") for name in names}
        for name, content in files.items():
            if not isinstance(content, dict):
                raise CheckpointProblem(f"{folder / name / FILE} does not contain a dict; copy the file again")
            for chunk in self._chunks(content):
                if not isinstance(content[chunk], dict):
                    raise CheckpointProblem(
                        f"{folder / name / FILE}: {chunk} is not a dict of tensors; copy the file again"
                    )
        self.common: dict[str, Any] = files[names[0]]
        args = self.common.get("args")
        self._pp = int(getattr(args, "pipeline_model_parallel_size", 1) or 1)
        self._gated = bool(getattr(args, "swiglu", False) or getattr(args, "gated_linear_unit", False))
        self.tensors: dict[str, ShardedTensor] = {}
        num_tp = 1 + max(self._rank(name)[0] for name in names)
        # In older Megatron versions without this argument, experts have the tensor-parallel size of other layers.
        if int(getattr(args, "expert_tensor_parallel_size", None) or num_tp) != num_tp:
            raise CheckpointProblem(
                f"{folder}: the tensor-parallel size of experts differs from that of other layers; convert it with "
                "Megatron's --ckpt-convert-format torch_dist"
            )
        for name in names:
            tp, _, ep = self._rank(name)
            for key, shard in self._model(name, files):
                self._add(key, shard, tp, ep)

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Reads the n-d range of one tensor that starts at `offset` and has the shape `shape`."""
        tensor = self.tensors[name]
        box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        if not tensor.stacked:
            return tensor.load(0)[box]
        return torch.stack([tensor.load(e)[box[1:]] for e in range(box[0].start, box[0].stop)])

    def _rank(self, name: str) -> tuple[int, int, int]:
        """Parses the ranks (tp, pp, ep) from the name of a rank's folder."""
        match = _FOLDER.fullmatch(name)
        assert match is not None, name
        rest = [int(part) for part in match["rest"].split("_")[1:]]
        pp = rest.pop(0) if self._pp > 1 and rest else 0
        return int(match["tp"]), pp, rest[0] if rest else 0

    def _model(self, name: str, files: dict[str, dict[str, Any]]) -> Iterator[tuple[str, LazyTensor]]:
        """Yields (parameter name with global layer number, tensor) for all model tensors in the rank folder `name`."""
        tp, pp, ep = self._rank(name)
        for chunk in self._chunks(files[name]):
            first = 0
            for other, stage in ((c, p) for c in self._chunks(files[name]) for p in range(self._pp)):
                if (other, stage) == (chunk, pp):
                    break
                at = next((n for n in files if self._rank(n) == (tp, stage, ep)), None)
                if at is None or other not in files[at]:
                    raise CheckpointProblem(
                        f"{self.folder}: {name} refers to the model of pipeline stage {stage}, which is missing"
                    )
                first += len({layer["layer"] for name in files[at][other] if (layer := LAYER.fullmatch(name))})
            for key, value in files[name][chunk].items():
                if isinstance(value, LazyTensor):
                    layer = LAYER.fullmatch(key)
                    yield (f"decoder.layers.{int(layer['layer']) + first}.{layer['rest']}" if layer else key), value

    @staticmethod
    def _chunks(content: dict[str, Any]) -> list[str]:
        """Keys of a file's model state dicts, one per virtual pipeline stage."""
        if "model" in content:
            return ["model"]
        return sorted((key for key in content if re.fullmatch(r"model\d{1,4}", str(key))), key=lambda key: int(key[5:]))

    def _add(self, name: str, shard: LazyTensor, tp: int, ep: int) -> None:
        match, key = EXPERT.fullmatch(name), (0, 0)
        if match is not None:
            name = f"{match['head']}.{match['matrix'] or match['grouped']}.weight"
            key = (ep, int(match["one"] or match["other"]))
        tensor = self.tensors.setdefault(name, ShardedTensor(stacked=match is not None))
        tensor.shards.setdefault(key, {})[tp] = shard
        if _SHARDED_ROWS.fullmatch(name):
            tensor.dim = 0
            tensor.num_chunks = 2 if self._gated and "linear_fc1" in name else 1
        elif _SHARDED_COLUMNS.fullmatch(name):
            tensor.dim = 1
