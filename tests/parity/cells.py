"""Runs a cell of the parity matrix: compares its layout with one rank on the same tokens.

`python -m tests.parity.cells "tp=2 sp=on ep=4"` prints the comparison of that cell.
"""

import sys
from dataclasses import replace
from functools import cache
from types import MappingProxyType

import torch

from megatron_moe.build import record_steps
from megatron_moe.config.attention import SoftmaxMixerConfig
from megatron_moe.config.component import NoFeedForward, NoMixer
from megatron_moe.config.fsdp import FSDPConfig
from megatron_moe.config.memory import CudaGraphConfig, GraphModule, MemoryConfig, RecomputeConfig
from megatron_moe.config.model import LayerConfig, ModelConfig, MTPConfig
from megatron_moe.config.moe import CapacityConfig, MoEConfig, SharedExpertsConfig
from megatron_moe.config.optimizer import OptimizerConfig, OptimizerOffloadConfig
from megatron_moe.config.packing import PackingConfig
from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.pipeline_layout import parse_layout
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.run import KernelConfig, RunPlan
from megatron_moe.config.training import BatchConfig
from megatron_moe.kernels.kernel_set import KernelSet
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.layout_check.oracle import oracle_plan, record_oracle
from megatron_moe.layout_check.record import STEADY_EPS, RankRecord, record_run
from megatron_moe.layout_check.samples import random_datasets
from megatron_moe.layout_check.table import Comparison, compare_runs
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.trainer import Trainer
from tests.helpers import tiny, tiny_models
from tests.helpers.eager_graphs import EagerRecorder
from tests.helpers.ranks import on_processes, on_threads
from tests.helpers.tolerances import FP64_LAYOUT
from tests.parity.dimensions import GLOBAL_BATCH, NUM_LAYERS, SEQ, UNSHARDED, Cell, cell_of, name_of, parallel_config

NUM_STEPS = 2
"""Number of compared steps. The second step depends on the weights and optimizer state after the first."""
REFERENCE = reference.bundle()
DROPOUT = 0.1
LATENT = 20
STATE = MappingProxyType(
    {
        "device": OptimizerOffloadConfig(),
        "cpu": OptimizerOffloadConfig(fraction=0.5, cpu_step=True, overlap_cpu_optimizer_d2h_h2d=True),
        "streamed": OptimizerOffloadConfig(fraction=0.5, chunk_bytes=1 << 16),
    }
)
"""Placement of master weights and moments for each AdamW value of the dimension "optimizer"."""
CUSTOM_STAGES = MappingProxyType(
    {("2", "1"): "Et|tttmL", ("4", "1"): "E|ttt|tm|L", ("2", "2"): "Et||ttt|mL", ("4", "2"): "E|tt|t|t|tt|t|tm|L"}
)
"""Layout of "stages=custom" by (pp, vpp).

The layouts have unequal numbers of layers, an empty stage, or separate stages for embedding and loss.
"""


def compare_plan(plan: RunPlan) -> Comparison:
    """Compares the ranks of a plan, run as threads, with one rank that uses the plan's partition of the tokens."""
    ranks = on_threads(plan.parallel, lambda context: record(plan, context))
    return compare_runs(record_one_rank(plan), ranks, rtol=FP64_LAYOUT.rtol)


def compare_cell(name: str, *, processes: bool = False) -> Comparison:
    """Compares the records of all ranks of a cell with its oracle."""
    return compare_runs(oracle_of(name), ranks_of(name, processes=processes), rtol=FP64_LAYOUT.rtol)


def ranks_of(name: str, *, processes: bool = False) -> list[RankRecord]:
    """Runs all ranks of a cell as threads or as gloo processes, and returns their records."""
    config = plan_of(cell_of(name)).parallel
    if config.world_size == 1:
        return [run_rank(ParallelContext.single(), name)]
    if processes:
        return on_processes(config, run_rank, name)
    return on_threads(config, lambda context: run_rank(context, name))


def run_rank(context: ParallelContext, name: str) -> RankRecord:
    """Runs one rank of the cell in fp64 on the reference kernels."""
    return record(plan_of(cell_of(name)), context)


def run_rank_in_fp32(context: ParallelContext, name: str) -> RankRecord:
    """Runs one rank of the cell in fp32 on the fastest kernels of its device."""
    return record_in_fp32(plan_of(cell_of(name)), context)


def record_in_fp32(plan: RunPlan, context: ParallelContext) -> RankRecord:
    """Trains a few steps of a plan in fp32 on the fastest kernels of the device."""
    plan = in_fp32(plan)
    # The optimizer kernel of torch scales gradients in place, but they are compared after the step.
    requests = KernelConfig(kernel_per_op=(("adamw_", reference.NAME),))
    return record(plan, context, select_kernels(requests, context.device, context.dtype))


def in_fp32(plan: RunPlan) -> RunPlan:
    return replace(plan, precision=PrecisionConfig(params="fp32", grads="fp32", main_params_dtype="fp32"))


def record(plan: RunPlan, context: ParallelContext, kernels: KernelSet = REFERENCE) -> RankRecord:
    """Trains a few steps on random tokens; a stand-in for CUDA graphs captures and replays what the plan captures."""
    datasets = random_datasets(plan, num_steps=num_steps_of(plan))

    def capture(trainer: Trainer) -> None:
        record_steps(trainer, EagerRecorder(), plan.cuda_graphs)

    return record_run(plan, context, kernels, datasets, num_steps=num_steps_of(plan), prepare=capture)


def num_steps_of(plan: RunPlan) -> int:
    """Number of compared steps: `NUM_STEPS`, and one more for CUDA graphs and for delayed scaling.

    The second step captures graphs and the third replays them. Delayed scales depend on the magnitudes of two steps.
    """
    graphs, low_precision = plan.cuda_graphs, plan.precision.low_precision
    captures = graphs.full_iteration or graphs.cuda_graph_modules
    has_history = low_precision is not None and low_precision.amax_history_len > 1
    return NUM_STEPS + bool(captures or has_history)


def oracle_of(name: str) -> RankRecord:
    """Record of one rank that uses the cell's partition of the tokens. Cells that differ in their layout only share
    it."""
    cell = cell_of(name)
    plan = plan_of(cell)
    depends_on_layout = cell["balance"] == "global" or cell["capacity"] != "none" or plan.data.packing is not None
    if depends_on_layout or cell["graphs"] != "off":
        return record_one_rank(plan)
    return _shared_oracle(replace(oracle_plan(plan), data_parallel=DataParallelConfig()))


@cache
def _shared_oracle(plan: RunPlan) -> RankRecord:
    return record_one_rank(plan)


def oracle_in_fp32(name: str) -> RankRecord:
    """Record of one rank, as `oracle_of`, whose rounding errors in fp32 can change the choice of experts."""
    return record_one_rank(in_fp32(plan_of(cell_of(name))), dtype=torch.float32)


def record_one_rank(plan: RunPlan, device: str = "cpu", dtype: torch.dtype = torch.float64) -> RankRecord:
    """Record of one rank that uses the plan's partition of the tokens."""
    context, num_steps = ParallelContext.single(device=device, dtype=dtype), num_steps_of(plan)
    return record_oracle(plan, context, REFERENCE, random_datasets(plan, num_steps=num_steps), num_steps=num_steps)


def plan_of(cell: Cell) -> RunPlan:
    """Builds the plan of a cell: its model, grids and microbatches, in fp64 with clipping and weight decay."""
    plan = tiny.plan(model=model_of(cell), parallel=parallel_config(cell), pipeline=pipeline_of(cell))
    holders = plan.layout.embedding_ranks(tied=plan.model.tied_embeddings)
    micro = GLOBAL_BATCH // (int(cell["dp"]) * int(cell["accumulation"]))
    fsdp = fsdp_of(cell)
    instances = 2 if cell["zero"] in ("replicas", "outer") else 1
    return replace(
        plan,
        parallel=replace(plan.parallel, embedding_ranks=holders, num_distributed_optimizer_instances=instances),
        data_parallel=DataParallelConfig(
            use_distributed_optimizer=cell["zero"] != "off",
            overlap_grad_reduce=cell["overlap"] in ("grads", "params") or fsdp is not None,
            overlap_param_gather=cell["overlap"] == "params",
            ddp_num_buckets=3 if cell["overlap"] in ("grads", "params") else None,
            fsdp=fsdp,
        ),
        data=replace(
            plan.data,
            reset_position_ids=cell["documents"] == "packed",
            reset_attention_mask=cell["documents"] == "packed",
            packing=PackingConfig() if cell["documents"] == "varlen" else None,
        ),
        batch=BatchConfig(micro_batch_size=micro, global_batch_size=GLOBAL_BATCH),
        loop=replace(plan.loop, calculate_per_token_loss=cell["loss"] == "token"),
        optimizer=optimizer_of(cell, plan.optimizer),
        memory=MemoryConfig(recompute=recompute_of(cell)),
        cuda_graphs=graphs_of(cell),
    )


def fsdp_of(cell: Cell) -> FSDPConfig | None:
    """Sharding of gradients and weights; None if they are replicated."""
    if cell["zero"] in UNSHARDED:
        return None
    return FSDPConfig(
        shards_weights=cell["zero"] != "grads",
        fsdp_double_buffer=cell["zero"] == "buffers",
        reduces_through_peers=cell["zero"] in ("grads", "outer"),
        outer_dp_sharding_strategy="optim" if cell["zero"] == "outer" else "no_shard",
        num_passes=2 if cell["overlap"] == "experts" else 1,
    )


def optimizer_of(cell: Cell, config: OptimizerConfig) -> OptimizerConfig:
    """Selects the update rule and the placement of its state."""
    if cell["optimizer"] == "muon":
        return replace(config, optimizer="muon", adam_eps=STEADY_EPS)
    return replace(config, adam_eps=STEADY_EPS, offload=STATE[cell["optimizer"]])


def recompute_of(cell: Cell) -> RecomputeConfig:
    """Selects recompute: full in chunks of two layers, of the whole MoE layer, or of all smaller modules."""
    match cell["recompute"]:
        case "none":
            return RecomputeConfig()
        case "full":
            return RecomputeConfig(recompute_method="uniform", recompute_num_layers=2)
        case "moe":
            return RecomputeConfig(recompute_modules=("moe",))
    small = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp")
    shared = () if cell["shared"] == "overlap" else ("shared_experts",)
    return RecomputeConfig(recompute_modules=(*small, *shared))


def graphs_of(cell: Cell) -> CudaGraphConfig:
    """Selects captured modules or the whole step.

    The first step runs eagerly, the second captures, the third replays.
    """
    match cell["graphs"]:
        case "router":
            modules: tuple[GraphModule, ...] = ("attn", "mamba", "moe_router", "moe_preprocess")
        case "layers":
            modules = ("attn", "mamba", "moe", *(() if cell["recompute"] == "small" else ("mlp",)))
        case _:
            modules = ()
    step = cell["graphs"] == "step"
    return CudaGraphConfig(cuda_graph_modules=modules, full_iteration=step, cuda_graph_warmup_steps=1)


def pipeline_of(cell: Cell) -> PipelineConfig:
    """Selects the placement of layers and the options of the schedule."""
    layout = None
    if cell["stages"] == "custom":
        text = CUSTOM_STAGES[cell["pp"], cell["vpp"]]
        text = text if cell["mtp"] == "on" else text.replace("m", "")
        layout = parse_layout(text, pp=int(cell["pp"]), num_layers=None, num_mtp=None)
    overlap = cell["overlap"] == "experts"
    return PipelineConfig(
        layout=layout,
        overlap=overlap,
        delay_wgrad_compute=(overlap and cell["zero"] in UNSHARDED) or cell["wgrad"] == "delayed",
        overlap_dispatch_backward_with_experts_wgrad=cell["wgrad"] == "exchange",
    )


def model_of(cell: Cell) -> ModelConfig:
    """Builds one dense layer and three MoE layers; "layers=dense" has dense layers only.

    "layers=single" has layers with a single module each: two mixers, an MLP and experts. If there are more stages than
    layers, further layers give every stage one layer.
    """
    softmax: SoftmaxMixerConfig = tiny.attention(num_query_groups=_groups(cell))
    if cell["attention"] == "mla":
        softmax = tiny_models.mla_config(num_heads=4)
    dropout = DROPOUT if cell["dropout"] == "on" else 0.0
    core = replace(softmax.core, context_exchange=cell["cpcomm"], sinks=cell["sinks"] == "on", dropout=dropout)
    softmax = replace(softmax, core=core)
    # With linear attention, every second layer still has softmax attention.
    mixers = (tiny_models.LINEAR_ATTENTION.get(cell["attention"], softmax), softmax)
    dense = tiny_models.mlp_config(ffn_hidden_size=48)
    num_layers = max(NUM_LAYERS, int(cell["pp"]) * int(cell["vpp"]))
    sparse = dense if cell["layers"] == "dense" else moe_of(cell)
    if cell["layers"] == "single":
        no_mixer, none = NoMixer(hidden_size=tiny.HIDDEN), NoFeedForward()
        modules = [(mixers[0], none), (no_mixer, dense), (mixers[1], none), (no_mixer, sparse)]
    else:
        modules = [(mixers[0], dense), *[(mixers[(layer + 1) % 2], sparse) for layer in range(3)]]
    kinds = [
        LayerConfig(mixer=mixer, feed_forward=feed_forward, norm=tiny.NORM, hidden_dropout=dropout)
        for mixer, feed_forward in (*modules, *modules[-2:] * num_layers)
    ]
    depth = replace(kinds[3], mixer=softmax) if cell["layers"] == "single" else None
    return tiny.model(
        layers=tuple(kinds[:num_layers]),
        embedding_dropout=dropout,
        tied_embeddings=cell["head"] == "tied",
        mtp=MTPConfig(num_layers=1, loss_scaling_factor=0.3, layer=depth) if cell["mtp"] == "on" else None,
        max_positions=SEQ,
    )


def moe_of(cell: Cell) -> MoEConfig:
    """Builds an MoE layer of eight experts, two per token, with unequal load."""
    kinds = {"seq": "seq_aux_loss", "global": "global_aux_loss", "aux": "aux_loss"}
    kind = kinds.get(cell["balance"], "none")
    router = tiny.router(balancing=(kind,), aux_loss_coeffs=(0.02 if kind != "none" else 0.0,))
    if cell["balance"] in ("aux", "seq"):
        router = replace(router, z_loss_coeff=0.01)
    if cell["balance"] == "bias":
        router = replace(router, score_function="sigmoid", expert_bias=True, scaling_factor=1.5)
    if cell["dropout"] == "on":
        router = replace(router, input_jitter_eps=DROPOUT)
    config = tiny.moe(
        router,
        capacity=_capacity(cell),
        dispatcher="flex" if cell["dispatcher"] == "hierarchical" else cell["dispatcher"],
    )
    if cell["latent"] == "on":
        config = replace(config, latent_size=LATENT, experts=replace(config.experts, hidden_size=LATENT))
    if cell["shared"] != "off":
        config = replace(config, shared=SharedExpertsConfig(mlp=tiny_models.mlp_config(ffn_hidden_size=16), gate=True))
    config = replace(config, shared_overlap=cell["shared"] == "overlap")
    return replace(config, experts=replace(config.experts, grouped=cell["experts"] == "grouped"))


def _capacity(cell: Cell) -> CapacityConfig | None:
    if cell["capacity"] == "none":
        return None
    policy = "position" if cell["capacity"] == "position" else "probs"
    return CapacityConfig(factor=1.0, policy=policy, pad=cell["capacity"] == "pad")


def _groups(cell: Cell) -> int:
    """Number of query groups.

    There are at least 2, and at least one for each rank among which heads are divided. With "groups=shared", two
    tensor-parallel ranks share a group.
    """
    if cell["groups"] == "shared":
        return int(cell["tp"]) // 2
    shared_by = int(cell["tp"])
    if cell["cpcomm"] in ("a2a", "a2a+p2p"):
        shared_by *= 2 if cell["cpcomm"] == "a2a+p2p" else int(cell["cp"])
    return max(2, shared_by)


def command_of(name: str) -> str:
    """Returns the command line that runs the comparison of a cell."""
    return f'python -m tests.parity.cells "{name}"'


def main(name: str) -> int:
    torch.set_num_threads(1)
    comparison = compare_cell(name)
    print(f"cell: {name_of(cell_of(name))}")
    print(comparison.text(every=True))
    return 0 if comparison.all_equal else 12


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
