"""Watchdog, numerics checks, signals and fault injection."""

from dataclasses import dataclass
from typing import Literal

from megatron_moe.config.faults import FaultConfig


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    """Reactions of a run to signals, hangs, numerical problems and failures."""

    exit_signals: tuple[str, ...] = ()
    """Names of signals on which all ranks save a checkpoint and exit; empty: default signal handling."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a non-finite loss or gradient: end the run, or skip the update. It is never applied to weights."""
    watchdog: tuple[tuple[str, float], ...] = ()
    """Pairs (phase, timeout in seconds); phases are start, step, evaluation, save and exit. Others have no timeout."""
    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Iterations between comparisons of weights over data-parallel ranks; None: never
    (`--check-weight-hash-across-dp-replicas-interval`)."""
    max_skipped_iterations: int = 3
    """Number of consecutive skipped steps after which the run ends (`--max-skipped-iterations`)."""
    check_for_spiky_loss: bool = False
    """Detects loss spikes (`--check-for-spiky-loss`)."""
    check_for_large_grads: bool = False
    """Detects gradient spikes (`--check-for-large-grads`)."""
    distributed_timeout_seconds_after_init: float | None = None
    """Timeout of collectives after the first step, in seconds; None: same as in the first step
    (`--distributed-timeout-seconds-after-init`)."""
    on_spike: Literal["report", "skip", "stop"] = "report"
    """Reaction to a loss or gradient spike; skip and stop discard the update."""
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = "validate_results"
    """validate_results: if a step fails validation and would end the run, recomputes it first to detect faulty
    hardware; report_stats: recomputes every step, for statistics (`--rerun-mode`)."""
    faults: tuple[FaultConfig, ...] = ()
    """Faults to inject (`--inject`)."""
