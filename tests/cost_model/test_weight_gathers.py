"""Predicted gathers of sharded weights against those of training steps."""

from collections import Counter
from dataclasses import replace

import pytest

from megatron_moe.build import build_data, build_model, build_train_loader, build_trainer
from megatron_moe.config.fsdp import FSDPConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model import weight_gathers
from megatron_moe.cost_model.hardware import GPUS
from megatron_moe.cost_model.placement import Placements
from megatron_moe.cost_model.traffic import Communication
from megatron_moe.cost_model.weight_gathers import unit_gathers
from megatron_moe.optim.unit_store import GatheringStore
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.train_state import TrainState
from tests.helpers.pipelines import KERNELS
from tests.helpers.ranks import on_threads
from tests.helpers.thinned import nightly_only
from tests.helpers.tolerances import EXACT
from tests.optim.test_fsdp import BUFFERS, ZERO_3, sharded
from tests.parity.cells import plan_of
from tests.parity.dimensions import cell_of

CASES = {
    "1 microbatch": ("dp=2", 5, 1),
    "2 microbatches": ("dp=2", 6, 2),
    "4 microbatches": ("dp=2", 6, 4),
    "1 layer": ("dp=2", 1, 4),
    "mtp": ("dp=2 mtp=on head=tied", 5, 4),
    "recompute": ("dp=2 recompute=full", 6, 2),
    "pipeline": ("dp=2 pp=2", 8, 4),
    "virtual stages": ("dp=2 pp=2 vpp=2", 12, 4),
    "virtual stages of two layers, recompute": ("dp=2 pp=2 vpp=2 recompute=full", 8, 4),
    "overlap": ("dp=2 ep=2 dispatcher=alltoall overlap=experts", 7, 4),
    "overlap, sharded experts": ("dp=4 ep=2 dispatcher=alltoall overlap=experts", 7, 2),
}
"""Name -> features of a parity cell, number of layers, microbatches. The first layer has no experts."""
CONFIGS = {"zero-3": ZERO_3, "double-buffer": BUFFERS}
PAIRS = [(case, name) for case in CASES for name in CONFIGS if name == "zero-3" or "overlap" not in case]
IN_CI = (
    ("2 microbatches", "zero-3"),
    ("mtp", "double-buffer"),
    ("recompute", "zero-3"),
    ("virtual stages", "zero-3"),
    ("virtual stages", "double-buffer"),
    ("overlap", "zero-3"),
)


def plan(case: str, config: FSDPConfig, *, recomputed: int = 1) -> RunPlan:
    """`recomputed`: number of layers that are recomputed together."""
    features, num_layers, accumulation = CASES[case]
    base = plan_of(cell_of(f"{features} zero=on balance=none accumulation={accumulation}"))
    dense, moe, *_ = base.model.layers
    base = replace(base, model=replace(base.model, layers=(dense, *[moe] * (num_layers - 1))))
    base = replace(base, data_parallel=replace(base.data_parallel, overlap_grad_reduce=True))
    if base.memory.recompute.recompute_method:
        recompute = replace(base.memory.recompute, recompute_num_layers=recomputed)
        base = replace(base, memory=replace(base.memory, recompute=recompute))
    return sharded(base, config)


def gathers(run: RunPlan) -> list[tuple[Counter[str], dict[str, int]]]:
    """Trains one step. Returns the number of gathers of each unit on every rank, and the number of its elements."""

    def one_step(context: ParallelContext) -> tuple[Counter[str], dict[str, int]]:
        trainer = build_trainer(run, context, build_model(run, context, KERNELS), KERNELS)
        store, sizes = trainer.optimizer.store, Counter[str]()
        assert isinstance(store, GatheringStore)
        store.trace = []
        trainer.step(build_train_loader(run, context, build_data(run, context)).next_step(), TrainState())
        for buffer in trainer.buffers.buffers:
            sizes[buffer.key.unit] += sum(param.end - param.start for param in buffer.layout.params)
        return Counter(unit for event, unit in store.trace if event != "use"), sizes

    return on_threads(run.parallel, one_step)


def check(run: RunPlan) -> None:
    """Compares gathers and bytes of every rank with the prediction for its pipeline rank."""
    found = gathers(run)
    per_stage = len(found) // run.parallel.pp
    for rank, (counted, sizes) in enumerate(found):
        stage = rank // per_stage
        predicted = {"attention": unit_gathers(run, stage, "attention"), "expert": {}}
        if run.parallel.edp > 1:
            predicted["expert"] = unit_gathers(run, stage, "expert")
        times = {unit: each.times for of_grid in predicted.values() for unit, each in of_grid.items()}
        assert counted == times, f"rank {rank}"
        traffic = Communication(run, Placements(GPUS["h100"]).placements_of_groups(run.parallel)).of_rank(stage)
        sent = {each.group: each.bytes for each in traffic if each.what.startswith("weights")}
        for group, size, grid in (("dp_cp", run.parallel.dp, "attention"), ("edp", run.parallel.edp, "expert")):
            elements = sum(sizes[unit] * count for unit, count in counted.items() if unit in predicted[grid])
            EXACT.check(sent.get(group, 0.0), elements * 8 * (size - 1) / size, f"rank {rank}, {group}")


@pytest.mark.parametrize(("case", "name"), nightly_only(PAIRS, [pair for pair in PAIRS if pair not in IN_CI]), ids=str)
def test_weights_are_gathered_as_predicted(case: str, name: str) -> None:
    check(plan(case, CONFIGS[name]))


@pytest.mark.parametrize(
    ("case", "number"),
    nightly_only(
        [("recompute", 2), ("virtual stages of two layers, recompute", 2), ("recompute", 3)], [("recompute", 3)]
    ),
)
def test_layers_that_are_recomputed_together_are_gathered_as_predicted(case: str, number: int) -> None:
    run = plan(case, ZERO_3, recomputed=number)
    assert run.memory.recompute.recompute_num_layers == number
    check(run)


@pytest.mark.parametrize("number", [1, 2, 4, 32])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_last_two_layers_are_not_gathered_again(config: FSDPConfig, number: int) -> None:
    """Without pipeline parallelism, M microbatches and L layers need 2 M (L - 2) + 2 gathers."""
    run = plan("4 microbatches", config)
    run = replace(run, batch=replace(run.batch, global_batch_size=2 * number * run.batch.micro_batch_size))
    assert run.num_microbatches == number
    times = [each.times for unit, each in unit_gathers(run, 0, "attention").items() if "." in unit]
    assert len(times) == 6 and sum(times) == 2 * number * (6 - 2) + 2


@pytest.mark.parametrize("case", ["pipeline", "virtual stages", "overlap"])
def test_further_groups_of_microbatches_add_the_same_gathers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = plan(case, ZERO_3)
    run = replace(run, batch=replace(run.batch, global_batch_size=run.batch.global_batch_size * 8))
    found = [unit_gathers(run, rank, "attention") for rank in range(run.parallel.pp)]
    monkeypatch.setattr(weight_gathers, "NUM_GROUPS", run.num_microbatches)
    assert found == [unit_gathers(run, rank, "attention") for rank in range(run.parallel.pp)]
