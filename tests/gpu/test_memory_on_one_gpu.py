"""Recompute and activation offload on a GPU give bitwise identical results and use less memory."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import RopeConfig
from megatron_moe.config.memory import ActivationOffloadConfig, RecomputeConfig
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.moe import ExpertsConfig, MoEConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.data.batch import MicroBatch, to_device
from megatron_moe.kernels.kernel_set import KernelSet
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.memory.activation_offload import ActivationOffload
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.model.gpt import GPT, LossOutput
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.streams import make_host_copies
from tests.helpers import tiny, tiny_models
from tests.helpers.tolerances import EXACT

pytestmark = pytest.mark.gpu1

BATCH, SEQ, HIDDEN = 4, 2048, 512
SMALL = RecomputeConfig(recompute_modules=("core_attn", "moe_act", "layernorm", "mlp", "shared_experts"))
MOVED = ActivationOffloadConfig(
    offload_modules=("attn_norm", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
)
WAYS = {
    "small modules": (SMALL, None),
    "the MoE block": (RecomputeConfig(recompute_modules=("moe",)), None),
    "whole layers": (RecomputeConfig(recompute_method="uniform", recompute_num_layers=1), None),
    "on the host": (RecomputeConfig(), MOVED),
    "both": (SMALL, MOVED),
}


@pytest.fixture(autouse=True)
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Enables deterministic algorithms; otherwise the order of sums in the attention backward varies."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@cache
def kernels() -> tuple[ParallelContext, KernelSet]:
    context = ParallelContext.single(dtype=torch.bfloat16, device="cuda")
    return context, select_kernels(KernelConfig(), context.device, context.dtype)


def gradients_and_peak(
    recompute: RecomputeConfig, offload: ActivationOffloadConfig | None
) -> tuple[dict[str, Tensor], int]:
    """Gradients of the last of three microbatches, and the peak memory above the weights in bytes."""
    context, bundle = kernels()
    moving = None if offload is None else ActivationOffload(offload, make_host_copies(context.device))
    mixer = tiny.attention(hidden_size=HIDDEN, num_heads=8, num_query_groups=2, head_dim=64, rope=RopeConfig(dim=64))
    router = tiny.router(hidden_size=HIDDEN)
    experts = ExpertsConfig(num_experts=8, hidden_size=HIDDEN, ffn_hidden_size=512, activation=tiny.SWIGLU)
    moe = MoEConfig(router=router, experts=experts)
    layers = tuple(LayerConfig(mixer=mixer, feed_forward=moe, norm=tiny.NORM) for _ in range(4))
    config = tiny.model(layers=layers, hidden_size=HIDDEN, max_positions=SEQ, vocab_size=256)
    model = GPT(config, context, bundle, saved_tensors=SavedTensorPolicy(recompute, offload=moving))
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
    return gradients_and_peak(RecomputeConfig(), None)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_bitwise_equal_with_less_memory(way):
    gradients, peak = gradients_and_peak(*WAYS[way])
    print(f"{way}: {peak / 2**20:.0f} MiB, {plain()[1] / 2**20:.0f} MiB plain")
    EXACT.check_all(gradients, plain()[0], way)
    assert peak < plain()[1]
