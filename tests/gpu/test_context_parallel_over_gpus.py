"""Context parallelism with NCCL: equality with one rank, and no host-device synchronisation."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_moe.config.model import ModelConfig, MTPConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.data.batch import MicroBatch, split_sequence, to_device
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.model.gpt import GPT, training_objective
from megatron_moe.model.init import init_parameters
from megatron_moe.parallel.context import ParallelContext
from tests.gpu.experts_over_gpus import ContextOf, on_gpus
from tests.helpers.tiny_models import microbatch
from tests.helpers.tolerances import FP64_LAYOUT
from tests.model.test_context_parallel_gpt import MIXERS, SEQ, documents, hybrid, model, run

NUM_GPUS = pytest.mark.parametrize(
    "num_gpus", [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
)


def cases(num_ranks: int) -> list[tuple[str, ModelConfig, MicroBatch, ParallelConfig]]:
    """Lists every exchange with every kind of attention, with a fixed CP degree and with a degree per microbatch."""
    plain = ParallelConfig(world_size=num_ranks, cp=num_ranks)
    levels = replace(plain, cp_sub_axes=(2, num_ranks // 2))
    dynamic = replace(plain, max_seqlen_per_dp_cp_rank=7)
    batch, packed = microbatch(4, SEQ), microbatch(2, SEQ, max_seqlen=13, **documents())
    found = []
    for mixer in MIXERS:
        for exchange, parallel in (("p2p", plain), ("allgather", plain), ("a2a", plain), ("a2a+p2p", levels)):
            config = model(MIXERS[mixer], exchange, mtp=MTPConfig(num_layers=1))
            found.append((f"{exchange} {mixer}", config, batch, parallel))
            found.append((f"{exchange} {mixer} documents", config, packed, parallel))
        found.append((f"dynamic {mixer}", model(MIXERS[mixer], "p2p"), packed, dynamic))
    contiguous = replace(plain, cp_split="contiguous")
    for mode in ("headwise", "chunkwise"):
        found.append((f"hybrid {mode}", hybrid(mode), batch, contiguous))
        found.append((f"hybrid {mode} documents", hybrid(mode), packed, contiguous))
    return found


def every_case(context_of: ContextOf, num_ranks: int) -> list[Any]:
    results = []
    for _, config, batch, parallel in cases(num_ranks):
        result = run(config, batch, context_of(parallel, torch.float64))
        results.append({name: value.cpu() for name, value in result.gradients.items()} | {"loss": result.scalar.cpu()})
    return results


def without_waiting(context_of: ContextOf, num_ranks: int) -> list[Any]:
    """Runs two steps of a bf16 model; the second step fails if the host waits for the device."""
    ctx = context_of(ParallelConfig(world_size=num_ranks, cp=num_ranks), torch.bfloat16)
    kernels, done = select_kernels(KernelConfig(), ctx.device, ctx.dtype), []
    for exchange in ("p2p", "allgather", "a2a"):
        config = model(MIXERS["gqa"], exchange)
        gpt = GPT(config, ctx, kernels)
        init_parameters(gpt, 7, config.init)
        whole = to_device(microbatch(2, 64), ctx.device)
        for mode in ("default", "error"):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            batch = split_sequence(whole, ctx)
            scalar, _ = training_objective(gpt(batch), batch, mtp=None, per_token=False)
            scalar.backward()
            torch.cuda.set_sync_debug_mode("default")
        done.append((exchange, bool(scalar.isfinite())))
    return done


@NUM_GPUS
def test_every_exchange_matches_one_rank(num_gpus: int) -> None:
    by_rank = on_gpus(num_gpus, every_case)
    for place, (name, config, batch, _) in enumerate(cases(num_gpus)):
        one = run(config, batch, ParallelContext.single())
        for results in by_rank:
            FP64_LAYOUT.check_all(results[place], one.gradients | {"loss": one.scalar}, name)


@NUM_GPUS
def test_exchanges_run_without_host_sync(num_gpus: int) -> None:
    for done in on_gpus(num_gpus, without_waiting):
        assert done == [("p2p", True), ("allgather", True), ("a2a", True)]
