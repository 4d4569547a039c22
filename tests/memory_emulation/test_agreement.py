"""Memory of the cost model agrees with that of memory emulation for every shipped recipe.

`python -m tests.memory_emulation.test_agreement [RECIPE ...]` prints the table of
`benchmarks/2026-11-21-2-cores-agreement.md`, by default for all recipes.
"""

import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import pytest
import torch

from arguments import plan_search, plan_settings
from arguments.checks.run import broken_rules
from arguments.dry_run.cluster import DEFAULT_GPU
from arguments.flags import Registry
from arguments.parser import Settings
from arguments.proxy.rewrite import Draft
from arguments.recipes import about_of_recipe, recipe_names
from megatron_moe.config.attention import ContextExchange
from megatron_moe.config.echo import EchoConfig
from megatron_moe.config.emulation import EmulationConfig
from megatron_moe.config.fsdp import FSDPConfig
from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.config.memory import ActivationOffloadConfig, MemoryConfig, RecomputeConfig
from megatron_moe.config.model import MTPConfig, with_experts
from megatron_moe.config.optimizer import OptimizerOffloadConfig
from megatron_moe.config.parallel import DataParallelConfig, ProcessInfo
from megatron_moe.config.precision import low_precision_config
from megatron_moe.config.run import RunPlan
from megatron_moe.config.transport import PushConfig
from megatron_moe.cost_model.hardware import GIB, GPUS
from megatron_moe.cost_model.memory import LATE, RankBytes, RankMemory, rank_with_peak_memory
from megatron_moe.memory_emulation.rank import emulate_rank
from megatron_moe.parallel.grid import all_groups
from tests.cost_model.test_memory import with_standard_permutation
from tests.helpers.thinned import nightly_only, thinned

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

REGISTRY = Registry.declared()
WITHIN = 0.03
"""Relative tolerance of the total memory."""
SMALL = ("quickstart", "q6", "m8", "ds4", "olmoe-1b-7b-h100-8")
STATE = ("weights", "gradients", "master weights", "moments")


@dataclass(frozen=True)
class Compared:
    """Memory of the rank with the highest peak, by emulation and by the cost model."""

    emulated: dict[str, int]
    """Emulated bytes at the peak, by category."""
    closed: RankBytes

    @property
    def peak(self) -> int:
        return sum(self.emulated.values())

    @property
    def ratio(self) -> float:
        """Emulated memory divided by that of the cost model."""
        return self.peak / self.closed.total


def without_hardware(recipe: str, *, graphs: bool = False) -> tuple[Settings, list[str]]:
    """Returns the settings of a recipe without features that need other hardware, and the flags that were reset.

    These features are dispatcher libraries, FP8, the paged stash and, unless `graphs`, CUDA graphs.
    """
    settings = plan_search.settings_of(["--recipe", recipe], REGISTRY)
    draft = Draft(settings, {})
    if draft.value("moe_token_dispatcher_type") == "flex":
        draft.override("moe_token_dispatcher_type", "alltoall", "no such library here")
    of_graphs = ("cuda_graph_impl", "cuda_graph_modules", "delay_offload_until_cuda_graph")
    for name in ("moe_paged_stash", *(() if graphs else of_graphs)):
        draft.reset("only with other hardware", name)
    for name, flag in REGISTRY.flags.items():
        waits = draft.settings.known(name) and not flag.available(draft.value(name))
        if waits and (flag.group == "precision" or flag.declaration.harmless):
            draft.reset("not available", name)
    changed = [name for name, old in settings.values.items() if draft.settings.setting(name).value != old.value]
    return draft.settings, [REGISTRY.flags[name].option for name in changed]


def missing(settings: Settings, world_size: int) -> list[str]:
    """Lists the requested features that are unavailable and the rules that the flags violate."""
    flags = REGISTRY.flags
    found = [
        flag.option
        for name, flag in flags.items()
        if settings.known(name) and not flag.available(settings.setting(name).value)
    ]
    broken = broken_rules(settings, ProcessInfo(world_size=world_size, launcher="dry run"))
    return found + [problem.what for problem in broken]


@cache
def plan_of(recipe: str, *, graphs: bool = False) -> RunPlan:
    """Builds the plan of a recipe without features that need other hardware."""
    settings, _ = without_hardware(recipe, graphs=graphs)
    wanted = about_of_recipe(recipe, REGISTRY)
    assert not missing(settings, wanted.gpus), f"{recipe}: {missing(settings, wanted.gpus)}"
    return plan_settings.plan_as_given(settings, GPUS[wanted.gpu or DEFAULT_GPU], wanted.gpus)


def shallow(recipe: str, num_layers: int = 3) -> RunPlan:
    """Returns the plan of a recipe with its first layers only, which differ in kind as all its layers do."""
    plan = plan_of(recipe)
    layers = plan.model.layers[:num_layers]
    return replace(plan, model=replace(plan.model, layers=layers), pipeline=replace(plan.pipeline, layout=None))


def compare(plan: RunPlan, dp_rank: int = 0) -> Compared:
    """Emulates the pipeline rank with the highest peak according to the cost model. `dp_rank`: index of its copy."""
    plan = replace(plan, emulation=EmulationConfig(), device="cpu")
    closed = rank_with_peak_memory(RankMemory(plan).all_ranks())
    rank = all_groups(plan.parallel)["pp"][dp_rank][closed.rank]
    return Compared(dict(emulate_rank(plan, rank, torch.device("meta")).timeline.peak().categories), closed)


def line(recipe: str, found: Compared, taken_back: list[str]) -> str:
    """Formats one row of the table."""
    closed, emulated = found.closed, found.emulated
    at_work = found.peak - emulated["activations"] - sum(emulated[name] for name in STATE)
    cells = [
        recipe,
        str(closed.rank),
        *(f"{size / GIB:.2f}" for size in (found.peak, closed.total)),
        f"{found.ratio:.4f}",
        f"{emulated['activations'] / GIB:.2f} / {closed.activation_bytes / GIB:.2f}",
        f"{at_work / GIB:.2f} / {(closed.total - closed.state.total - closed.activation_bytes) / GIB:.2f}",
        " ".join(f"`{flag}`" for flag in taken_back),
    ]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", SMALL)
def test_closed_form_and_emulation_agree(name: str) -> None:
    assert abs(compare(plan_of(name)).ratio - 1) < WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recipe_names() if name not in SMALL])
def test_closed_form_and_emulation_agree_for_every_recipe(name: str) -> None:
    assert abs(compare(plan_of(name)).ratio - 1) < WITHIN


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "moe recomputed"])
def test_kimi_delta_attention_agrees(recomputed: bool) -> None:
    """Five layers of Kimi-Linear on eight ranks, of which four have Kimi delta attention."""
    sizes = "--num-layers 5 --moe-layer-freq [0,1,1,1,1] --linear-attention-freq [1,1,0,1,1] --num-experts 32"
    layout = "--pipeline-model-parallel-layout EtttttL --pipeline-model-parallel-size 1 --global-batch-size 16"
    words = f"--recipe kimi-linear-48b-a3b-h100-64 {sizes} {layout} --moe-token-dispatcher-type alltoall"
    settings = plan_search.settings_of(words.split(), REGISTRY)
    plan = plan_settings.plan_as_given(settings, GPUS["h100"], 8)
    if not recomputed:
        plan = replace(plan, memory=replace(plan.memory, recompute=RecomputeConfig()))
    found = compare(plan)
    assert abs(found.ratio - 1) < 0.001
    assert abs(found.emulated["activations"] / found.closed.activation_bytes - 1) < 0.001


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recipe_names() if "nemotron-3" in name] + ["deepseek-v3-gb200-256"])
def test_hybrid_models_and_padded_experts_agree_within_a_percent(name: str) -> None:
    assert abs(compare(plan_of(name)).ratio - 1) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek-v3-gb200-256"])
def test_graphs_of_captured_modules_agree_within_half_a_percent(name: str) -> None:
    """PP4 and VPP4 with overlapped exchanges; attention is captured in every memory slot of the schedule."""
    plan = plan_of(name, graphs=True)
    assert plan.cuda_graphs.cuda_graph_modules and plan.pipeline.overlap
    found = compare(plan)
    assert found.emulated["graph pools"] > 0.3 * found.peak
    assert abs(found.ratio - 1) < 0.005


FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OFFLOAD = "--fine-grained-activation-offloading --offload-modules qkv_linear core_attn attn_proj"


PREDICTION = "--mtp-num-layers 1 --pipeline-model-parallel-layout Et|tt|tt|ttmL"
DELAYED = [
    (0, ""),
    (1, OFFLOAD),
    (2, ""),
    (2, FULL_RECOMPUTE),
    (2, "--attention-dropout 0.1"),
    (3, ""),
    (3, PREDICTION),
]


@pytest.mark.parametrize(("rank", "options"), thinned(DELAYED))
def test_delayed_weight_gradients_agree_on_every_stage(rank: int, options: str) -> None:
    """Later ranks hold more microbatches whose weight gradients are not computed; the last one also those of the
    logits. Recomputed and offloaded operands remain on the device until then."""
    sizes = "--recipe m27 --num-layers 7 --moe-layer-freq ([0]*1+[1]*6) --pipeline-model-parallel-layout Et|tt|tt|ttL"
    words = f"{sizes} --pipeline-model-parallel-size 4 --expert-model-parallel-size 1 --delay-wgrad-compute {options}"
    plan = plan_settings.plan_as_given(plan_search.settings_of(words.split(), REGISTRY), GPUS["h200"], 4)
    closed = RankMemory(plan).of_rank(rank)
    plan = replace(plan, emulation=EmulationConfig(), device="cpu")
    emulated = emulate_rank(plan, rank, torch.device("meta")).timeline.peak().categories
    assert abs(sum(emulated.values()) / closed.total - 1) < 0.025
    others = sum(size for name, size in closed.activations if name != LATE)
    assert (LATE in dict(closed.activations)) == (rank > 0)
    assert (others > 0) == (rank < 3), "on the last rank, all microbatches wait at the peak"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mebibytes"), [("m27", 108_984), ("q24", 97_922)])
def test_peak_over_four_gpus_is_at_most_that_of_megatron(name: str, mebibytes: int) -> None:
    """The limits are Megatron-Core's peaks, measured on four H200 GPUs."""
    compared = compare(plan_of(name))
    assert max(compared.peak, compared.closed.total) <= mebibytes << 20


def test_standard_permutation_saves_the_expert_outputs() -> None:
    plan = shallow("m8")
    efficient, standard = compare(plan), compare(with_standard_permutation(plan))
    rows, num_moe = 2 * 4096 * 6, sum(layer.is_moe for layer in plan.model.layers)
    expected = num_moe * rows * plan.model.hidden_size * 2
    assert standard.emulated["activations"] - efficient.emulated["activations"] == expected
    assert standard.closed.activation_bytes - efficient.closed.activation_bytes == expected
    assert abs(standard.ratio - 1) < WITHIN


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "mxfp8", "nvfp4"])
def test_low_precision_copies_agree(recipe: str) -> None:
    """Emulation and cost model include quantised weights and saved columnwise copies.

    Cases have some layers in bf16, or all or expert weight gradients in bf16.
    """
    plan = shallow("q6", 4)
    some_layers = {"layers_at_start": 2, "layers_at_end": 1}
    for options in (some_layers, {"expert_weight_grad": False}, {"weight_grad": False}):
        low = replace(plan.precision, low_precision=low_precision_config(recipe, **options))
        found = compare(replace(plan, precision=low))
        assert abs(found.ratio - 1) < 0.002
    without = replace(plan, precision=replace(plan.precision, low_precision=None))
    if low.low_precision.fused_block is None:
        assert found.closed.activation_bytes == compare(without).closed.activation_bytes, (
            "the original inputs are saved"
        )
    else:
        assert found.closed.activation_bytes < compare(without).closed.activation_bytes, (
            "neither expert rows nor activations are saved"
        )


@pytest.mark.parametrize("fraction", [0.0, 1.0], ids=["", "state in host memory"])
@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "mxfp8", "nvfp4"])
def test_weights_stored_in_low_precision_agree(recipe: str, fraction: float) -> None:
    """Low-precision bytes and scales replace bf16 weights and their copies; master weights are full fp32 weights."""
    plan = shallow("q6", 4)
    config = low_precision_config(recipe, layers_at_start=2, layers_at_end=1)
    low = replace(plan.precision, low_precision=config, low_precision_params=True)
    sharded = replace(plan.data_parallel, use_distributed_optimizer=True)
    memory = replace(plan.memory, offload=replace(plan.memory.offload, optimizer_fraction=fraction))
    state = OptimizerOffloadConfig(fraction=fraction, cpu_step=True)
    plan = replace(plan, memory=memory, optimizer=replace(plan.optimizer, offload=state))
    found = compare(replace(plan, precision=low, data_parallel=sharded))
    assert abs(found.ratio - 1) < 0.002
    for category, size in (("weights", found.closed.state.weights), ("master weights", found.closed.state.master)):
        assert found.emulated[category] == pytest.approx(size, rel=0.002), category


@pytest.mark.parametrize("weight_grad", [False, True])
def test_workspace_of_fused_casts_agrees(weight_grad: bool) -> None:
    plan = plan_of("x2")
    low = low_precision_config("blockwise", weight_grad=weight_grad)
    found = compare(replace(plan, precision=replace(plan.precision, low_precision=low)))
    assert abs(found.ratio - 1) < 0.003


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_output_layer_in_low_precision_agrees(recipe: str, stored: bool) -> None:
    """Quantised copies of the gradient of the logits are the largest tensors of this run."""
    plan = shallow("q6", 4)
    low = low_precision_config(recipe, output_layer=True)
    precision = replace(plan.precision, low_precision=low, low_precision_params=stored)
    sharded = replace(plan.data_parallel, use_distributed_optimizer=True)
    model = replace(plan.model, loss_chunk=None)
    found = compare(replace(plan, model=model, precision=precision, data_parallel=sharded))
    assert found.emulated["workspace"] > 0.03 * found.peak
    assert abs(found.ratio - 1) < 0.002


def test_activation_inputs_in_fp8_agree() -> None:
    plan = shallow("m8")
    plain, low = (
        compare(replace(plan, precision=replace(plan.precision, low_precision=config)))
        for config in (low_precision_config("blockwise"), low_precision_config("blockwise", activation_inputs=True))
    )
    assert abs(low.ratio - 1) < 0.002
    saved = plain.emulated["activations"] - low.emulated["activations"]
    assert plain.closed.activation_bytes - low.closed.activation_bytes == pytest.approx(saved, rel=0.001)
    # Activation inputs are gate and up of 6 experts per token and of shared experts in two MoE layers, and those of
    # one dense MLP.
    elements = 2 * 8192 * (2 * (6 * 1408 + 2816) + 11264)
    assert saved == pytest.approx(elements * (1 - 4 / 128), rel=0.001)


@pytest.mark.parametrize("module", ["qkv_linear", "attn_proj"])
@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_modules_that_save_activations_in_low_precision_agree(recipe: str, module: str) -> None:
    """MLA's input projections share one FP8 copy; attention output is saved in FP8 only if attention is recomputed."""
    plan = shallow("m8")
    recompute = RecomputeConfig(recompute_modules=("core_attn",))
    none, one = (low_precision_config(recipe, activation_modules=modules) for modules in ((), (module,)))
    for each in (plan, replace(plan, memory=MemoryConfig(recompute=recompute))):
        original, low = (
            compare(replace(each, precision=replace(plan.precision, low_precision=config))) for config in (none, one)
        )
        saved = original.emulated["activations"] - low.emulated["activations"]
        assert original.closed.activation_bytes - low.closed.activation_bytes == pytest.approx(saved, rel=0.01)
        if module == "attn_proj":
            assert bool(saved) == (each is not plan)
        else:
            # FP8 takes half the memory of the normed latents and, if projections share a copy, of the hidden states.
            width = 512 + (2048 if recipe == "blockwise" else 0)
            assert saved == pytest.approx(3 * 8192 * width, rel=0.04)


def test_low_precision_under_sequence_parallelism_agrees() -> None:
    """Inputs of column-parallel matrices are saved as sequence shards, before they are gathered and quantised."""
    plan = shallow("q6", 4)
    parallel = replace(plan.parallel, tp=2, etp=2, world_size=2, sequence_parallel=True)
    low = replace(plan.precision, low_precision=low_precision_config("blockwise"))
    assert abs(compare(replace(plan, parallel=parallel, precision=low)).ratio - 1) < WITHIN


@pytest.mark.parametrize("weight_grad", thinned([True, False]))
def test_workspace_of_long_sequences_in_fp8_agrees(weight_grad: bool) -> None:
    """The gathered output gradient of a dense MLP and its quantised copies are the largest tensors of this run."""
    plan = shallow("m8")
    model = replace(plan.model, layers=plan.model.layers[:1] * 3, loss_chunk=1024)
    memory = MemoryConfig(recompute=RecomputeConfig(recompute_method="uniform", recompute_num_layers=1))
    parallel = replace(plan.parallel, tp=8, world_size=8, sequence_parallel=True)
    low = low_precision_config("blockwise", weight_grad=weight_grad)
    precision, data = replace(plan.precision, low_precision=low), replace(plan.data, seq_length=32768)
    found = compare(replace(plan, model=model, memory=memory, parallel=parallel, precision=precision, data=data))
    assert found.emulated["workspace"] > 0.2 * found.peak
    assert abs(found.ratio - 1) < WITHIN


def test_delayed_expert_wgrad_keeps_inputs_and_output_gradients() -> None:
    plan = shallow("m8")
    one, two = (
        compare(replace(plan, memory=replace(plan.memory, moe_expert_wgrad_interval=number))) for number in (1, 2)
    )
    rows, num_moe = 2 * 4096 * 6, sum(layer.is_moe for layer in plan.model.layers)
    expected = num_moe * rows * (2 * 2048 + 3 * 1408) * 2
    assert two.closed.activation_bytes - one.closed.activation_bytes == expected
    assert two.peak - one.peak == pytest.approx(expected, rel=1e-3)  # the rest are the ids of one more microbatch
    assert abs(two.ratio - 1) < WITHIN


@pytest.mark.parametrize(
    "memory",
    [
        MemoryConfig(recompute=RecomputeConfig(recompute_modules=("moe", "mla_up_proj", "layernorm"))),
        MemoryConfig(recompute=RecomputeConfig(recompute_method="uniform", recompute_num_layers=1)),
        MemoryConfig(offload=ActivationOffloadConfig(offload_modules=("expert_fc1", "moe_act"))),
        MemoryConfig(
            recompute=RecomputeConfig(recompute_modules=("moe_act", "layernorm")), moe_expert_wgrad_interval=3
        ),
    ],
    ids=["moe", "whole layers", "offload", "weight gradients of experts together"],
)
def test_memory_options_agree(memory: MemoryConfig) -> None:
    assert abs(compare(replace(shallow("m8"), memory=memory)).ratio - 1) < WITHIN


@pytest.mark.parametrize("recomputed", nightly_only(["none", "mhc"], ["none"]))
def test_several_residual_streams_agree(recomputed: str) -> None:
    plan = shallow("m8", 2)
    residual = HyperConnectionsConfig(sinkhorn_iterations=2)
    layers = tuple(replace(layer, residual=residual) for layer in plan.model.layers)
    modules = RecomputeConfig(recompute_modules=(recomputed,))
    model = replace(plan.model, layers=layers)
    found = compare(replace(plan, model=model, memory=MemoryConfig(recompute=modules)))
    assert abs(found.ratio - 1) < 0.001


def test_clones_of_experts_agree() -> None:
    """Weights of clones are kept until backward, or sent again in backward."""
    plan = shallow("m8")

    def compared(echo: EchoConfig | None) -> Compared:
        model = with_experts(
            plan.model, lambda moe: replace(moe, dispatcher="alltoall", transport_backend="nccl", echo=echo)
        )
        return compare(replace(plan, model=model, parallel=replace(plan.parallel, ep=4, world_size=4)))

    kept_weights = EchoConfig(moe_num_echo_experts=16)
    without, kept = compared(None), compared(kept_weights)
    again = compared(replace(kept_weights, moe_echo_recompute_expert_dispatch=True))
    num_moe = sum(layer.is_moe for layer in plan.model.layers)
    weights = num_moe * 4 * 3 * 1408 * 2048 * 2
    assert (
        kept.closed.activation_bytes - without.closed.activation_bytes == weights
        and again.closed.activation_bytes == without.closed.activation_bytes
    )
    assert kept.emulated["activations"] - again.emulated["activations"] == weights
    for each in (without, kept, again):
        assert abs(each.ratio - 1) < WITHIN


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_workspace_of_the_hierarchical_exchange_agrees(ranks_per_host: int) -> None:
    plan = shallow("m8")
    model = replace(
        plan.model,
        layers=tuple(
            replace(layer, feed_forward=replace(layer.feed_forward, dispatcher="alltoall")) if layer.is_moe else layer
            for layer in plan.model.layers
        ),
    )
    parallel = replace(plan.parallel, ep=4, world_size=4, ranks_per_host=ranks_per_host)
    found = compare(replace(plan, model=model, parallel=parallel))
    assert found.closed.receive_slots == 0
    assert abs(found.ratio - 1) < WITHIN
    at_work = found.peak - found.emulated["activations"] - sum(found.emulated[name] for name in STATE)
    closed = found.closed.total - found.closed.state.total - found.closed.activation_bytes
    assert abs(at_work / closed - 1) < 0.1


@pytest.mark.parametrize(
    ("factor", "num_sms", "dispatcher", "backend"),
    [
        (None, None, "flex", "auto"),
        (None, 16, "flex", "auto"),
        (1.1, None, "flex", "auto"),
        (1.1, 16, "flex", "auto"),
        (1.1, None, "flex", "copies"),
        (1.1, None, "alltoall", "auto"),
    ],
)
def test_receive_slots_of_the_flex_dispatcher_agree(
    factor: float | None, num_sms: int | None, dispatcher: Literal["flex", "alltoall"], backend: str
) -> None:
    """The alltoall dispatcher uses the same exchange as flex among the ranks of one host."""
    plan = shallow("m8")
    layers = tuple(
        replace(
            layer,
            feed_forward=replace(
                layer.feed_forward,
                dispatcher=dispatcher,
                transport_backend=backend,
                expert_rank_capacity_factor=factor,
                push=PushConfig(num_sms=num_sms),
            ),
        )
        if layer.is_moe
        else layer
        for layer in plan.model.layers
    )
    parallel = replace(plan.parallel, ep=4, world_size=4, ranks_per_host=4, shares_memory=True)
    found = compare(replace(plan, model=replace(plan.model, layers=layers), parallel=parallel))
    slots = 2 * 4 * 8192 * (2048 * 2 + 6 * (4 + 4))  # channels * ranks * tokens * bytes per token
    assert found.closed.receive_slots == slots
    assert abs(found.ratio - 1) < WITHIN


@pytest.mark.parametrize(
    ("fp8_combine_grad", "options", "formats"),
    [(False, {}, (1, 1)), (True, {}, (1, 0)), (True, {"layers_at_start": 2}, (1, 1)), (True, {"hybrid": True}, (2, 0))],
)
def test_receive_slots_of_fp8_exchanges_agree(
    fp8_combine_grad: bool, options: dict[str, Any], formats: tuple[int, int]
) -> None:
    """There is one channel for tokens per format.

    The formats are FP8 and, if some layers or gradients are not sent in FP8, the activation dtype.
    """
    plan = shallow("m8")
    fields = {"dispatcher": "flex", "expert_rank_capacity_factor": 1.1, "fp8_dispatch": True}
    model = with_experts(plan.model, lambda moe: replace(moe, **fields, fp8_combine_grad=fp8_combine_grad))
    low = low_precision_config("blockwise", weight_grad=False, **options)
    parallel = replace(plan.parallel, ep=4, world_size=4, ranks_per_host=4, shares_memory=True)
    precision = replace(plan.precision, low_precision=low)
    found = compare(replace(plan, model=model, parallel=parallel, precision=precision))
    in_fp8, plain = formats
    slots = 4 * 8192 * (in_fp8 * (2048 + 16 * 4) + (plain + 1) * 2048 * 2 + (in_fp8 + plain + 1) * 6 * (4 + 4))
    assert found.closed.receive_slots == slots
    assert abs(found.ratio - 1) < WITHIN


@pytest.mark.parametrize(("ep", "ranks_per_host", "factor"), [(1, 1, None), (4, 4, 1.1), (4, 2, None)], ids=str)
def test_padding_of_expert_rows_and_indices_of_received_tokens_agree(
    ep: int, ranks_per_host: int, factor: float | None
) -> None:
    """Cases are one rank, the exchange through symmetric memory, and the hierarchical exchange."""
    plan = shallow("m8")
    fields = {"dispatcher": "alltoall", "expert_rank_capacity_factor": factor, "row_alignment": 128}
    model = with_experts(plan.model, lambda moe: replace(moe, **fields))
    axes = {"ep": ep, "world_size": ep, "ranks_per_host": ranks_per_host, "shares_memory": True}
    low = low_precision_config("blockwise", expert_weight_grad=False)
    precision, parallel = replace(plan.precision, low_precision=low), replace(plan.parallel, **axes)
    memory = replace(plan.memory, moe_expert_wgrad_interval=1)
    plan = replace(plan, model=model, parallel=parallel, precision=precision, memory=memory)
    found = compare(plan)
    assert found.closed.activation_bytes == pytest.approx(found.emulated["activations"], rel=0.002)
    assert abs(found.ratio - 1) < 0.005


@pytest.mark.parametrize(("repeated", "low"), [(True, "blockwise"), (False, None)], ids=["True", "False"])
def test_sharded_layers_of_multi_token_prediction_agree(repeated: bool, low: str | None) -> None:
    """A prediction layer that all depths share is gathered once per step into its own memory, and quantised once.

    Full recompute with method "block" does not include layers of multi-token prediction.
    """
    plan = plan_of("m8")
    model = replace(plan.model, layers=plan.model.layers[1:4], mtp=MTPConfig(num_layers=2, repeated_layer=repeated))
    recompute = RecomputeConfig(recompute_method="block", recompute_num_layers=2)
    parallel = replace(plan.parallel, world_size=2)
    plan = replace(
        plan,
        model=model,
        parallel=parallel,
        data_parallel=DataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, fsdp=FSDPConfig()),
        memory=replace(plan.memory, moe_expert_wgrad_interval=1, recompute=recompute),
        pipeline=replace(plan.pipeline, layout=None),
        batch=replace(plan.batch, global_batch_size=4 * parallel.dp * plan.batch.micro_batch_size),
        precision=replace(plan.precision, low_precision=None if low is None else low_precision_config(low)),
    )
    found = compare(plan)
    assert abs(found.ratio - 1) < 0.005
    copies = found.emulated["other"] if low else 0  # category of quantised weights
    assert found.emulated["weights"] + copies == pytest.approx(found.closed.state.weights, rel=0.005)
    assert found.emulated["gradients"] == pytest.approx(found.closed.state.gradients, rel=0.005)


def test_shared_query_groups_agree() -> None:
    plan = shallow("q6", 4)
    layers = tuple(replace(layer, mixer=replace(layer.mixer, num_query_groups=2)) for layer in plan.model.layers)
    parallel = replace(plan.parallel, tp=8, world_size=8, sequence_parallel=True)
    found = compare(replace(plan, model=replace(plan.model, layers=layers), parallel=parallel))
    assert abs(found.ratio - 1) < WITHIN


def with_attention_dropout(plan: RunPlan, exchange: ContextExchange, cp: int) -> RunPlan:
    """Returns the plan with --attention-dropout 0.1, --cp-comm-type `exchange` and context parallelism `cp`."""
    changes = {"dropout": 0.1, "context_exchange": exchange}
    mixers = [replace(each.mixer, core=replace(each.mixer.core, **changes)) for each in plan.model.layers]
    layers = tuple(replace(layer, mixer=mixer) for layer, mixer in zip(plan.model.layers, mixers, strict=True))
    parallel = replace(plan.parallel, cp=cp, world_size=plan.parallel.world_size * cp)
    return replace(plan, model=replace(plan.model, layers=layers), parallel=parallel)


@pytest.mark.parametrize(("exchange", "cp"), [("p2p", 1), ("p2p", 2), ("allgather", 2), ("a2a", 2)])
@pytest.mark.parametrize("name", thinned(["m8", "ds4"]))
def test_attention_dropout_saves_values_per_query_key_pair(name: str, exchange: ContextExchange, cp: int) -> None:
    found = compare(with_attention_dropout(plan_of(name), exchange, cp))
    assert abs(found.ratio - 1) < WITHIN


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig(recompute_modules=("core_attn",)),
        RecomputeConfig(recompute_method="block", recompute_num_layers=2),
    ],
)
def test_recompute_frees_the_values_of_dropout(recompute: RecomputeConfig) -> None:
    """In backward, the layers that are not recomputed come first and free theirs."""
    plan = with_attention_dropout(shallow("m8", 4), "p2p", 1)
    assert abs(compare(replace(plan, memory=MemoryConfig(recompute=recompute))).ratio - 1) < 0.01


def main(names: list[str]) -> None:
    for name in names or recipe_names():
        print(line(name, compare(plan_of(name)), without_hardware(name)[1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
