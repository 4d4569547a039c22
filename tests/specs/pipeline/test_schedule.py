"""Schedules as data."""

import pytest

from megatron_moe.specs.pipeline.schedule import schedule_actions


@pytest.mark.parametrize("num_microbatches", [1, 2, 7])
def test_every_microbatch_runs_forward_once_and_then_backward_once(num_microbatches):
    actions = [str(action) for action in schedule_actions(num_microbatches)]
    expected = []
    for microbatch in range(num_microbatches):
        expected += [f"F{microbatch}.0", f"B{microbatch}.0"]
    assert actions == expected
