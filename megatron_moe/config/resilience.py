"""Watchdog, numerics checks, signals, injected faults."""

from dataclasses import dataclass
from typing import Literal

from megatron_moe.config.faults import FaultConfig


@dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    """What a run does about signals and about things that go wrong."""

    exit_signals: tuple[str, ...] = ()
    """Names of signals on which all ranks save and leave; none: signals do to the process what they always do."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What follows a loss or gradient that is not finite. The weights never see it."""
    watchdog: tuple[tuple[str, float], ...] = ()
    """(phase, seconds): start, step, evaluation, save, exit; a phase that is not listed may take for ever."""
    compare_replicas_interval: int | None = None
    """Iterations between comparisons of the weights over data-parallel ranks; None: none."""
    most_skips: int = 3
    """So many steps skipped in a row end the run."""
    report_spiky_loss: bool = False
    report_large_grads: bool = False
    timeout_after_start: float | None = None
    """Seconds that a collective may wait after the first step; None: as long as in it."""
    on_spike: Literal["report", "skip", "stop"] = "report"
    """What follows one of these. Unless it is reported alone, the weights never see it."""
    rerun: Literal["disabled", "validate_results", "report_stats"] = "validate_results"
    """Whether a step that ends the run is computed again to judge the hardware; or every step is, for statistics."""
    faults: tuple[FaultConfig, ...] = ()
    """What tests let happen to the run."""
