"""The real Transformer Engine on one GPU: its ops against the reference in fp64, and a model that trains by it."""

import importlib.util
import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from arguments.read import read_plan
from benchmarks.harness.timed_run import TimedRun
from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.moe import ActivationConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.data.tokenizer import vocab_size_of
from megatron_moe.kernels import autograd
from megatron_moe.kernels.ops import AttentionInputs, GroupedPart, Kernels
from megatron_moe.kernels.registry import select_kernels
from tests.gpu.test_step_on_one_gpu import LAYERS, SMALL
from tests.helpers import kernel_comparison
from tests.helpers.kernel_comparison import REFERENCE, draw
from tests.helpers.tolerances import BF16_KERNEL

pytestmark = pytest.mark.gpu1

# Imported before any test runs: if torch has loaded parts of its own cuDNN, the library fails to link to the machine's.
if importlib.util.find_spec("transformer_engine") and torch.cuda.is_available():
    importlib.import_module("transformer_engine.pytorch")


def transformer_engine() -> Kernels:
    return select_kernels(KernelConfig(kernel_backend="transformer_engine"), torch.device("cuda"), torch.bfloat16)


def compare(op: Callable[[Kernels], Callable[..., Tensor]], inputs: Sequence[Tensor]) -> None:
    kernel_comparison.compare(transformer_engine(), op, inputs, torch.bfloat16, "cuda")


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_are_as_accurate_as_plain_torch(zero_centered: bool) -> None:
    x, weight, bias = draw(33, 2, 256), draw(256, seed=1), draw(256, seed=2)
    compare(lambda k: lambda x, w: k.rms_norm(x, w, 1e-5, zero_centered), (x, weight))
    compare(lambda k: lambda x, w, b: k.layer_norm(x, w, b, 1e-5, zero_centered), (x, weight, bias))


@pytest.mark.parametrize("q_width, v_width, groups", [(128, 128, 2), (192, 128, 8)])
def test_attention_is_as_accurate_as_plain_torch(q_width: int, v_width: int, groups: int) -> None:
    config = CoreAttentionConfig(softmax_scale=q_width**-0.5)
    inputs = (draw(256, 2, 8, q_width), draw(256, 2, groups, q_width, seed=1), draw(256, 2, groups, v_width, seed=2))
    compare(lambda k: lambda q, key, v: k.attention(AttentionInputs(q, key, v, config)), inputs)


def test_activations_and_loss_are_as_accurate_as_plain_torch() -> None:
    swiglu = ActivationConfig(kind="silu", gated=True)
    compare(lambda k: lambda x, p: k.activation(x, p, swiglu), (draw(100, 512), draw(100, seed=1).abs()))
    compare(lambda k: lambda x: k.activation(x, None, swiglu), (draw(100, 512),))
    labels = torch.arange(64) % 1000

    def loss(kernels: Kernels) -> Callable[[Tensor], Tensor]:
        return lambda x: kernels.cross_entropy(x, labels.to(x.device))

    compare(loss, (draw(64, 1000),))


@pytest.mark.parametrize("accumulate", [False, True])
def test_products_are_as_accurate_as_plain_torch(accumulate: bool) -> None:
    kernels = transformer_engine()
    compare(lambda k: lambda x, w: autograd.linear(k, x, w), (draw(64, 2, 128), draw(256, 128, seed=1)))
    offsets, sizes = torch.tensor([32, 32, 112], dtype=torch.int32), (112, 128)

    def grouped(k: Kernels) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda rows, weight: autograd.grouped_linear(k, rows, weight, offsets.to(rows.device))

    compare(grouped, (draw(*sizes), draw(3, 256, 128, seed=1)))
    rows, grad = draw(*sizes).bfloat16(), draw(112, 256, seed=1).bfloat16()
    outs = []
    for k, device, dtype in ((kernels, "cuda", torch.float32), (REFERENCE, "cpu", torch.float64)):
        out = draw(3, 256, 128, seed=2).float().to(device, dtype)
        operands = (x.to(device).to(torch.bfloat16 if k is kernels else dtype) for x in (grad, rows))
        k.grouped_weight_grad([GroupedPart(*operands, offsets.to(device))], out, accumulate)
        outs.append(out.double().cpu())
    BF16_KERNEL.check(*outs, "grouped weight gradient")


@pytest.mark.parametrize("recipe", ["q6", "m8"])
def test_losses_match_those_of_our_kernels(recipe: str) -> None:
    losses = []
    for backend in ("auto", "transformer_engine"):
        flags = ["--recipe", recipe, *SMALL.split(), *LAYERS[recipe].split(), "--kernel-backend", backend]
        plan = read_plan(flags, os.environ, vocab_size_of=vocab_size_of)
        os.environ.update(plan.environment)
        trained = TimedRun(plan)
        losses.append(torch.stack([trained.step().loss for _ in range(8)]).cpu())
        trained.close()
    BF16_KERNEL.check(losses[1], losses[0], "losses of eight steps")
