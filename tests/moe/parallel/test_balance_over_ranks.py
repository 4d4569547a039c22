"""Balancing losses, router updates and metrics over several ranks equal those of one rank with all tokens."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.config.moe import CapacityConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.moe.balancing import update_routers
from megatron_moe.moe.router import Router
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.rng import RNGKey
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT, FP64_LAYOUT
from tests.moe.parallel.folded import BATCH, STEPS, Data, name_of, parallel
from tests.moe.parallel.traffic import counted_traffic
from tests.moe.routers import make_mb, make_router

HIDDEN = 8
LAYOUTS = pytest.mark.parametrize(
    "layout",
    [parallel(2, tp=2), parallel(2, cp=2), parallel(2), parallel(4, tp=2, cp=2), parallel(4, tp=4), parallel(4, tp=2),
     parallel(8, tp=2, cp=2), parallel(8, tp=8), parallel(8, cp=4)],
    ids=name_of,
)  # fmt: skip
KINDS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}


def fields_of(kind: str) -> dict[str, Any]:
    if kind == "z_loss":
        return {"z_loss_coeff": 0.3}
    return {"balancing": (kind,), "aux_loss_coeffs": (0.3,)}


def router_on(ctx: ParallelContext, **fields: Any) -> Router:
    return make_router(ctx=ctx, hidden_size=HIDDEN, **fields)


def pull(router: Router, hidden: Tensor, **fields: Any) -> Any:
    """Routes the tokens and runs backward for the attached losses only."""
    routing = router(hidden, make_mb(hidden, **fields))
    (routing.probs_TK * 0).sum().backward()
    return routing


def piece_of(data: Data, layout: ParallelConfig, ctx: ParallelContext, microbatch: int = 0) -> tuple[Tensor, Any]:
    """Returns this rank's tokens of a microbatch, and the validity mask of all positions of its cp rank."""
    dp, cp, tp = (ctx.group(axis) for axis in ("dp", "cp", "tp"))
    place = microbatch * dp.size + dp.rank
    hidden, _, _ = data.piece(layout, place, cp.rank, tp.rank)
    valid = data.valid[place]
    return hidden.clone().requires_grad_(), None if valid is None else valid.chunk(cp.size, dim=1)[cp.rank]


def on_one(data: Data, **fields: Any) -> tuple[Router, dict[str, Any], Tensor]:
    """Processes all sequences on one rank as consecutive microbatches; returns router, metrics and gradient."""
    router, metrics = router_on(ParallelContext.single(), **fields), MetricAccumulator()
    for hidden, valid in zip(data.hidden, data.valid, strict=True):
        scale = 1 / len(data.hidden)
        pull(router, hidden.clone().requires_grad_(), valid_BS=valid, metrics=metrics, aux_loss_scale=scale)
    return router, figures(metrics, router.ctx), router.weight.grad


def over(layout: ParallelConfig, data: Data, num_microbatches: int, **fields: Any) -> list[Any]:
    """Returns the metrics, the reduced gradient and the router state of every rank.

    The gradient is averaged over dp x cp and summed over tp.
    """

    def rank(ctx: ParallelContext) -> Any:
        router, metrics = router_on(ctx, **fields), MetricAccumulator()
        for m in range(num_microbatches):
            hidden, valid = piece_of(data, layout, ctx, m)
            pull(
                router, hidden, valid_BS=valid, metrics=metrics, aux_loss_scale=ctx.group("cp").size / num_microbatches
            )
        shown = figures(metrics, ctx)
        update_routers([router], ctx)
        return shown, router.weight.grad, dict(router.named_buffers())

    results = on_threads(layout, rank)
    gradient = sum(result[1] for result in results) / (layout.dp * layout.cp)
    return [(shown, gradient, state) for shown, _, state in results]


def figures(metrics: MetricAccumulator, ctx: ParallelContext) -> dict[str, Any]:
    return {name: metric.value for name, metric in metrics.reduce(ctx).items()}


@LAYOUTS
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "z_loss"])
def test_losses_and_gradients_equal_those_of_one_rank(layout, padded, kind) -> None:
    """Two microbatches detect a loss that is not divided by the number of accumulated microbatches."""
    data = Data.random(2 * layout.dp, padded=padded)
    _, expected, gradient = on_one(data, **fields_of(kind))
    assert gradient.abs().max() > 1e-4
    for shown, actual, _ in over(layout, data, 2, **fields_of(kind)):
        FP64_LAYOUT.check(shown[KINDS[kind]], expected[KINDS[kind]], kind)
        FP64_LAYOUT.check(actual, gradient, f"gradient of {kind}")
        FP64_LAYOUT.check_all(shown, expected, "metrics")


@LAYOUTS
@pytest.mark.parametrize("padded", [False, True])
def test_global_loss_uses_the_counts_of_all_ranks(layout, padded) -> None:
    """After one microbatch per rank, the loss is E * sum_e f_e P_e.

    f_e is the share of expert e in the choices of all ranks, and P_e the mean over data-parallel ranks of its score.
    """
    data = Data.random(layout.dp, padded=padded)
    fields = fields_of("global_aux_loss")
    router = router_on(ParallelContext.single(), **fields)
    scores, counts = [], torch.zeros(8, dtype=torch.float64)
    for hidden, valid in zip(data.hidden, data.valid, strict=True):
        logits = hidden.flatten(0, 1) @ router.weight.T
        real = torch.ones(STEPS * BATCH, dtype=torch.bool) if valid is None else valid.t().reshape(-1)
        probs = logits.softmax(dim=-1)[real]
        counts += torch.zeros(8, dtype=torch.float64).index_add(
            0, probs.topk(2).indices.flatten(), torch.ones(2 * len(probs), dtype=torch.float64)
        )
        scores.append(probs.mean(dim=0))
    loss = 8 * (counts / counts.sum() * torch.stack(scores).mean(dim=0)).sum()
    (0.3 * loss).backward()
    for shown, gradient, state in over(layout, data, 1, **fields):
        FP64_LAYOUT.check(shown["global_load_balancing_loss"], loss, "global loss")
        FP64_LAYOUT.check(gradient, router.weight.grad, "gradient")
        assert state["global_counts"].sum() == 0, "the next global batch starts anew"


@LAYOUTS
def test_global_loss_sums_counts_over_microbatches(layout) -> None:
    """All data-parallel ranks have the same sequences, so one rank with them has the same load and scores."""
    single = Data.random(2)
    data = Data(*[[x for x in part for _ in range(layout.dp)] for part in (single.hidden, single.push, single.valid)])
    _, expected, gradient = on_one(single, **fields_of("global_aux_loss"))
    for shown, actual, _ in over(layout, data, 2, **fields_of("global_aux_loss")):
        FP64_LAYOUT.check(shown["global_load_balancing_loss"], expected["global_load_balancing_loss"], "global loss")
        FP64_LAYOUT.check(actual, gradient, "gradient")


@LAYOUTS
@pytest.mark.parametrize("padded", [False, True])
def test_expert_bias_update_uses_the_load_of_all_ranks_and_microbatches(layout, padded) -> None:
    fields = {"score_function": "sigmoid", "expert_bias": True, "bias_update_rate": 0.25}
    data = Data.random(2 * layout.dp, padded=padded)
    router, expected, _ = on_one(data, **fields)
    counts = router.tokens_since_update.clone()
    update_routers([router], router.ctx)
    assert 0 < router.expert_bias.abs().max() <= 0.25
    for shown, _, state in over(layout, data, 2, **fields):
        EXACT.check(state["expert_bias"], router.expert_bias, "bias")
        EXACT.check(shown["moe/tokens_per_expert"], counts.double(), "tokens per expert")
        assert state["tokens_since_update"].sum() == 0


@LAYOUTS
@pytest.mark.parametrize("padded", [False, True])
def test_quantile_thresholds_equal_those_of_one_rank(layout, padded) -> None:
    data = Data.random(2 * layout.dp, padded=padded)
    router, _, _ = on_one(data, balancing=("quantile_balancing",))
    update_routers([router], router.ctx)
    assert router.quantile_thresholds.abs().max() > 0
    for _, _, state in over(layout, data, 2, balancing=("quantile_balancing",)):
        EXACT.check(state["quantile_thresholds"], router.quantile_thresholds, "thresholds")


@LAYOUTS
def test_drop_metrics_are_sums_over_ranks(layout) -> None:
    """Capacity is computed per rank, so the single rank processes the tokens of each rank as a separate microbatch."""
    data = Data.random(layout.dp)
    for fields in ({"capacity": CapacityConfig(factor=0.5)}, {"topk": 1, "balancing": ("expert_choice",)}):
        single, metrics = router_on(ParallelContext.single(), **fields), MetricAccumulator()
        for d in range(layout.dp):
            for c in range(layout.cp):
                for t in range(layout.tp):
                    hidden = data.piece(layout, d, c, t)[0]
                    single(hidden, make_mb(hidden, metrics=metrics))
        expected = figures(metrics, single.ctx)

        def rank(ctx: ParallelContext, fields=fields) -> dict[str, Any]:
            metrics, hidden = MetricAccumulator(), piece_of(data, layout, ctx)[0]
            router_on(ctx, **fields)(hidden, make_mb(hidden, metrics=metrics))
            return figures(metrics, ctx)

        assert expected["moe/dropped_tokens"] > 0 or "balancing" in fields
        for shown in on_threads(layout, rank):
            FP64_LAYOUT.check(shown["moe/dropped_tokens"], expected["moe/dropped_tokens"], "dropped")
            EXACT.check(shown["moe/tokens_per_expert"], expected["moe/tokens_per_expert"], "load")


def test_only_enabled_losses_communicate() -> None:
    """A router runs one all-reduce per kind of count that its losses need, and none without losses.

    Recording metrics adds no collective, because metrics are reduced when they are read.
    """
    layout, data = parallel(4, tp=2), Data.random(2, padded=True)
    aux, both = ("all_reduce", 2, BATCH * 8), {"balancing": ("aux_loss", "seq_aux_loss"), "aux_loss_coeffs": (1.0, 1.0)}
    tokens, everyone = ("all_reduce", 2, BATCH), ("all_reduce", 4, 8)
    for fields, recorded, expected in (
        ({}, False, {}),
        ({}, True, {}),
        ({"z_loss_coeff": 1.0}, False, {tokens: 1}),
        ({**both, "z_loss_coeff": 1.0}, False, {tokens: 1, aux: 1}),
        ({**both, "z_loss_coeff": 1.0}, True, {tokens: 1, aux: 1}),
        (fields_of("global_aux_loss"), False, {tokens: 1, everyone: 1}),
    ):

        def rank(ctx: ParallelContext, fields=fields, recorded=recorded) -> None:
            hidden, valid = piece_of(data, layout, ctx)
            pull(router_on(ctx, **fields), hidden, valid_BS=valid, metrics=MetricAccumulator() if recorded else None)

        with counted_traffic() as traffic:
            on_threads(layout, rank)
        assert all(sent == expected for sent in traffic.of_ranks(4)), f"{fields}: {traffic.of_ranks(4)}"


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("padded", [False, True])
def test_counts_are_summed_in_int32(kind: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes, reduce = list[torch.dtype](), dist.all_reduce
    monkeypatch.setattr(
        dist, "all_reduce", lambda tensor, **options: dtypes.append(tensor.dtype) or reduce(tensor, **options)
    )
    layout, data = parallel(4, tp=2), Data.random(2, padded=padded)

    def rank(ctx: ParallelContext) -> None:
        hidden, valid = piece_of(data, layout, ctx)
        metrics = MetricAccumulator()
        pull(router_on(ctx, **fields_of(kind)), hidden, valid_BS=valid, metrics=metrics)
        figures(metrics, ctx)

    on_threads(layout, rank)
    assert torch.int32 in dtypes and torch.int64 not in dtypes


def test_forced_noise_differs_between_ranks_of_one_microbatch() -> None:
    def rank(ctx: ParallelContext) -> Tensor:
        router = router_on(ctx, force_balancing=True)
        hidden = torch.ones(4, 1, HIDDEN, dtype=torch.float64)
        # Context-parallel ranks have different keys; tensor-parallel ranks use different parts of one random tensor.
        return router(hidden, make_mb(hidden, rng=RNGKey(1, 2, 3, ("cp", ctx.group("cp").rank)))).ids_TK

    ids = on_threads(parallel(4, tp=2, cp=2), rank)
    assert all(not torch.equal(ids[a], ids[b]) for a in range(4) for b in range(a))
