"""Ops of every backend against the reference: torch_native, interpreted Triton, and stand-ins of Transformer Engine,
grouped-gemm and apex with the packages' signatures.

`tests/gpu/test_transformer_engine.py` tests the real Transformer Engine."""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.precision import LowPrecisionConfig, low_precision_config
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels import autograd, registry
from megatron_moe.kernels.kernel_set import LOW_PRECISION_OPS, Priority
from megatron_moe.kernels.ops import AttentionInputs, GroupedPart, Kernels
from megatron_moe.kernels.reference import low_precision as reference_low_precision
from tests.helpers import kernel_comparison
from tests.helpers.kernel_comparison import BARS, REFERENCE, draw, provided_ops
from tests.helpers.low_precision_operands import Operands, same_copies
from tests.helpers.tolerances import BF16_KERNEL, FP32_REF
from tests.kernels.test_linear_attention import inputs, results, segments_of

STAND_INS = Path(__file__).parents[1] / "stand_ins"
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # numpy, of the interpreter
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", BARS, ids=["fp32", "bf16"])
OPTIONAL = ("transformer_engine", "grouped_gemm", "apex", "fla")
CUDA = torch.device("cuda")
SWIGLU = ActivationConfig(kind="silu", gated=True)
TE_CONFIGS = {
    "blockwise": low_precision_config("blockwise"),
    "blockwise hybrid, fp32 scales": low_precision_config("blockwise", hybrid=True, power_of_2=False),
    "tensorwise": low_precision_config("tensorwise", hybrid=True),
    "delayed": low_precision_config("delayed"),
    "mxfp8": low_precision_config("mxfp8", hybrid=True),
    "nvfp4": low_precision_config("nvfp4"),
}
TE = "transformer_engine"
TE_RECIPES = pytest.mark.parametrize("config", TE_CONFIGS.values(), ids=TE_CONFIGS)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the stand-in packages importable for one test."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    yield
    packages = {path.stem for path in STAND_INS.iterdir()}
    for module in set(sys.modules):
        if module.partition(".")[0] in packages or module.rpartition("backends.")[2].partition(".")[0] in OPTIONAL:
            del sys.modules[module]


def backend(name: str) -> ModuleType:
    package = f"megatron_moe.kernels.backends.{name}"
    return importlib.import_module(package if name in ("apex", "grouped_gemm", "fla") else f"{package}.backend")


def bundle(name: str) -> Kernels:
    """Kernel set of plain torch with this backend's ops, regardless of whether the backend supports the CPU."""
    ops = dict(vars(REFERENCE)) | {op: getattr(backend(name), op) for op in provided_ops(backend(name))}
    return SimpleNamespace(**ops)  # type: ignore[return-value]


@pytest.mark.parametrize("name", OPTIONAL)
def test_optional_backends_are_selected_by_name_only_and_rejected_if_not_installed(name: str) -> None:
    found = {each.name: each for each in registry.discover_backends(registry.BACKENDS)}[name]
    assert found.on_request and found.missing() == found.needs
    with pytest.raises(EnvironmentProblem, match=f"'{name}' cannot compute .* it requires .*{name}.* .not installed"):
        registry.select_kernels(
            KernelConfig(kernel_per_op=((found.provides[0], name),)), torch.device("cpu"), torch.bfloat16
        )


@pytest.mark.parametrize("name", OPTIONAL)
def test_auto_neither_selects_nor_imports_installed_optional_backends(name: str, stand_ins: None) -> None:
    found = registry.discover_backends(registry.BACKENDS)
    assert all(not each.missing() for each in found if each.on_request)
    chosen = registry.select_kernels(KernelConfig(), torch.device("cpu"), torch.float32).choices
    assert name not in {choice.backend for choice in chosen}
    assert f"megatron_moe.kernels.backends.{name}" not in sys.modules, "imported without being asked for"


@pytest.mark.parametrize("name", OPTIONAL)
def test_optional_backends_support_bf16_on_gpus_only(name: str, stand_ins: None) -> None:
    module = backend(name)
    for op in provided_ops(module):
        assert module.support(op, torch.device("cpu"), torch.bfloat16).fit is Priority.NO
        assert module.support(op, CUDA, torch.float64).fit is Priority.NO
        assert module.support(op, CUDA, torch.bfloat16).fit is Priority.YES
    config = KernelConfig(kernel_backend=name)
    chosen = {c.op for c in registry.select_kernels(config, CUDA, torch.bfloat16).choices if c.backend == name}
    assert chosen == set(provided_ops(module)) - set(LOW_PRECISION_OPS)


@DTYPES
@pytest.mark.parametrize("name", ["triton", "torch_native", "transformer_engine", "apex"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (5, 3, 48), (70, 9), (3, 2, 2, 100)])
def test_norms_match_the_reference(
    stand_ins: None, shape: tuple[int, ...], zero_centered: bool, name: str, dtype: torch.dtype
) -> None:
    x, residual, weight, bias = (draw(*size, seed=n) for n, size in enumerate((shape, shape, shape[-1:], shape[-1:])))
    compare = partial(kernel_comparison.compare, bundle(name), dtype=dtype)
    compare(lambda k: lambda x, w: k.rms_norm(x, w, 1e-6, zero_centered), [x, weight])
    compare(lambda k: lambda r, x, w: torch.stack(k.add_rms_norm(r, x, w, 1e-6, zero_centered)), [residual, x, weight])
    compare(lambda k: lambda r, x, w: k.add_rms_norm(r, x, w, 1e-6, zero_centered)[1], [residual, x, weight])
    compare(lambda k: lambda r, x: k.add_rms_norm(r, x, weight.to(x), 1e-6, zero_centered)[0], [residual, x])
    if shape[-1] > 1:  # over one channel the layer norm is its bias, and its gradient is rounding
        shifted = 3 + x if name == "triton" else x  # its variance must not cancel
        compare(lambda k: lambda x, w, b: k.layer_norm(x, w, b, 1e-6, zero_centered), [shifted, weight, bias])


@pytest.mark.parametrize("name", ["transformer_engine", "apex"])
@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (4, 2, 3)])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=["fp32_out", "bf16_out"])
def test_linear_ops_match_the_reference(
    stand_ins: None, wide: torch.dtype, accumulate: bool, shape: tuple[int, ...], name: str
) -> None:
    kernels, dtype = bundle(name), torch.bfloat16
    x, weight, bias = draw(*shape).to(dtype), draw(5, 3, seed=1).to(dtype), draw(5, seed=2).to(dtype)
    grad = draw(*shape[:-1], 5, seed=3).to(dtype)
    pairs = [(k.linear_forward(x, weight, bias), k.linear_input_grad(grad, weight)) for k in (kernels, REFERENCE)]
    for ours, theirs in zip(*pairs, strict=True):
        BF16_KERNEL.check(ours, theirs, "product")
    outs = []
    for k in (kernels, REFERENCE):
        out = draw(5, 3, seed=4).to(wide)
        k.linear_weight_grad(grad, x, out, accumulate)
        outs.append(out)
    BF16_KERNEL.check(*outs, "weight gradient")


@pytest.mark.parametrize("documents", [None, [3, 1, 5]], ids=["one document", "documents"])
@pytest.mark.parametrize(
    ("delta", "channels", "eps"),
    [(True, False, 1e-6), (True, False, 1e-2), (True, True, None), (False, False, None), (False, True, None)],
)
def test_linear_attention_matches_the_reference(
    stand_ins: None, delta: bool, channels: bool, eps: float | None, documents: list[int] | None
) -> None:
    values = inputs(14, 2, 2, 4, 8, 6, delta=delta, channels=channels)
    values = [None if x is None else x.float() for x in values]
    segments = segments_of(documents, 2, 14)
    actual, expected = (results(k.linear_attention, values, segments, 0.3, eps) for k in (bundle("fla"), REFERENCE))
    FP32_REF.check_all(actual, expected)


@pytest.mark.parametrize(
    ("version", "major", "allowed"), [("3.6.0", 9, False), ("3.6.0", 10, True), ("3.3.1", 9, True), ("3.7.1", 9, True)]
)
def test_fla_is_rejected_where_triton_miscompiles_it(
    stand_ins: None, version: str, major: int, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = backend("fla")
    monkeypatch.setattr(module.triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    found = module.support("linear_attention", CUDA, torch.bfloat16)
    assert (found.fit is Priority.YES) == allowed
    assert allowed or "Triton 3.6.0 miscompiles its backward on Hopper" in found.reason


@pytest.mark.parametrize("name", ["transformer_engine", "grouped_gemm"])
@pytest.mark.parametrize("sizes", [[2, 3, 1], [0, 4, 0], [0, 0, 0]])
@pytest.mark.parametrize("past_the_end", [0, 2])
@pytest.mark.parametrize("accumulate", [False, True])
def test_grouped_gemms_match_the_reference(
    stand_ins: None, accumulate: bool, past_the_end: int, sizes: list[int], name: str
) -> None:
    kernels, dtype, held = bundle(name), torch.bfloat16, sum(sizes)
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    rows = torch.cat([draw(held, 4), torch.full((past_the_end, 4), float("nan"), dtype=torch.float64)]).to(dtype)
    grad = torch.cat([draw(held, 6, seed=1), torch.full((past_the_end, 6), float("nan"), dtype=torch.float64)]).to(
        dtype
    )
    weight = draw(len(sizes), 6, 4, seed=2).to(dtype)
    results = []
    for k in (kernels, REFERENCE):
        out = draw(len(sizes), 6, 4, seed=3).float()
        k.grouped_weight_grad([GroupedPart(grad, rows, offsets)], out, accumulate)
        forward = k.grouped_forward(rows, weight, offsets)[:held]
        results.append((forward, k.grouped_input_grad(grad, weight, offsets)[:held], out))
    for what, ours, theirs in zip(("forward", "input gradient", "weight gradient"), *results, strict=True):
        BF16_KERNEL.check(ours, theirs, what)


@pytest.mark.parametrize(
    ("name", "dtype"), [("torch_native", FP32), ("torch_native", BF16), ("transformer_engine", BF16)]
)
@pytest.mark.parametrize("seq, heads, groups, qk_dim, v_dim", [(1, 1, 1, 1, 1), (7, 4, 2, 6, 6), (5, 6, 1, 12, 8)])
@pytest.mark.parametrize("causal, window", [(True, None), (False, None), (True, (2, 0)), (False, (1, 2))])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("extra", ["none", "sinks", "off_by_one"])
def test_attention_matches_the_reference(
    stand_ins: None, seq, heads, groups, qk_dim, v_dim, causal, window, documents, extra, name, dtype
) -> None:
    config = CoreAttentionConfig(softmax_scale=0.6, causal=causal, window=window, off_by_one=extra == "off_by_one")
    segments = (torch.arange(seq) * 2 // seq).expand(2, seq) if documents else None
    inputs = [draw(seq, 2, heads, qk_dim), draw(seq, 2, groups, qk_dim, seed=1), draw(seq, 2, groups, v_dim, seed=2)]
    inputs += [draw(heads, seed=3)] if extra == "sinks" else []

    def op(kernels: Kernels) -> Callable[..., Tensor]:
        return lambda q, k, v, sinks=None: kernels.attention(AttentionInputs(q, k, v, config, sinks, segments))

    kernel_comparison.compare(bundle(name), op, inputs, dtype)


OPS_BACKENDS = pytest.mark.parametrize("name", ["triton", "torch_native", "transformer_engine"])


@DTYPES
@OPS_BACKENDS
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu"])
def test_activations_match_the_reference(stand_ins: None, kind: Any, weighted: bool, name: str, dtype) -> None:
    plain, gated = ActivationConfig(kind=kind), ActivationConfig(kind=kind, gated=True)
    for config, rows in product((plain, gated, replace(gated, clamp=0.7, linear_offset=1.0)), (0, 9)):
        inputs = [2 * draw(rows, 20 * config.fc1_width_factor)] + ([draw(rows, seed=1).abs() + 0.1] if weighted else [])

        def op(kernels: Kernels, config: ActivationConfig = config) -> Callable[..., Tensor]:
            return lambda x, probs=None: kernels.activation(x, probs, config)

        kernel_comparison.compare(bundle(name), op, inputs, dtype)


@DTYPES
@OPS_BACKENDS
def test_activation_and_gradients_of_rows_without_probability_are_zero(stand_ins: None, name: str, dtype) -> None:
    x, probs = draw(4, 16).to(dtype), torch.tensor([0.5, 0.0, 0.25, 0.0]).to(dtype).requires_grad_()
    x[1], x[3] = torch.nan, torch.inf
    out = bundle(name).activation(x.requires_grad_(), probs, SWIGLU)
    grad = torch.ones_like(out)
    if name == "triton":
        grad[3] = torch.nan  # rows past the last offset are undefined
    for tensor in (out.detach(), *torch.autograd.grad(out, [x, probs], grad)):
        assert (tensor[[1, 3]] == 0).all() and torch.isfinite(tensor).all()
        assert (tensor[[0, 2]] != 0).any()


@DTYPES
@OPS_BACKENDS
@pytest.mark.parametrize(("tokens", "vocab"), [(5, 33), (1, 1), (3, 8200), (0, 7)])
def test_cross_entropy_matches_the_reference(stand_ins: None, tokens: int, vocab: int, name: str, dtype) -> None:
    labels = torch.arange(tokens) * 7 % vocab
    compare = partial(kernel_comparison.compare, bundle(name), dtype=dtype)
    compare(lambda k: lambda logits: k.cross_entropy(logits, labels), [5 * draw(tokens, vocab)])


def test_linear_layer_gradients_by_a_mixed_kernel_set(stand_ins: None) -> None:
    """Forward, input gradient and weight gradient as the model calls them."""
    x, weight = draw(4, 3).bfloat16().requires_grad_(), draw(5, 3, seed=1).bfloat16().requires_grad_()
    grads = [torch.autograd.grad(autograd.linear(k, x, weight).sum(), (x, weight)) for k in (bundle("apex"), REFERENCE)]
    for ours, theirs in zip(*grads, strict=True):
        BF16_KERNEL.check(ours, theirs, "gradient")


@TE_RECIPES
@pytest.mark.parametrize("usage", [{}, {"columnwise": False}, {"rowwise": False}], ids=str)
def test_operands_of_transformer_engine_have_the_bytes_of_this_projects_kernels(
    stand_ins: None, usage, config: LowPrecisionConfig
) -> None:
    """Covers whole matrices and expert rows, with sizes that are multiples of a block, multiples of 32, and odd."""
    theirs, ours = Operands(bundle(TE), config), Operands(REFERENCE, config)
    for shape in ((256, 384), (96, 160), (50, 20)):
        x = draw(*shape).bfloat16()
        same_copies(theirs.rows(x, **usage), ours.rows(x, **usage))
        ends = torch.tensor([0, shape[0] // 3, shape[0] // 3, shape[0]], dtype=torch.int32)
        same_copies(theirs.rows(x, "grads", ends, **usage), ours.rows(x, "grads", ends, **usage))
        columnwise = usage.get("columnwise", True)
        same_copies(theirs.weight(x, columnwise=columnwise), ours.weight(x, columnwise=columnwise))
        stack = torch.stack([x, 2 * x.flip(0)])
        made, expected = (k.weight(stack, columnwise=columnwise) for k in (theirs, ours))
        same_copies(made, expected)
        assert theirs.weight(stack.flip(0), columnwise=columnwise, out=made) is made
        same_copies(made, ours.weight(stack.flip(0), columnwise=columnwise))


@TE_RECIPES
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
def test_gemms_with_an_infinity_that_transformer_engine_saturates_are_nan(
    stand_ins: None, value: float, config: LowPrecisionConfig
) -> None:
    """Rows after the last expert's rows are undefined and must not make other rows NaN."""
    kernels, fmt = bundle(TE), replace(config.grads, stochastic=False)
    finite, lost = draw(256, 384).bfloat16(), draw(256, 384, seed=1).bfloat16()
    lost[3, 130] = value
    scale = torch.ones(()) if config.recipe == "delayed" else None
    both: dict[str, Any] = {"rowwise": True, "columnwise": True}
    rows, lost_rows = (kernels.quantize_rows(x, fmt, scale=scale, **both) for x in (finite, lost))
    weight, lost_weight = (
        kernels.quantize_weight(x, config.weights, columnwise=True, scale=scale) for x in (finite, lost)
    )
    assert kernels.quantized_linear_forward(rows, weight, None).isfinite().all()
    assert kernels.quantized_linear_forward(lost_rows, weight, None)[3].isnan().all()
    assert kernels.quantized_linear_forward(rows, lost_weight, None)[:, 3].isnan().all()
    grads = kernels.quantize_rows(draw(32, 256).bfloat16(), fmt, scale=scale, **both)
    assert kernels.quantized_linear_input_grad(grads, lost_weight)[:, 130].isnan().all()
    out = torch.zeros(384, 384)
    kernels.quantized_linear_weight_grad(rows, lost_rows, out, False)
    assert out[:, 130].isnan().all()
    ends = torch.tensor([2, 3], dtype=torch.int32)
    scales = torch.ones(2) if config.recipe == "delayed" else None
    held = kernels.quantize_rows(lost, fmt, rowwise=True, columnwise=False, offsets_e=ends, scale=scales)
    stack = Operands(REFERENCE, config).weight(torch.stack([finite, finite]))
    assert kernels.quantized_grouped_forward(held, stack, ends)[:3].isfinite().all()


def test_gradients_are_rounded_stochastically_by_key_instead_of_by_transformer_engine(stand_ins: None) -> None:
    fmt, x = TE_CONFIGS["nvfp4"].grads, draw(32, 64).bfloat16()
    options: dict[str, Any] = {"rowwise": True, "columnwise": True, "seed": torch.tensor(5)}
    same_copies(*(k.quantize_rows(x, fmt, **options) for k in (bundle(TE), REFERENCE)))


@TE_RECIPES
@pytest.mark.parametrize("num_rows", [96, 50, 0])
def test_fp8_linear_gemms_of_transformer_engine_match_the_reference(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch, num_rows: int, config: LowPrecisionConfig
) -> None:
    operands = Operands(REFERENCE, config)
    x, grad, bias = draw(num_rows, 160).bfloat16(), draw(num_rows, 224, seed=1).bfloat16(), draw(224).bfloat16()
    x_q, grad_q, weight_q = operands.rows(x), operands.rows(grad, "grads"), operands.weight(draw(224, 160).bfloat16())
    results = []
    for k in (REFERENCE, bundle(TE)):
        sums = [draw(224, 160, seed=3).float() for _ in range(2)]
        for accumulate, out in enumerate(sums):
            k.quantized_linear_weight_grad(grad_q, x_q, out, bool(accumulate))
        forward = k.quantized_linear_forward(x_q, weight_q, bias)
        results.append([forward, k.quantized_linear_input_grad(grad_q, weight_q), *sums])
        if num_rows == 96:  # sizes that its kernels support
            monkeypatch.delattr(reference_low_precision, "_rows", raising=False)
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype is theirs.dtype
        BF16_KERNEL.check(theirs, ours, "product")


@TE_RECIPES
@pytest.mark.parametrize("sizes", [[32, 0, 64, 0], [3, 50, 1, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_fp8_grouped_gemms_of_transformer_engine_match_the_reference(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch, accumulate: bool, sizes: list[int], config: LowPrecisionConfig
) -> None:
    """Experts have different numbers of rows, one has none, and further rows follow the last expert's rows."""
    operands, held = Operands(REFERENCE, config), sum(sizes)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x, grad = draw(held + 5, 160).bfloat16(), draw(held + 5, 224, seed=1).bfloat16()
    x[held:] = grad[held:] = torch.nan
    x_q, grad_q = operands.rows(x, "inputs", ends), operands.rows(grad, "grads", ends)
    weight_q = operands.weight(draw(4, 224, 160).bfloat16())
    results = []
    for k in (REFERENCE, bundle(TE)):
        out = draw(4, 224, 160, seed=3).float()
        k.quantized_grouped_weight_grad([GroupedPart(grad_q, x_q, ends)] * 2, out, accumulate)
        forward = k.quantized_grouped_forward(x_q, weight_q, ends)[:held]
        results.append([forward, k.quantized_grouped_input_grad(grad_q, weight_q, ends)[:held], out])
        monkeypatch.delattr(reference_low_precision, "_rows", raising=False)
        monkeypatch.delattr(reference_low_precision, "_expert_rows", raising=False)
    for ours, theirs in zip(*results, strict=True):
        BF16_KERNEL.check(theirs, ours, "grouped product")


def test_fp8_grouped_gemms_of_transformer_engine_must_be_named(stand_ins: None, monkeypatch) -> None:
    """These GEMMs synchronise with the device, so they are selected only if they are requested by name."""
    monkeypatch.setattr(registry, "check_device", lambda recipe, device: None)
    by_name = set(backend(TE).BY_NAME)
    for config in TE_CONFIGS.values():
        all_ops = KernelConfig(kernel_backend="transformer_engine")
        chosen = {c.op: c for c in registry.select_kernels(all_ops, CUDA, BF16, config).choices}
        own = {op for op in LOW_PRECISION_OPS if chosen[op].backend == "transformer_engine"}
        assert own == set(provided_ops(backend(TE))) & set(LOW_PRECISION_OPS) - by_name
        for op in by_name:
            assert f"--kernel-per-op {op}=transformer_engine is needed" in chosen[op].reason
        named = KernelConfig(kernel_per_op=tuple((op, "transformer_engine") for op in sorted(by_name)))
        chosen = {c.op: c for c in registry.select_kernels(named, CUDA, BF16, config).choices}
        assert {op for op in LOW_PRECISION_OPS if chosen[op].backend == "transformer_engine"} == by_name
