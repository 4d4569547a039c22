"""Saving and resuming runs."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.build import (
    build_checkpointing,
    build_data,
    build_model,
    build_train_loader,
    build_train_state_config,
    build_trainer,
)
from megatron_moe.checkpoint.directory import list_checkpoints
from megatron_moe.checkpoint.manifest import CorruptCheckpoint
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.tensor_shards import total_bytes
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.exit_codes import CheckpointProblem, NumericsProblem, Preempted, SaveProblem
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.state_memory import checkpoint_bytes
from megatron_moe.data.loader import TrainLoader
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.resilience.run_status import RunStatus
from megatron_moe.train import checkpointing as checkpoints_module
from megatron_moe.train.checkpointing import PROGRESS, Checkpointing, ProgressLog, saved_tensors
from megatron_moe.train.train_state import TrainState, check_train_state
from megatron_moe.train.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.checkpoint_files import rewrite_text, verify
from tests.helpers.tiny_data import write_tokens
from tests.helpers.tiny_models import dense_ancestor
from tests.helpers.tolerances import EXACT

BF16 = PrecisionConfig(params="bf16", grads="fp32")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


class Notes(list):
    """Reporter that collects its notes."""

    note = list.append


@dataclass
class Run:
    """A run after its checkpoint was restored and before it trains."""

    trainer: Trainer
    loader: TrainLoader | None
    checkpoints: Checkpointing
    state: TrainState
    start_notes: str
    """Notes while restoring, as one text."""
    notes: list[str]
    """All notes."""
    status: RunStatus

    def train(self, steps: int) -> None:
        config = build_train_state_config(tiny.plan())
        for _ in range(steps):
            self.state.advance(self.trainer.step(self.loader.next_step(), self.state).counts, config)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.trainer.model.state_dict().items()}


def start(plan: RunPlan) -> Run:
    """Starts a run, as pretrain_moe.py does."""
    context, kernels = ParallelContext.single(dtype=DTYPES[plan.precision.params]), reference.bundle()
    trainer = build_trainer(plan, context, build_model(plan, context, kernels), kernels)
    loader = None if plan.loop.skip_train else build_train_loader(plan, context, build_data(plan, context))
    saver = CheckpointSaver(plan.checkpoint.save, context, say=lambda line: None) if plan.checkpoint.save else None
    reported = Notes()
    status = RunStatus(None)
    checkpoints = build_checkpointing(plan, trainer, saver, reported, status)
    try:
        state = checkpoints.restore(loader)
    finally:
        if saver:
            saver.close()
    return Run(trainer, loader, checkpoints, state, "\n".join(reported), reported, status)


def plan_of(*, save: Path | None = None, load: Path | None = None, **changes: Any) -> RunPlan:
    """A tiny plan; `flags`: further fields of its CheckpointConfig."""
    flags = changes.pop("flags", {})
    return tiny.plan(checkpoint=CheckpointConfig(save=save, load=load and str(load), **flags), **changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Checkpoint folder of a run after two steps, and the run."""
    folder = tmp_path_factory.mktemp("trained")
    run = start(plan_of(save=folder))
    run.train(2)
    run.checkpoints.save_last(run.state, run.loader)
    return folder, run


@pytest.mark.parametrize(
    "precision", [tiny.plan().precision, BF16, PrecisionConfig()], ids=lambda config: config.params
)
@pytest.mark.parametrize("optimizer", [True, False])
def test_expected_checkpoint_size_is_exact(precision: PrecisionConfig, optimizer: bool) -> None:
    plan = plan_of(precision=precision, flags={"save_optim": optimizer})
    tensors = saved_tensors(start(plan).trainer, optimizer=optimizer)
    without_buffers = {key: tensor for key, tensor in tensors.items() if "step_count" not in key}
    assert checkpoint_bytes(plan) == total_bytes(without_buffers)


def changed(plan: RunPlan, room: str, **fields: Any) -> RunPlan:
    return replace(plan, **{room: replace(getattr(plan, room), **fields)})


def test_resumed_run_has_equal_state_and_reports_no_differences(trained: tuple[Path, Run]) -> None:
    folder, run = trained
    resumed = start(plan_of(load=folder))
    assert (resumed.state, resumed.loader.consumed) == (run.state, 16)
    EXACT.check_all(resumed.weights(), run.weights())
    assert "differs" not in resumed.start_notes and "data" not in resumed.start_notes


def test_status_has_the_resumed_iteration_from_the_start(trained: tuple[Path, Run]) -> None:
    """status.json contains the resumed iteration before the first step."""
    folder, _ = trained
    own, other = (start(plan).status.report for plan in (plan_of(save=folder), plan_of(load=folder)))
    assert (own.iteration, own.last_checkpoint) == (2, 2)
    assert (other.iteration, other.last_checkpoint) == (2, None)


@pytest.mark.parametrize("rule", ["adam", "lion", "muon", "adaptive_muon"])
def test_state_of_every_update_rule_is_saved_and_loaded(rule: str, tmp_path: Path) -> None:
    plan = plan_of(save=tmp_path)
    plan = replace(plan, optimizer=replace(plan.optimizer, optimizer=rule))
    run = start(plan)
    run.train(1)
    run.checkpoints.save_last(run.state, run.loader)
    resumed = start(plan)
    for each in (run, resumed):
        each.train(1)
    EXACT.check_all(resumed.weights(), run.weights())


def test_nonfinite_state_is_not_saved(tmp_path: Path) -> None:
    """The device flag of the update does not detect weights that were modified by other code."""
    run = start(plan_of(save=tmp_path))
    run.train(1)
    run.checkpoints.save(run.state, run.loader)
    run.train(1)
    run.trainer.model.get_parameter("decoder.final_layernorm.weight").data[3] = torch.nan
    for save in (run.checkpoints.save, run.checkpoints.save_last, partial(run.checkpoints.save, in_background=True)):
        with pytest.raises(NumericsProblem) as problem:
            save(run.state, run.loader)
        reported = str(problem.value)
        assert "the checkpoint of iteration 2 was not written, because 1 of its tensors" in reported
        assert "the newest checkpoint is of iteration 1" in reported and "decoder.final_layernorm.weight" in reported
    assert [each.iteration for each in list_checkpoints(tmp_path)] == [1]


def test_checkpoint_committed_at_exit_is_reported(tmp_path: Path) -> None:
    """Job scripts count launches without a new checkpoint."""
    run = start(plan_of(save=tmp_path))
    run.train(1)
    run.checkpoints.save(run.state, run.loader, in_background=True)
    saver = run.checkpoints.saver
    assert saver is not None
    while saver._pending is not None and saver._pending.committing is None:
        saver.poll()
    run.checkpoints.close()
    assert run.status.report.last_checkpoint == 1 and "was completed while the run ended" in run.notes[-1]


def test_failed_last_save_without_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(plan_of(save=tmp_path))
    run.train(1)
    monkeypatch.setattr(CheckpointSaver, "save", lambda *arguments, **names: None)
    with pytest.raises(SaveProblem, match=f"could not be saved to {tmp_path}; no checkpoint has been saved yet; fix"):
        run.checkpoints.save_last(run.state, run.loader)
    with pytest.raises(
        Preempted, match="why, without a checkpoint of this iteration: no checkpoint has been saved yet"
    ):
        run.checkpoints.exit_preempted(run.state, run.loader, "why")


@pytest.mark.parametrize(
    ("save", "load", "ending"),
    [("a", None, "with --ckpt-step 2"), ("a", "a", "with --ckpt-step 2"), ("b", "a", "without --ckpt-step")],
)
def test_a_preempted_run_from_a_given_step_says_how_to_continue(
    save: str, load: str | None, ending: str, tmp_path: Path
) -> None:
    """The same command would start again from the given step."""
    first = start(plan_of(save=tmp_path / "a"))
    first.train(1)
    first.checkpoints.save(first.state, first.loader)
    run = start(plan_of(save=tmp_path / save, load=tmp_path / load if load else None, flags={"ckpt_step": 1}))
    run.train(1)
    with pytest.raises(Preempted, match=f"the same command {ending} continues from here"):
        run.checkpoints.exit_preempted(run.state, run.loader, "why")


def test_changed_sequence_length_is_rejected(trained: tuple[Path, Run]) -> None:
    plan = changed(plan_of(load=trained[0]), "data", seq_length=16)
    with pytest.raises(CheckpointProblem, match="sequences of 32 tokens, this run has --seq-length 16"):
        start(plan)


def test_save_longer_than_the_grace_period_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_module, "_GRACE_SECONDS", 0.0)
    launched = changed(plan_of(save=tmp_path), "process", launcher="torchrun")
    reported = []
    for plan in (launched, changed(launched, "resilience", exit_signals=("SIGTERM",))):
        run = start(plan)
        for _ in range(2):
            run.train(1)
            run.checkpoints.save(run.state, run.loader)
        reported.append([note for note in run.notes if "give torchrun --shutdown-timeout" in note])
    assert [len(notes) for notes in reported] == [0, 1]


def test_changed_data_is_reported(trained: tuple[Path, Run]) -> None:
    run = start(changed(plan_of(load=trained[0]), "data", seed=4321))
    assert "the data or its sample order is not that of the checkpoint" in run.start_notes
    assert run.state.iteration == 2


def test_changed_content_of_a_data_file_is_reported_with_both_checksums(tmp_path: Path) -> None:
    """The file keeps its path and size but contains different tokens."""

    def begin() -> Run:
        data = {"mock_data": False, "train_data_path": (str(tmp_path / "a"),), "data_path": ()}
        return start(changed(plan_of(save=tmp_path / "save"), "data", **data))

    write_tokens(tmp_path / "a", [[number % 90 for number in range(33 * 16)]] * 4)
    run = begin()
    run.train(1)
    run.checkpoints.save_last(run.state, run.loader)
    assert "the content of" not in begin().start_notes
    write_tokens(tmp_path / "a", [[number % 80 for number in range(33 * 16)]] * 4)
    reported = begin().start_notes
    assert (
        f"the content of {tmp_path / 'a'}.bin is not that of the checkpoint (then 4224 bytes, sampled crc32" in reported
    )
    assert "the data or its sample order" not in reported


MISSING = object()


def put(*place: str | int, value: Any = MISSING) -> Callable[[dict], None]:
    """Returns a function that sets or, without `value`, deletes one entry of nested dicts."""

    def change(content: dict) -> None:
        *outer, key = place
        for name in outer:
            content = content[name]
        if value is MISSING:
            del content[key]
        else:
            content[key] = value

    return change


DAMAGED_STATES = {
    "no state": (put("state"), r"lacks the keys \['state'\]"),
    "no counter": (put("state", "consumed_samples"), r"state lacks the keys \['consumed_samples'\]"),
    "no length": (put("seq_length"), r"lacks the keys \['seq_length'\]"),
    "unknown key": (put("other", value=1), r"the file has the unknown keys \['other'\]"),
    "unknown counter": (put("state", "other", value=1), r"state has the unknown keys \['other'\]"),
    "unknown curve": (put("learning_rate", "other", value=1), r"learning_rate has the unknown keys \['other'\]"),
    "another iteration": (put("state", "iteration", value=1), "its iteration is 1, the manifest's is 2"),
    "negative": (put("state", "consumed_samples", value=-1), "'consumed_samples' is -1, which is negative"),
    "a fraction": (put("state", "consumed_samples", value=8.0), "'consumed_samples' of state is 8.0, a value of"),
    "a truth": (put("state", "skipped_samples", value=True), "'skipped_samples' of state is True, a value of"),
    "not finite": (put("state", "flops", value=float("nan")), "'flops' of state is nan, a value of"),
    "text": (put("seed", value="1"), "'seed' of the file is '1', a value of"),
    "a list": (put("state", value=[1]), "'state' of the file is \\[1\\], a value of"),
    "a style": (put("learning_rate", "style", value="steep"), "'style' of learning_rate is 'steep', a value of"),
    "no schedule": (put("learning_rate"), "lacks the key 'learning_rate' of a trained run"),
    "no rate": (put("learning_rate", "max_lr"), r"learning_rate lacks the keys \['max_lr'\]"),
    "one rate": (put("learning_rate", "decoupled", value=[1.0]), r"'decoupled' is \[1.0\], not two rates"),
    "a word as rate": (put("learning_rate", "decoupled", value=["a", 1.0]), "not two rates"),
    "endless": (put("learning_rate", "style", value="WSD"), "style 'WSD', but no 'wsd_decay_samples'"),
    "no end": (put("data", "end_of_document"), "data has a tokenizer, but no 'end_of_document'"),
    "no layers": (put("model", "layers"), "'layers' of model are not indices"),
    "no kinds": (put("model", "kinds"), "'layers' of model are not indices"),
    "another kind": (put("model", "layers", 0, value=9), "'layers' of model are not indices"),
    "a list as kind": (put("model", "layers", 0, value=[0]), "'layers' of model are not indices"),
    "kinds as text": (put("model", "kinds", value="ab"), "'layers' of model are not indices"),
    "a kind as number": (put("model", "kinds", 0, value=3), "'layers' of model are not indices"),
    "no type": (put("model", "type"), "a part of 'model' has no 'type'"),
    "no type inside": (
        put("model", "kinds", 0, value={"mixer": {}, "type": "Layer"}),
        "a part of 'model' has no 'type'",
    ),
    "no order": (put("data", "fingerprint"), r"data lacks the keys \['fingerprint'\]"),
}


@pytest.mark.parametrize("name", DAMAGED_STATES)
def test_invalid_train_state_is_rejected(name: str, trained: tuple[Path, Run]) -> None:
    content = json.loads((trained[0] / "iter_0000002" / "train_state.json").read_text())
    check_train_state(content, 2)
    change, sentence = DAMAGED_STATES[name]
    change(content)
    with pytest.raises(CorruptCheckpoint, match=f"^train_state.json: .*{sentence}"):
        check_train_state(content, 2)


@pytest.mark.parametrize("name", ["no counter", "no type inside"])
def test_invalid_train_state_falls_back_to_the_older_checkpoint(name: str, tmp_path: Path) -> None:
    run = start(plan_of(save=tmp_path))
    for _ in range(2):
        run.train(1)
        run.checkpoints.save(run.state, run.loader)
    path = tmp_path / "iter_0000002"
    content = json.loads((path / "train_state.json").read_text())
    change, sentence = DAMAGED_STATES[name]
    change(content)
    rewrite_text(path, "train_state.json", json.dumps(content).encode())
    resumed = start(plan_of(load=tmp_path))
    assert resumed.state.iteration == 1
    assert len(re.findall(sentence, resumed.start_notes)) == 1


def test_changed_learning_rate_is_rejected_only_with_optimizer_state(trained: tuple[Path, Run]) -> None:
    other = changed(plan_of(load=trained[0]), "lr_schedule", max_lr=3e-3)
    with pytest.raises(CheckpointProblem, match="the learning rate schedule differs"):
        start(other)
    for flags in ({"load_optim": False}, {"finetune": True}, {"skip_train": True}):
        run = start(changed(plan_of(load=trained[0], flags=flags), "lr_schedule", max_lr=3e-3))
        assert run.trainer.schedule.config.max_lr == 3e-3, flags
        EXACT.check_all(run.weights(), trained[1].weights())


def test_evaluation_casts_weights_and_ignores_training_data(trained: tuple[Path, Run]) -> None:
    plan = plan_of(load=trained[0], flags={"skip_train": True}, precision=BF16)
    plan = changed(changed(plan, "loop", skip_train=True), "data", seq_length=16)
    run = start(plan)
    assert (run.state.iteration, run.loader) == (2, None)
    weight = "decoder.layers.1.mlp.experts.linear_fc1.weight"
    EXACT.check(run.weights()[weight], trained[1].weights()[weight].bfloat16(), weight)


def test_bf16_finetuning_starts_from_the_loaded_weights(trained: tuple[Path, Run]) -> None:
    plan = plan_of(load=trained[0], flags={"finetune": True}, precision=BF16)
    run = start(changed(plan, "loop", seed=99))
    loaded = run.weights()
    run.train(1)
    assert run.state.iteration == 1
    for name, before in trained[1].weights().items():
        after = run.weights()[name].double()
        assert (after - before).abs().max() <= 2 * 1e-2 + 2**-7 * before.abs().max(), name
    assert any((run.weights()[name] != loaded[name]).any() for name in loaded)


def test_upcycled_model_is_saved_at_start_and_resumed(tmp_path: Path) -> None:
    config = tiny.model()
    dense = start(plan_of(save=tmp_path / "dense", model=dense_ancestor(config, 1)))
    dense.train(1)
    dense.checkpoints.save_last(dense.state, dense.loader)
    flags = {"moe_use_upcycling": True, "load_optim": False, "skip_train": True}
    plan = plan_of(save=tmp_path / "moe", load=tmp_path / "dense", flags=flags, model=config)
    converted = start(changed(plan, "loop", skip_train=True))
    (candidate,) = list_checkpoints(tmp_path / "moe")
    assert candidate.iteration == converted.state.iteration == 0 and verify(candidate.path) == []

    resumed = start(plan)
    assert "upcycled the dense" in converted.start_notes and "upcycled the dense" not in resumed.start_notes
    assert "the data or its sample order" not in resumed.start_notes
    EXACT.check_all(resumed.weights(), converted.weights())


def test_progress_log_has_starts_and_checkpoints(tmp_path: Path) -> None:
    for start in (0, 10):
        log = ProgressLog(tmp_path, 2, {"SLURM_JOB_ID": "77"})
        log.record_start(TrainState(iteration=start))
        log.record_save_start(TrainState(iteration=start + 10, flops=4e12, consumed_tokens=3_000_000_000))
        log.record_saved(start + 10)
    fields = [line.split("\t")[1:] for line in (tmp_path / PROGRESS).read_text().splitlines()]
    assert [each[2:4] for each in fields[:2]] == [
        ["Starting job", "Iteration: 0"],
        ["Saved checkpoint", "Iteration: 10"],
    ]
    assert fields[1][:2] == ["Job ID: 77", "# GPUs: 2"] and fields[1][-1] == "Tokens (in billions): 3.00"
    assert [each[3] for each in fields[2:]] == ["Iteration: 10", "Iteration: 20"]


def test_progress_log_without_a_folder(tmp_path: Path) -> None:
    for folder in (None, tmp_path / "missing"):
        log = ProgressLog(folder, 1)
        log.record_start(TrainState())
    assert list(tmp_path.iterdir()) == []
