"""Helpers shared by the step benchmarks: a run without logs and checkpoints, timed and traced steps, power readings of
the GPU, and kernel times by kind."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Thread
from types import TracebackType
from typing import Self

import torch

from arguments.read import read_plan
from megatron_moe import build
from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.run import RunPlan
from megatron_moe.data.loader import TrainLoader
from megatron_moe.data.tokenizer import vocab_size_of
from megatron_moe.memory_emulation.rank import assumed_ids, assumed_load, transport_without_peers, with_assumed_choices
from megatron_moe.moe.token_dispatcher.base import DispatchedTokens
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext, torch_dtype
from megatron_moe.train.step_results import StepOutcome
from megatron_moe.train.train_state import TrainState
from megatron_moe.train.trainer import Trainer

EVERY_MS = 100
"""Interval between readings of GPU power and clock, in milliseconds."""
KINDS: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|_push_(tokens|sums)|_wait_for_arrival|deep_ep::"),
    ("attention", r"cudnn.*(sdpa|fprop|bprop|flash)|flash_(fwd|bwd)|fmha|attention|key_grads|query_grads|softmax_warp"),
    ("casts", r"quantize"),
    (
        "router",
        r"router|(route|gate)_(for|back)ward|topk|count_experts|radixSort|bitonicSort|DeviceRadix|sort|searchsorted",
    ),
    (
        "permute",
        r"permute|sort_rows|place_rows|pick_values|gather_rows|sum_choices|index_select|indexSelect|gather|scatter|index_elementwise",
    ),
    ("expert matrices", r"grouped|GroupProblemShape|ptr_array|PtrArray|expert_grad"),
    ("dense matrices", r"nvjet|gemm|cutlass|splitK|cublas"),
    ("head and loss", r"cross_entropy|log_softmax|LogSoftMax|nll_loss|SoftMaxForward|SoftMaxBackward"),
    ("optimizer", r"adamw|FusedAdam|sum_of_squares|NormTwoOps|multi_tensor"),
    (
        "norms and positions",
        r"rms_norm|layer_norm|rope|rotate_heads|qkv_|join_keys|part_keys|sum_shares|norm_kernel|Norm",
    ),
    ("activation", r"swiglu|activation|silu"),
    ("copies and fills", r"Memcpy|Memset|copy_kernel|FillFunctor|fill"),
    ("elementwise", r"elementwise|reduce_kernel|vectorized|CatArray"),
)
"""(kind, pattern) pairs; the first pattern found in a kernel's name is its kind."""


@dataclass(frozen=True)
class KernelEvent:
    """Kernel that ran on the device; times in microseconds."""

    name: str
    start: float
    duration: float
    stream: int = 0

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class Share:
    """Time per step of one kernel, or of one kind of kernels."""

    name: str
    milliseconds: float
    calls: float
    """Number of calls per step."""


@dataclass(frozen=True)
class CommunicationTime:
    """Milliseconds per step in which communication kernels ran."""

    overlapped: float
    """Milliseconds in which another kernel ran at the same time."""
    exposed: float
    """Milliseconds in which no other kernel ran."""

    def __str__(self) -> str:
        return f"communication: {self.overlapped:.2f} ms overlapped, {self.exposed:.2f} ms exposed per step"


def plan_to_run(words: Sequence[str], num_absent: int = 0) -> RunPlan:
    """Plans a pretrain_moe.py command line and sets its environment variables in this process. Raises FlagErrors.

    `num_absent`: number of further ranks on this host that will not be started; see `context_without_peers`.
    """
    ranks = {"RANK": "0", "WORLD_SIZE": f"{num_absent + 1}", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": f"{num_absent + 1}"}
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    environment = {**os.environ, **(ranks | where if num_absent else {})}
    plan = read_plan(list(words), environment, vocab_size_of=vocab_size_of)
    os.environ.update(plan.environment)
    return plan


def context_without_peers(plan: RunPlan, device: str = "cuda:0") -> ParallelContext:
    """Context of rank 0 whose peers do not exist: collectives return at once, with placeholder values.

    Step times then include only one rank's computation and launch overhead: a lower bound for any interconnect. Before
    torch 2.13, reduce-scatters leave their outputs uninitialised, so values may be non-finite, which draws less power.
    """
    build.set_algorithms(plan)
    holders = plan.layout.embedding_ranks(tied=plan.model.tied_embeddings)
    parallel = replace(plan.parallel, embedding_ranks=holders)
    return ParallelContext.fake(parallel, 0, dtype=torch_dtype(plan.precision.params), device=device)


def require_gpu(what: str) -> None:
    """Raises EnvironmentProblem if this machine has no GPU."""
    if not torch.cuda.is_available():
        raise EnvironmentProblem(f"torch finds no GPU here, and {what} what this tool times.")


class TimedRun:
    """Objects of a run for timing its steps.

    `quick`: draws initial weights on the device, which is faster but gives other values than the run. `context`:
    context of an existing process group, or of `context_without_peers`; if None, the run creates a process group.
    """

    def __init__(self, plan: RunPlan, *, quick: bool = False, context: ParallelContext | None = None) -> None:
        self.plan = plan
        if context is not None:
            build.set_algorithms(plan)
        self.context = build.build_context(plan) if context is None else context
        with ExitStack() as undo:  # cleans up after errors, because another run may follow one that runs out of memory
            undo.callback(self.context.stop)
            kernels, stand_in = build.build_kernels(plan, self.context), None
            if self.context.is_fake:
                load = assumed_load(self.context)
                # ids are created once, because a copy from the host would wait for the device
                kernels = with_assumed_choices(kernels, load, cache(assumed_ids))
                stand_in = partial(transport_without_peers, load)
            model = build.build_model(plan, self.context, kernels, initial=not quick, stand_in_transport=stand_in)
            if quick:
                draw_on_device(model, plan.model.init.std)
            has_peers = not self.context.is_fake
            self.trainer: Trainer = build.build_trainer(plan, self.context, model, kernels, has_peers=has_peers)
            loader = build.build_train_loader(plan, self.context, build.build_data(plan, self.context))
            undo.pop_all()
        assert loader is not None, "a run with --skip-train has no step to profile"
        self.loader: TrainLoader = loader
        self.state = TrainState()
        self.kernel_table = kernels.table()
        self.num_samples = 0
        """Samples of the last step over all ranks."""
        self._rows: list[torch.Tensor] = []
        """Expert rows of this rank, of every dispatch. Empty with CUDA graphs, and if every rank has all experts."""
        comm, graphs = self.trainer.model.expert_comm, plan.cuda_graphs
        captured = graphs.full_iteration or "moe" in graphs.cuda_graph_modules
        if comm is not None and comm.etp_ep.size > 1 and not captured:
            comm.record_overflow = partial(self._record_rows, comm.record_overflow)  # type: ignore[method-assign]

    def step(self) -> StepOutcome:
        outcome = self.trainer.step(self.loader.next_step(), self.state)
        self.num_samples = outcome.counts.num_samples
        self.state.advance(outcome.counts, build.build_train_state_config(self.plan))
        return outcome

    def take_loads(self) -> tuple[float, ...]:
        """Load of the busiest expert over the mean load, per MoE layer, averaged over the microbatches since the last
        call. Empty without peers, whose metrics are missing."""
        if self.context.is_fake:
            return ()
        metric = self.trainer.metrics.reduce(self.context).get("moe/max_violation")
        figures = metric.layers.values() if metric else ()
        return tuple(1 + figure for figure in figures if isinstance(figure, float))

    def _record_rows(self, record: Callable[[DispatchedTokens], None], rows: DispatchedTokens) -> None:
        beyond_bound = 0 if rows.overflow is None else rows.overflow
        self._rows.append(rows.offsets_e[-1] + beyond_bound)
        record(rows)

    def take_rows(self) -> tuple[float, ...]:
        """Expert rows of the fullest rank relative to the mean of all ranks, for every dispatch since the last call."""
        recorded, self._rows = self._rows, []
        if not recorded or self.trainer.model.expert_comm is None:
            return ()
        group, rows = self.trainer.model.expert_comm.etp_ep, torch.stack(recorded).double()
        fullest = all_reduce_(rows.clone(), group, "max")
        return tuple((fullest * group.size / all_reduce_(rows, group)).tolist())

    def close(self) -> None:
        self.loader.close()
        self.context.stop()
        if self.context.owns_process_group and not self.context.is_fake:
            # the old store keeps the keys of this process group, which a later run of this process would read
            os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        torch.use_deterministic_algorithms(False)  # restores the default for later runs of this process


@torch.no_grad()
def draw_on_device(model: torch.nn.Module, std: float) -> None:
    """Initialises matrices with normally distributed values and vectors with 1, on the device."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.normal_(std=std) if parameter.dim() > 1 else parameter.fill_(1.0)


class Marks:
    """Time stamps in a device's work; the first is recorded when this object is created."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._seconds: list[float] = []
        """Time stamps on a CPU, where CUDA events do not exist."""
        self.add()

    def add(self) -> None:
        """Records a time stamp after all work launched so far."""
        if self._on_gpu:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._seconds.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Times between consecutive time stamps; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        of_events = [before.elapsed_time(after) for before, after in pairwise(self._events)]
        return of_events + [1e3 * (after - before) for before, after in pairwise(self._seconds)]


def timed_steps(run: TimedRun, num_steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds and loss of each step; synchronises only at the end."""
    marks, losses = Marks(run.context.device), []
    for _ in range(num_steps):
        losses.append(run.step().loss)
        marks.add()
    return marks.milliseconds(), [loss.item() for loss in losses]


def graph_pool_bytes(run: TimedRun) -> int:
    """Bytes in CUDA graph pools that replays use but that the allocator counts as free."""
    if run.trainer.full_iteration is None and run.trainer.pipeline.graph_instances is None:
        return 0
    pools = (each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) != (0, 0))
    return sum(each["total_size"] - each["allocated_size"] for each in pools)


def traced_steps(run: TimedRun, num_steps: int, trace: Path | None) -> list[KernelEvent]:
    """Traces the kernels of a few steps; writes a chrome trace to `trace`. Host operations are not recorded: recording
    slows the host down, and late launches would expose communication."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            run.step()
        torch.cuda.synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return [
        KernelEvent(event.name, event.time_range.start, event.time_range.elapsed_us(), event.device_resource_id)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]


@dataclass(frozen=True)
class Reading:
    """Power and clock reading of a GPU."""

    watts: float
    limit_watts: float
    """Power limit, at which the clock is reduced."""
    sm_mhz: float

    def __str__(self) -> str:
        return f"{self.watts:.0f} of {self.limit_watts:.0f} W, SMs at {self.sm_mhz:.0f} MHz"


def nvidia_smi(gpu: str) -> tuple[str, ...]:
    """nvidia-smi command that prints one reading per line until it is killed. `gpu`: UUID or index."""
    fields = "--query-gpu=power.draw,power.limit,clocks.sm"
    return ("nvidia-smi", f"--id={gpu}", fields, "--format=csv,noheader,nounits", f"--loop-ms={EVERY_MS}")


class Board:
    """Context manager that records readings of a GPU; records nothing if the command does not exist."""

    def __init__(self, command: Sequence[str]) -> None:
        """`command`: see `nvidia_smi`."""
        self._command = tuple(command)
        self._process: subprocess.Popen[str] | None = None
        self._reader: Thread | None = None
        self._readings: list[Reading] = []

    def __enter__(self) -> Self:
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return self
        self._reader = Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None or self._reader is None:
            return
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def reset(self) -> None:
        """Discards the readings."""
        self._readings = []

    def medians(self) -> Reading | None:
        """Medians of the readings since the last `reset`; None without readings."""
        readings = list(self._readings)
        if not readings:
            return None
        return Reading(*map(median, zip(*map(astuple, readings), strict=True)))

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None, "the command has no output pipe"
        with process.stdout as lines:
            for line in lines:
                reading = _reading(line)
                if reading is not None:
                    self._readings.append(reading)


def _reading(line: str) -> Reading | None:
    """Parses a line; None if its values are not numbers, such as [N/A]."""
    try:
        watts, limit, clock = map(float, line.split(","))
    except ValueError:
        return None
    return Reading(watts, limit, clock)


def kind_of(name: str) -> str:
    """Kind of a kernel, derived from its name; "other" if the name is unknown."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def shares_of_kinds(events: Sequence[KernelEvent], num_steps: int) -> list[Share]:
    """Time per step of every kind, longest first, followed by idle time."""
    shares = _sum(((kind_of(event.name), event) for event in events), num_steps)
    return [*shares, Share("idle", idle_microseconds(events) / 1e3 / num_steps, 0.0)]


def shares_of_kernels(events: Sequence[KernelEvent], num_steps: int) -> list[Share]:
    """Time per step of every kernel, longest first."""
    return _sum(((event.name, event) for event in events), num_steps)


def busy_microseconds(events: Sequence[KernelEvent]) -> float:
    """Time in which at least one of the kernels ran."""
    busy, busy_until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        busy += max(event.end - max(event.start, busy_until), 0.0)
        busy_until = max(busy_until, event.end)
    return busy


def idle_microseconds(events: Sequence[KernelEvent]) -> float:
    """Time between the first and the last kernel in which no kernel ran on any stream."""
    if not events:
        return 0.0
    return max(event.end for event in events) - min(event.start for event in events) - busy_microseconds(events)


def communication_times(events: Sequence[KernelEvent], num_steps: int) -> CommunicationTime:
    """Milliseconds per step of overlapped and of exposed communication."""
    sends = [event for event in events if kind_of(event.name) == "communication"]
    others = [event for event in events if kind_of(event.name) != "communication"]
    exposed = busy_microseconds(events) - busy_microseconds(others)
    overlapped = busy_microseconds(sends) - exposed
    return CommunicationTime(overlapped / 1e3 / num_steps, exposed / 1e3 / num_steps)


def layer_windows(events: Sequence[KernelEvent]) -> dict[str, tuple[float, float]]:
    """Start and end in microseconds of the forward and of the backward of a typical layer: the interval of median
    length between two consecutive attention kernels. A pass without two attention kernels is omitted."""
    windows = {}
    for name, pattern in (("forward", r"fprop|fwd|forward"), ("backward", r"bprop|bwd|backward|key_grads")):
        found = [each for each in events if kind_of(each.name) == "attention" and re.search(pattern, each.name)]
        starts = sorted(each.start for each in found)
        pairs = sorted(zip(starts, starts[1:], strict=False), key=lambda pair: pair[1] - pair[0])
        if pairs:
            windows[name] = pairs[len(pairs) // 2]
    return windows


def _sum(named: Iterable[tuple[str, KernelEvent]], num_steps: int) -> list[Share]:
    times: dict[str, float] = {}
    calls: dict[str, int] = {}
    for name, event in named:
        times[name] = times.get(name, 0.0) + event.duration
        calls[name] = calls.get(name, 0) + 1
    shares = [Share(name, time / 1e3 / num_steps, calls[name] / num_steps) for name, time in times.items()]
    return sorted(shares, key=lambda share: -share.milliseconds)
