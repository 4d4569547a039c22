"""Context parallelism with NCCL and with copies between GPUs: equality with one rank and with each other, and no
host-device synchronisation."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_moe.config.context_ring import RingBuffers
from megatron_moe.config.model import ModelConfig, MTPConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.data.batch import MicroBatch, split_sequence, to_device
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.model.core_attention import core_attention
from megatron_moe.model.gpt import GPT, training_objective
from megatron_moe.model.init import init_parameters
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.context_parallel import SequencePart, split_positions
from megatron_moe.parallel.peer_ring import NO_PEERS, ContextPeers, new_context_peers
from tests.gpu.experts_over_gpus import ContextOf, on_gpus
from tests.helpers.split_attention import BATCH, KERNELS, Case, of_rank
from tests.helpers.tiny_models import make_mb, microbatch
from tests.helpers.tolerances import FP64_LAYOUT
from tests.model.test_context_parallel_gpt import MIXERS, SEQ, documents, hybrid, model, run

BUFFERS = RingBuffers(keys_values=2**20, gradients=2**20)
EXCHANGES = ("p2p", "p2p by copies", "allgather", "allgather by copies", "a2a")
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
    for exchange in EXCHANGES:
        kind, *by_copies = exchange.split(maxsplit=1)
        config = model(MIXERS["gqa"], kind)
        gpt = GPT(config, ctx, kernels, context_peers=copying(ctx) if by_copies else NO_PEERS)
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


def copying(ctx: ParallelContext) -> ContextPeers:
    peers = new_context_peers(ctx, BUFFERS, 2**20, KERNELS.sum_contributions_)
    assert peers.ring is not None and peers.shards is not None
    return peers


def copies_and_collectives(context_of: ContextOf, num_ranks: int) -> list[tuple[str, list[bool]]]:
    """Compares attention over copies with that over NCCL: 5 eager calls, then 5 graph replays."""
    found = []
    # NCCL sums the contributions of more than two ranks in another order than copies do
    for exchange in ("p2p", "allgather") if num_ranks == 2 else ("p2p",):
        for cut in ("zigzag", "contiguous"):
            for dtype in (torch.float64, torch.bfloat16):
                ctx = context_of(ParallelConfig(world_size=num_ranks, cp=num_ranks, cp_split=cut), dtype)
                peers, inputs = copying(ctx), AttentionInputsOfRank(ctx, exchange)
                expected = [inputs.fill(number).step(NO_PEERS) for number in range(5)]
                copied = [inputs.fill(number).step(peers) for number in range(5)]
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    outputs = inputs.step(peers)
                same = [equal(*pair) for pair in zip(copied, expected, strict=True)]
                for number in range(5):
                    inputs.fill(number)
                    graph.replay()
                    same.append(equal(outputs, expected[number]))
                found.append((f"{exchange} {cut} {dtype}", same))
    return found


class AttentionInputsOfRank:
    """Two calls of attention, as of two layers, on one rank. The tensors keep their addresses."""

    def __init__(self, ctx: ParallelContext, exchange: str) -> None:
        core = (("context_exchange", exchange),)
        cp, self.case = ctx.group("cp"), Case(groups=4, width=24, value_width=16, seq=256, core=core)
        parts = split_positions(ctx.config.cp_split, self.case.seq, cp.size)
        self.ctx, self.chunks = ctx, parts[cp.rank]
        self.mb = make_mb(BATCH, self.case.seq // cp.size, part=SequencePart(parts, cp.rank))
        shards = of_rank(self.case.tensors(ctx.dtype), self.chunks)
        self.tensors = {name: x.to(ctx.device) for name, x in shards.items()}

    def fill(self, number: int) -> "AttentionInputsOfRank":
        """Sets the tensors to other values for each `number`."""
        for name, x in of_rank(self.case.tensors(), self.chunks).items():
            self.tensors[name].copy_(x.roll(number, dims=0) + number)
        return self

    def step(self, peers: ContextPeers) -> list[torch.Tensor]:
        """Output and gradients of two calls, the second of which reads the output of the first as its values."""
        q, k, v = (self.tensors[name].detach().requires_grad_() for name in "qkv")
        state = self.case.config, self.mb, "attention", self.ctx, KERNELS
        first = core_attention(q, k, v, None, *state, peers)
        second = core_attention(k, q, first, None, *state, peers)
        return [second.detach(), *torch.autograd.grad(second, (q, k, v), self.tensors["grad"])]


def equal(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(tensors, others, strict=True))


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
        assert done == [(exchange, True) for exchange in EXCHANGES]


@NUM_GPUS
def test_copies_have_the_bits_of_nccl_eager_and_replayed(num_gpus: int) -> None:
    for found in on_gpus(num_gpus, copies_and_collectives):
        assert len(found) == (8 if num_gpus == 2 else 4)
        for name, same in found:
            assert same == [True] * 10, name
