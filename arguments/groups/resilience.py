"""What happens when something goes wrong."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import flag


@dataclass(frozen=True, kw_only=True)
class ResilienceFlags:
    """Signals, non-finite numbers, replicas that differ."""

    check_for_nan_in_loss_and_grad: bool = flag(True)
    """Keep a loss or gradient that is not finite from the weights, and do what `--on-nonfinite` says."""
    on_nonfinite: Literal["stop", "skip"] = flag("stop", status="ours")
    """After a loss or gradient that is not finite: stop with a report of its origin, or leave out the step."""
    max_skipped_iterations: int = flag(3, least=1, status="ours")
    """So many iterations left out in a row by `--on-nonfinite skip` end the run."""
    check_for_spiky_loss: bool = flag(False, status="close", note="what follows a spike is --on-spike")
    """Report a loss above ten times the largest of the last 100 iterations."""
    check_for_large_grads: bool = flag(False, status="close", note="of the whole norm; what follows is --on-spike")
    """Report a gradient norm above ten times the largest of the last 100 iterations."""
    on_spike: Literal["report", "skip", "stop"] = flag("report", status="ours")
    """After a loss of `--check-for-spiky-loss` or a norm of `--check-for-large-grads`: say so and go on, leave out
    the step, or stop."""
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None, least=1, status="close", note="expert weights too; copies that differ end the run with code 12"
    )
    """Iterations between comparisons of weights over data-parallel ranks."""
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = flag(
        "validate_results",
        status="close",
        note="a step that would end the run is computed again: code 16 where the result changes, else 6; 17 where the "
        "next start meets the same",
    )
    """Compute a step that ends the run again, to judge the hardware; never; or every step, for statistics."""
    exit_signal_handler: bool = flag(
        False, status="close", note="SIGTERM, SIGINT and SIGUSR1 always count; exit code 75"
    )
    """Save and leave on a signal, all ranks after the same iteration; a second signal leaves at once."""
    exit_signal: Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"] = flag(
        "SIGTERM", status="close", note="counts besides those that always do"
    )
    """One more signal for `--exit-signal-handler`."""
    start_deadline: int = flag(3600, least=0, status="ours")
    """Seconds until the first step begins. A deadline that expires writes all stacks and ends the run with code 10; 0:
    none."""
    step_deadline: int = flag(600, least=0, status="ours")
    """Seconds that a step may take, and every step of an evaluation."""
    save_deadline: int = flag(3600, least=0, status="ours")
    """Seconds that saving may take."""
    exit_deadline: int = flag(600, least=0, status="ours")
    """Seconds that leaving may take when all is done."""
    distributed_timeout_seconds_after_init: int | None = flag(
        None, least=1, status="close", note="from the second step on"
    )
    """How long a collective may wait after the first iteration, in place of --distributed-timeout-minutes."""
    debug_collectives: bool = flag(False, status="ours")
    """Compare what ranks are about to do together, before they do it: kind, sizes, types, order. Ranks that disagree
    end the run at once, each with its own call. Slow; to find a mistake."""
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = flag(
        "transient_error", status="close", note="see --inject; the last two both stay when the step is computed again"
    )
    """What `--error-injection-rate` injects."""
    inject: tuple[str, ...] = flag((), status="ours")
    """Faults for tests, as kind@rank:iteration[:phase]. Refused unless MEGATRON_MOE_ALLOW_FAULTS=1 is set."""
