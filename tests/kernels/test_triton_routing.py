"""Router forward and backward kernels under the interpreter against plain torch, and compiled for a Hopper GPU on a
machine without one."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from megatron_moe.config.moe import RouterConfig
from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.backends.triton.routing import forward, op
from megatron_moe.kernels.kernel_set import OPS, KernelSet
from megatron_moe.kernels.ops import RoutedTokens
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.kernel_comparison import REFERENCE, differentiable, draw, route_and_pull
from tests.helpers.tolerances import BF16_KERNEL, EXACT, FP32_REF, FP64_REF
from tests.kernels.compiled import NO_SPILLS, compiled
from tests.moe.routers import make_hidden, make_mb, make_router

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # numpy, of the interpreter
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"scaling_factor": 1.7},
    "pre_softmax": {"pre_softmax": True, "scaling_factor": 2.5},
    "sigmoid": {"score_function": "sigmoid", "scaling_factor": 1.7},
    "sqrtsoftplus": {"score_function": "sqrtsoftplus"},
    "one": {"score_function": "sigmoid", "topk": 1},
    "all": {"topk": 11},
    "groups": {"score_function": "sigmoid", "num_experts": 16, "topk": 4, "num_groups": 4, "group_topk": 2},
    "odd groups": {"num_experts": 9, "topk": 2, "num_groups": 3, "group_topk": 1},
    "groups of 20": {"pre_softmax": True, "num_experts": 160, "topk": 6, "num_groups": 8, "group_topk": 3},
}
ALL_SUMS: dict[str, Any] = {"balance_sets": 1, "z": True}
KINDS = pytest.mark.parametrize("kind", ROUTERS)


def router(**fields: Any) -> RouterConfig:
    return RouterConfig(**{"hidden_size": 8, "num_experts": 11, "topk": 3, **fields})


def check(logits: Tensor, bias: Tensor | None, config: RouterConfig, **fields: Any) -> tuple[RoutedTokens, Tensor]:
    """Asserts that results and gradients equal those of plain torch in fp64, and that choices and counts are
    identical."""
    actual, grad = route_and_pull(triton_kernels, logits, bias, config, **fields)
    plain, _ = route_and_pull(REFERENCE, logits, bias, config, **fields)
    exact, exact_grad = route_and_pull(REFERENCE, logits.double(), bias, config, **fields)
    assert actual.ids_TK.dtype is actual.counts_E.dtype is torch.int64
    EXACT.check(actual.ids_TK, plain.ids_TK, "choices")
    EXACT.check(actual.counts_E, plain.counts_E, "counts")
    if plain.balance is not None:
        assert actual.balance is not None and actual.balance.counts_GE.dtype is torch.int64
        EXACT.check(actual.balance.counts_GE, plain.balance.counts_GE, "counts of plain choices")
    for mine, theirs, like in zip(*map(differentiable, (actual, exact, plain)), strict=True):
        assert mine.dtype is like.dtype
        bar = {torch.float64: FP64_REF, torch.float32: FP32_REF, torch.bfloat16: BF16_KERNEL}[mine.dtype]
        bar.check(mine, theirs, "result")
    bar = {torch.float64: FP64_REF, torch.float32: FP32_REF, torch.bfloat16: BF16_KERNEL}[grad.dtype]
    bar.check(grad, exact_grad, "gradient")
    return actual, grad


@KINDS
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_routing_matches_the_reference(kind: str, biased: bool, dtype: torch.dtype) -> None:
    config = router(**ROUTERS[kind])
    bias = draw(config.num_experts, seed=1).float() if biased else None
    logits = 2 * draw(40, config.num_experts).to(dtype)
    logits[5], logits[6, 3:] = 0.5, logits[6, 3]  # ties
    check(logits, bias, config, **ALL_SUMS)


class Launches:
    """Wraps a kernel and records its launches."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.known: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        """Arguments and constants of every launch."""

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*given: Any, **constants: Any) -> None:
            self.known.append(((grid[0], *given), constants))
            self._kernel[grid](*given, **constants)

        return launch


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr(op, "route_forward", Launches(op.route_forward))
    return op.route_forward  # type: ignore[return-value]


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr(op, "route_backward", Launches(op.route_backward))
    return op.route_backward  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["softmax", "pre_softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("only", [0, 1, 2], ids=["weights", "balance", "z"])
def test_backward_of_one_result_skips_the_others(kind: str, only: int, backwards: Launches) -> None:
    check(2 * draw(20, 11), None, router(**ROUTERS[kind]), only=only, **ALL_SUMS)
    ((_, constants),) = backwards.known
    assert [constants[name] for name in ("PROBS", "BALANCE", "Z")] == [only == which for which in range(3)]


@pytest.mark.parametrize("fields", [{}, {"z": True}, {"balance_sets": 1}, {"balance_sets": 2, "z": True}])
def test_every_program_takes_one_ticket_if_sums_are_requested(fields: dict[str, Any], forwards: Launches) -> None:
    """The last element of the buffer is the ticket counter; a counter at another address would overwrite other
    values."""
    routed = triton_kernels.route(draw(400, 40), None, router(num_experts=40), **fields)
    (((programs, *given), _),) = forwards.known
    (counts,) = (x for x in given if isinstance(x, Tensor) and x.dim() == 1 and x.dtype is torch.int64)
    assert counts[-1] == (programs if fields else 0) and programs > 1
    assert len(counts) == 40 * (1 + fields.get("balance_sets", 0)) + 1 and routed.counts_E.sum() == 1200


def test_partial_sums_of_many_programs_are_added(monkeypatch: pytest.MonkeyPatch, forwards: Launches) -> None:
    monkeypatch.setattr(op, "FORWARD_TILE", 16)
    monkeypatch.setattr(op, "num_sms", lambda device: 1000)
    check(draw(20, 8), None, router(num_experts=8, topk=1), **ALL_SUMS)
    assert forwards.known[0][0][0] == 20
    shares, total = draw(300), torch.zeros((), dtype=torch.float64)
    forward._add_squares[(1,)](shares, total, 300, tl.float64)
    FP64_REF.check(total, shares.sum(), "300 programs")


def test_small_scores_are_accurate() -> None:
    for dtype in (torch.float32, torch.float64):
        check((draw(10, 11) - 25).to(dtype), None, router(score_function="sqrtsoftplus"), **ALL_SUMS)


@pytest.mark.parametrize("sets", [1, 2, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_balance_sums_by_set_exclude_padding(sets: int, padded: bool) -> None:
    """There are more tiles than programs, and the last tile of a set is partially filled."""
    config = router(num_experts=40, topk=2, score_function="sigmoid", num_groups=2, group_topk=1)
    valid = torch.arange(198) % 5 > 0 if padded else None
    actual, grad = check(draw(198, 40), None, config, valid_T=valid, balance_sets=sets, z=True)
    if valid is not None:
        assert (actual.ids_TK[~valid] == -1).all() and not actual.probs_TK[~valid].any() and not grad[~valid].any()


def test_padding_values_are_never_read() -> None:
    config, logits, valid = router(), draw(20, 11), torch.arange(20) != 3
    logits[3] = torch.nan
    actual, grad = check(logits, None, config, valid_T=valid, **ALL_SUMS)
    assert all(result.isfinite().all() for result in (*differentiable(actual), grad))


@KINDS
def test_replayed_ids_match_the_reference(kind: str) -> None:
    config = router(**ROUTERS[kind])
    given = REFERENCE.route(draw(12, config.num_experts, seed=5), None, config).ids_TK
    given[3, :1], given[4] = -1, -1
    valid = torch.arange(12) > 1
    check(draw(12, config.num_experts), None, config, forced_ids_TK=given, valid_T=valid, **ALL_SUMS)
    check(draw(12, config.num_experts), None, config, forced_ids_TK=given)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17])
@pytest.mark.parametrize(("experts", "topk"), [(1, 1), (5, 2), (256, 8)])
def test_partially_filled_tiles(tokens: int, experts: int, topk: int) -> None:
    actual, _ = check(draw(tokens, experts), None, router(num_experts=experts, topk=topk), **ALL_SUMS)
    assert int(actual.counts_E.sum()) == tokens * topk, "experts that nobody chose count 0"


def test_routing_without_tokens() -> None:
    for sets in (0, 2):
        routed = triton_kernels.route(torch.zeros(0, 11), None, router(), balance_sets=sets, z=True)
        assert routed.ids_TK.shape == routed.probs_TK.shape == (0, 3)
        assert not routed.counts_E.any() and routed.z_sum == 0
        if routed.balance is not None:
            assert not routed.balance.scores_GE.any() and routed.balance.counts_GE.shape == (2, 11)


def test_only_requested_sums_are_returned() -> None:
    routed = triton_kernels.route(draw(20, 11), None, router())
    assert routed.balance is None and routed.z_sum is None
    check(draw(20, 11), None, router(), z=True)
    check(draw(20, 11), None, router(), balance_sets=2)


def test_bf16_logits_are_scored_in_fp32() -> None:
    actual, _ = check(draw(40, 11).bfloat16(), None, router(score_function="sigmoid"), **ALL_SUMS)
    assert actual.probs_TK.dtype is torch.bfloat16 and actual.z_sum is not None and actual.z_sum.dtype is torch.float32


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_signed_zeros_and_infinities_are_ranked_as_in_the_reference(score: str) -> None:
    """Scores are ranked as integers. A selected expert may have a score of minus infinity, and no expert is selected
    twice."""
    logits = torch.full((3, 11), -torch.inf)
    logits[0, 2:6] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    logits[1, 7] = 5.0
    logits[2] = torch.randn(11)
    ids = triton_kernels.route(logits, None, router(score_function=score)).ids_TK
    EXACT.check(ids, REFERENCE.route(logits, None, router(score_function=score)).ids_TK)
    assert ids.tolist()[:2] == [[2, 3, 4], [7, 0, 1]]


def test_nan_logits_select_existing_experts() -> None:
    """Loss and norm then become NaN; an id past the last expert would write out of bounds."""
    logits = torch.zeros(2, 11)
    logits[0], logits[1, 4] = torch.nan, -torch.tensor(torch.nan)
    ids = triton_kernels.route(logits, None, router()).ids_TK
    assert ids.tolist() == [[0, 1, 2], [4, 0, 1]]


@pytest.mark.parametrize(
    "groups", [{}, {"score_function": "sigmoid", "expert_bias": True, "num_groups": 4, "group_topk": 2}]
)
@pytest.mark.parametrize("kinds", [("aux_loss",), ("aux_loss", "seq_aux_loss", "global_aux_loss")])
def test_router_losses_and_gradients_match_the_reference(kinds: Any, groups: dict[str, Any]) -> None:
    """Three sequences with padding; losses by sums over all tokens, or over those of each sequence."""
    coeffs, valid = (0.3, 0.2, 0.1)[: len(kinds)], torch.arange(30).view(3, 10) % 7 > 0
    found = []
    for route in (REFERENCE.route, triton_kernels.route):
        module = make_router(balancing=kinds, aux_loss_coeffs=coeffs, z_loss_coeff=0.05, **groups)
        module.kernels = KernelSet.of({name: getattr(REFERENCE, name) for name in OPS} | {"route": route}, ())
        hidden, metrics = make_hidden(10, 3), MetricAccumulator()
        routing = module(hidden, make_mb(hidden, valid_BS=valid, metrics=metrics))
        routing.probs_TK.square().sum().backward()
        means = metrics.take_all().reduce(ParallelContext.single())
        losses = {name: torch.tensor(metric.value) for name, metric in means.items() if "loss" in name}
        found.append({**losses, "hidden": hidden.grad, "gate": module.weight.grad, "counts": routing.counts_E})
    assert sum("loss" in key for key in found[0]) == len(kinds) + 1
    FP64_REF.check_all(found[1], found[0])


LAUNCHES = """
from megatron_moe.kernels.backends.triton.routing import op
from megatron_moe.config.moe import RouterConfig

op.route_forward, op.route_backward = Compiled(op.route_forward), Compiled(op.route_backward)
for experts, groups in ((128, {}), (256, dict(num_groups=8, group_topk=4)), (512, {})):
    spec = RouterConfig(hidden_size=1, num_experts=experts, topk=8, score_function="sigmoid", **groups)
    logits = torch.zeros(8192, experts, requires_grad=True)
    routed = op.route(logits, torch.zeros(experts), spec, balance_sets=2, z=True)
    results = [routed.probs_TK, routed.balance.scores_GE, routed.z_sum]
    torch.autograd.grad(results, logits, [torch.zeros_like(x) for x in results])
"""


@pytest.mark.slow
def test_kernels_compile_without_spills_and_order_ticket_after_stores() -> None:
    """Compiles the variant with bias, balance sums over two sets and z loss, which needs the most registers."""
    found = compiled(LAUNCHES)
    assert len(found) == 6
    for code in found:
        assert NO_SPILLS in code["ptxas"], code["ptxas"]
    for code in found[::2]:
        before, _, after = code["ttgir"].partition("atomic_rmw add, acq_rel, gpu")
        assert "gpu.barrier" in before[before.rindex("tt.store") :], "the ticket follows the stores of all threads"
        loads = set(re.findall(r"tt.load .*", after))
        assert loads and all("cacheModifier = cg" in load for load in loads), "shares are read past the first cache"
        assert "redux.sync.max.s32" in code["ptx"]
