"""Gradients of the MoE layer after the optimizer's reductions, and the layer on gloo processes."""

import pytest
import torch
from torch import Tensor

from megatron_moe.config.moe import CapacityConfig, MoEConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.optim.clip_grads import gradient_norms
from megatron_moe.optim.grad_buffers import GradBuffers, finish_grads
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import named_parameters, write_shard
from tests.helpers.ranks import on_processes, on_threads
from tests.helpers.tolerances import FP64_LAYOUT
from tests.moe.parallel.folded import (
    KERNELS,
    Data,
    forward_backward,
    gathered,
    make_layer,
    moe_config,
    name_of,
    on_one_rank,
    on_this_rank,
    parallel,
)

FP64 = PrecisionConfig(params="fp64", grads="fp64", main_params_dtype="fp64")
FOLDS = [
    parallel(2, ep=2),
    parallel(4, ep=2),
    parallel(4, tp=2, ep=2),
    parallel(4, tp=2, etp=2, ep=2),
    parallel(8, tp=2, cp=2, etp=2, ep=2),
    parallel(8, tp=2, ep=8),
]
EVERY_FOLD = pytest.mark.parametrize("fold", FOLDS, ids=name_of)
BALANCED = {"balancing": ("aux_loss",), "aux_loss_coeffs": (0.3,), "z_loss_coeff": 0.1}
FULL = moe_config(router=BALANCED, bias=True, shared=True)


def finished(
    ctx: ParallelContext, config: MoEConfig, fold: ParallelConfig, data: Data
) -> tuple[dict, dict[str, Tensor]]:
    """Returns reduced gradients and their norms after two microbatches of the same tokens.

    Gradients have the global shape of their parameter; elements that this rank does not hold are NaN.
    """
    layer = make_layer(config, ctx)
    buffers = GradBuffers(named_parameters(layer), FP64, ctx, KERNELS)
    buffers.begin_step()
    for _ in range(2):
        forward_backward(layer, ctx, fold, data)
        buffers.collect_autograd_grads()
    finish_grads(buffers, ctx)
    grads = {}
    for each in buffers.main_grads:
        parameter = each.parameter
        whole = torch.full(parameter.global_shape, torch.nan, dtype=torch.float64)
        write_shard(whole, each.main_grad, parameter.boxes, parameter.meta)
        grads[each.name] = whole
    return grads, gradient_norms(buffers, ctx)


@EVERY_FOLD
def test_reduced_gradients_and_norms_equal_those_of_one_rank(fold: ParallelConfig) -> None:
    data = Data.random(fold.dp)
    expected = {n: 2 * g for n, g in on_one_rank(FULL, data).tensors.items() if n not in ("out", "hidden")}
    norm = torch.cat([grad.flatten() for grad in expected.values()]).norm()
    experts = torch.cat([grad.flatten() for name, grad in expected.items() if name.startswith("experts.")]).norm()
    for grads, norms in on_threads(fold, lambda ctx: finished(ctx, FULL, fold, data)):
        held = {n: torch.where(g.isnan(), expected[n], g) for n, g in grads.items()}
        assert all(not g.isnan().all() for g in grads.values())
        FP64_LAYOUT.check_all(held, expected)
        FP64_LAYOUT.check(norms["all"], norm, "norm")
        FP64_LAYOUT.check(norms["experts"], experts, "norm of experts")


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("capacity", [None, CapacityConfig(factor=1.0, pad=True)], ids=["dropless", "padded"])
def test_gloo_processes_equal_one_rank(dispatcher: str, capacity: CapacityConfig | None) -> None:
    fold = parallel(4, tp=2, etp=2, ep=2)
    data = Data.random(fold.dp, padded=True)
    config = moe_config(dispatcher=dispatcher, capacity=capacity, bias=True, shared=True, overlap=True)
    actual = gathered(on_processes(fold, on_this_rank, config, fold, data), fold)
    FP64_LAYOUT.check_all(actual.tensors, on_one_rank(config, data, fold).tensors)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_gloo_processes_support_expert_choice_and_ranks_without_rows(dispatcher: str) -> None:
    fold = parallel(4, ep=4)
    data = Data.random(fold.dp, padded=True)
    for router in ({"balancing": ("expert_choice",)}, {"topk": 1, "pre_softmax": True}):
        config = moe_config(dispatcher=dispatcher, router=router)
        actual = gathered(on_processes(fold, on_this_rank, config, fold, data), fold)
        FP64_LAYOUT.check_all(actual.tensors, on_one_rank(config, data, fold).tensors)
