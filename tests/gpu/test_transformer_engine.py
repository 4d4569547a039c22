"""Transformer Engine on one GPU: its ops against the reference, and training of models with it."""

import importlib.util
import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from arguments.read import read_plan
from benchmarks.harness.timed_run import TimedRun
from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.precision import LowPrecisionConfig, low_precision_config
from megatron_moe.config.run import KernelConfig
from megatron_moe.data.tokenizer import vocab_size_of
from megatron_moe.kernels import autograd
from megatron_moe.kernels.kernel_set import QUANTIZED_MATMUL_OPS
from megatron_moe.kernels.ops import AttentionInputs, GroupedPart, Kernels
from megatron_moe.kernels.registry import check_device, select_kernels
from megatron_moe.precision.quantized_tensor import QuantizedTensor
from tests.gpu.host_sync import no_host_sync
from tests.gpu.test_step_on_one_gpu import LAYERS, SMALL
from tests.helpers import kernel_comparison
from tests.helpers.kernel_comparison import REFERENCE, draw
from tests.helpers.low_precision_operands import Operands, same_copies
from tests.helpers.tolerances import BF16_KERNEL, FP8_KERNEL, FP8_SUM

pytestmark = pytest.mark.gpu1

# Imported before any test runs: once torch has loaded parts of its own cuDNN, Transformer Engine fails to link with
# the system's cuDNN.
if importlib.util.find_spec("transformer_engine") and torch.cuda.is_available():
    importlib.import_module("transformer_engine.pytorch")
CUDA = torch.device("cuda")
GROUPED = ("quantized_grouped_forward", "quantized_grouped_input_grad", "quantized_grouped_weight_grad")


def is_supported(config: LowPrecisionConfig) -> bool:
    try:
        check_device(config.recipe, CUDA)
    except EnvironmentProblem:
        return False
    return True


CONFIGS = {
    "blockwise": low_precision_config("blockwise"),
    "blockwise hybrid, fp32 scales": low_precision_config("blockwise", hybrid=True, power_of_2=False),
    "tensorwise hybrid": low_precision_config("tensorwise", hybrid=True),
    "delayed": low_precision_config("delayed"),
    "mxfp8": low_precision_config("mxfp8"),
    "nvfp4": low_precision_config("nvfp4"),
}
RECIPES = pytest.mark.parametrize(
    "name", [name for name, config in CONFIGS.items() if not torch.cuda.is_available() or is_supported(config)]
)


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
def test_gemms_are_as_accurate_as_plain_torch(accumulate: bool) -> None:
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


def low_precision_kernels(config: LowPrecisionConfig) -> Kernels:
    """Kernel set of plain torch with all FP8 and FP4 ops of Transformer Engine."""
    requests = ((op, "transformer_engine") for op in ("quantize_rows", "quantize_weight", *QUANTIZED_MATMUL_OPS))
    kernels = KernelConfig(kernel_backend="reference", kernel_per_op=tuple(requests))
    return select_kernels(kernels, CUDA, torch.bfloat16, config)


@RECIPES
@pytest.mark.parametrize("shape", [(256, 384), (96, 160), (2048, 1024), (50, 20)], ids=str)
def test_operands_have_the_bytes_of_this_projects_kernels(shape: tuple[int, int], name: str) -> None:
    """Compares the copies of inputs, gradients and weights in every combination. This project's kernels quantise the
    shape (50, 20), which Transformer Engine does not support.
    """
    config = CONFIGS[name]
    theirs, ours = Operands(low_precision_kernels(config), config), Operands(REFERENCE, config)
    x = draw(*shape).bfloat16()
    x[3, 5], x[7, :16] = 300.0, 0.0
    x[shape[0] // 2 :] *= 2.0**-20
    stack = torch.stack([x, 2 * x.flip(0)])
    for role in ("inputs", "grads"):
        for usage in ({}, {"rowwise": False}, {"columnwise": False}):
            same_copies(theirs.rows(x.cuda(), role, **usage), ours.rows(x, role, **usage))
    for weight in (x, stack):
        for columnwise in (False, True):
            made = theirs.weight(weight.cuda(), columnwise=columnwise)
            same_copies(made, ours.weight(weight, columnwise=columnwise))


@RECIPES
def test_operands_and_linear_gemms_need_no_host_sync(name: str) -> None:
    config = CONFIGS[name]
    operands = Operands(low_precision_kernels(config), config)
    x, grad, weight = (
        draw(256, 384).bfloat16().cuda(),
        draw(256, 512).bfloat16().cuda(),
        draw(512, 384).bfloat16().cuda(),
    )
    out = torch.zeros(512, 384, device="cuda")

    def step() -> None:
        x_q, grad_q, weight_q = operands.rows(x), operands.rows(grad, "grads"), operands.weight(weight)
        operands.kernels.quantized_linear_forward(x_q, weight_q, None)
        operands.kernels.quantized_linear_input_grad(grad_q, weight_q)
        operands.kernels.quantized_linear_weight_grad(grad_q, x_q, out, True)

    step()
    with no_host_sync():
        step()


def quantised(operands: Operands, *sizes: int, offsets_e: Tensor | None = None) -> tuple[QuantizedTensor, ...]:
    """Quantises an input [R, I], gradient [R, O] and weight [..., O, I]. `sizes`: R, I, O and the number of experts."""
    num_rows, inputs, outputs, *experts = sizes
    x, grad = draw(num_rows, inputs).bfloat16().cuda(), draw(num_rows, outputs, seed=1).bfloat16().cuda()
    weight = draw(*experts, outputs, inputs, seed=2).bfloat16().cuda()
    return operands.rows(x, "inputs", offsets_e), operands.rows(grad, "grads", offsets_e), operands.weight(weight)


@RECIPES
@pytest.mark.parametrize("sizes", [(1024, 2048, 1536), (96, 160, 224)], ids=str)
def test_linear_gemms_match_dequantised_operands(sizes: tuple[int, int, int], name: str) -> None:
    config = CONFIGS[name]
    x_q, grad_q, weight_q = quantised(Operands(REFERENCE, config), *sizes)
    results = []
    for k in (low_precision_kernels(config), REFERENCE):
        sums = [draw(sizes[2], sizes[1], seed=3).float().cuda() for _ in range(2)]
        for accumulate, out in enumerate(sums):
            k.quantized_linear_weight_grad(grad_q, x_q, out, bool(accumulate))
        products = k.quantized_linear_forward(x_q, weight_q, None), k.quantized_linear_input_grad(grad_q, weight_q)
        results.append([*products, *sums])
    for tolerance, actual, expected in zip((FP8_KERNEL, FP8_KERNEL, FP8_SUM, FP8_SUM), *results, strict=True):
        tolerance.check(actual, expected, name)


@RECIPES
@pytest.mark.parametrize("counts", [[256, 0, 64, 192], [3, 250, 1, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_grouped_gemms_match_dequantised_operands(accumulate: bool, counts: list[int], name: str) -> None:
    config, held = CONFIGS[name], sum(counts)
    ends = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    x_q, grad_q, weight_q = quantised(Operands(REFERENCE, config), held + 5, 384, 512, 4, offsets_e=ends)
    results = []
    for k in (low_precision_kernels(config), REFERENCE):
        out = draw(4, 512, 384, seed=3).float().cuda()
        k.quantized_grouped_weight_grad([GroupedPart(grad_q, x_q, ends)], out, accumulate)
        forward = k.quantized_grouped_forward(x_q, weight_q, ends)[:held]
        results.append([forward, k.quantized_grouped_input_grad(grad_q, weight_q, ends)[:held], out])
    for tolerance, actual, expected in zip((FP8_KERNEL, FP8_KERNEL, FP8_SUM), *results, strict=True):
        tolerance.check(actual, expected, name)


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "delayed"])
def test_fp8_losses_match_those_of_this_projects_kernels(recipe: str) -> None:
    """All operands of the first step have equal bytes; later steps differ because the order of sums differs."""
    losses = []
    named = (
        "--kernel-backend",
        "transformer_engine",
        "--kernel-per-op",
        *(f"{op}=transformer_engine" for op in GROUPED),
    )
    for backend in ((), named):
        flags = [
            "--recipe",
            "m8",
            *SMALL.split(),
            *LAYERS["m8"].split(),
            "--fp8-format",
            "e4m3",
            "--fp8-recipe",
            recipe,
        ]
        plan = read_plan([*flags, *backend], os.environ, vocab_size_of=vocab_size_of)
        os.environ.update(plan.environment)
        trained = TimedRun(plan)
        losses.append(torch.stack([trained.step().loss for _ in range(8)]).cpu())
        trained.close()
    BF16_KERNEL.check(losses[1], losses[0], "losses of eight steps")


@pytest.mark.parametrize("recipe", ["q6", "m8"])
def test_losses_match_those_of_this_projects_kernels(recipe: str) -> None:
    losses = []
    for backend in ("auto", "transformer_engine"):
        flags = ["--recipe", recipe, *SMALL.split(), *LAYERS[recipe].split(), "--kernel-backend", backend]
        plan = read_plan(flags, os.environ, vocab_size_of=vocab_size_of)
        os.environ.update(plan.environment)
        trained = TimedRun(plan)
        losses.append(torch.stack([trained.step().loss for _ in range(8)]).cpu())
        trained.close()
    BF16_KERNEL.check(losses[1], losses[0], "losses of eight steps")
