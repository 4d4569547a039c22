"""Models in Python: build or load one on this machine, run text through it, inspect its routing, train a step.

    from megatron_moe.api import LanguageModel
    model = LanguageModel.load("runs/quickstart/checkpoints")
    model.routing("def read(self):").loads()      # {layer: number of tokens of each expert}

Uses one process and one device. Flags are those of pretrain_moe.py, except that GEMMs run in the dtype of the
parameters: FP8 and FP4 flags have no effect. docs/python.md shows every function.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from torch import Tensor

from arguments.flags import Registry
from arguments.hf_source import command_line_of
from arguments.huggingface import exported_config
from arguments.launch import environ_of_rank_0
from arguments.read import fewest_ranks, read_plan
from megatron_moe import build
from megatron_moe.checkpoint.directory import Candidate, find_checkpoints
from megatron_moe.checkpoint.huggingface.export import Export, write_folder, write_template
from megatron_moe.checkpoint.huggingface.load import load_hf, weight_tensors
from megatron_moe.checkpoint.huggingface.weight_map import WeightMapping
from megatron_moe.checkpoint.load import CheckpointSource, load_checkpoint
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.statistics import OpenCheckpoint
from megatron_moe.checkpoint.tensor_shards import TensorShard, tensor_key
from megatron_moe.config.checkpoint import HUGGING_FACE
from megatron_moe.config.exit_codes import CheckpointProblem, EnvironmentProblem
from megatron_moe.config.memory import CudaGraphConfig, MemoryConfig
from megatron_moe.config.parallel import ParallelConfig, ProcessInfo
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.run import KernelConfig, RunPlan
from megatron_moe.data.batch import ForcedRouting, MicroBatch, MicrobatchContext, TokenMeta
from megatron_moe.data.tokenizer import Tokenizer, load_tokenizer, vocab_size_of
from megatron_moe.model.gpt import GPT
from megatron_moe.moe.router import Router
from megatron_moe.moe.routing_replay import forced_routing, routed_layers
from megatron_moe.train.checkpointing import model_tensors, saved_tensors
from megatron_moe.train.train_state import TrainState
from megatron_moe.train.trainer import Trainer

_FILES = frozenset({"tokenizer-model", "vocab-file", "merge-file", "load", "pretrained-checkpoint"})
"""Flags of files that describe the model or its tokenizer."""
_UNUSED_FILES = ("data-args-path", "per-split-data-args-path", "te-precision-config-file", "tp-comm-overlap-cfg")
"""Flags of files that are read with the flags of a run, but do not describe its model."""
Text = str | Sequence[int] | Tensor
"""Text, or token ids [S]."""


@dataclass(frozen=True)
class LayerRouting:
    """Experts of the tokens of one text in one layer."""

    ids_TK: Tensor
    """Experts that each token selects, int64, by descending score; -1 for none."""
    probs_TK: Tensor
    """Weight of each of these experts; 0 if the choice exceeds the capacity of the expert."""
    loads_E: Tensor
    """Number of tokens of each expert, int64."""


@dataclass(frozen=True)
class TextRouting:
    """Experts of the tokens of one text in every MoE layer."""

    tokens: tuple[int, ...]
    layers: dict[int, LayerRouting]
    """Global layer index, from 0 -> routing. Layers of multi-token prediction are not included."""

    def loads(self) -> dict[int, list[int]]:
        """Number of tokens of each expert, per layer."""
        return {layer: routing.loads_E.tolist() for layer, routing in self.layers.items()}


class LanguageModel:
    """A model on one device, with its tokenizer and flags."""

    def __init__(self, plan: RunPlan, *, initial: bool = True) -> None:
        """Builds the model of a plan, with random weights unless `initial` is False."""
        self.plan = replace(
            _on_one_rank(plan),
            memory=MemoryConfig(),
            cuda_graphs=CudaGraphConfig(),
            precision=replace(plan.precision, low_precision=None),
        )
        self.context = build.build_context(self.plan)
        self.kernels = build.build_kernels(self.plan, self.context)
        self.model: GPT = build.build_model(self.plan, self.context, self.kernels, initial=initial)
        self.state = TrainState()
        """Progress of `train_step`."""

    @classmethod
    def build(cls, flags: str | Sequence[str], *, device: str = "auto") -> "LanguageModel":
        """Builds a model with random weights from flags of pretrain_moe.py. `device`: "auto", "cuda" or "cpu". Raises
        FlagErrors."""
        return cls(read_flags([*_words(flags), "--device", device]))

    @classmethod
    def load(cls, folder: str | Path, flags: str | Sequence[str] = (), *, device: str = "auto") -> "LanguageModel":
        """Loads a checkpoint (the newest of a folder), or a Hugging Face folder with config.json and safetensors, with
        or without the prefix `hf:` of flags.

        `flags` override those of the run, or the flags derived from config.json. Raises CheckpointProblem if there is
        no checkpoint, or if its contents are damaged or do not fit.
        """
        words, is_published = [*_words(flags), "--device", device], str(folder).startswith(HUGGING_FACE)
        folder = Path(str(folder).removeprefix(HUGGING_FACE))
        if is_published or (folder / "config.json").is_file():
            loaded = cls(read_flags([*command_line_of(folder, Registry.declared()), *words]), initial=False)
            load_hf(folder, loaded.model, loaded.plan.model)
            return loaded
        candidate = find_checkpoints(folder)[0]
        loaded = cls(plan_of_checkpoint(candidate, words), initial=False)
        loaded.read_weights(candidate)
        return loaded

    def save(self, folder: str | Path) -> Path:
        """Writes a checkpoint of the steps trained so far to a folder of checkpoints, or, for `hf:DIR`, a Hugging Face
        folder that transformers loads. Returns its path.

        A checkpoint has the optimizer's state once `train_step` was called; a run continues from it by `--load`, and
        without that state by `--pretrained-checkpoint`. Raises EnvironmentProblem if the folder cannot be written, and
        FlagErrors if no class of transformers computes the model.
        """
        if str(folder).startswith(HUGGING_FACE):
            return self._export(Path(str(folder).removeprefix(HUGGING_FACE)))
        tensors = saved_tensors(self.trainer, optimizer=True) if self.state.iteration else model_tensors(self.model)
        train_state = self.state.to_json(build.build_train_state_config(self.plan))
        saver = CheckpointSaver(Path(folder), self.context, stop_after=1)
        try:
            path = saver.save(self.state.iteration, tensors, train_state, texts={"run.yaml": self.plan.resolved_yaml})
        finally:
            saver.close()
        assert path is not None, "stop_after=1: a failed save raises"
        return path

    def _export(self, folder: Path) -> Path:
        if folder.exists():
            raise EnvironmentProblem(f"{folder} exists; remove it or give another folder")
        if self.state.iteration:
            self.trainer.optimizer.finish_gather()
        weights = weight_tensors(self.model)
        config = exported_config(self.plan.model, self.plan.data.vocab_size, Registry.declared())
        export = Export(weights, self.plan.model, config)

        def weight_of(mapping: WeightMapping) -> Tensor:
            value = weights[mapping.name].detach()
            return (value if mapping.expert is None else value[mapping.expert]).cpu()

        with TemporaryDirectory() as template:
            write_template(Path(template), config, self.plan.data.tokenizer)
            write_folder(folder, export, export.stream(weight_of), Path(template))
        return folder

    def read_weights(self, candidate: Candidate) -> None:
        """Loads the weights of a checkpoint after verifying their checksums."""
        state = self.model.state_dict()
        tensors = {tensor_key("model", name): TensorShard.whole(value) for name, value in state.items()}
        source = CheckpointSource("--load", str(candidate.path.parent), (candidate,), optimizer=False)
        load_checkpoint(source, tensors, self.context)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.plan.data.tokenizer)

    def ids(self, text: Text) -> Tensor:
        """Token ids [S] on the model's device, at most as many as the model has positions."""
        ids = self.tokenizer.encode(text) if isinstance(text, str) else list(map(int, text))
        if not ids or len(ids) > self.plan.model.max_positions:
            raise ValueError(f"{len(ids)} tokens; the model takes 1 to {self.plan.model.max_positions}")
        return torch.tensor(ids, device=self.context.device)

    @torch.no_grad()
    def logits(self, text: Text, routing: TextRouting | None = None) -> Tensor:
        """Logits [S, V] of the token that follows each token. `routing` gives the experts of all tokens, or of all but
        the last one; the router then selects experts only for the last token."""
        ids_BS = self.ids(text)[None]
        tokens = _positions(ids_BS)
        given = None if routing is None else self._given([routing], tokens)
        self.model.eval()
        return self.model.logits(ids_BS, MicrobatchContext(tokens=tokens, training=False, forced_routing=given))[:, 0]

    def loss(self, text: Text, routing: TextRouting | None = None) -> float:
        """Mean cross-entropy of every token given those before it, in nats per token. `routing`: see `logits`."""
        ids = self.ids(text)
        logits_SV = self.logits(ids, routing)[:-1, : self.plan.data.vocab_size].float()
        return float(torch.nn.functional.cross_entropy(logits_SV, ids[1:]))

    def routing(self, text: Text) -> TextRouting:
        """Experts of every token of a text in every layer."""
        ids, found = self.ids(text), {}

        def store_routing(router: Router, inputs: Any, routing: Any) -> None:
            if routing.chosen_TK is None:
                raise ValueError(f"layer {router.layer}: experts choose tokens; a token has no list of experts")
            found[router.layer] = LayerRouting(routing.chosen_TK, routing.probs_TK, routing.counts_E)

        routers = [module for module in self.model.modules() if isinstance(module, Router)]
        hooks = [router.register_forward_hook(store_routing) for router in routers]
        try:
            self.logits(ids)
        finally:
            for hook in hooks:
                hook.remove()
        return TextRouting(tuple(ids.tolist()), dict(sorted(found.items())))

    @cached_property
    def trainer(self) -> Trainer:
        """Optimizer and schedule of the flags; built by the first training step."""
        return build.build_trainer(self.plan, self.context, self.model, self.kernels)

    def train_step(self, texts: Sequence[Text], routings: Sequence[TextRouting] | None = None) -> float:
        """Trains one step on texts of equal numbers of tokens and returns the loss before the step. The number of texts
        is a multiple of `--micro-batch-size`; all microbatches make one optimizer step. `routings`: one per text;
        the tokens use its experts, and the routers select none."""
        ids_BS, size = torch.stack([self.ids(text) for text in texts]), self.plan.batch.micro_batch_size
        if len(ids_BS) % size:
            raise ValueError(f"{len(ids_BS)} texts are not a multiple of --micro-batch-size {size}")
        if routings is not None and len(routings) != len(texts):
            raise ValueError(f"{len(routings)} routings for {len(texts)} texts")
        batches = []
        for start in range(0, len(ids_BS), size):
            part_BS = ids_BS[start : start + size]
            tokens = _positions(part_BS[:, :-1])
            given = None if routings is None else self._given(routings[start : start + size], tokens)
            batches.append(
                MicroBatch(
                    tokens_BS=part_BS[:, :-1],
                    labels_BS=part_BS[:, 1:],
                    loss_mask_BS=torch.ones(part_BS[:, 1:].shape, device=part_BS.device),
                    context=MicrobatchContext(tokens=tokens, forced_routing=given),
                )
            )
        self.model.train()
        outcome = self.trainer.step(batches, self.state)
        self.state.advance(outcome.counts, build.build_train_state_config(self.plan))
        return float(outcome.loss)

    def _given(self, routings: Sequence[TextRouting], tokens: TokenMeta) -> ForcedRouting | None:
        """Expert ids of one microbatch's tokens; None for a model without experts. A routing may contain one more
        token, which is the last label of its text."""
        length, layers = tokens.positions_BS.shape[1], tuple(routings[0].layers)
        if not layers:
            return None
        ids_BSLK = torch.stack(
            [torch.stack([routing.layers[layer].ids_TK[:length] for layer in layers], dim=1) for routing in routings]
        )
        own_layers = routed_layers(self.model, len(self.plan.model.layers))
        return forced_routing(ids_BSLK, layers, tokens, self.context, own_layers=own_layers)


def read_flags(flags: str | Sequence[str]) -> RunPlan:
    """Plan of a run from flags of pretrain_moe.py, as rank 0 of as few ranks as its layout needs. Raises FlagErrors."""
    return plan_of_run(_words(flags))


def plan_of_checkpoint(candidate: Candidate, changes: Sequence[str] = ()) -> RunPlan:
    """Plan of the run that wrote a checkpoint, on one rank. `changes`: flags that override those of the run."""
    checkpoint = OpenCheckpoint(candidate.path)
    settings = checkpoint.text("run.yaml")
    if settings is None:
        raise CheckpointProblem(f"checkpoint {candidate.path} has no run.yaml that describes its model")
    ranks = checkpoint.manifest.ranks
    files = _relative_files(settings, candidate.path, changes)
    with TemporaryDirectory() as folder:  # its file removes files that may have been on another machine
        unset = Path(folder) / "unset.yaml"
        sections = yaml.safe_load(settings).values()
        names = [name for section in sections for name in _UNUSED_FILES if section.get(name) is not None]
        unset.write_text("".join(f"{name}: null\n" for name in names) or "{}\n", encoding="utf-8")
        words = ["--config", str(candidate.path / "run.yaml"), str(unset), *files, *changes]
        return _on_one_rank(plan_of_run(words, ranks["tp"] * ranks["cp"] * ranks["dp"] * ranks["pp"]))


def _relative_files(settings: str, checkpoint: Path, changes: Sequence[str]) -> list[str]:
    """Flags for the tokenizer and Hugging Face folders that a run names relative to the folder in which it was started,
    if they are not in the current folder but in one above the checkpoint. Flags in `changes` are left out."""
    words, folders = [], checkpoint.resolve().parents
    for section in yaml.safe_load(settings).values():
        for name in _FILES & section.keys() - {word.removeprefix("--") for word in changes}:
            prefix = HUGGING_FACE * str(section[name]).startswith(HUGGING_FACE)
            path = Path(str(section[name]).removeprefix(prefix))
            found = next((folder / path for folder in folders if (folder / path).exists()), path)
            words += [f"--{name}", f"{prefix}{found}"] if found != path and not path.exists() else []
    return words


def plan_of_run(words: Sequence[str], num_ranks: int = 1) -> RunPlan:
    """Plan of rank 0 of a run on `num_ranks` ranks. If the layout needs another number of ranks, the smallest one is
    used, for example if `num_ranks` is 1 because the checkpoint was imported. Raises FlagErrors."""
    fewest = fewest_ranks(words, os.environ)
    size = fewest if num_ranks % fewest else num_ranks
    return read_plan(words, environ_of_rank_0(os.environ, size), vocab_size_of=vocab_size_of)


def _on_one_rank(plan: RunPlan) -> RunPlan:
    return replace(
        plan, process=ProcessInfo(), parallel=ParallelConfig(), pipeline=PipelineConfig(), kernels=KernelConfig()
    )


def _words(flags: str | Sequence[str]) -> list[str]:
    return shlex.split(flags) if isinstance(flags, str) else [str(word) for word in flags]


def _positions(ids_BS: Tensor) -> TokenMeta:
    return TokenMeta(positions_BS=torch.arange(ids_BS.shape[1], device=ids_BS.device).expand(ids_BS.shape))
