"""Kernels on one GPU with tensors of more than 2^31 elements, whose offsets do not fit into 32 bits.

Ops treat rows, tokens or sequences independently, so the end of a large tensor must give the results of that end alone.
Gradients of weights must be the sum of those of two halves.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.precision import LowPrecisionConfig, low_precision_config
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.backends.triton.quantize import E4M3
from megatron_moe.kernels.ops import AttentionInputs, GroupedPart, Kernels, QueryKeyTransform
from megatron_moe.kernels.pages import make_pages
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.precision.quantized_tensor import QuantizedTensor
from tests.helpers.tolerances import BF16_KERNEL, EXACT

pytestmark = pytest.mark.gpu1

DEVICE, LIMIT = "cuda", 2**31
BF16, FP32 = torch.bfloat16, torch.float32
BLOCKWISE = low_precision_config("blockwise")
SWIGLU = ActivationConfig(kind="silu", gated=True)
Op = Callable[[Kernels], Callable[..., Tensor | tuple[Tensor, ...]]]


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    """Frees the memory of a case, which is a large part of that of the GPU."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def kernels_of(low: LowPrecisionConfig | None = None) -> Kernels:
    return select_kernels(KernelConfig(), torch.device(DEVICE), BF16, low)


def draw(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def count(others: int, multiple: int = 64) -> int:
    """Number of slices of `others` elements that need more than 2^31 offsets, a multiple of `multiple`."""
    return (LIMIT // others // multiple + 1) * multiple


def check(op: Op, inputs: Sequence[Tensor], weights: Sequence[Tensor] = (), *, dim: int, tail: int) -> None:
    """Compares values and gradients of the last `tail` slices along `dim` with those of these slices alone, and the
    gradients of the weights with the sum of those of two halves."""
    size = inputs[0].shape[dim]
    kernels = kernels_of()

    def results(start: int, stop: int) -> tuple[list[Tensor], list[Tensor]]:
        """Returns outputs and gradients of the last slices, and the gradients of the weights."""
        leaves = [x if (start, stop) == (0, size) else x.narrow(dim, start, stop - start).clone() for x in inputs]
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in leaves]
        shared = [weight.detach().requires_grad_() for weight in weights]
        outs = op(kernels)(*leaves, *shared)
        outs = outs if isinstance(outs, tuple) else (outs,)
        last = [out.detach().narrow(dim, out.shape[dim] - tail, tail).clone() for out in outs]
        wanted = [*(x for x in leaves if x.requires_grad), *shared]
        grads = list(torch.autograd.grad(outs, wanted, [gradient_of(out, dim, start) for out in outs]))
        of_weights = [grads.pop() for _ in shared][::-1]
        return [*last, *(each.narrow(dim, each.shape[dim] - tail, tail).clone() for each in grads)], of_weights

    half = size // 2
    parts = [results(*ends)[1] for ends in ((0, half), (half, size))] if weights else []
    alone, _ = results(size - tail, size)
    found, of_weights = results(0, size)
    for number, (actual, expected) in enumerate(zip(found, alone, strict=True)):
        assert expected.abs().max() > 0
        BF16_KERNEL.check(actual, expected, f"output or gradient {number}")
    for number, actual in enumerate(of_weights):
        expected = torch.stack([part[number].double() for part in parts]).sum(dim=0)
        BF16_KERNEL.check(actual, expected, f"gradient of weight {number}")


def gradient_of(out: Tensor, dim: int, start: int) -> Tensor:
    """Gradient that differs between slices along `dim`; `start`: number of the first slice of `out`."""
    slices = torch.arange(start, start + out.shape[dim], device=out.device)
    wave = (1 + slices % 7).to(out.dtype) / 4
    return wave.view([-1 if each == dim else 1 for each in range(out.dim())]).expand_as(out).contiguous()


def test_norms_of_large_tensors() -> None:
    x, residual = (draw(2, count(2 * 4096), 4096) for _ in range(2))
    weight, bias = 1 + draw(4096) / 8, draw(4096)
    check(lambda k: lambda x, w: k.rms_norm(x, w, 1e-5, False), [x], [weight], dim=1, tail=64)
    check(lambda k: lambda r, x, w: k.add_rms_norm(r, x, w, 1e-5, False), [residual, x], [weight], dim=1, tail=64)
    check(lambda k: lambda x, w, b: k.layer_norm(x, w, b, 1e-5, False), [x], [weight, bias], dim=1, tail=64)


def test_large_gated_norm() -> None:
    x, gate = (draw(count(32 * 128), 32, 128) for _ in range(2))
    op: Op = lambda k: lambda x, gate, w: k.gated_rms_norm(x, gate, w, 1e-5, True)  # noqa: E731
    check(op, [x, gate], [1 + draw(128) / 8], dim=0, tail=64)


@pytest.mark.parametrize("interleaved", [False, True])
def test_large_rotated_heads(interleaved: bool) -> None:
    cos, sin = (torch.rand(512, 1, 64, device=DEVICE) for _ in range(2))
    op: Op = lambda k: lambda x: k.rope(x, cos, sin, interleaved, 16)  # noqa: E731
    check(op, [draw(512, count(512 * 64 * 128, 8), 64, 128)], dim=1, tail=1)


def test_large_query_key_value() -> None:
    cos, sin = (torch.rand(512, 1, 128, device=DEVICE) for _ in range(2))
    transform = QueryKeyTransform(1e-6, False, cos, sin, False, 8)
    op: Op = lambda k: lambda qkv, q, key: k.query_key_value(qkv, q, key, transform)  # noqa: E731
    weights = [1 + draw(128) / 8 for _ in range(2)]
    check(op, [draw(512, count(512 * 4 * 1280, 8), 4, 1280)], weights, dim=1, tail=1)


def test_large_latent_key_value() -> None:
    batch = count(512 * 64 * 256, 8)
    op: Op = lambda k: lambda kv, shared: k.latent_key_value(kv, shared, 128)  # noqa: E731
    check(op, [draw(512, batch, 64, 256), draw(512, batch, 64)], dim=1, tail=1)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("groups, width", [(8, 128), (64, 192)], ids=["grouped", "latent"])
def test_attention_to_large_tensors(groups: int, width: int, sinks: bool) -> None:
    """Computed in parts, because one call of cuDNN's backward returns wrong gradients of so many queries."""
    batch = count(1024 * 64 * width, 1)
    inputs = [draw(1024, batch, *size) for size in ((64, width), (groups, width), (groups, 128))]
    config = CoreAttentionConfig(softmax_scale=128**-0.5)

    def op(kernels: Kernels) -> Callable[..., Tensor]:
        return lambda q, k, v, sinks=None: kernels.attention(AttentionInputs(q, k, v, config, sinks))

    check(op, inputs, [draw(64)] if sinks else [], dim=1, tail=1)


def test_large_sparse_attention() -> None:
    tokens = count(32 * 128 * 576, 1)
    ids = torch.randint(tokens, (tokens, 32, 32), device=DEVICE, dtype=torch.int32).sort(dim=-1).values
    ids[..., 1:][ids[..., 1:] == ids[..., :-1]] = -1
    op: Op = lambda k: lambda q, kv, ids: k.sparse_attention(q, kv, ids, None, 512, 576**-0.5)[0]  # noqa: E731
    check(op, [draw(tokens, 32, 128, 576), draw(tokens, 32, 576), ids], dim=1, tail=1)


@pytest.mark.parametrize("channels", [False, True], ids=["per head", "per channel"])
def test_large_linear_attention(channels: bool) -> None:
    batch = count(512 * 64 * 128, 8)
    inputs = [draw(512, batch, 64, 128) for _ in range(3)]
    decay = -torch.rand(512, batch, 64, *((128,) if channels else ()), device=DEVICE)
    beta = torch.rand(512, batch, 64, device=DEVICE)
    op: Op = lambda k: lambda q, key, v, d, b: k.linear_attention(q, key, v, d, b, None, 128**-0.5, 1e-6)  # noqa: E731
    check(op, [*inputs, decay, beta], dim=1, tail=1)


def test_large_short_convolution() -> None:
    op: Op = lambda k: lambda x, w, b: k.short_conv(x, w, b, None)  # noqa: E731
    check(op, [draw(512, count(512 * 1024, 8), 1024)], [draw(1024, 4), draw(1024)], dim=1, tail=1)


def test_large_hyper_connections() -> None:
    config, tokens, channels = HyperConnectionsConfig(num_streams=4), count(4 * 4096), 4096
    stream = draw(tokens, 1, 4 * channels)
    matrix = draw(24, 4 * channels, dtype=FP32) / 128
    scale, bias = torch.rand(3, device=DEVICE), draw(24, dtype=FP32)
    op: Op = lambda k: lambda x, m, s, b: k.hyper_connection_read(x, m, s, b, config)  # noqa: E731
    check(op, [stream], [matrix, scale, bias], dim=0, tail=64)
    post, mix = torch.rand(tokens, 4, device=DEVICE), torch.rand(tokens, 4, 4, device=DEVICE)
    op = lambda k: lambda x, out, post, mix: k.hyper_connection_write(x, out, post, mix)  # noqa: E731
    check(op, [stream, draw(tokens, 1, channels), post, mix], dim=0, tail=64)


@pytest.mark.parametrize("config", [SWIGLU, replace(SWIGLU, clamp=1.0), ActivationConfig(kind="relu")], ids=str)
def test_activations_of_large_tensors(config: ActivationConfig) -> None:
    rows = count(4096)
    op: Op = lambda k: lambda x, probs: k.activation(x, probs, config)  # noqa: E731
    check(op, [draw(rows, 4096), 0.1 + torch.rand(rows, device=DEVICE)], dim=0, tail=64)


def test_large_cross_entropy() -> None:
    tokens = count(163_840)
    logits, labels = draw(tokens, 163_840), torch.arange(tokens, device=DEVICE) * 37 % 163_840
    last = logits[-64:].clone()
    found = []
    for x, ids in ((last, labels[-64:]), (logits, labels)):
        x.requires_grad_()
        loss = kernels_of().cross_entropy(x, ids)
        loss.backward(gradient_of(loss, 0, len(labels) - len(ids)))
        assert x.grad is not None
        found.append((loss.detach()[-64:], x.grad[-64:]))
    for actual, expected in zip(*reversed(found), strict=True):
        EXACT.check(actual, expected)


def test_large_embedding_gradients() -> None:
    tokens = count(4096)
    grad, ids = draw(tokens, 4096), torch.arange(tokens, device=DEVICE) % 100
    ids[-64:] = torch.arange(100, 164, device=DEVICE)
    out = torch.empty(164, 4096, device=DEVICE)
    kernels_of().embedding_grad(grad, ids, out, False)
    EXACT.check(out[100:], grad[-64:].float())


def test_large_router_logits() -> None:
    op: Op = lambda k: lambda x, w: k.router_logits(x, w, FP32)  # noqa: E731
    check(op, [draw(count(4096), 4096)], [draw(64, 4096) / 64], dim=0, tail=64)


def test_large_permuted_rows() -> None:
    """The rows of a token are equal, so that their sum is exact."""
    kernels, tokens = kernels_of(), count(4096) // 8 + 64
    ids = torch.rand(tokens, 16, device=DEVICE).argsort(dim=1)[:, :8]
    index = kernels.sort_rows(ids, 16, None)
    x = draw(tokens, 4096).requires_grad_()
    rows = kernels.permute(x, index)
    assert rows.numel() > LIMIT
    EXACT.check(rows[-64:], x[index.token_R[-64:]])
    summed = kernels.unpermute(rows, index, tokens)
    EXACT.check(summed[-64:], 8 * x[-64:])
    (grad,) = torch.autograd.grad(summed, x, gradient_of(summed, 0, 0))
    EXACT.check(grad[-64:], 8 * gradient_of(summed, 0, 0)[-64:])


@pytest.mark.parametrize("wide", [False, True], ids=["many inputs", "many outputs"])
def test_large_grouped_gemms(wide: bool) -> None:
    """Expert 3 has all rows after the first 100."""
    kernels, num_rows = kernels_of(), count(4096)
    inputs, outputs = (256, 4096) if wide else (4096, 256)
    rows, grad, weight = draw(num_rows, inputs), draw(num_rows, outputs), draw(4, outputs, inputs) / 16
    ends = torch.tensor([100, 100, 100, num_rows], device=DEVICE, dtype=torch.int32)
    BF16_KERNEL.check(kernels.grouped_forward(rows, weight, ends)[-64:], rows[-64:] @ weight[3].T, "forward")
    BF16_KERNEL.check(kernels.grouped_input_grad(grad, weight, ends)[-64:], grad[-64:] @ weight[3], "input gradient")
    grad[:-64] = 0
    out = torch.empty(weight.shape, device=DEVICE)
    kernels.grouped_weight_grad([GroupedPart(grad, rows, ends)], out, False)
    BF16_KERNEL.check(out[3], grad[-64:].float().T @ rows[-64:].float(), "weight gradient")


def test_large_paged_rows() -> None:
    kernels, num_rows = kernels_of(), count(4096)
    x, pages = draw(num_rows, 4096), make_pages(num_rows // 64, 64, 4096, dtype=BF16, device=torch.device(DEVICE))
    table = kernels.pack_rows(x, torch.tensor(num_rows, device=DEVICE, dtype=torch.int32), pages)
    assert torch.equal(kernels.unpack_rows(table, num_rows, pages)[-4096:], x[-4096:])


def check_copies(found: QuantizedTensor, alone: QuantizedTensor, end: int) -> None:
    """Compares the last 256 of `end` rows of a copy, which may be longer, with a copy of these rows alone."""
    first = end - 256
    if alone.rowwise is not None:
        assert found.rowwise is not None and found.rowwise.scales is not None and alone.rowwise.scales is not None
        EXACT.check(found.rowwise.data[first:end].float(), alone.rowwise.data[:256].float(), "rowwise")
        EXACT.check(found.rowwise.scales[..., first:end], alone.rowwise.scales[..., :256], "scales")
    if alone.columnwise is not None:
        assert found.columnwise is not None
        (data, scales, _), (last, last_scales, _) = found.columnwise, alone.columnwise
        assert scales is not None and last_scales is not None
        EXACT.check(data[:, first:end].float(), last[:, :256].float(), "columnwise")
        EXACT.check(scales[first // 128 : end // 128], last_scales[:2], "columnwise scales")


def test_large_quantised_rows() -> None:
    kernels, num_rows = kernels_of(BLOCKWISE), count(4096, 128)
    x = draw(num_rows, 4096)
    alone, found = (kernels.quantize_rows(each, E4M3, rowwise=True, columnwise=True) for each in (x[-256:], x))
    check_copies(found, alone, num_rows)
    EXACT.check(kernels.dequantize_rows(found)[-256:], kernels.dequantize_rows(alone), "values")


def test_large_quantised_norms() -> None:
    kernels, weight, num_rows = kernels_of(BLOCKWISE), 1 + draw(4096) / 8, count(4096, 128)
    x = draw(num_rows, 4096)
    norm = partial(kernels.rms_norm_quantized, weight=weight, eps=1e-5, zero_centered=False, fmt=E4M3)
    (_, last, alone), (_, whole, found) = (norm(each, each) for each in (x[-256:], x))
    EXACT.check(whole[-256:], last)
    check_copies(found, alone, num_rows)


def test_large_quantised_activations_and_gradients() -> None:
    kernels, num_rows = kernels_of(BLOCKWISE), count(4096, 128)
    x, grad, probs = draw(num_rows, 4096), draw(num_rows, 2048), 0.1 + torch.rand(num_rows, device=DEVICE)
    results = []
    for start in (num_rows - 256, 0):
        ends = torch.tensor([num_rows - start], device=DEVICE, dtype=torch.int32)
        found = kernels.quantize_activation_grad(
            grad[start:], x[start:], probs[start:], SWIGLU, E4M3, columns=E4M3, offsets_e=ends
        )
        results.append((found, kernels.quantize_activation(x[start:], probs[start:], SWIGLU, E4M3)))
    (alone, alone_forward), (whole, forward) = results
    check_copies(forward, alone_forward, num_rows)
    check_copies(whole.grad_x_q, alone.grad_x_q, num_rows)
    assert isinstance(whole.out_RF, QuantizedTensor) and isinstance(alone.out_RF, QuantizedTensor)
    check_copies(whole.out_RF, alone.out_RF, num_rows)


def test_large_quantised_permutation_and_grouped_gemms() -> None:
    """Expert 0 has the first 128 rows, expert 1 all others."""
    kernels, num_rows = kernels_of(BLOCKWISE), count(4096, 128)
    tokens = draw(num_rows, 4096)
    ids = (torch.arange(num_rows, device=DEVICE) >= 128).long()[:, None]
    index = kernels.sort_rows(ids, 2, None)
    rows = kernels.quantize_permuted(tokens, index, E4M3, rowwise=True, columnwise=True)
    alone = kernels.quantize_rows(tokens[-256:], E4M3, rowwise=True, columnwise=True)
    check_copies(rows, alone, num_rows)
    weight = kernels.quantize_weight(draw(2, 256, 4096) / 16, replace(E4M3, block=(128, 128)), columnwise=True)
    ends = torch.tensor([0, 256], device=DEVICE, dtype=torch.int32)
    out = kernels.grouped_forward(rows, weight, index.offsets_E)
    BF16_KERNEL.check(out[-256:], kernels.grouped_forward(alone, weight, ends), "forward")
    grads = draw(num_rows, 256)
    grads[:-256] = 0
    for_all = kernels.quantize_rows(grads, E4M3, rowwise=True, columnwise=True, offsets_e=index.offsets_E)
    for_last = kernels.quantize_rows(grads[-256:], E4M3, rowwise=True, columnwise=True)
    dx = kernels.grouped_input_grad(for_all, weight, index.offsets_E)
    BF16_KERNEL.check(dx[-256:], kernels.grouped_input_grad(for_last, weight, ends), "input gradient")
    found, expected = (torch.empty(2, 256, 4096, device=DEVICE) for _ in range(2))
    kernels.grouped_weight_grad([GroupedPart(for_all, rows, index.offsets_E)], found, False)
    kernels.grouped_weight_grad([GroupedPart(for_last, alone, ends)], expected, False)
    BF16_KERNEL.check(found[1], expected[1], "weight gradient")
