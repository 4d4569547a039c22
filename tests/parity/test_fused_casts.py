"""FP8 experts with fused casts give, in whole runs and under every memory option, the bits of separate ops.

Fused and separate ops quantise the same blocks of the same rows, so each case repeats a run on the same layout, without
fusion and without memory options.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_moe.build import build_model, build_trainer
from megatron_moe.config.memory import ActivationOffloadConfig, MemoryConfig, PagedStashConfig
from megatron_moe.config.precision import LowPrecisionConfig, low_precision_config
from megatron_moe.config.run import RunPlan
from megatron_moe.moe.experts import Experts
from megatron_moe.moe.moe_layer import MoELayer
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.train_state import TrainState
from tests.helpers.pipelines import KERNELS, run_steps
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT
from tests.parity.cells import plan_of
from tests.parity.dimensions import cell_of
from tests.train import test_overflow

FP8_WGRAD = low_precision_config("blockwise", blocks=4)
PLAIN_WGRAD = low_precision_config("blockwise", blocks=4, hybrid=True, weight_grad=False)
OFFLOAD = {"offload": ActivationOffloadConfig(offload_modules=("expert_fc1", "moe_act"), min_offloaded_tensor_size=1)}
STASH = {"paged_stash": PagedStashConfig(moe_paged_stash_page_size=4, moe_paged_stash_buffer_size_factor_cuda=4.0)}
LATE = {"moe_expert_wgrad_interval": 2}
CASES = (
    ("shared=on recompute=small accumulation=2", FP8_WGRAD, OFFLOAD),
    ("shared=on capacity=drop", PLAIN_WGRAD, OFFLOAD),
    ("recompute=full capacity=pad", FP8_WGRAD, {}),
    ("recompute=moe balance=bias capacity=drop documents=packed", PLAIN_WGRAD, {}),
    ("accumulation=4", FP8_WGRAD, LATE),
    ("dp=2 ep=2 dispatcher=flex shared=overlap", PLAIN_WGRAD, STASH),
    ("dp=2 ep=2 dispatcher=flex recompute=small capacity=position", FP8_WGRAD, OFFLOAD),
    ("dp=2 ep=2 dispatcher=flex recompute=full shared=overlap", PLAIN_WGRAD, {}),
    ("dp=2 ep=2 dispatcher=flex overlap=experts accumulation=4", FP8_WGRAD, STASH),
    ("dp=2 ep=2 dispatcher=alltoall shared=overlap capacity=drop recompute=small", FP8_WGRAD, OFFLOAD),
    ("dp=2 ep=2 dispatcher=alltoall overlap=experts accumulation=4 recompute=small", PLAIN_WGRAD, OFFLOAD),
    ("dp=2 ep=2 dispatcher=alltoall wgrad=exchange shared=on recompute=moe", PLAIN_WGRAD, {}),
    ("dp=2 ep=2 etp=2 tp=2 sp=on dispatcher=allgather recompute=small", PLAIN_WGRAD, STASH),
    ("pp=2 vpp=2 accumulation=2 wgrad=delayed capacity=pad", PLAIN_WGRAD, OFFLOAD),
    ("pp=2 accumulation=2 recompute=small latent=on", FP8_WGRAD, STASH),
)
"""Cases as (cell of the parity matrix, FP8 recipe, fields of `MemoryConfig`)."""
EMPTY = (
    ("balance=none", FP8_WGRAD, STASH),
    ("balance=none dp=2 ep=2 dispatcher=flex", FP8_WGRAD, OFFLOAD),
    ("balance=none dp=2 ep=2 dispatcher=flex recompute=small", PLAIN_WGRAD, STASH),
    ("balance=none dp=2 ep=2 dispatcher=alltoall recompute=small", PLAIN_WGRAD, OFFLOAD),
)


def plan_with(name: str, config: LowPrecisionConfig, **memory: object) -> RunPlan:
    """Builds the plan of a cell with FP8 GEMMs and the given fields of `MemoryConfig`."""
    plan = plan_of(cell_of(name))
    precision = replace(plan.precision, low_precision=config)
    return replace(plan, precision=precision, memory=replace(plan.memory, **memory))


def train(plan: RunPlan, *, fused: bool, routes_to_two: bool = False) -> list[dict[str, Tensor]]:
    """Trains two steps; returns losses, gradients, metrics and weights of every rank.

    With `routes_to_two`, experts 0 and 1 receive all tokens in the first step.
    """

    def rank(context: ParallelContext) -> dict[str, Tensor]:
        model = build_model(plan, context, KERNELS)
        for layer in (module for module in model.modules() if isinstance(module, MoELayer)):
            assert layer.experts.has_fused_casts == fused
            if routes_to_two:  # all scores are equal, so the lowest ids are selected
                torch.nn.init.zeros_(layer.router.weight)
        figures = run_steps(plan, build_trainer(plan, context, model, KERNELS), TrainState(), 2)
        offload, stash = model.saved_tensors.offload, model.saved_tensors.stash
        assert not plan.memory.offload.offload_modules or offload.pool.bytes_to_host == offload.pool.bytes_to_device > 0
        assert plan.memory.paged_stash is None or (stash.buffers() and not stash.overflowed)
        return figures

    return on_threads(plan.parallel, rank)


def without_memory_options(name: str) -> str:
    return " ".join(part for part in name.split() if not part.startswith("recompute=")) or "plain"


def check(name: str, config: LowPrecisionConfig, memory: dict, monkeypatch: pytest.MonkeyPatch, **options) -> None:
    fused = train(plan_with(name, config, **memory), fused=True, **options)
    monkeypatch.setattr(Experts, "has_fused_casts", False)
    kept = {key: value for key, value in memory.items() if key == "moe_expert_wgrad_interval"}
    separate = train(plan_with(without_memory_options(name), config, **kept), fused=False, **options)
    for number, (found, expected) in enumerate(zip(fused, separate, strict=True)):
        EXACT.check_all(found, expected, f"rank {number}")


def named(cases: tuple[tuple[str, LowPrecisionConfig, dict], ...]) -> dict:
    """Returns the arguments of `pytest.mark.parametrize` for the cases."""
    ids = [f"{name} {config.name} {' '.join(memory)}" for name, config, memory in cases]
    return {"argnames": ("name", "config", "memory"), "argvalues": cases, "ids": ids}


@pytest.mark.parametrize(**named(CASES))
def test_fused_casts_equal_separate_ops_in_whole_runs(name, config, memory, monkeypatch) -> None:
    check(name, config, memory, monkeypatch)


@pytest.mark.parametrize(**named(EMPTY))
def test_experts_and_ranks_without_rows(name, config, memory, monkeypatch) -> None:
    """All tokens go to two of eight experts, so the second expert-parallel rank has no rows."""
    check(name, config, memory, monkeypatch, routes_to_two=True)


@pytest.mark.slow
@pytest.mark.parametrize("config", [FP8_WGRAD, PLAIN_WGRAD], ids=["FP8 weight gradients", "plain weight gradients"])
def test_steps_repeated_with_a_larger_row_bound(config) -> None:
    """Steps repeated after an overflow give the same results as a run without a row bound. Nightly, because
    tests/train/test_overflow.py repeats steps without FP8."""
    runs = []
    for factor in (0.2, None):
        plan = test_overflow.plan(factor, memory=MemoryConfig(**STASH))
        plan = replace(plan, precision=replace(plan.precision, low_precision=config))
        runs.append(on_threads(test_overflow.EP2, lambda context, plan=plan: test_overflow.train(plan, context)))
    for (reports, values, _), (_, expected, _) in zip(*runs, strict=True):
        EXACT.check_all(values, expected)
        assert any("more expert rows than its bound" in note for note in reports.notes)
