"""On a GPU too, what runs again or waits on the host changes no bit, and takes less memory."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from megatron_moe.data.batch import MicroBatch, to_device
from megatron_moe.kernels.bundle import Bundle
from megatron_moe.kernels.choose import choose
from megatron_moe.memory.keeping import Keeping
from megatron_moe.memory.offload import Offload
from megatron_moe.memory.transfers import transfers_of
from megatron_moe.model.gpt import GPT, LossOutput
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.attention import RopeSpec
from megatron_moe.specs.memory import OffloadSpec, RecomputeSpec
from megatron_moe.specs.model import LayerSpec
from megatron_moe.specs.moe import ExpertsSpec, MoESpec
from megatron_moe.specs.run import KernelSpec
from tests import tiny, tiny_models
from tests.tolerances import EXACT

pytestmark = pytest.mark.gpu1

BATCH, SEQ, HIDDEN = 4, 2048, 512
SMALL = RecomputeSpec(granularity="selective", modules=("core_attn", "moe_act", "layernorm", "mlp", "shared_experts"))
MOVED = OffloadSpec(modules=("attn_norm", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"))
WAYS = {
    "small modules": (SMALL, None),
    "the MoE block": (RecomputeSpec(granularity="selective", modules=("moe",)), None),
    "whole layers": (RecomputeSpec(granularity="full", method="uniform", num_layers=1), None),
    "on the host": (RecomputeSpec(), MOVED),
    "both": (SMALL, MOVED),
}


@pytest.fixture(autouse=True)
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention's backward adds up in any order unless it is told not to."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@cache
def kernels() -> tuple[ParallelContext, Bundle]:
    context = ParallelContext.single(dtype=torch.bfloat16, device="cuda")
    return context, choose(KernelSpec(), context.device, context.dtype)


def gradients_and_peak(recompute: RecomputeSpec, offload: OffloadSpec | None) -> tuple[dict[str, Tensor], int]:
    """Of the last of three microbatches; the memory above that of the weights, in bytes."""
    context, bundle = kernels()
    moving = None if offload is None else Offload(offload, transfers_of(context.device))
    mixer = tiny.attention(hidden_size=HIDDEN, num_heads=8, num_query_groups=2, head_dim=64, rope=RopeSpec(dim=64))
    router = tiny.router(hidden_size=HIDDEN)
    experts = ExpertsSpec(num_experts=8, hidden_size=HIDDEN, ffn_hidden_size=512, activation=tiny.SWIGLU)
    moe = MoESpec(router=router, experts=experts)
    layers = tuple(LayerSpec(mixer=mixer, feed_forward=moe, norm=tiny.NORM) for _ in range(4))
    spec = tiny.model(layers=layers, hidden_size=HIDDEN, max_positions=SEQ, vocab_size=256)
    model = GPT(spec, context, bundle, keeping=Keeping(recompute, offload=moving))
    generator = torch.Generator("cuda").manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.03, generator=generator)
    base = torch.cuda.memory_allocated()
    for number in range(3):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        if moving is not None:
            moving.begin_pass([("forward", (number, 0)), ("backward", (number, 0))])
            moving.begin_forward((number, 0))
        output = model(on_gpu(number))
        assert isinstance(output, LossOutput)
        output.loss_BS.sum().backward()
        del output
    torch.cuda.synchronize()
    return {name: p.grad for name, p in model.named_parameters()}, torch.cuda.max_memory_allocated() - base


def on_gpu(number: int) -> MicroBatch:
    return to_device(tiny_models.microbatch(BATCH, SEQ, seed=number, vocab=256), torch.device("cuda"))


@cache
def plain() -> tuple[dict[str, Tensor], int]:
    return gradients_and_peak(RecomputeSpec(), None)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_the_same_bits_in_less_memory(way):
    gradients, peak = gradients_and_peak(*WAYS[way])
    print(f"{way}: {peak / 2**20:.0f} MiB, {plain()[1] / 2**20:.0f} MiB plain")
    EXACT.check_all(gradients, plain()[0], way)
    assert peak < plain()[1]
