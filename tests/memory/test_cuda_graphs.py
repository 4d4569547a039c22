"""CUDA graphs of layers and full iterations: replays equal eager steps bit for bit and use fixed addresses."""

import gc
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from threading import local

import pytest
import torch
import torch.distributed as dist

from megatron_moe.build import build_data, build_model, build_train_loader, build_trainer, record_steps
from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.memory import CudaGraphConfig, MemoryConfig, RecomputeConfig
from megatron_moe.config.model import MTPConfig
from megatron_moe.config.moe import SharedExpertsConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.training import BatchConfig
from megatron_moe.cost_model.graph_memory import num_graphs
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.logs.timers import Timers
from megatron_moe.memory.cuda_graphs.capture import CaptureReport, check_capturable, garbage_collection_disabled
from megatron_moe.memory.output_discard import DiscardedOutput
from megatron_moe.optim import param_store
from megatron_moe.optim.param_store import ParamStore
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.pytree import flatten, unflatten
from megatron_moe.pipeline.actions import Action, actions_of
from megatron_moe.pipeline.schedule import build_schedule
from megatron_moe.train.train_state import TrainState
from tests.helpers import tiny, tiny_models
from tests.helpers.eager_graphs import EagerRecorder
from tests.helpers.pipelines import laid_out, run_steps, together
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT
from tests.optim.test_gather_in_forward import gather_when_waited_for

KERNELS = reference.bundle()
WHOLE = CudaGraphConfig(full_iteration=True, cuda_graph_warmup_steps=1)
ROUTER = {"score_function": "sigmoid", "expert_bias": True, "balancing": ("seq_aux_loss",), "aux_loss_coeffs": (0.02,)}


def parts_of(*modules: str) -> CudaGraphConfig:
    return CudaGraphConfig(cuda_graph_modules=modules, cuda_graph_warmup_steps=1)


ALL = parts_of("attn", "mlp", "moe_router", "moe_preprocess")
SPECS = {
    "attn": parts_of("attn"),
    "moe_router": parts_of("moe_router"),
    "attn+mlp+moe": parts_of("attn", "mlp", "moe"),
    "all": ALL,
    "whole step": WHOLE,
}


def the_plan(**changes):
    """Plan with two microbatches per step: the first one writes weight gradients, the second one accumulates."""
    model = changes.pop("model", None) or tiny.model(moe_config=tiny.moe(tiny.router(**ROUTER, z_loss_coeff=0.1)))
    return tiny.plan(model=model, batch=BatchConfig(micro_batch_size=2, global_batch_size=4), **changes)


def make_trainer(plan, context=None, recorder=None):
    context = context or ParallelContext.single(dtype=torch.float64)
    trainer = build_trainer(plan, context, build_model(plan, context, KERNELS), KERNELS)
    record_steps(trainer, recorder or EagerRecorder(), plan.cuda_graphs, plan.memory.moe_expert_wgrad_interval)
    return trainer


def results(plan, steps=3):
    return run_steps(plan, make_trainer(plan), TrainState(), steps)


@pytest.fixture(scope="module")
def eager():
    return results(the_plan())


@pytest.mark.parametrize("config", SPECS.values(), ids=SPECS)
def test_replayed_steps_equal_eager_steps_bit_for_bit(eager, config):
    plan = the_plan(cuda_graphs=config)
    trainer = make_trainer(plan)
    found = run_steps(plan, trainer, TrainState(), 3)
    assert (trainer.full_iteration or trainer.pipeline.graph_instances).summary()
    EXACT.check_all(found, eager, str(config))


@pytest.mark.parametrize("config", [ALL, WHOLE], ids=["modules", "whole step"])
def test_replayed_modules_are_timed_as_one_entry(config):
    """Timers have no entries for nodes inside a graph, because replays do not record the events of the capture."""
    plan = the_plan(cuda_graphs=config)
    trainer = make_trainer(plan)
    timers = trainer.timers = Timers(2, trainer.context.device)
    taken = []
    for step in range(3):
        run_steps(plan, trainer, TrainState(iteration=step), 1)
        taken.append(timers.gather_seconds(trainer.context))
    modules = ("attn", "mlp", "moe-router", "moe-preprocess")
    parts = {f"{module}-graph-{way}" for module in modules for way in ("forward", "backward")}
    inside = {"attention-forward", "attention-backward", "router-forward", "dispatch-backward"}
    assert inside <= set(taken[0])
    for found in taken[1:]:
        assert not inside & set(found), found
        assert min(found["forward-backward"]) > 0
        if config is ALL:
            assert parts <= set(found) and all(found[part][0] > 0 for part in parts - {"mlp-graph-backward"}), found
        else:
            assert set(found) == {"forward-backward", "all-grads-sync", "optimizer"}


MODELS = {
    "latent attention, latent experts, softmax": tiny.model(
        layers=(
            tiny_models.layer_config(tiny_models.mla_config()),
            tiny_models.layer_config(feed_forward=replace(tiny_models.moe_config(), shared=None)),
        )
    ),
    "forced balance": tiny.model(num_layers=2, moe_config=tiny.moe(tiny.router(force_balancing=True))),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_replays_of_other_models_equal_eager_steps(model):
    expected = results(the_plan(model=model), steps=2)
    for config in (parts_of("attn", "mlp", "moe"), WHOLE):
        EXACT.check_all(results(the_plan(model=model, cuda_graphs=config), steps=2), expected, str(config))


@pytest.mark.parametrize("config", [parts_of("attn"), WHOLE], ids=["modules", "whole step"])
@pytest.mark.parametrize("cp", [1, 2])
def test_document_lengths_do_not_change_the_graphs(config, cp):
    """Replays are correct although the length of the longest document varies over microbatches."""
    data = replace(tiny.plan().data, reset_attention_mask=True, reset_position_ids=True)
    parallel = ParallelConfig(world_size=cp, cp=cp)
    plan = the_plan(data=data, parallel=parallel, model=tiny.model(), cuda_graphs=config)

    def with_longest(batch, length):
        tokens = replace(batch.context.tokens, max_seqlen=length)
        whole = batch.whole and with_longest(batch.whole, length)
        return replace(batch, context=replace(batch.context, tokens=tokens), whole=whole)

    def train(context):
        trainer = make_trainer(plan, context)
        loader = build_train_loader(plan, context, build_data(plan, context))
        found = []
        for step in range(4):
            batches = [with_longest(batch, 2 * step + index) for index, batch in enumerate(loader.next_step())]
            trainer.step(batches, TrainState())
            graphs = trainer.full_iteration or trainer.pipeline.graph_instances
            found.append((graphs.summary() or "").split(";")[0])
        return found[-3:]

    for found in on_threads(parallel, train):
        assert found[0] and len(set(found)) == 1, found


def test_experts_are_run_eagerly_alongside_captured_attention(eager):
    """Selective recompute applies to the eager modules of partly captured layers."""
    recomputed = MemoryConfig(recompute=RecomputeConfig(recompute_modules=("moe",)))
    plan = the_plan(cuda_graphs=parts_of("attn"), memory=recomputed)
    trainer, runs = make_trainer(plan), []
    trainer.model.decoder.layers["1"].mlp.experts.register_forward_hook(lambda *_: runs.append(1))
    EXACT.check_all(run_steps(plan, trainer, TrainState(), 3), eager, "experts again")
    assert len(runs) == 3 * 2 * 2, "steps, microbatches, forwards"


EP2 = ParallelConfig(world_size=2, ep=2)


@pytest.mark.parametrize("overlap", [False, True], ids=["shared after", "shared overlapped"])
@pytest.mark.parametrize("config", [parts_of("attn", "mlp", "moe"), WHOLE], ids=["modules", "whole step"])
def test_graphs_contain_the_flex_exchange_without_collectives(config, overlap, monkeypatch):
    """Captures whole MoE layers on two ranks with two row bounds, one of which no routing can exceed."""
    shared = SharedExpertsConfig(mlp=tiny_models.mlp_config(ffn_hidden_size=16))
    for factor in (None, 1.9):
        moe = tiny.moe(
            tiny.router(**ROUTER), dispatcher="flex", shared=shared, shared_overlap=overlap,
            expert_rank_capacity_factor=factor,
        )  # fmt: skip
        plan = the_plan(model=tiny.model(moe_config=moe), parallel=EP2)
        plan = replace(plan, batch=replace(plan.batch, global_batch_size=8))
        expected = on_threads(EP2, lambda c, plan=plan: run_steps(plan, make_trainer(plan, c), TrainState(), 4))
        captured, recorder = replace(plan, cuda_graphs=config), StrictRecorder(monkeypatch)
        graphs = []

        def train(context, plan=captured, recorder=recorder, graphs=graphs):
            trainer = make_trainer(plan, context, recorder)
            found = run_steps(plan, trainer, TrainState(), 4)
            graphs.append((trainer.full_iteration or trainer.pipeline.graph_instances).summary())
            return found

        for found, reference_run in zip(on_threads(EP2, train), expected, strict=True):
            EXACT.check_all(found, reference_run, f"{config}, factor {factor}")
        assert len(graphs) == 2 and all(graphs)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("config", [parts_of("moe"), WHOLE], ids=["modules", "whole step"])
def test_collective_exchanges_cannot_be_captured(dispatcher, config):
    plan = the_plan(model=tiny.model(moe_config=tiny.moe(dispatcher=dispatcher)), parallel=EP2, cuda_graphs=config)

    def rejected(context):
        with pytest.raises(EnvironmentProblem, match="token exchange of the transport (nccl|allgather)"):
            make_trainer(plan, context)

    on_threads(EP2, rejected)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_graphs_contain_no_exchange_between_ranks(dispatcher):
    """Collectives and the host reads of their sizes run between graphs."""
    model = tiny.model(num_layers=2, moe_config=tiny.moe(dispatcher=dispatcher))
    config = EP2

    def train(context, plan):
        trainer = make_trainer(plan, context)
        found = run_steps(plan, trainer, TrainState(), 2)
        names = {
            part.name.split()[0]
            for instance in trainer.pipeline.graph_instances or ()
            for _, part, *_ in instance._forwards
        }
        return found, names

    plan = the_plan(model=model, parallel=config)
    expected, found = (
        on_threads(config, lambda context, each=each: train(context, each))
        for each in (plan, replace(plan, cuda_graphs=parts_of("attn", "moe_router", "moe_preprocess")))
    )
    for rank, ((figures, names), (eager, _)) in enumerate(zip(found, expected, strict=True)):
        assert names == {"attn", "moe_router"}
        EXACT.check_all(figures, eager, f"rank {rank}")


def test_a_norm_after_a_captured_router_is_discarded_in_every_step(monkeypatch):
    """Consumers of a norm are counted in a scope per microbatch, but a capture uses only the first scope."""
    notes, pack = Counter(), DiscardedOutput.pack

    def count(self, tensor):
        note = pack(self, tensor)
        notes[len(trainer.recent)] += note is not None
        return note

    shared = SharedExpertsConfig(mlp=tiny_models.mlp_config(ffn_hidden_size=16))
    model = tiny.model(moe_config=tiny.moe(tiny.router(**ROUTER), shared=shared))
    recompute = RecomputeConfig(recompute_modules=("layernorm",))
    plan = the_plan(
        model=model, memory=MemoryConfig(recompute=recompute), cuda_graphs=parts_of("moe_router", "moe_preprocess")
    )
    trainer = make_trainer(plan)
    trainer.recent = deque()
    monkeypatch.setattr(DiscardedOutput, "pack", count)
    found = run_steps(plan, trainer, TrainState(), 4)
    assert notes[0] and notes == dict.fromkeys(range(4), notes[0]), "discarded tensors by step"
    EXACT.check_all(found, results(the_plan(model=model), steps=4), "layernorm")


@pytest.mark.parametrize("repeated", [False, True])
def test_prediction_layers_repeat_the_forced_balance_of_eager_steps(repeated):
    model = replace(MODELS["forced balance"], mtp=MTPConfig(num_layers=2, repeated_layer=repeated))
    expected = results(the_plan(model=model))
    for config in (parts_of("attn", "mlp", "moe"), WHOLE):
        EXACT.check_all(results(the_plan(model=model, cuda_graphs=config)), expected, str(config))


def test_sequence_parallel_routers_repeat_the_forced_balance_of_eager_steps():
    parallel = ParallelConfig(world_size=2, tp=2, sequence_parallel=True)

    def train(config):
        plan = the_plan(model=MODELS["forced balance"], parallel=parallel, cuda_graphs=config)
        return on_threads(parallel, lambda context: run_steps(plan, make_trainer(plan, context), TrainState(), 2))

    for found, expected in zip(train(parts_of("moe_router")), train(CudaGraphConfig()), strict=True):
        EXACT.check_all(found, expected, "routers")


def test_every_in_flight_microbatch_has_its_own_slot():
    """With four stages on two ranks, the number of slots equals the maximum number of microbatches in flight."""
    layout, pp = "Et*1|t*1|t*1|t*1L", 2
    model = tiny.model(num_layers=4)
    plan = laid_out(tiny.plan(model=model, batch=BatchConfig(micro_batch_size=1, global_batch_size=6)), layout, pp)
    recorded = replace(plan, cuda_graphs=ALL)
    schedule = build_schedule(plan.pipeline_schedule(6))

    def train(context, plan):
        trainer = make_trainer(plan, context)
        found = run_steps(plan, trainer, TrainState(), 3)
        graph_instances, rank = trainer.pipeline.graph_instances, context.group("pp").rank
        if graph_instances is not None:
            assert graph_instances.num_slots == most_in_flight(schedule[rank])
            layers = [[model.layers[index] for index in stage.layers] for stage in plan.layout.chunks(rank)]
            expected = num_graphs(plan, layers, schedule[rank])
            assert sum(instance.num_graphs for instance in graph_instances) == expected
        return found

    expected = together(on_threads(plan.parallel, lambda context: train(context, plan)))
    found = together(on_threads(plan.parallel, lambda context: train(context, recorded)))
    EXACT.check_all(found, expected, layout)


def test_sent_gradients_are_not_in_the_memory_of_backwards():
    """Gradients to be sent are copied out of graph memory, which the backward of another microbatch may overwrite."""
    model = tiny.model(num_layers=2)
    plan = laid_out(tiny.plan(model=model, batch=BatchConfig(micro_batch_size=1, global_batch_size=4)), "Et|tL", 2)

    def train(context):
        trainer, sent = make_trainer(replace(plan, cuda_graphs=ALL), context), []
        links, state = trainer.pipeline.links, TrainState()
        send = links.send
        run_steps(plan, trainer, state, 2)
        # Addresses are recorded only after capture, because graph pools may reuse the memory of gradients sent earlier.
        links.send = lambda kind, tensor, *args: sent.append((kind, tensor.data_ptr())) or send(kind, tensor, *args)
        run_steps(plan, trainer, state, 1)
        backwards = [
            forward._backward for each in trainer.pipeline.graph_instances for forward in each._forwards.values()
        ]
        memory = {tensor.data_ptr() for backward in backwards for tensor in backward._graph.outputs}
        gradients = {address for kind, address in sent if kind == "gradient"}
        assert len(memory) > 0 and not gradients & memory
        return len(gradients)

    assert on_threads(plan.parallel, train)[1] > 0


def most_in_flight(entries) -> int:
    most = now = 0
    for action in computations(entries):
        now += {"forward": 1, "backward": -1}[action.kind]
        most = max(most, now)
    return most


def computations(entries) -> Iterator[Action]:
    for entry in entries:
        yield from (action for action in actions_of(entry) if not action.is_transfer)


def test_gradients_of_replays_start_reductions_early():
    sharing = DataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, ddp_bucket_size=500)
    parallel = ParallelConfig(world_size=2)

    def train(config):
        plan = the_plan(data_parallel=sharing, parallel=parallel, cuda_graphs=config)
        return on_threads(parallel, lambda context: run_steps(plan, make_trainer(plan, context), TrainState(), 4))

    for found, expected in zip(train(ALL), train(CudaGraphConfig()), strict=True):
        EXACT.check_all(found, expected, "overlapped reductions")


COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "all_gather_object", "all_to_all_single", "broadcast")


class StrictRecorder(EagerRecorder):
    """Recorder that fails if captured work acquires parameters or runs a collective, as graphs cannot contain waits."""

    def __init__(self, monkeypatch):
        self.rank = local()
        self.forbid(monkeypatch, ParamStore, "acquire")
        for name in COLLECTIVES:
            self.forbid(monkeypatch, dist, name)

    def forbid(self, monkeypatch, owner, name):
        function = getattr(owner, name)

        def checked(*args, **kwargs):
            assert not getattr(self.rank, "captures", False), f"a graph contains {name}"
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, checked)

    def capture(self, work, pool, inputs=()):
        def run(*buffers):
            self.rank.captures = True
            try:
                return work(*buffers)
            finally:
                self.rank.captures = False

        return super().capture(run, pool, inputs)


@pytest.mark.parametrize("in_forward", [False, True])
def test_captured_modules_acquire_their_weights_before_the_replay(in_forward, monkeypatch):
    early = DataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, ddp_bucket_size=500)
    parallel = ParallelConfig(world_size=2)

    def train(plan, recorder):
        return on_threads(
            parallel, lambda context: run_steps(plan, make_trainer(plan, context, recorder), TrainState(), 4)
        )

    plan = the_plan(data_parallel=early, parallel=parallel, cuda_graphs=ALL)
    expected = train(plan, EagerRecorder())
    monkeypatch.setattr(param_store, "start_all_gather_", gather_when_waited_for)
    overlapped = replace(
        plan,
        data_parallel=replace(early, overlap_param_gather=True),
        optimizer=replace(plan.optimizer, overlap_optimizer_step=in_forward),
    )
    for found, reference_run in zip(train(overlapped, StrictRecorder(monkeypatch)), expected, strict=True):
        EXACT.check_all(found, reference_run, "weights gathered in the forward")


def test_addresses_are_fixed_and_graphs_are_captured_once():
    plan = the_plan(cuda_graphs=ALL)
    trainer = make_trainer(plan)
    run_steps(plan, trainer, TrainState(), 2)
    (instance,) = trainer.pipeline.graph_instances
    number, places = instance.num_graphs, places_of(instance)
    # The dense layer has two captured modules, each of the two MoE layers three, one of which has no weights.
    assert number == 2 * 4 + 2 * (4 + 4 + 2)
    assert number == num_graphs(plan, [plan.model.layers], build_schedule(plan.pipeline_schedule(2))[0])
    run_steps(plan, trainer, TrainState(iteration=2, consumed_samples=8), 3)
    assert tuple(trainer.pipeline.graph_instances) == (instance,)
    with torch.no_grad():  # evaluation is eager
        trainer.pipeline.run([tiny_models.microbatch(2, tiny.SEQ)], lambda output, *_: output.loss_BS.sum())
    assert instance.num_graphs == number and places_of(instance) == places


def places_of(instance) -> set[int]:
    """Returns the addresses of inputs and outputs of all captured forwards."""
    graphs = [captured._graph for captured in instance._forwards.values()]
    return {tensor.data_ptr() for graph in graphs for tensor in (*graph.inputs, *graph.outputs)}


def test_padded_microbatches_are_captured_separately():
    def train(config):
        plan = the_plan(cuda_graphs=config)
        trainer = make_trainer(plan)
        first = run_steps(plan, trainer, TrainState(), 2)
        batches = [padded(tiny_models.microbatch(2, tiny.SEQ, seed=seed), seed) for seed in (1, 2)]
        losses = [trainer.step(batches, TrainState(iteration=2 + i)).loss for i in range(2)]
        return first | {f"loss {i}": loss for i, loss in enumerate(losses)} | dict(trainer.model.state_dict())

    EXACT.check_all(train(ALL), train(CudaGraphConfig()), "padded microbatches")
    EXACT.check_all(train(WHOLE), train(CudaGraphConfig()), "padded microbatches, whole steps")


def padded(batch, number):
    valid_BS = torch.arange(tiny.SEQ).repeat(2, 1) < tiny.SEQ - number
    context = replace(batch.context, tokens=replace(batch.context.tokens, valid_BS=valid_BS))
    return replace(batch, loss_mask_BS=batch.loss_mask_BS * valid_BS, context=context)


def test_captures_are_reported_once():
    said = []
    plan = the_plan(cuda_graphs=ALL)
    trainer = make_trainer(plan)
    report = CaptureReport(trainer.pipeline.graph_instances.summary, said.append)
    run_steps(plan, trainer, TrainState(), 1)
    report.enter("step", 2)
    assert not said
    run_steps(plan, trainer, TrainState(iteration=1, consumed_samples=4), 1)
    report.enter("step", 3)
    report.enter("step", 4)
    assert len(said) == 1 and said[0].startswith("CUDA graphs: 28 captured for 1 microbatches in flight")


def test_a_pytree_is_flattened_and_restored():
    a, b = torch.ones(2), torch.zeros(3)
    structure = (tiny_models.make_mb(1, 4, valid_BS=a), {"x": b, "y": (a, None, 7)})
    tensors, fmt = flatten(structure)
    assert len(tensors) == 3, "a tensor that occurs twice is one leaf"
    others = [torch.full_like(tensor, 5) for tensor in tensors]
    mb, rest = unflatten(structure, tensors, others)
    assert mb.tokens.valid_BS is rest["y"][0] and rest["y"][1:] == (None, 7)
    assert torch.equal(rest["x"], torch.full((3,), 5.0))
    assert flatten((mb, rest))[1] == fmt
    assert flatten((mb, {"x": b, "y": (b, None, 7)}))[1] != fmt
    assert flatten((mb, {"x": b, "y": (a, None, 8)}))[1] != fmt


def test_the_garbage_collector_is_disabled_during_capture():
    with pytest.raises(ValueError, match="in between"), garbage_collection_disabled():
        assert not gc.isenabled()
        raise ValueError("in between")
    assert gc.isenabled()
    gc.disable()
    with garbage_collection_disabled():
        pass
    assert not gc.isenabled(), "it was off before"
    gc.enable()


def test_experts_whose_kernels_read_the_host_cannot_be_captured():
    for config in (parts_of("attn", "moe"), WHOLE):
        with pytest.raises(EnvironmentProblem, match="grouped_forward of the backend reference, which reads"):
            check_capturable(config, KERNELS)
    check_capturable(parts_of("attn", "moe_router", "moe_preprocess"), KERNELS)
    check_capturable(CudaGraphConfig(), KERNELS)
