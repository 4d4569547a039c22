"""Overlapped and split schedules train the same weights as the plain one, bit for bit."""

from collections import Counter
from dataclasses import replace
from functools import cache
from threading import get_ident

import pytest
import torch

from megatron_moe.build import record_steps
from megatron_moe.config.memory import CudaGraphConfig
from megatron_moe.config.model import LayerConfig, ModelConfig, MTPConfig
from megatron_moe.config.moe import CapacityConfig, SharedExpertsConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.pipeline_layout import parse_layout
from megatron_moe.config.run import RunPlan
from megatron_moe.config.training import BatchConfig
from megatron_moe.kernels.kernel_set import OPS, KernelSet
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.layout_check.record import record_run
from megatron_moe.layout_check.samples import random_datasets
from megatron_moe.moe.token_dispatcher.flex import CombineExchange, DispatchExchange
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.exchange import CollectiveExchange
from megatron_moe.train.trainer import Trainer
from tests.helpers import tiny, tiny_models
from tests.helpers.eager_graphs import EagerRecorder
from tests.helpers.ranks import on_processes, on_threads
from tests.helpers.thinned import nightly_only, thinned
from tests.helpers.tolerances import EXACT, FP64_LAYOUT, Tolerance

ORDERS = {
    "pairs": PipelineConfig(overlap=True),
    "split backward": PipelineConfig(delay_wgrad_compute=True),
    "weight gradients later": PipelineConfig(overlap=True, delay_wgrad_compute=True),
    "within the backward": PipelineConfig(overlap_dispatch_backward_with_experts_wgrad=True),
    "attention early": PipelineConfig(
        overlap=True, delay_wgrad_compute=True, ep_overlap_early_attn_memory_release=True
    ),
}


def moe(**changes):
    """MoE config with four experts, all-to-all dispatch and a gated shared expert, with the given changes."""
    router = tiny.router(num_experts=4, z_loss_coeff=0.01)
    shared = SharedExpertsConfig(mlp=tiny_models.mlp_config(ffn_hidden_size=16), gate=True)
    return tiny.moe(router, **{"dispatcher": "alltoall", "shared": shared, **changes})


def model(num_layers=3, moe_config=None, *, dropout=0.0, mla=False, **changes) -> ModelConfig:
    """Model with one dense layer followed by MoE layers."""
    mixer = tiny_models.mla_config(num_heads=4) if mla else tiny.attention()
    dense = tiny_models.mlp_config(ffn_hidden_size=48)
    kinds = [dense, *[moe_config or moe()] * (num_layers - 1)]
    layers = tuple(
        LayerConfig(mixer=mixer, feed_forward=kind, norm=tiny.NORM, hidden_dropout=dropout) for kind in kinds
    )
    return tiny.model(layers=layers, embedding_dropout=dropout, **changes)


def latent():
    config = moe(latent_size=16)
    return replace(config, experts=replace(config.experts, hidden_size=16))


def plan(config: ModelConfig, layout: str = "", *, pp: int = 2, micro: int = 1, samples: int = 8, **sizes) -> RunPlan:
    """Plan with a few short samples; `layout`: Megatron's layout string for `pp` ranks."""
    parallel = ParallelConfig(ep=2, **{"world_size": 2, **sizes})
    placed = None
    if layout:
        num_mtp = config.mtp.num_layers if config.mtp else 0
        placed = parse_layout(layout, pp=pp, num_layers=len(config.layers), num_mtp=num_mtp)
        holders = placed.embedding_ranks(tied=config.tied_embeddings)
        parallel = replace(parallel, pp=pp, virtual_stages=placed.vpp, embedding_ranks=holders)
    return tiny.plan(
        model=config,
        parallel=parallel,
        pipeline=PipelineConfig(layout=placed),
        data=replace(tiny.plan().data, seq_length=8),
        batch=BatchConfig(micro_batch_size=micro, global_batch_size=samples),
    )


MTP = MTPConfig(num_layers=1, loss_scaling_factor=0.3)
CASES = {
    "experts over two ranks": plan(model()),
    "MLA, multi-token prediction, dropout": plan(model(mla=True, mtp=MTP, dropout=0.1)),
    "tied embeddings, prediction, detached heads": plan(
        model(mtp=replace(MTP, detach_heads=True), tied_embeddings=True)
    ),
    "tokens sent once per rank": plan(model(moe_config=moe(dispatcher="flex"))),
    "tokens sent once per rank, shared experts overlapped": plan(
        model(moe_config=moe(dispatcher="flex", shared_overlap=True))
    ),
    "dropped and padded, bias": plan(
        model(moe_config=replace(moe(), capacity=CapacityConfig(factor=1.0, pad=True), shared=None))
    ),
    "latent experts": plan(model(moe_config=latent())),
    "two chunks on each of two stages": plan(model(4, mtp=MTP), "Et|t|t|tmL", world_size=4),
    "uneven chunks, some empty, prediction before the loss": plan(
        model(3, mtp=MTP), "Et|t|t||m|L", pp=3, world_size=6, samples=12
    ),
    "context parallel": plan(model(), cp=2),
    "tensor parallel": plan(model(mla=True), tp=2, sequence_parallel=True),
    "expert tensor parallel": plan(model(), world_size=4, etp=2),
    "gradients reduced early": replace(
        plan(model(), micro=2),
        data_parallel=DataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True),
    ),
    "weights gathered late": replace(
        plan(model(), micro=2),
        data_parallel=DataParallelConfig(
            overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True, ddp_bucket_size=500
        ),
        optimizer=replace(tiny.plan().optimizer, overlap_optimizer_step=True),
    ),
}  # fmt: skip


def ranks_of(each: RunPlan, *, processes: bool = False):
    if processes:
        return on_processes(each.parallel, train_rank, each)
    return on_threads(each.parallel, lambda context: train_rank(context, each))


def train_rank(context: ParallelContext, each: RunPlan) -> dict[str, torch.Tensor]:
    """Results of two steps on a rank, by name."""
    datasets = random_datasets(each, num_steps=2)
    trainers: list[Trainer] = []

    def capture(trainer: Trainer) -> None:
        record_steps(trainer, EagerRecorder(), each.cuda_graphs)
        trainers.append(trainer)

    record = record_run(each, context, reference.bundle(), datasets, num_steps=2, prepare=capture)
    graph_instances = trainers[0].pipeline.graph_instances or ()
    assert bool(each.cuda_graphs.cuda_graph_modules) == any(graph.num_graphs for graph in graph_instances)
    found = {"losses": torch.tensor(record.losses, dtype=torch.float64)}
    for step, (norms, metrics) in enumerate(zip(record.norms, record.metrics, strict=True)):
        found |= {f"{name} norm {step}": torch.tensor(norm, dtype=torch.float64) for name, norm in norms.items()}
        found |= {f"metric {key} {step}": torch.tensor(figure) for key, figure in metrics.items()}
    for kind, held in (("gradient", record.gradients), ("weight", record.weights)):
        found |= {f"{kind} {name}": part.value.nan_to_num() for name, part in held.items()}
    found |= {f"tokens {layer}": count for layer, count in record.tokens.items()}
    return found | {f"bias {layer}": bias for layer, bias in record.biases.items()}


@cache
def plain(case: str):
    return ranks_of(CASES[case])


def in_order(case: str, order: str) -> RunPlan:
    """Plan of the case with another schedule order."""
    each = CASES[case]
    return replace(each, pipeline=replace(ORDERS[order], layout=each.pipeline.layout))


def check(found, case: str, tolerance: Tolerance = EXACT, *, captured: bool = False) -> None:
    """`captured`: skips tokens per expert, which router hooks count and graph replays do not."""
    for rank, (actual, expected) in enumerate(zip(found, plain(case), strict=True)):
        if captured:
            actual, expected = (
                {k: v for k, v in each.items() if not k.startswith("tokens ")} for each in (actual, expected)
            )
        assert len(expected) > 50
        tolerance.check_all(actual, expected, f"{case}, rank {rank}")


@pytest.mark.parametrize(
    "case, order",
    [
        ("experts over two ranks", "pairs"),
        ("two chunks on each of two stages", "pairs"),
        ("tokens sent once per rank", "pairs"),
        ("tokens sent once per rank", "attention early"),
        ("experts over two ranks", "attention early"),
        ("experts over two ranks", "split backward"),
        *thinned((case, "weight gradients later") for case in CASES),
        *thinned((case, "within the backward") for case in CASES),
    ],
)
def test_schedule_orders_train_the_same_weights(case, order):
    check(ranks_of(in_order(case, order)), case)


@pytest.mark.parametrize(
    "case",
    nightly_only(
        ["MLA, multi-token prediction, dropout", "two chunks on each of two stages"],
        ["MLA, multi-token prediction, dropout"],
    ),
)
def test_overlapped_schedule_over_processes_trains_the_same_weights(case):
    # gloo sums four ranks in another order than the in-memory group of threads
    check(ranks_of(in_order(case, "weight gradients later"), processes=True), case, FP64_LAYOUT)


@pytest.mark.parametrize(
    ("case", "order", "modules"),
    [
        ("experts over two ranks", "pairs", ("attn", "mlp", "moe_router", "moe_preprocess")),
        ("experts over two ranks", "attention early", ("attn",)),
        ("tokens sent once per rank", "pairs", ("attn", "mlp", "moe_router", "moe_preprocess")),
        ("dropped and padded, bias", "pairs", ("moe_router",)),
        ("two chunks on each of two stages", "pairs", ("attn", "mlp", "moe_router")),
        ("gradients reduced early", "pairs", ("attn", "moe_router")),
        ("weights gathered late", "pairs", ("attn", "mlp")),
        ("experts over two ranks", "weight gradients later", ("attn", "mlp", "moe_router", "moe_preprocess")),
        ("tokens sent once per rank", "weight gradients later", ("attn", "moe_router", "moe_preprocess")),
        ("tokens sent once per rank", "within the backward", ("attn", "moe_router")),
        ("two chunks on each of two stages", "weight gradients later", ("attn", "mlp", "moe_router")),
        ("two chunks on each of two stages", "split backward", ("attn", "moe_router")),
        ("gradients reduced early", "weight gradients later", ("attn", "moe_router")),
        ("weights gathered late", "weight gradients later", ("attn", "mlp")),
        ("context parallel", "weight gradients later", ("attn", "moe_router")),
        ("tensor parallel", "weight gradients later", ("attn", "moe_router")),
    ],
)
def test_overlapped_schedule_replays_captured_modules(case, order, modules):
    """Covers replays within overlapped pairs, with and without deferred weight gradients."""
    config = CudaGraphConfig(cuda_graph_modules=modules, cuda_graph_warmup_steps=0)
    check(ranks_of(replace(in_order(case, order), cuda_graphs=config)), case, captured=True)


def test_shared_experts_overlap_exchanges_between_captured_modules():
    overlapped = plan(model(moe_config=moe(shared_overlap=True)))
    modules = ("attn", "mlp", "moe_router", "moe_preprocess")
    found = ranks_of(
        replace(overlapped, cuda_graphs=CudaGraphConfig(cuda_graph_modules=modules, cuda_graph_warmup_steps=1))
    )
    check(found, "experts over two ranks", captured=True)


@pytest.mark.parametrize("dispatcher", ["flex", "alltoall"])
def test_weight_gradients_run_while_gradients_are_exchanged(dispatcher, monkeypatch):
    each = plan(model(moe_config=moe(dispatcher=dispatcher, shared=None)), samples=2)
    each = replace(each, pipeline=ORDERS["within the backward"])
    in_flight, found = Counter(), Counter()

    def counting(function, name, change):
        def call(*args, **named):
            found[name, in_flight[get_ident()] > 0] += 1
            in_flight[get_ident()] += change
            return function(*args, **named)

        return call

    exchanges = (DispatchExchange, CombineExchange) if dispatcher == "flex" else (CollectiveExchange,)
    for kind in exchanges:
        for name, change in {"send": 1, "receive": -1, "send_grads": 1, "receive_grads": -1}.items():
            monkeypatch.setattr(kind, name, counting(getattr(kind, name), name, change))
    functions = {op: getattr(reference, op) for op in OPS}
    for op in ("linear_weight_grad", "grouped_weight_grad"):
        functions[op] = counting(functions[op], op, 0)
    kernels = KernelSet.of(functions, ())
    on_threads(
        each.parallel, lambda ctx: record_run(each, ctx, kernels, random_datasets(each, num_steps=1), num_steps=1)
    )
    # on two ranks, head and attention of the last layer run while the gradient of combine is exchanged; the attention
    # of the first MoE layer, whose layer below has no exchange, and the dense layer run afterwards
    assert found["grouped_weight_grad", True] == 2 * 4 and not found["grouped_weight_grad", False]
    assert found["linear_weight_grad", True] == 2 * 3 and found["linear_weight_grad", False] == 2 * 6
