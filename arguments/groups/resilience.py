"""Fault-handling flags."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import differs, flag, new_flag


@dataclass(frozen=True, kw_only=True)
class ResilienceFlags:
    """Signals, timeouts, non-finite values, replica checks."""

    check_for_nan_in_loss_and_grad: bool = flag(True)
    """Check losses and gradients for NaN and infinity; `--on-nonfinite` selects the action. Weights are never updated
    with non-finite gradients."""
    on_nonfinite: Literal["stop", "skip"] = new_flag("stop")
    """Action on a non-finite loss or gradient: stop with a report of its origin, or skip the step."""
    max_skipped_iterations: int = new_flag(3, least=1)
    """End the run after this many consecutive iterations were skipped by `--on-nonfinite` or `--on-spike`."""
    check_for_spiky_loss: bool = differs(False, "--on-spike selects the action")
    """Report a loss above ten times the maximum of the last 100 iterations."""
    check_for_large_grads: bool = differs(False, "uses the global norm; --on-spike selects the action")
    """Report a gradient norm above ten times the maximum of the last 100 iterations."""
    on_spike: Literal["report", "skip", "stop"] = new_flag("report")
    """Action on a loss reported by `--check-for-spiky-loss` or a norm reported by `--check-for-large-grads`: report
    only, skip the step, or stop."""
    check_weight_hash_across_dp_replicas_interval: int | None = differs(
        None, "includes expert weights; a mismatch ends the run with code 12", least=1
    )
    """Iterations between comparisons of the weights of data-parallel replicas. Default: never."""
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = differs(
        "validate_results",
        "exit code 16 if the recomputed result differs, 6 if it does not, 17 if the next launch reproduces the failure",
    )
    """validate_results: if a step fails validation and would end the run, recompute it to detect hardware faults.
    report_stats: recompute every step for statistics. disabled: never recompute."""
    exit_signal_handler: bool = differs(
        False, "always handles SIGTERM, SIGINT and SIGUSR1; exit code 75; Ctrl-C needs no flag"
    )
    """On a signal, all ranks save after the same iteration and exit; on a second signal they exit immediately."""
    exit_signal: Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"] = differs(
        "SIGTERM", "added to the signals that are always handled"
    )
    """Signal that `--exit-signal-handler` handles in addition to SIGTERM, SIGINT and SIGUSR1."""
    start_deadline: int = new_flag(3600, least=0)
    """Timeout in seconds from launch to the first step; 0 disables it. When a timeout expires, all stacks are written
    and the run exits with code 10."""
    step_deadline: int = new_flag(600, least=0)
    """Timeout in seconds of each training step and each evaluation step."""
    save_deadline: int = new_flag(3600, least=0)
    """Timeout in seconds of saving a checkpoint."""
    exit_deadline: int = new_flag(600, least=0)
    """Timeout in seconds of the shutdown after training."""
    distributed_timeout_seconds_after_init: int | None = differs(None, "applies from the second step", least=1)
    """Collective timeout in seconds after the first iteration; replaces --distributed-timeout-minutes."""
    debug_collectives: bool = new_flag(False)
    """Compare kind, sizes, dtypes and order of each collective across ranks before it starts; on a mismatch the run
    ends and each rank reports its call. Slow, for debugging."""
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = differs(
        "transient_error", "transient_error and persistent_error both recur when the step is recomputed; see --inject"
    )
    """Kind of fault for `--error-injection-rate`."""
    inject: tuple[str, ...] = new_flag(())
    """Faults to inject in tests, as kind@rank:iteration[:phase]. Requires MEGATRON_MOE_ALLOW_FAULTS=1."""
