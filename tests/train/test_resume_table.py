"""Settings that may change when a run resumes: one test per row of the table in docs/reliability.md.

Rows that have tests elsewhere: the same run (`test_train_and_resume.py`), layouts (`test_resharding.py`), sequence
length, data and learning rate (`test_checkpointing.py`), ranks that do not divide the batch
(`tests/arguments/test_checks.py`), and versions of the format (`tests/checkpoint/test_load.py`).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_moe.build import build_train_state_config
from megatron_moe.config.attention import NormConfig, RopeConfig
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.imports import import_file
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.optimizer import OptimizerOffloadConfig
from megatron_moe.config.precision import ModulePrecision, PrecisionConfig, StateName, low_precision_config
from megatron_moe.config.run import RunPlan
from megatron_moe.config.training import BatchConfig
from megatron_moe.train.checkpointing import saved_tensors
from megatron_moe.train.train_state import TrainState, config_differences
from tests.helpers import tiny
from tests.helpers.tiny_data import write_tokens
from tests.helpers.tolerances import EXACT, FP64_LAYOUT
from tests.train.test_checkpointing import Run, plan_of, start


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """Checkpoint folder of a run after two steps, and the run after a third."""
    folder = tmp_path_factory.mktemp("trained")
    run = start(plan_of(save=folder))
    run.train(2)
    run.checkpoints.save_last(run.state, run.loader)
    run.train(1)
    return folder, run


def resumed(plan: RunPlan) -> Run:
    run = start(plan)
    run.train(1)
    return run


def test_asynchronous_checkpoint_resumes_bitwise(trained: tuple[Path, Run], tmp_path: Path) -> None:
    """Row "nothing" with --async-save; P3."""
    run = start(plan_of(save=tmp_path / "a", flags={"async_save": True, "save_interval": 2}))
    run.train(2)
    run.checkpoints.save_if_due(run.state, run.loader)
    run.train(1)
    run.checkpoints.commit_if_written()
    again_from_two = plan_of(load=tmp_path / "a")
    run.checkpoints.save_last(run.state, run.loader)
    from_three = start(again_from_two)
    EXACT.check_all(from_three.weights(), trained[1].weights(), "of the last checkpoint")
    from_two = resumed(replace(again_from_two, checkpoint=replace(again_from_two.checkpoint, ckpt_step=2)))
    EXACT.check_all(from_two.weights(), trained[1].weights(), "one step after the one in the background")


def test_changed_micro_batch_size_keeps_samples_and_weights(trained: tuple[Path, Run]) -> None:
    plain = tiny.model(moe_config=tiny.moe(tiny.router(balancing=("none",), aux_loss_coeffs=(0.0,))))
    first = start(plan_of(load=trained[0], model=plain))
    other = start(plan_of(load=trained[0], model=plain, batch=BatchConfig(micro_batch_size=4, global_batch_size=8)))
    for run in (first, other):
        run.train(1)
    FP64_LAYOUT.check_all(other.weights(), first.weights())
    assert "the next step takes" not in other.start_notes


@pytest.mark.parametrize("override", [False, True], ids=["continues by samples", "the command line wins"])
def test_changed_global_batch_size_keeps_a_schedule_in_iterations(trained: tuple[Path, Run], override: bool) -> None:
    """100 iterations of 8 sequences become 100 iterations of 4, so the command line's schedule has half the samples."""
    plan = plan_of(load=trained[0], batch=BatchConfig(micro_batch_size=2, global_batch_size=4))
    halved = replace(
        plan, lr_schedule=replace(plan.lr_schedule, decay_samples=400, override_opt_param_scheduler=override)
    )
    run = start(halved)
    assert run.trainer.schedule.config.decay_samples == (400 if override else 800)
    assert "decay_samples 400 (checkpoint: 800), the" in run.start_notes
    for lr in (
        replace(halved.lr_schedule, decay_samples=500, override_opt_param_scheduler=False),
        replace(halved.lr_schedule, max_lr=1.0, override_opt_param_scheduler=False),
    ):
        with pytest.raises(CheckpointProblem, match="the learning rate schedule differs"):
            start(replace(halved, lr_schedule=lr))


@pytest.mark.parametrize("renumbered", [None, 0])
def test_smaller_batches_find_enough_samples_in_a_blend(renumbered: int | None, tmp_path: Path) -> None:
    """A blend has exactly the samples that a run needs. Here 16 of them are trained in batches of 8, and the others in
    batches of 4, or in as many iterations again after the checkpoint is renumbered."""
    prefixes = [write_tokens(tmp_path / name, [[number % 90 for number in range(33 * 40)]]) for name in "ab"]

    def blended(size: int, **changes: Any) -> RunPlan:
        plan = plan_of(batch=BatchConfig(micro_batch_size=2, global_batch_size=size), **changes)
        data = replace(plan.data, mock_data=False, train_data_path=("3", prefixes[0], "1", prefixes[1]), data_path=())
        schedule = replace(plan.lr_schedule, override_opt_param_scheduler=True)
        return replace(plan, data=data, loop=replace(plan.loop, train_iters=4), lr_schedule=schedule)

    first = start(blended(8, save=tmp_path / "save"))
    first.train(2)
    first.checkpoints.save_last(first.state, first.loader)
    resumed = blended(4, load=tmp_path / "save", flags={"override_ckpt_iteration": renumbered})
    second = start(resumed)
    second.train(4 - second.state.iteration)
    assert second.state.consumed_samples == 16 + (8 if renumbered is None else 16)
    assert "the data or its sample order" not in second.start_notes
    cyclic = [replace(plan, data=replace(plan.data, dataloader_type="cyclic")) for plan in (blended(4), resumed)]
    orders = [start(plan).loader.order for plan in cyclic]
    assert orders[0] == orders[1], "a cyclic order does not end, so it keeps its number of samples"


def model_functions() -> dict[str, tuple[ModelConfig, str]]:
    """Pairs of (model with the same tensors but a different function, reported difference)."""

    def with_router(**changes: Any) -> ModelConfig:
        return tiny.model(moe_config=tiny.moe(tiny.router(**changes)))

    def with_attention(**changes: Any) -> ModelConfig:
        layers = tuple(replace(layer, mixer=tiny.attention(**changes)) for layer in tiny.model().layers)
        return replace(tiny.model(), layers=layers)

    eps = NormConfig(kind="RMSNorm", eps=1e-3)
    sinkhorn = with_router(balancing=("sinkhorn",), aux_loss_coeffs=(0.0,))
    core = tiny.attention().core
    return {
        "top-k": (with_router(topk=3), "layers 1-2 feed_forward router topk: 3, checkpoint 2"),
        "score function": (with_router(score_function="sigmoid"), "score_function: 'sigmoid', checkpoint 'softmax'"),
        "selection": (sinkhorn, "router selection: 'sinkhorn', checkpoint 'topk'"),
        "rotary base": (with_attention(rope=RopeConfig(dim=8, base=1e6)), "layers 0-2 mixer rope base: 1000000.0"),
        "positions": (with_attention(rope=None), "mixer rope: None, checkpoint RopeConfig"),
        "window": (with_attention(core=replace(core, window=(7, 0))), "mixer core window: (7, 0), checkpoint None"),
        "epsilon": (replace(tiny.model(), norm=eps), "norm eps: 0.001, checkpoint 1e-05"),
    }


@pytest.mark.parametrize("what", model_functions())
def test_changed_model_function_is_rejected(trained: tuple[Path, Run], what: str) -> None:
    model, reported = model_functions()[what]
    with pytest.raises(
        CheckpointProblem, match="another model than the weights .* run.yaml.*, or --finetune"
    ) as problem:
        start(plan_of(load=trained[0], model=model))
    assert reported in str(problem.value)
    run = start(plan_of(load=trained[0], model=model, flags={"finetune": True}))
    assert f"differs from the checkpoint: {reported}" in run.start_notes or reported in run.start_notes
    assert run.state.iteration == 0


def test_changed_training_settings_are_reported(trained: tuple[Path, Run]) -> None:
    model = tiny.model(moe_config=tiny.moe(tiny.router(aux_loss_coeffs=(0.5,))))
    model = replace(model, layers=tuple(replace(layer, hidden_dropout=0.25) for layer in model.layers))
    plan = plan_of(load=trained[0], model=model)
    plan = replace(plan, optimizer=replace(plan.optimizer, clip_grad=2.0, adam_beta2=0.5))
    reported = [line for line in start(plan).start_notes.splitlines() if line.startswith("differs")]
    assert reported == [
        "differs from the checkpoint: layers 0-2 hidden_dropout: 0.25, checkpoint 0.0",
        "differs from the checkpoint: layers 1-2 feed_forward router aux_loss_coeffs: (0.5,), checkpoint (0.01,)",
        "differs from the checkpoint: --adam-beta2: 0.5, checkpoint 0.999",
        "differs from the checkpoint: --clip-grad: 2.0, checkpoint 0.5",
    ]


def test_a_changed_imported_file_is_reported(trained: tuple[Path, Run], tmp_path: Path) -> None:
    """Files are compared by name and content: a copy in another folder is the same file."""
    recorded = []
    for folder, text in (("first", "VALUE = 1\n"), ("copy", "VALUE = 1\n"), ("changed", "VALUE = 2\n")):
        path = tmp_path / folder / "mine.py"
        path.parent.mkdir()
        path.write_text(text)
        import_file(str(path))
        plan = replace(plan_of(load=trained[0]), imports=(str(path),))
        recorded.append(build_train_state_config(plan).training["--import"])
    assert recorded[0] == recorded[1] != recorded[2] and recorded[0][0].startswith("mine.py, sha256 ")
    assert f"differs from the checkpoint: --import: {tuple(recorded[2])}, checkpoint ()" in start(plan).start_notes


FP8 = low_precision_config("tensorwise")
PRECISIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another recipe": (
        {"low_precision": low_precision_config("blockwise")},
        ["low_precision recipe: 'blockwise', checkpoint 'tensorwise'"],
    ),
    "no FP8": ({"low_precision": None}, ["low_precision: None, checkpoint tensorwise"]),
    "--fp8-format": (
        {"low_precision": low_precision_config("tensorwise", hybrid=True)},
        ["low_precision grads element: 'e5m2', checkpoint 'e4m3'"],
    ),
    "--no-fp8-wgrad": (
        {"low_precision": replace(FP8, weight_grad=False)},
        ["low_precision weight_grad: False, checkpoint True"],
    ),
    "--first-last-layers-bf16": (
        {"low_precision": replace(FP8, layers_at_start=1)},
        ["low_precision layers_at_start: 1, checkpoint 0"],
    ),
    "--te-precision-config-file": (
        {"module_precision": (ModulePrecision(pattern="*.linear_fc1", config=None),)},
        ["module_precision: 1 entries, checkpoint ()"],
    ),
    "--main-params-dtype": ({"main_params_dtype": "fp16"}, ["main_params_dtype: 'fp16', checkpoint 'fp32'"]),
    "without effect": ({"low_precision": replace(FP8, emulate=True), "store_param_remainders": True}, []),
}


@pytest.mark.parametrize("what", PRECISIONS)
def test_changed_number_formats_are_reported(what: str) -> None:
    """Every field of the config is compared, unless it is known to have no effect on the numbers."""
    changes, reported = PRECISIONS[what]
    plan = tiny.plan(precision=PrecisionConfig(params="bf16", low_precision=FP8))
    saved = json.loads(json.dumps(TrainState().to_json(build_train_state_config(plan))))
    assert config_differences(saved, build_train_state_config(plan)) == ([], [])
    changed = build_train_state_config(replace(plan, precision=replace(plan.precision, **changes)))
    found = config_differences(saved, changed)[1]
    assert [line for line in found if not any(name in line for name in (" block:", " scale:"))] == [
        f"precision {line}" for line in reported
    ]


def test_changed_global_batch_size_is_reported(trained: tuple[Path, Run]) -> None:
    run = start(plan_of(load=trained[0], batch=BatchConfig(micro_batch_size=2, global_batch_size=4)))
    assert (
        "the next step has 4 sequences (128 tokens), with the checkpoint's settings 8 (256 tokens)" in run.start_notes
    )
    assert (run.state.iteration, run.state.consumed_samples, run.loader.consumed) == (2, 16, 16)
    run.train(1)
    assert run.state.consumed_samples == 20


def other_models() -> dict[str, ModelConfig]:
    more_experts = tiny.moe(tiny.router(num_experts=16))
    dense = tiny.model().layers[0]
    return {
        "experts": tiny.model(moe_config=more_experts),
        "layers": tiny.model(num_layers=4),
        "a dense layer": replace(tiny.model(), layers=(dense, dense, tiny.model().layers[2])),
        "vocabulary": tiny.model(vocab_size=128),
    }


@pytest.mark.parametrize("what", other_models())
def test_changed_model_shape_is_rejected(trained: tuple[Path, Run], what: str) -> None:
    """Rows "number of experts, layers" and "tokenizer", whose vocabulary sizes the embedding."""
    rows = "--padded-vocab-size 96 .* " if what == "vocabulary" else ""
    with pytest.raises(
        CheckpointProblem, match=rf"does not fit this run in \d+ tensors; .*saved with, {rows}--moe-use-upcycling"
    ):
        start(plan_of(load=trained[0], model=other_models()[what]))


def test_changed_dtype_is_rejected_with_optimizer_state(trained: tuple[Path, Run]) -> None:
    """Row "precision"."""
    bf16 = PrecisionConfig(params="bf16", grads="fp32")
    with pytest.raises(CheckpointProblem, match=r"does not fit this run in \d+ tensors"):
        start(plan_of(load=trained[0], precision=bf16))
    run = start(plan_of(load=trained[0], precision=bf16, flags={"load_optim": False}))
    assert run.state.iteration == 2


def test_changed_end_of_document_id_is_rejected_and_changed_vocabulary_reported(trained: tuple[Path, Run]) -> None:
    """Row "tokenizer", where the tensors have the same sizes."""

    def with_tokenizer(**fields: int) -> RunPlan:
        plan = plan_of(load=trained[0])
        return replace(plan, data=replace(plan.data, tokenizer=replace(plan.data.tokenizer, **fields)))

    with pytest.raises(CheckpointProblem, match="ends documents with id 89; this run's, NullTokenizer-90-7, with id 7"):
        start(with_tokenizer(null_tokenizer_eod_id=7))
    run = start(with_tokenizer(vocab_size=91, null_tokenizer_eod_id=89))
    assert "not that of the checkpoint (then NullTokenizer-90, now NullTokenizer-91-89)" in run.start_notes
    assert "tokenizer" not in start(plan_of(load=trained[0])).start_notes


@pytest.mark.parametrize("kept", ["fp16", "fp8"])
def test_low_precision_moments_resume_bitwise_and_convert_to_fp32(kept: StateName, tmp_path: Path) -> None:
    """Row "moments kept in another type"."""
    narrow = PrecisionConfig(
        params="bf16", grads="fp32", main_params_dtype="fp32", exp_avg_dtype=kept, exp_avg_sq_dtype=kept
    )
    run = start(plan_of(save=tmp_path, precision=narrow))
    run.train(2)
    run.checkpoints.save_last(run.state, run.loader)
    saved = {key: tensor.boxes[0].data.clone() for key, tensor in saved_tensors(run.trainer, optimizer=True).items()}
    run.train(1)
    EXACT.check_all(resumed(plan_of(load=tmp_path, precision=narrow)).weights(), run.weights())
    wide = start(plan_of(load=tmp_path, precision=replace(narrow, exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32")))
    loaded = saved_tensors(wide.trainer, optimizer=True)
    EXACT.check_all({key: tensor.boxes[0].data for key, tensor in loaded.items()}, saved)


@pytest.mark.parametrize("host_steps", [True, False], ids=["stepped there", "parked there"])
def test_partially_offloaded_state_resumes_bitwise(host_steps: bool, trained: tuple[Path, Run], tmp_path: Path) -> None:
    """The offloaded part ends within a parameter, whose moments are split."""
    split = OptimizerOffloadConfig(fraction=0.5, cpu_step=host_steps)
    optimizer = replace(plan_of().optimizer, offload=split)
    run = start(plan_of(load=trained[0], save=tmp_path, optimizer=optimizer))
    states = saved_tensors(run.trainer, optimizer=True).items()
    assert any(len(tensor.boxes) > 1 for key, tensor in states if key.startswith("exp_avg."))
    run.train(1)
    EXACT.check_all(run.weights(), trained[1].weights(), "loaded in two parts")
    run.checkpoints.save_last(run.state, run.loader)
    run.train(1)
    EXACT.check_all(resumed(plan_of(load=tmp_path)).weights(), run.weights(), "saved in two parts")


def test_expert_kernel_choice_is_not_saved(trained: tuple[Path, Run]) -> None:
    """Row "kernels, loops over experts": not reported."""
    grouped = tiny.moe()
    sequential = replace(grouped, experts=replace(grouped.experts, grouped=False))
    run = resumed(plan_of(load=trained[0], model=tiny.model(moe_config=sequential)))
    FP64_LAYOUT.check_all(run.weights(), trained[1].weights())
    assert "differ" not in run.start_notes
