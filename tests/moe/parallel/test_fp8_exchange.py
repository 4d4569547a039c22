"""Tokens and gradients sent in FP8 equal, byte for byte, those quantised after an exchange in the activation dtype."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.memory import RecomputeConfig
from megatron_moe.config.moe import CapacityConfig
from megatron_moe.config.precision import LowPrecisionConfig, OperandFormat, low_precision_config
from megatron_moe.config.transport import COPIES, DEEPEP, SYMMETRIC
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.moe.moe_layer import MoELayer
from megatron_moe.moe.token_dispatcher.base import PLAIN_ROWS, DispatchedTokens, ExpertComm, RowFormats
from megatron_moe.moe.token_dispatcher.flex import ExchangeState
from megatron_moe.moe.token_dispatcher.symmetric import SymmetricTransport
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.precision.carried_copies import carried_grad, plain_grad
from megatron_moe.precision.linear_quantizer import LinearQuantizer
from megatron_moe.precision.quantized_tensor import QuantizedTensor, dequantize
from tests.helpers.quantizers import quantizers
from tests.helpers.ranks import on_processes, on_threads
from tests.helpers.tolerances import EXACT
from tests.moe.parallel.folded import Data, Result, gathered, moe_config, name_of, on_this_rank, parallel
from tests.moe.parallel.test_dispatch_over_ranks import CASES, EXPERTS
from tests.moe.routings import draw, sparse

REFERENCE = reference.bundle()
WIDTH = 10
"""Width of the rows. It is not a multiple of the block length 4, so that the last block is partial."""
BLOCKWISE = low_precision_config("blockwise", blocks=4, weight_grad=False)
HYBRID = low_precision_config("blockwise", blocks=4, hybrid=True)
MXFP8 = low_precision_config("mxfp8")
FOLDS = (parallel(2, ep=2), parallel(4, etp=2, ep=2), parallel(4, ep=4))


def spread_magnitudes(*shape: int, seed: int) -> Tensor:
    """Random numbers whose blocks have different scales; the first row is zero."""
    values = draw(*shape, seed=seed) * torch.exp(4 * draw(*shape, seed=seed + 1))
    return values.index_fill(0, torch.arange(min(1, len(values))), 0)


def same_copy(actual: QuantizedTensor | None, expected: QuantizedTensor, what: str) -> None:
    assert actual is not None and actual.block == expected.block and actual.dtype == expected.dtype
    EXACT.check(actual.row_copy.data.view(torch.uint8), expected.row_copy.data.view(torch.uint8), f"bytes of {what}")
    EXACT.check(actual.row_copy.scales, expected.row_copy.scales, f"scales of {what}")


def exchanged(
    kind: Any, ctx: ParallelContext, case: str, width: int, formats: RowFormats, factor: float | None = None
) -> tuple[DispatchedTokens, Tensor, dict[str, Tensor]]:
    """Runs dispatch and combine, forward and backward.

    Returns the dispatched rows, the gradient of the rows passed to combine, and the other tensors by name.
    """
    ids = CASES[case](ctx.rank)
    tokens, routing = spread_magnitudes(len(ids), width, seed=ctx.rank), sparse(ids, num_experts=EXPERTS)
    comm = ExpertComm(ctx, REFERENCE, kind, EXPERTS, row_capacity_factor=factor)
    dispatcher = comm.new_dispatcher(formats)
    tokens.requires_grad_(), routing.probs.requires_grad_()
    rows, handle = dispatcher.finish_dispatch(dispatcher.start_dispatch(tokens, routing))
    data = (rows.data.detach() * rows.probs_R.detach()[:, None]).requires_grad_()
    back = dispatcher.finish_combine(dispatcher.start_combine(replace(rows, data=data), handle))
    (grad,) = torch.autograd.grad(back, data, spread_magnitudes(len(ids), width, seed=10 + ctx.rank))
    torch.autograd.backward((rows.data, rows.probs_R), (torch.ones_like(rows.data), torch.ones_like(rows.probs_R)))
    others = {"tokens": tokens.grad, "probs": routing.probs.grad, "offsets": rows.offsets_e}
    return rows, grad, others


@pytest.mark.parametrize("fold", FOLDS[1:], ids=name_of)
@pytest.mark.parametrize("kind", [SYMMETRIC, COPIES, DEEPEP], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("config", "width"), [(HYBRID, WIDTH), (MXFP8, 128)], ids=["blockwise hybrid", "mxfp8"])
@pytest.mark.parametrize("case", CASES)
def test_received_bytes_are_those_of_quantised_rows(case, config, width, kind, fold) -> None:
    """Checks the rows of dispatch and the gradient of combine, including padding rows, which are quantised zeros."""

    def rank(ctx: ParallelContext) -> None:
        formats = RowFormats(tokens=config.inputs, grads=config.grads)
        plain, exact_grad, expected = exchanged(kind, ctx, case, width, PLAIN_ROWS)
        rows, grad, others = exchanged(kind, ctx, case, width, formats)
        same_copy(rows.quantized, rows_q := quantized(plain.data, config.inputs), "rows")
        EXACT.check(rows.data, values(rows_q), "values of rows")
        same_copy(carried_grad(grad, config.grads), grad_q := quantized(exact_grad, config.grads), "gradients")
        EXACT.check(plain_grad(grad), values(grad_q), "values of gradients")
        EXACT.check_all(others, expected, "tensors of the sums")
        assert plain.quantized is None

    on_threads(fold, rank)


def quantized(rows: Tensor, fmt: OperandFormat) -> QuantizedTensor:
    return reference.quantize_rows(rows, fmt, rowwise=True, columnwise=False)


def values(rows_q: QuantizedTensor) -> Tensor:
    return dequantize(rows_q.row_copy, rows_q.block, torch.float64)


@pytest.mark.parametrize("case", ["ranks differ", "all to one expert"])
def test_rows_beyond_the_bound_overflow_as_in_a_plain_exchange(case) -> None:
    def rank(ctx: ParallelContext) -> int:
        plain, *_ = exchanged(SYMMETRIC, ctx, case, WIDTH, PLAIN_ROWS, 0.4)
        formats = RowFormats(tokens=BLOCKWISE.inputs, grads=BLOCKWISE.grads)
        rows, *_ = exchanged(SYMMETRIC, ctx, case, WIDTH, formats, 0.4)
        same_copy(rows.quantized, quantized(plain.data, BLOCKWISE.inputs), "rows")
        assert rows.overflow is not None and plain.overflow is not None and rows.bound == plain.bound
        EXACT.check(rows.overflow, plain.overflow, "overflow")
        return int(rows.overflow)

    assert max(on_threads(parallel(2, ep=2), rank)) > 0


def layer_result(
    ctx: ParallelContext, config: LowPrecisionConfig, fp8: bool, recomputed: bool, **fields: Any
) -> tuple[Any, ...]:
    """Runs a layer with FP8 experts on one rank; `fp8` also sends tokens and gradients in FP8."""

    def change(layer: MoELayer) -> None:
        if recomputed:
            modules = ("moe_act",)
            recompute = RecomputeConfig(recompute_modules=modules)
            layer.experts.saved_tensors = SavedTensorPolicy(recompute)

    moe, data = moe_config(dispatcher="flex", **fields), Data.random(ctx.config.dp, padded=True)
    moe, of_experts = replace(moe, fp8_dispatch=fp8, fp8_combine_grad=fp8), quantizers(config, REFERENCE)
    return on_this_rank(ctx, moe, ctx.config, data, change, quantizers=of_experts)


def results(fold: Any, config: LowPrecisionConfig, *, fp8: bool, recomputed: bool = False, **fields: Any) -> Result:
    return gathered(on_threads(fold, lambda ctx: layer_result(ctx, config, fp8, recomputed, **fields)), fold)


class RoundingTransport(SymmetricTransport):
    """Transport that rounds tokens to FP8 values and sends them in their own dtype."""

    def start_send_tokens(
        self, tokens_TH: Tensor, exchange: ExchangeState, probs_TK: Tensor | None, fmt: OperandFormat | None
    ) -> Any:
        rounded_TH = tokens_TH if fmt is None else values(quantized(tokens_TH, fmt))
        return super().start_send_tokens(rounded_TH, exchange, probs_TK, None)


LAYERS = {
    "shared experts overlapped": {"shared": True, "overlap": True},
    "latent": {"latent": True},
    "one expert after the other": {"grouped": False},
    "activation recomputed": {"recomputed": True},
    "padded to the capacity": {"capacity": CapacityConfig(factor=1.0, pad=True)},
}


@pytest.mark.parametrize("config", [BLOCKWISE, HYBRID, MXFP8], ids=["blockwise", "hybrid", "mxfp8"])
@pytest.mark.parametrize("fields", LAYERS.values(), ids=LAYERS)
def test_layers_give_the_bits_of_a_plain_exchange(fields, config, monkeypatch) -> None:
    """All results equal those of an exchange in the activation dtype, except gradients of expert weights.

    With FP8 exchange, weight gradients are computed from rounded rows, so they equal those of an exchange of rounded
    tokens. With power-of-two scales, rounding to FP8 a second time changes only elements that are subnormal in one of
    the blocks.
    """
    fold = FOLDS[1]
    actual, plain = (results(fold, config, fp8=fp8, **fields).tensors for fp8 in (True, False))
    weights = [name for name in actual if name.startswith("experts.")]
    same = {name: value for name, value in plain.items() if name not in weights}
    EXACT.check_all({name: actual[name] for name in same}, same, "plain exchange")
    assert config.weight_grad or all(actual[name].ne(plain[name]).any() for name in weights), "gradients of exact rows"
    monkeypatch.setattr("megatron_moe.moe.token_dispatcher.symmetric.SymmetricTransport", RoundingTransport)
    EXACT.check_all(actual, results(fold, config, fp8=True, **fields).tensors, "plain exchange of rounded tokens")


def test_experts_multiply_the_received_bytes(monkeypatch) -> None:
    """Received FP8 bytes are GEMM operands, so neither fc1 nor the backward of fc2 quantises them again.

    Weight gradients are in the dtype of the parameters here, so no columnwise copy is needed.
    """
    calls: list[str] = []
    for name in ("quantize_input", "quantize_grad"):
        monkeypatch.setattr(LinearQuantizer, name, lambda *args, name=name, **named: calls.append(name))
    results(FOLDS[0], BLOCKWISE, fp8=True)
    assert calls == []


def test_received_bytes_are_not_kept_for_backward() -> None:
    def rank(ctx: ParallelContext) -> None:
        formats = RowFormats(tokens=BLOCKWISE.inputs, grads=BLOCKWISE.grads)
        rows, *_ = exchanged(SYMMETRIC, ctx, "spread", WIDTH, formats)
        assert rows.quantized is not None and rows.data.requires_grad
        found = weakref.ref(rows.quantized.row_copy.data)
        rows = replace(rows, quantized=None)
        assert found() is None

    on_threads(FOLDS[0], rank)


def test_processes_give_the_bits_of_threads() -> None:
    fold = FOLDS[0]
    expected = results(fold, BLOCKWISE, fp8=True).tensors
    actual = gathered(on_processes(fold, layer_result, BLOCKWISE, True, False), fold).tensors
    EXACT.check_all(actual, expected, "processes")
