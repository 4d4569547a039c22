"""Tensor and sequence parallelism with NCCL: equality with one GPU, and no host-device synchronisation."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from megatron_moe.config.parallel import ProcessInfo
from megatron_moe.config.run import KernelConfig
from megatron_moe.data.batch import to_device
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.model.gpt import GPT, training_objective
from megatron_moe.model.init import init_parameters
from megatron_moe.optim.clip_grads import gradient_norms
from megatron_moe.optim.grad_buffers import GradBuffers, finish_grads
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import named_parameters
from megatron_moe.parallel.sequence_shards import new_peer_shards
from tests.helpers.optim_parameters import BF16
from tests.helpers.process_pool import free_port
from tests.helpers.sharded import LAYOUTS, check_equal, train
from tests.helpers.sharded_models import DENSE, SPARSE, batches

pytestmark = pytest.mark.gpu2

NUM_RANKS = 2
OVER_SEQUENCE = DENSE | {f"sparse {name}": config for name, config in SPARSE.items()}
CASES = {"tp2": DENSE, "tp2-sp": OVER_SEQUENCE, "tp2-sp-overlap": OVER_SEQUENCE}
"""Maps the name of a layout to the models that are trained with it."""
WITHOUT_SYNC = ("tp2-sp", "tp2-sp-overlap")
"""Layouts in which a step does not synchronise with the device."""


def step_without_waiting(ctx: ParallelContext) -> bool:
    """Runs three steps of a bf16 model up to `finish_grads`; the last one fails if the host waits for the device."""
    config, kernels = SPARSE["shared"], select_kernels(KernelConfig(), ctx.device, ctx.dtype)
    peers = new_peer_shards(ctx, 2**16 if ctx.config.tp_comm_overlap else 0, kernels.sum_contributions_)
    model = GPT(config, ctx, kernels, peers=peers)
    init_parameters(model, 7, config.init)
    buffers = GradBuffers(named_parameters(model), BF16, ctx, kernels)
    batch = to_device(batches(1)[0][0], ctx.device)
    for number in range(3):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if number == 2 else "default")
        buffers.begin_step()
        training_objective(model(batch), batch, mtp=None, per_token=False)[0].backward()
        buffers.collect_autograd_grads()
        finish_grads(buffers, ctx)
        norm = gradient_norms(buffers, ctx)["all"]
        torch.cuda.set_sync_debug_mode("default")
    return bool(torch.isfinite(norm))


def rank_main(rank: int, ports: list[int], folder: str) -> None:
    found: dict[str, Any] = {}
    for (layout, configs), port in zip(CASES.items(), ports, strict=False):
        ctx = start(rank, layout, port, "fp64")
        found[layout] = {name: train(config, batches(2), ctx) for name, config in configs.items()}
        ctx.stop()
    for layout, port in zip(WITHOUT_SYNC, ports[-len(WITHOUT_SYNC) :], strict=True):
        ctx = start(rank, layout, port, "bf16")
        found[f"{layout} finite"] = step_without_waiting(ctx)
        ctx.stop()
    if rank == 0:
        alone = ParallelContext.single(device="cuda:0")
        found["alone"] = {name: train(config, batches(2), alone) for name, config in CASES["tp2-sp"].items()}
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))


def start(rank: int, layout: str, port: int, dtype: Any) -> ParallelContext:
    launch = ProcessInfo(rank=rank, world_size=NUM_RANKS, local_rank=rank, local_world_size=NUM_RANKS, master_port=port)
    return ParallelContext.start(LAYOUTS[layout], launch, device="cuda", dtype=dtype)


def test_every_layer_type_matches_one_gpu_without_host_sync(tmp_path: Path) -> None:
    ports = [free_port() for _ in range(len(CASES) + len(WITHOUT_SYNC))]
    mp.spawn(rank_main, args=(ports, str(tmp_path)), nprocs=NUM_RANKS)
    ranks = [pickle.loads(Path(tmp_path, f"{rank}.pickle").read_bytes()) for rank in range(NUM_RANKS)]
    for layout, configs in CASES.items():
        for name in configs:
            check_equal([found[layout][name] for found in ranks], ranks[0]["alone"][name])
    assert all(found[f"{layout} finite"] for found in ranks for layout in WITHOUT_SYNC)
