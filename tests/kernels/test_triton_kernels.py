"""Interpreted Triton kernels against the reference, with sizes that are not multiples of a tile."""

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.backends.triton.launch import sum_of_shares
from megatron_moe.kernels.ops import AttentionInputs, GroupedPart, QueryKeyTransform, VocabShard
from tests.helpers import kernel_comparison
from tests.helpers.kernel_comparison import BARS, REFERENCE, draw
from tests.helpers.tolerances import BF16_KERNEL, EXACT, FP32_REF
from tests.kernels.compiled import NO_SPILLS, compiled

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # numpy, of the interpreter
    pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning"),
]
DTYPES = pytest.mark.parametrize("dtype", BARS, ids=["fp32", "bf16"])
KINDS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu")


compare = partial(kernel_comparison.compare, triton_kernels)


def test_rms_norm_of_strided_rows() -> None:
    wide = draw(6, 40)
    compare(lambda k: lambda x, w: k.rms_norm(x[:, 3:19], w, 1e-6, False), [wide, draw(16, seed=1)], torch.float32)


def test_layer_norm_of_strided_rows() -> None:
    """More rows than all programs process in one iteration."""
    inputs = [draw(100, 1100), draw(1024, seed=1), draw(1024, seed=2)]
    compare(lambda k: lambda x, w, b: k.layer_norm(x[:, 3:1027], w, b, 1e-6, False), inputs, torch.float32)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "width", "rotary_dim", "batch"), [(3, 8, 8, 1), (5, 12, 6, 2), (1, 64, 2, 2)])
def test_rope_matches_the_reference(
    heads: int, width: int, rotary_dim: int, batch: int, interleaved: bool, dtype: torch.dtype
) -> None:
    half = draw(7, batch, rotary_dim // 2, seed=2).float()
    cos, sin = (torch.cat([f(half)] * 2, dim=-1) for f in (torch.cos, torch.sin))
    for angles in ((cos, sin), (cos[:, :1], sin[:, :1])):
        compare(
            lambda k, a=angles: lambda x: k.rope(x, a[0].to(torch.promote_types(x.dtype, torch.float32)), a[1].to(
                torch.promote_types(x.dtype, torch.float32)), interleaved),
            [draw(7, batch, heads, width)],
            dtype,
        )  # fmt: skip


def test_rope_of_strided_heads() -> None:
    cos, sin = draw(4, 1, 6, seed=2), draw(4, 1, 6, seed=3)
    op = lambda k: lambda x: k.rope(x[:, :, 1:, 2:8], cos.to(x.dtype), sin.to(x.dtype), False)  # noqa: E731
    compare(op, [draw(4, 2, 3, 10)], torch.float32)


def test_rope_from_a_later_dim_on() -> None:
    cos, sin = draw(4, 1, 6, seed=2), draw(4, 1, 6, seed=3)
    compare(
        lambda k: lambda x: k.rope(x, cos.to(x.dtype), sin.to(x.dtype), True, 3), [draw(4, 2, 3, 11)], torch.float32
    )


@DTYPES
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("length", "batch", "groups", "per_group", "width", "rotary_dim"),
    [(7, 2, 3, 2, 8, 8), (5, 1, 1, 1, 12, 6), (1, 1, 5, 40, 16, 4), (1, 1, 9, 1, 512, 512), (0, 2, 2, 2, 8, 8)],
)
def test_query_key_value_matches_the_reference(
    length: int, batch: int, groups: int, per_group: int, width: int, rotary_dim: int, interleaved: bool, normed: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    half = draw(length, batch, rotary_dim // 2, seed=2).float()
    cos, sin = (torch.cat([f(half)] * 2, dim=-1) for f in (torch.cos, torch.sin))
    inputs = [draw(length, batch, groups, (per_group + 2) * width)]
    inputs += [draw(width, seed=1), draw(width, seed=3)] if normed else []

    def op(kernels: Any) -> Any:
        def call(qkv: Tensor, *weights: Tensor) -> Tensor:
            angles = [x.to(torch.promote_types(qkv.dtype, torch.float32)) for x in (cos, sin)]
            transform = QueryKeyTransform(1e-6, True, *angles, interleaved, per_group)
            parts = kernels.query_key_value(qkv, *(weights or (None, None)), transform)
            # the heads of the gradients have a large stride, as in the output of attention's backward
            return torch.cat(parts, dim=2).permute(1, 2, 0, 3)

        return call

    compare(op, inputs, dtype)


def test_query_key_norm_without_epsilon() -> None:
    """Three heads in a tile of four: the fourth is padding and does not contribute to the gradients of the weights."""
    angles = draw(2, 1, 8, seed=2)

    def op(kernels: Any) -> Any:
        def call(qkv: Tensor, q: Tensor, k: Tensor) -> Tensor:
            transform = QueryKeyTransform(0.0, False, angles.to(qkv), angles.to(qkv), False, 1)
            return torch.cat(kernels.query_key_value(qkv, q, k, transform), dim=2)

        return call

    compare(op, [draw(2, 1, 3, 24), draw(8, seed=1), draw(8, seed=3)], torch.float32)


@DTYPES
@pytest.mark.parametrize(("heads", "key", "value", "shared"), [(3, 8, 12, 4), (17, 128, 128, 64), (1, 5, 3, 7)])
def test_latent_key_value_matches_the_reference(
    heads: int, key: int, value: int, shared: int, dtype: torch.dtype
) -> None:
    inputs = [draw(5, 2, heads, key + value), draw(5, 2, shared, seed=1)]
    compare(lambda k: lambda kv, s: k.latent_key_value(kv, s, key)[0], inputs, dtype)
    # the heads of the gradient have a large stride, as in the output of attention's backward
    compare(
        lambda k: lambda kv, s: torch.cat(k.latent_key_value(kv, s, key), dim=-1).permute(1, 2, 0, 3), inputs, dtype
    )


WINDOWS = {
    "sinks": (CoreAttentionConfig(softmax_scale=0.3), True, False),
    "window": (CoreAttentionConfig(softmax_scale=0.3, window=(20, 0)), False, False),
    "far window": (CoreAttentionConfig(softmax_scale=0.3, window=(150, 0)), True, False),
    "both sides": (CoreAttentionConfig(softmax_scale=0.3, window=(90, 140), causal=False), False, False),
    "off by one": (CoreAttentionConfig(softmax_scale=0.3, off_by_one=True, causal=False), False, False),
    "documents": (CoreAttentionConfig(softmax_scale=0.3), False, True),
    "everything": (CoreAttentionConfig(softmax_scale=0.3, window=(30, 0)), True, True),
}


@pytest.mark.parametrize(
    ("seq", "groups", "per_group", "width", "value"), [(200, 1, 2, 8, 8), (65, 2, 1, 24, 12), (1, 1, 1, 4, 4)]
)
@pytest.mark.parametrize("kind", WINDOWS)
def test_attention_with_windows_sinks_and_documents_matches_the_reference(
    kind: str, seq: int, groups: int, per_group: int, width: int, value: int
) -> None:
    config, sinks, documents = WINDOWS[kind]
    segments = (torch.arange(seq) * 3 // seq).expand(2, seq) if documents else None
    heads = groups * per_group
    inputs = [draw(seq, 2, heads, width), draw(seq, 2, groups, width, seed=1), draw(seq, 2, groups, value, seed=2)]
    inputs += [draw(heads, seed=3)] if sinks else []
    compare(
        lambda k: lambda q, key, v, *s: k.attention(AttentionInputs(q, key, v, config, s[0] if s else None, segments)),
        inputs,
        torch.float32,
    )


@pytest.fixture
def repeating() -> Iterator[None]:
    """Enables deterministic algorithms, like --deterministic-mode."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("causal", [True, False])
def test_deterministic_attention_uses_the_triton_kernels(
    causal: bool, repeating: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("megatron_moe.kernels.backends.torch_native.backend.attention")
    config = CoreAttentionConfig(softmax_scale=0.3, causal=causal)
    inputs = [draw(65, 2, 2, 24), draw(65, 2, 1, 24, seed=1), draw(65, 2, 1, 12, seed=2)]
    compare(lambda k: lambda q, key, v: k.attention(AttentionInputs(q, key, v, config)), inputs, torch.float32)


def test_clamped_and_shifted_activation_over_several_tiles() -> None:
    config = ActivationConfig(kind="quick_gelu", gated=True, clamp=1.0, linear_offset=1.0)
    inputs = [2 * draw(3, 2, 2 * 1100), draw(3, 2, seed=1).abs()]
    compare(lambda k: lambda x, p: k.activation(x, p, config), inputs, torch.float32)


def test_cross_entropy_of_strided_labels() -> None:
    labels = torch.tensor([[1, 9], [2, 9], [0, 9]])[:, 0]
    compare(lambda k: lambda x: k.cross_entropy(x, labels), [draw(3, 10)], torch.float32)


def test_gradient_of_cross_entropy_overwrites_the_logits() -> None:
    logits = draw(3, 10).requires_grad_()
    copied = 1 * logits
    loss = triton_kernels.cross_entropy(copied, torch.arange(3)).sum()
    (grad,) = torch.autograd.grad(loss, copied, retain_graph=True)
    assert grad.data_ptr() == copied.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_cross_entropy_of_huge_and_infinite_logits_is_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-torch.inf, 2.0, 1.0]], requires_grad=True)
    loss = triton_kernels.cross_entropy(logits, torch.tensor([0, 1]))
    FP32_REF.check(loss, torch.tensor([0.0, 0.3132616875182228]), "loss")
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert torch.isfinite(grad).all() and grad[1, 0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_ranks", "vocab"), [(2, 50), (4, 20_000)])
def test_cross_entropy_of_vocabulary_shards_equals_that_of_all_logits(
    num_ranks: int, vocab: int, dtype: torch.dtype
) -> None:
    part = vocab // num_ranks
    labels = torch.tensor([0, part - 1, part, 2 * part - 1, vocab - 1])
    logits, probe = (30 * draw(len(labels), vocab)).to(dtype), draw(len(labels), seed=1).float()
    logits[0, part:] = -torch.inf  # a rank without finite logits
    whole = logits.clone().requires_grad_()
    expected = REFERENCE.cross_entropy(whole, labels)
    (expected * probe).sum().backward()

    parts, stats = [x.clone().requires_grad_() for x in logits.chunk(num_ranks, dim=1)], []
    for rank, x in enumerate(parts):
        triton_kernels.cross_entropy(x, labels, VocabShard(rank * part, lambda own: stats.append(own) or own[None]))
    for rank, x in enumerate(parts):
        loss = triton_kernels.cross_entropy(1 * x, labels, VocabShard(rank * part, lambda own: torch.stack(stats)))
        FP32_REF.check(loss, expected, "loss")
        (loss * probe).sum().backward()
    tolerance = FP32_REF if dtype is torch.float32 else BF16_KERNEL
    tolerance.check(torch.cat([x.grad for x in parts], dim=1), whole.grad, "gradient")


def choices(tokens: int, topk: int, experts: int, *, some_empty: bool) -> Tensor:
    generator = torch.Generator().manual_seed(tokens + topk)
    ids = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :topk]
    if some_empty:
        ids = torch.where(torch.rand(tokens, topk, generator=generator) < 0.3, -1, ids)
        ids = torch.where(ids == experts - 1, -1, ids)  # an expert without tokens
    return ids


ROUTINGS = pytest.mark.parametrize(
    ("tokens", "topk", "experts", "some_empty"),
    [(0, 2, 4, False), (1, 1, 1, False), (50, 3, 7, True), (130, 2, 128, False), (33, 4, 5, True)],
)


@ROUTINGS
@pytest.mark.parametrize("align", [1, 3, 16])
def test_sorted_rows_match_the_reference(tokens: int, topk: int, experts: int, some_empty: bool, align: int) -> None:
    ids = choices(tokens, topk, experts, some_empty=some_empty)
    actual = triton_kernels.sort_rows(ids, experts, None, align)
    expected = REFERENCE.sort_rows(ids, experts, None, align)
    for name in ("token_R", "choice_R", "offsets_E", "rows_TK"):
        mine, theirs = getattr(actual, name), getattr(expected, name)
        assert mine.dtype is theirs.dtype and mine.tolist() == theirs.tolist(), name
    counts = triton_kernels.count_tokens(ids, experts)
    assert counts.dtype is torch.int64 and counts.tolist() == REFERENCE.count_tokens(ids, experts).tolist()


@pytest.mark.parametrize("sort_rows", [triton_kernels.sort_rows, REFERENCE.sort_rows], ids=["triton", "reference"])
def test_choices_of_other_ranks_experts_have_no_row(sort_rows: Any) -> None:
    """Sorting global ids, as they are received, equals sorting local ids."""
    ids = choices(50, 3, 12, some_empty=True)
    local = torch.where((ids >= 4) & (ids < 8), ids - 4, -1)
    actual, expected = sort_rows(ids.to(torch.int32), 4, None, 16, 4), REFERENCE.sort_rows(local, 4, None, 16)
    for name in ("token_R", "choice_R", "offsets_E", "rows_TK"):
        mine, theirs = getattr(actual, name), getattr(expected, name)
        assert mine.dtype is theirs.dtype and mine.tolist() == theirs.tolist(), name


def test_sorted_rows_of_several_blocks_per_segment_match_the_reference() -> None:
    ids = choices(4200, 2, 7, some_empty=True)
    actual, expected = triton_kernels.sort_rows(ids, 7, None, 128), REFERENCE.sort_rows(ids, 7, None, 128)
    EXACT.check(actual.choice_R, expected.choice_R, "choices")
    EXACT.check(actual.rows_TK, expected.rows_TK, "rows")
    EXACT.check(triton_kernels.count_tokens(ids, 7), REFERENCE.count_tokens(ids, 7), "counts")


@DTYPES
@ROUTINGS
@pytest.mark.parametrize("capacity", [None, 3])
def test_permute_and_unpermute_match_the_reference(
    tokens: int, topk: int, experts: int, some_empty: bool, capacity: int | None, dtype: torch.dtype
) -> None:
    ids = choices(tokens, topk, experts, some_empty=some_empty)
    index = REFERENCE.sort_rows(ids, experts, capacity)
    compare(lambda k: lambda x: k.permute(x, index), [draw(tokens, 20)], dtype)
    compare(lambda k: lambda x: k.gather_probs(x, index), [draw(tokens, topk)], dtype)
    compare(lambda k: lambda x: k.unpermute(x, index, tokens), [draw(len(index.token_R), 20)], dtype)


def test_dense_routing_maps_match_the_reference() -> None:
    map_TE = torch.tensor([[True, False], [True, True], [False, False]])
    index = REFERENCE.sort_rows_dense(map_TE, 6, None)
    compare(lambda k: lambda x: k.permute(x, index), [draw(3, 5)], torch.float32)
    compare(lambda k: lambda x: k.unpermute(x, index, 3), [draw(6, 5)], torch.float32)
    compare(lambda k: lambda x: k.gather_probs(x, index), [draw(3, 2)], torch.float32)


def test_unused_rows_do_not_reach_tokens() -> None:
    index = REFERENCE.sort_rows(torch.tensor([[0, -1], [1, 0]]), 2, None)
    rows = draw(4, 6).float()
    rows[3] = torch.nan
    assert torch.isfinite(triton_kernels.unpermute(rows, index, 2)).all()


MICROBATCHES = [(3, 0, 70, 1), (0, 0, 0, 0), (64, 0, 1, 130), (0, 0, 33, 0), (1, 0, 32, 31)]
"""Numbers of rows per expert and microbatch; one expert never has a row."""


@DTYPES
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "parts, sizes",
    [
        (MICROBATCHES[1:2], (24, 40)),
        *((MICROBATCHES[:number], (24, 40)) for number in (1, 2, 3, 5)),
        (MICROBATCHES[:3], (128, 256)),
    ],
    ids=["no rows", "1", "2", "3", "5", "3, whole tiles"],
)
def test_grouped_weight_gradients_of_several_microbatches_are_accumulated(
    parts: list[tuple[int, ...]], sizes: tuple[int, int], accumulate: bool, dtype: torch.dtype
) -> None:
    """The last rows of every microbatch belong to no expert."""
    outputs, inputs = sizes
    before = draw(4, outputs, inputs, seed=2).float()
    actual, expected = before.clone(), before.double()
    found: list[list[GroupedPart]] = [[], []]
    for number, counts in enumerate(parts):
        held, offsets = sum(counts), torch.tensor(counts).cumsum(0).to(torch.int32)
        grad, rows = (draw(held + 5, width, seed=7 * number + width).to(dtype) for width in sizes)
        grad[held:], rows[held:] = torch.nan, torch.nan
        if number == 1:
            grad = grad.T.contiguous().T
        for several, wanted in zip(found, (dtype, torch.float64), strict=True):
            several.append(GroupedPart(*(x.to(wanted) for x in (grad, rows)), offsets))
    triton_kernels.grouped_weight_grad(found[0], actual, accumulate)
    REFERENCE.grouped_weight_grad(found[1], expected, accumulate)
    FP32_REF.check(actual, expected, "weight gradient")


class _Buffer:
    """Gradient accumulator of a parameter."""

    defers_weight_grads = False

    def __init__(self, weight: Tensor) -> None:
        self.main_grad, self.filled = torch.full_like(weight, torch.nan, dtype=torch.float32), False

    def add(self, compute: Callable[[Tensor, bool], None]) -> None:
        compute(self.main_grad, self.filled)
        self.filled = True


def transform(width: int) -> QueryKeyTransform:
    return QueryKeyTransform(1e-6, False, *(draw(6, 1, width, seed=number).float() for number in (7, 8)), False, 2)


WITH_WEIGHTS: dict[str, tuple[Callable[..., Any], int]] = {
    "rms_norm": (lambda x, w: triton_kernels.rms_norm(x, w, 1e-6, False), 1),
    "add_rms_norm": (lambda x, w: triton_kernels.add_rms_norm(x, x * 2, w, 1e-6, True)[1], 1),
    "layer_norm": (lambda x, w, b: triton_kernels.layer_norm(x, w, b, 1e-6, False), 2),
    "gated_rms_norm": (lambda x, w: triton_kernels.gated_rms_norm(x, x * 3, w, 1e-6, False), 1),
    "query_key_value": (
        lambda x, q, k: triton_kernels.query_key_value(x.repeat(1, 1, 1, 4), q, k, transform(16))[1],
        2,
    ),
}
"""Op of an input [6, 2, 3, 16] and its weights, and the number of weights."""


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_weight_gradients_are_accumulated_as_autograd_would(name: str) -> None:
    """Compares two microbatches bitwise."""
    op, num_weights = WITH_WEIGHTS[name]
    weights = [draw(16, seed=number).bfloat16().requires_grad_() for number in range(num_weights)]
    inputs = [draw(6, 2, 3, 16, seed=number).bfloat16() for number in (3, 4)]
    found = [torch.autograd.grad(op(x, *weights).float().square().sum(), weights, allow_unused=True) for x in inputs]
    buffers = [_Buffer(weight) for weight in weights]
    for weight, buffer in zip(weights, buffers, strict=True):
        weight.grad_accumulator = buffer
    for x in inputs:
        op(x.requires_grad_(), *weights).float().square().sum().backward()
    for weight, buffer, grads in zip(weights, buffers, zip(*found, strict=True), strict=True):
        assert weight.grad is None
        EXACT.check(buffer.main_grad, grads[0].float() + grads[1].float())


class _Deferred:
    """Gradient accumulator that keeps the computations for later."""

    defers_weight_grads = False

    def __init__(self) -> None:
        self.computations: list[Callable[[Tensor, bool], None]] = []

    def add(self, compute: Callable[[Tensor, bool], None]) -> None:
        self.computations.append(compute)


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_deferred_weight_gradients_do_not_need_the_weight(name: str) -> None:
    """FSDP may have released the storage of the weight when the gradient is computed."""
    op, num_weights = WITH_WEIGHTS[name]
    weights = [draw(16, seed=number).bfloat16().requires_grad_() for number in range(num_weights)]
    x = draw(6, 2, 3, 16, seed=3).bfloat16()
    expected = torch.autograd.grad(op(x, *weights).float().square().sum(), weights)
    accumulators = [_Deferred() for _ in weights]
    for weight, accumulator in zip(weights, accumulators, strict=True):
        weight.grad_accumulator = accumulator
    op(x.requires_grad_(), *weights).float().square().sum().backward()
    alive = [weakref.ref(weight) for weight in weights]
    del weights, weight
    gc.collect()
    assert [reference() for reference in alive] == [None] * num_weights
    for accumulator, grad in zip(accumulators, expected, strict=True):
        (compute,) = accumulator.computations
        out = torch.full_like(grad, torch.nan, dtype=torch.float32)
        compute(out, False)
        EXACT.check(out, grad.float())


def test_norm_that_returns_its_input_adds_gradients_as_autograd_would() -> None:
    kernel_comparison.check_norm_with_input(triton_kernels, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("num_programs", [1, 64, 130])
def test_sum_of_shares_adds_all_programs(num_programs: int) -> None:
    shares_PW = draw(num_programs, 70).float()
    FP32_REF.check(sum_of_shares(shares_PW, torch.float32), shares_PW.double().sum(dim=0), "sum")


TABLE_IDS = {
    "a few": torch.cat([torch.tensor([3, 0, 3, 6]), torch.full((45,), 5), torch.tensor([0])]),
    "one of many segments": torch.cat([torch.full((700,), 5), torch.arange(50) % 4 + 3]),
    "ends at the ends of segments": torch.arange(64) // 16 + 2,
    "all others": torch.tensor([6, 0, 2, 4, 3, 5]).repeat_interleave(torch.tensor([1, 14, 2, 15, 32, 17])),
}
"""Ids of a table of seven rows; id 1 has no tokens."""


@DTYPES
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("ids", TABLE_IDS.values(), ids=TABLE_IDS)
def test_embedding_gradients_match_the_reference(ids: Tensor, accumulate: bool, dtype: torch.dtype) -> None:
    grad, before = draw(len(ids), 600).to(dtype), draw(7, 600, seed=1).float()
    actual, expected = before.clone(), before.double()
    triton_kernels.embedding_grad(grad, ids, actual, accumulate)
    REFERENCE.embedding_grad(grad.double(), ids, expected, accumulate)
    FP32_REF.check(actual, expected, "gradient")
    untouched = before[1] if accumulate else torch.zeros(600)
    EXACT.check(actual[1], untouched, "an id without tokens")


def test_embedding_gradient_without_tokens_is_zero() -> None:
    out = torch.ones(3, 4)
    triton_kernels.embedding_grad(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), out, False)
    EXACT.check(out, torch.zeros(3, 4), "gradient")


SORT_LAUNCHES = """
from megatron_moe.kernels.backends.triton import sort

sort._count_experts, sort._place_rows = Compiled(sort._count_experts), Compiled(sort._place_rows)
for align in (1, 128):
    sort.sort_rows(torch.zeros(4096, 8, dtype=torch.int64), 128, None, align)
"""


@pytest.mark.slow
def test_sort_compiles_without_spills_and_fills_only_unaligned_rows_in_the_kernel() -> None:
    found = compiled(SORT_LAUNCHES)
    assert len(found) == 4 and all(NO_SPILLS in code["ptxas"] for code in found)
    unaligned, aligned = found[1]["ttgir"], found[3]["ttgir"]
    assert unaligned.count("tt.store") - aligned.count("tt.store") == 2
