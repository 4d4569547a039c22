"""Transformer Engine, grouped-gemm and apex against the reference, by stand-ins with the packages' own signatures.

What the stand-ins cannot tell, whether the packages compute what they say, Transformer Engine is asked on a GPU
(tests/gpu/test_transformer_engine.py)."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.moe import ActivationConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels import autograd, registry
from megatron_moe.kernels.kernel_set import Priority
from megatron_moe.kernels.ops import AttentionInputs, GroupedPart, Kernels
from tests.helpers import kernel_comparison
from tests.helpers.kernel_comparison import BARS, REFERENCE, draw
from tests.helpers.tolerances import BF16_KERNEL

STAND_INS = Path(__file__).parents[1] / "stand_ins"
BACKENDS = ("transformer_engine", "grouped_gemm", "apex")
CUDA = torch.device("cuda")
SWIGLU = ActivationConfig(kind="silu", gated=True)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The packages, for one test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(STAND_INS))
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def backend(name: str) -> ModuleType:
    return importlib.import_module(f"megatron_moe.kernels.backends.{name}")


def bundle(name: str) -> Kernels:
    """Plain torch with this backend's ops, without asking it whether it fits the CPU."""
    ops = dict(vars(REFERENCE)) | {op: getattr(backend(name), op) for op in backend(name).PROVIDES}
    return SimpleNamespace(**ops)  # type: ignore[return-value]


@pytest.mark.parametrize("name", BACKENDS)
def test_an_optional_backend_is_taken_by_wish_only_and_refused_where_it_is_missing(name: str) -> None:
    found = {each.name: each for each in registry.discover(registry.BACKENDS)}[name]
    assert found.by_wish and found.missing() == found.needs
    with pytest.raises(EnvironmentProblem, match=f"'{name}' cannot compute .* it needs .*{name}.*, not installed here"):
        registry.select_kernels(KernelConfig(per_op=((found.provides[0], name),)), torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("name", BACKENDS)
def test_automatic_choice_leaves_an_installed_optional_backend_alone(name: str, stand_ins: None) -> None:
    found = registry.discover(registry.BACKENDS)
    assert all(not each.missing() for each in found if each.by_wish)
    chosen = registry.select_kernels(KernelConfig(), torch.device("cpu"), torch.float32).choices
    assert name not in {choice.backend for choice in chosen}
    assert f"megatron_moe.kernels.backends.{name}" not in sys.modules, "imported without being asked for"


@pytest.mark.parametrize("name", BACKENDS)
def test_an_optional_backend_judges_devices_and_dtypes(name: str, stand_ins: None) -> None:
    module = backend(name)
    for op in module.PROVIDES:
        assert module.judge(op, torch.device("cpu"), torch.bfloat16).fit is Priority.NO
        assert module.judge(op, CUDA, torch.float64).fit is Priority.NO
        assert module.judge(op, CUDA, torch.bfloat16).fit is Priority.YES
    wishes = KernelConfig(backend=name)
    assert {c.op for c in registry.select_kernels(wishes, CUDA, torch.bfloat16).choices if c.backend == name} == set(
        module.PROVIDES
    )


@pytest.mark.parametrize("dtype", BARS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["transformer_engine", "apex"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(0, 5), (1, 4), (3, 2, 7)])
def test_norms_are_those_of_the_reference(
    stand_ins: None, shape: tuple[int, ...], zero_centered: bool, name: str, dtype: torch.dtype
) -> None:
    x, weight, bias, kernels = draw(*shape), draw(shape[-1], seed=1), draw(shape[-1], seed=2), bundle(name)
    kernel_comparison.compare(kernels, lambda k: lambda x, w: k.rms_norm(x, w, 1e-5, zero_centered), (x, weight), dtype)
    kernel_comparison.compare(
        kernels, lambda k: lambda x, w, b: k.layer_norm(x, w, b, 1e-5, zero_centered), (x, weight, bias), dtype
    )


@pytest.mark.parametrize("name", ["transformer_engine", "apex"])
@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (4, 2, 3)])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=["fp32_out", "bf16_out"])
def test_linear_ops_are_those_of_the_reference(
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


@pytest.mark.parametrize("name", ["transformer_engine", "grouped_gemm"])
@pytest.mark.parametrize("sizes", [[2, 3, 1], [0, 4, 0], [0, 0, 0]])
@pytest.mark.parametrize("past_the_end", [0, 2])
@pytest.mark.parametrize("accumulate", [False, True])
def test_grouped_products_are_those_of_the_reference(
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


@pytest.mark.parametrize("window", [None, (2, 0)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("extra", ["none", "sinks", "documents"])
def test_attention_is_that_of_the_reference(
    stand_ins: None, extra: str, causal: bool, window: tuple[int, int] | None
) -> None:
    config = CoreAttentionConfig(softmax_scale=0.6, causal=causal, window=window)
    segments = (torch.arange(7) // 3).expand(2, 7) if extra == "documents" else None
    inputs = [draw(7, 2, 4, 6), draw(7, 2, 2, 6, seed=1), draw(7, 2, 2, 3, seed=2)]
    if extra == "sinks":
        inputs.append(draw(4, seed=3))

    def op(kernels: Kernels) -> Callable[..., Tensor]:
        return lambda q, k, v, sinks=None: kernels.attention(AttentionInputs(q, k, v, config, sinks, segments))

    kernel_comparison.compare(bundle("transformer_engine"), op, inputs, torch.bfloat16)


@pytest.mark.parametrize(
    "config", [SWIGLU, ActivationConfig(kind="gelu"), ActivationConfig(kind="silu", gated=True, clamp=0.5)]
)
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("weighted", [False, True])
def test_activations_are_those_of_the_reference(
    stand_ins: None, weighted: bool, rows: int, config: ActivationConfig
) -> None:
    inputs = [draw(rows, 3 * config.fan)] + ([draw(rows, seed=1).abs()] if weighted else [])

    def op(kernels: Kernels) -> Callable[..., Tensor]:
        return lambda x, probs=None: kernels.activation(x, probs, config)

    kernel_comparison.compare(bundle("transformer_engine"), op, inputs, torch.bfloat16)


def test_rows_of_probability_zero_may_hold_anything(stand_ins: None) -> None:
    kernels = bundle("transformer_engine")
    x = torch.tensor([[1.0, 2.0], [float("nan"), float("inf")]], dtype=torch.bfloat16, requires_grad=True)
    probs = torch.tensor([0.5, 0.0], requires_grad=True)
    out = kernels.activation(x, probs, SWIGLU)
    grad_x, grad_probs = torch.autograd.grad(out, (x, probs), torch.ones_like(out))
    assert out[1].eq(0).all() and grad_x[1].eq(0).all() and grad_probs[1] == 0
    assert grad_x[0].ne(0).all() and grad_probs[0] != 0


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_cross_entropy_is_that_of_the_reference(stand_ins: None, tokens: int) -> None:
    labels = torch.arange(tokens) % 5

    def op(kernels: Kernels) -> Callable[..., Tensor]:
        return lambda logits: kernels.cross_entropy(logits, labels)

    kernel_comparison.compare(bundle("transformer_engine"), op, [draw(tokens, 5)], torch.bfloat16)


def test_a_linear_layer_trains_through_another_backend(stand_ins: None) -> None:
    """Forward, input gradient and weight gradient as the model calls them."""
    x, weight = draw(4, 3).bfloat16().requires_grad_(), draw(5, 3, seed=1).bfloat16().requires_grad_()
    grads = [torch.autograd.grad(autograd.linear(k, x, weight).sum(), (x, weight)) for k in (bundle("apex"), REFERENCE)]
    for ours, theirs in zip(*grads, strict=True):
        BF16_KERNEL.check(ours, theirs, "gradient")
