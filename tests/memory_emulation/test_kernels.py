"""Fake kernels of memory emulation: every op runs on meta tensors and allocates as much memory as on a Hopper GPU."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.costs import ActivationSizes
from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.moe import RouterConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.backends.torch_native import backend as torch_native
from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.fakes import backend as fakes
from megatron_moe.kernels.kernel_set import LOW_PRECISION_OPS, OPS
from megatron_moe.kernels.ops import AttentionBlock, AttentionInputs, AttentionResult, PositionSpan, QueryKeyTransform
from megatron_moe.kernels.pages import make_pages
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.memory_emulation import kernels as emulated
from megatron_moe.memory_emulation.tracker import Timeline, Tracker
from tests.helpers import tiny
from tests.helpers.kernel_comparison import provided_ops
from tests.helpers.tiny_models import LINEAR_ATTENTION

Case = Callable[[Any], tuple[Tensor | tuple[Tensor, ...], list[Tensor]]]
"""Function that calls an op of a backend; returns its outputs and the inputs that require gradients."""

BF16 = torch.bfloat16
META = torch.device("meta")
KERNELS = emulated.emulated_kernels(KernelConfig(), BF16)
ROUTER = RouterConfig(hidden_size=32, num_experts=8, topk=2, score_function="sigmoid", balancing=(), aux_loss_coeffs=())


@pytest.fixture(autouse=True)
def without_data() -> Any:
    with META:
        yield


def leaf(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(shape, dtype=dtype).requires_grad_()


def ids_TK() -> Tensor:
    return torch.arange(20 * 2).view(20, 2).remainder(8)


def differentiable(op: str, shapes: list[tuple[int, ...]], *others: Any, dtype: torch.dtype = BF16) -> Case:
    """Case that calls `op` with input tensors of these shapes, followed by the other arguments."""

    def case(k: Any) -> Any:
        inputs = [leaf(*shape, dtype=dtype) for shape in shapes]
        given = [other() if callable(other) else other for other in others]
        return getattr(k, op)(*inputs, *given), inputs

    return case


def angles() -> Tensor:
    return torch.ones(10, 1, 32)


def index() -> Any:
    return reference.sort_rows(ids_TK(), 8, None)


def heads(normed: bool) -> Case:
    def case(k: Any) -> Any:
        qkv, weights = leaf(10, 2, 2, 4 * 64), [leaf(64), leaf(64)] if normed else []
        q_weight, k_weight = weights or (None, None)
        transform = QueryKeyTransform(1e-6, False, angles(), angles(), False, 2)
        return k.query_key_value(qkv, q_weight, k_weight, transform), [qkv, *weights]

    return case


def attention(*, sinks: bool = False, dtype: torch.dtype = BF16, segments_BS: bool = False, **mask: Any) -> Case:
    def case(k: Any) -> Any:
        inputs = [leaf(*shape, dtype=dtype) for shape in ((64, 2, 4, 32), (64, 2, 2, 32), (64, 2, 2, 16), (4,))]
        config = replace(tiny.attention().core, sinks=sinks, **mask)
        used = inputs if sinks else inputs[:3]
        segments = torch.zeros(2, 64, dtype=torch.int64) if segments_BS else None
        return k.attention(AttentionInputs(*inputs[:3], config, inputs[3] if sinks else None, segments)), used

    return case


def attention_block(*chunks: range, dtype: torch.dtype = BF16, forward: bool = True, **mask: Any) -> Case:
    """Case of attention from queries at positions 0-31 and 96-127 to keys at `chunks`, and its gradients."""

    def case(k: Any) -> Any:
        query, key = PositionSpan(chunks=(range(32), range(96, 128))), PositionSpan(chunks=chunks)
        num_keys = sum(map(len, chunks))
        q, k_, v = (
            torch.ones(n, 2, *heads, dtype=dtype)
            for n, heads in ((64, (4, 32)), *((num_keys, (2, w)) for w in (32, 16)))
        )
        out, lse = torch.zeros(64, 2, 4, 16), torch.zeros(2, 4, 64).permute(2, 0, 1)
        grad = torch.ones_like(out, dtype=dtype)
        block = AttentionBlock(q, k_, v, replace(tiny.attention().core, **mask), query, key)
        into = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (q, k_, v))
        if forward:
            k.attention_block(block, out, lse)
        k.attention_block_grad(block, AttentionResult(grad, grad, lse), into)
        return (q, k_, v, out, lse, grad, *into), []

    return case


def sparse_attention(k: Any) -> Any:
    q, kv, sinks = leaf(20, 2, 3, 48), leaf(20, 2, 48), leaf(3)
    out, lse = k.sparse_attention(q, kv, torch.zeros(20, 2, 8, dtype=torch.int32), sinks, 32, 0.25)
    assert lse.shape == (20, 2, 3) and lse.dtype is torch.float32
    return out, [q, kv, sinks]


def linear_attention(*, delta: bool, channels: bool = False) -> Case:
    def case(k: Any) -> Any:
        q, k_, v, decay = (
            leaf(70, 2, 2, 16),
            leaf(70, 2, 2, 16),
            leaf(70, 2, 4, 32),
            leaf(70, 2, 4, *([16] if channels else []), dtype=torch.float32),
        )
        beta = [leaf(70, 2, 4, dtype=torch.float32)] if delta else []
        used = [q, k_, v, decay, *beta]
        return k.linear_attention(q, k_, v, decay, *(beta or [None]), None, 0.25), used

    return case


def route_with_losses(k: Any) -> Any:
    logits, config = leaf(40, 160, dtype=torch.float32), replace(ROUTER, num_experts=160, num_groups=8, group_topk=2)
    routed = k.route(logits, None, config, valid_T=torch.arange(40) > 2, balance_sets=2, z=True)
    return (routed.probs_TK, routed.balance.scores_GE, routed.z_sum), [logits]


def sort(k: Any) -> Any:
    rows = k.sort_rows(ids_TK(), 8, None)
    return (rows.token_R, rows.choice_R, rows.offsets_E, rows.rows_TK), []


def embedding_grad(k: Any) -> Any:
    out = torch.zeros(50, 64)
    k.embedding_grad(torch.ones(20, 64, dtype=BF16), torch.arange(20), out, True)
    return out, []


def paged(k: Any) -> Any:
    rows, pages = torch.ones(300, 96, dtype=BF16), make_pages(8, 64, 96, dtype=BF16, device=META)
    table = k.pack_rows(rows, torch.tensor(130, dtype=torch.int32), pages)
    back = k.unpack_rows(table, 300, pages)
    k.free_pages(table, pages)
    return (table, back), []


STREAMS = HyperConnectionsConfig(num_streams=3)
PROJECTION = [(10, 2, 3 * 64), (15, 3 * 64), (3,), (15,)]
"""Shapes of three streams and of the parameters of their connection."""


def streams_write(k: Any) -> Any:
    inputs = [leaf(10, 2, 3 * 64), leaf(10, 2, 64), *(leaf(20, *n, dtype=torch.float32) for n in ((3,), (3, 3)))]
    return k.hyper_connection_write(*inputs), inputs


CASES: dict[str, Case] = {
    "hyper_connection_read": differentiable("hyper_connection_read", PROJECTION, STREAMS),
    "hyper_connection_read, head": differentiable(
        "hyper_connection_read", [PROJECTION[0], (3, 3 * 64), (1,), (3,)], STREAMS
    ),
    "hyper_connection_sum": lambda k: (k.hyper_connection_sum(torch.ones(10, 2, 3 * 64), torch.ones(20, 3)), []),
    "hyper_connection_write": streams_write,
    "rms_norm": differentiable("rms_norm", [(10, 2, 256), (256,)], 1e-6, False),
    "add_rms_norm": differentiable("add_rms_norm", [(10, 2, 256), (10, 2, 256), (256,)], 1e-6, False),
    "layer_norm": differentiable("layer_norm", [(10, 2, 256), (256,), (256,)], 1e-6, False),
    "rope": differentiable("rope", [(10, 2, 3, 96)], angles, angles, False, 64),
    "query_key_value": heads(False),
    "query_key_value with norms": heads(True),
    "latent_key_value": differentiable("latent_key_value", [(10, 2, 3, 96), (10, 2, 32)], 64),
    "attention": attention(),
    "attention with window, sinks and documents": attention(sinks=True, window=(16, 0), segments_BS=True),
    "attention_block": attention_block(range(16, 32), range(64, 96)),
    "attention_block with window": attention_block(range(16, 32), range(64, 96), window=(40, 0)),
    "linear_attention": linear_attention(delta=False),
    "linear_attention with the delta rule": linear_attention(delta=True),
    "linear_attention with a decay per channel": linear_attention(delta=True, channels=True),
    "sparse_attention": sparse_attention,
    "short_conv": differentiable("short_conv", [(20, 2, 96), (96, 4), (96,)], None),
    "gated_rms_norm": differentiable("gated_rms_norm", [(20, 2, 3, 32), (20, 2, 3, 32), (32,)], 1e-6, True),
    "activation": differentiable("activation", [(40, 128), (40,)], ActivationConfig(kind="silu", gated=True)),
    "activation alone": differentiable("activation", [(9, 2, 128)], None, ActivationConfig(kind="gelu", gated=False)),
    "cross_entropy": differentiable("cross_entropy", [(20, 300)], lambda: torch.arange(20)),
    "router_logits": differentiable("router_logits", [(70, 96), (8, 96)], torch.float32),
    "router_logits of many experts": differentiable("router_logits", [(70, 96), (160, 96)], torch.float32),
    "route with losses": route_with_losses,
    "count_tokens": lambda k: (k.count_tokens(ids_TK(), 8), []),
    "sort_rows": sort,
    "permute": differentiable("permute", [(20, 64)], index),
    "unpermute": differentiable("unpermute", [(40, 64)], index, 20),
    "gather_probs": differentiable("gather_probs", [(20, 2)], index, dtype=torch.float32),
    "pack_rows, unpack_rows, free_pages": paged,
    "embedding_grad": embedding_grad,
    "sum_of_squares": lambda k: (k.sum_of_squares(torch.ones(50)), []),
}


def kinds(case: Case, kernels: Any) -> list[tuple[torch.Size, torch.dtype]]:
    """Returns shape and dtype of the outputs of an op and of its input gradients."""
    outputs, inputs = case(kernels)
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    if inputs:
        found += torch.autograd.grad(found, inputs, [torch.ones_like(output) for output in found])
    return [(each.shape, each.dtype) for each in found]


@pytest.mark.parametrize("name", CASES)
def test_fake_ops_return_tensors_of_the_reference_shapes(name: str) -> None:
    assert kinds(CASES[name], KERNELS) == kinds(CASES[name], reference.bundle())


def test_fakes_do_not_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(fakes, "_loader", fakes._BackendLoader)
    backend = fakes.fake_backend("triton")
    assert backend.rms_norm(leaf(10, 256), leaf(256), 1e-6, False).shape == (10, 256)


def test_every_op_is_emulated_by_the_backend_that_auto_selects() -> None:
    backends = {choice.op: choice.backend for choice in KERNELS.choices}
    assert {op for op, name in backends.items() if name == "as triton"} == set(provided_ops(triton_kernels))
    rest = set(OPS) - set(provided_ops(triton_kernels)) - set(provided_ops(torch_native)) - set(LOW_PRECISION_OPS)
    assert all(backends[op] == reference.NAME for op in rest), "plain torch on a GPU, and so here"


def figures(timeline: Timeline, since: int, until: int) -> tuple[int, int]:
    """Returns the peak and the final memory of an interval of the timeline, in bytes above its start."""
    totals = timeline.live_bytes()
    before = totals[since - 1] if since else 0
    return max(totals[since:until], default=before) - before, totals[until - 1] - before


def memory_of(case: Case, backend: Any) -> list[tuple[int, int]]:
    """Returns the peak and the final memory of forward and of backward, in bytes above their starts."""
    tracker = Tracker()
    with tracker:
        start = len(tracker.timeline().phases)
        outputs, inputs = case(backend)
        middle = len(tracker.timeline().phases)
        found = [(start, middle)]
        if inputs:
            several = outputs if isinstance(outputs, tuple) else (outputs,)
            grads = [torch.ones_like(output) for output in several]
            begin = len(tracker.timeline().phases)
            given = torch.autograd.grad(several, inputs, grads)
            found.append((begin, len(tracker.timeline().phases)))
            del given
        timeline = tracker.timeline()
    return [figures(timeline, *span) for span in found]


@pytest.mark.parametrize(("keys", "values"), [(128, 128), (64, 128), (128, 64)])
@pytest.mark.parametrize("name", ["delta", "kda"])
def test_backward_of_linear_attention_has_the_workspace_of_its_config(name: str, keys: int, values: int) -> None:
    """The config also counts the gradients of the output and of its gate, which exist at the same time."""
    length, heads = 640, 4
    config = replace(
        LINEAR_ATTENTION[name], num_key_heads=heads, num_value_heads=heads, key_head_dim=keys, value_head_dim=values
    )
    sizes = ActivationSizes(residual=length, inner=length, activation_itemsize=2, internal_itemsize=4, length=length)
    shapes = [(keys,), (keys,), (values,), (keys,) if name == "kda" else (), ()]

    dtypes = [BF16] * 3 + [torch.float32] * 2

    def case(k: Any) -> Any:
        used = [leaf(length, 1, heads, *shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return k.linear_attention(*used, None, 0.25, 1e-6), used

    (_, saved), (peak, _) = memory_of(case, KERNELS)
    outside = 2 * length * heads * values * 2
    assert peak == pytest.approx(config.backward_workspace(ParallelConfig(), sizes, None) - outside, rel=0.005)
    systems = [each for each in config.recurrence_tensors(length * heads, sizes) if "systems" in each.name]
    inputs = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    assert saved == sum(each.bytes for each in systems) + length * heads * (inputs + 2 * values)


@pytest.mark.parametrize("length", [640, 2048])
def test_backward_of_hyper_connections_has_the_workspace_of_its_config(length: int) -> None:
    """The config also counts the gradients of the results. The op adds a given gradient of pre to its own, and without
    gradient buffers returns the gradients of matrix, scale and bias; the latter two occupy 512 bytes each."""
    config, hidden, n = HyperConnectionsConfig(num_streams=3), 512, 3
    sizes = ActivationSizes(residual=length, inner=length, activation_itemsize=2, internal_itemsize=4, length=length)
    shapes = [(length, 1, n * hidden), (config.num_weights, n * hidden), (3,), (config.num_weights,)]
    (_, saved), (peak, _) = memory_of(differentiable("hyper_connection_read", shapes, config), KERNELS)
    given = length * ((n + 1) * hidden * 2 + config.num_weights * 4)
    added = length * n * 4 + config.num_weights * n * hidden * 2 + 2 * 512
    assert peak == config.backward_workspace(hidden, sizes) - given + added
    kept = sum(each.bytes for each in config.saved_tensors("m", hidden, sizes, is_first=True, offloaded_by=""))
    assert saved == kept + config.num_weights * n * hidden * 2 + 2 * 512


def test_norm_backward_has_two_weight_gradient_shares_per_multiprocessor() -> None:
    """Each of 2 * 132 programs, two per SM, writes an fp32 share of the weight gradient."""
    case = differentiable("rms_norm", [(4096, 4096), (4096,)], 1e-6, False)
    _, (peak, _) = memory_of(case, KERNELS)
    assert peak == 4096 * 4096 * 2 + 2 * 132 * 4096 * 4 + 4096 * 2


@pytest.mark.parametrize(
    "case", [attention(sinks=True, dtype=torch.float32), attention_block(range(64), dtype=torch.float32)]
)
def test_fp32_attention_materialises_all_logits(case: Case) -> None:
    """No fused attention kernel supports fp32 on GPUs, so plain torch ops compute attention."""
    kernels = emulated.emulated_kernels(KernelConfig(), torch.float32)
    assert memory_of(case, kernels)[0][0] > 3 * 2 * 4 * 64 * 64 * 4


QUERIES, KEYS, VALUES = 64 * 2 * 4 * 32, 64 * 2 * 2 * 32, 64 * 2 * 2 * 16
"""Number of elements of q, k and v."""
GRADS = (QUERIES + KEYS + VALUES) * 2
OUTPUT, LSE, SEED_AND_OFFSET, UNUSED_SEED = 64 * 2 * 4 * 16 * 2, 64 * 2 * 4 * 4, 2 * 512, 512
WORKSPACE = QUERIES * 4 + 2 * (KEYS + VALUES) * 2
"""Workspace of cuDNN's backward in bytes, measured on a GPU.

It contains the gradient of q in fp32, and the gradients of k and v for every query head.
"""


def test_cudnn_attention_keeps_its_output_and_one_number_per_query() -> None:
    (_, kept), (peak, _) = memory_of(attention(), KERNELS)
    assert kept == GRADS + OUTPUT + LSE + SEED_AND_OFFSET
    assert peak == GRADS + WORKSPACE


def test_cudnn_attention_with_sinks_keeps_as_much_as_without() -> None:
    (_, kept), (peak, _) = memory_of(attention(sinks=True), KERNELS)
    assert kept == GRADS + 512 + OUTPUT + LSE
    assert peak == GRADS + WORKSPACE + UNUSED_SEED


def test_causal_block_takes_the_workspace_of_cudnn() -> None:
    ((peak, kept),) = memory_of(attention_block(range(32), range(96, 128), forward=False), KERNELS)
    assert peak - kept == GRADS + WORKSPACE + UNUSED_SEED


def test_backends_of_unknown_memory_are_rejected() -> None:
    with pytest.raises(
        EnvironmentProblem, match="does not support kernel backend 'transformer_engine' for 'linear_forward'"
    ):
        emulated.emulated_kernels(KernelConfig(kernel_backend="transformer_engine"), BF16)


def test_requested_plain_torch_is_replaced_only_where_it_reads_sizes_on_the_host() -> None:
    kernels = emulated.emulated_kernels(KernelConfig(kernel_backend="reference"), BF16)
    assert kernels.rms_norm is reference.rms_norm
    rows, offsets = torch.empty(6, 8), torch.empty(2, dtype=torch.int32)
    weight = torch.empty(2, 5, 8)
    assert kernels.grouped_forward(rows, weight, offsets).shape == (6, 5)
