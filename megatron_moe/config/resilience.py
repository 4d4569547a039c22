"""Watchdog, numerics checks, signals and fault injection."""

from dataclasses import dataclass
from typing import Literal

from megatron_moe.config.faults import FaultInjectionConfig


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    """Reactions of a run to signals, hangs, numerical problems and failures."""

    exit_signals: tuple[str, ...] = ()
    """Names of signals that make all ranks save a checkpoint and exit. If empty, signals keep Python's default
    handlers."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a non-finite loss or gradient: end the run or skip the update. Weights are unchanged either way."""
    watchdog: tuple[tuple[str, float], ...] = ()
    """(phase, timeout in seconds). Phases: start, step, evaluation, save, exit. A phase that is not listed has no
    timeout."""
    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Iterations between checks that all data-parallel replicas have equal weights; None means never
    (`--check-weight-hash-across-dp-replicas-interval`)."""
    max_skipped_iterations: int = 3
    check_for_spiky_loss: bool = False
    check_for_large_grads: bool = False
    distributed_timeout_seconds_after_init: float | None = None
    """Timeout of collectives after the first step, in seconds; None means that the initial timeout stays in effect
    (`--distributed-timeout-seconds-after-init`)."""
    on_spike: Literal["report", "skip", "stop"] = "report"
    """Reaction to a loss or gradient spike; "skip" and "stop" discard the update, "stop" also ends the run."""
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = "validate_results"
    """validate_results: recomputes a step whose loss or gradient ends the run, to detect faulty hardware. report_stats:
    recomputes every step, for statistics (`--rerun-mode`)."""
    faults: tuple[FaultInjectionConfig, ...] = ()
    """Faults to inject (`--inject`)."""
