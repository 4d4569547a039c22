"""Blockwise attention and attention with sinks on one GPU: cuDNN and Triton kernels against plain torch in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.backends.torch_native import backend as torch_native
from megatron_moe.kernels.backends.torch_native import cudnn
from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.ops import AttentionBlock, AttentionInputs, AttentionResult, PositionSpan
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.parallel.context_parallel import split_positions
from tests.gpu.host_sync import no_host_sync
from tests.helpers.ring_on_one_rank import blocks_of_a_ring
from tests.helpers.tolerances import BF16_BLOCKS, EXACT

pytestmark = pytest.mark.gpu1

BF16 = torch.bfloat16
WIDTHS = pytest.mark.parametrize(("width", "value_width"), [(128, 128), (64, 64), (192, 128)])
BACKENDS = pytest.mark.parametrize("backend", [torch_native, triton_kernels], ids=["torch_native", "triton"])
SPLITS = pytest.mark.parametrize("split", ["zigzag", "contiguous"])


def tensors(seq: int, width: int, value_width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draws the output gradient, q, k and v: 2 sequences with 8 heads in 2 groups."""
    shapes = [(8, value_width), (8, width), (2, width), (2, value_width)]
    draw = torch.Generator(device="cuda").manual_seed(seq)
    grad, q, k, v = (torch.randn(seq, 2, *shape, generator=draw, device="cuda").to(BF16) for shape in shapes)
    return grad, q, k, v


def exact(inputs: tuple[Tensor, ...], config: CoreAttentionConfig, **given: Tensor) -> dict[str, Tensor]:
    """Output and gradients of the whole sequence in fp64. `given`: sinks_N, segments_BS."""
    grad, *wide = (x.double() for x in inputs)
    leaves = dict(zip(("grad q", "grad k", "grad v"), wide, strict=True))
    sinks_N = given.get("sinks_N")
    if sinks_N is not None:
        leaves["grad sinks"] = sinks_N.detach().double()
    tracked = [leaf.requires_grad_() for leaf in leaves.values()]
    q, k, v, *sinks = tracked
    out = reference.attention(AttentionInputs(q, k, v, config, sinks[0] if sinks else None, given.get("segments_BS")))
    return {"out": out} | dict(zip(leaves, torch.autograd.grad(out, tracked, grad), strict=True))


@pytest.fixture
def ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables cuDNN, so that the Triton kernels run."""
    monkeypatch.setattr(cudnn, "cudnn_supports", lambda *inputs, causal: False)


@WIDTHS
@SPLITS
@BACKENDS
@pytest.mark.parametrize("causal", [True, False])
def test_cudnn_blocks_of_four_ranks_match_one(
    backend: Any, split: Any, width: int, value_width: int, causal: bool
) -> None:
    inputs, config = tensors(1024, width, value_width), CoreAttentionConfig(softmax_scale=width**-0.5, causal=causal)
    grad, q, k, v = inputs
    assert cudnn.cudnn_supports(q, k, v, causal=causal)
    BF16_BLOCKS.check_all(
        blocks_of_a_ring(backend, inputs, config, split_positions(split, 1024, 4)), exact(inputs, config)
    )


@pytest.mark.parametrize(("width", "value_width"), [(128, 128), (192, 128)])
@pytest.mark.parametrize(
    ("split", "window"), [("zigzag", None), ("zigzag", (200, 0)), ("contiguous", None), ("contiguous", (90, 41))]
)
@pytest.mark.usefixtures("ours_alone")
def test_triton_blocks_of_four_ranks_match_one(
    split: Any, window: tuple[int, int] | None, width: int, value_width: int
) -> None:
    """The chunk length is not a multiple of the tile size."""
    seq, causal = 8 * 77, window is None or window[1] == 0
    inputs = tensors(seq, width, value_width)
    config = CoreAttentionConfig(softmax_scale=width**-0.5, causal=causal, window=window)
    BF16_BLOCKS.check_all(
        blocks_of_a_ring(triton_kernels, inputs, config, split_positions(split, seq, 4)), exact(inputs, config)
    )


@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (192, 128)])
@pytest.mark.parametrize("window", [None, (200, 0)])
def test_ring_attention_with_documents_and_windows_matches_one_rank(
    width: int, value_width: int, window: tuple[int, int] | None
) -> None:
    """cuDNN computes the blocks that the window does not cut; the Triton kernels compute the others."""
    inputs, config = tensors(1024, width, value_width), CoreAttentionConfig(softmax_scale=width**-0.5, window=window)
    parts = split_positions("zigzag", 1024, 4)
    segments_BS = (torch.arange(1024, device="cuda") * 5 // 1024).expand(2, 1024)
    for documents in (None, segments_BS):
        given = {} if documents is None else {"segments_BS": documents}
        ring = blocks_of_a_ring(triton_kernels, inputs, config, parts, documents)
        BF16_BLOCKS.check_all(ring, exact(inputs, config, **given))


@WIDTHS
@BACKENDS
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "of zero"])
def test_cudnn_attention_with_sinks_matches_the_reference(
    backend: Any, learned: bool, causal: bool, width: int, value_width: int
) -> None:
    grad, *inputs = tensors(645, width, value_width)
    config = CoreAttentionConfig(softmax_scale=width**-0.5, causal=causal, off_by_one=not learned)
    sinks = [torch.linspace(-1, 2, 8, device="cuda").to(BF16)] if learned else []
    leaves = [x.requires_grad_() for x in (*inputs, *sinks)]
    assert cudnn.cudnn_supports(*leaves[:3], causal=causal)
    out = backend.attention(AttentionInputs(*leaves[:3], config, *leaves[3:]))
    names = ("grad q", "grad k", "grad v", "grad sinks")
    actual = {"out": out} | dict(zip(names, torch.autograd.grad(out, leaves, grad), strict=False))
    given = {"sinks_N": sinks[0]} if learned else {}
    BF16_BLOCKS.check_all(actual, exact((grad, *inputs), config, **given))


def test_cached_cudnn_plans_serve_attention_with_and_without_sinks() -> None:
    """torch caches cuDNN's plans by the layouts of q, k and v alone, but the gradient may have any layout."""
    grad, *inputs = tensors(512, 128, 128)
    config, none = CoreAttentionConfig(softmax_scale=0.1), torch.zeros(8, device="cuda", dtype=BF16)
    leaves = [x.requires_grad_() for x in inputs]
    transposed = grad.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    for sinks, given in ((None, grad), (none, transposed), (none, grad)):
        out = triton_kernels.attention(AttentionInputs(*leaves, config, sinks))
        grads = torch.autograd.grad(out, leaves, given)
        actual = {"out": out} | dict(zip(("grad q", "grad k", "grad v"), grads, strict=True))
        expected = exact((grad, *inputs), config, **({} if sinks is None else {"sinks_N": sinks}))
        BF16_BLOCKS.check_all(actual, {name: expected[name] for name in actual})


def test_deterministic_blocks_are_bitwise_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    inputs, config = tensors(1024, 128, 128), CoreAttentionConfig(softmax_scale=0.1)
    parts = split_positions("zigzag", 1024, 2)
    torch.use_deterministic_algorithms(True)
    try:
        assert not cudnn.cudnn_supports(*inputs[1:], causal=True)
        first, second = (blocks_of_a_ring(triton_kernels, inputs, config, parts) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for name in first:
        EXACT.check(first[name], second[name], name)
    BF16_BLOCKS.check_all(first, exact(inputs, config))


def test_blocks_and_sinks_run_without_host_sync() -> None:
    kernels = select_kernels(KernelConfig(), torch.device("cuda"), BF16)
    grad, q, k, v = tensors(512, 128, 128)
    sinks = torch.zeros(8, device="cuda", dtype=BF16)
    first, second = (PositionSpan(chunks=part) for part in split_positions("zigzag", 1024, 2))
    segments = torch.zeros(2, 512, dtype=torch.int64, device="cuda")
    config = CoreAttentionConfig(softmax_scale=0.1)
    out, lse = torch.zeros_like(grad, dtype=torch.float32), torch.zeros(2, 8, 512, device="cuda").permute(2, 0, 1)
    into = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))

    def everything() -> None:
        for key in (first, second):
            for documents in (None, segments):
                query, keys = (PositionSpan(chunks=span.chunks, segments_BS=documents) for span in (second, key))
                block = AttentionBlock(q, k, v, config, query, keys)
                kernels.attention_block(block, out, lse)
                kernels.attention_block_grad(block, AttentionResult(grad, out.to(BF16), lse), into)
        leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
        kernels.attention(AttentionInputs(*leaves[:3], config, leaves[3])).backward(grad)

    everything()
    with no_host_sync():
        everything()


@WIDTHS
@pytest.mark.parametrize("window", [None, (100, 0)])
def test_largest_logits_match_fp64_and_small_ones_are_skipped(
    width: int, value_width: int, window: tuple[int, int] | None
) -> None:
    seq, config = 700, CoreAttentionConfig(softmax_scale=width**-0.5, window=window)
    _, q, k, v = tensors(seq, width, value_width)
    span = PositionSpan(chunks=(range(seq),))
    block = AttentionBlock(q, k, v, config, span, span)
    maxima = torch.full((8,), -torch.inf, device="cuda")
    _, lse_SBN = triton_kernels.attention_block(block)
    with no_host_sync():
        triton_kernels.max_logits_(block, lse_SBN, maxima, -torch.inf)
    wide = AttentionBlock(q.double(), k.double(), v.double(), config, span, span)
    expected = torch.full((8,), -torch.inf, device="cuda", dtype=torch.float64)
    reference.max_logits_(wide, lse_SBN, expected, -torch.inf)
    torch.testing.assert_close(maxima.double(), expected, rtol=1e-5, atol=1e-5)
    above = maxima.clone().fill_(-torch.inf)
    least = float(expected.max()) - 1e-3
    triton_kernels.max_logits_(block, lse_SBN, above, least)
    assert above.max() == maxima.max()
    triton_kernels.max_logits_(block, lse_SBN, above.fill_(-torch.inf), float(lse_SBN.max()) + 1)
    assert (above == -torch.inf).all()
