"""Layouts with clones of busy experts have the results of one rank without clones."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from threading import get_ident
from typing import Any

import pytest

from megatron_moe.config.echo import EchoConfig
from megatron_moe.config.model import with_experts
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.moe.expert_clones import CloneSizes, ExpertClones
from megatron_moe.optim.grad_reduce import GradReducer
from megatron_moe.parallel.exchange import AllToAll
from tests.parity.cells import compare_plan, plan_of
from tests.parity.dimensions import cell_of

OVERLAP, AGAIN = {"moe_echo_expert_dispatch_overlap": True}, {"moe_echo_recompute_expert_dispatch": True}
CELLS = {
    "ep=4 dp=4 accumulation=2 zero=on overlap=params recompute=moe": (8, OVERLAP | AGAIN),
    "ep=2 dp=2 pp=2 vpp=2 balance=aux accumulation=2 mtp=on recompute=small latent=on shared=on": (2, AGAIN),
    "ep=2 etp=2 tp=2 sp=on dp=2 capacity=drop accumulation=2 shared=overlap wgrad=delayed experts=sequential": (2, {}),
    "ep=2 dp=2 accumulation=2 graphs=router": (2, OVERLAP),
}
"""Number of clones per rank and their options, by cell of the parity matrix."""
SLOW_CELLS = {
    "ep=2 dp=4 accumulation=2 zero=params recompute=full": (4, OVERLAP),
    "ep=2 dp=2 pp=2 vpp=2 accumulation=2 overlap=experts": (2, OVERLAP),
}


def plan_with_clones(cell: str, num_clones: int, options: dict[str, bool]) -> RunPlan:
    """Builds the plan of a cell with clones of experts, unequal load and the NCCL all-to-all."""
    plan = plan_of(cell_of(f"{cell} dispatcher=alltoall"))

    def changed(moe: MoEConfig) -> MoEConfig:
        echo = EchoConfig(moe_num_echo_experts=num_clones, **options)
        return replace(moe, echo=echo, router=replace(moe.router, force_biased=-2.0))

    return replace(plan, model=with_experts(plan.model, changed))


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[CloneSizes]:
    """Collects the clone sizes of every dispatch."""
    found: list[CloneSizes] = []
    start = ExpertClones.__init__

    def record(self: ExpertClones, weights: Any, ep: Any, sizes: CloneSizes, **options: bool) -> None:
        found.append(sizes)
        start(self, weights, ep, sizes, **options)

    monkeypatch.setattr(ExpertClones, "__init__", record)
    return found


@pytest.mark.parametrize("cell", [*CELLS, *(pytest.param(cell, marks=pytest.mark.slow) for cell in SLOW_CELLS)])
def test_clones_of_busy_experts_equal_one_rank(cell: str, sizes: list[CloneSizes]) -> None:
    comparison = compare_plan(plan_with_clones(cell, *(CELLS | SLOW_CELLS)[cell]))
    assert comparison.all_equal, comparison.text()
    kinds = {(each.num_rows > 0, each.on_any_rank) for each in sizes}
    assert kinds >= {(True, True), (False, True)}, "some ranks have clones, and others take part in their exchange"


def test_load_within_the_tolerance_needs_no_clones(sizes: list[CloneSizes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without clones nothing is exchanged, but every rank still counts the gradients that a clone would add.

    Otherwise, overlapped reductions would wait for these gradients until the end of the step.
    """
    early: list[bool] = []
    finish = GradReducer.finish

    def record(self: GradReducer) -> None:
        early.append(self.num_started == len(self.buckets))
        finish(self)

    monkeypatch.setattr(GradReducer, "finish", record)
    monkeypatch.setattr("megatron_moe.moe.token_dispatcher.echo.TOLERANCE_PERCENT", 100)
    plan = plan_with_clones("ep=2 dp=4 accumulation=2 zero=on overlap=grads", 2, OVERLAP)
    comparison = compare_plan(plan)
    assert comparison.all_equal, comparison.text()
    assert sizes and not any(each.on_any_rank for each in sizes)
    assert all(early) and early


def test_an_overlapped_schedule_receives_gradients_of_clones_with_those_of_the_dispatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradients of a dispatch's rows are sent between those of its clones are sent and received."""
    events: dict[int, list[Any]] = defaultdict(list)

    def recorded(owner: type, name: str, event: Callable[..., Any]) -> None:
        function = getattr(owner, name)

        def record(self: Any, *arguments: Any) -> Any:
            result = function(self, *arguments)
            events[get_ident()].append(event(self, *arguments))
            return result

        monkeypatch.setattr(owner, name, record)

    recorded(AllToAll, "launch", lambda exchange, rows: "launch")
    recorded(ExpertClones, "send_grad", lambda clones, stack_index, grad: (clones, "sent", stack_index))
    recorded(ExpertClones, "receive_grads", lambda clones: (clones, "received"))
    assert compare_plan(plan_with_clones("ep=2 dp=2 accumulation=4 overlap=experts", 2, {})).all_equal
    num_received = 0
    for of_rank in events.values():
        for index, event in enumerate(of_rank):
            if event[1:] == ("received",) and event[0].sizes.on_any_rank:
                num_received += 1
                assert "launch" in of_rank[of_rank.index((event[0], "sent", 0)) : index]
    assert num_received
