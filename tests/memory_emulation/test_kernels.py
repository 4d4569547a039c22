"""What the emulation says of a kernel's memory is what the kernel's own code takes, forward and backward."""

import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.moe import ActivationConfig, RouterConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels import reference
from megatron_moe.kernels.backends import triton as triton_folder
from megatron_moe.kernels.backends.torch_native import backend as torch_native
from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.backends.triton import fake_routing
from megatron_moe.kernels.backends.triton.attention import tiles
from megatron_moe.kernels.kernel_set import OPS
from megatron_moe.kernels.ops import GroupedPart, PositionSpan, RowIndex
from megatron_moe.kernels.pages import make_pages
from megatron_moe.memory_emulation import kernels as emulated
from megatron_moe.memory_emulation.tracker import Timeline, Tracker
from tests.helpers import tiny

Case = Callable[[Any], tuple[Tensor | tuple[Tensor, ...], list[Tensor]]]
"""With a backend: the outputs of an op and the inputs to differentiate by."""

BF16 = torch.bfloat16
BUNDLE = emulated.emulated_kernels(KernelConfig(), BF16)
ROUTER = RouterConfig(hidden_size=32, num_experts=8, topk=2, score_function="sigmoid", balancing=(), aux_loss_coeffs=())
SWIGLU = ActivationConfig(kind="silu", gated=True)


def leaf(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(shape, dtype=dtype).requires_grad_()


def choices() -> Tensor:
    return torch.arange(20 * 2).view(20, 2).remainder(8)


def index() -> RowIndex:
    return reference.sort_rows(choices(), 8, None)


def norm(k: Any) -> Any:
    x, weight = leaf(10, 2, 256), leaf(256)
    return k.rms_norm(x, weight, 1e-6, False), [x, weight]


def norm_of_a_view(k: Any) -> Any:
    wide, weight = leaf(10, 2, 300), leaf(256)
    return k.rms_norm(wide[..., 3:259], weight, 1e-6, False), [wide, weight]


def sum_and_norm(k: Any) -> Any:
    residual, x, weight = leaf(10, 2, 256), leaf(10, 2, 256), leaf(256)
    return k.add_rms_norm(residual, x, weight, 1e-6, False), [residual, x, weight]


def layer_norm(k: Any) -> Any:
    x, weight, bias = leaf(10, 2, 256), leaf(256), leaf(256)
    return k.layer_norm(x, weight, bias, 1e-6, False), [x, weight, bias]


def layer_norm_of_a_view(k: Any) -> Any:
    wide, weight, bias = leaf(10, 2, 300), leaf(256), leaf(256)
    return k.layer_norm(wide[..., 3:259], weight, bias, 1e-6, False), [wide, weight, bias]


def rope(k: Any) -> Any:
    x, angles = leaf(10, 2, 3, 96), torch.ones(10, 1, 32)
    return k.rope(x, angles, angles, False, 64), [x]


def heads(normed: bool) -> Case:
    def case(k: Any) -> Any:
        qkv, angles = leaf(3, 2, 2, 4 * 64), torch.ones(3, 1, 32)
        weights = [leaf(64), leaf(64)] if normed else []
        q_weight, k_weight = weights or (None, None)
        return k.query_key_value(qkv, q_weight, k_weight, 1e-6, False, angles, angles, False, 2), [qkv, *weights]

    return case


def latent(k: Any) -> Any:
    kv, shared = leaf(10, 2, 3, 96), leaf(10, 2, 32)
    return k.latent_key_value(kv, shared, 64), [kv, shared]


def special_attention(k: Any) -> Any:
    q, k_, v, sinks = leaf(64, 2, 4, 32), leaf(64, 2, 2, 32), leaf(64, 2, 2, 16), leaf(4)
    config = replace(tiny.attention().core, sinks=True, window=(16, 0))
    segments = torch.zeros(2, 64, dtype=torch.int64)
    return k.attention(q, k_, v, config, sinks, segments, None), [q, k_, v, sinks]


def block_of_attention(k: Any) -> Any:
    """Gradients come with their heads far apart, and a window needs two rectangles."""
    q, k_, v = (torch.ones(*shape, dtype=BF16) for shape in ((64, 2, 4, 32), (48, 2, 2, 32), (48, 2, 2, 16)))
    out, lse = torch.zeros(64, 2, 4, 16), torch.zeros(64, 2, 4)
    grad = torch.ones(2, 4, 16, 64, dtype=BF16).permute(3, 0, 1, 2)
    query, key = PositionSpan(chunks=(range(32), range(96, 128))), PositionSpan(chunks=(range(16, 32), range(64, 96)))
    mask = replace(tiny.attention().core, window=(40, 0)), query, key, None
    into = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (q, k_, v))
    k.attention_block(q, k_, v, *mask, out, lse)
    k.attention_block_grad(grad, q, k_, v, out.to(BF16), lse, lse, *mask, into)
    return (out, lse, *into), []


def weighted_activation(k: Any) -> Any:
    x, probs = leaf(40, 128), leaf(40)
    return k.activation(x, probs, SWIGLU), [x, probs]


def plain_activation(k: Any) -> Any:
    x = leaf(10, 2, 128)
    return k.activation(x, None, ActivationConfig(kind="gelu", gated=False)), [x]


def cross_entropy(k: Any) -> Any:
    logits = leaf(20, 300)
    return k.cross_entropy(logits, torch.arange(20)), [logits]


def gate(tokens: int, experts: int) -> Case:
    def case(k: Any) -> Any:
        hidden, weight = leaf(tokens, 96), leaf(experts, 96)
        return k.gate_product(hidden, weight, torch.float32), [hidden, weight]

    return case


def route(k: Any) -> Any:
    logits = leaf(20, 8, dtype=torch.float32)
    return k.route(logits, None, ROUTER).probs_TK, [logits]


def route_with_losses(k: Any) -> Any:
    logits, config = leaf(40, 160, dtype=torch.float32), replace(ROUTER, num_experts=160, num_groups=8, group_topk=2)
    routed = k.route(logits, None, config, valid_T=torch.arange(40) > 2, balance_sets=2, z=True)
    return (routed.probs_TK, routed.balance.scores_GE, routed.z_sum), [logits]


def permute(k: Any) -> Any:
    tokens = leaf(20, 64)
    return k.permute(tokens, index()), [tokens]


def unpermute(k: Any) -> Any:
    rows = leaf(40, 64)
    return k.unpermute(rows, index(), 20), [rows]


def gather_probs(k: Any) -> Any:
    probs = leaf(20, 2, dtype=torch.float32)
    return k.gather_probs(probs, index()), [probs]


def count(k: Any) -> Any:
    return k.count_tokens(choices(), 8), []


def sort(k: Any) -> Any:
    rows = k.sort_rows(choices(), 8, None)
    return (rows.token_R, rows.choice_R, rows.offsets_E, rows.rows_TK), []


def embedding_grad(k: Any) -> Any:
    out = torch.zeros(50, 64)
    k.embedding_grad(torch.ones(20, 64, dtype=BF16), torch.arange(20), out, True)
    return out, []


def grouped_weight_grad(k: Any) -> Any:
    out, offsets = torch.zeros(2, 48, 64), torch.tensor([4, 10], dtype=torch.int32)
    grad, rows = torch.ones(48, 10, dtype=BF16).T, torch.ones(10, 64, dtype=BF16)
    k.grouped_weight_grad([GroupedPart(grad, rows, offsets)] * 2, out, True)
    return out, []


def paged(k: Any) -> Any:
    rows = torch.ones(300, 96, dtype=BF16)
    pages = make_pages(8, 64, 96, dtype=BF16, device=torch.device("cpu"))
    table = k.pack_rows(rows, torch.tensor(130, dtype=torch.int32), pages)
    back = k.unpack_rows(table, 300, pages)
    k.free_pages(table, pages)
    return (table, back, pages.data_PLW), []


CASES: dict[str, Case] = {
    "rms_norm": norm,
    "rms_norm of a view": norm_of_a_view,
    "add_rms_norm": sum_and_norm,
    "layer_norm": layer_norm,
    "layer_norm of a view": layer_norm_of_a_view,
    "rope": rope,
    "query_key_value": heads(False),
    "query_key_value with norms": heads(True),
    "latent_key_value": latent,
    "attention": special_attention,
    "attention_block, attention_block_grad": block_of_attention,
    "activation": weighted_activation,
    "activation alone": plain_activation,
    "cross_entropy": cross_entropy,
    "gate_product": gate(70, 8),
    "route": route,
    "route with losses": route_with_losses,
    "permute": permute,
    "unpermute": unpermute,
    "gather_probs": gather_probs,
    "count_tokens": count,
    "pack_rows, unpack_rows, free_pages": paged,
    "sort_rows": sort,
    "embedding_grad": embedding_grad,
    "grouped_weight_grad": grouped_weight_grad,
}


def figures(timeline: Timeline, since: int, until: int) -> tuple[int, int]:
    """(peak, what is left) in bytes over what was there at the beginning."""
    totals = timeline.totals()
    before = totals[since - 1] if since else 0
    return max(totals[since:until], default=before) - before, totals[until - 1] - before


class Silent:
    """A kernel that is launched and does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None


@pytest.fixture
def silent_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's wrappers take their memory, and launch nothing: the interpreter would take some of its own."""
    for info in pkgutil.walk_packages(triton_folder.__path__, f"{triton_folder.__name__}."):
        module = importlib.import_module(info.name)
        for name, value in list(vars(module).items()):
            if isinstance(value, KernelInterface):
                monkeypatch.setattr(module, name, Silent())


def memory_of(case: Case, backend: Any) -> list[tuple[int, int]]:
    """(peak, what is left) of forward and backward, in bytes."""
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


@pytest.mark.usefixtures("silent_kernels")
@pytest.mark.parametrize("name", CASES)
def test_an_op_takes_and_keeps_what_the_triton_kernel_does(name: str) -> None:
    assert memory_of(CASES[name], BUNDLE) == memory_of(CASES[name], triton_kernels)


@pytest.mark.usefixtures("silent_kernels")
@pytest.mark.parametrize("experts", [8, 128])
def test_the_gate_has_as_many_shares_as_programs(experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as few multiprocessors as the interpreter has, which more tokens than they hold would have to share."""
    monkeypatch.setattr(fake_routing, "HOPPER_MULTIPROCESSORS", 4)
    assert memory_of(gate(500, experts), BUNDLE) == memory_of(gate(500, experts), triton_kernels)


@pytest.mark.usefixtures("silent_kernels")
@pytest.mark.parametrize("blocks", [32, 33, 70])
def test_the_sort_has_as_many_stretches_as_share_its_blocks(blocks: int) -> None:
    def run(k: Any) -> Any:
        rows = k.sort_rows(torch.zeros(blocks * 128, 1, dtype=torch.int64), 200, None)
        return (rows.token_R, rows.choice_R, rows.offsets_E, rows.rows_TK), []

    assert memory_of(run, BUNDLE) == memory_of(run, triton_kernels)


@pytest.mark.usefixtures("silent_kernels")
@pytest.mark.parametrize("sinks", [False, True], ids=["parts", "sinks"])
def test_attention_in_fp32_has_all_logits(sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither cuDNN nor our kernels compute it on a GPU."""
    monkeypatch.setattr(tiles, "INTERPRETED", False)

    def whole(k: Any) -> Any:
        q, k_, v, sinks_N = (
            leaf(*shape, dtype=torch.float32) for shape in ((64, 1, 4, 32), *[(64, 1, 2, 32)] * 2, (4,))
        )
        config = replace(tiny.attention().core, sinks=True)
        return k.attention(q, k_, v, config, sinks_N, None, None), [q, k_, v, sinks_N]

    def parts(k: Any) -> Any:
        q, k_, v = (torch.ones(*shape) for shape in ((64, 1, 4, 32), *[(64, 1, 2, 32)] * 2))
        out, lse, span = torch.zeros_like(q), torch.zeros(1, 4, 64).permute(2, 0, 1), PositionSpan(chunks=(range(64),))
        mask, into = (tiny.attention().core, span, span, None), tuple(torch.zeros_like(x) for x in (q, k_, v))
        k.attention_block(q, k_, v, *mask, out, lse)
        k.attention_block_grad(out, q, k_, v, out, lse, lse, *mask, into)
        return (out, lse, *into), []

    case, bundle = whole if sinks else parts, emulated.emulated_kernels(KernelConfig(), torch.float32)
    found = memory_of(case, bundle)
    assert found == memory_of(case, triton_kernels) and found[0][0] > 3 * 4 * 64 * 64 * 4


def test_every_op_of_the_gpu_has_a_case_or_computes_in_place() -> None:
    known = {op for name in CASES for op in re.findall(r"\w+", name)} | {"adamw_", "adamw_packed_"}
    assert set(triton_kernels.PROVIDES) <= known
    bundle = emulated.emulated_kernels(KernelConfig(), BF16)
    backends = {choice.op: choice.backend for choice in bundle.choices}
    assert {op for op, name in backends.items() if name == emulated.OURS} == set(triton_kernels.PROVIDES)
    rest = set(OPS) - set(triton_kernels.PROVIDES) - set(torch_native.PROVIDES)
    assert all(backends[op] == reference.NAME for op in rest), "plain torch on a GPU, and so here"


def test_attention_keeps_its_inputs_its_output_and_one_number_per_query() -> None:
    """cuDNN's attention, measured on a GPU; here its sizes."""
    tracker = Tracker()
    with tracker:
        q, k, v = leaf(64, 2, 4, 32), leaf(64, 2, 2, 32), leaf(64, 2, 2, 16)
        before = tracker.timeline().totals()[-1]
        out = BUNDLE.attention(q, k, v, tiny.attention().core, None, None, None)
        kept = tracker.timeline().totals()[-1] - before
    out_bytes, lse_bytes, seed_and_offset = out.numel() * 2, 2 * 4 * 64 * 4, 2 * 512
    assert kept == out_bytes + lse_bytes + seed_and_offset


INPUTS = GRADS = 64 * 2 * (4 * 32 + 2 * 32 + 2 * 16) * 2
"""Bytes of q, k and v."""
WORKSPACE = 64 * 2 * 4 * (32 * 4 + (32 + 16) * 2)
"""Of cuDNN's backward: the gradient of q in fp32, and those of keys and values by head."""


def test_attention_with_sinks_keeps_what_it_keeps_without() -> None:
    def run(k: Any) -> Any:
        q, k_, v, sinks = leaf(64, 2, 4, 32), leaf(64, 2, 2, 32), leaf(64, 2, 2, 16), leaf(4)
        return k.attention(q, k_, v, replace(tiny.attention().core, sinks=True), sinks, None, None), [q, k_, v, sinks]

    (_, kept), (peak, _) = memory_of(run, BUNDLE)
    out, by_query = 64 * 2 * 4 * 16 * 2, 2 * 4 * 64 * 4
    assert kept == INPUTS + 512 + out + by_query
    assert peak == GRADS + WORKSPACE


def test_a_causal_block_takes_the_workspace_of_cudnn() -> None:
    def run(k: Any) -> Any:
        q, k_, v = (torch.ones(*shape, dtype=BF16) for shape in ((64, 2, 4, 32), (64, 2, 2, 32), (64, 2, 2, 16)))
        out, lse = torch.zeros(64, 2, 4, 16, dtype=BF16), torch.zeros(2, 4, 64).permute(2, 0, 1)
        span = PositionSpan(chunks=(range(32), range(96, 128)))
        mask = tiny.attention().core, span, span, None
        into = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (q, k_, v))
        k.attention_block_grad(out, q, k_, v, out, lse, lse, *mask, into)
        return (q, k_, v, out, lse, *into), []

    ((peak, kept),) = memory_of(run, BUNDLE)
    assert peak - kept == GRADS + WORKSPACE


def test_a_backend_whose_memory_is_not_known_is_refused() -> None:
    with pytest.raises(EnvironmentProblem, match="memory of 'linear_forward' in kernel backend 'transformer_engine'"):
        emulated.emulated_bundle(KernelConfig(kernel_backend="transformer_engine"), BF16)


def test_plain_torch_is_taken_where_it_was_wished_but_for_what_reads_sizes() -> None:
    bundle = emulated.emulated_bundle(KernelConfig(kernel_backend="reference"), BF16)
    assert bundle.rms_norm is reference.rms_norm
    rows, offsets = torch.empty(6, 8, device="meta"), torch.empty(2, dtype=torch.int32, device="meta")
    weight = torch.empty(2, 5, 8, device="meta")
    assert bundle.grouped_forward(rows, weight, offsets).shape == (6, 5)
