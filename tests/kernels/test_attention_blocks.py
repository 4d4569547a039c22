"""Attention between two parts of a sequence: interpreted Triton kernels against the reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.backends.triton.attention.tiles import supports_inputs
from megatron_moe.kernels.ops import AttentionBlock, AttentionResult, PositionSpan
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.context_parallel import Chunks, select_positions, split_positions
from tests.helpers.kernel_comparison import draw
from tests.helpers.tolerances import BF16_KERNEL, EXACT, FP32_REF

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # numpy, of the interpreter

SEQ, BATCH, HEADS, GROUPS = 160, 2, 2, 1
FIRST, SECOND, THIRD, _ = split_positions("zigzag", SEQ, 4)
MASKS = {
    "causal": CoreAttentionConfig(softmax_scale=0.3),
    "all": CoreAttentionConfig(softmax_scale=0.3, causal=False),
    "window": CoreAttentionConfig(softmax_scale=0.3, window=(30, 0)),
    "both sides": CoreAttentionConfig(softmax_scale=0.3, window=(50, 12), causal=False),
}
PARTS = {
    "own": (FIRST, FIRST),
    "an earlier rank's": (SECOND, FIRST),
    "a later rank's": (SECOND, THIRD),
    "uneven": ((range(0, 70), range(90, 131)), (range(60, 140), range(150, 153))),
}


def block(
    kernels: Any, query: Chunks, key: Chunks, config: CoreAttentionConfig, dtype: torch.dtype, width: int,
    value_width: int,
    documents: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """Output, log-sum-exp and gradients, merged into or added to given tensors."""
    wide = torch.promote_types(dtype, torch.float32)
    rows, keys = sum(map(len, query)), sum(map(len, key))
    shapes = [(rows, HEADS, value_width), (rows, HEADS, width), (keys, GROUPS, width), (keys, GROUPS, value_width)]
    grad, q, k, v = (
        draw(each, BATCH, heads, dims, seed=number).bfloat16().to(dtype)
        for number, (each, heads, dims) in enumerate(shapes)
    )
    segments_BS = (torch.arange(SEQ) * 3 // SEQ).expand(BATCH, SEQ) if documents else None
    of_both = (
        PositionSpan(chunks=c, segments_BS=None if segments_BS is None else select_positions(segments_BS, c))
        for c in (query, key)
    )
    given = AttentionBlock(q, k, v, config, *of_both)
    out, lse = draw(rows, BATCH, HEADS, value_width, seed=5).to(wide), draw(rows, BATCH, HEADS, seed=6).to(wide)
    out[:2], lse[:2] = 0.0, -torch.inf  # these have found nothing yet
    kernels.attention_block(given, out, lse)
    found = {"out": out.clone(), "weight": lse.exp(), "found anything": lse > -torch.inf}
    into = tuple(torch.ones_like(x, dtype=wide) for x in (q, k, v))
    seen = lse.masked_fill(lse == -torch.inf, 0.0)
    kernels.attention_block_grad(given, AttentionResult(grad, out.to(dtype), seen), into)
    return found | dict(zip(("grad q", "grad k", "grad v"), into, strict=True))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("parts", PARTS)
def test_blocks_match_the_reference(parts: str, mask: str) -> None:
    check(*PARTS[parts], MASKS[mask])


@pytest.mark.parametrize("mask", ["causal", "both sides"])
@pytest.mark.parametrize("parts", ["own", "uneven"])
def test_blocks_with_documents_match_the_reference(parts: str, mask: str) -> None:
    check(*PARTS[parts], MASKS[mask], documents=True)


def check(query: Chunks, key: Chunks, config: CoreAttentionConfig, *, documents: bool = False) -> None:
    ours = block(triton_kernels, query, key, config, torch.float32, 24, 12, documents)
    exact = block(reference.bundle(), query, key, config, torch.float64, 24, 12, documents)
    FP32_REF.check_all(ours, exact)


def test_bf16_blocks_accumulate_in_fp32() -> None:
    case = (*PARTS["an earlier rank's"], MASKS["causal"])
    ours = block(triton_kernels, *case, torch.bfloat16, 16, 16, False)
    exact = block(reference.bundle(), *case, torch.float64, 16, 16, False)
    assert {x.dtype for name, x in ours.items() if name != "found anything"} == {torch.float32}
    BF16_KERNEL.check_all(ours, exact)


def test_fully_masked_block_leaves_output_and_lse_unchanged() -> None:
    config, query, key = MASKS["causal"], PositionSpan(chunks=(range(4),)), PositionSpan(chunks=(range(8, 12),))
    q = k = v = draw(4, BATCH, HEADS, 8).float()
    out, lse = draw(4, BATCH, HEADS, 8, seed=1).float(), draw(4, BATCH, HEADS, seed=2).float()
    before = out.clone(), lse.clone()
    triton_kernels.attention_block(AttentionBlock(q, k, v, config, query, key), out, lse)
    EXACT.check(out, before[0])
    EXACT.check(lse, before[1])


@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (128, 64), (64, 128)])
def test_tensors_beyond_32_bit_offsets_are_not_served(width: int, value_width: int) -> None:
    """Covers queries, and outputs and gradients, which may have a wider dtype."""
    q, k, v = (
        torch.empty(2**16, 2, *shape, device="meta", dtype=torch.bfloat16)
        for shape in ((128, width), (1, width), (1, value_width))
    )
    assert supports_inputs(q, k, v) == (max(width, value_width) < 128)


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mask", MASKS)
def test_largest_logits_equal_the_reference_above_the_least(mask: str, part: str, documents: bool) -> None:
    query, key = PARTS[part]
    segments_BS = (torch.arange(SEQ) * 3 // SEQ).expand(BATCH, SEQ) if documents else None
    spans = [
        PositionSpan(chunks=each, segments_BS=None if segments_BS is None else select_positions(segments_BS, each))
        for each in (query, key)
    ]
    sizes = (sum(map(len, query)), HEADS), (sum(map(len, key)), GROUPS), (sum(map(len, key)), GROUPS)
    q, k, v = (draw(n, BATCH, heads, 24, seed=n).float() for n, heads in sizes)
    given = AttentionBlock(q, k, v, MASKS[mask], *spans)
    _, lse_SBN = reference.attention_block(given)
    exact = torch.full((HEADS,), -torch.inf)
    reference.max_logits_(given, lse_SBN, exact, -torch.inf)
    found = torch.full((HEADS,), -torch.inf)
    triton_kernels.max_logits_(given, lse_SBN, found, -torch.inf)
    FP32_REF.check(found, exact, "largest logits")
    if exact.isfinite().all():
        least = float(exact.min() - 1e-3)
        found.fill_(-torch.inf)
        triton_kernels.max_logits_(given, lse_SBN, found, least)
        FP32_REF.check(found, exact, "largest logits above the least")
        triton_kernels.max_logits_(given, lse_SBN, found.fill_(-torch.inf), float(lse_SBN.max()))
        assert (found == -torch.inf).all(), "rows whose log-sum-exps are small are skipped"
