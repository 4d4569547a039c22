"""Non-finite values never reach the weights, and their origin is reported."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from megatron_moe import build
from megatron_moe.build import build_data, build_model, build_train_loader, build_trainer
from megatron_moe.config.exit_codes import ExitCode, NumericsProblem
from megatron_moe.config.logging import LoggingConfig
from megatron_moe.config.optimizer import OptimizerConfig, OptimizerOffloadConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.resilience import ResilienceConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.data.loader import TrainLoader
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.resilience.numerics_guard import SpikeLimit
from megatron_moe.train.step_supervisor import StepSupervisor
from megatron_moe.train.train_state import TrainState
from megatron_moe.train.trainer import Trainer
from megatron_moe.train.training_log import TrainingLog
from tests.helpers import tiny
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT

EXPERTS = "decoder.layers.2.mlp.experts.linear_fc1.weight"
SKIP = ResilienceConfig(on_nonfinite="skip")
Spoil = Callable[[Trainer, int], None]


class Notes(list):
    """Reporter that collects notes and reports no step."""

    note = list.append

    def is_due(self, iteration: int) -> bool:
        return False

    def observe(self, reading: object) -> None:
        pass

    def report_steps(self, metrics: object) -> None:
        pass


def train(plan: RunPlan, context: ParallelContext, spoil: Spoil, steps: int = 4) -> tuple[Trainer, TrainLoader, Notes]:
    """Training loop that calls `spoil(trainer, iteration)` before each step; errors propagate."""
    kernels = reference.bundle()
    trainer = build_trainer(plan, context, build_model(plan, context, kernels), kernels)
    loader, state, said = build_train_loader(plan, context, build_data(plan, context)), TrainState(), Notes()
    supervisor = StepSupervisor(trainer, TrainingLog(trainer, said), loader)
    for iteration in range(1, steps + 1):
        spoil(trainer, iteration)
        outcome = supervisor.step(state)
        state.advance(outcome.counts, build.build_train_state_config(plan))
        supervisor.after_step(outcome)
    supervisor.catch_up()
    return trainer, loader, said


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def spoiled_output(module: nn.Module, when: Callable[[], bool], change: Callable[[Tensor], Tensor]) -> None:
    """Changes the output of a module in every forward in which `when()` returns True."""

    def hook(_: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        return change(output) if when() else None

    module.register_forward_hook(hook)


def infinite_gradient(output: Tensor) -> Tensor:
    """Returns a copy of the output with a hook that makes its gradient infinite."""
    same = output.clone()
    same.register_hook(lambda gradient: gradient * torch.inf)
    return same


def test_a_nan_in_one_microbatch_of_one_rank_is_named_with_its_samples(tmp_path: Path) -> None:
    """The NaN is in the loss of one rank, in a step that is not logged."""
    plan = tiny.plan(logging=LoggingConfig(run_dir=tmp_path))

    def main(context: ParallelContext) -> str:
        now, calls, before = [0], [0], {}

        def in_second_microbatch() -> bool:
            calls[0] += 1
            return now[0] == 2 and context.rank == 1 and calls[0] % 2 == 0

        def spoil(trainer: Trainer, iteration: int) -> None:
            if iteration == 1:
                module = trainer.model.get_submodule("decoder.layers.1.self_attention.linear_proj")
                spoiled_output(module, in_second_microbatch, lambda output: output * torch.nan)
            if iteration == 2:
                before.update(weights(trainer))
                now[0] = 2
            trainers.append(trainer)

        trainers: list[Trainer] = []
        with pytest.raises(NumericsProblem) as problem:
            train(plan, context, spoil)
        EXACT.check_all(weights(trainers[0]), before, "the weights of iteration 1")
        return str(problem.value)

    first, second = on_threads(ParallelConfig(world_size=2), main)
    assert first.partition("; details")[0] == second.partition("; see metrics")[0]
    assert "first not finite: the output of decoder.layers.1.self_attention.linear_proj, on rank 1" in first
    # iteration 2 takes samples 8 to 15; rank 1 takes every second pair
    assert "in samples 14, 15;" in first and "the weights are those of iteration 1" in first
    report = json.loads((tmp_path / "crash" / "nonfinite-0000002.json").read_text())
    assert report["iteration"] == 2 and report["numbers"]["loss"] == "nan"
    assert [rank["samples"] for rank in report["ranks"]] == [[[8, 9], [12, 13]], [[10, 11], [14, 15]]]
    assert [rank["bad_samples"] for rank in report["ranks"]] == [[], [14, 15]]


def test_an_infinite_gradient_is_named_where_it_arose() -> None:
    """The gradient is infinite although the loss is finite."""

    def spoil(trainer: Trainer, iteration: int) -> None:
        if iteration == 3:
            module = trainer.model.get_submodule("decoder.layers.1.self_attention.linear_proj")
            spoiled_output(module, lambda: True, infinite_gradient)

    with pytest.raises(NumericsProblem, match="iteration 3: loss [0-9.]+, gradient norm (inf|nan)") as problem:
        train(tiny.plan(), ParallelContext.single(), spoil)
    assert problem.value.code == ExitCode.NUMERICS
    assert "first not finite: the gradient of the output of decoder.layers.1.self_attention.linear_proj" in str(
        problem.value
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_expert_is_named_by_its_global_id(ranks: int) -> None:
    """Only one expert-parallel rank has the expert with the non-finite gradient."""

    plan = tiny.plan(model=tiny.model(moe_config=replace(tiny.moe(), dispatcher="alltoall")))

    def main(context: ParallelContext) -> str:
        def spoil(trainer: Trainer, iteration: int) -> None:
            held = trainer.model.get_parameter(EXPERTS)
            expert = 6 - held.boxes[0].offset[0]
            if iteration == 2 and 0 <= expert < len(held):
                held.data[expert, 3, 3] = torch.nan

        with pytest.raises(NumericsProblem) as problem:
            train(plan, context, spoil)
        return str(problem.value)

    for said in on_threads(ParallelConfig(world_size=ranks, ep=ranks), main):
        assert f"first not finite: the weights of {EXPERTS} (expert 6), on rank {ranks - 1}" in said


def test_a_nonfinite_step_is_skipped_and_training_continues() -> None:
    """The updates of the steps before and after are applied."""
    seen: list[dict[str, Tensor]] = []

    def spoil(trainer: Trainer, iteration: int) -> None:
        seen.append(weights(trainer))
        if iteration == 1:
            spoiled_output(
                trainer.model.decoder.final_layernorm, lambda: len(seen) == 2, lambda output: output * torch.nan
            )

    trainer, _, said = train(tiny.plan(resilience=SKIP), ParallelContext.single(), spoil)
    assert [line.partition(":")[0] for line in said] == ["iteration 2"] and "number 1 in a row" in said[0]
    EXACT.check_all(seen[2], seen[1], "weights after the step that was left out")
    assert int(trainer.optimizer.step_count) == 3
    assert not torch.equal(seen[3]["output_layer.weight"], seen[2]["output_layer.weight"])


def test_too_many_nonfinite_steps_in_a_row_end_the_run() -> None:

    def spoil(trainer: Trainer, iteration: int) -> None:
        if iteration == 2:
            spoiled_output(trainer.model.decoder.final_layernorm, lambda: True, lambda output: output * torch.nan)

    plan = tiny.plan(resilience=replace(SKIP, max_skipped_iterations=2))
    with pytest.raises(NumericsProblem, match="iteration 3: .* iterations skipped in a row: 2"):
        train(plan, ParallelContext.single(), spoil, steps=8)


def spoil_second_moment(trainer: Trainer, name: str, value: float = -1.0) -> None:
    """Changes one element of a second moment on its owner; the next update takes its square root."""
    for state in trainer.optimizer.named_state():
        if (state.kind, state.name) == ("exp_avg_sq", name) and len(state.data):
            state.data[0] = value


STATES = {
    "on the device": OptimizerOffloadConfig(),
    "CPU step": OptimizerOffloadConfig(fraction=1.0, cpu_step=True),
    "streamed from the host": OptimizerOffloadConfig(fraction=1.0, cpu_step=False),
}


@pytest.mark.parametrize("steps", [2, 6], ids=["read at the end", "read a step later"])
@pytest.mark.parametrize("value, found", [(-1.0, "weights of"), (torch.inf, "moment exp_avg_sq of")])
@pytest.mark.parametrize("where", STATES)
def test_an_update_that_stores_a_nonfinite_number_ends_the_run(
    where: str, value: float, found: str, steps: int, tmp_path: Path
) -> None:
    """The run ends even with on_nonfinite="skip", because the weights of the last finite step are lost."""
    optimizer = OptimizerConfig(clip_grad=0.5, offload=STATES[where])
    plan = tiny.plan(resilience=SKIP, optimizer=optimizer, logging=LoggingConfig(run_dir=tmp_path))
    trainers: list[Trainer] = []

    def spoil(trainer: Trainer, iteration: int) -> None:
        trainers.append(trainer)
        if iteration == 2:
            spoil_second_moment(trainer, "output_layer.weight", value)

    with pytest.raises(NumericsProblem) as problem:
        train(plan, ParallelContext.single(), spoil, steps)
    said = str(problem.value)
    assert "iteration 2: its update stored weights or moments that are not finite" in said
    assert f"first not finite: the {found} output_layer.weight, on rank 0" in said and problem.value.code == 6
    assert int(trainers[0].optimizer.step_count) == 2, "an update was applied after the bad one"
    report = json.loads((tmp_path / "crash" / "nonfinite-0000002.json").read_text())
    assert [finding["kind"] for finding in report["ranks"][0]["findings"]] == [found.split()[0].removesuffix("s")]


@pytest.mark.parametrize("in_forward", [False, True], ids=["step", "step overlapped with the forward"])
def test_all_ranks_stop_when_one_stores_nonfinite_weights(in_forward: bool) -> None:
    """With a sharded optimizer only the owner of the element detects it."""

    def main(context: ParallelContext) -> tuple[str, int]:
        trainers: list[Trainer] = []

        def spoil(trainer: Trainer, iteration: int) -> None:
            trainers.append(trainer)
            if iteration == 1 and in_forward:
                trainer.optimizer.step_in_forward(trainer.model)
            if iteration == 2:
                spoil_second_moment(trainer, "output_layer.weight")

        plan = tiny.plan(data_parallel=DataParallelConfig(use_distributed_optimizer=True))
        with pytest.raises(NumericsProblem) as problem:
            train(plan, context, spoil, steps=6)
        return str(problem.value), int(trainers[0].optimizer.step_count)

    first, second = on_threads(ParallelConfig(world_size=2), main)
    assert first == second and "iteration 2: its update stored" in first[0] and first[1] == 2


@pytest.mark.parametrize("policy", ["report", "skip", "stop"])
def test_a_spike_is_reported_skipped_or_ends_the_run(policy: Literal["report", "skip", "stop"]) -> None:
    """The spike is a thousand times as large as the three losses before it."""
    seen: list[dict[str, Tensor]] = []

    def spoil(trainer: Trainer, iteration: int) -> None:
        seen.append(weights(trainer))
        if iteration == 1:
            spoiled_output(trainer.model.decoder.final_layernorm, lambda: len(seen) >= 5, lambda output: output * 1e3)
            if policy != "report":
                trainer._limits = (SpikeLimit(trainer.context.device, window=3), None)

    config = ResilienceConfig(check_for_spiky_loss=True, on_spike=policy, max_skipped_iterations=3)
    plan = tiny.plan(resilience=config)
    if policy == "stop":
        with pytest.raises(
            NumericsProblem, match="iteration 5: .*: a spike, .* repeating the step gave the same result"
        ):
            train(plan, ParallelContext.single(), spoil, steps=7)
    else:
        _, _, said = train(plan, ParallelContext.single(), spoil, steps=6)
        skipped = [line for line in said if "a spike; the iteration is skipped" in line]
        assert len(skipped) == (2 if policy == "skip" else 0)
    kept = all(torch.equal(seen[4][name], seen[5][name]) for name in seen[4])
    assert kept == (policy != "report")
