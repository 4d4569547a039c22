"""Router: selects the experts of each token and their weights.

Order of work: input jitter, gate matrix, forced logits (benchmarks), choice and all sums over tokens in one op,
capacity, losses, counts.
"""

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megatron_moe.config.moe import (
    Balancing,
    CapacityConfig,
    RouterConfig,
)
from megatron_moe.data.batch import TokenMeta
from megatron_moe.kernels.ops import Kernels, RoutedTokens
from megatron_moe.kernels.reference_routing import squared_logsumexp, valid_ids, valid_or_zero
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.moe import router_metrics
from megatron_moe.moe.balancing import (
    LOSS_NAMES,
    BalancingLosses,
    BatchTokens,
    attach_losses,
)
from megatron_moe.moe.routing_methods import (
    expert_choice,
    quantile_choice,
    quantile_thresholds,
    sinkhorn_choice,
    whole_microbatch,
)
from megatron_moe.moe.token_dispatcher.base import Routing
from megatron_moe.parallel import rng
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.param_meta import ParamMeta, Part
from megatron_moe.parallel.parameter import Parameter, new_parameter
from megatron_moe.parallel.rng import Key
from megatron_moe.parallel.tensor_parallel import my_positions, sequence_part


class Router(nn.Module):
    """Chooses `topk` of `num_experts` experts for every token, or tokens for every expert.

    Parameters: `weight` [E, H], and `bias` [E] if the spec asks for it. Buffers in fp32, saved with the model:
    `expert_bias` [E] (aux-loss-free balancing, arXiv 2408.15664) and `quantile_thresholds` [E], each only when its
    method is on. What is counted between two updates is not saved: a checkpoint falls between global batches.
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
        num_experts = config.num_experts
        # Under sequence parallelism every rank routes its own tokens.
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
        self._counts_ahead: dict[Key | None, Tensor] = {}
        """Counts of the global loss per microbatch, stored by the forward for its recomputation."""

    def _state(self, name: str, dtype: torch.dtype, size: int, present: bool, *, saved: bool = False) -> None:
        value = torch.zeros(size, dtype=dtype, device=self.ctx.device) if present else None
        self.register_buffer(name, value, persistent=saved)

    def forward(self, hidden_SBH: Tensor, meta: TokenMeta, given_ids_TK: Tensor | None = None) -> Routing:
        """hidden [S, B, H] -> where its T = S * B tokens go, t = s * B + b.

        `given_ids_TK` replays a choice (`Routing.chosen_TK` of the first time) with today's weights. Losses are made in
        training alone: they enter the gradient and are counted where gradients are enabled, and are reported where
        there is a tally. A forward that is computed twice has a tally first and gradients then, so each happens once.
        """
        recording = meta.training and (torch.is_grad_enabled() or meta.metrics is not None)
        valid_T = None if meta.valid_BS is None else my_positions(meta.valid_BS, self.ctx).t().reshape(-1)
        logits_TE = self._logits(hidden_SBH, meta)
        tokens = BatchTokens(valid_T, len(logits_TE), hidden_SBH.shape[1], self.ctx.group("tp_cp"))
        if "expert_choice" in self.config.balancing:
            assert given_ids_TK is None, "expert choice has no ids per token to replay"
            routed, routing = None, self._choose_tokens(logits_TE, valid_T)
        else:
            routed = self._choose_experts(logits_TE, tokens, given_ids_TK, recording=recording, balance=meta.training)
            routing = self._routing(routed)
        if not recording:
            return routing
        routing = self._attach_losses(routing, self._losses(logits_TE, routed, tokens, meta), meta)
        if torch.is_grad_enabled():
            self._count(routing, logits_TE, valid_T)
        if meta.metrics is not None:
            self._record(meta.metrics, routing, valid_T)
        return routing

    def _logits(self, hidden_SBH: Tensor, meta: TokenMeta) -> Tensor:
        config, key = self.config, meta.random_key
        if config.input_jitter_eps and meta.training and key is not None:
            hidden_SBH = jitter(
                hidden_SBH, config.input_jitter_eps, (*key, "router jitter", self.layer), sequence_part(self.ctx)
            )
        dtype = self._logits_dtype(hidden_SBH.dtype)
        logits_TE = gate_product(self.kernels, hidden_SBH, self.weight, self.bias, dtype)
        if config.force_balancing or config.force_biased is not None:
            drawn = (
                self.draw(len(logits_TE), hidden_SBH.dtype, meta) if meta.forced is None else meta.forced[self.layer]
            )
            logits_TE = force_logits(logits_TE, drawn)
        return logits_TE

    def _logits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """For hidden states of `dtype`."""
        if self.config.dtype is None:
            return dtype
        return torch.promote_types(dtype, torch.float64 if self.config.dtype == "fp64" else torch.float32)

    def draw(self, num_tokens: int, dtype: torch.dtype, meta: TokenMeta) -> Tensor:
        """The logits [T, E] that benchmarks force on hidden states of `dtype`. Noise differs between tokens,
        microbatches and layers. The uneven part is common to all ranks: new in every step, or one for the whole run
        when the given standard deviation is negative."""
        key, std = meta.random_key or (self.ctx.seed,), self.config.force_biased
        fixed = std is not None and std < 0
        bias_key = (self.ctx.seed,) if fixed else key[:2]  # (seed, iteration)
        return draw_logits(
            (num_tokens, self.config.num_experts),
            self._logits_dtype(dtype),
            self.ctx.device,
            (*key, "forced logits", self.layer),
            None if std is None else abs(std),
            (*bias_key, "forced bias", self.layer),
            sequence_part(self.ctx),
        )

    def _choose_experts(
        self, logits_TE: Tensor, tokens: BatchTokens, given_ids_TK: Tensor | None, *, recording: bool, balance: bool
    ) -> RoutedTokens:
        """Every token takes experts: `spec.topk` of them. `recording`: with the sums that losses are made of."""
        config, valid_T = self.config, tokens.valid_T
        z = recording and bool(config.z_loss_coeff)
        if "sinkhorn" in config.balancing:
            ids_TK, probs_TK = sinkhorn_choice(logits_TE, config.topk, valid_T, given_ids_TK, balance=balance)
            ids_TK, probs_TK = valid_ids(ids_TK, valid_T), valid_or_zero(probs_TK, valid_T)
            counts_E = self.kernels.count_tokens(ids_TK, config.num_experts)
            return RoutedTokens(ids_TK, probs_TK, counts_E, None, squared_logsumexp(logits_TE, valid_T) if z else None)
        if given_ids_TK is None and self.quantile_thresholds is not None:
            given_ids_TK = quantile_choice(logits_TE, self.quantile_thresholds, config.topk)
        # token t belongs to sequence t % B
        sets = tokens.batch_size if any(kind == "seq_aux_loss" for kind, *_ in self._balancing_losses) else 1
        return self.kernels.route(
            logits_TE,
            self.expert_bias,
            config,
            given_ids_TK=given_ids_TK,
            valid_T=valid_T,
            balance_sets=sets if recording and self._balancing_losses else 0,
            z=z,
        )

    def _routing(self, routed: RoutedTokens) -> Routing:
        routing = Routing(
            num_experts=self.config.num_experts,
            ids_TK=routed.ids_TK,
            probs_TK=routed.probs_TK,
            counts_E=routed.counts_E,
            chosen_TK=routed.ids_TK,
        )
        return routing if self.capacity is None else self._limit(routing, self.capacity)

    def _limit(self, routing: Routing, config: CapacityConfig) -> Routing:
        """Drops what is beyond the experts' capacity."""
        ids_TK, probs_TK = routing.ids_TK, routing.probs_TK
        assert ids_TK is not None and probs_TK is not None
        capacity = expert_capacity(len(ids_TK), self.config.topk, self.config.num_experts, config.factor)
        stays_TK = within_capacity(ids_TK, probs_TK, routing.counts_E, capacity, config.policy)
        return replace(
            routing,
            ids_TK=ids_TK.masked_fill(~stays_TK, -1),
            probs_TK=torch.where(stays_TK, probs_TK, 0),
            counts_E=routing.counts_E.clamp(max=capacity),
            capacity=capacity if config.pad else None,
        )

    def _choose_tokens(self, logits_TE: Tensor, valid_T: Tensor | None) -> Routing:
        """Every expert takes tokens: as many as its capacity."""
        config = self.config
        factor = 1.0 if self.capacity is None else self.capacity.factor
        capacity = expert_capacity(len(logits_TE), config.topk, config.num_experts, factor)
        map_TE, probs_TE = expert_choice(logits_TE, config, capacity, valid_T)
        return Routing(
            num_experts=config.num_experts,
            map_TE=map_TE,
            probs_TE=probs_TE,
            counts_E=map_TE.sum(dim=0),
            capacity=capacity,
        )

    def _losses(
        self, logits_TE: Tensor, routed: RoutedTokens | None, tokens: BatchTokens, meta: TokenMeta
    ) -> list[tuple[str, Tensor, float]]:
        """(name in the log, loss, coefficient) of the z loss and the balancing losses. `routed` is None where experts
        choose."""
        made: list[tuple[str, Tensor, float]] = []
        if self.config.z_loss_coeff:
            z_sum = None if routed is None else routed.z_sum
            z_sum = squared_logsumexp(logits_TE, tokens.valid_T) if z_sum is None else z_sum
            made.append(("z_loss", z_sum / tokens.number(), self.config.z_loss_coeff))
        if routed is not None and routed.balance is not None:
            sums = BalancingLosses(routed.balance, self.config.topk, tokens)
            kinds = self._balancing_losses
            made += [(name, self._balancing_loss(kind, sums, meta), coeff) for kind, name, coeff in kinds]
        return made

    def _attach_losses(self, routing: Routing, made: list[tuple[str, Tensor, float]], meta: TokenMeta) -> Routing:
        """Reports the losses, and lets them into the gradient of the weights."""
        if not made:
            return routing
        names, losses, coeffs = zip(*made, strict=True)
        for name, loss in zip(names, losses, strict=True):
            self._report(name, loss, meta)
        carrier = routing.probs_TE if routing.probs_TK is None else routing.probs_TK
        assert carrier is not None
        carrier = attach_losses(carrier, losses, coeffs, meta.aux_scale)
        return replace(routing, probs_TE=carrier) if routing.probs_TK is None else replace(routing, probs_TK=carrier)

    def _balancing_loss(self, kind: Balancing, losses: BalancingLosses, meta: TokenMeta) -> Tensor:
        if kind == "seq_aux_loss":
            return losses.over_sequences()
        if kind == "aux_loss":
            return losses.over_microbatch()
        counts_E = self._counts_ahead.pop(meta.random_key, None)
        if counts_E is None:
            counts_E = self.global_counts + losses.counts_over(self.ctx.group("tp_dp_cp"))
            self.global_counts.copy_(counts_E)
            if not torch.is_grad_enabled():
                # by the second forward other microbatches or depths have counted, in another order
                self._counts_ahead[meta.random_key] = counts_E
        return losses.with_shares_of(counts_E)

    def _report(self, name: str, loss: Tensor, meta: TokenMeta) -> None:
        """Each rank has its part of a loss; the mean over ranks, which the tally takes, has to be their sum."""
        if meta.metrics is not None:
            size = self.ctx.group("tp_cp").size
            meta.metrics.record(name, loss if size == 1 else loss * size, layer=self.layer)

    def _count(self, routing: Routing, logits_TE: Tensor, valid_T: Tensor | None) -> None:
        """Remembers what the update at the end of the global batch needs."""
        # by `add_`: `+=` would also set the attribute of the module, which costs the host more than the addition
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
        """Reports the expert bias of a step, once: it only moves at the end."""
        if self.expert_bias is not None:
            router_metrics.record_bias(metrics, self.layer, self.expert_bias)

    def batch_sums(self) -> Tensor:
        """See `balance.BalancedRouter`."""
        parts: list[Tensor] = []
        if self.expert_bias is not None:
            parts.append(self.tokens_since_update.double())
        if self.quantile_thresholds is not None:
            parts += [self.threshold_sums, self.threshold_count]
        return torch.cat(parts) if parts else self.weight.new_zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def end_batch(self, sums: Tensor, proceed: Tensor | None) -> None:
        """See `balance.BalancedRouter`."""
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
            self._counts_ahead.clear()

    def _set(self, state: Tensor, value: Tensor, proceed: Tensor | None) -> None:
        state.copy_(value if proceed is None else torch.where(proceed, value.to(state.dtype), state))


def _check(config: RouterConfig, capacity: CapacityConfig | None) -> None:
    """What `arguments` refuses with better words; here so that no module computes nonsense."""
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


def expert_capacity(num_tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Most tokens of one expert: ceil(factor * T * K / E), at most T (GShard, arXiv 2006.16668).

    The limit is per rank and microbatch. It counts padding tokens, because it sizes buffers and the host must know it.
    """
    return min(num_tokens, math.ceil(num_tokens * topk / num_experts * factor))


def within_capacity(
    ids_TK: Tensor, probs_TK: Tensor, counts_E: Tensor, capacity: int, policy: Literal["probs", "position"]
) -> Tensor:
    """Mask of the choices within the experts' capacity: bool [T, K], False where the id is -1.

    Every expert keeps the `capacity` choices of the highest weight (of equal ones the earliest token), or those of the
    earliest tokens. `counts_E` [E] are the choices per expert. Dropped choices get the id -1 and the weight 0; the
    other weights are not normalised again.
    """
    experts = torch.where(ids_TK < 0, len(counts_E), ids_TK).flatten()
    order = torch.arange(len(experts), device=experts.device)
    if policy == "probs":
        order = probs_TK.detach().flatten().sort(descending=True, stable=True).indices
    # a stable sort by expert keeps the order of priority inside every expert
    order = order[experts[order].sort(stable=True).indices]
    starts_E = torch.cat([counts_E.new_zeros(1), counts_E.cumsum(0)])
    place = torch.arange(len(order), device=order.device) - starts_E[experts[order]]
    stays = torch.empty_like(order, dtype=torch.bool).scatter_(0, order, place < capacity)
    return stays.view_as(ids_TK) & (ids_TK >= 0)
