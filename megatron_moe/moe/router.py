"""Router: selects experts for every token and computes their weights.

Order of operations: input jitter, gate projection, forced logits (benchmarks), selection (one kernel op, which also
computes all sums over tokens), capacity limit, auxiliary losses, token counts.

A choice is the assignment of a token to one of its top-k experts: a microbatch of T tokens has T * K choices.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_moe.config.functions import Balancing, Options
from megatron_moe.config.moe import CapacityConfig, RouterConfig
from megatron_moe.config.registry import BALANCING, SCORE_FUNCTIONS, RegistrationProblem
from megatron_moe.cost_model.expert_load import skewed_log_popularity
from megatron_moe.data.batch import ForcedRouting, MicrobatchContext
from megatron_moe.kernels.ops import Kernels, RoutedTokens, internal_dtype
from megatron_moe.kernels.reference.routing import squared_logsumexp, top_ids, valid_ids, valid_or_zero
from megatron_moe.layers.declared import DeclaredParameters
from megatron_moe.layers.resources import ModelResources
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.moe import routing_methods
from megatron_moe.moe.balancing import AttachLosses, AttachWeightedScores, BalancingLosses, BatchTokens, WeightedScores
from megatron_moe.moe.router_metrics import record_drops, record_load, record_loss, record_tokens, token_metrics
from megatron_moe.moe.token_dispatcher.base import Routing
from megatron_moe.parallel import rng
from megatron_moe.parallel.autograd_function import AutogradFunction
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.parameter import Parameter
from megatron_moe.parallel.rng import RNGKey
from megatron_moe.parallel.tensor_parallel import select_local_positions, sequence_part

_Z_LOSS = Balancing(metric="z_loss", is_partial=True)


class ExpertSelection:
    """Selects experts for tokens, or tokens for experts, and applies the capacity limit."""

    def __init__(self, config: RouterConfig, capacity: CapacityConfig | None, kernels: Kernels) -> None:
        self.config = config
        self.capacity = capacity
        self.kernels = kernels

    def select_by_token(
        self,
        logits_TE: Tensor,
        valid_T: Tensor | None,
        forced_ids_TK: Tensor | None,
        expert_bias: Tensor | None,
        thresholds_E: Tensor | None,
        *,
        balance: bool,
        balance_sets: int,
        z: bool,
    ) -> RoutedTokens:
        """Every token selects `topk` experts.

        Args:
            forced_ids_TK: expert ids to use instead of selecting.
            thresholds_E: subtracted from the logits for top-k (quantile balancing), but not for the probabilities.
            balance: whether Sinkhorn routing selects by the balanced matrix (in training) or by probability.
            balance_sets: number of token sets that get separate sums for balancing losses; 0: no sums.
            z: True to compute the sum for the z loss.
        """
        config = self.config
        if "sinkhorn" in config.balancing:
            ids_TK, probs_TK = routing_methods.sinkhorn_choice(
                logits_TE, config.topk, valid_T, forced_ids_TK, balance=balance
            )
            ids_TK, probs_TK = valid_ids(ids_TK, valid_T), valid_or_zero(probs_TK, valid_T)
            counts_E = self.kernels.count_tokens(ids_TK, config.num_experts)
            return RoutedTokens(ids_TK, probs_TK, counts_E, None, squared_logsumexp(logits_TE, valid_T) if z else None)
        if forced_ids_TK is None and thresholds_E is not None:
            wide_TE = logits_TE.detach().to(internal_dtype(logits_TE.dtype))
            forced_ids_TK = top_ids(wide_TE - thresholds_E.to(wide_TE.dtype), config.topk)
        return self.kernels.route(
            logits_TE, expert_bias, config, forced_ids_TK=forced_ids_TK, valid_T=valid_T, balance_sets=balance_sets, z=z
        )

    def select_by_expert(self, logits_TE: Tensor, valid_T: Tensor | None) -> Routing:
        """Every expert selects tokens up to its capacity (expert choice)."""
        config = self.config
        factor = 1.0 if self.capacity is None else self.capacity.factor
        capacity = config.expert_capacity(len(logits_TE), factor)
        map_TE, probs_TE = routing_methods.expert_choice(logits_TE, config, capacity, valid_T)
        counts_E = map_TE.sum(dim=0)
        return Routing(
            num_experts=config.num_experts, map_TE=map_TE, probs_TE=probs_TE, counts_E=counts_E, capacity=capacity
        )

    def apply_capacity(self, routing: Routing) -> Routing:
        """Drops the choices that exceed the capacity of their expert; does nothing without a capacity limit."""
        config, ids_TK, probs_TK = self.capacity, routing.ids_TK, routing.probs_TK
        if config is None:
            return routing
        assert ids_TK is not None and probs_TK is not None
        capacity = self.config.expert_capacity(len(ids_TK), config.factor)
        stays_TK = routing_methods.within_capacity(ids_TK, probs_TK, routing.counts_E, capacity, config.policy)
        return replace(
            routing,
            ids_TK=ids_TK.masked_fill(~stays_TK, -1),
            probs_TK=torch.where(stays_TK, probs_TK, 0),
            counts_E=routing.counts_E.clamp(max=capacity),
            capacity=capacity if config.pad else None,
        )


class Router(nn.Module):
    """Selects `topk` of `num_experts` experts for every token, or tokens for every expert (expert choice).

    Parameters: `weight` [E, H], and `bias` [E] if configured. fp32 buffers, saved with the model: `expert_bias` [E]
    (aux-loss-free balancing, arXiv 2408.15664) and `quantile_thresholds` [E], each only if its method is enabled.
    int32 buffer `expert_table` [V, K] of hash layers: experts of every token id, initially the K experts from the token
    id on, as in Megatron-LM. The published tables come with the weights.
    Statistics accumulated between two updates are not saved, because checkpoints are written between global batches.
    """

    weight: Parameter
    bias: Parameter | None
    expert_bias: Tensor | None
    expert_table: Tensor | None
    quantile_thresholds: Tensor | None
    tokens_since_update: Tensor
    threshold_sums: Tensor
    threshold_count: Tensor
    global_counts: Tensor

    def __init__(
        self, config: RouterConfig, capacity: CapacityConfig | None, layer: int, resources: ModelResources[Any]
    ) -> None:
        super().__init__()
        if not config.scores.fused:
            _check_scores(config.score_function, config.options)
        self.config = config
        self.capacity = capacity
        self.layer = layer
        self.ctx, self.kernels = ctx, kernels = resources.ctx, resources.kernels
        self._counts_batch = any(BALANCING.get(name).counts_batch for name in config.balancing)
        self.selection = ExpertSelection(config, capacity, kernels)
        """Selects the experts. The layout check replaces it to reproduce the selection of another parallel layout."""
        num_experts = config.num_experts
        declared = DeclaredParameters(config.parameters(ctx.config), resources)
        self.weight, self.bias = declared.parameter("router.weight"), declared.optional_parameter("router.bias")
        self._balancing_losses = [(loss, loss.bound(config.options), c) for loss, c in config.balancing_losses]
        self._token_metrics = token_metrics(config.options)

        self._state("expert_bias", torch.float32, num_experts, config.expert_bias, saved=True)
        self._state("tokens_since_update", torch.int64, num_experts, config.expert_bias)
        quantile = "quantile_balancing" in config.balancing
        self._state("quantile_thresholds", torch.float32, num_experts, quantile, saved=True)
        self._state("threshold_sums", torch.float64, num_experts, quantile)
        self._state("threshold_count", torch.float64, 1, quantile)
        self._state("global_counts", torch.int64, num_experts, self._counts_batch)
        table = None
        if config.hash_vocab_size is not None:
            ids_V1 = torch.arange(config.hash_vocab_size, dtype=torch.int32, device=ctx.device)[:, None]
            choices_K = torch.arange(config.topk, dtype=torch.int32, device=ctx.device)
            table = (ids_V1 + choices_K) % num_experts
        self.register_buffer("expert_table", table)
        self._forces_logits = bool(config.forced_routing_flag)
        self._log_popularity_E: Tensor | None = None
        if config.force_skew is not None:
            popularity = skewed_log_popularity(num_experts, config.topk, config.force_skew)
            self._log_popularity_E = torch.tensor(popularity, device=ctx.device)
        self.counts_for_recompute: dict[RNGKey | None, Tensor] = {}
        """Choices per expert in the global batch so far, keyed by the microbatch's RNG key. A forward stores them for
        its recompute."""

    def _state(self, name: str, dtype: torch.dtype, size: int, present: bool, *, saved: bool = False) -> None:
        value = torch.zeros(size, dtype=dtype, device=self.ctx.device) if present else None
        self.register_buffer(name, value, persistent=saved)

    def forward(self, hidden_SBH: Tensor, mb: MicrobatchContext, forced_ids_TK: Tensor | None = None) -> Routing:
        """Routes the T = S * B tokens of `hidden_SBH`; the token at (s, b) has index t = s * B + b.

        `forced_ids_TK` (an earlier `Routing.chosen_TK`; default: those in `mb.forced_routing`) replaces the selection;
        probabilities are computed from the current logits. In training, the gradients of the losses are attached to the
        probabilities. Choices are counted only if gradients are enabled, and metrics are recorded only if `mb.metrics`
        is set. With recompute, the first forward records metrics and the second one counts choices, so nothing is
        counted twice.
        """
        recording = mb.training and (torch.is_grad_enabled() or mb.metrics is not None)
        valid_T = (
            None if mb.tokens.valid_BS is None else select_local_positions(mb.tokens.valid_BS, self.ctx).t().reshape(-1)
        )
        logits_TE = self._logits(hidden_SBH, mb)
        batch_size = hidden_SBH.shape[1]
        if forced_ids_TK is None and mb.forced_routing is not None:
            forced_ids_TK = self._forced_ids(mb.forced_routing, logits_TE, valid_T, balance=mb.training)
        elif forced_ids_TK is None and self.expert_table is not None and not self._forces_logits:
            forced_ids_TK = self._hashed_ids(self.expert_table, mb)
        if "expert_choice" in self.config.balancing:
            assert forced_ids_TK is None, "expert choice cannot replay ids per token"
            routed, routing = None, self.selection.select_by_expert(logits_TE, valid_T)
        else:
            # token t belongs to sequence t % B
            sets = batch_size if any(loss.per_sequence for loss, *_ in self._balancing_losses) else 1
            routed = self.selection.select_by_token(
                logits_TE,
                valid_T,
                forced_ids_TK,
                self.expert_bias,
                self.quantile_thresholds,
                balance=mb.training,
                balance_sets=sets if recording and self._balancing_losses else 0,
                z=recording and bool(self.config.z_loss_coeff),
            )
            num_experts, (ids_TK, probs_TK, counts_E) = self.config.num_experts, routed[:3]
            routing = Routing(
                num_experts=num_experts, ids_TK=ids_TK, probs_TK=probs_TK, counts_E=counts_E, chosen_TK=ids_TK
            )
            routing = self.selection.apply_capacity(routing)
        if mb.metrics is not None and mb.metrics.trace_routing is not None and routing.chosen_TK is not None:
            mb.metrics.trace_routing(self.layer, routing.chosen_TK)
        if not recording:
            return routing
        if self.config.z_loss_coeff or self._balancing_losses:
            tokens = BatchTokens(valid_T, len(logits_TE), batch_size, self.ctx.group("tp_cp"))
            routing = self._attach_losses(routing, self._losses(logits_TE, routed, tokens, mb), mb)
        if torch.is_grad_enabled():
            self._count(routing, logits_TE, valid_T)
        if mb.metrics is not None:
            self._record(mb.metrics, routing, logits_TE, valid_T)
        return routing

    def _hashed_ids(self, table_VK: Tensor, mb: MicrobatchContext) -> Tensor:
        """Returns the expert ids [T, K] of the token ids."""
        assert mb.tokens.ids_BS is not None, f"the router of hash layer {self.layer} gets no token ids"
        return table_VK[select_local_positions(mb.tokens.ids_BS, self.ctx).t().reshape(-1)].long()

    @torch.no_grad()
    def _forced_ids(self, given: ForcedRouting, logits_TE: Tensor, valid_T: Tensor | None, *, balance: bool) -> Tensor:
        """Returns expert ids [T, K]: the given ones, or for tokens without given ones those that the router selects."""
        forced_ids_TK = given.ids[self.layer]
        if given.forced_T is None:
            return forced_ids_TK
        bias_E, thresholds_E = self.expert_bias, self.quantile_thresholds
        selected = self.selection.select_by_token(
            logits_TE, valid_T, None, bias_E, thresholds_E, balance=balance, balance_sets=0, z=False
        )
        return torch.where(given.forced_T[:, None], forced_ids_TK, selected.ids_TK)

    def _logits(self, hidden_SBH: Tensor, mb: MicrobatchContext) -> Tensor:
        """Logits [T, E]. The GEMMs of forward and backward run in the dtype of the logits; hidden states and weight are
        saved in their original dtypes."""
        eps = self.config.input_jitter_eps
        if eps and (key := mb.key("router jitter", self.layer)) is not None:
            # samples of U(1 - eps, 1 + eps) (Switch Transformer, arXiv 2101.03961)
            uniform = rng.uniform(hidden_SBH.shape, key, hidden_SBH.device, part=sequence_part(self.ctx))
            hidden_SBH = hidden_SBH * (1 + eps * (2 * uniform - 1)).to(hidden_SBH.dtype)
        dtype = self._logits_dtype(hidden_SBH.dtype)
        logits_TE = self.kernels.router_logits(hidden_SBH.flatten(0, 1), self.weight, dtype)
        if self.bias is not None:
            logits_TE = logits_TE + self.bias.to(dtype)
        if self._forces_logits:
            forced = mb.forced_logits
            drawn = self.random_logits(len(logits_TE), hidden_SBH.dtype, mb) if forced is None else forced[self.layer]
            logits_TE = _StraightThrough.apply(logits_TE, drawn)
        return logits_TE

    def _logits_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the logits for hidden states of `dtype` (`--moe-router-dtype`)."""
        if self.config.dtype is None:
            return dtype
        return torch.promote_types(dtype, torch.float64 if self.config.dtype == "fp64" else torch.float32)

    def random_logits(self, num_tokens: int, dtype: torch.dtype, mb: MicrobatchContext) -> Tensor:
        """Returns random logits [T, E] for benchmarks, so that the expert load does not depend on the weights.

        The logits are N(0, 1) noise that differs between tokens, microbatches and layers. It is drawn in fp32 so that
        fp64 runs use the same values. If `force_biased` is set to a number s, one sample per expert with standard
        deviation |s|, equal on all ranks, is added. If s >= 0, these samples are redrawn every step; if s < 0, never.
        With `force_skew`, the noise is Gumbel noise, so that the top K are samples without replacement, and the log
        popularity of the experts is added, in an order that is redrawn every step.
        """
        num_experts, std, device = self.config.num_experts, self.config.force_biased, self.ctx.device
        dtype, part = self._logits_dtype(dtype), sequence_part(self.ctx)
        key = (self.ctx.seed,) if mb.rng is None else mb.rng.draw_key()
        shape, site = torch.Size((num_tokens, num_experts)), (*key, "forced logits", self.layer)
        if self._log_popularity_E is not None:
            uniform_TE = rng.uniform(shape, site, device, part=part)
            key = (self.ctx.seed,) if mb.rng is None else (mb.rng.seed, mb.rng.iteration)
            order_E = rng.uniform(torch.Size((num_experts,)), (*key, "forced skew", self.layer), device).argsort()
            gumbel_TE = uniform_TE.clamp_min(torch.finfo(torch.float32).tiny).log().neg().log().neg()
            # scaled so that sigmoid scores do not saturate; the order does not change
            return ((gumbel_TE + self._log_popularity_E[order_E]) / 4).to(dtype)
        noise_TE = rng.normal(shape, site, device, part=part)
        # copied, because a view would keep the noise of all ranks in memory until backward
        noise_TE = noise_TE.to(dtype, copy=part[1] > 1)
        if std is None:
            return noise_TE
        key = (self.ctx.seed,) if mb.rng is None or std < 0 else (mb.rng.seed, mb.rng.iteration)
        bias_E = rng.normal(torch.Size((num_experts,)), (*key, "forced bias", self.layer), device)
        return noise_TE + abs(std) * bias_E.to(dtype)

    def _losses(
        self, logits_TE: Tensor, routed: RoutedTokens | None, tokens: BatchTokens, mb: MicrobatchContext
    ) -> list[tuple[Balancing, Tensor | WeightedScores, float]]:
        """Returns (loss, its value, coefficient) of every enabled loss: the z loss and the balancing losses. `routed`:
        None for expert choice, which has no balancing losses."""
        made: list[tuple[Balancing, Tensor | WeightedScores, float]] = []
        if self.config.z_loss_coeff:
            z_sum = None if routed is None else routed.z_sum
            z_sum = squared_logsumexp(logits_TE, tokens.valid_T) if z_sum is None else z_sum
            made.append((_Z_LOSS, z_sum / tokens.num_tokens(), self.config.z_loss_coeff))
        if routed is not None and routed.balance is not None:
            load = BalancingLosses(routed.balance, self.config.topk, tokens, partial(self._batch_counts, mb))
            for entry, function, coeff in self._balancing_losses:
                loss = function(load)
                if logits_TE.requires_grad and isinstance(loss, Tensor):
                    _check_loss(entry.metric, loss)
                made.append((entry, loss, coeff))
        return made

    def _attach_losses(
        self, routing: Routing, made: list[tuple[Balancing, Tensor | WeightedScores, float]], mb: MicrobatchContext
    ) -> Routing:
        """Records the losses in `mb.metrics` (if set) and attaches their gradients to the probabilities."""
        if not made:
            return routing
        # the mean over ranks of the recorded values is the sum of the partial losses
        size, probs, scale = self.ctx.group("tp_cp").size, routing.probs, mb.aux_loss_scale
        others: list[tuple[Tensor, float]] = []
        for entry, loss, coeff in made:
            factor = size if entry.is_partial else 1
            if isinstance(loss, WeightedScores):
                if mb.metrics is not None:
                    record_loss(mb.metrics, entry.metric, self.layer, loss.terms(), factor)
                probs = AttachWeightedScores.apply(probs, coeff, scale, *loss)
                continue
            if mb.metrics is not None:
                mb.metrics.record(entry.metric, loss * factor if factor > 1 else loss, layer=self.layer)
            others.append((loss, coeff))
        if others:
            losses, coeffs = zip(*others, strict=True)
            probs = AttachLosses.apply(probs, coeffs, scale, *losses)
        return replace(routing, probs_TE=probs) if routing.probs_TK is None else replace(routing, probs_TK=probs)

    def _batch_counts(self, mb: MicrobatchContext, local_E: Tensor) -> Tensor:
        """Adds the choices of all ranks' tokens to those of the global batch so far and returns the sum, int64 [E]. A
        recomputed forward adds nothing and returns the same sum again. `local_E`: choices of this rank's tokens, int32,
        which is exact as in `sum_counts`; overwritten."""
        counts_E = self.counts_for_recompute.pop(mb.rng, None)
        if counts_E is None:
            # collective over tp x dp x cp: 4 * E bytes per layer and microbatch; no gradient flows through counts
            counts_E = self.global_counts + all_reduce_(local_E, self.ctx.group("tp_dp_cp"))
            self.global_counts.copy_(counts_E)
            if not torch.is_grad_enabled():
                # stored for the recomputed forward, because global_counts then includes later microbatches and MTP
                # depths
                self.counts_for_recompute[mb.rng] = counts_E
        return counts_E

    def _count(self, routing: Routing, logits_TE: Tensor, valid_T: Tensor | None) -> None:
        """Accumulates the statistics that update expert bias and thresholds at the end of the global batch."""
        # `+=` would also set the module attribute, which costs more host time than the addition
        if self.expert_bias is not None:
            self.tokens_since_update.add_(routing.counts_E)
        if self.quantile_thresholds is not None:
            logits_TE, valid_T = routing_methods.gather_microbatch(logits_TE, valid_T, self.ctx.group("tp_cp"))
            thresholds_E, counted = routing_methods.quantile_thresholds(
                logits_TE, self.quantile_thresholds, self.config.topk, valid_T
            )
            self.threshold_sums.add_(thresholds_E)
            self.threshold_count.add_(counted)

    def _record(self, metrics: MetricAccumulator, routing: Routing, logits_TE: Tensor, valid_T: Tensor | None) -> None:
        if routing.map_TE is not None:
            met_T = routing.map_TE.any(dim=1)
            num_tokens = torch.ones_like(met_T).sum() if valid_T is None else valid_T.sum()
            record_drops(metrics, self.layer, num_tokens - met_T.sum(), num_tokens)
        requested_E, dropless = routing.counts_E, routing.map_TE is None and self.capacity is None
        if routing.chosen_TK is not None and not dropless:
            requested_E = self.kernels.count_tokens(routing.chosen_TK, self.config.num_experts)
            record_drops(metrics, self.layer, (requested_E - routing.counts_E).sum(), requested_E.sum())
        record_load(metrics, self.layer, requested_E, self.ctx.group("tp_cp"), self.config.options, dropless=dropless)
        if self._token_metrics and routing.ids_TK is not None and routing.probs_TK is not None:
            record_tokens(
                metrics, self.layer, self._token_metrics, (logits_TE, routing.ids_TK, routing.probs_TK), valid_T
            )

    def record_bias(self, metrics: MetricAccumulator) -> None:
        """Records max - min of the expert bias as metric moe/expert_bias_range. Called once per step."""
        if self.expert_bias is not None:
            spread = self.expert_bias.max() - self.expert_bias.min()
            metrics.record("moe/expert_bias_range", spread, layer=self.layer)

    def batch_sums(self) -> Tensor:
        """Returns the statistics since the last update, fp64 [n], to be summed over ranks. n may be 0."""
        parts: list[Tensor] = []
        if self.expert_bias is not None:
            parts.append(self.tokens_since_update.double())
        if self.quantile_thresholds is not None:
            parts += [self.threshold_sums, self.threshold_count]
        return torch.cat(parts) if parts else self.weight.new_zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def end_batch(self, sums: Tensor, apply_update: Tensor | None) -> None:
        """Updates expert bias and thresholds from `sums` (`batch_sums` summed over ranks), then resets the statistics.
        `apply_update`: bool scalar on the device; if it is False, bias and thresholds stay unchanged."""
        num_experts = self.config.num_experts
        if self.expert_bias is not None:
            tokens_E, sums = sums[:num_experts], sums[num_experts:]
            move_E = self.config.bias_update_rate * (tokens_E.mean() - tokens_E).sign()
            self._set(self.expert_bias, self.expert_bias + move_E, apply_update)
            self.tokens_since_update.zero_()
        if self.quantile_thresholds is not None:
            new_E, count = sums[:num_experts] / sums[num_experts:].clamp(min=1), sums[num_experts:]
            ema = self.config.quantile_ema
            moved_E = ema * self.quantile_thresholds + (1 - ema) * new_E
            moved_E = torch.where(count > 0, moved_E, self.quantile_thresholds)
            self._set(self.quantile_thresholds, moved_E - moved_E.mean(), apply_update)
            self.threshold_sums.zero_()
            self.threshold_count.zero_()
        if self._counts_batch:
            self.global_counts.zero_()
            self.counts_for_recompute.clear()

    def _set(self, state: Tensor, value: Tensor, apply_update: Tensor | None) -> None:
        state.copy_(value if apply_update is None else torch.where(apply_update, value.to(state.dtype), state))


def _check_scores(name: str, options: Options) -> None:
    """Calls a registered score function once, on 3 x 8 logits on the CPU.

    Raises RegistrationProblem if it fails, or does not return finite scores of at least 0 and of the logits' shape.
    """
    logits_TE = torch.linspace(-20, 20, 24, device="cpu").view(3, 8)
    try:
        scores_TE = SCORE_FUNCTIONS.get(name).bound(options)(logits_TE)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, NameError) as error:
        raise RegistrationProblem(f"the score function '{name}' raised {type(error).__name__}: {error}") from error
    if not isinstance(scores_TE, Tensor) or scores_TE.shape != logits_TE.shape:
        found = f"the shape {tuple(scores_TE.shape)}" if isinstance(scores_TE, Tensor) else type(scores_TE).__name__
        wrong = f"{found} for logits of the shape (3, 8); it must return one score per logit"
    elif not bool(scores_TE.isfinite().all()):
        wrong = "NaN or infinite scores for logits from -20 to 20"
    elif bool((scores_TE < 0).any()):
        wrong = f"scores below 0, down to {float(scores_TE.min()):.3g} for logits from -20 to 20"
    else:
        return
    raise RegistrationProblem(f"the score function '{name}' returns {wrong}")


class _StraightThrough(AutogradFunction):
    """Straight-through estimator: forward returns `replacement_TE`, backward passes its gradient to the logits."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, replacement_TE: Tensor) -> Tensor:
        return replacement_TE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


def _check_loss(name: str, loss: Tensor) -> None:
    """Raises RegistrationProblem unless a registered balancing loss is one number with a gradient."""
    if loss.shape != ():
        raise RegistrationProblem(f"the balancing loss {name} must be one number, but has the shape {list(loss.shape)}")
    if not loss.requires_grad:
        raise RegistrationProblem(
            f"the balancing loss {name} has no gradient and would balance nothing; use load.mean_scores(), because the "
            f"shares of load.fractions() are counts"
        )
