"""Code around cuDNN's two attention ops, which need a GPU; the tests replace both by plain torch implementations."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.kernels.backends.torch_native import backend as torch_native
from megatron_moe.kernels.backends.torch_native import cudnn
from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.backends.triton.attention import blocks
from megatron_moe.kernels.ops import AttentionBlock, AttentionInputs, AttentionResult, PositionSpan
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.context_parallel import split_positions
from tests.helpers.kernel_comparison import compare, draw, with_gradients
from tests.helpers.ring_on_one_rank import blocks_of_a_ring
from tests.helpers.tolerances import BF16_BLOCKS, FP32_REF

pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array:DeprecationWarning"
)  # numpy, of Triton's interpreter
BACKENDS = pytest.mark.parametrize("backend", [torch_native, triton_kernels], ids=["torch_native", "triton"])


def logits_of(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    logits = q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2) * scale
    return logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf) if causal else logits


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: None, compute_log_sumexp: bool, dropout_p: float, is_causal: bool,
    return_debug_mask: bool, *, scale: float,
) -> tuple[Any, ...]:  # fmt: skip
    assert bias is None and compute_log_sumexp and dropout_p == 0.0 and not return_debug_mask
    assert not is_causal or q.shape[2] == k.shape[2], "cuDNN's causal mask begins at the upper left"
    logits = logits_of(q, k, scale, is_causal)
    out = logits.softmax(-1) @ v.float().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    by_place = out.permute(2, 0, 1, 3).contiguous().to(q.dtype).permute(1, 2, 0, 3)  # in the layout of q
    return by_place, logits.logsumexp(-1, keepdim=True), None, None, q.shape[2], k.shape[2], None, None, None


def differentiate(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor, bias: None,
    rows: None, keys: None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert (bias, rows, keys, max_q, max_k, dropout_p) == (None, None, None, q.shape[2], k.shape[2], 0.0)
    assert lse.is_contiguous() and lse.shape == (*q.shape[:3], 1)
    for x in (grad, out, q):
        assert x.permute(2, 0, 1, 3).is_contiguous(), "plans are kept by the layouts of q, k and v alone"
    groups = k.shape[1]
    wide_k, wide_v = (x.float().repeat_interleave(q.shape[1] // groups, dim=1) for x in (k, v))
    probs = (logits_of(q, k, scale, is_causal) - lse).exp()
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    grad_logits = probs * (grad.float() @ wide_v.transpose(-1, -2) - delta) * scale
    by_group = [
        x.unflatten(1, (groups, -1)).sum(2)
        for x in (grad_logits.transpose(-1, -2) @ q.float(), probs.transpose(-1, -2) @ grad.float())
    ]
    return tuple(x.to(q.dtype) for x in (grad_logits @ wide_k, *by_group))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_attend", attend)
    monkeypatch.setattr(cudnn, "_differentiate", differentiate)
    monkeypatch.setattr(cudnn, "cudnn_supports", lambda *tensors, causal: True)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sinks", ["learned", "of zero"])
def test_attention_with_sinks_matches_the_reference(backend: Any, sinks: str, causal: bool, dtype: torch.dtype) -> None:
    config = CoreAttentionConfig(softmax_scale=0.3, causal=causal, off_by_one=sinks == "of zero")
    inputs = [draw(30, 2, 4, 24), draw(30, 2, 2, 24, seed=1), draw(30, 2, 2, 12, seed=2)]
    inputs += [draw(4, seed=3)] if sinks == "learned" else []

    def op(kernels: Any) -> Any:
        return lambda q, k, v, *given: kernels.attention(AttentionInputs(q, k, v, config, *given))

    compare(backend, op, inputs, dtype)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("groups, most, calls", [(4, 30 * 2 * 2 * 24, 4), (4, 30 * 2 * 4 * 24, 2), (1, 1, 1)])
def test_gradients_of_too_many_elements_are_computed_by_groups(
    groups: int, most: int, calls: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group has two query heads, and values are narrower than keys."""
    sizes = []
    monkeypatch.setattr(cudnn, "MOST_ELEMENTS", most)
    monkeypatch.setattr(
        cudnn, "_differentiate", lambda *x, **scale: sizes.append(x[1].numel()) or differentiate(*x, **scale)
    )
    config = CoreAttentionConfig(softmax_scale=0.3)
    inputs = [draw(30, 2, 2 * groups, 24), draw(30, 2, groups, 24, seed=1), draw(30, 2, groups, 12, seed=2)]
    inputs += [draw(2 * groups, seed=3)] if sinks else []

    def op(kernels: Any) -> Any:
        return lambda q, k, v, sinks=None: kernels.attention(AttentionInputs(q, k, v, config, sinks))

    compare(torch_native, op, inputs, torch.float32)
    assert len(sizes) == (calls if sinks or calls > 1 else 0) and (groups == 1 or max(sizes) <= most)


@BACKENDS
@pytest.mark.parametrize("documents", [False, True], ids=["window", "documents"])
def test_sinks_with_windows_or_documents_do_not_use_cudnn(
    backend: Any, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "_attend", None)
    inputs = [draw(20, 2, 2, 8, seed=seed) for seed in range(3)] + [draw(2, seed=3)]
    segments = (torch.arange(20) * 3 // 20).expand(2, 20) if documents else None
    config = CoreAttentionConfig(softmax_scale=0.3, window=None if documents else (5, 0))
    with_gradients(lambda *x: backend.attention(AttentionInputs(*x[:3], config, x[3], segments)), inputs, torch.float32)


@BACKENDS
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, FP32_REF), (torch.bfloat16, BF16_BLOCKS)])
def test_blocks_of_a_ring_sum_to_whole_attention(backend: Any, dtype: torch.dtype, bar: Any) -> None:
    config, shapes = CoreAttentionConfig(softmax_scale=0.3), [(4, 12), (4, 24), (2, 24), (2, 12)]
    grad, *inputs = (draw(48, 2, *shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes))
    actual = blocks_of_a_ring(backend, (grad, *inputs), config, split_positions("zigzag", 48, 3))
    leaves = [x.double().requires_grad_() for x in inputs]
    out = reference.attention(AttentionInputs(*leaves, config))
    exact = (out, *torch.autograd.grad(out, leaves, grad.double()))
    bar.check_all(actual, dict(zip(actual, exact, strict=True)))


@BACKENDS
@pytest.mark.parametrize("what", ["documents", "dropout"])
def test_documents_and_dropout_do_not_use_cudnn(backend: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_attend", None)
    monkeypatch.setattr(cudnn, "_differentiate", None)
    segments = torch.tensor([[0] * 5 + [1] * 3] * 2) if what == "documents" else None
    config = CoreAttentionConfig(softmax_scale=0.3, dropout=0.5 if what == "dropout" else 0.0)
    span = PositionSpan(chunks=(range(8),), segments_BS=segments)
    grad, q, k, v = (draw(8, 2, 2, 4, seed=seed).float() for seed in range(4))
    block = AttentionBlock(q, k, v, config, span, span, ("a key",))

    def found_by(kernels: Any) -> list[Tensor]:
        out, lse = torch.zeros(8, 2, 2, 4), torch.full((8, 2, 2), -torch.inf)
        kernels.attention_block(block, out, lse)
        into = tuple(torch.zeros_like(x) for x in (q, k, v))
        kernels.attention_block_grad(block, AttentionResult(grad, out, lse), into)
        return [out, lse, *into]

    for ours, expected in zip(found_by(backend), found_by(reference), strict=True):
        FP32_REF.check(ours, expected)


@pytest.mark.parametrize("window", [None, (5, 0)])
def test_blocks_beyond_32_bit_offsets_use_cudnn_or_the_reference(
    window: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 2^31 elements, the Triton kernels cannot be used; blocks that cuDNN does not support use plain torch, which
    keeps all logits in memory."""
    by_cudnn, by_torch = [], []
    monkeypatch.setattr(blocks, "merge", lambda *found: by_cudnn.append("out"))
    monkeypatch.setattr(cudnn, "backward_pair", lambda *known: by_cudnn.append("gradients"))
    monkeypatch.setattr(reference, "attention_block", lambda *known: by_torch.append("out"))
    monkeypatch.setattr(reference, "attention_block_grad", lambda *known: by_torch.append("gradients"))
    far = torch.empty(2**17, 1, 64, 256, device="meta", dtype=torch.bfloat16)
    span = PositionSpan(chunks=(range(2**17),))
    config = CoreAttentionConfig(softmax_scale=0.3, causal=False, window=window)
    block = AttentionBlock(far, far, far, config, span, span)
    lse = far[..., 0].float()
    triton_kernels.attention_block(block, far.float(), lse)
    triton_kernels.attention_block_grad(block, AttentionResult(far, far, lse), (far, far, far))
    assert (by_cudnn, by_torch)[window is not None] == ["out", "gradients"]


def test_cpu_tensors_do_not_use_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = draw(64, 2, 2, 64).bfloat16()
    assert not cudnn.cudnn_supports(x, x, x, causal=True)
