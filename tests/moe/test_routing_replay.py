"""Expert choices forced on routers and recorded from them, in every layout. Training steps run in fp64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_moe.build import build_model, build_train_loader, build_trainer, record_steps
from megatron_moe.config.memory import CudaGraphConfig
from megatron_moe.data.batch import ForcedRouting, MicroBatch
from megatron_moe.layout_check.oracle import oracle_plan
from megatron_moe.layout_check.record import record_run
from megatron_moe.layout_check.samples import random_datasets
from megatron_moe.layout_check.table import compare_runs
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.moe.routing_replay import RoutingRecorder, forced_routing, routed_layers
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.train_state import TrainState
from tests.helpers import tiny
from tests.helpers.eager_graphs import EagerRecorder
from tests.helpers.pipelines import run_steps
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT, FP64_LAYOUT
from tests.moe.routers import make_hidden, make_mb, make_router
from tests.parity.cells import NUM_STEPS, REFERENCE, num_steps_of, plan_of
from tests.parity.dimensions import cell_of

LAYOUTS = (
    "tp=2 sp=on recompute=full",
    "cp=2 dp=2 ep=4 dispatcher=alltoall",
    "tp=2 sp=on cp=2 recompute=moe",
    "cp=2 cpdegree=dynamic documents=packed accumulation=4",
    "pp=2 vpp=2 accumulation=2",
    "pp=2 dp=2 ep=2 dispatcher=flex mtp=on",
)


def choices(batch: MicroBatch, num_layers: int, num_experts: int, topk: int) -> Tensor:
    """Computes expert ids [B, S, L, K] from token, position and layer, so that they do not depend on the layout."""
    tokens_BS = (batch.whole or batch).tokens_BS
    positions_S = torch.arange(tokens_BS.shape[1])
    first_BSL = (tokens_BS + 3 * positions_S)[..., None] + torch.arange(num_layers) * 5
    return (first_BSL[..., None] + torch.arange(topk)) % num_experts


def record(plan, context, run_plan=None, masked=False):
    """Trains with expert ids of `choices` forced on the routers, for two of three positions if `masked`."""

    def prepare(trainer):
        num_layers = len(plan.model.layers)
        layers = routed_layers(trainer.model, num_layers)
        config = plan.model.layers[-1].feed_forward.router

        def before_step(batches, iteration):
            for index, batch in enumerate(batches):
                ids_BSLK, tokens = choices(batch, num_layers, config.num_experts, config.topk), batch.context.tokens
                given_BS = torch.arange(ids_BSLK.shape[1]).expand(ids_BSLK.shape[:2]) % 3 > 0 if masked else None
                given = forced_routing(
                    ids_BSLK, range(num_layers), tokens, trainer.context, own_layers=layers, given_BS=given_BS
                )
                batches[index] = replace(batch, context=replace(batch.context, forced_routing=given))

        return before_step

    datasets = random_datasets(plan, num_steps=num_steps_of(plan))
    return record_run(run_plan or plan, context, REFERENCE, datasets, num_steps=num_steps_of(plan), prepare=prepare)


@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "two of three tokens"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_given_choices_train_identically_in_every_layout(name, masked):
    plan = plan_of(cell_of(name))
    one = record(plan, ParallelContext.single(), oracle_plan(plan), masked)
    ranks = on_threads(plan.parallel, lambda context: record(plan, context, masked=masked))
    comparison = compare_runs(one, ranks, rtol=FP64_LAYOUT.rtol)
    assert comparison.all_equal, comparison.text()
    native = record_run(
        oracle_plan(plan), ParallelContext.single(), REFERENCE, random_datasets(plan, num_steps=1), num_steps=1
    )
    assert abs(native.losses[0] - one.losses[0]) > 1e-6, "choices that change nothing prove nothing"


def test_given_choices_are_those_that_experts_receive():
    plan = plan_of(cell_of("plain"))
    found = record(plan, ParallelContext.single())
    router = plan.model.layers[-1].feed_forward.router
    expected = torch.zeros(router.num_experts, dtype=torch.int64)
    loader = build_train_loader(plan, ParallelContext.single(), random_datasets(plan, num_steps=NUM_STEPS))
    last = len(plan.model.layers) - 1
    for _ in range(NUM_STEPS):
        for batch in loader.next_step():
            ids_BSLK = choices(batch, last + 1, router.num_experts, router.topk)
            valid_BS = batch.context.tokens.valid_BS
            routed = ids_BSLK[:, :, last] if valid_BS is None else ids_BSLK[:, :, last][valid_BS]
            expected += routed.flatten().bincount(minlength=router.num_experts)
    EXACT.check(found.tokens[last], expected, "tokens of every expert")


def recorded(plan, context):
    """Returns three sets of expert ids of this rank's first microbatch.

    The first was recorded from the native routing, the second while other ids were forced; the third are these ids.
    """
    trainer = build_trainer(plan, context, build_model(plan, context, REFERENCE), REFERENCE)
    loader = build_train_loader(plan, context, random_datasets(plan, num_steps=1))
    layers = routed_layers(trainer.model, len(plan.model.layers))
    recorder, batch = RoutingRecorder(layers, context), loader.next_step()[0]
    loader.close()

    def forward(given):
        mb = replace(batch.context, training=False, forced_routing=given)
        with torch.no_grad():
            trainer.model(replace(batch, context=recorder.attach(mb)))
        return recorder.gather_ids(batch.context.tokens)

    first = forward(None)
    other = torch.where(first < 0, first, (first + 1) % plan.model.layers[-1].feed_forward.router.num_experts)
    given = forced_routing(other, layers, batch.context.tokens, context, own_layers=layers)
    return first, forward(given), other


@pytest.mark.parametrize("name", ["tp=2 sp=on", "cp=4", "tp=2 sp=on cp=2"])
def test_recorded_choices_do_not_depend_on_the_layout(name):
    plan = plan_of(cell_of(name))
    expected, _, _ = recorded(oracle_plan(plan), ParallelContext.single())
    for first, second, given in on_threads(plan.parallel, lambda context: recorded(plan, context)):
        assert first.dtype == torch.int16
        EXACT.check(second, given, "recorded while given")
        EXACT.check(first, expected, "native choices")


def test_a_rollout_without_its_last_token_leaves_that_token_to_the_router():
    router, hidden = make_router(), make_hidden()
    batch_size, length = hidden.shape[1], hidden.shape[0]
    mb, context = make_mb(hidden), ParallelContext.single()
    native = router(hidden, mb).chosen_TK.view(length, batch_size, -1)
    ids_BSLK = ((native + 1) % router.config.num_experts).transpose(0, 1)[:, : length - 1, None]
    layers = [router.layer]
    given = forced_routing(ids_BSLK, layers, mb.tokens, context, own_layers=layers)
    found = router(hidden, replace(mb, forced_routing=given)).chosen_TK.view(length, batch_size, -1)
    EXACT.check(found[:-1], ids_BSLK[:, :, 0].transpose(0, 1), "given tokens")
    EXACT.check(found[-1], native[-1], "the token without a row")


def test_probabilities_follow_the_current_scores():
    router, hidden = make_router(), make_hidden()
    mb = make_mb(hidden)
    chosen = router(hidden, mb).chosen_TK
    with torch.no_grad():
        router.weight.mul_(0.5)
    routing = router(hidden, replace(mb, forced_routing=ForcedRouting(ids={router.layer: chosen})))
    EXACT.check(routing.probs_TK, router(hidden, mb, chosen).probs_TK, "probabilities")
    routing.probs_TK.square().sum().backward()
    assert router.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("shape", "layers", "mine", "message"),
    [
        ((2, 5, 2, 2), (0, 1, 2), (0,), "choices of 2 layers, but `layers` names 3"),
        ((2, 5, 2, 2), (0, 2), (0, 1), r"no expert choices for layers \[1\] of this rank"),
        ((2, 3, 1, 2), (0,), (0,), "2 sequences of 3 positions; the microbatch has 2 of 5"),
        ((2, 6, 1, 2), (0,), (0,), "2 sequences of 6 positions"),
        ((3, 5, 1, 2), (0,), (0,), "3 sequences of 5 positions"),
    ],
)
def test_choices_of_another_size_are_rejected(shape, layers, mine, message):
    tokens = make_mb(make_hidden()).tokens
    with pytest.raises(ValueError, match=message):
        forced_routing(torch.zeros(shape, dtype=torch.int16), layers, tokens, ParallelContext.single(), own_layers=mine)


def test_a_layer_that_recorded_nothing_is_named():
    with pytest.raises(ValueError, match=r"layers \[3\]"):
        RoutingRecorder((3,), ParallelContext.single()).gather_ids(make_mb(make_hidden()).tokens)


@pytest.mark.parametrize("whole", [False, True], ids=["modules", "whole step"])
def test_graphs_take_the_choices_of_every_step(whole):
    """Each step forces other expert ids, so a graph that replayed the ids of its capture would give other results."""
    graphs = CudaGraphConfig(cuda_graph_modules=("attn", "moe"), cuda_graph_warmup_steps=1)
    if whole:
        graphs = CudaGraphConfig(full_iteration=True, cuda_graph_warmup_steps=1)
    plan = tiny.plan(model=tiny.model())
    results = []
    for config in (plan.cuda_graphs, graphs):
        context = ParallelContext.single(dtype=torch.float64)
        trainer = build_trainer(plan, context, build_model(plan, context, REFERENCE), REFERENCE)
        record_steps(trainer, EagerRecorder(), config)
        router = trainer.routers[0].config
        prepare = trainer.prepare_microbatches

        def prepared(batches, iteration, prepare=prepare, router=router, trainer=trainer):
            layers, found = routed_layers(trainer.model, len(plan.model.layers)), []
            for batch in prepare(batches, iteration):
                ids_BSLK = (
                    choices(batch, len(layers), router.num_experts, router.topk) + iteration
                ) % router.num_experts
                given = forced_routing(ids_BSLK, layers, batch.context.tokens, trainer.context, own_layers=layers)
                found.append(replace(batch, context=replace(batch.context, forced_routing=given)))
            return found

        trainer.prepare_microbatches = prepared
        results.append(run_steps(replace(plan, cuda_graphs=config), trainer, TrainState(), 4))
    EXACT.check_all(results[1], results[0], "replayed")


def test_recording_leaves_metrics_of_the_context_alone():
    mb = make_mb(make_hidden(), metrics=MetricAccumulator())
    attached = RoutingRecorder((0,), ParallelContext.single()).attach(mb)
    assert attached.metrics is not mb.metrics and mb.metrics.trace_routing is None
