"""Experts whose casts are fused into other ops: results, saved tensors and memory policies."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_moe.config.memory import RecomputeConfig
from megatron_moe.config.mlp import ActivationConfig, MLPConfig
from megatron_moe.config.moe import ExpertsConfig, SharedExpertsConfig
from megatron_moe.config.precision import LowPrecisionConfig, low_precision_config
from megatron_moe.config.transport import LOCAL
from megatron_moe.kernels.kernel_set import KernelSet
from megatron_moe.kernels.ops import RowIndex
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.layers.resources import ModelResources
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.moe.experts import Experts
from megatron_moe.moe.shared_experts import SharedExperts
from megatron_moe.moe.token_dispatcher.base import DispatchedTokens, ExpertComm, RowFormats
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.precision.linear_quantizer import LinearQuantizer
from tests.helpers.modules import module_of
from tests.helpers.quantizers import quantizers
from tests.helpers.tolerances import EXACT
from tests.moe.routings import fill

TOKENS, TOPK, EXPERTS, HIDDEN, FFN = 13, 2, 4, 12, 8
CONFIGS = {
    "blockwise": low_precision_config("blockwise", blocks=4),
    "weight gradients in bf16": low_precision_config("blockwise", blocks=4, weight_grad=False),
    "hybrid": low_precision_config("blockwise", blocks=4, hybrid=True, weight_grad=False),
    "fp32 scales": low_precision_config("blockwise", blocks=4, power_of_2=False, weight_grad=False),
    "mxfp8": replace(low_precision_config("mxfp8"), weight_grad=False),
}
KINDS = {"swiglu": ActivationConfig(kind="silu", gated=True), "squared_relu": ActivationConfig(kind="squared_relu")}


def counted(calls: dict[str, int]) -> KernelSet:
    """Reference kernels that count the calls of every op."""

    def count(op: str, *arguments: object, **named: object) -> object:
        calls[op] = calls.get(op, 0) + 1
        return getattr(reference, op)(*arguments, **named)

    kernels = reference.bundle()
    for op in ("quantize_rows", "quantize_permuted", "quantize_activation", "quantize_activation_grad", "permute"):
        setattr(kernels, op, partial(count, op))
    return kernels


def experts(
    config: LowPrecisionConfig, kind: str, kernels: KernelSet, policy: SavedTensorPolicy | None = None, ffn: int = FFN
) -> Experts:
    fields = {"hidden_size": HIDDEN, "ffn_hidden_size": ffn, "activation": KINDS[kind]}
    ctx = ParallelContext.single(dtype=torch.float32)
    resources = ModelResources(ctx, kernels, policy or SavedTensorPolicy(), quantizers=quantizers(config, kernels))
    made = Experts(ExpertsConfig(num_experts=EXPERTS, **fields), resources)
    fill(made)
    return made


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids_TK = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK).indices
    ids_TK[3, 1] = -1
    probs_TK = torch.rand(TOKENS, TOPK, generator=generator) * (ids_TK >= 0)
    return torch.randn(TOKENS, HIDDEN, generator=generator), ids_TK, probs_TK


def sorted_rows(
    x_TH: Tensor, index: RowIndex, probs_R: Tensor, kernels: KernelSet, *, gathers_in_fc1: bool
) -> DispatchedTokens:
    """Input of the experts, as dispatchers return it."""
    comm = ExpertComm(ParallelContext.single(dtype=torch.float32), kernels, LOCAL, EXPERTS)
    dispatcher = comm.new_dispatcher(RowFormats(gathers_in_fc1=gathers_in_fc1))
    return dispatcher.sorted_rows(x_TH, index, probs_R)


def run(made: Experts, kernels: KernelSet, *, gathers_in_fc1: bool, sums: bool = False) -> dict[str, Tensor]:
    """Output and all gradients of two microbatches. With `sums`, the experts also add up the rows of each token."""
    x_TH, ids_TK, probs_TK = tokens()
    for _ in range(2):
        x_TH, probs_TK = x_TH.detach().requires_grad_(), probs_TK.detach().requires_grad_()
        index = kernels.sort_rows(ids_TK, EXPERTS, None)
        probs_R = kernels.gather_probs(probs_TK, index)
        rows = sorted_rows(x_TH, index, probs_R, kernels, gathers_in_fc1=gathers_in_fc1)
        out = made(replace(rows, sums_tokens=sums))
        out_TH = kernels.unpermute(out.data, index, TOKENS) if out.index is None else out.data
        out_TH.backward(torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)))
    found = {"output": out_TH.detach(), "tokens": x_TH.grad, "probs": probs_TK.grad}
    return found | {name: parameter.grad for name, parameter in made.named_parameters()}


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        EXACT.check(actual[name], value, name)
        assert value.abs().max() > 0, name


@pytest.mark.parametrize(("gathers_in_fc1", "sums"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_fused_casts_change_no_number(config, kind, gathers_in_fc1, sums, monkeypatch) -> None:
    calls: dict[str, int] = {}
    kernels, ffn = counted(calls), 32 if config.recipe == "mxfp8" else FFN
    made = experts(config, kind, kernels, ffn=ffn)
    assert made.has_fused_casts
    fused = run(made, kernels, gathers_in_fc1=gathers_in_fc1, sums=sums)
    assert calls["quantize_activation"] == calls["quantize_activation_grad"] == 2
    # Each microbatch quantises the rows of fc1 and the gradient of the output of fc2. If fc1 gathers
    # its rows, quantised weight gradients quantise them again in backward.
    assert calls.get("quantize_permuted", 0) == gathers_in_fc1 * (4 if config.weight_grad else 2) + 2 * sums
    assert calls.get("quantize_rows", 0) == (2 if gathers_in_fc1 else 4) - 2 * sums
    monkeypatch.setattr(Experts, "has_fused_casts", False)
    same(fused, run(experts(config, kind, kernels, ffn=ffn), kernels, gathers_in_fc1=False))


def test_fused_casts_save_neither_rows_nor_the_result_of_the_activation() -> None:
    made = experts(CONFIGS["weight gradients in bf16"], "swiglu", kernels := reference.bundle())
    x_TH, ids_TK, probs_TK = tokens()
    index = kernels.sort_rows(ids_TK, EXPERTS, None)
    probs_R = kernels.gather_probs(probs_TK, index)
    rows = sorted_rows(x_TH.requires_grad_(), index, probs_R, kernels, gathers_in_fc1=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        made(rows)
    num_rows = len(index.token_R)
    shapes = sorted(tuple(each.shape) for each in saved if each.dtype.is_floating_point)
    assert shapes == sorted([(TOKENS, HIDDEN), (num_rows,), (num_rows, 2 * FFN)])


def test_recomputing_the_activation_changes_nothing() -> None:
    recompute = RecomputeConfig(recompute_modules=("moe_act",))
    config, kernels = CONFIGS["weight gradients in bf16"], reference.bundle()
    expected = run(experts(config, "swiglu", kernels), kernels, gathers_in_fc1=True)
    policy = SavedTensorPolicy(recompute)
    same(run(experts(config, "swiglu", kernels, policy), kernels, gathers_in_fc1=True), expected)


@pytest.mark.parametrize("fields", [{"bias": True}, {"probs_on_output": True}, {"grouped": False}])
def test_other_experts_are_quantised_by_separate_ops(fields: dict[str, bool]) -> None:
    config = ExpertsConfig(
        num_experts=EXPERTS, hidden_size=HIDDEN, ffn_hidden_size=FFN, activation=KINDS["swiglu"], **fields
    )
    ctx, kernels = ParallelContext.single(dtype=torch.float32), reference.bundle()
    resources = ModelResources(ctx, kernels, SavedTensorPolicy(), quantizers=quantizers(CONFIGS["blockwise"], kernels))
    made = Experts(config, resources)
    assert not made.has_fused_casts
    assert not experts(CONFIGS["blockwise"], "swiglu", kernels, ffn=10).has_fused_casts, "blocks of gate and up"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("shared", [False, True], ids=["dense", "shared"])
def test_casts_fused_into_dense_activations_change_no_number(config, kind, shared, monkeypatch) -> None:
    calls: dict[str, int] = {}
    kernels, ffn = counted(calls), 32 if config.recipe == "mxfp8" else FFN
    mlp = MLPConfig(hidden_size=HIDDEN, ffn_hidden_size=ffn, activation=KINDS[kind])
    ctx = ParallelContext.single(dtype=torch.float32)
    source = quantizers(config, kernels)
    if shared:
        resources = ModelResources(ctx, kernels, SavedTensorPolicy(), quantizers=source)
        made = SharedExperts(SharedExpertsConfig(mlp=mlp), resources)
    else:
        made = module_of(mlp, ctx, kernels, quantizers=source)
    fill(made)

    def run_once() -> tuple[dict[str, Tensor], list[tuple[int, ...]]]:
        saved: list[tuple[int, ...]] = []
        x = torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
            out = made(x)
        parameters = dict(made.named_parameters())
        grads = torch.autograd.grad(out.square().sum(), [x, *parameters.values()])
        return dict(zip(["input", *parameters], grads, strict=True)) | {"output": out.detach()}, saved

    fused, saved = run_once()
    assert calls["quantize_activation"] == calls["quantize_activation_grad"] == 1
    # quantize_rows is called for the input of fc1 and the output gradient of fc2. Quantised weight gradients need
    # columnwise copies, too. The input of shared experts, which the router saves, is quantised again in backward.
    assert calls["quantize_rows"] == (4 + shared if config.weight_grad else 2)
    # Of all tensors with width ffn or factor * ffn, only the output of fc1 is saved.
    assert sum(shape[-1] in (ffn, KINDS[kind].fc1_width_factor * ffn) for shape in saved if len(shape) == 3) == 1
    monkeypatch.setattr(LinearQuantizer, "can_fuse_activation", lambda *_: False)
    same(fused, run_once()[0])
    assert calls["quantize_activation"] == 1
