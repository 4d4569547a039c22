"""The executor of schedules."""

import pytest
import torch

from megatron_moe.schedule.run import run_schedule
from megatron_moe.specs.pipeline.actions import Action
from megatron_moe.specs.pipeline.schedule import schedule_actions


class RecordingStage:
    def __init__(self):
        self.weight = torch.ones((), requires_grad=True)
        self.events = []

    def forward(self, microbatch, chunk):
        self.events.append(f"F{microbatch}")
        return self.weight * (microbatch + 1)

    def after_backward(self, microbatch, chunk):
        self.events.append(f"B{microbatch}:{self.weight.grad.item():g}")


def test_gradients_of_a_microbatch_are_there_after_its_backward():
    stage = RecordingStage()
    run_schedule(schedule_actions(3), stage)
    assert stage.events == ["F0", "B0:1", "F1", "B1:3", "F2", "B2:6"]


def test_a_forward_without_backward_is_a_broken_schedule():
    with pytest.raises(AssertionError, match=r"without a backward.*\(1, 0\)"):
        run_schedule([Action("forward", 0), Action("backward", 0), Action("forward", 1)], RecordingStage())
