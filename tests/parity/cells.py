"""Runs one cell of the parity matrix: its layout against one rank, on the same tokens.

python -m tests.parity.cells "tp=2 sp=on ep=4"        prints the whole table of that cell
"""

import sys
from dataclasses import replace
from functools import cache
from types import MappingProxyType

import torch

from megatron_moe.compare.oracle import record_oracle
from megatron_moe.compare.record import STEADY_EPS, RankRecord, record_run
from megatron_moe.compare.samples import random_datasets
from megatron_moe.compare.table import Comparison, compare_runs
from megatron_moe.kernels import reference
from megatron_moe.kernels.bundle import Bundle
from megatron_moe.kernels.choose import choose
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.attention import AttentionSpec, MLASpec
from megatron_moe.specs.memory import MemorySpec, RecomputeSpec
from megatron_moe.specs.model import LayerSpec, ModelSpec, MTPSpec
from megatron_moe.specs.moe import CapacitySpec, MoESpec, SharedExpertsSpec
from megatron_moe.specs.parallel import DataParallelSpec
from megatron_moe.specs.pipeline.layout import parse_layout
from megatron_moe.specs.pipeline.spec import PipelineSpec
from megatron_moe.specs.precision import PrecisionSpec
from megatron_moe.specs.run import KernelSpec, RunPlan
from megatron_moe.specs.train import BatchSpec, StateOffloadSpec
from tests import tiny, tiny_models
from tests.parity.dimensions import GLOBAL_BATCH, NUM_LAYERS, SEQ, Cell, cell_of, name_of, parallel_spec
from tests.ranks import on_processes, on_threads
from tests.tolerances import FP64_LAYOUT

NUM_STEPS = 3
DROPOUT = 0.1
LATENT = 20
STATE = MappingProxyType(
    {
        "device": StateOffloadSpec(),
        "host": StateOffloadSpec(fraction=0.5, host_steps=True, overlap=True),
        "parked": StateOffloadSpec(fraction=0.5, chunk_bytes=1 << 16),
    }
)
"""Where master weights and moments are between steps."""
CUSTOM_STAGES = MappingProxyType(
    {
        ("2", "1"): "Et|tttmL",
        ("4", "1"): "E|ttt|tm|L",
        ("2", "2"): "Et||ttt|mL",
        ("4", "2"): "E|tt|t|t|tt|t|tm|L",
    }
)
"""By (pp, vpp): stages of unequal numbers of layers, one without any, embedding and loss on stages of their own."""


def compare_cell(name: str, *, processes: bool = False) -> Comparison:
    """Everything of the cell against its oracle."""
    return compare_runs(oracle_of(name), ranks_of(name, processes=processes), rtol=FP64_LAYOUT.rtol)


def ranks_of(name: str, *, processes: bool = False) -> list[RankRecord]:
    """What every rank of the cell's layout saw. Ranks are threads, or gloo processes."""
    spec = plan_of(cell_of(name)).parallel
    if spec.world_size == 1:
        return [run_rank(ParallelContext.single(), name)]
    if processes:
        return on_processes(spec, run_rank, name)
    return on_threads(spec, lambda context: run_rank(context, name))


def run_rank(context: ParallelContext, name: str) -> RankRecord:
    """One rank of the cell, in double precision on the reference kernels."""
    return _record(plan_of(cell_of(name)), context, kernels(), name)


def run_rank_in_fp32(context: ParallelContext, name: str) -> RankRecord:
    """One rank of the cell in single precision, on the kernels that its device runs fastest."""
    plan = replace(plan_of(cell_of(name)), precision=PrecisionSpec(params="fp32", grads="fp32", master="fp32"))
    # torch's optimizer kernel scales the gradients in place, and they are compared
    wishes = KernelSpec(per_op=(("adamw_", reference.NAME),))
    return _record(plan, context, choose(wishes, context.device, context.dtype), name)


def _record(plan: RunPlan, context: ParallelContext, kernels: Bundle, name: str) -> RankRecord:
    datasets = random_datasets(plan, num_steps=NUM_STEPS)
    return record_run(plan, context, kernels, datasets, num_steps=NUM_STEPS)


@cache
def oracle_of(name: str) -> RankRecord:
    """The same on one rank, which is given the cell's partition of the tokens."""
    cell = cell_of(name)
    plan = plan_of(cell)
    datasets = random_datasets(plan, num_steps=NUM_STEPS)
    return record_oracle(plan, ParallelContext.single(), kernels(), datasets, num_steps=NUM_STEPS)


@cache
def kernels() -> Bundle:
    return reference.bundle()


def plan_of(cell: Cell) -> RunPlan:
    """fp64, clipping and weight decay on; the cell's model, grids and microbatches."""
    plan = tiny.plan(model=model_of(cell), parallel=parallel_spec(cell), pipeline=pipeline_of(cell))
    holders = plan.layout.embedding_ranks(tied=plan.model.tied_embeddings)
    micro = GLOBAL_BATCH // (int(cell["dp"]) * int(cell["accumulation"]))
    return replace(
        plan,
        parallel=replace(plan.parallel, embedding_ranks=holders),
        data_parallel=DataParallelSpec(
            sharded_optimizer=cell["zero"] == "on",
            overlap_grad_reduce=cell["overlap"] in ("grads", "params"),
            overlap_param_gather=cell["overlap"] == "params",
            num_buckets=3 if cell["overlap"] in ("grads", "params") else None,
        ),
        data=replace(
            plan.data,
            reset_position_ids=cell["documents"] == "packed",
            reset_attention_mask=cell["documents"] == "packed",
        ),
        batch=BatchSpec(micro=micro, global_size=GLOBAL_BATCH),
        loop=replace(plan.loop, per_token_loss=cell["loss"] == "token"),
        optimizer=replace(plan.optimizer, eps=STEADY_EPS, offload=STATE[cell["optimizer"]]),
        memory=MemorySpec(recompute=recompute_of(cell)),
    )


def recompute_of(cell: Cell) -> RecomputeSpec:
    """What runs again in the backward: layers in chunks of two, the whole MoE block, or every smaller module."""
    match cell["recompute"]:
        case "none":
            return RecomputeSpec()
        case "full":
            return RecomputeSpec(granularity="full", method="uniform", num_layers=2)
        case "moe":
            return RecomputeSpec(granularity="selective", modules=("moe",))
    small = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp")
    shared = () if cell["shared"] == "overlap" else ("shared_experts",)
    return RecomputeSpec(granularity="selective", modules=(*small, *shared))


def pipeline_of(cell: Cell) -> PipelineSpec:
    """Which layers stand where, and in which order they work."""
    layout = None
    if cell["stages"] == "custom":
        text = CUSTOM_STAGES[cell["pp"], cell["vpp"]]
        text = text if cell["mtp"] == "on" else text.replace("m", "")
        layout = parse_layout(text, pp=int(cell["pp"]), num_layers=None, num_mtp=None)
    overlap = cell["overlap"] == "experts"
    return PipelineSpec(layout=layout, overlap=overlap, split_backward=overlap or cell["wgrad"] == "apart")


def model_of(cell: Cell) -> ModelSpec:
    """One dense layer and three MoE layers, or dense ones alone; more where there are more stages."""
    mixer: AttentionSpec | MLASpec = tiny.attention(num_query_groups=_groups(cell))
    if cell["attention"] == "mla":
        mixer = tiny_models.mla_spec(num_heads=4)
    dropout = DROPOUT if cell["dropout"] == "on" else 0.0
    core = replace(mixer.core, context_exchange=cell["cpcomm"], sinks=cell["sinks"] == "on", dropout=dropout)
    mixer = replace(mixer, core=core)
    dense = tiny_models.mlp_spec(ffn_hidden_size=48)
    num_layers = max(NUM_LAYERS, int(cell["pp"]) * int(cell["vpp"]))
    kinds = [dense] + [moe_of(cell) if cell["layers"] == "moe" else dense] * (num_layers - 1)
    return tiny.model(
        layers=tuple(
            LayerSpec(mixer=mixer, feed_forward=kind, norm=tiny.NORM, hidden_dropout=dropout) for kind in kinds
        ),
        embedding_dropout=dropout,
        tied_embeddings=cell["head"] == "tied",
        mtp=MTPSpec(num_layers=1, loss_scaling_factor=0.3) if cell["mtp"] == "on" else None,
        max_positions=SEQ,
    )


def moe_of(cell: Cell) -> MoESpec:
    """Eight experts, two per token, with unequal load."""
    kinds = {"seq": "seq_aux_loss", "global": "global_aux_loss", "aux": "aux_loss"}
    kind = kinds.get(cell["balance"], "none")
    router = tiny.router(balancing=(kind,), aux_loss_coeffs=(0.02 if kind != "none" else 0.0,))
    if cell["balance"] in ("aux", "seq"):
        router = replace(router, z_loss_coeff=0.01)
    if cell["balance"] == "bias":
        router = replace(router, score_function="sigmoid", expert_bias=True, scaling_factor=1.5)
    if cell["dropout"] == "on":
        router = replace(router, input_jitter_eps=DROPOUT)
    spec = tiny.moe(router, capacity=_capacity(cell), dispatcher=cell["dispatcher"])
    if cell["latent"] == "on":
        spec = replace(spec, latent_size=LATENT, experts=replace(spec.experts, hidden_size=LATENT))
    if cell["shared"] != "off":
        spec = replace(spec, shared=SharedExpertsSpec(mlp=tiny_models.mlp_spec(ffn_hidden_size=16), gate=True))
    spec = replace(spec, shared_overlap=cell["shared"] == "overlap")
    return replace(spec, experts=replace(spec.experts, grouped=cell["experts"] == "grouped"))


def _capacity(cell: Cell) -> CapacitySpec | None:
    if cell["capacity"] == "none":
        return None
    policy = "position" if cell["capacity"] == "position" else "probs"
    return CapacitySpec(factor=1.0, policy=policy, pad=cell["capacity"] == "pad")


def _groups(cell: Cell) -> int:
    """Query groups: two, or as many as the ranks among which they are divided; or one for every two ranks."""
    if cell["groups"] == "shared":
        return int(cell["tp"]) // 2
    shared_by = int(cell["tp"])
    if cell["cpcomm"] in ("a2a", "a2a+p2p"):
        shared_by *= 2 if cell["cpcomm"] == "a2a+p2p" else int(cell["cp"])
    return max(2, shared_by)


def command_of(name: str) -> str:
    """How to repeat a cell by hand."""
    return f'python -m tests.parity.cells "{name}"'


def main(name: str) -> int:
    torch.set_num_threads(1)
    comparison = compare_cell(name)
    print(f"cell: {name_of(cell_of(name))}")
    print(comparison.text(every=True))
    return 0 if comparison.equal else 12


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
