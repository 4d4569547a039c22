"""FSDP with NCCL: gathers and reductions run on separate streams without host-device synchronisation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.optim import unit_shards
from megatron_moe.optim.unit_shards import UnitReducer
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.checkpoint_files import stored_tensors
from tests.helpers.contexts import context_of_rank
from tests.helpers.ranks import on_gpus, on_threads
from tests.helpers.tolerances import EXACT, FP64_LAYOUT
from tests.optim.test_fsdp import BUFFERS, ZERO_2, ZERO_3, plan, sharded, train
from tests.train.test_resharding import resume_on_rank, save_on_rank, with_muon

pytestmark = pytest.mark.gpu2

LIMIT_S = 120.0
CASES = ("plain", "microbatches", "expert parallel", "recomputed layers", "tied head and mtp", "muon")

COPIES = replace(BUFFERS, gathers_from_peers=True)
REDUCED = replace(BUFFERS, reduces_through_peers=True)
CONFIGS = {
    "zero-1": None,
    "zero-3": ZERO_3,
    "double-buffer": BUFFERS,
    "copies": COPIES,
    "reduced by copies": REDUCED,
    "all by copies": replace(ZERO_3, gathers_from_peers=True, reduces_through_peers=True),
    "zero-2": ZERO_2,
    "zero-2, reduced by copies": replace(ZERO_2, reduces_through_peers=True),
}


def plan_for(case: str) -> RunPlan:
    return with_muon(plan("microbatches")) if case == "muon" else plan(case)


def context_for(run: RunPlan, context: ParallelContext) -> ParallelContext:
    """Context of a plan on the two ranks of `context`."""
    parallel = replace(run.parallel, world_size=2)
    return context_of_rank(parallel, context.rank, device=context.device, handles=context.handles)


def every_config(context: ParallelContext, case: str) -> dict[str, tuple[dict[str, torch.Tensor], Any]]:
    """Trains with each sharding strategy; returns its results and its trace."""
    run, found = plan_for(case), {}
    for name, config in CONFIGS.items():
        wanted = run if config is None else sharded(run, config)
        figures, trace = train(wanted, context_for(wanted, context))
        found[name] = {key: value.cpu() for key, value in figures.items()}, trace
    return found


@pytest.mark.parametrize("case", CASES)
def test_sharded_units_give_the_results_of_zero_1_under_nccl(case: str) -> None:
    for rank, found in enumerate(on_gpus(ParallelConfig(world_size=2), every_config, case, timeout=LIMIT_S)):
        for name, (figures, trace) in found.items():
            FP64_LAYOUT.check_all(figures, found["zero-1"][0], f"rank {rank}, {case}, {name}")
            assert bool(trace) == (name != "zero-1")
            assert any(event == "copy" for event, _ in trace) == (name in ("copies", "all by copies"))


def in_several_rounds(context: ParallelContext) -> list[dict[str, torch.Tensor]]:
    """Trains with NCCL and with receive buffers that are smaller than any shard; returns the results of both."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_shards, "MOST_RECEIVE_BYTES", 1024)
        for config in (BUFFERS, REDUCED):
            wanted = sharded(plan("microbatches"), config)
            figures, _ = train(wanted, context_for(wanted, context))
            found.append({key: value.cpu() for key, value in figures.items()})
    return found


def test_reductions_by_copies_in_several_rounds_equal_those_by_nccl() -> None:
    for by_nccl, by_copies in on_gpus(ParallelConfig(world_size=2), in_several_rounds, timeout=LIMIT_S):
        FP64_LAYOUT.check_all(by_copies, by_nccl, "losses, norms and weights")


def in_order(context: ParallelContext, rule: str, name: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Trains with NCCL; returns the gathers and uses of the first step, and the units in the order of reductions."""
    base, reductions, reduce = plan("microbatches"), list[str](), UnitReducer._reduce_by_collective
    run = sharded(replace(base, optimizer=replace(base.optimizer, optimizer=rule)), CONFIGS[name])

    def reduced(reducer: UnitReducer, buffers: Any) -> None:
        reductions.append(buffers[0].key.unit)
        reduce(reducer, buffers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitReducer, "_reduce_by_collective", reduced)
        _, trace = train(run, context_for(run, context))
    return trace, reductions


@pytest.mark.parametrize("name", ["zero-3", "double-buffer"])
@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_collectives_have_the_order_of_cpu_ranks(rule: str, name: str) -> None:
    """Gathers and uses are those of CPU ranks, and both GPUs reduce units in backward order in every microbatch."""
    run = plan("microbatches")
    changed = sharded(replace(run, optimizer=replace(run.optimizer, optimizer=rule)), CONFIGS[name])
    expected = [trace for _, trace in on_threads(changed.parallel, lambda context: train(changed, context))]
    found = on_gpus(ParallelConfig(world_size=2), in_order, rule, name, timeout=LIMIT_S)
    assert [trace for trace, _ in found] == expected
    first, second = (reductions for _, reductions in found)
    units = list(dict.fromkeys(first))
    assert first == second == units * (len(first) // len(units)) and len(first) == 3 * run.num_microbatches * len(units)


def moved_between_strategies(context: ParallelContext, folder: Path) -> None:
    """Saves a run of Muon with ZeRO-1, and resumes it with ZeRO-3, ZeRO-2 and ZeRO-1."""
    first = plan_for("muon")
    for number, config in enumerate((None, ZERO_3, ZERO_2, None)):
        run = first if config is None else sharded(first, config)
        here = context_for(run, context)
        if number == 0:
            save_on_rank(here, run, folder / "0")
        else:
            resume_on_rank(here, run, folder / f"{number - 1}", folder / f"{number}")


def test_a_run_of_muon_resumes_under_another_strategy(tmp_path: Path) -> None:
    on_gpus(ParallelConfig(world_size=2), moved_between_strategies, tmp_path, timeout=LIMIT_S)
    saved, straight = (stored_tensors(tmp_path / "0" / f"iter_000000{step}") for step in (1, 2))
    assert any(key.startswith("momentum.") for key in saved)
    for number in (1, 2, 3):
        EXACT.check_all(stored_tensors(tmp_path / f"{number}" / "iter_0000001"), saved, "loaded and saved again")
        FP64_LAYOUT.check_all(stored_tensors(tmp_path / f"{number}" / "iter_0000002"), straight, "one step further")
