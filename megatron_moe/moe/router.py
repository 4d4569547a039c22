"""Router: selects experts for every token and computes their weights.

Order: input jitter, gate projection, forced logits (benchmarks), selection with all sums over tokens in one op,
capacity, losses, counts.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_moe.config.moe import Balancing, CapacityConfig, RouterConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels.ops import Kernels, RoutedTokens
from megatron_moe.kernels.reference_routing import squared_logsumexp
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.moe import router_metrics
from megatron_moe.moe.balancing import LOSS_NAMES, BalancingLosses, BatchTokens, attach_losses
from megatron_moe.moe.routing_methods import ExpertSelection, quantile_thresholds, whole_microbatch
from megatron_moe.moe.token_dispatcher.base import Routing
from megatron_moe.parallel import rng
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.param_meta import ParamMeta, Part
from megatron_moe.parallel.parameter import Parameter, new_parameter
from megatron_moe.parallel.rng import Key, RNGKey
from megatron_moe.parallel.tensor_parallel import my_positions, sequence_part


class Router(nn.Module):
    """Selects `topk` of `num_experts` experts for every token, or tokens for every expert (expert choice).

    Parameters: `weight` [E, H], and `bias` [E] if configured. fp32 buffers, saved with the model: `expert_bias` [E]
    (aux-loss-free balancing, arXiv 2408.15664) and `quantile_thresholds` [E], each only if its method is enabled.
    Statistics between two updates are not saved, because checkpoints are written between global batches.
    """

    weight: Parameter
    bias: Parameter | None
    expert_bias: Tensor | None
    quantile_thresholds: Tensor | None
    tokens_since_update: Tensor
    threshold_sums: Tensor
    threshold_count: Tensor
    global_counts: Tensor

    def __init__(
        self, config: RouterConfig, capacity: CapacityConfig | None, layer: int, ctx: ParallelContext, kernels: Kernels
    ) -> None:
        super().__init__()
        _check(config, capacity)
        self.config = config
        self.capacity = capacity
        self.layer = layer
        self.ctx = ctx
        self.kernels = kernels
        self.selection = ExpertSelection(config, capacity, kernels)
        """May be replaced by one that selects and limits parts of the tokens separately."""
        num_experts = config.num_experts
        # Under sequence parallelism every rank routes its own tokens, so gradients are partial.
        partial = ctx.config.sequence_parallel
        meta = ParamMeta(role="router", fan_in=config.hidden_size, partial_over_tp=partial)
        self.weight = new_parameter((num_experts, config.hidden_size), meta, ctx)
        self.bias = None
        if config.linear_bias:
            meta = ParamMeta(role="bias", fan_in=config.hidden_size, decay=False, partial_over_tp=partial)
            self.bias = new_parameter((num_experts,), meta, ctx)

        coeffs = dict(zip(config.balancing, config.aux_loss_coeffs, strict=True))
        self._balancing_losses = [(kind, name, coeffs[kind]) for kind, name in LOSS_NAMES if coeffs.get(kind)]

        self._state("expert_bias", torch.float32, num_experts, config.expert_bias, saved=True)
        self._state("tokens_since_update", torch.int64, num_experts, config.expert_bias)
        quantile = "quantile_balancing" in config.balancing
        self._state("quantile_thresholds", torch.float32, num_experts, quantile, saved=True)
        self._state("threshold_sums", torch.float64, num_experts, quantile)
        self._state("threshold_count", torch.float64, 1, quantile)
        self._state("global_counts", torch.int64, num_experts, "global_aux_loss" in config.balancing)
        self.counts_ahead: dict[RNGKey | None, Tensor] = {}
        """Token counts of the global loss by microbatch, kept by a forward without gradients for its recomputation."""

    def _state(self, name: str, dtype: torch.dtype, size: int, present: bool, *, saved: bool = False) -> None:
        value = torch.zeros(size, dtype=dtype, device=self.ctx.device) if present else None
        self.register_buffer(name, value, persistent=saved)

    def forward(self, hidden_SBH: Tensor, mb: MicrobatchContext, given_ids_TK: Tensor | None = None) -> Routing:
        """hidden [S, B, H] -> where its T = S * B tokens go, t = s * B + b.

        `given_ids_TK` replays a selection (an earlier `Routing.chosen_TK`) with the current weights. In training,
        losses enter the gradient and choices are counted where gradients are enabled; metrics are recorded where
        `meta.metrics` is set. A recomputed forward has metrics in its first pass and gradients in its second, so each
        happens once.
        """
        recording = mb.training and (torch.is_grad_enabled() or mb.metrics is not None)
        valid_T = None if mb.tokens.valid_BS is None else my_positions(mb.tokens.valid_BS, self.ctx).t().reshape(-1)
        logits_TE = self._logits(hidden_SBH, mb)
        tokens = BatchTokens(valid_T, len(logits_TE), hidden_SBH.shape[1], self.ctx.group("tp_cp"))
        if "expert_choice" in self.config.balancing:
            assert given_ids_TK is None, "expert choice cannot replay ids per token"
            routed, routing = None, self.selection.by_expert(logits_TE, valid_T)
        else:
            # token t belongs to sequence t % B
            sets = tokens.batch_size if any(kind == "seq_aux_loss" for kind, *_ in self._balancing_losses) else 1
            routed = self.selection.by_token(
                logits_TE,
                tokens,
                given_ids_TK,
                self.expert_bias,
                self.quantile_thresholds,
                balance=mb.training,
                balance_sets=sets if recording and self._balancing_losses else 0,
                z=recording and bool(self.config.z_loss_coeff),
            )
            routing = self._routing(routed)
        if not recording:
            return routing
        routing = self._attach_losses(routing, self._losses(logits_TE, routed, tokens, mb), mb)
        if torch.is_grad_enabled():
            self._count(routing, logits_TE, valid_T)
        if mb.metrics is not None:
            self._record(mb.metrics, routing, valid_T)
        return routing

    def _logits(self, hidden_SBH: Tensor, mb: MicrobatchContext) -> Tensor:
        config = self.config
        if config.input_jitter_eps and (key := mb.key("router jitter", self.layer)) is not None:
            hidden_SBH = jitter(hidden_SBH, config.input_jitter_eps, key, sequence_part(self.ctx))
        dtype = self._logits_dtype(hidden_SBH.dtype)
        logits_TE = gate_product(self.kernels, hidden_SBH, self.weight, self.bias, dtype)
        if config.force_balancing or config.force_biased is not None:
            forced = mb.forced_logits
            drawn = self.draw(len(logits_TE), hidden_SBH.dtype, mb) if forced is None else forced[self.layer]
            logits_TE = force_logits(logits_TE, drawn)
        return logits_TE

    def _logits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the logits for hidden states of `dtype` (`--moe-router-dtype`)."""
        if self.config.dtype is None:
            return dtype
        return torch.promote_types(dtype, torch.float64 if self.config.dtype == "fp64" else torch.float32)

    def draw(self, num_tokens: int, dtype: torch.dtype, mb: MicrobatchContext) -> Tensor:
        """Forced logits [T, E] for benchmarks. The noise differs between tokens, microbatches and layers; the bias part
        is common to all ranks: redrawn every step, or fixed for the run if the given standard deviation is negative."""
        std, rng = self.config.force_biased, mb.rng
        key = (self.ctx.seed,) if rng is None else rng.site()
        fixed = std is not None and std < 0
        bias_key = (self.ctx.seed,) if rng is None or fixed else (rng.seed, rng.iteration)
        return draw_logits(
            (num_tokens, self.config.num_experts),
            self._logits_dtype(dtype),
            self.ctx.device,
            (*key, "forced logits", self.layer),
            None if std is None else abs(std),
            (*bias_key, "forced bias", self.layer),
            sequence_part(self.ctx),
        )

    def _routing(self, routed: RoutedTokens) -> Routing:
        return self.selection.limit(
            Routing(
                num_experts=self.config.num_experts,
                ids_TK=routed.ids_TK,
                probs_TK=routed.probs_TK,
                counts_E=routed.counts_E,
                chosen_TK=routed.ids_TK,
            )
        )

    def _losses(
        self, logits_TE: Tensor, routed: RoutedTokens | None, tokens: BatchTokens, mb: MicrobatchContext
    ) -> list[tuple[str, Tensor, float]]:
        """Yields (name in the log, loss, coefficient) of the z loss and the balancing losses. `routed` is None for
        expert choice."""
        made: list[tuple[str, Tensor, float]] = []
        if self.config.z_loss_coeff:
            z_sum = None if routed is None else routed.z_sum
            z_sum = squared_logsumexp(logits_TE, tokens.valid_T) if z_sum is None else z_sum
            made.append(("z_loss", z_sum / tokens.number(), self.config.z_loss_coeff))
        if routed is not None and routed.balance is not None:
            sums = BalancingLosses(routed.balance, self.config.topk, tokens)
            kinds = self._balancing_losses
            made += [(name, self._balancing_loss(kind, sums, mb), coeff) for kind, name, coeff in kinds]
        return made

    def _attach_losses(self, routing: Routing, made: list[tuple[str, Tensor, float]], mb: MicrobatchContext) -> Routing:
        """Records the losses and attaches them to the gradient of the probabilities."""
        if not made:
            return routing
        names, losses, coeffs = zip(*made, strict=True)
        for name, loss in zip(names, losses, strict=True):
            self._report(name, loss, mb)
        carrier = routing.probs_TE if routing.probs_TK is None else routing.probs_TK
        assert carrier is not None
        carrier = attach_losses(carrier, losses, coeffs, mb.aux_loss_scale)
        return replace(routing, probs_TE=carrier) if routing.probs_TK is None else replace(routing, probs_TK=carrier)

    def _balancing_loss(self, kind: Balancing, losses: BalancingLosses, mb: MicrobatchContext) -> Tensor:
        if kind == "seq_aux_loss":
            return losses.over_sequences()
        if kind == "aux_loss":
            return losses.over_microbatch()
        counts_E = self.counts_ahead.pop(mb.rng, None)
        if counts_E is None:
            counts_E = self.global_counts + losses.counts_over(self.ctx.group("tp_dp_cp"))
            self.global_counts.copy_(counts_E)
            if not torch.is_grad_enabled():
                # in the recomputed forward other microbatches or depths have been counted, in another order
                self.counts_ahead[mb.rng] = counts_E
        return losses.with_shares_of(counts_E)

    def _report(self, name: str, loss: Tensor, mb: MicrobatchContext) -> None:
        """Scales a partial loss so that the metric's mean over ranks is the sum of the parts."""
        if mb.metrics is not None:
            size = self.ctx.group("tp_cp").size
            mb.metrics.record(name, loss if size == 1 else loss * size, layer=self.layer)

    def _count(self, routing: Routing, logits_TE: Tensor, valid_T: Tensor | None) -> None:
        """Accumulates the statistics for the update at the end of the global batch."""
        # `+=` would also set the module attribute, which costs more host time than the addition
        if self.expert_bias is not None:
            self.tokens_since_update.add_(routing.counts_E)
        if self.quantile_thresholds is not None:
            logits_TE, valid_T = whole_microbatch(logits_TE, valid_T, self.ctx.group("tp_cp"))
            thresholds_E, counted = quantile_thresholds(logits_TE, self.quantile_thresholds, self.config.topk, valid_T)
            self.threshold_sums.add_(thresholds_E)
            self.threshold_count.add_(counted)

    def _record(self, metrics: MetricAccumulator, routing: Routing, valid_T: Tensor | None) -> None:
        if routing.map_TE is not None:
            met_T = routing.map_TE.any(dim=1)
            num_tokens = torch.ones_like(met_T).sum() if valid_T is None else valid_T.sum()
            router_metrics.record_drops(metrics, self.layer, num_tokens - met_T.sum(), num_tokens)
        asked_E, dropless = routing.counts_E, routing.map_TE is None and self.capacity is None
        if routing.chosen_TK is not None and not dropless:
            asked_E = self.kernels.count_tokens(routing.chosen_TK, self.config.num_experts)
            router_metrics.record_drops(metrics, self.layer, (asked_E - routing.counts_E).sum(), asked_E.sum())
        router_metrics.record_load(metrics, self.layer, asked_E, self.ctx.group("tp_cp"), dropless=dropless)

    def record_bias(self, metrics: MetricAccumulator) -> None:
        """Records the range of the expert bias once per step."""
        if self.expert_bias is not None:
            router_metrics.record_bias(metrics, self.layer, self.expert_bias)

    def batch_sums(self) -> Tensor:
        """See `BalancedRouter`."""
        parts: list[Tensor] = []
        if self.expert_bias is not None:
            parts.append(self.tokens_since_update.double())
        if self.quantile_thresholds is not None:
            parts += [self.threshold_sums, self.threshold_count]
        return torch.cat(parts) if parts else self.weight.new_zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def end_batch(self, sums: Tensor, proceed: Tensor | None) -> None:
        """See `BalancedRouter`."""
        num_experts = self.config.num_experts
        if self.expert_bias is not None:
            tokens_E, sums = sums[:num_experts], sums[num_experts:]
            move_E = self.config.bias_update_rate * (tokens_E.mean() - tokens_E).sign()
            self._set(self.expert_bias, self.expert_bias + move_E, proceed)
            self.tokens_since_update.zero_()
        if self.quantile_thresholds is not None:
            new_E, count = sums[:num_experts] / sums[num_experts:].clamp(min=1), sums[num_experts:]
            ema = self.config.quantile_ema
            moved_E = ema * self.quantile_thresholds + (1 - ema) * new_E
            moved_E = torch.where(count > 0, moved_E, self.quantile_thresholds)
            self._set(self.quantile_thresholds, moved_E - moved_E.mean(), proceed)
            self.threshold_sums.zero_()
            self.threshold_count.zero_()
        if "global_aux_loss" in self.config.balancing:
            self.global_counts.zero_()
            self.counts_ahead.clear()

    def _set(self, state: Tensor, value: Tensor, proceed: Tensor | None) -> None:
        state.copy_(value if proceed is None else torch.where(proceed, value.to(state.dtype), state))


def _check(config: RouterConfig, capacity: CapacityConfig | None) -> None:
    """Asserts combinations that the flag checks already reject with an explanation."""
    assert 1 <= config.topk <= config.num_experts, f"top-{config.topk} of {config.num_experts} experts"
    assert len(config.balancing) == len(config.aux_loss_coeffs), f"{config.balancing} with {config.aux_loss_coeffs}"
    assert not config.expert_bias or config.score_function != "softmax", (
        "expert bias needs sigmoid or sqrtsoftplus scores"
    )
    for kind in ("sinkhorn", "quantile_balancing", "expert_choice"):
        alone = config.balancing == (kind,) and not config.aux_loss_coeffs[0] and not config.expert_bias
        assert kind not in config.balancing or alone, f"{kind} goes with no other balancing: {config}"
        assert kind not in config.balancing or not config.group_topk, f"{kind} knows no expert groups: {config}"
    unlimited = {"sinkhorn", "quantile_balancing"} & set(config.balancing)
    assert not unlimited or capacity is None, f"{unlimited} goes with no capacity: {capacity}"
    if "quantile_balancing" in config.balancing:
        assert config.topk < config.num_experts, f"quantile balancing needs an expert that is not chosen: {config}"


def gate_product(
    kernels: Kernels, hidden_SBH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """hidden [S, B, H] times weight [E, H] transposed, plus bias [E] -> logits [T, E] in `dtype`, t = s * B + b.

    Forward and backward multiply in `dtype`; hidden states and weight are saved in their own dtype.
    """
    logits_TE = kernels.gate_product(hidden_SBH.flatten(0, 1), weight_EH, dtype)
    return logits_TE if bias_E is None else logits_TE + bias_E.to(dtype)


def jitter(hidden_SBH: Tensor, eps: float, key: Key, part: Part = (0, 1)) -> Tensor:
    """Multiplies every element by a sample of U(1 - eps, 1 + eps) (Switch Transformer, arXiv 2101.03961).

    The positions are `part` (index, number) of a longer sequence, for which the samples are drawn.
    """
    uniform = rng.uniform(hidden_SBH.shape, key, hidden_SBH.device, part=part)
    return hidden_SBH * (1 + eps * (2 * uniform - 1)).to(hidden_SBH.dtype)


def draw_logits(
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    noise_key: Key,
    bias_std: float | None,
    bias_key: Key,
    part: Part = (0, 1),
) -> Tensor:
    """N(0, 1) noise [T, E] instead of logits, for benchmarks whose load must not depend on the weights.

    `bias_std` adds a sample of N(0, bias_std) per expert, for a load of known imbalance. The tokens are `part` (index,
    number) of more tokens, for which the noise is drawn, in fp32, so that fp64 runs use the same values.
    """
    # a copy: a view would keep the noise of all parts in memory until backward
    noise_TE = rng.normal(torch.Size(shape), noise_key, device, part=part).to(dtype, copy=part[1] > 1)
    if bias_std is None:
        return noise_TE
    return noise_TE + bias_std * rng.normal(torch.Size(shape[1:]), bias_key, device).to(dtype)


def force_logits(logits_TE: Tensor, drawn_TE: Tensor) -> Tensor:
    """Replaces the router's logits; the gradient passes through to them, so that the gate has a backward."""
    return _StraightThrough.apply(logits_TE, drawn_TE)  # type: ignore[no-untyped-call,no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, replacement_TE: Tensor) -> Tensor:
        return replacement_TE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None
