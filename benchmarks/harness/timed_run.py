"""A run of pretrain_moe.py on a GPU without its logs and checkpoints, whose steps are timed: what the tools that
measure steps share."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from arguments.read import read_plan
from benchmarks.harness.kernel_times import KernelEvent
from megatron_moe import build
from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.run import RunPlan
from megatron_moe.data.loader import TrainLoader
from megatron_moe.data.tokenizer import vocab_size_of
from megatron_moe.train.train_state import TrainState
from megatron_moe.train.trainer import StepOutcome, Trainer


def plan_to_run(words: Sequence[str]) -> RunPlan:
    """The plan of a command line of pretrain_moe.py, with its environment set in this process.

    Raises FlagErrors.
    """
    plan = read_plan(list(words), os.environ, vocab_size_of=vocab_size_of)
    os.environ.update(plan.environment)
    return plan


def require_gpu(what: str) -> None:
    """Raises EnvironmentProblem where there is none."""
    if not torch.cuda.is_available():
        raise EnvironmentProblem(f"torch sees no GPU here, and {what} what this tool times.")


class Run:
    """Everything that a step needs.

    `quick`: weights start from random numbers of the device instead of the run's own, which are drawn on the CPU.
    """

    def __init__(self, plan: RunPlan, *, quick: bool = False) -> None:
        self.plan = plan
        self.context = build.build_context(plan)
        with ExitStack() as undo:  # another run may follow one that finds no room
            undo.callback(self.context.stop)
            kernels = build.build_kernels(plan, self.context)
            model = build.build_model(plan, self.context, kernels, initial=not quick)
            if quick:
                draw_on_device(model, plan.model.init.std)
            self.trainer: Trainer = build.build_trainer(plan, self.context, model, kernels)
            loader = build.build_train_loader(plan, self.context, build.build_data(plan, self.context))
            undo.pop_all()
        assert loader is not None, "a run without training has no step to profile"
        self.loader: TrainLoader = loader
        self.state = TrainState()
        self.kernel_table = kernels.table()
        self.num_samples = 0
        """Of the last step, over all ranks."""

    def step(self) -> StepOutcome:
        outcome = self.trainer.step(self.loader.next_step(), self.state)
        self.num_samples = outcome.num_samples
        self.state.advance(outcome.num_samples, self.plan)
        return outcome

    def take_loads(self) -> tuple[float, ...]:
        """Of every MoE layer: load of its busiest expert over their mean load, mean over the microbatches of all steps
        since the last call."""
        metric = self.trainer.metrics.take(self.context).get("moe/max_violation")
        figures = metric.layers.values() if metric else ()
        return tuple(1 + figure for figure in figures if isinstance(figure, float))

    def close(self) -> None:
        self.loader.close()
        self.context.stop()
        torch.use_deterministic_algorithms(False)  # another run of this process may not have asked for it


@torch.no_grad()
def draw_on_device(model: torch.nn.Module, std: float) -> None:
    """Matrices normal, vectors one."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.normal_(std=std) if parameter.dim() > 1 else parameter.fill_(1.0)


def timed_steps(run: Run, num_steps: int) -> tuple[list[float], list[float]]:
    """(milliseconds, loss) of each step. The host waits at the end alone."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    losses = []
    marks[0].record()
    for mark in marks[1:]:
        losses.append(run.step().loss)
        mark.record()
    torch.cuda.synchronize()
    times = [before.elapsed_time(after) for before, after in zip(marks, marks[1:], strict=False)]
    return times, [loss.item() for loss in losses]


def bytes_beside(run: Run) -> int:
    """Device memory that replays use and that nothing is allocated in: recordings have given it back to their pools."""
    if run.trainer.full_iteration is None and run.trainer.pipeline.graph_instances is None:
        return 0
    pools = (each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) != (0, 0))
    return sum(each["total_size"] - each["allocated_size"] for each in pools)


def traced_steps(run: Run, num_steps: int, trace: Path | None) -> list[KernelEvent]:
    """The kernels of a few steps."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            run.step()
        torch.cuda.synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return [
        KernelEvent(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
