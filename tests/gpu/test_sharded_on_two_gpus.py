"""ZeRO-1 with NCCL: in-place reductions, averages computed by the collective, and gathers on a separate stream."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig, ProcessInfo
from megatron_moe.config.registry import UPDATE_RULES
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.optim.clip_grads import clip_coefficient, gradient_norms
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.grad_buffers import GradBuffers, finish_grads
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.optim_parameters import FP64
from tests.helpers.optim_ranks import SPEC, make_parameters, my_gradient, run_alone
from tests.helpers.process_pool import free_port
from tests.helpers.tolerances import EXACT, FP64_LAYOUT

pytestmark = pytest.mark.gpu2

NUM_RANKS = 2
NUM_STEPS = 4
MODES = {
    "plain": DataParallelConfig(ddp_bucket_size=100),
    "zero": DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=100),
    "zero-padded": DataParallelConfig(use_distributed_optimizer=True, ddp_pad_buckets_for_high_nccl_busbw=True),
    "zero-early": DataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, ddp_bucket_size=100),
    "plain-early": DataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=100),
    "zero-mean": DataParallelConfig(
        use_distributed_optimizer=True, ddp_average_in_collective=True, ddp_bucket_size=100
    ),
    "zero-fp32-sums": DataParallelConfig(
        use_distributed_optimizer=True, ddp_reduce_scatter_with_fp32_accumulation=True, ddp_bucket_size=100
    ),
}

WHOLE = "adam of whole matrices"


def train(context: ParallelContext, mode: DataParallelConfig, rule: str = "adam") -> dict[str, Tensor]:
    """Runs clipped steps. After the warm-up of NCCL and the allocator, the host must not wait for the device."""
    parameters = make_parameters(context)
    spec = replace(SPEC, optimizer=rule)
    buffers = GradBuffers(parameters.items(), FP64, context, reference.bundle(), optimizer=spec, data_parallel=mode)
    optimizer = Optimizer(buffers, FP64)
    gradients = [
        {name: my_gradient(name, step, p, context).to(context.device) for name, p in parameters.items()}
        for step in range(NUM_STEPS)
    ]
    yes = torch.ones((), dtype=torch.bool, device=context.device)
    for step in range(NUM_STEPS):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
        buffers.begin_step(1)
        # the gradients of this backward pass are the given ones
        sum((p * gradients[step][name]).sum() for name, p in parameters.items()).backward()
        buffers.collect_autograd_grads()
        if mode.overlap_grad_reduce and step:
            assert buffers.reducer.num_started == len(buffers.reducer.buckets), "nothing began early"
        finish_grads(buffers, context)
        norms = gradient_norms(buffers, context)
        optimizer.step(lr=3e-2, weight_decay=0.1, grad_scale=clip_coefficient(norms["all"], 1.0), apply_update=yes)
        torch.cuda.set_sync_debug_mode("default")
    return {**{name: p.detach().cpu() for name, p in parameters.items()}, "norm": norms["all"].cpu()}


def rank_main(rank: int, port: int, folder: str) -> None:
    launch = ProcessInfo(rank=rank, world_size=NUM_RANKS, local_rank=rank, local_world_size=NUM_RANKS, master_port=port)
    context = ParallelContext.start(ParallelConfig(world_size=NUM_RANKS), launch, device="cuda", dtype="fp64")
    found = {name: train(context, mode) for name, mode in MODES.items()}
    UPDATE_RULES.register(WHOLE, replace(UPDATE_RULES.get("adam"), alignment="matrix"))
    for name in ("zero", "zero-early", "zero-mean", "zero-fp32-sums"):
        found[f"{name}-matrices"] = train(context, MODES[name], WHOLE)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    context.stop()


def test_every_data_parallel_mode_matches_one_rank(tmp_path: Path) -> None:
    mp.spawn(rank_main, args=(free_port(), str(tmp_path)), nprocs=NUM_RANKS)
    alone = run_alone(ParallelConfig(world_size=NUM_RANKS), num_steps=NUM_STEPS)
    expected = {name: held.part for name, held in alone.weights.items()} | {"norm": alone.norms[-1]["all"]}
    for rank in range(NUM_RANKS):
        found = pickle.loads(Path(tmp_path, f"{rank}.pickle").read_bytes())
        for name, values in found.items():
            FP64_LAYOUT.check_all(values, expected, f"{name} on rank {rank}")
            EXACT.check_all(values, found["plain"], f"{name} on rank {rank}, against the plain one")
