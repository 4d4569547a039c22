"""Memory of the cost model: state compared with built tensors, activations with values computed by hand."""

from collections import Counter
from dataclasses import replace

import pytest

from megatron_moe.config.memory import ActivationOffloadConfig, MemoryConfig, RecomputeConfig
from megatron_moe.config.model import ModelConfig, MTPConfig, with_experts
from megatron_moe.config.optimizer import OptimizerConfig, OptimizerOffloadConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.pipeline_layout import PipelineLayout, even_layout, parse_layout
from megatron_moe.config.precision import PrecisionConfig, low_precision_config
from megatron_moe.config.run import RunPlan
from megatron_moe.config.training import BatchConfig
from megatron_moe.cost_model.hardware import GIB
from megatron_moe.cost_model.memory import RankBytes, RankMemory, rank_with_peak_memory
from megatron_moe.cost_model.shards import LocalElements, elements_of_layer, elements_of_rank
from megatron_moe.cost_model.state_memory import state_bytes
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.model.gpt import GPT
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.grad_buffers import GradBuffers
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import named_parameters
from tests.helpers import tiny, zoo
from tests.helpers.tolerances import CLOSED_FORM, PUBLISHED_MEMORY

BF16 = PrecisionConfig(params="bf16")
KERNELS = reference.bundle()


def zoo_model(name: str) -> ModelConfig:
    """Config of a published architecture with all-to-all dispatch."""
    (row,) = (row for row in zoo.zoo_rows() if str(row) == name)
    return with_experts(zoo.model_config(row), lambda moe: replace(moe, dispatcher="alltoall"))


def plan(model: ModelConfig, parallel: ParallelConfig, layout: PipelineLayout, **changes) -> RunPlan:
    """Plan in bf16 with microbatches of one sequence of 4096 tokens and ZeRO-1."""
    return tiny.plan(
        model=model,
        parallel=replace(parallel, virtual_stages=layout.vpp),
        pipeline=PipelineConfig(layout=layout),
        **{
            "precision": BF16,
            "batch": BatchConfig(micro_batch_size=1, global_batch_size=128 * parallel.dp),
            "data": replace(tiny.plan().data, seq_length=4096),
            "data_parallel": DataParallelConfig(use_distributed_optimizer=True),
            **changes,
        },
    )


def with_standard_permutation(plan: RunPlan) -> RunPlan:
    """The plan with --no-moe-memory-efficient-permutation."""
    model = with_experts(plan.model, lambda moe: replace(moe, experts=replace(moe.experts, probs_on_output=True)))
    return replace(plan, model=model)


DEEPSEEK = plan(
    zoo_model("DeepSeek-V3"),
    ParallelConfig(pp=4, ep=64, world_size=256),
    parse_layout("Et*4|(tttt|)*14tmL", pp=4, num_layers=61, num_mtp=1),
)


def of_rank(changed: RunPlan, rank: int = 1) -> RankBytes:
    return RankMemory(changed).of_rank(rank)


def test_the_anatomy_of_deepseek_v3_is_the_published_one():
    """The table of "Scalable Training of Mixture-of-Experts Models with Megatron Core" for PP4 x VPP4 x EP64 on 256
    GPUs, bf16, no recompute, read as GiB of a middle stage with 16 MoE layers. Its activations are those of another
    program: 1,973 MiB for each of the 68 layers in flight on pipeline rank 1 (17 chunks of 4), where ours keep 1,911.
    """
    middle = of_rank(DEEPSEEK)
    state = middle.state
    PUBLISHED_MEMORY.check((state.weights + state.gradients) / GIB, 36.4, "weights and gradients")
    PUBLISHED_MEMORY.check((state.master + state.moments) / GIB, 32.1, "main weights and optimizer states")
    PUBLISHED_MEMORY.check(middle.activation_bytes / GIB, 131.0, "activations")
    assert middle.in_flight == 17


LAYOUTS = {
    "deepseek-v3": (
        zoo_model("DeepSeek-V3"),
        ParallelConfig(tp=2, pp=8, ep=64, etp=1, world_size=1024, sequence_parallel=True),
        parse_layout("Et|(tt|)*30mL", pp=8, num_layers=61, num_mtp=1),
        (0, 511, 1023),
    ),
    "qwen3-30b": (zoo_model("Qwen3-30B-A3B"), ParallelConfig(ep=8, world_size=32), even_layout(48), (0, 31)),
    "qwen3-30b, two ranks per query group": (
        zoo_model("Qwen3-30B-A3B"),
        ParallelConfig(tp=8, ep=8, etp=1, world_size=8, sequence_parallel=True),
        even_layout(48),
        (0, 7),
    ),
    "mixtral with sliced experts": (
        zoo_model("Mixtral-8x22B"),
        ParallelConfig(tp=4, pp=2, ep=4, etp=2, cp=2, world_size=64, sequence_parallel=True),
        even_layout(56, pp=2, vpp=2),
        (0, 63),
    ),
    "a tied head, learned positions, a repeated layer ahead": (
        replace(
            zoo_model("OLMoE-1B-7B"),
            tied_embeddings=True,
            position_embedding="learned_absolute",
            mtp=MTPConfig(num_layers=2, repeated_layer=True),
        ),
        ParallelConfig(tp=2, pp=4, ep=2, world_size=16, sequence_parallel=True),
        even_layout(16, pp=4, num_mtp=2),
        (0, 15),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("sharded", [False, True])
def test_state_bytes_equal_those_of_the_built_tensors(name, sharded):
    model, parallel, layout, ranks = LAYOUTS[name]
    data_parallel = DataParallelConfig(use_distributed_optimizer=sharded)
    changed = plan(model, parallel, layout, data_parallel=data_parallel)
    for rank in ranks:
        context = ParallelContext.fake(
            replace(parallel, embedding_ranks=layout.embedding_ranks(tied=model.tied_embeddings)), rank
        )
        try:
            stage = context.group("pp").rank
            net = GPT(model, context, KERNELS, chunks=layout.chunks(stage))
            held = Counter({parameter.meta.grid: 0 for _, parameter in named_parameters(net)})
            for _, parameter in named_parameters(net):
                held[parameter.meta.grid] += parameter.numel()
            buffers = GradBuffers(named_parameters(net), BF16, context, KERNELS, data_parallel=data_parallel)
            states = Optimizer(buffers, BF16).states
        finally:
            context.stop()
        counted = elements_of_rank(model, layout, stage, parallel)
        assert counted == LocalElements(attention=held["attention"], expert=held["expert"])
        expected = state_bytes(changed, counted, LocalElements())
        made = {
            "weights": sum(buffer.weights.nbytes for buffer in buffers.buffers),
            "gradients": sum(buffer.grads.nbytes for buffer in buffers.buffers),
            "master": sum(state.stored.master.num_bytes for state in states),
            "moments": sum(each.num_bytes for state in states for each in state.stored.states.values()),
        }
        for kind, size in made.items():
            CLOSED_FORM.check(getattr(expected, kind), float(size), f"{kind} of rank {rank}")


def test_the_state_of_a_rule_for_matrices_follows_its_declaration():
    model, parallel = zoo_model("OLMoE-1B-7B"), ParallelConfig(ep=2, world_size=4)
    optimizer, data_parallel = OptimizerConfig(optimizer="muon"), DataParallelConfig(use_distributed_optimizer=True)
    changed = plan(model, parallel, even_layout(16), data_parallel=data_parallel, optimizer=optimizer)
    sizes = []
    for rank in range(4):
        context = ParallelContext.fake(parallel, rank)
        try:
            buffers = GradBuffers(
                named_parameters(GPT(model, context, KERNELS)),
                BF16,
                context,
                KERNELS,
                optimizer=optimizer,
                data_parallel=data_parallel,
            )
            states = Optimizer(buffers, BF16).states
        finally:
            context.stop()
        sizes.append(sum(each.num_bytes for state in states for each in state.stored.states.values()))
    state = RankMemory(changed).state_of_rank(0)
    CLOSED_FORM.check(state.moments, max(sizes), "state of the rules")
    adam = RankMemory(replace(changed, optimizer=OptimizerConfig())).state_of_rank(0)
    assert 0.5 * adam.moments < state.moments < 0.55 * adam.moments


@pytest.mark.parametrize(
    ("precision", "replicated", "sharded"),
    [
        (BF16, 6, 12),
        (replace(BF16, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"), 6, 8),
        (replace(BF16, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8", grads="bf16"), 4, 6),
        (PrecisionConfig(params="fp32"), 8, 8),
    ],
)
def test_state_bytes_per_parameter(precision, replicated, sharded):
    parallel = replace(DEEPSEEK.parallel, pp=1, ep=1)
    changed = replace(DEEPSEEK, parallel=parallel, precision=precision)
    state = state_bytes(changed, LocalElements(attention=1000), LocalElements())
    assert state.total == 1000 * (replicated + sharded / parallel.dp)


def test_norms_and_router_are_not_stored_in_low_precision():
    layer = DEEPSEEK.model.layers[30]
    low = elements_of_layer(layer, DEEPSEEK.parallel, low=True)
    whole = elements_of_rank(DEEPSEEK.model, DEEPSEEK.layout, 1, DEEPSEEK.parallel)
    norms = 2 * 7168 + 1536 + 512
    assert low.attention == whole.attention // 16 - norms - 256 * 7168
    assert low.expert == whole.expert // 16


def with_recompute(*modules: str) -> RunPlan:
    config = RecomputeConfig(recompute_modules=modules)
    return replace(DEEPSEEK, memory=MemoryConfig(recompute=config))


@pytest.mark.parametrize(
    ("module", "mebibytes"),
    [
        ("mla_up_proj", 192 + 192 + 256),  # q, k, and the product that has v
        ("moe_act", 128),
        ("layernorm", 2 * 56),
        ("shared_experts", 48),
        ("core_attn", 2),
    ],
)
def test_selective_recompute_frees_its_tensors_of_every_layer_in_flight(module, mebibytes):
    saved = of_rank(DEEPSEEK).activation_bytes - of_rank(with_recompute(module)).activation_bytes
    assert saved == 68 * mebibytes * (1 << 20)


def test_moe_recompute_keeps_only_its_input():
    modules = dict(of_rank(with_recompute("moe")).activations)
    assert modules["experts"] == modules["shared"] == modules["router"] == 0
    assert modules["mlp_norm"] == dict(of_rank(DEEPSEEK).activations)["mlp_norm"]


def test_full_recompute_keeps_layer_inputs_and_one_whole_layer():
    config = RecomputeConfig(recompute_method="uniform", recompute_num_layers=1)
    rank = of_rank(replace(DEEPSEEK, memory=MemoryConfig(recompute=config)))
    rotations = 17 * 2 * 4096 * 64 * 4
    assert rank.activation_bytes == 68 * 4096 * 7168 * 2 + rotations
    assert rank.workspace > of_rank(DEEPSEEK).activation_bytes / 68
    every_second = replace(config, recompute_num_layers=2)
    half = of_rank(replace(DEEPSEEK, memory=MemoryConfig(recompute=every_second)))
    assert half.activation_bytes - rotations == (rank.activation_bytes - rotations) / 2
    first_of_stage = of_rank(
        replace(DEEPSEEK, memory=MemoryConfig(recompute=replace(config, recompute_method="block")))
    )
    assert rank.activation_bytes < first_of_stage.activation_bytes < of_rank(DEEPSEEK).activation_bytes


def test_recomputed_groups_have_at_most_the_layers_of_a_chunk():
    config = RecomputeConfig(recompute_method="uniform", recompute_num_layers=4)
    whole = of_rank(replace(DEEPSEEK, memory=MemoryConfig(recompute=config)))
    assert max(len(chunk.layers) for chunk in DEEPSEEK.layout.chunks(1)) == 4
    more = of_rank(replace(DEEPSEEK, memory=MemoryConfig(recompute=replace(config, recompute_num_layers=100))))
    assert more == whole


def test_offloaded_tensors_are_on_the_host_except_for_the_current_layer():
    config = ActivationOffloadConfig(offload_modules=("expert_fc1", "moe_act"))
    before, after = of_rank(DEEPSEEK), of_rank(replace(DEEPSEEK, memory=MemoryConfig(offload=config)))
    moved = 68 * (448 + 256) * (1 << 20)
    assert after.on_host == before.activation_bytes - after.activation_bytes == moved
    assert after.workspace - before.workspace == moved / 68
    half = of_rank(replace(DEEPSEEK, memory=MemoryConfig(offload=replace(config, activation_offload_fraction=0.5))))
    assert half.on_host == moved / 2
    assert (
        of_rank(
            replace(DEEPSEEK, memory=MemoryConfig(offload=replace(config, min_offloaded_tensor_size=1 << 40)))
        ).on_host
        == 0
    )


def test_later_stages_offload_less():
    config = ActivationOffloadConfig(offload_modules=("expert_fc1",), delta_offload_bytes_across_pp_ranks=1 << 20)
    moved = of_rank(
        replace(DEEPSEEK, memory=MemoryConfig(offload=replace(config, delta_offload_bytes_across_pp_ranks=0)))
    )
    some = of_rank(replace(DEEPSEEK, memory=MemoryConfig(offload=config)))
    assert some.activation_bytes - moved.activation_bytes == moved.on_host - some.on_host == 17 * (1 << 20)
    everything = of_rank(
        replace(DEEPSEEK, memory=MemoryConfig(offload=replace(config, delta_offload_bytes_across_pp_ranks=1 << 40)))
    )
    assert everything.on_host == 0


def test_imbalance_affects_expert_rows_only():
    even, uneven = (RankMemory(DEEPSEEK, imbalance).of_rank(1) for imbalance in (1.0, 1.5))
    before, after = dict(even.activations), dict(uneven.activations)
    assert after.pop("experts") == 1.5 * before.pop("experts")
    assert after == before and uneven.state == even.state and uneven.dispatch > even.dispatch


def test_remainders_are_two_bytes_of_a_master_weight():
    narrow = of_rank(replace(DEEPSEEK, precision=replace(BF16, store_param_remainders=True))).state
    whole = of_rank(DEEPSEEK).state
    assert narrow.master == whole.master / 2 and narrow.moments == whole.moments


def test_offloaded_state_is_on_the_device_during_the_update():
    offload = MemoryConfig(offload=ActivationOffloadConfig(optimizer_fraction=1.0))
    optimizer = replace(DEEPSEEK.optimizer, offload=OptimizerOffloadConfig(fraction=1.0))
    parked, whole = of_rank(replace(DEEPSEEK, memory=offload, optimizer=optimizer)), of_rank(DEEPSEEK)
    assert parked.staging == whole.state.master + whole.state.moments
    assert parked.total == parked.state.total + max(parked.staging, whole.total - whole.state.total)
    chunked = replace(optimizer, offload=OptimizerOffloadConfig(fraction=1.0, chunk_bytes=1 << 30))
    assert of_rank(replace(DEEPSEEK, memory=offload, optimizer=chunked)).staging == 2 * (1 << 30)


def test_optimizer_offload_removes_state_from_the_device():
    offload = ActivationOffloadConfig(optimizer_fraction=1.0)
    state = of_rank(replace(DEEPSEEK, memory=MemoryConfig(offload=offload))).state
    assert state.master == state.moments == 0
    assert state.weights == of_rank(DEEPSEEK).state.weights


def test_fp8_halves_the_inputs_of_expert_gemms():
    """The paper gives about 16 GB for the expert inputs of DeepSeek-V3, with 60 layers in flight on pipeline rank 2."""
    low = of_rank(replace(DEEPSEEK, precision=replace(BF16, low_precision=low_precision_config("tensorwise"))), 2)
    saved = dict(of_rank(DEEPSEEK, 2).activations)["experts"] - dict(low.activations)["experts"]
    assert saved == 60 * (448 + 128) / 2 * (1 << 20)


def test_deepep_has_smaller_buffers_and_sums_the_rows_of_all_tokens_first():
    model = with_experts(zoo_model("DeepSeek-V3"), lambda moe: replace(moe, dispatcher="flex"))
    parallel = ParallelConfig(ep=8, world_size=8, ranks_per_host=8)

    def on_library(name: str) -> RankBytes:
        named = with_experts(model, lambda moe: replace(moe, transport_backend=name))
        return of_rank(plan(named, parallel, even_layout(61)), 0)

    # the size is channels x ranks x tokens x (row, source, ids, weights and scales)
    assert on_library("deepep").receive_slots == 10 * 8 * 256 * (7168 * 2 + 8 + 128 * 16)
    assert on_library("symmetric").receive_slots == 2 * 8 * 4096 * (7168 * 2 + 8 * 8)
    assert on_library("deepep").dispatch == 9 * on_library("symmetric").dispatch


def test_only_ranks_with_equal_stages_share_results():
    held = [elements_of_rank(DEEPSEEK.model, DEEPSEEK.layout, rank, DEEPSEEK.parallel) for rank in range(4)]
    assert held[1] == held[2] and len(set(held)) == 3
    ranks = RankMemory(DEEPSEEK).all_ranks()
    assert [each.parameters for each in ranks] == held
    ends = [{"embedding", "head", "mtp", "final_norm"} & set(dict(each.activations)) for each in ranks]
    assert ends == [{"embedding"}, set(), set(), {"mtp", "head", "final_norm"}]


def test_the_heaviest_rank_is_the_one_with_the_largest_total():
    ranks = RankMemory(DEEPSEEK).all_ranks()
    assert rank_with_peak_memory(ranks).total == max(rank.total for rank in ranks)
    assert [rank.in_flight for rank in ranks] == [19, 17, 15, 13]
