"""GEMMs with quantised operands: values against sums of dequantised elements, gradients, saved tensors."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.config.precision import LowPrecisionConfig, low_precision_config
from megatron_moe.kernels import autograd
from megatron_moe.kernels.autograd import ExpertRows, ShardedInput
from megatron_moe.kernels.kernel_set import OPS, KernelSet
from megatron_moe.kernels.ops import GroupedPart, RowIndex
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.reference.sequential import sequential
from megatron_moe.layers.linear import Linear, with_shared_fp8_copy
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import new_parameter
from megatron_moe.precision.carried_copies import QuantizedActivation, carried_copy
from megatron_moe.precision.linear_quantizer import DelayedScaling, LinearQuantizer
from tests.helpers.tolerances import EXACT, FP64_REF

KERNELS = reference.bundle()
CONFIGS = {
    "blockwise": low_precision_config("blockwise", blocks=4),
    "blockwise, fp32 scales": low_precision_config("blockwise", blocks=4, power_of_2=False),
    "blockwise, hybrid": low_precision_config("blockwise", blocks=4, hybrid=True),
    "tensorwise": low_precision_config("tensorwise"),
    "mxfp8": low_precision_config("mxfp8", hybrid=True),
}
OFFSETS = ([2, 2, 11, 12], [0, 0, 0, 13], [13, 13, 13, 13], [1, 5, 9, 13], [0, 0, 0, 0])
"""Ends of four experts' rows among thirteen: an empty expert, all on one, blocks cut by experts, none at all."""


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ends(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def by_block(x: Tensor, block: tuple[int, int], largest: float, element: torch.dtype, power_of_2: bool) -> Tensor:
    """Quantises and dequantises a matrix, one block at a time; block (0, 0) is the whole matrix."""
    out, (height, width) = torch.zeros_like(x), (size or max(x.shape) for size in block)
    for i in range(0, x.shape[0], height):
        for j in range(0, x.shape[1], width):
            part = x[i : i + height, j : j + width].float()
            scale = torch.tensor(largest) / part.abs().max() if part.numel() and part.any() else torch.ones(())
            if power_of_2:
                scale = 2.0 ** torch.floor(torch.log2(scale))
            value = (part * scale).clamp(-largest, largest).to(element).double() * (1 / scale).double()
            out[i : i + height, j : j + width] = value.to(x.dtype)
    return out


def rounded(x: Tensor, config: LowPrecisionConfig, role: str) -> Tensor:
    """`by_block` in the format of the role: x is quantised along its last dim."""
    fmt = {"x": config.inputs, "w": config.weights, "g": config.grads}[role]
    largest, element = {"e4m3": (448.0, torch.float8_e4m3fn), "e5m2": (57344.0, torch.float8_e5m2)}[fmt.element]
    return by_block(x, fmt.block, largest, element, fmt.scale in ("power of 2", "e8m0"))


def rounded_columns(x: Tensor, config: LowPrecisionConfig, role: str) -> Tensor:
    """`rounded` along the first dim of x."""
    return rounded(x.T.contiguous(), config, role).T


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("weight_grad", [True, False])
def test_linear_multiplies_quantised_operands(config: LowPrecisionConfig, weight_grad: bool) -> None:
    config = replace(config, weight_grad=weight_grad)
    x, weight, bias = draw(3, 2, 10), draw(7, 10, seed=1), draw(7, seed=2)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    out = autograd.linear(KERNELS, *leaves, quantizer=LinearQuantizer(config, KERNELS))
    grad = draw(3, 2, 7, seed=3)
    out.backward(grad)
    x_TI, grad_TO = x.view(6, 10), grad.view(6, 7)
    expected = rounded(x_TI, config, "x") @ rounded(weight, config, "w").T + bias
    FP64_REF.check(out.detach().view(6, 7), expected, "output")
    expected = rounded(grad_TO, config, "g") @ rounded_columns(weight, config, "w")
    FP64_REF.check(leaves[0].grad.view(6, 10), expected, "input gradient")
    expected = grad_TO.T @ x_TI
    if weight_grad:
        expected = rounded_columns(grad_TO, config, "g").T @ rounded_columns(x_TI, config, "x")
    FP64_REF.check(leaves[1].grad, expected, "weight gradient")
    FP64_REF.check(leaves[2].grad, grad_TO.sum(dim=0), "bias gradient")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("kernels", [KERNELS, sequential(KERNELS)], ids=["grouped", "looped"])
def test_grouped_linear_quantises_every_expert_separately(config, offsets, kernels) -> None:
    rows, weight, grad = draw(13, 10), draw(4, 7, 10, seed=1), draw(13, 7, seed=2)
    rows[offsets[-1] :], grad[offsets[-1] :] = torch.nan, torch.nan  # padding rows have any content
    leaves = [t.clone().requires_grad_() for t in (rows, weight)]
    quantizer = LinearQuantizer(config, kernels)
    out = autograd.grouped_linear(kernels, leaves[0], leaves[1], ends(offsets), quantizer=quantizer)
    out.backward(grad)
    for expert, (start, end) in enumerate(zip([0, *offsets], offsets, strict=False)):
        x, g, w = rows[start:end], grad[start:end], rounded(weight[expert], config, "w")
        FP64_REF.check(out[start:end].detach(), rounded(x, config, "x") @ w.T, f"output of expert {expert}")
        w = rounded_columns(weight[expert], config, "w")
        FP64_REF.check(leaves[0].grad[start:end], rounded(g, config, "g") @ w, f"input gradient of expert {expert}")
        expected = rounded_columns(g, config, "g").T @ rounded_columns(x, config, "x")
        FP64_REF.check(leaves[1].grad[expert], expected, f"weight gradient of expert {expert}")


@pytest.mark.parametrize("config", [None, *CONFIGS.values()], ids=["plain", *CONFIGS])
def test_gathered_input_is_freed_before_the_input_gradient(config: LowPrecisionConfig | None) -> None:
    x, weight = draw(6, 10).requires_grad_(), draw(7, 10, seed=1).requires_grad_()
    gathered: list[weakref.ref[Tensor]] = []

    def gather(shard: Tensor) -> Tensor:
        whole = torch.cat([shard, x[3:].detach()])
        gathered.append(weakref.ref(whole))
        return whole

    def input_grad(*operands: Any) -> Tensor:
        assert len(gathered) == 1, "the weight gradient is computed first"
        assert gathered[0]() is None
        return KERNELS.linear_input_grad(*operands)

    product = {"linear_input_grad" if config is None else "quantized_linear_input_grad": input_grad}
    kernels = KernelSet.of({op: getattr(KERNELS, op) for op in OPS} | product, ())
    quantizer = None if config is None else LinearQuantizer(config, kernels)
    sharded = ShardedInput(x[:3].detach(), gather)
    autograd.linear(kernels, x, weight, sharded=sharded, quantizer=quantizer).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_saving_the_input_gives_the_same_weight_gradient(config: LowPrecisionConfig) -> None:
    """The original input, the shard of a gathered input and rows gathered in fc1 are quantised again in backward."""
    x, weight, grad = draw(6, 10), draw(7, 10, seed=1), draw(6, 7, seed=2)
    index = RowIndex(token_R=torch.arange(6), choice_R=torch.arange(6), offsets_E=ends([4, 6]), rows_TK=None)
    gathered = ShardedInput(x[:3], gather=lambda shard: torch.cat([shard, x[3:]]))

    def run(how: str) -> tuple[list[tuple[torch.dtype, int]], Tensor, Tensor]:
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        quantizer, saved = LinearQuantizer(config, KERNELS, save_input=how == "input"), []

        def pack(tensor: Tensor) -> Tensor:
            saved.append((tensor.dtype, tensor.numel()))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            sharded = gathered if how == "shard" else None
            out = autograd.linear(KERNELS, *leaves, sharded=sharded, quantizer=quantizer)
        out.backward(grad)
        return saved, leaves[0].grad, leaves[1].grad

    copy_saved, *copy_grads = run("copy")
    assert copy_saved[0] == (torch.float8_e4m3fn, 60), "only the columnwise bytes are kept"
    assert all(dtype in (torch.float32, torch.uint8) for dtype, _ in copy_saved[1:])
    for how, elements in (("input", 60), ("shard", 30)):
        saved, *grads = run(how)
        assert saved == [(torch.float64, elements)]
        for found, expected in zip(grads, copy_grads, strict=True):
            EXACT.check(found, expected, how)
    results = []
    for given in (index, None):
        leaves = x.clone().requires_grad_(), torch.stack([weight, 2 * weight]).requires_grad_()
        quantizer = LinearQuantizer(config, KERNELS)
        autograd.grouped_linear(KERNELS, *leaves, ends([4, 6]), given, quantizer=quantizer).backward(grad)
        results.append([leaf.grad for leaf in leaves])
    for found, expected in zip(*results, strict=True):
        EXACT.check(found, expected, "rows gathered in fc1")


EVERY_RECIPE = {
    "blockwise": low_precision_config("blockwise"),
    "tensorwise": low_precision_config("tensorwise"),
    "delayed": low_precision_config("delayed", hybrid=True),
    "mxfp8": low_precision_config("mxfp8"),
    "nvfp4": low_precision_config("nvfp4"),
}


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e38], ids=str)
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
@pytest.mark.parametrize("recipe", EVERY_RECIPE)
def test_an_operand_that_is_not_finite_makes_results_nan(recipe: str, where: str, value: float) -> None:
    """Casts do not saturate inf, and scales of earlier steps (delayed scaling) do not hide a magnitude of 1e38."""
    config = EVERY_RECIPE[recipe]
    if value == 1e38 and recipe != "delayed":
        return  # scales computed from the tensor itself represent it
    delayed = DelayedScaling(config, torch.device("cpu"), None, 0) if recipe == "delayed" else None
    quantizer = LinearQuantizer(config, KERNELS, delayed=delayed)
    x, weight, grad = (draw(32, 32, seed=seed, dtype=torch.float32) for seed in range(3))
    {"input": x, "weight": weight, "gradient": grad}[where][3, 5] = value
    leaves = x.requires_grad_(), weight.requires_grad_()
    out = autograd.linear(KERNELS, *leaves, quantizer=quantizer)
    out.backward(grad)
    affected = {"input": (out, weight.grad), "weight": (out, x.grad), "gradient": (x.grad, weight.grad)}[where]
    assert all(result.isnan().any() for result in affected)
    unaffected = {"input": x.grad, "weight": weight.grad, "gradient": out}[where]
    assert unaffected.isfinite().all()


@pytest.mark.parametrize("grouped", [False, True], ids=["linear", "grouped"])
def test_emulated_weight_gradients_in_bf16_are_rounded_once(grouped: bool) -> None:
    """Products are accumulated in fp32, as on tensor cores, also over several microbatches of expert rows."""
    config = CONFIGS["tensorwise"]
    layer = LinearQuantizer(config, KERNELS)
    grad, x = (draw(64, width, seed=width, dtype=torch.bfloat16) for width in (24, 40))
    offsets = ends([20, 64]) if grouped else None
    operands = (
        layer.quantize_grad(grad, rowwise=False, columnwise=True, offsets_e=offsets),
        layer.quantize_input(x, rowwise=False, columnwise=True, offsets_e=offsets),
    )
    shape = (2, 24, 40) if grouped else (24, 40)
    found, wide = draw(*shape, dtype=torch.bfloat16), torch.empty(shape)
    wide.copy_(found)
    for out in (found, wide):
        if offsets is None:
            KERNELS.linear_weight_grad(*operands, out, True)
        else:
            KERNELS.grouped_weight_grad([GroupedPart(*operands, offsets)] * 3, out, True)
    EXACT.check(found, wide.bfloat16(), "fp32 products, rounded to bf16")


def test_results_have_the_dtype_of_the_operands() -> None:
    x, weight = draw(6, 10, dtype=torch.bfloat16), draw(7, 10, seed=1, dtype=torch.bfloat16)
    quantizer = LinearQuantizer(CONFIGS["blockwise"], KERNELS)
    out = autograd.linear(KERNELS, x, weight, quantizer=quantizer)
    config = CONFIGS["blockwise"]
    expected = rounded(x.float(), config, "x") @ rounded(weight.float(), config, "w").T
    EXACT.check(out, expected.bfloat16())


def test_evaluation_makes_no_columnwise_copy() -> None:
    made = []

    class Recorder(LinearQuantizer):
        def quantize_input(self, x, **options):
            made.append(options.get("columnwise"))
            return super().quantize_input(x, **options)

    x, weight = draw(6, 10), draw(7, 10, seed=1).requires_grad_()
    for grad_enabled in (True, False):
        with torch.set_grad_enabled(grad_enabled):
            autograd.linear(KERNELS, x, weight, quantizer=Recorder(CONFIGS["blockwise"], KERNELS))
    assert made == [True, False]


def test_the_weight_is_quantised_once_per_step() -> None:
    weight = draw(8, 8, seed=1).requires_grad_()
    quantizer = LinearQuantizer(CONFIGS["blockwise"], KERNELS)
    x = draw(4, 8)
    first = autograd.linear(KERNELS, x, weight, quantizer=quantizer)
    cached = quantizer.quantize_weight(weight)
    EXACT.check(autograd.linear(KERNELS, x, weight, quantizer=quantizer).detach(), first.detach(), "second microbatch")
    assert quantizer.quantize_weight(weight) is cached
    with torch.no_grad():
        weight.mul_(3)
    assert quantizer.quantize_weight(weight) is cached, "the copy of this step is reused"
    quantizer.invalidate_weight()
    FP64_REF.check(
        autograd.linear(KERNELS, x, weight, quantizer=quantizer).detach(),
        rounded(x, CONFIGS["blockwise"], "x") @ rounded(weight.detach(), CONFIGS["blockwise"], "w").T,
        "after the update",
    )


@pytest.mark.parametrize("weight_grad", [True, False])
def test_layers_with_the_same_input_share_its_copy(weight_grad: bool) -> None:
    config, kernels, calls = replace(CONFIGS["blockwise"], weight_grad=weight_grad), reference.bundle(), []
    quantize = kernels.quantize_rows
    kernels.quantize_rows = lambda *given, **named: calls.append(given[0]) or quantize(*given, **named)
    ctx, meta = ParallelContext.single(), ParamMeta(role="matrix")
    linears = [Linear(new_parameter((7, 10), meta, ctx), None, ctx, kernels) for _ in range(2)]
    for linear in linears:
        torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(2))
        linear.quantizer = LinearQuantizer(config, kernels)
    x = draw(3, 2, 10).requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        shared = with_shared_fp8_copy(x, *linears)
        outs = [linear(shared) for linear in linears]
    assert len(calls) == 1, "one for both layers"
    assert len({tensor.data_ptr() for tensor in saved}) == len(saved) / 2, "the same input"
    assert not any(isinstance(tensor, QuantizedActivation) for tensor in saved), "would keep the rowwise copy alive"
    EXACT.check(outs[1].detach(), outs[0].detach(), "the same input")
    EXACT.check(linears[0](x).detach(), outs[0].detach(), "a cast of its own")
    (grad,) = torch.autograd.grad(outs[0].sum(), x)
    EXACT.check(grad, torch.autograd.grad(linears[0](x).sum(), x)[0], "gradient")
    calls.clear()
    with torch.no_grad():
        x.mul_(2)
    assert carried_copy(shared, config.inputs, columnwise=False) is None, "of the values before"
    EXACT.check(linears[0](shared).detach(), linears[1](x).detach(), "the modified input")
    assert len(calls) == 2
    linears[1].quantizer = LinearQuantizer(replace(config, inputs=replace(config.inputs, element="e5m2")), kernels)
    assert with_shared_fp8_copy(x, *linears) is x, "other formats"


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("of_experts", [True, False])
@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
def test_stored_activation_inputs_are_those_that_backward_reads(name: str, of_experts: bool, gated: bool) -> None:
    """The output is that of the original input, the gradients are those of an input that is rounded to FP8."""
    config = replace(CONFIGS[name], activation_inputs=True)
    ffn = 64 if name == "mxfp8" else 12
    x = draw(13, (2 if gated else 1) * ffn)
    weight, probs, grad = draw(4, 7, ffn, seed=1), draw(13, seed=2).abs(), draw(13, 7, seed=3)
    options: ExpertRows | None = ExpertRows(ends([2, 2, 11, 13]), probs.requires_grad_(), None, 13)
    if not of_experts:
        weight, options = weight[0], None
    rounded_x, saved = rounded(x, config, "x"), []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tensor.dtype, tensor.numel()))
        return tensor

    def run(rows: Tensor, config: LowPrecisionConfig) -> tuple[Tensor, list[Tensor]]:
        leaves = [each.detach().clone().requires_grad_() for each in (rows, weight)]
        quantizer = LinearQuantizer(config, KERNELS)
        activation = ActivationConfig(kind="silu", gated=gated)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = autograd.activation_linear(KERNELS, *leaves, activation, quantizer, rows=options)
        probs.grad = None
        out.backward(grad)
        return out.detach(), [each.grad for each in leaves] + ([] if probs.grad is None else [probs.grad])

    out, grads = run(x, config)
    assert (torch.float8_e4m3fn, x.numel()) in saved
    assert (torch.float64, x.numel()) not in saved
    EXACT.check(out, run(x, CONFIGS[name])[0], "output")
    for found, expected in zip(grads, run(rounded_x, CONFIGS[name])[1], strict=True):
        EXACT.check(found, expected, "gradient")
    assert not torch.equal(rounded_x, x)
