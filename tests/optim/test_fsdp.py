"""Gradients and weights sharded by unit (`--use-megatron-fsdp`): every strategy has the results of ZeRO-1."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.build import (
    build_data,
    build_model,
    build_train_loader,
    build_train_state_config,
    build_trainer,
    record_steps,
)
from megatron_moe.config.fsdp import FSDPConfig, unit_of
from megatron_moe.config.memory import CudaGraphConfig
from megatron_moe.config.optimizer import QKClipConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.memory.cuda_graphs.capture import CapturedGraph
from megatron_moe.optim import unit_shards, unit_store
from megatron_moe.optim.unit_shards import UnitBuffer, UnitReducer
from megatron_moe.optim.unit_store import GatheringStore
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.parallel.streams import Streams
from megatron_moe.train.evaluation import evaluate
from megatron_moe.train.train_state import TrainState
from tests.helpers.eager_graphs import EagerRecorder
from tests.helpers.pipelines import KERNELS
from tests.helpers.ranks import on_threads
from tests.helpers.thinned import nightly_only
from tests.helpers.tolerances import EXACT, FP64_LAYOUT
from tests.parity.cells import plan_of
from tests.parity.dimensions import cell_of

ZERO = "dp=2 zero=on overlap=grads balance=none shared=on"
CASES = {
    "plain": ZERO,
    "microbatches": f"{ZERO} accumulation=2",
    "expert parallel": f"{ZERO} ep=2 dispatcher=alltoall accumulation=2",
    "recomputed layers": f"{ZERO} recompute=full accumulation=2",
    "recomputed small modules": f"{ZERO} recompute=small attention=mla",
    "recomputed experts": f"{ZERO} ep=2 dispatcher=alltoall recompute=moe",
    "tied head and mtp": f"{ZERO} head=tied mtp=on",
    "overlapped microbatches": f"{ZERO} ep=2 dispatcher=alltoall overlap=experts accumulation=4",
    "pipeline": "dp=2 pp=2 zero=on overlap=grads balance=none accumulation=4",
}
ZERO_3, ZERO_2 = FSDPConfig(), FSDPConfig(shards_weights=False)
BUFFERS = FSDPConfig(fsdp_double_buffer=True)
CONFIGS = {"zero-3": ZERO_3, "double-buffer": BUFFERS, "zero-2": ZERO_2}
PAIRS = [
    (case, name) for case in CASES for name in CONFIGS if (case, name) != ("overlapped microbatches", "double-buffer")
]
IN_CI = (("expert parallel", "zero-2"), ("recomputed experts", "double-buffer"), ("tied head and mtp", "zero-3"))
"""(case, strategy) pairs that run in CI, where `tests/parity` combines every strategy with all other features."""


def plan(case: str) -> RunPlan:
    plan = plan_of(cell_of(CASES.get(case, ZERO)))
    if case == "captured modules":
        modules = ("attn", "moe_router", "mlp")
        plan = replace(plan, cuda_graphs=CudaGraphConfig(cuda_graph_modules=modules, cuda_graph_warmup_steps=1))
    return replace(plan, data_parallel=replace(plan.data_parallel, overlap_grad_reduce=True))


def sharded(plan: RunPlan, config: FSDPConfig, instances: int = 1) -> RunPlan:
    config = replace(config, num_passes=2 if plan.pipeline.overlap else 1)
    parallel = replace(plan.parallel, num_distributed_optimizer_instances=instances)
    return replace(plan, parallel=parallel, data_parallel=replace(plan.data_parallel, fsdp=config))


def train(plan: RunPlan, context: ParallelContext) -> tuple[dict[str, Tensor], list[tuple[str, str]]]:
    """Trains three steps, reads the weights and evaluates; returns figures, and the first step's trace of the store."""
    trainer = build_trainer(plan, context, build_model(plan, context, KERNELS), KERNELS)
    store, trace = trainer.optimizer.store, []
    if isinstance(store, GatheringStore):
        store.trace = trace
    record_steps(trainer, EagerRecorder(), plan.cuda_graphs)
    loader, state = build_train_loader(plan, context, build_data(plan, context)), TrainState()
    figures: dict[str, Tensor] = {}
    for step in range(3):
        batches = loader.next_step()
        outcome = trainer.step(batches, state)
        if isinstance(store, GatheringStore):
            store.trace = None
        state.advance(outcome.counts, build_train_state_config(plan))
        figures |= {f"loss {step}": outcome.loss} | {f"norm {step} {part}": n for part, n in outcome.norms.items()}
    with trainer.optimizer.unquantized_weights():
        figures |= {each.name: each.parameter.detach().clone() for each in trainer.buffers.main_grads}
    figures["evaluation"] = torch.tensor(evaluate(trainer.pipeline, [batches]))
    return figures, trace


@cache
def trained(run: RunPlan) -> list[dict[str, Tensor]]:
    """Figures of `train` on every rank. Several tests compare with the same run of ZeRO-1."""
    return on_threads(run.parallel, lambda context: train(run, context)[0])


def compare(run: RunPlan, config: FSDPConfig, instances: int = 1) -> list[list[tuple[str, str]]]:
    """Checks that training with sharded units equals ZeRO-1 without CUDA graphs, and returns the trace of the store on
    every rank."""
    expected = trained(replace(run, cuda_graphs=CudaGraphConfig()))
    run = sharded(run, config, instances)
    found = on_threads(run.parallel, lambda context: train(run, context))
    for rank, ((figures, _), others) in enumerate(zip(found, expected, strict=True)):
        FP64_LAYOUT.check_all(figures, others, f"rank {rank}")
    return [trace for _, trace in found]


@pytest.mark.parametrize(("case", "name"), nightly_only(PAIRS, [pair for pair in PAIRS if pair not in IN_CI]), ids=str)
def test_sharded_units_give_the_results_of_zero_1(case: str, name: str) -> None:
    compare(plan(case), CONFIGS[name])


@pytest.mark.parametrize(
    ("case", "config", "rule"),
    [
        ("microbatches", ZERO_3, "adam"),
        ("recomputed layers", BUFFERS, "adam"),
        pytest.param("tied head and mtp", ZERO_3, "muon", marks=pytest.mark.slow),
    ],
)
def test_copies_from_peers_replace_all_but_the_first_gather_after_an_update(
    case: str, config: FSDPConfig, rule: str
) -> None:
    base = plan(case)
    base = replace(base, optimizer=replace(base.optimizer, optimizer=rule))
    runs = [
        sharded(base, replace(config, gathers_from_peers=from_peers, reduces_through_peers=from_peers))
        for from_peers in (False, True)
    ]
    by_nccl, copied = (on_threads(each.parallel, lambda context, each=each: train(each, context)) for each in runs)
    for (expected, gathers), (figures, trace) in zip(by_nccl, copied, strict=True):
        EXACT.check_all(figures, expected, "losses, norms and weights")
        seen: set[str] = set()
        for (event, unit), (other, _) in zip(trace, gathers, strict=True):
            if other == "gather":
                assert event == ("copy" if unit in seen else "gather"), f"{event} of {unit}"
                seen.add(unit)
        assert any(event == "copy" for event, _ in trace)


@pytest.mark.parametrize("most", [2**29, 1024])
def test_every_gradient_is_reduced_by_copies(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Receive buffers of 1024 bytes are smaller than the shards, which then need several rounds."""
    monkeypatch.setattr(unit_shards, "MOST_RECEIVE_BYTES", most)
    monkeypatch.setattr(UnitReducer, "_reduce_by_collective", None)
    compare(plan("expert parallel"), replace(ZERO_2, reduces_through_peers=True))


def test_updates_of_units_overlap_with_the_next_forward() -> None:
    """With Muon, owners update the matrices of a unit during the forward of the units before it."""
    base = plan("microbatches")
    base = replace(base, optimizer=replace(base.optimizer, optimizer="muon"))
    run = sharded(base, ZERO_3)
    run = replace(run, optimizer=replace(run.optimizer, overlap_optimizer_step=True))
    for mine, theirs in zip(trained(run), trained(base), strict=True):
        FP64_LAYOUT.check_all(mine, theirs, "losses, norms and weights")


@pytest.mark.parametrize(
    ("layout", "config", "instances"),
    [
        (f"{ZERO} accumulation=2", BUFFERS, 1),
        (f"{ZERO} ep=2 dispatcher=flex accumulation=2", ZERO_2, 1),
        (f"{ZERO} attention=mla", replace(BUFFERS, outer_dp_sharding_strategy="optim"), 2),
        ("dp=2 pp=2 zero=on overlap=grads balance=none accumulation=4", BUFFERS, 1),
    ],
)
def test_graphs_of_whole_steps_gather_and_reduce(layout: str, config: FSDPConfig, instances: int) -> None:
    compare(captured(layout), replace(config, reduces_through_peers=True), instances)


def captured(layout: str) -> RunPlan:
    whole = CudaGraphConfig(full_iteration=True, cuda_graph_warmup_steps=1)
    return replace(plan_of(cell_of(layout)), cuda_graphs=whole)


class Side(threading.local):
    """Number of graph borders that the rank of the current thread has passed."""

    number = 0


SIDE = Side()


class StreamsOfOneSide(Streams):
    """Streams that reject a wait for an event from the other side of a graph's border, as CUDA does."""

    def record(self) -> Any:
        return SIDE.number

    def wait(self, event: Any) -> None:
        assert event in (None, SIDE.number), "the event was recorded on the other side of a graph's border"


class BorderRecorder(EagerRecorder):
    """Counts the begin and the end of every replay as borders."""

    def capture(self, work: Callable[..., Any], pool: Any, inputs: Sequence[Tensor] = ()) -> CapturedGraph:
        def inside(*values: Tensor) -> Any:
            SIDE.number += 1
            outputs = work(*values)
            SIDE.number += 1
            return outputs

        return super().capture(inside, pool, inputs)


@pytest.mark.parametrize("config", [BUFFERS, replace(BUFFERS, outer_dp_sharding_strategy="optim")], ids=["", "outer"])
def test_no_event_passes_the_border_of_a_graph(config: FSDPConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (unit_store, unit_shards):
        monkeypatch.setattr(module, "make_streams", lambda *_: StreamsOfOneSide())
    monkeypatch.setattr("tests.optim.test_fsdp.EagerRecorder", BorderRecorder)
    compare(
        captured(f"{ZERO} accumulation=2"), config, instances=2 if config.outer_dp_sharding_strategy == "optim" else 1
    )


def test_captured_modules_read_gathered_weights_from_double_buffers() -> None:
    compare(plan("captured modules"), BUFFERS)


def test_a_model_created_on_the_meta_device_equals_zero_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-1 creates its parameters on the device. While the buffers of a unit adopt its parameters, no other unit has
    all of its weights, and other parameters have no memory."""
    run, adopt, units = plan("microbatches"), UnitBuffer.adopt_parameters, set[str]()

    def checked(buffer: UnitBuffer, parameters: dict[str, Parameter], *args: Any) -> None:
        adopt(buffer, parameters, *args)
        held = {unit_of(name, each.meta.grid) for name, each in parameters.items() if _is_held(each)}
        assert held == {buffer.key.unit}, f"weights of {held} are in memory"
        units.update(held)

    def _is_held(parameter: Parameter) -> bool:
        return not parameter.is_meta and parameter.untyped_storage().size() > 0

    expected = trained(run)
    monkeypatch.setattr(UnitBuffer, "adopt_parameters", checked)
    run = sharded(replace(run, parallel=replace(run.parallel, init_model_with_meta_device=True)), ZERO_3)
    found = on_threads(run.parallel, lambda context: train(run, context)[0])
    for mine, theirs in zip(found, expected, strict=True):
        FP64_LAYOUT.check_all(mine, theirs, "losses, norms and weights")
    assert {"embedding", "head", "layers.0", "layers.3.experts"} <= units


@pytest.mark.slow
@pytest.mark.parametrize("config", [ZERO_3, ZERO_2, replace(ZERO_3, outer_dp_sharding_strategy="optim")])
def test_replicas_of_shards_give_the_results_of_zero_1(config: FSDPConfig) -> None:
    run = plan_of(cell_of("dp=4 zero=on overlap=grads balance=none shared=on accumulation=2 ep=2 dispatcher=alltoall"))
    compare(run, config, instances=2)


class LateGathers(Streams):
    """Streams that gather the parts of a shard only when later work of their stream, or a wait for them, follows."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []
        self._inside = False

    def on(self, name: str) -> AbstractContextManager[object]:
        self._run()
        return nullcontext()

    @contextmanager
    def fork(self, name: str) -> Iterator[None]:
        self._inside = True
        yield
        self._inside = False

    def record(self) -> Any:
        return self if self._inside else None

    def wait(self, event: Any) -> None:
        if event is self:
            self._run()

    def _run(self) -> None:
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task()


def test_weights_are_read_after_the_gathers_of_their_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank, gather = threading.local(), unit_store._gather_shard

    def new_streams(*_: object) -> LateGathers:
        of_rank.streams = LateGathers()
        return of_rank.streams

    monkeypatch.setattr("megatron_moe.optim.unit_store.make_streams", new_streams)
    monkeypatch.setattr(
        unit_store, "_gather_shard", lambda buffer: of_rank.streams.tasks.append(lambda: gather(buffer))
    )
    run = plan_of(cell_of("dp=2 zero=on overlap=grads balance=none shared=on"))
    compare(run, replace(ZERO_3, outer_dp_sharding_strategy="optim"), instances=2)


@pytest.mark.parametrize(
    ("layout", "config", "instances"),
    [
        ("dp=2 ep=2 dispatcher=alltoall", BUFFERS, 1),
        ("dp=4 accumulation=2", replace(ZERO_3, outer_dp_sharding_strategy="optim"), 2),
    ],
)
def test_a_non_finite_step_changes_no_bit_of_shards_and_state(layout: str, config: FSDPConfig, instances: int) -> None:
    """A step in which one rank's loss is NaN changes neither weights nor optimizer state on any rank."""
    run = sharded(plan_of(cell_of(f"{layout} zero=on overlap=grads")), config, instances)
    run = replace(run, optimizer=replace(run.optimizer, optimizer="muon"))

    def stored(context: ParallelContext) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
        """Returns weights and optimizer state before and after a bad step, and whether that step's loss is finite."""
        trainer = build_trainer(run, context, build_model(run, context, KERNELS), KERNELS)
        loader, found, loss = build_train_loader(run, context, build_data(run, context)), [], torch.zeros(())
        for step in range(2):
            if step == 1 and context.rank == 1:
                trainer.model.decoder.final_layernorm.register_forward_hook(lambda module, args, out: out * torch.nan)
            loss = trainer.step(loader.next_step(), TrainState(iteration=step)).loss
            state = {
                f"{each.kind} {each.name} {each.start}": each.data.clone() for each in trainer.optimizer.named_state()
            }
            with trainer.optimizer.unquantized_weights():
                weights = {each.name: each.parameter.detach().clone() for each in trainer.buffers.main_grads}
            found.append(state | weights)
        return found[0], found[1], bool(loss.isfinite())

    for before, after, is_finite in on_threads(run.parallel, stored):
        assert not is_finite and len(before) > 20
        EXACT.check_all(after, before, "weights and state after a bad step")


def test_weights_of_two_layers_are_gathered_in_the_order_of_their_use() -> None:
    (trace, _) = compare(plan("microbatches"), BUFFERS)
    layers = [(event, unit) for event, unit in trace if "." in unit]
    for kind in (False, True):
        units = list(dict.fromkeys(unit for _, unit in layers if unit.endswith(".experts") is kind))
        present: dict[int, str] = {}
        """Maps the index of each of the two buffers to the unit whose weights it contains."""
        for event, unit in layers:
            if unit.endswith(".experts") is kind and event == "gather":
                assert present.get(units.index(unit) % 2) != unit, f"{unit} was gathered twice"
                present[units.index(unit) % 2] = unit
            elif unit.endswith(".experts") is kind:
                assert present[units.index(unit) % 2] == unit, f"{unit} was used without its weights"
    first, second = layers.index(("use", "layers.0")), layers.index(("use", "layers.1"))
    assert ("gather", "layers.1") in layers[first:second], "the next layer is gathered during the use of a layer"
    assert ("gather", "layers.2") not in layers[:second], "a third layer is gathered"
    last = layers.index(("use", "layers.3"))
    assert ("gather", "layers.1") in layers[last:], "backward gathers the weights again"


@pytest.mark.parametrize(
    ("case", "name"), [("microbatches", "zero-3"), ("microbatches", "zero-2"), ("expert parallel", "zero-3")]
)
def test_gradients_of_a_unit_are_reduced_after_its_backward_in_every_microbatch(
    case: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units are reduced in backward order; experts that exist on one rank have no collective."""
    run, events = sharded(plan(case), CONFIGS[name]), defaultdict[int, list[tuple[str, str]]](list)
    reduce, begin_grads = UnitReducer._reduce_by_collective, GatheringStore._begin_grads

    def reduced(reducer: UnitReducer, buffers: Sequence[UnitBuffer]) -> None:
        events[threading.get_ident()].append(("reduce", buffers[0].key.unit))
        assert buffers[0].group.size > 1
        reduce(reducer, buffers)

    def began(store: GatheringStore, unit: Any) -> None:
        events[threading.get_ident()].append(("backward", unit.name))
        begin_grads(store, unit)

    def one_step(context: ParallelContext) -> list[tuple[str, str]]:
        trainer = build_trainer(run, context, build_model(run, context, KERNELS), KERNELS)
        loader = build_train_loader(run, context, build_data(run, context))
        trainer.step(loader.next_step(), TrainState())
        return events[threading.get_ident()]

    monkeypatch.setattr(UnitReducer, "_reduce_by_collective", reduced)
    monkeypatch.setattr(GatheringStore, "_begin_grads", began)
    experts_are_sharded = run.parallel.edp > 1
    for trace in on_threads(run.parallel, one_step):
        units = list(dict.fromkeys(unit for event, unit in trace if event == "reduce"))
        assert any(unit.endswith(".experts") for unit in units) is experts_are_sharded
        assert Counter(unit for event, unit in trace if event == "reduce") == dict.fromkeys(units, run.num_microbatches)
        reductions = [unit for event, unit in trace if event == "reduce"]
        assert reductions == units * run.num_microbatches, "the order of the reductions differs between microbatches"
        layers = [int(unit.split(".")[1]) for unit in units if unit.startswith("layers.") and "experts" not in unit]
        assert layers == sorted(layers, reverse=True) and len(layers) > 2
        assert units[-1] == "embedding" and units.index("head") < units.index(f"layers.{layers[0]}")
        for unit in units:
            own = [event for event, _ in groupby(event for event, other in trace if other == unit)]
            assert own == ["backward", "reduce"] * run.num_microbatches, f"{unit}: {own}"


def test_weights_of_two_layers_per_grid_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, record = list[Counter[str]](), GatheringStore._record

    def counted(store: GatheringStore, event: str, unit: Any) -> None:
        record(store, event, unit)
        layers = [each for each in store._order if each.is_layer and each.memory is not None]
        seen.append(Counter(each.grid for each in layers if each.memory._bytes.untyped_storage().size()))

    monkeypatch.setattr(GatheringStore, "_record", counted)
    compare(plan("microbatches"), ZERO_3)
    assert {grid: max(each[grid] for each in seen) for grid in ("attention", "expert")} == {"attention": 2, "expert": 2}


@pytest.mark.parametrize(
    ("rule", "layout", "config", "instances"),
    [
        ("muon", CASES["expert parallel"], ZERO_3, 1),
        ("lion", CASES["expert parallel"], ZERO_3, 1),
        pytest.param("adam", f"{ZERO} accumulation=2", BUFFERS, 1, marks=pytest.mark.slow),
        pytest.param(
            "muon",
            "dp=4 zero=on overlap=grads balance=none attention=mla accumulation=2",
            replace(ZERO_3, outer_dp_sharding_strategy="optim"),
            2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_update_rules_and_clipped_logits_equal_zero_1(
    rule: str, layout: str, config: FSDPConfig, instances: int
) -> None:
    """Each update rule equals ZeRO-1 with `--qk-clip`, which scales rows of weights that shards may cut."""
    base = plan_of(cell_of(layout))
    optimizer = replace(base.optimizer, optimizer=rule, qk_clip=QKClipConfig(qk_clip_threshold=0.02))
    compare(replace(base, optimizer=optimizer), config, instances)
