"""What every rank of the tests of experts over GPUs runs."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from megatron_moe.config.model import InitConfig
from megatron_moe.config.moe import CapacityConfig, MoEConfig
from megatron_moe.config.parallel import Launch, ParallelConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.model.init import init_parameters
from megatron_moe.moe.moe_layer import MoELayer
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import free_port
from tests.moe.parallel.folded import HIDDEN, Data, folds, make_mb, moe_config, on_this_rank

BALANCED = {
    "score_function": "sigmoid",
    "expert_bias": True,
    "balancing": ("aux_loss", "seq_aux_loss"),
    "aux_loss_coeffs": (0.3, 0.2),
    "z_loss_coeff": 0.1,
}
ContextOf = Callable[[ParallelConfig, torch.dtype], ParallelContext]
CAPACITIES = (None, CapacityConfig(factor=0.75), CapacityConfig(factor=1.0, pad=True))


def cases(num_ranks: int) -> list[tuple[ParallelConfig, MoEConfig, Data]]:
    """Every fold and dispatcher, with features in turn."""
    found = []
    for place, fold in enumerate(folds(num_ranks)):
        for dispatcher in ("allgather", "alltoall"):
            capacity = CAPACITIES[(place + (dispatcher == "alltoall")) % 3]
            router = BALANCED if capacity is None else {}
            config = moe_config(
                dispatcher=dispatcher, router=router, capacity=capacity, bias=True, shared=True, overlap=True
            )
            found.append((fold, config, Data.random(fold.dp, padded=True)))
    return found


def every_case(context_of: ContextOf, num_ranks: int) -> list[Any]:
    results = []
    for fold, config, data in cases(num_ranks):
        ctx = context_of(fold, torch.float64)
        results.append(on_this_rank(ctx, config, fold, data))
    return results


def without_waiting(context_of: ContextOf, num_ranks: int) -> list[Any]:
    """Two steps of what declares no host read; the second one fails if anything waits for the device."""
    fold = ParallelConfig(world_size=num_ranks, ep=num_ranks)
    ctx = context_of(fold, torch.bfloat16)
    kernels = select_kernels(KernelConfig(), ctx.device, ctx.dtype)
    done = []
    for dispatcher, capacity in (("allgather", None), ("alltoall", CapacityConfig(factor=1.0, pad=True))):
        config = moe_config(
            dispatcher=dispatcher, router={"dtype": "fp32"}, capacity=capacity, shared=True, overlap=True
        )
        layer = MoELayer(config, 0, ctx, kernels)
        init_parameters(layer, 5, InitConfig(method="unit_gain"))
        hidden = torch.randn(64, 2, HIDDEN, device=ctx.device).bfloat16()
        for mode in ("default", "error"):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            leaf = hidden.detach().requires_grad_()
            layer(leaf, make_mb(leaf, None)).sum().backward()
            torch.cuda.set_sync_debug_mode("default")
        done.append((dispatcher, bool(leaf.grad.isfinite().all())))
    return done


def rank_main(rank: int, num_ranks: int, port: int, job: Callable[..., list[Any]], folder: str) -> None:
    launch = Launch(rank=rank, world_size=num_ranks, local_rank=rank, local_world_size=num_ranks, master_port=port)
    world = ParallelContext.start(ParallelConfig(world_size=num_ranks), launch, device="cuda")

    def context_of(config: ParallelConfig, dtype: torch.dtype) -> ParallelContext:
        return ParallelContext.within(config, rank, device=world.device, dtype=dtype)

    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(job(context_of, num_ranks)))
    world.stop()


def on_gpus(num_ranks: int, job: Callable[..., list[Any]], folder: Path) -> list[list[Any]]:
    """What `job` returns on every rank, one process per GPU."""
    mp.spawn(rank_main, args=(num_ranks, free_port(), job, str(folder)), nprocs=num_ranks)
    return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(num_ranks)]
