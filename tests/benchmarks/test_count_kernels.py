"""Kernel launches per layer and microbatch with tensor and context parallelism, counted without a GPU."""

from functools import cache

import pytest

from benchmarks.harness.count_kernels import LaunchSite, per_layer, report

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

EP2 = (
    "--recipe m27 --world-size 2 --expert-model-parallel-size 2 --global-batch-size 32 "
    "--moe-token-dispatcher-type flex --moe-expert-rank-capacity-factor 2"
)
LAYOUTS = {"tp2": "--tensor-model-parallel-size 2 --sequence-parallel", "cp2": "--context-parallel-size 2"}
OVERLAPS = (
    "--overlap-moe-expert-parallel-comm",
    "--overlap-moe-expert-parallel-comm --delay-wgrad-compute",
    "--overlap-dispatch-backward-with-experts-wgrad",
)
MOST = 1.2
"""Maximum number of launches relative to expert parallelism, where every rank has whole sequences."""


@cache
def launches(flags: str) -> dict[LaunchSite, int]:
    """Launches per layer and microbatch under expert parallelism with more flags."""
    return per_layer(f"{EP2} {flags}".split())


def test_ranks_that_share_a_sequence_launch_little_more_than_ranks_that_do_not() -> None:
    base = sum(launches("").values())
    for name, flags in LAYOUTS.items():
        found = launches(flags)
        assert base < sum(found.values()) <= MOST * base, f"{name}: {report(found, 100)}"


@pytest.mark.parametrize("flags", OVERLAPS)
def test_overlap_of_the_exchange_launches_nothing_more(flags: str) -> None:
    plain, overlapped = launches(""), launches(flags)
    assert sum(plain.values()) == sum(overlapped.values()), report(overlapped, 100)
