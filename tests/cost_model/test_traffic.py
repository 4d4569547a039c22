"""Communication volume: dispatched rows against simulated routing, collectives against those of the real model."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_moe.config.costs import ActivationSizes
from megatron_moe.config.echo import EchoConfig
from megatron_moe.config.fsdp import FSDPConfig
from megatron_moe.config.mlp import ActivationConfig, MLPConfig
from megatron_moe.config.model import LayerConfig, MTPConfig
from megatron_moe.config.moe import CapacityConfig, MoEConfig, RouterConfig, SharedExpertsConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.pipeline_layout import even_layout, parse_layout
from megatron_moe.config.precision import PrecisionConfig, low_precision_config
from megatron_moe.config.run import RunPlan
from megatron_moe.config.tp_overlap import OVERLAPPED
from megatron_moe.config.training import BatchConfig
from megatron_moe.config.transport import HIERARCHICAL, NCCL, TokenExchange
from megatron_moe.cost_model.activations import activation_sizes
from megatron_moe.cost_model.expert_load import LoadSpread, RandomRouting, expected_maximum, token_copies
from megatron_moe.cost_model.hardware import GPUS
from megatron_moe.cost_model.placement import Placement, Placements
from megatron_moe.cost_model.traffic import Communication, Traffic, expert_traffic
from megatron_moe.cost_model.workspace import feed_forward_workspace, largest_shard_bytes
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.model.gpt import GPT
from megatron_moe.moe.moe_layer import new_expert_comm
from megatron_moe.moe.token_dispatcher.base import Routing
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.context_parallel import SequencePart, split_positions
from megatron_moe.parallel.exchange import AllToAll
from megatron_moe.parallel.sequence_shards import new_peer_shards
from tests.helpers import tiny
from tests.helpers.ranks import on_threads
from tests.helpers.tiny_models import (
    LINEAR_ATTENTION,
    attention_config,
    layer_config,
    microbatch,
    mla_config,
    mlp_config,
    model_config,
    moe_config,
)
from tests.helpers.tolerances import EXACT, FP64_REF, SIMULATED_ROUTING

H100 = GPUS["h100"]
BATCH, SEQ = 2, 32
FP32 = 4

CHOICES = {
    "deepseek-v3, 64 ranks": (RandomRouting(256, 8, 8, 4), 64),
    "deepseek-v3, 4 nodes": (RandomRouting(256, 8, 8, 4), 4),
    "deepseek-v3 without groups": (RandomRouting(256, 8), 64),
    "qwen3-30b, 8 ranks": (RandomRouting(128, 8), 8),
    "mixtral, 8 ranks": (RandomRouting(8, 2), 8),
    "parts that cut through groups": (RandomRouting(60, 4, 5, 3), 4),
    "one expert per rank": (RandomRouting(16, 3), 16),
}


def simulated(choice: RandomRouting, num_parts: int, tokens: int = 60_000) -> np.ndarray:
    """Number of each token's experts on each part, int [tokens, parts]."""
    random = np.random.default_rng(5)
    per_group = choice.num_experts // choice.num_groups
    keys = random.random((tokens, choice.num_experts))
    groups = random.random((tokens, choice.num_groups)).argsort(axis=1)[:, : choice.group_topk]
    closed = np.ones((tokens, choice.num_groups), dtype=bool)
    np.put_along_axis(closed, groups, False, axis=1)
    keys[np.repeat(closed, per_group, axis=1)] = 2.0
    ids = keys.argpartition(choice.topk - 1, axis=1)[:, : choice.topk]
    flat = np.arange(tokens)[:, None] * num_parts + ids // (choice.num_experts // num_parts)
    return np.bincount(flat.ravel(), minlength=tokens * num_parts).reshape(tokens, num_parts)


@pytest.mark.parametrize("name", CHOICES)
def test_destinations_and_rows_are_those_of_random_routing(name):
    choice, num_parts = CHOICES[name]
    counts = simulated(choice, num_parts)
    visited, rows = (counts > 0).sum(axis=1), counts[:, 0]
    destinations, taken = choice.destinations(num_parts), choice.rows(num_parts, 100)
    SIMULATED_ROUTING.check(destinations.mean, float(visited.mean()), "ranks")
    SIMULATED_ROUTING.check(destinations.std, float(visited.std()), "their deviation")
    FP64_REF.check(taken.mean, 100 * choice.topk / num_parts, "rows")
    SIMULATED_ROUTING.check(taken.std, 10 * float(rows.std()), "their deviation")


def test_estimated_load_of_the_fullest_rank():
    choice, num_parts, tokens = RandomRouting(256, 8), 64, 2048
    counts = simulated(choice, num_parts, tokens * 24).reshape(24, tokens, num_parts).sum(axis=1)
    estimated = expected_maximum(choice.rows(num_parts, tokens), num_parts)
    assert 0.97 < counts.max(axis=1).mean() / estimated < 1.0


def test_a_row_carries_its_scales_in_fp8():
    config = replace(moe_config(), experts=replace(moe_config().experts, hidden_size=256))
    sizes = Communication(plan(layer_config(), ParallelConfig()), {})._sizes
    exchange = config.exchange(ParallelConfig(ep=4, world_size=4), sizes, None)
    blocks = expert_traffic(exchange, 4, 1, sizes, block=128)
    assert (blocks.row_bytes, blocks.low_row_bytes) == (256 * FP32 + 4, 256 + 2 * 4 + 4)
    assert expert_traffic(exchange, 4, 1, sizes, block=32).low_row_bytes == 256 + 8 + 4
    partial = expert_traffic(replace(exchange, width=320), 4, 1, sizes, block=128)
    assert partial.low_row_bytes == 320 + 3 * 4 + 4, "half a block has a scale, too"


def plan(layer: LayerConfig, parallel: ParallelConfig, **changes) -> RunPlan:
    """Plan with two layers of one kind, fp32 and one microbatch."""
    layout = even_layout(2, pp=parallel.pp)
    return tiny.plan(
        model=model_config(layer, layer),
        parallel=parallel,
        pipeline=PipelineConfig(layout=layout),
        **{
            "precision": PrecisionConfig(),
            "batch": BatchConfig(micro_batch_size=BATCH, global_batch_size=BATCH * parallel.dp),
            "data": replace(tiny.plan().data, seq_length=SEQ),
            **changes,
        },
    )


def placements(parallel: ParallelConfig) -> dict[str, Placement]:
    return Placements(H100).placements_of_groups(parallel)


def predicted(changed: RunPlan, rank: int = 0) -> list[Traffic]:
    return Communication(changed, placements(changed.parallel)).of_rank(rank)


class _Done:
    def wait(self) -> None:
        return None


class Counting:
    """Replaces collectives of torch.distributed and counts the bytes that a rank would send, by group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: dict[Any, str]) -> None:
        self.sent: Counter[str] = Counter()
        self.names = names
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
            monkeypatch.setattr(dist, name, self._collective(name))
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)

    def _all_reduce(self, given: torch.Tensor, *_: Any, group: Any, **options: Any) -> _Done:
        ranks = dist.get_world_size(group)
        if given.is_floating_point():
            self.sent[self.names[group]] += int(2 * given.nbytes * (ranks - 1) / ranks)
        return _Done()

    def _collective(self, name: str) -> Callable[..., _Done]:
        def launch(out: torch.Tensor, given: torch.Tensor, *sizes: Any, group: Any, **_: Any) -> _Done:
            ranks = dist.get_world_size(group)
            share = ranks - 1 if name == "all_gather_into_tensor" else (ranks - 1) / ranks
            if sizes and sizes[1]:  # a ring: everything goes to the neighbour
                share = 1.0
            if given.is_floating_point():
                self.sent[self.names[group]] += int(given.nbytes * share)
                out.zero_()
            return _Done()

        return launch


def sent(changed: RunPlan, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that rank 0 sends in forward and backward of the real model."""
    config = changed.parallel
    context = ParallelContext.fake(config, 0, dtype=torch.float32, device="cpu")
    try:
        kernels = reference.bundle()
        peers = new_peer_shards(context, largest_shard_bytes(changed), kernels.sum_contributions_)
        net = GPT(changed.model, context, kernels, peers=peers)
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        handles = {context.group(name).handle: name for name in ("tp", "cp", "etp_ep", "ep")}
        counting = Counting(monkeypatch, handles)
        length = SEQ // config.cp
        positions = torch.arange(length).repeat(BATCH, 1)
        part = SequencePart(split_positions("zigzag", SEQ, config.cp), 0) if config.cp > 1 else None
        batch = microbatch(BATCH, length, positions_BS=positions, part=part)
        out = net(batch)
        sum(loss_BS.sum() for loss_BS, *_ in ((out.loss_BS,), *out.mtp_losses)).backward()
    finally:
        context.stop()
    return counting.sent


SEQUENCE_PARALLEL = ParallelConfig(tp=2, world_size=2, sequence_parallel=True)
EVEN_HEADS = attention_config(num_heads=4)


def padded_moe(dispatcher: str) -> MoEConfig:
    """MoE layer with K = 2 of 8 experts whose number of rows does not depend on routing."""
    config = replace(moe_config(), shared=None, dispatcher=dispatcher)
    return replace(config, capacity=CapacityConfig(factor=1.0, pad=True) if dispatcher == "alltoall" else None)


TENSOR_PARALLEL = {
    "attention and MLP": layer_config(EVEN_HEADS),
    "ranks that share a query group": layer_config(attention_config(num_heads=4, num_query_groups=1, output_gate=True)),
    "latent attention": layer_config(mla_config(num_heads=4)),
    "latent attention without latent queries": layer_config(mla_config(num_heads=4, q_lora_rank=None)),
    "a shared expert": layer_config(
        EVEN_HEADS, replace(moe_config(), shared=SharedExpertsConfig(mlp=mlp_config(ffn_hidden_size=14)))
    ),
}


@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_tensor_parallel_ranks_send_what_is_predicted(name, monkeypatch):
    changed = plan(TENSOR_PARALLEL[name], SEQUENCE_PARALLEL)
    total = sum(each.bytes for each in predicted(changed) if each.group == "tp")
    assert sent(changed, monkeypatch)["tp"] == total


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_multi_token_prediction_sends_what_is_predicted(sequence_parallel, monkeypatch):
    parallel = replace(SEQUENCE_PARALLEL, sequence_parallel=sequence_parallel)
    changed = plan(layer_config(EVEN_HEADS), parallel)
    changed = replace(changed, model=replace(changed.model, mtp=MTPConfig(num_layers=2)))
    changed = replace(changed, pipeline=PipelineConfig(layout=even_layout(2, pp=1, num_mtp=2)))
    total = sum(each.bytes for each in predicted(changed) if each.group == "tp")
    assert sent(changed, monkeypatch)["tp"] == total


@pytest.mark.parametrize("gemms", [OVERLAPPED, ("qkv_fprop", "proj_dgrad", "fc1_wgrad"), ()], ids=str)
@pytest.mark.parametrize("name", TENSOR_PARALLEL)
def test_overlapped_copies_replace_collectives(name, gemms, monkeypatch):
    changed = plan(TENSOR_PARALLEL[name], replace(SEQUENCE_PARALLEL, tp_comm_overlap=gemms))
    found, plain = predicted(changed), predicted(plan(TENSOR_PARALLEL[name], SEQUENCE_PARALLEL))
    by_collectives = sum(each.bytes for each in found if each.group == "tp" and not each.hidden)
    assert sent(changed, monkeypatch)["tp"] == by_collectives
    hidden = sum(each.bytes for each in found if each.hidden)
    assert by_collectives + hidden == sum(each.bytes for each in plain if each.group == "tp")
    assert bool(gemms) == bool(hidden)


@pytest.mark.parametrize("exchange", ["p2p", "allgather", "a2a"])
@pytest.mark.parametrize("latent", [False, True])
def test_context_parallel_ranks_send_what_is_predicted(exchange, latent, monkeypatch):
    core = {"context_exchange": exchange}
    mixer = (
        mla_config(num_heads=4, core=core) if latent else attention_config(num_heads=8, num_query_groups=4, core=core)
    )
    changed = plan(layer_config(mixer), ParallelConfig(cp=4, world_size=4))
    (traffic,) = (each for each in predicted(changed) if each.group == "cp")
    assert sent(changed, monkeypatch)["cp"] == traffic.bytes


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize("name", LINEAR_ATTENTION)
def test_linear_attention_sends_what_is_predicted(name, mode, monkeypatch):
    changed = plan(layer_config(replace(LINEAR_ATTENTION[name], cp_mode=mode)), ParallelConfig(cp=4, world_size=4))
    (traffic,) = (each for each in predicted(changed) if each.group == "cp")
    assert sent(changed, monkeypatch)["cp"] == traffic.bytes


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_expert_parallel_ranks_send_what_is_predicted(dispatcher, monkeypatch):
    """Sends rows, or the tokens of all ranks, with their probabilities."""
    parallel = ParallelConfig(ep=4, world_size=4)
    changed = plan(layer_config(feed_forward=padded_moe(dispatcher)), parallel)
    total = sum(each.bytes for each in predicted(changed) if each.group in ("ep", "etp_ep"))
    assert 0.95 < sent(changed, monkeypatch).total() / total < 1.05


@pytest.mark.parametrize(("again", "bytes_per_weight"), [(False, 2 * FP32), (True, 3 * FP32)])
def test_clones_send_the_weights_and_gradients_of_all_slots(again, bytes_per_weight):
    """Two clones per rank, of experts with one matrix [F, H] and one [H, F]; gradients are sent in fp32."""
    parallel = ParallelConfig(ep=4, world_size=4)
    moe = replace(
        padded_moe("alltoall"),
        capacity=None,
        echo=EchoConfig(moe_num_echo_experts=8, moe_echo_recompute_expert_dispatch=again),
    )
    run = plan(layer_config(feed_forward=moe), parallel)
    sent = {each.what: each.bytes for each in predicted(run)}["clones of experts"]
    width, ffn = moe.experts.hidden_size, moe.experts.ffn_hidden_size
    matrices = moe.experts.activation.fc1_width_factor + 1
    assert sent == len(run.model.layers) * run.num_microbatches * 2 * matrices * width * ffn * bytes_per_weight


@dataclass(frozen=True, kw_only=True)
class ExchangingMLP(MLPConfig):
    """Feed-forward module without experts that sends every token to two of four ranks."""

    def exchange(self, parallel, sizes, low):
        return TokenExchange(transport=NCCL, width=10, num_experts=4, topk=2, rows=sizes.residual * 2)


def test_exchange_of_any_feed_forward_module_is_counted():
    parallel = ParallelConfig(ep=4, world_size=4)
    module = ExchangingMLP(hidden_size=8, ffn_hidden_size=16, activation=ActivationConfig())
    run = plan(layer_config(feed_forward=module), parallel)
    traffic = Communication(run, placements(parallel)).of_rank(0)
    sent = {each.what: each.bytes for each in traffic if each.group == "ep"}
    num_layers, num_tokens = len(run.model.layers), BATCH * SEQ
    of_results = num_layers * run.num_microbatches * 2 * num_tokens * 2 * 3 / 4 * (10 * FP32 + 4)
    assert sent["combine: results"] == of_results
    sizes = activation_sizes(run)
    workspace = feed_forward_workspace(run.model.layers[0], parallel, sizes)
    assert workspace.dispatch == 2 * 2 * num_tokens * 10 * FP32


def rotated_choices(
    num_experts: int, num_tokens: int, ep: int
) -> tuple[torch.Tensor, Callable[[RandomRouting, int], LoadSpread]]:
    """Choices [T, 2] and a replacement of `RandomRouting.destinations`. The choices contain every rotation of a token's
    choices by the experts of a rank, so that all hosts and all ranks get the same number of tokens."""
    draw = torch.Generator().manual_seed(3)
    first_TK = torch.rand(num_tokens // ep, num_experts, generator=draw).topk(2).indices
    turns = num_experts // ep * torch.arange(ep)
    ids_TK = ((first_TK[:, None] + turns[:, None]) % num_experts).flatten(0, 1)

    def measured(choice: RandomRouting, num_parts: int) -> LoadSpread:
        parts_TK = ids_TK // (num_experts // num_parts)
        return LoadSpread(mean=sum(len(set(row)) for row in parts_TK.tolist()) / num_tokens, std=0.0)

    return ids_TK, measured


@pytest.mark.parametrize("fold", [{"ep": 4}, {"ep": 2, "etp": 2}, {"ep": 1, "etp": 4}], ids=str)
def test_flex_sends_a_token_once_to_every_rank_of_its_experts(fold, monkeypatch):
    parallel, config = ParallelConfig(world_size=4, **fold), padded_moe("flex")
    num_experts, num_tokens = config.router.num_experts, BATCH * SEQ
    ids_TK, measured = rotated_choices(num_experts, num_tokens, parallel.ep)

    def copies(ctx: ParallelContext) -> int:
        comm, counts = new_expert_comm(config, ctx, reference.bundle()), torch.bincount(ids_TK.flatten())
        routing = Routing(num_experts=num_experts, ids_TK=ids_TK, probs_TK=torch.ones(ids_TK.shape), counts_E=counts)
        targets_T = comm.transport.new_exchange(routing).transport_state.tolist()
        return sum((targets & ~(1 << ctx.group("etp_ep").rank)).bit_count() for targets in targets_T)

    num_copies = sum(on_threads(parallel, copies)) / parallel.world_size
    changed = plan(layer_config(feed_forward=config), parallel)
    monkeypatch.setattr(RandomRouting, "destinations", measured)
    communication = Communication(changed, placements(parallel))
    found = [each for each in communication.of_rank(0) if each.group in ("ep", "etp", "etp_ep")]
    # two layers each exchange dispatch, combine and the gradients of both
    rows = 4 * 2 * num_copies * communication.expert_traffic(communication.exchange(changed.model.layers[0])).row_bytes
    FP64_REF.check(sum(each.bytes for each in found), rows)


@pytest.mark.parametrize("fold", [{"ep": 4}, {"ep": 2, "etp": 2}], ids=str)
def test_copy_engines_send_every_token_to_every_other_rank(fold):
    parallel = ParallelConfig(world_size=4, ranks_per_host=4, **fold)
    changed = plan(layer_config(feed_forward=replace(padded_moe("flex"), transport_backend="copies")), parallel)
    communication = Communication(changed, placements(parallel))
    found = [each for each in communication.of_rank(0) if each.group in ("ep", "etp_ep")]
    row_bytes = communication.expert_traffic(communication.exchange(changed.model.layers[0])).row_bytes
    FP64_REF.check(sum(each.bytes for each in found), 4 * 2 * BATCH * SEQ * 3 * row_bytes)


@pytest.mark.parametrize(
    "fold",
    [
        {"ep": 4, "ranks_per_host": 2},
        {"ep": 4, "ranks_per_host": 1},
        {"ep": 8, "ranks_per_host": 4},
        {"ep": 2, "etp": 2, "ranks_per_host": 2},
        {"ep": 2, "etp": 2, "ranks_per_host": 1},
    ],
    ids=str,
)
def test_ranks_on_several_hosts_send_what_is_predicted(fold, monkeypatch):
    """Bytes between hosts and within hosts are compared separately."""
    parallel = ParallelConfig(world_size=fold["ep"] * fold.get("etp", 1), **fold)
    config = padded_moe("flex")
    num_experts, num_tokens = config.router.num_experts, BATCH * SEQ
    ids_TK, measured = rotated_choices(num_experts, num_tokens, parallel.ep)
    sent: Counter[tuple[int, str]] = Counter()
    launch = AllToAll.launch

    def counting(over: AllToAll, rows: torch.Tensor) -> Any:
        away = sum(size for peer, size in enumerate(over.send) if peer != over.group.rank)
        sent[dist.get_rank(), over.group.name] += away * rows[:1].nbytes
        return launch(over, rows)

    def rank(ctx: ParallelContext) -> None:
        comm = new_expert_comm(config, ctx, reference.bundle())
        assert comm.kind is HIERARCHICAL
        dispatcher = comm.new_dispatcher()
        tokens = torch.randn(num_tokens, config.experts.hidden_size, requires_grad=True)
        probs = torch.rand(ids_TK.shape, requires_grad=True)
        counts = torch.bincount(ids_TK.flatten(), minlength=num_experts)
        routing = Routing(num_experts=num_experts, ids_TK=ids_TK, probs_TK=probs, counts_E=counts)
        rows, handle = dispatcher.finish_dispatch(dispatcher.start_dispatch(tokens, routing))
        rows = replace(rows, data=rows.data * rows.probs_R[:, None])
        dispatcher.finish_combine(dispatcher.start_combine(rows, handle)).sum().backward()

    monkeypatch.setattr(AllToAll, "launch", counting)
    on_threads(parallel, rank, dtype=torch.float32)
    changed = plan(layer_config(feed_forward=config), parallel)
    monkeypatch.setattr(RandomRouting, "destinations", measured)
    traffic = Communication(changed, placements(parallel)).of_rank(0)
    for group, where in (("etp_ep_inter", "between hosts"), ("etp_ep_intra", "within hosts")):
        predicted_bytes = sum(each.bytes for each in traffic if each.what.endswith(where))
        for each in range(parallel.world_size):
            FP64_REF.check(predicted_bytes, 2.0 * sent[each, group], f"{where}, rank {each}")  # two layers


@pytest.mark.parametrize(("recipe", "scales"), [("blockwise", 2 * 4), ("mxfp8", 8)])
def test_exchanges_in_fp8_send_a_byte_per_element_and_scales(recipe: str, scales: int) -> None:
    """FP8 in dispatch and in the backward of combine; the first of two layers exchanges activations in their dtype."""
    parallel = ParallelConfig(ep=4, world_size=4)
    config = replace(padded_moe("flex"), experts=replace(padded_moe("flex").experts, hidden_size=256))
    low = low_precision_config(recipe, layers_at_start=1)
    plain, of_row = {}, 256 * FP32 + 4
    for dispatch, combine in ((False, False), (True, False), (True, True)):
        moe = replace(config, fp8_dispatch=dispatch, fp8_combine_grad=combine)
        changed = plan(layer_config(feed_forward=moe), parallel)
        changed = replace(changed, precision=replace(changed.precision, low_precision=low))
        found = {each.what: each.bytes for each in predicted(changed) if each.group == "ep"}
        plain = plain or found
        for what, is_low in (("dispatch: rows", dispatch), ("combine: results", combine)):
            low_row = 256 + scales + 4 if is_low else of_row
            FP64_REF.check(found[what] / plain[what], (3 * of_row + low_row) / (4 * of_row), f"{what} {dispatch}")


def test_only_traffic_between_nvlink_domains_crosses_the_network():
    """The layouts have 64 expert ranks on 16 hosts of 4: one domain of GB200, or two domains of 32 ranks."""
    parallel = ParallelConfig(ep=64, world_size=64, ranks_per_host=4)
    router = replace(padded_moe("flex").router, num_experts=64)
    config = replace(padded_moe("flex"), router=router, experts=replace(padded_moe("flex").experts, num_experts=64))
    changed = plan(layer_config(feed_forward=config), parallel)
    for domain, share in ((64, 0.0), (32, (1 / 2) / (15 / 16)), (4, 1.0)):
        gpu = replace(GPUS["gb200"], nvlink_domain=domain)
        found = Communication(changed, Placements(gpu).placements_of_groups(parallel)).of_rank(0)
        between = [each for each in found if each.what.endswith("between hosts")]
        assert len(between) == 2
        for each in between:
            FP64_REF.check(each.network_bytes, share * each.bytes, f"domains of {domain}")
        assert not any(each.network_bytes for each in found if each.what.endswith("within hosts"))


def test_gradients_and_weights_are_exchanged_once_per_step():
    """Each direction sends n (d - 1) / d elements for a parameter of n elements with d copies."""
    parallel = ParallelConfig(ep=2, world_size=8)
    config = DataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
    precision = PrecisionConfig(params="bf16")
    changed = plan(layer_config(feed_forward=moe_config()), parallel, data_parallel=config, precision=precision)
    found = {each.what: each for each in predicted(changed) if each.group in ("dp_cp", "edp")}
    experts = 2 * 4 * 3 * 32 * 24
    EXACT.check(found["gradients: experts"].bytes, experts * 4 * 3 / 4)
    EXACT.check(found["weights: experts"].bytes, experts * 2 * 3 / 4)
    assert found["gradients: experts"].hidden and not found["weights: experts"].hidden
    plain = plan(layer_config(feed_forward=moe_config()), parallel, precision=precision)
    reduced = {each.what: each for each in predicted(plain) if each.group == "edp"}
    assert list(reduced) == ["gradients: experts"]
    EXACT.check(reduced["gradients: experts"].bytes, 2 * experts * 4 * 3 / 4)
    # Counts the bytes of stored weights and the all-reduced magnitudes of their blocks in bf16. Sharded weights of the
    # only layer are gathered once, too.
    recipes = (("tensorwise", 1), ("mxfp8", 2 + 2 * 4 / 32), ("nvfp4", 1 / 2 + 2 * 2 / 16**2))
    for (recipe, per_weight), fsdp in product(recipes, (None, FSDPConfig(shards_weights=False), FSDPConfig())):
        stored = replace(precision, low_precision=low_precision_config(recipe), low_precision_params=True)
        run = replace(changed, precision=stored, data_parallel=replace(config, fsdp=fsdp))
        sent = {each.what: each.bytes for each in predicted(run) if each.group == "edp"}
        EXACT.check(sent["weights: experts"], experts * per_weight * 3 / 4, recipe)


def test_pipeline_ranks_send_states_forward_and_gradients_back():
    parallel = ParallelConfig(pp=2, world_size=2)
    changed = plan(layer_config(), parallel)
    for rank in (0, 1):
        (traffic,) = (each for each in predicted(changed, rank) if each.group == "pp")
        assert traffic.bytes == BATCH * SEQ * 32 * FP32  # one way each


def test_all_depths_are_sent_to_the_head():
    """Two depths of prediction have a stage between the layers and the head."""
    changed = plan(layer_config(), ParallelConfig())
    model = replace(changed.model, mtp=MTPConfig(num_layers=2))
    layout = parse_layout("Ett|mm|L", pp=3, num_layers=2, num_mtp=2)
    parallel = ParallelConfig(pp=3, world_size=3)
    changed = replace(changed, model=model, parallel=parallel, pipeline=PipelineConfig(layout=layout))
    found = [sum(each.bytes for each in predicted(changed, rank) if each.group == "pp") for rank in range(3)]
    assert [size / (BATCH * SEQ * 32 * FP32) for size in found] == [1, 1 + 3, 3]


def test_a_ring_over_nodes_shares_the_ports_of_its_neighbours():
    """A ring of 32 data-parallel ranks on 4 nodes leaves each node once and uses all of its 8 ports."""
    parallel = ParallelConfig(world_size=32)
    changed = plan(layer_config(), parallel)
    (traffic,) = predicted(changed)
    assert traffic.network_bytes == traffic.bytes * 4 / 32
    FP64_REF.check(traffic.seconds(H100), traffic.network_bytes / H100.network / 0.7)


@pytest.mark.parametrize(
    ("ranks_per_host", "rank", "num_hosts"),
    [(6, None, 2), (6, 0, 1), (6, 5, 2), (6, 11, 1), (3, None, 4), (8, None, 1)],
)
def test_groups_of_four_ranks_are_split_by_host(ranks_per_host, rank, num_hosts):
    """On hosts of 6 ranks, the groups are on 1, 2 and 1 hosts; on hosts of 3, each rank counts as a host."""
    parallel = ParallelConfig(ep=4, world_size=24, ranks_per_host=ranks_per_host)
    copies = token_copies(RouterConfig(hidden_size=8, num_experts=8, topk=2), parallel, rank=rank)
    assert (copies.num_hosts, copies.ranks_per_host) == (num_hosts, 4 // num_hosts)


def test_the_example_of_the_document_is_what_the_formulas_give():
    document = (Path(__file__).resolve().parents[2] / "docs" / "communication-volume.md").read_text(encoding="utf-8")
    router = RouterConfig(hidden_size=7168, num_experts=256, topk=8, num_groups=8, group_topk=4)
    experts = replace(moe_config().experts, num_experts=256, hidden_size=7168)
    sizes = ActivationSizes(residual=2048, inner=4096, activation_itemsize=2, internal_itemsize=4, length=4096)
    parallel = ParallelConfig(ep=64, world_size=64, ranks_per_host=8)
    exchange = MoEConfig(router=router, experts=experts).exchange(parallel, sizes, None)
    traffic = expert_traffic(exchange, 64, 8, sizes)
    rows = expected_maximum(traffic.rows_taken, 64)
    copies = token_copies(exchange, parallel)
    row = 2048 * (7168 * 2 + 8 * 8) * 7 / 8
    for figure in (
        f"{copies.per_token * row / 1e6:.0f} MB between hosts and {copies.forwarded * row / 1e6:.0f} MB within hosts",
        f"{traffic.ranks.mean:.2f} +- {traffic.ranks.std:.2f} ranks",
        f"{traffic.domains.mean:.2f} +- {traffic.domains.std:.2f}\nnodes",
        f"{traffic.rows_taken.mean:,.0f} +- {traffic.rows_taken.std:.0f} rows, the fullest about {rows:,.0f}",
        f"{traffic.rows_sent * traffic.row_bytes / 1e6:.0f} MB",
        f"{traffic.copies_sent * traffic.row_bytes / 1e6:.0f} MB with a copy per rank",
        f"{traffic.copies_sent * traffic.low_row_bytes / 1e6:.0f} MB with copies in FP8",
    ):
        assert figure in document
