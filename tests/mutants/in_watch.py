"""Bugs of what watches a run: the wrong rank is blamed, a bad step is taken for a good one, and the other way round."""

from tests.mutants.bug import Bug

PEERS = "tests/resilience/test_peer_failure.py"
RERUN = "tests/resilience/test_rerun.py"
NUMERICS = "tests/resilience/test_numerics_guard.py"

WATCHING = (
    Bug(
        name="watch: of two reports the later one is blamed",
        file="megatron_moe/resilience/peer_failure.py",
        old="first = min(causes, key=lambda failure: failure.time)",
        new="first = max(causes, key=lambda failure: failure.time)",
        select=(f"{PEERS}::test_of_several_that_failed_the_first_is_blamed",),
        reason="what followed from the failure is taken for its cause",
    ),
    Bug(
        name="watch: a report of an earlier start is believed",
        file="megatron_moe/resilience/run_status.py",
        old="failure is not None and failure.time >= begun",
        new="failure is not None",
        select=(f"{PEERS}::test_a_report_of_an_earlier_start_says_nothing",),
        reason="after a restart the rank that failed last time is blamed for ever",
    ),
    Bug(
        name="watch: a result that changes is held for the fault of the model",
        file="megatron_moe/resilience/rerun.py",
        old="    if suspects or any(not same(first[name], again[name]) for name in again):\n",
        new="    if any(not same(first[name], again[name]) for name in again):\n",
        select=(RERUN,),
        reason="a rank's own loss changes although the sum over all rounds it away: broken hardware trains on",
    ),
    Bug(
        name="watch: the same verdict whatever an earlier start met",
        file="megatron_moe/resilience/rerun.py",
        old="    if earlier is not None and all(",
        new="    if earlier is not None and any(",
        select=(f"{RERUN}::test_the_same_result_in_two_starts_is_no_fault_of_the_hardware",),
        reason="code 17 tells a scheduler to give up on a job that a new start might have healed",
    ),
    Bug(
        name="watch: a spike on the device raises the limit for the next",
        file="megatron_moe/resilience/numerics_guard.py",
        old="        counts = torch.isfinite(value) & ~spike\n",
        new="        counts = torch.isfinite(value)\n",
        select=(f"{NUMERICS}::test_a_limit_on_the_device_judges_as_the_host_does",),
        reason="a divergence is left out once and then trained on",
    ),
    Bug(
        name="watch: a limit on the device that judges from the first step on",
        file="megatron_moe/resilience/numerics_guard.py",
        old="        spike = (self._number >= window) & (value",
        new="        spike = value.isfinite() & (value",
        select=(f"{NUMERICS}::test_a_limit_on_the_device_judges_as_the_host_does",),
        reason="the steep start of every run is left out",
    ),
    Bug(
        name="watch: the majority of the copies of a weight is accused",
        file="megatron_moe/resilience/replica_check.py",
        old="strict=True) if value != common]",
        new="strict=True) if value == common]",
        select=("tests/resilience/test_replica_check.py",),
        reason="the healthy nodes are left out, the broken one stays",
    ),
    Bug(
        name="watch: ranks that disagree about a collective are not compared",
        file="megatron_moe/parallel/context.py",
        old="    if spec.debug_collectives:\n",
        new="    if not spec:\n",
        select=("tests/parallel/test_rendezvous.py",),
        reason="a flag that does nothing",
    ),
)
