"""Reporter of a run: console, log.txt, metrics.jsonl, TensorBoard and W&B. Failed writes never stop training."""

import importlib.util
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.logging import LoggingConfig
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.precision import FloatName
from megatron_moe.cost_model.flops import flops_per_step, peak_flops
from megatron_moe.logs.log_line import (
    StepReport,
    StepResult,
    ValidationReport,
    mean_tokens,
    short_validation_line,
    step_line,
    validation_lines,
)
from megatron_moe.logs.metric_values import Metric
from megatron_moe.logs.metrics_file import (
    MEMORY_TAGS,
    enabled_tags,
    layer_tags,
    recorded_tags,
    step_record,
    step_tags,
    truncate_metrics,
    validation_record,
    validation_tag,
    validation_tags,
)
from megatron_moe.logs.plots import draw_plots
from megatron_moe.logs.run_dir import prepare_folder, write_provenance
from megatron_moe.logs.run_lock import RUN_FOLDER, RunLock
from megatron_moe.logs.timers import Timers, timer_lines
from megatron_moe.logs.writers import (
    Console,
    Guard,
    JsonLines,
    LiveConsole,
    LogEntry,
    LogFile,
    Sink,
    TensorBoard,
    WandB,
    has_live_line,
)
from megatron_moe.parallel.agreement import run_on_every_rank
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ParallelContext

MB = 2**20
_EVERY_STEP = ("learning-rate", "batch-size", "lm loss", "grad-norm")


class Reporter:
    """Writes the reports of a run to the console, files and dashboards. All ranks call its methods in this order:

    1. The constructor checks that the run folder is writable and, if `--wandb-project` is set, that wandb is installed.
    2. `begin_run` sets the first iteration.
    3. `observe` is called after every step, and `report_steps` after the steps for which `is_due` is True.
       `report_validation` and `note` may be called at any time.
    4. `close` flushes the records and draws the plots.

    The last rank reports losses, as in Megatron. The first rank writes notes and provenance files.
    """

    def __init__(
        self,
        config: LoggingConfig,
        context: ParallelContext,
        *,
        model: ModelConfig,
        params_dtype: FloatName,
        seq_length: int,
        train_iters: int,
        run_yaml: str = "",
        command_line: str = "",
        sinks: Sequence[Sink] | None = None,
    ) -> None:
        """
        Args:
            run_yaml: text of run.yaml, which is written to the run folder.
            sinks: destinations used instead of metrics.jsonl, TensorBoard and W&B.
        Raises:
            EnvironmentProblem: the run folder is not writable, another job uses it, or a requested package is missing.
        """
        self.config = config
        self.context = context
        self._flops_of = partial(flops_per_step, model, seq_length=seq_length)
        self._run_yaml = run_yaml
        self._command_line = command_line
        self._lock: RunLock | None = None
        run_on_every_rank(self._prepare, context)
        self._seq_length = seq_length
        self._last_iteration = train_iters
        on_gpu = context.device.type == "cuda"
        self._peak_flops = peak_flops(torch.cuda.get_device_name(context.device), params_dtype) if on_gpu else None
        self._steps: list[StepResult] = []
        """Results of the steps since the last report."""
        self.timers = Timers(self.config.timing_log_level, context.device)
        self._sinks = sinks
        self._guard = Guard(self._report_failure)
        self._live = self.config.progress_bar and has_live_line()
        """True if the last rank's console shows a live line."""
        self._console: Console = LiveConsole() if self._live and context.is_last else Console()
        self._log_file = LogFile(self.config.run_dir / "log.txt") if self.config.run_dir is not None else None
        self._samples = self._tokens = 0
        self._first_iteration = 0
        self._recorded: frozenset[str] = frozenset()
        """Keys of the records of `_first_iteration` that metrics.jsonl contains from before this process started."""
        self._has_reported = False

    def _prepare(self) -> None:
        """Checks packages and folders, locks the run folder and writes the provenance files, in this order."""
        self._refuse_missing_packages()
        if self.config.tensorboard_dir is not None and self.context.is_last:
            prepare_folder(self.config.tensorboard_dir, self.context.rank, option="--tensorboard-dir")
        folder = self.config.run_dir
        if folder is None or not (self.context.is_first or self.context.is_last):
            return
        prepare_folder(folder, self.context.rank)
        if not self.context.is_first:
            return
        self._lock = RunLock(folder, **RUN_FOLDER)
        write_provenance(folder, run_yaml=self._run_yaml, command_line=self._command_line, device=self.context.device)

    def begin_run(self, iteration: int, last_iteration: int, *, samples: int, tokens: int) -> None:
        """Starts reporting after `iteration` (last completed; 0 in a new run), `samples` and `tokens` consumed so far.
        Drops later records of metrics.jsonl. Collective."""
        self._samples, self._tokens = samples, tokens
        self._first_iteration, self._last_iteration = iteration, last_iteration
        if self._sinks is None:
            self._sinks = self._make_sinks(iteration) if self.context.is_last else ()
        self._guard.run("console", partial(self._console.start, iteration, last_iteration))
        if self._lock is not None and self._lock.warning is not None:
            self.note(self._lock.warning)
        # collective over world: keys of the records of one iteration, which only the last rank reads
        self._recorded = gather_objects(self._recorded, self.context.group("world"))[-1]

    def has_validation(self, iteration: int, split: str, data_set: str = "") -> bool:
        """True on all ranks if the run wrote this evaluation to metrics.jsonl before it was restarted."""
        return iteration == self._first_iteration and validation_tag(split, data_set) in self._recorded

    def is_due(self, iteration: int) -> bool:
        """True if a report follows this iteration: a multiple of `--log-interval`, or the first or last iteration."""
        return iteration % self.config.log_interval == 0 or iteration in (1, self._last_iteration)

    def observe(self, result: StepResult) -> None:
        """Stores a step's results for the next report and shows them in the progress bar, TensorBoard and W&B."""
        self._steps.append(result)
        self._samples += result.num_samples
        self._tokens += result.num_tokens
        every = self.config.log_memory_interval
        if every is not None and result.iteration % every == 0:
            self._write_memory(result.iteration)
        if not self.context.is_last:
            return
        self._guard.run("console", partial(self._console.progress, result))
        if result.iteration % self.config.tensorboard_log_interval == 0:
            values = (result.learning_rate, result.num_samples, result.loss, result.norms["all"])
            self._log(result.iteration, dict(zip(_EVERY_STEP, values, strict=True)))

    def log_skipped_iteration(self, iteration: int, num_samples: int) -> None:
        """Counts the samples of an iteration skipped by `--iterations-to-skip` and writes a note."""
        self._samples += num_samples
        self.note(f"iteration {iteration}: skipped its {num_samples} samples (--iterations-to-skip)")

    def report_steps(self, metrics: Mapping[str, Metric]) -> None:
        """Writes a report of all steps since the last report. Collective: gathers the timers of all ranks.

        `metrics`: result of `MetricAccumulator.reduce`.
        """
        steps, self._steps = self._steps, []
        assert steps, "a report needs at least one step"
        report = StepReport(
            steps=steps,
            train_iters=self._last_iteration,
            consumed_samples=self._samples,
            consumed_tokens=self._tokens,
            metrics=metrics,
            world_size=self.context.group("world").size,
            flops_per_step=self._flops_of(mean_tokens(steps) / self._seq_length),
            peak_flops=self._peak_flops,
        )
        timings = self.timers.gather_seconds(self.context)
        if self.context.is_last:
            for line in (step_line(report, self.config), *timer_lines(timings, self.config.timing_log_option)):
                self._detail(line)
            extra = memory_tags(self.context.device) | {f"{name}-time": max(ranks) for name, ranks in timings.items()}
            self._log(report.iteration, self._shown(report, extra), {**step_record(report), **extra})
        if not self._has_reported and self.config.log_memory_interval is None:
            self._write_memory(report.iteration)
        self._has_reported = True

    def report_validation(self, report: ValidationReport) -> None:
        """Writes a validation report to all destinations."""
        if not self.context.is_last:
            return
        short = short_validation_line(report)
        lines = [short] if self.config.log_style == "short" else validation_lines(report)
        self.write("\n".join(lines), shown=short if self._live else None)
        self._log(report.iteration, enabled_tags(validation_tags(report), self.config), validation_record(report))

    def note(self, text: str, *, shown: str | None = None) -> None:
        """Writes a text to log.txt and the console, on the first rank only. `shown`: different text for the console."""
        if self.context.is_first:
            self.write(text, shown=shown)

    def write(self, text: str, *, shown: str | None = None) -> None:
        """Writes a text to log.txt and the console, on the calling rank. `shown`: different text for the console."""
        self._guard.run("console", partial(self._console.write, text if shown is None else shown))
        self._append(text)

    def _detail(self, line: str) -> None:
        """Writes a line to log.txt and the console. A console with a live line is skipped if the run has a log.txt."""
        if self._live and self._log_file is not None:
            self._append(line)
        else:
            self.write(line)

    def _append(self, text: str) -> None:
        if self._log_file is not None:
            self._guard.run("log.txt", partial(self._log_file.write, text))

    def close(self) -> None:
        """Flushes all destinations, draws the plots and releases the run folder."""
        self._guard.run("console", self._console.close)
        for sink in self._sinks or ():
            self._guard.run(sink.name, sink.close)
        if self.config.plots and self.config.run_dir is not None and self.context.is_last:
            self._guard.run("plots", partial(draw_plots, self.config.run_dir))
        if self._log_file is not None:
            self._guard.run("log.txt", self._log_file.close)
        if self._lock is not None:
            self._guard.run("lock", self._lock.release)
            self._lock = None

    def _write_memory(self, iteration: int) -> None:
        """Writes the memory line of this rank if its data-parallel rank is 0."""
        if self.context.group("dp").rank == 0:
            whole_device = self.config.log_device_memory_used
            self._detail(memory_line(self.context.rank, iteration, self.context.device, whole_device=whole_device))

    def _shown(self, report: StepReport, extra: Mapping[str, float]) -> dict[str, float]:
        """Scalars of a report for TensorBoard and W&B, by tag. `extra`: additional scalars (memory and timers)."""
        tags = enabled_tags({**step_tags(report), **extra}, self.config)
        if self.config.moe_per_layer_logging:
            tags |= {tag: value for tag, value in layer_tags(report.metrics).items() if not isinstance(value, list)}
        if report.iteration % self.config.tensorboard_log_interval == 0:
            # `observe` already logged the step's own values; metrics.jsonl has the averages.
            tags = {tag: value for tag, value in tags.items() if tag not in _EVERY_STEP}
        return tags

    def _log(self, iteration: int, tags: Mapping[str, float], record: dict[str, Any] | None = None) -> None:
        entry = LogEntry(iteration=iteration, samples=self._samples, tags=tags, record=record)
        for sink in self._sinks or ():
            self._guard.run(sink.name, partial(sink.log, entry), sink.rest_seconds)

    def _make_sinks(self, iteration: int) -> tuple[Sink, ...]:
        folder = self.config.run_dir
        sinks: list[Sink] = []
        if folder is not None:
            path = folder / "metrics.jsonl"
            self._guard.run("metrics.jsonl", partial(self._read_metrics, path, iteration))
            sinks.append(JsonLines(path))
        directory = self.config.tensorboard_dir or (folder / "tensorboard" if folder else None)
        if directory is not None:
            sinks.append(TensorBoard(directory, iteration))
        if self.config.wandb_project:
            sinks.append(WandB(self.config, _flat_values(self._run_yaml)))
        return tuple(sinks)

    def _read_metrics(self, path: Path, iteration: int) -> None:
        truncate_metrics(path, iteration)
        self._recorded = recorded_tags(path, iteration)

    def _refuse_missing_packages(self) -> None:
        if self.config.wandb_project and importlib.util.find_spec("wandb") is None:
            raise EnvironmentProblem("--wandb-project was given, but wandb is not installed; run: pip install wandb")

    def _report_failure(self, text: str) -> None:
        """Writes the message about a failed destination to stderr and log.txt; never raises OSError."""
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)
        with suppress(OSError):
            if self._log_file is not None:
                self._log_file.write(text)


def _flat_values(resolved_yaml: str) -> dict[str, Any]:
    """Values of run.yaml by name, without its division into groups."""
    content = yaml.safe_load(resolved_yaml) if resolved_yaml else None
    values: dict[str, Any] = {}
    for name, value in (content if isinstance(content, dict) else {}).items():
        values |= value if isinstance(value, dict) else {name: value}
    return values


def memory_line(rank: int, iteration: int, device: torch.device, *, whole_device: bool = False) -> str:
    """Formats Megatron's memory line, in MB of 2^20 bytes: memory of torch's allocator, or of the process on a CPU.

    `whole_device`: adds the memory that all processes use on the device (on a CPU: on the host).
    """
    sizes = _device_bytes(device) if device.type == "cuda" else _host_bytes()
    if whole_device:
        sizes["used on the device"] = _used_bytes(device)
    fields = " | ".join(f"{name}: {size / MB:.2f}" for name, size in sizes.items())
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {fields}"


def memory_tags(device: torch.device) -> dict[str, float]:
    """Megatron's memory scalars of a GPU, in bytes; empty on a CPU. Does not synchronise."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    keys = ("reserved_bytes.all.current", "allocated_bytes.all.current", "allocated_bytes.all.peak")
    return {tag: stats[key] for tag, key in zip(MEMORY_TAGS, (*keys, "allocation.all.current"), strict=True)}


def _device_bytes(device: torch.device) -> dict[str, int]:
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "max allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "max reserved": torch.cuda.max_memory_reserved(device),
    }


def _used_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return (os.sysconf("SC_PHYS_PAGES") - os.sysconf("SC_AVPHYS_PAGES")) * resource.getpagesize()


def _host_bytes() -> dict[str, int]:
    sizes = {}
    statm = Path("/proc/self/statm")
    if statm.exists():
        sizes["resident"] = int(statm.read_text().split()[1]) * resource.getpagesize()
    # Linux reports ru_maxrss in KiB.
    sizes["max resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return sizes
