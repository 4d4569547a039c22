"""Schedule executor, tested with stages that multiply their input by one weight."""

import pytest
import torch

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline import ScheduleConfig
from megatron_moe.config.pipeline_layout import StageMap
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.p2p import Links, connect
from megatron_moe.pipeline.actions import Action
from megatron_moe.pipeline.executor import run_schedule
from megatron_moe.pipeline.overlap import OverlapNode, Step
from megatron_moe.pipeline.schedule import build_schedule
from tests.helpers.ranks import on_processes, on_threads
from tests.helpers.tolerances import EXACT


class Product:
    """Chunks of a toy model: stage s multiplies its input by the weight s + 2.

    The input of microbatch m is m + 1, and the objective is the sum of the last stage's output.
    """

    def __init__(self, stages=None, rank=0):
        self.stages = stages or StageMap()
        self.rank = rank
        numbers = [self.stages.stage(rank, chunk) for chunk in range(self.stages.vpp)]
        self.weights = [torch.tensor(float(number + 2), dtype=torch.float64, requires_grad=True) for number in numbers]
        self.events = []
        self.objectives = []
        self.alive = self.most_alive = 0

    def steps(self, microbatch, chunk):
        return [Step("chunk", None, lambda received: self.forward(microbatch, chunk, received))]

    def interleaved_nodes(self, forward_chunk, backward_chunk):
        return [OverlapNode("backward", "chunk"), OverlapNode("forward", "chunk")]

    def forward(self, microbatch, chunk, received):
        self.events.append(f"F{microbatch}.{chunk}")
        number = self.stages.stage(self.rank, chunk)
        if number == 0:
            assert received is None
            received = torch.full((2, 3), microbatch + 1.0, dtype=torch.float64)
        self.alive += 1
        self.most_alive = max(self.alive, self.most_alive)
        output = received * self.weights[chunk]
        if number < self.stages.num_stages - 1:
            return output
        self.objectives.append(output.sum().item())
        return output.sum()

    def input_shape(self, microbatch, stage):
        return (2, 3)

    def defer_weight_gradients(self, backward):
        self.events += [] if backward is None else [f"I{backward[0]}.{backward[1]}"]

    def weight_gradients(self, backward):
        self.events.append(f"W{backward[0]}.{backward[1]}")

    def after_autograd(self):
        self.events.append("grads")

    def after_backward(self, microbatch, chunk):
        self.alive -= 1
        self.events.append(f"B{microbatch}.{chunk}")


def gradients_of_a_schedule(context, config):
    stage = Product(config.stages, context.group("pp").rank)
    entries = build_schedule(config)[context.group("pp").rank]
    run_schedule(entries, stage, connect(context), config.stages)
    return [weight.grad.item() for weight in stage.weights], stage.most_alive


def expected_gradients(config):
    """Returns the gradients by rank and chunk that one autograd graph without a pipeline gives."""
    stages = config.stages
    weights = [torch.tensor(s + 2.0, dtype=torch.float64, requires_grad=True) for s in range(stages.num_stages)]
    for microbatch in range(config.num_microbatches):
        (6 * (microbatch + 1.0) * torch.stack(weights).prod()).backward()
    return [[weights[stages.stage(r, c)].grad.item() for c in range(stages.vpp)] for r in range(stages.pp)]


SIZES = ((1, 1, 3), (2, 1, 1), (2, 1, 5), (4, 1, 2), (4, 1, 6), (3, 1, 4), (2, 2, 4), (2, 3, 6), (4, 2, 8))
CASES = [
    ScheduleConfig(num_microbatches=m, pp=pp, vpp=vpp, overlap=overlap, split_backward=split)
    for pp, vpp, m in SIZES
    for overlap, split in ((False, False), (False, True), (True, False))
]


@pytest.mark.parametrize("config", CASES, ids=str)
def test_gradients_of_every_schedule_equal_those_of_one_graph(config):
    results = on_threads(
        ParallelConfig(world_size=config.pp, pp=config.pp), lambda context: gradients_of_a_schedule(context, config)
    )
    actual = torch.tensor([gradients for gradients, _ in results], dtype=torch.float64)
    EXACT.check(actual, torch.tensor(expected_gradients(config), dtype=torch.float64), "gradients by rank and chunk")


def test_1f1b_keeps_at_most_pp_microbatches_in_flight():
    config = ScheduleConfig(num_microbatches=8, pp=4)
    results = on_threads(ParallelConfig(world_size=4, pp=4), lambda context: gradients_of_a_schedule(context, config))
    assert [most_alive for _, most_alive in results] == [4, 3, 2, 1]


@pytest.mark.parametrize("pp, vpp, num_microbatches", [(2, 1, 5), (4, 1, 3), (2, 2, 4)])
def test_gradients_over_processes_equal_those_of_one_graph(pp, vpp, num_microbatches):
    config = ScheduleConfig(num_microbatches=num_microbatches, pp=pp, vpp=vpp)
    results = on_processes(ParallelConfig(world_size=pp, pp=pp), gradients_of_a_schedule, config)
    actual = torch.tensor([gradients for gradients, _ in results], dtype=torch.float64)
    EXACT.check(actual, torch.tensor(expected_gradients(config), dtype=torch.float64), "gradients by rank and chunk")


def outputs_of_a_schedule(context, config):
    stage = Product(config.stages, context.rank)
    with torch.no_grad():
        run_schedule(build_schedule(config)[context.rank], stage, connect(context), config.stages)
    return stage.objectives


def test_forward_only_runs_every_microbatch_in_order():
    config = ScheduleConfig(num_microbatches=3, pp=2, forward_only=True)
    results = on_threads(ParallelConfig(world_size=2, pp=2), lambda context: outputs_of_a_schedule(context, config))
    assert results == [[], [6.0 * 6 * (m + 1) for m in range(3)]]


def run_alone(*actions):
    stage = Product()
    run_schedule(actions, stage, Links(ParallelContext.single()), stage.stages)
    return stage.events


def test_after_backward_is_called_once_per_microbatch():
    events = run_alone(*(Action(kind, m) for m in range(2) for kind in ("forward", "backward")))
    assert events == ["F0.0", "grads", "B0.0", "F1.0", "grads", "B1.0"]


def test_deferred_weight_gradients_run_in_their_action():
    """Gradients left by autograd are moved after each backward, before those of the next one are added to them."""
    events = run_alone(
        Action("forward", 0), Action("backward_input", 0), Action("forward", 1), Action("backward_input", 1),
        Action("backward_weight", 0), Action("backward_weight", 1),
    )  # fmt: skip
    assert " ".join(events) == "F0.0 I0.0 grads F1.0 I1.0 grads W0.0 B0.0 W1.0 B1.0"


BROKEN = {
    r"without a backward.*\(1, 0\)": [Action("forward", 0), Action("backward", 0), Action("forward", 1)],
    r"not computed.*\(0, 0\)": [Action("forward", 0), Action("backward_input", 0)],
}


@pytest.mark.parametrize("message", BROKEN)
def test_incomplete_schedule_raises(message):
    with pytest.raises(AssertionError, match=message):
        run_alone(*BROKEN[message])


def two_ranks(change):
    """Runs 1F1B with three microbatches on two ranks, after `change(rank, entries)` has modified the schedule."""
    config = ScheduleConfig(num_microbatches=3, pp=2)

    def main(context):
        stage = Product(config.stages, context.rank)
        entries = change(context.rank, list(build_schedule(config)[context.rank]))
        run_schedule(entries, stage, connect(context), config.stages)

    on_threads(ParallelConfig(world_size=2, pp=2), main)


def test_messages_in_the_wrong_order_raise():
    def swap(rank, entries):
        numbers = (1, 0, 2) if rank else (0, 1, 2)
        return [Action(e.kind, numbers[e.microbatch], e.chunk, e.peer) for e in entries]

    with pytest.raises(AssertionError, match=r"activation of microbatch 0 .* came where .*microbatch 1"):
        two_ranks(swap)


def test_computation_before_its_receive_raises():
    def hurry(rank, entries):
        return [e for e in entries if e.kind != "receive_forward"] if rank else entries

    with pytest.raises(AssertionError, match=r"\(0, 0\) has not received its input"):
        two_ranks(hurry)


def test_lost_microbatch_raises():
    def lose(rank, entries):
        return [e for e in entries if rank or not (e.microbatch == 2 and e.kind in ("forward", "send_forward"))]

    with pytest.raises((AssertionError, KeyError)):
        two_ranks(lose)


def test_output_that_is_never_sent_raises():
    def drop(rank, entries):
        kinds = ("send_backward",) if rank else ("receive_backward", "backward")
        return [e for e in entries if not (e.microbatch == 2 and e.kind in kinds)]

    with pytest.raises(AssertionError, match="computed tensors that were not sent|without a backward"):
        two_ranks(drop)
