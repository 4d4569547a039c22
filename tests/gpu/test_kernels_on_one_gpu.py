"""Kernels on one GPU against the fp64 reference on the CPU, without host-device synchronisation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.mlp import ActivationConfig, MLPConfig
from megatron_moe.config.moe import CapacityConfig, ExpertsConfig, MoEConfig, RouterConfig, SharedExpertsConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.data.batch import MicrobatchContext, TokenMeta
from megatron_moe.kernels import autograd
from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.ops import AttentionInputs, GroupedPart, Kernels, QueryKeyTransform
from megatron_moe.kernels.reference.routing import count_tokens
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.moe.experts import _bias_of_rows
from megatron_moe.moe.moe_layer import MoELayer
from megatron_moe.parallel.context import ParallelContext
from tests.gpu.host_sync import no_host_sync
from tests.helpers import kernel_comparison
from tests.helpers.kernel_comparison import REFERENCE, adamw_step, differentiable, draw, route_and_pull, with_gradients
from tests.helpers.modules import module_of
from tests.helpers.tolerances import BF16_KERNEL, EXACT, FP32_MODEL, FP32_REF, FP64_REF, Tolerance

pytestmark = pytest.mark.gpu1

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
SWIGLU = ActivationConfig(kind="silu", gated=True)


def bundles(dtype: torch.dtype) -> tuple[Kernels, Kernels]:
    return select_kernels(KernelConfig(), torch.device("cuda"), dtype), REFERENCE


def compare(op: Callable[[Kernels], Callable[..., Tensor]], inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
    kernel_comparison.compare(bundles(dtype)[0], op, inputs, dtype, "cuda")


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    yield


@DTYPES
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_match_fp64(zero_centered: bool, dtype: torch.dtype) -> None:
    x, weight, bias = draw(7, 3, 96), draw(96, seed=1), draw(96, seed=2)
    compare(lambda k: lambda x, w: k.rms_norm(x, w, 1e-5, zero_centered), (x, weight), dtype)
    compare(lambda k: lambda x, w, b: k.layer_norm(x, w, b, 1e-5, zero_centered), (x, weight, bias), dtype)
    residual = draw(7, 3, 96, seed=3)
    both = lambda k: lambda r, x, w: torch.stack(k.add_rms_norm(r, x, w, 1e-5, zero_centered))  # noqa: E731
    compare(both, (residual, x, weight), dtype)


def attention_op(config: CoreAttentionConfig, segments: Tensor | None) -> Callable[[Kernels], Callable[..., Tensor]]:
    def op(kernels: Kernels) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            here = None if segments is None else segments.to(q.device)
            return kernels.attention(AttentionInputs(q, k, v, config, sinks, here))

        return call

    return op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_that_returns_its_input_adds_gradients_as_autograd_would(dtype: torch.dtype) -> None:
    kernel_comparison.check_norm_with_input(triton_kernels, torch.device("cuda"), dtype)


@DTYPES
@pytest.mark.parametrize("qk_dim, v_dim", [(64, 64), (192, 128)])
@pytest.mark.parametrize("kind", ["causal", "full", "window", "documents", "sinks"])
def test_attention_matches_fp64(kind: str, qk_dim: int, v_dim: int, dtype: torch.dtype) -> None:
    config = CoreAttentionConfig(
        softmax_scale=qk_dim**-0.5, causal=kind != "full", window=(20, 0) if kind == "window" else None
    )
    seq = 65
    segments = (torch.arange(seq) * 3 // seq).expand(2, seq) if kind == "documents" else None
    inputs = [draw(seq, 2, 4, qk_dim), draw(seq, 2, 2, qk_dim, seed=1), draw(seq, 2, 2, v_dim, seed=2)]
    inputs += [draw(4, seed=3)] if kind == "sinks" else []
    compare(attention_op(config, segments), inputs, dtype)


@pytest.mark.parametrize("qk_dim, v_dim", [(128, 128), (64, 64), (192, 128)])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, (127, 0), (300, 0)], ids=["all", "near", "far"])
@pytest.mark.parametrize("documents", [False, True], ids=["one", "documents"])
def test_long_attention_with_windows_sinks_and_documents_matches_fp64(
    documents: bool, window: tuple[int, int] | None, sinks: bool, qk_dim: int, v_dim: int
) -> None:
    seq = 645
    config = CoreAttentionConfig(softmax_scale=qk_dim**-0.5, window=window)
    segments = (torch.arange(seq) * 3 // seq).expand(2, seq) if documents else None
    inputs = [draw(seq, 2, 4, qk_dim), draw(seq, 2, 2, qk_dim, seed=1), draw(seq, 2, 2, v_dim, seed=2)]
    inputs += [draw(4, seed=3)] if sinks else []
    compare(attention_op(config, segments), inputs, BF16)


@DTYPES
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "clamped"])
def test_activations_keep_nan(gated: bool, kind: str, dtype: torch.dtype) -> None:
    """NaN must reach the loss: minima and maxima that return the other operand would hide a diverged layer."""
    config = ActivationConfig(kind=kind, gated=gated, clamp=0.7 if gated else None)
    x = draw(2, config.fc1_width_factor, 20).to(dtype).cuda()
    x[0, 0, ::4] = x[0, -1, 2::4] = torch.nan  # of the gate and of the up projection
    out = bundles(dtype)[0].activation(x.flatten(1), None, config)
    assert out[0, ::2].isnan().all()
    assert not out[0, 1::2].isnan().any() and not out[1].isnan().any()


@pytest.mark.parametrize("qk_dim, v_dim", [(128, 128), (192, 128)])
def test_deterministic_attention_is_bitwise_reproducible_and_matches_fp64(
    qk_dim: int, v_dim: int, repeating: None
) -> None:
    config = CoreAttentionConfig(softmax_scale=qk_dim**-0.5)
    inputs = [draw(645, 2, 4, qk_dim), draw(645, 2, 2, qk_dim, seed=1), draw(645, 2, 2, v_dim, seed=2)]
    compare(lambda k: lambda q, key, v: k.attention(AttentionInputs(q, key, v, config)), inputs, BF16)
    kernels, _ = bundles(BF16)

    def gradients() -> list[Tensor]:
        leaves = [each.to(BF16).cuda().requires_grad_() for each in inputs]
        kernels.attention(AttentionInputs(*leaves, config)).square().sum().backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    for once, second in zip(gradients(), gradients(), strict=True):
        EXACT.check(once, second, "gradients")


@pytest.fixture
def repeating(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Enables deterministic algorithms, like --deterministic-mode."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@DTYPES
def test_elementwise_ops_and_loss_match_fp64(dtype: torch.dtype) -> None:
    for kind in ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu"):
        config = ActivationConfig(kind=kind, gated=True, clamp=1.5, linear_offset=1.0)
        compare(
            lambda k, s=config: lambda x, p: k.activation(x, p, s), (draw(33, 24), draw(33, seed=1).abs() + 0.1), dtype
        )
    labels = torch.arange(19) % 50
    compare(lambda k: lambda x: k.cross_entropy(x, labels.to(x.device)), [draw(19, 50) * 4], dtype)
    angles = draw(5, 1, 8)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    for interleaved in (False, True):
        compare(
            lambda k, i=interleaved: lambda x: k.rope(x, cos.to(x.device).float(), sin.to(x.device).float(), i),
            [draw(5, 2, 3, 20)],
            dtype,
        )


@DTYPES
def test_latent_keys_and_rotated_queries_match_fp64(dtype: torch.dtype) -> None:
    inputs = [draw(33, 2, 5, 40), draw(33, 2, 8, seed=1)]
    both = lambda k: lambda kv, s: torch.cat(k.latent_key_value(kv, s, 24), -1).permute(1, 2, 0, 3)  # noqa: E731
    compare(both, inputs, dtype)
    cos = draw(33, 1, 8, seed=2)
    compare(
        lambda k: lambda x: k.rope(x, cos.to(x.device).float(), cos.to(x.device).float(), True, 16),
        [draw(33, 2, 5, 24)],
        dtype,
    )


@DTYPES
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("groups, per_group, width, rotary_dim", [(3, 5, 64, 64), (3, 5, 64, 24), (33, 2, 128, 128)])
def test_query_key_value_matches_fp64(
    groups: int, per_group: int, width: int, rotary_dim: int, interleaved: bool, normed: bool, dtype: torch.dtype
) -> None:
    angles = draw(33, 2, rotary_dim // 2)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    inputs = [draw(33, 2, groups, (per_group + 2) * width)]
    inputs += [draw(width, seed=1), draw(width, seed=2)] if normed else []

    def op(kernels: Kernels) -> Callable[..., Tensor]:
        def call(qkv: Tensor, *weights: Tensor) -> Tensor:
            here = [x.to(qkv.device, FP32) for x in (cos, sin)]
            transform = QueryKeyTransform(1e-6, False, *here, interleaved, per_group)
            parts = kernels.query_key_value(qkv, *(weights or (None, None)), transform)
            return torch.cat(parts, dim=2).permute(1, 2, 0, 3)

        return call

    compare(op, inputs, dtype)


def test_norms_and_heads_are_bitwise_reproducible() -> None:
    """The sizes are so large that every SM contributes a partial sum to the weight gradients."""
    kernels, _ = bundles(BF16)
    x, qkv = draw(1024, 4, 2048).to(BF16).cuda(), draw(1024, 4, 4, 10 * 128, seed=1).to(BF16).cuda()
    cos, sin = (torch.rand(1024, 1, 128, device="cuda") for _ in range(2))

    def gradients() -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in (x, x[0, 0], qkv, qkv[0, 0, 0, :128], qkv[0, 0, 1, :128])]
        outs = (
            *kernels.add_rms_norm(leaves[0], x, leaves[1], 1e-6, False),
            kernels.layer_norm(leaves[0], leaves[1], leaves[1], 1e-6, False),
            *kernels.query_key_value(*leaves[2:], QueryKeyTransform(1e-6, False, cos, sin, False, 8)),
        )
        return list(torch.autograd.grad(outs, leaves, [out.detach() for out in outs]))

    for once, second in zip(gradients(), gradients(), strict=True):
        EXACT.check(second, once)


GATES = [(70, 256, 48), (9000, 2048, 128), (700, 7168, 256), (300, 520, 512), (130, 100, 3)]


@pytest.mark.parametrize(
    ("tokens", "width", "experts", "weights"), [(*GATES[0], FP32), *((*sizes, BF16) for sizes in GATES)]
)
def test_router_logits_are_accurate_to_fp32(tokens: int, width: int, experts: int, weights: torch.dtype) -> None:
    """bf16 inputs use tensor cores without losing fp32 accuracy. Runs are bitwise reproducible."""
    inputs = [draw(tokens, width).to(weights).double(), draw(experts, width, seed=1).to(weights).double()]
    exact = with_gradients(lambda x, w: x @ w.T, inputs, torch.float64)
    kernels, _ = bundles(BF16)
    leaves = [x.to(weights).cuda().requires_grad_() for x in inputs]
    push = draw(tokens, experts, seed=99).float().cuda()
    logits = kernels.router_logits(*leaves, FP32)
    assert logits.dtype is FP32
    long = Tolerance(1e-5, 1e-7, "Sums of thousands of products, which matrix units cut off where fp32 would round.")
    (FP32_REF if width <= 256 else long).check(logits.double().cpu(), exact[0], "logits")
    grads = torch.autograd.grad(logits, leaves, push)
    for number, (grad, expected) in enumerate(zip(grads, exact[1:], strict=True)):
        bar = BF16_KERNEL if weights is BF16 else FP32_REF
        bar.check(grad.double().cpu(), expected, f"gradient {number}")
    for once, second in zip(
        grads, torch.autograd.grad(kernels.router_logits(*leaves, FP32), leaves, push), strict=True
    ):
        EXACT.check(second, once)


@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(
    ("experts", "topk", "groups"), [(32, 4, (None, None)), (128, 8, (None, None)), (256, 8, (8, 4)), (160, 6, (8, 3))]
)
def test_routing_matches_the_cpu(
    experts: int, topk: int, groups: tuple[int | None, int | None], score: Any, dtype: torch.dtype
) -> None:
    """There are more tokens than all programs process in one iteration. Two launches give identical bits."""
    num_groups, group_topk = groups
    config = RouterConfig(
        hidden_size=8, num_experts=experts, topk=topk, score_function=score, num_groups=num_groups,
        group_topk=group_topk, scaling_factor=1.7,
    )  # fmt: skip
    logits, bias = draw(9000, experts), draw(experts, seed=1).float()
    logits = logits.float().double()  # rounded to fp32, so that both dtypes select from the same values
    logits[7], logits[8, 3:] = 0.5, logits[8, 3]  # ties
    valid = torch.arange(9000) % 7 > 0

    fields = {"valid_T": valid.cuda(), "balance_sets": 3, "z": True}
    on_device = logits.to(dtype).cuda()
    routed, grad = route_and_pull(triton_kernels, on_device, bias.cuda(), config, **fields)
    rerouted, grad_rerouted = route_and_pull(triton_kernels, on_device, bias.cuda(), config, **fields)
    for first, second in zip((*differentiable(routed), grad), (*differentiable(rerouted), grad_rerouted), strict=True):
        assert torch.equal(first, second), "two launches differ"

    fields["valid_T"] = valid
    expected = REFERENCE.route(logits.to(dtype), bias, config, **fields)
    ids_TK = routed.ids_TK.cpu()
    # a rounding error may swap two nearly equal scores; everything else is computed from the experts that were selected
    assert (ids_TK == expected.ids_TK).all(dim=1).double().mean() > (0.99 if dtype is FP32 else 0.9999)
    EXACT.check(ids_TK[7:9], expected.ids_TK[7:9], "ties")
    EXACT.check(routed.counts_E.cpu(), count_tokens(ids_TK, experts), "counts")
    exact, exact_grad = route_and_pull(REFERENCE, logits, bias, config, forced_ids_TK=ids_TK, **fields)
    bar = FP32_REF if dtype is FP32 else FP64_REF
    for mine, theirs in zip((*differentiable(routed), grad), (*differentiable(exact), exact_grad), strict=True):
        bar.check(mine.double().cpu(), theirs, "weights, sums or gradient")


@DTYPES
@pytest.mark.parametrize("accumulate", [False, True])
def test_embedding_gradients_match_fp64(accumulate: bool, dtype: torch.dtype) -> None:
    ids = torch.cat([torch.arange(50) % 7, torch.full((300,), 9)])
    grad, before = draw(350, 96).to(dtype), draw(12, 96, seed=1).float()
    expected = before.double()
    REFERENCE.embedding_grad(grad.double(), ids, expected, accumulate)
    kernels, _ = bundles(dtype)
    actual = before.cuda()
    kernels.embedding_grad(grad.cuda(), ids.cuda(), actual, accumulate)
    FP32_REF.check(actual.double().cpu(), expected, "gradient")


@DTYPES
@pytest.mark.parametrize("ends", [[2, 2, 25, 30], [0, 0, 0, 40], [40, 40, 40, 40], [0, 0, 0, 0]])
def test_grouped_gemms_match_fp64_and_are_zero_for_empty_experts(ends: list[int], dtype: torch.dtype) -> None:
    offsets = torch.tensor(ends, dtype=torch.int32)

    def op(kernels: Kernels) -> Callable[..., Tensor]:
        def call(rows: Tensor, weight: Tensor) -> Tensor:
            tail = rows.new_full((40 - len(rows), 32), torch.nan)
            out = autograd.grouped_linear(kernels, torch.cat([rows, tail]), weight, offsets.to(rows.device))
            return out[: ends[-1]]

        return call

    compare(op, [draw(ends[-1], 32), draw(4, 24, 32, seed=1)], dtype)


@pytest.mark.parametrize("accumulate", [False, True])
def test_bf16_weight_gradients_accumulate_in_fp32(accumulate: bool) -> None:
    kernels, _ = bundles(BF16)
    ends = torch.tensor([100, 100, 230, 250], dtype=torch.int32)
    for outputs in (1, 24):  # 1: the gate of shared experts
        grad, rows = draw(256, outputs).to(BF16), draw(256, 32, seed=1).to(BF16)
        before = draw(outputs, 32, seed=2).float() if accumulate else torch.full((outputs, 32), torch.nan)
        actual, expected = before.cuda(), before.double()
        kernels.linear_weight_grad(grad.cuda(), rows.cuda(), actual, accumulate)
        REFERENCE.linear_weight_grad(grad, rows, expected, accumulate)
        FP32_MODEL.check(actual, expected, f"linear, {outputs} outputs")
    before = draw(4, 24, 32, seed=2).float() if accumulate else torch.full((4, 24, 32), torch.nan)
    actual, expected = before.cuda(), before.double()
    operands = [grad.cuda(), rows.cuda()]
    kernels.grouped_weight_grad([GroupedPart(*operands, ends.cuda())], actual, accumulate)
    REFERENCE.grouped_weight_grad([GroupedPart(grad, rows, ends)], expected, accumulate)
    BF16_KERNEL.check(actual, expected, "grouped")


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("sizes", [(24, 40), (128, 256), (1536, 2048), (136, 264)])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 9])
def test_weight_gradients_of_several_microbatches_are_summed(
    number: int, sizes: tuple[int, int], accumulate: bool
) -> None:
    """Some experts have no rows in some microbatches, the second in none of them. Rows past the last offset are NaN."""
    kernels, _ = bundles(BF16)
    parts, plain = [], []
    for microbatch in range(number):
        counts = torch.tensor([300 if microbatch else 0, 0, 33 + microbatch, 1000 * (microbatch % 2)])
        ends, held = counts.cumsum(0).to(torch.int32), int(counts.sum())
        factors = [draw(held + 7, width, seed=10 * microbatch + width).to(BF16) for width in sizes]
        for factor in factors:
            factor[held:] = torch.nan
        parts.append(GroupedPart(*(each.cuda() for each in factors), ends.cuda()))
        plain.append(GroupedPart(*(each for each in factors), ends))
    before = draw(4, *sizes, seed=2).float() if accumulate else torch.full((4, *sizes), torch.nan)
    actual, expected = before.cuda(), before.double()
    kernels.grouped_weight_grad(parts, actual, accumulate)
    REFERENCE.grouped_weight_grad(plain, expected, accumulate)
    BF16_KERNEL.check(actual, expected, f"{number} microbatches")
    second = before.cuda()
    kernels.grouped_weight_grad(parts, second, accumulate)
    EXACT.check(second, actual, "the same product once more")


def test_grouped_gemms_without_rows_have_zero_gradients() -> None:
    kernels, _ = bundles(BF16)
    rows = torch.zeros(0, 16, device="cuda", dtype=BF16, requires_grad=True)
    weight = torch.ones(4, 8, 16, device="cuda", dtype=BF16, requires_grad=True)
    out = autograd.grouped_linear(kernels, rows, weight, torch.zeros(4, device="cuda", dtype=torch.int32))
    out.sum().backward()
    assert out.shape == (0, 8) and rows.grad.shape == (0, 16)
    EXACT.check(weight.grad, torch.zeros(4, 8, 16))


def test_bias_gradients_of_experts_in_bf16_are_summed_in_fp32() -> None:
    num_rows = 400  # in bf16, a running sum of ones stops growing at 256
    bias = torch.zeros(2, 8, device="cuda", dtype=BF16, requires_grad=True)
    offsets = torch.tensor([num_rows, num_rows], device="cuda", dtype=torch.int32)
    _bias_of_rows(bias, offsets, num_rows).sum().backward()
    expected = torch.zeros(2, 8)
    expected[0] = num_rows
    EXACT.check(bias.grad, expected)


@DTYPES
@pytest.mark.parametrize("capacity", [None, 9])
def test_permuted_rows_match_fp64(capacity: int | None, dtype: torch.dtype) -> None:
    ids = torch.rand(21, 6, generator=torch.Generator().manual_seed(0)).argsort(dim=1)[:, :3]
    ids[::4, 1] = -1

    def op(kernels: Kernels) -> Callable[..., Tensor]:
        def call(tokens: Tensor, probs: Tensor) -> Tensor:
            index = kernels.sort_rows(ids.to(tokens.device), 6, capacity)
            rows = kernels.permute(tokens, index) * kernels.gather_probs(probs, index)[:, None]
            return kernels.unpermute(rows, index, 21)

        return call

    compare(op, [draw(21, 16), draw(21, 3, seed=1)], dtype)


def test_adamw_and_sum_of_squares_match_fp64() -> None:
    kernels, _ = bundles(BF16)
    state = [draw(1003, seed=seed).float() for seed in range(4)]
    state[3].abs_()
    for apply_update in (True, False):
        here, there = [x.cuda() for x in state], [x.double() for x in state]
        if not apply_update:
            here[1][5] = torch.nan
        for ops, tensors in ((kernels, here), (REFERENCE, there)):
            master, grad, exp_avg, exp_avg_sq = tensors
            move = adamw_step(
                3, scale=torch.tensor(0.3, dtype=master.dtype), apply_update=apply_update, device=master.device
            )
            ops.adamw_(master, grad, exp_avg, exp_avg_sq, move)
        for number in (0, 2, 3):
            FP32_REF.check(here[number], there[number], f"tensor {number}, apply_update {apply_update}")
    FP32_REF.check(kernels.sum_of_squares(state[0].cuda()), REFERENCE.sum_of_squares(state[0].double()))


class Buffer:
    """Stores the first microbatch's weight gradient in fp32 and adds the later ones."""

    def __init__(self, parameter: Tensor) -> None:
        self.grad = torch.empty(parameter.shape, dtype=FP32, device=parameter.device)
        self.used = False

    def add(self, compute: Callable[[Tensor, bool], None]) -> None:
        compute(self.grad, self.used)
        self.used = True


def make_layer(device: str, dtype: torch.dtype, kernels: Kernels, **fields: Any) -> MoELayer:
    config = MoEConfig(
        router=RouterConfig(
            hidden_size=64, num_experts=8, topk=2, dtype="fp32", score_function="sigmoid", expert_bias=True,
            balancing=("aux_loss",), aux_loss_coeffs=(1e-2,), z_loss_coeff=1e-3,
        ),
        experts=ExpertsConfig(num_experts=8, hidden_size=32, ffn_hidden_size=48, activation=SWIGLU, bias=True),
        shared=SharedExpertsConfig(mlp=MLPConfig(hidden_size=64, ffn_hidden_size=40, activation=SWIGLU), gate=True),
        latent_size=32,
        **fields,
    )  # fmt: skip
    layer = module_of(config, ParallelContext.single(dtype=dtype, device=device), kernels)
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=number).to(BF16) * parameter.meta.fan_in**-0.5)
    return layer


@pytest.mark.parametrize("capacity", [None, CapacityConfig(factor=0.75), CapacityConfig(factor=1.25, pad=True)])
def test_bf16_moe_layer_matches_fp64_without_host_sync(capacity: CapacityConfig | None) -> None:
    kernels, _ = bundles(BF16)
    layer, exact = (
        make_layer("cuda", BF16, kernels, capacity=capacity),
        make_layer("cpu", torch.float64, REFERENCE, capacity=capacity),
    )
    hidden = draw(64, 2, 64, seed=50).to(BF16)
    here, there = hidden.cuda().requires_grad_(), hidden.double().requires_grad_()
    positions = torch.arange(64).expand(2, 64)
    for parameter in layer.parameters():
        parameter.grad_accumulator = Buffer(parameter)
    push = draw(64, 2, 64, seed=51)
    push_here = push.to(BF16).cuda()
    mb_there = MicrobatchContext(tokens=TokenMeta(positions_BS=positions))
    ids = exact.router(there, replace(mb_there, training=False)).chosen_TK
    mb = MicrobatchContext(tokens=TokenMeta(positions_BS=positions.cuda()))
    given = ids.cuda()
    layer(here, mb, given).backward(push_here)  # warm-up, because libraries may allocate and synchronise at first use
    here.grad = None
    for parameter in layer.parameters():
        parameter.grad, parameter.grad_accumulator.used = None, False
    with no_host_sync():
        out = layer(here, mb, given)
        out.backward(push_here)
    expected = exact(there, mb_there, ids)
    expected.backward(push_here.double().cpu())
    bar = Tolerance(4e-2, 1e-2, "A chain of about ten bf16 roundings.")
    bar.check(out, expected, "output")
    bar.check(here.grad, there.grad, "gradient of the input")
    theirs = dict(exact.named_parameters())
    for name, parameter in layer.named_parameters():
        grad = parameter.grad_accumulator.grad if parameter.grad_accumulator.used else parameter.grad
        bar.check(grad, theirs[name].grad, name)


def test_other_ops_run_without_host_sync() -> None:
    kernels, _ = bundles(BF16)
    x = draw(64, 2, 4, 64).to(BF16).cuda().requires_grad_()
    weight = draw(64, seed=1).to(BF16).cuda().requires_grad_()
    cos = torch.ones(64, 1, 64, device="cuda")
    labels = torch.zeros(512, dtype=torch.int64, device="cuda")
    segments = torch.zeros(2, 64, dtype=torch.int64, device="cuda")
    flat = [torch.ones(1000, device="cuda") for _ in range(4)]
    move = adamw_step(1, device="cuda")

    def everything() -> None:
        normed = kernels.layer_norm(kernels.rms_norm(x, weight, 1e-5, False), weight, weight, 1e-5, True)
        rotated = kernels.rope(normed, cos, cos, False)
        config = CoreAttentionConfig(softmax_scale=0.1)
        out = kernels.attention(AttentionInputs(rotated, rotated[:, :, :2], rotated[:, :, :2], config))
        out = out + kernels.attention(AttentionInputs(rotated, rotated, rotated, config, weight[:4], segments))
        kernels.cross_entropy(out.reshape(512, 64), labels).sum().backward()
        kernels.sum_of_squares(flat[1])
        kernels.adamw_(*flat, move)

    everything()
    with no_host_sync():
        everything()
