"""Runs one cell of the parity matrix: its layout against one rank, on the same tokens.

python -m tests.parity.cells "tp=2 sp=on ep=4"        prints the whole table of that cell
"""

import sys
from dataclasses import replace
from functools import cache

import torch

from megatron_moe.compare.oracle import oracle_plan, partition_tokens
from megatron_moe.compare.record import STEADY_EPS, RankRecord, record_run
from megatron_moe.compare.samples import random_datasets
from megatron_moe.compare.table import Comparison, compare_runs
from megatron_moe.kernels import reference
from megatron_moe.kernels.bundle import Bundle
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.attention import AttentionSpec, MLASpec
from megatron_moe.specs.model import LayerSpec, ModelSpec, MTPSpec
from megatron_moe.specs.moe import CapacitySpec, MoESpec, SharedExpertsSpec
from megatron_moe.specs.parallel import DataParallelSpec
from megatron_moe.specs.pipeline.spec import PipelineSpec
from megatron_moe.specs.run import RunPlan
from megatron_moe.specs.train import BatchSpec
from tests import tiny, tiny_models
from tests.parity.dimensions import GLOBAL_BATCH, NUM_LAYERS, SEQ, Cell, cell_of, name_of, parallel_spec
from tests.ranks import on_processes, on_threads
from tests.tolerances import FP64_LAYOUT

NUM_STEPS = 3
PER_MICROBATCH = ("moe/max_violation", "moe/load_entropy", "moe/dead_experts")
"""Metrics that are not sums or means over tokens: they differ where the oracle takes several microbatches as one."""


def compare_cell(name: str, *, processes: bool = False) -> Comparison:
    """Everything of the cell against its oracle."""
    cell = cell_of(name)
    ignore = PER_MICROBATCH if cell["balance"] == "global" else ()
    return compare_runs(oracle_of(name), ranks_of(name, processes=processes), rtol=FP64_LAYOUT.rtol, ignore=ignore)


def ranks_of(name: str, *, processes: bool = False) -> list[RankRecord]:
    """What every rank of the cell's layout saw. Ranks are threads, or gloo processes."""
    spec = plan_of(cell_of(name)).parallel
    if spec.world_size == 1:
        return [run_rank(ParallelContext.single(), name)]
    if processes:
        return on_processes(spec, run_rank, name)
    return on_threads(spec, lambda context: run_rank(context, name))


def run_rank(context: ParallelContext, name: str) -> RankRecord:
    """One rank of the cell."""
    cell = cell_of(name)
    plan = plan_of(cell)
    datasets = random_datasets(plan, num_steps=NUM_STEPS, uneven=_uneven(cell))
    return record_run(plan, context, kernels(), datasets, num_steps=NUM_STEPS)


@cache
def oracle_of(name: str) -> RankRecord:
    """The same on one rank, which is given the cell's partition of the tokens."""
    cell = cell_of(name)
    plan = plan_of(cell)
    datasets = random_datasets(plan, num_steps=NUM_STEPS, uneven=_uneven(cell))
    return record_run(
        oracle_plan(plan),
        ParallelContext.single(),
        kernels(),
        datasets,
        num_steps=NUM_STEPS,
        prepare=lambda trainer: partition_tokens(trainer, plan),
    )


@cache
def kernels() -> Bundle:
    return reference.bundle()


def plan_of(cell: Cell) -> RunPlan:
    """fp64, clipping and weight decay on; the cell's model, grids and microbatches."""
    plan = tiny.plan(model=model_of(cell), parallel=parallel_spec(cell))
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
        pipeline=PipelineSpec(overlap=cell["overlap"] == "experts", split_backward=cell["overlap"] == "experts"),
        batch=BatchSpec(micro=micro, global_size=GLOBAL_BATCH),
        loop=replace(plan.loop, per_token_loss=cell["loss"] == "token"),
        optimizer=replace(plan.optimizer, eps=STEADY_EPS),
    )


def model_of(cell: Cell) -> ModelSpec:
    """One dense layer and three MoE layers, or four dense ones."""
    mixer: AttentionSpec | MLASpec = tiny.attention(num_query_groups=_groups(cell))
    if cell["attention"] == "mla":
        mixer = tiny_models.mla_spec(num_heads=4)
    mixer = replace(mixer, core=replace(mixer.core, context_exchange=cell["cpcomm"]))
    dense = tiny_models.mlp_spec(ffn_hidden_size=48)
    kinds = [dense] + [moe_of(cell) if cell["layers"] == "moe" else dense] * (NUM_LAYERS - 1)
    return tiny.model(
        layers=tuple(LayerSpec(mixer=mixer, feed_forward=kind, norm=tiny.NORM) for kind in kinds),
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
    spec = tiny.moe(router, capacity=_capacity(cell), dispatcher=cell["dispatcher"])
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
    """Key and value heads: two, or as many as the ranks that share them out."""
    shared_by = int(cell["tp"])
    if cell["cpcomm"] in ("a2a", "a2a+p2p"):
        shared_by *= 2 if cell["cpcomm"] == "a2a+p2p" else int(cell["cp"])
    return max(2, shared_by)


def _uneven(cell: Cell) -> bool:
    """Microbatches of unequal numbers of tokens, except where the oracle takes several as one."""
    return cell["balance"] != "global"


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
