"""Mixture of Experts: router, experts, shared experts and token dispatch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, prod
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from megatron_moe.config.component import FeedForwardConfig, NameRule, ParamSpec, indivisible, linear_parameters
from megatron_moe.config.costs import (
    INDEX,
    ActivationSizes,
    ExpectedRows,
    SavedActivation,
    binomial_mean,
    bytes_per_element,
    bytes_per_fp8_element,
    most_rows,
    row_padding_factor,
    saved_tensor,
)
from megatron_moe.config.echo import EchoConfig
from megatron_moe.config.functions import Balancing, Options, ScoreFunction
from megatron_moe.config.mlp import MLPConfig, mlp_names, ungated_mlp_names
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.config.precision import LowPrecisionConfig, OperandFormat
from megatron_moe.config.registry import BALANCING, SCORE_FUNCTIONS
from megatron_moe.config.transport import (
    ExpertTransport,
    HybridEPConfig,
    PushConfig,
    RowBound,
    TokenExchange,
    TransportChoice,
    choose_transport,
)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Top-k router: selects each token's experts and computes their probabilities."""

    hidden_size: int
    num_experts: int
    topk: int
    score_function: str = "softmax"
    """Name in registry `SCORE_FUNCTIONS`."""
    pre_softmax: bool = False
    """Applies the softmax to all logits before the top-k, instead of to the selected logits after it."""
    num_groups: int | None = None
    """Number of expert groups in group-limited routing (arXiv 2412.19437 section 2.1.2); None means no group limit."""
    group_topk: int | None = None
    """Number of groups from which a token may select experts; None if `num_groups` is None."""
    scaling_factor: float | None = None
    """Factor by which the probabilities of the selected experts are multiplied (`--moe-router-topk-scaling-factor`);
    None means 1."""
    expert_bias: bool = False
    """Balancing without auxiliary loss (arXiv 2408.15664): a per-expert bias is added to the scores for selection only,
    and updated once per global batch."""
    bias_update_rate: float = 1e-3
    balancing: tuple[str, ...] = ("none",)
    """Load-balancing methods (`--moe-router-load-balancing-type`): names in registry `BALANCING`."""
    aux_loss_coeffs: tuple[float, ...] = (0.0,)
    """Coefficients of the balancing losses (`--moe-aux-loss-coeff`), one per entry of `balancing`."""
    z_loss_coeff: float | None = None
    input_jitter_eps: float | None = None
    dtype: Literal["fp32", "fp64"] | None = None
    """Number format of the router's linear layer (`--moe-router-dtype`); None means the format of the activations."""
    force_balancing: bool = False
    """Replaces the logits by random ones, to benchmark balanced load (`--moe-router-force-load-balancing`)."""
    force_biased: float | None = None
    """Replaces logits by random ones plus a random bias per expert, to benchmark unbalanced load. The absolute value is
    the standard deviation of the biases, which are drawn once per step, or only once if the value is negative
    (`--moe-router-force-biased`). None keeps the logits."""
    force_skew: float | None = None
    """Replaces logits by random ones, to benchmark unbalanced load. This number is the load of the busiest expert
    divided by the mean load (`--moe-router-force-skew`). Expert popularity is log-normal, in an order drawn for every
    step and layer. None keeps the logits."""
    linear_bias: bool = False
    """Adds a learned bias to the router's linear layer, as in GPT-OSS (`--add-bias-linear`)."""
    hash_vocab_size: int | None = None
    """Number of token ids in a table with the experts of every token id, which replaces the selection
    (`--moe-n-hash-layers`). None means that the router selects experts by their scores."""
    quantile_ema: float = 0.0
    """Weight of old thresholds in quantile balancing's moving average (`--moe-router-quantile-balancing-ema`)."""

    options: Options = ()
    """Values of the flags that the score function, the balancing losses and registered metrics request."""

    def as_flags(self) -> dict[str, Any]:
        """See `Component.as_flags`."""
        return {
            "moe_router_topk": self.topk,
            "moe_router_score_function": self.score_function,
            "moe_router_pre_softmax": self.pre_softmax,
            "moe_router_num_groups": self.num_groups,
            "moe_router_group_topk": self.group_topk,
            "moe_router_topk_scaling_factor": self.scaling_factor,
            # layers that route by token id have no bias, even if the flag is given
            "moe_router_enable_expert_bias": self.expert_bias if self.hash_vocab_size is None else None,
            "moe_n_hash_layers": self.hash_vocab_size is not None,
            "moe_router_dtype": self.dtype,
            **dict(self.options),
        }

    @property
    def scores(self) -> ScoreFunction:
        entry: ScoreFunction = SCORE_FUNCTIONS.get(self.score_function)
        return entry

    @property
    def selects_on_logits(self) -> bool:
        """Whether experts are selected by their logits, so that the score function is applied to the selected logits
        only."""
        return self.scores.over_experts and not self.pre_softmax

    @property
    def balancing_losses(self) -> tuple[tuple[Balancing, float], ...]:
        """(loss, coefficient) of the balancing losses whose coefficient is not 0, in order of registration."""
        coeffs = dict(zip(self.balancing, self.aux_loss_coeffs, strict=True))
        entries = [(BALANCING.get(name), coeffs[name]) for name in BALANCING.names() if coeffs.get(name)]
        return tuple((entry, coeff) for entry, coeff in entries if entry.function is not None)

    @property
    def forced_routing_flag(self) -> str:
        """Flag that replaces the router's logits by random ones; empty if the router selects the experts."""
        options = {
            "--moe-router-force-load-balancing": self.force_balancing,
            "--moe-router-force-biased": self.force_biased is not None,
            "--moe-router-force-skew": self.force_skew is not None,
        }
        return next((option for option, is_on in options.items() if is_on), "")

    def expert_capacity(self, num_tokens: int, factor: float) -> int:
        """Largest number of a rank's `num_tokens` tokens T that an expert accepts: ceil(factor * T * K / E), at most T
        (GShard, arXiv 2006.16668). T includes padding tokens, because the host must know the buffer sizes."""
        return min(num_tokens, ceil(num_tokens * self.topk / self.num_experts * factor))

    def parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        """Yields the router's weight [E, H] and bias [E]. The expert bias of balancing without auxiliary loss is a
        buffer, not a parameter."""
        # with sequence parallelism, every rank routes its own tokens, so gradients are partial
        meta = ParamMeta(role="router", fan_in=self.hidden_size, partial_over_tp=parallel.sequence_parallel)
        shape = (self.num_experts, self.hidden_size)
        yield ParamSpec(name="router.weight", shape=shape, meta=meta, counted="router")
        if self.linear_bias:
            meta = replace(meta, role="bias", decay=False)
            yield ParamSpec(name="router.bias", shape=shape[:1], meta=meta, counted="router")

    def saved_tensors(self, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        """Tensors that the router saves, except its input, which is counted as the output of the norm."""
        tokens = sizes.residual
        yield saved_tensor("router", "scores", "T E", tokens * self.num_experts, sizes.internal_itemsize)
        yield saved_tensor("router", "choices", "T K", tokens * self.topk, INDEX + self.probability_bytes(sizes))

    def probability_bytes(self, sizes: ActivationSizes) -> int:
        """Bytes of one routing probability that the router saves: those of `dtype`, or of an activation if it is
        None."""
        return sizes.activation_itemsize if self.dtype is None else bytes_per_element(self.dtype)


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """Expert capacity: maximum number of tokens that one expert accepts from one rank's microbatch."""

    factor: float
    """Capacity, as a multiple of the mean number of tokens per expert (`--moe-expert-capacity-factor`)."""
    policy: Literal["probs", "position"] = "probs"
    """Which tokens an expert at its capacity keeps: those with the highest probabilities, or the earliest
    (`--moe-token-drop-policy`)."""
    pad: bool = False
    """Pads every expert's input to its capacity (`--moe-pad-expert-input-to-capacity`)."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(MLPConfig):
    """Routed experts of an MoE layer. Sizes are per expert. With a latent space, `hidden_size` is the latent width."""

    num_experts: int
    grouped: bool = True
    """Computes all experts in one grouped GEMM (`--moe-grouped-gemm`) instead of one GEMM per expert."""
    probs_on_input: bool = False
    """Multiplies rows by their probability before fc1, not before fc2 (`--moe-apply-probs-on-input`). Top-1 only."""
    probs_on_output: bool = False
    """Multiplies rows by their router probability after fc2, not before it; fc2's output is then saved for backward
    (`--no-moe-memory-efficient-permutation`)."""

    @property
    def supports_fused_casts(self) -> bool:
        """Whether these experts allow casts to FP8 to be fused into the ops between the GEMMs. A gated activation also
        needs an ffn size that is a multiple of the block length (`LinearQuantizer.can_fuse_activation`)."""
        return self.grouped and not self.bias and not self.probs_on_output

    def parameter_specs(self, parallel: ParallelConfig, **fields: Any) -> Iterator[ParamSpec]:
        """Yields the weights [E, outputs, inputs] and biases [E, outputs] of the routed experts."""
        num = self.num_experts
        for name, shape, options in self.matrices():
            meta = ParamMeta(role="matrix", grid="expert", num_experts=num, fan_in=shape[1], **options)
            yield ParamSpec(name=f"{name}.weight", shape=(num, *shape), meta=meta, **fields)
            if self.bias:
                tp_dim = 0 if meta.tp_dim == 0 else None
                meta = replace(meta, role="bias", init="zeros", fan_in=1, tp_dim=tp_dim, decay=False)
                fields_of_bias = {**fields, "low": "", "recomputed_by": ()}
                yield ParamSpec(name=f"{name}.bias", shape=(num, shape[0]), meta=meta, **fields_of_bias)


@dataclass(frozen=True, kw_only=True)
class SharedExpertsConfig:
    """Shared experts: one MLP that processes every token, with an optional sigmoid gate per token."""

    mlp: MLPConfig
    gate: bool = False

    def parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        """Parameters of the MLP and the gate."""
        recomputed = ("shared_experts", "moe")
        yield from self.mlp.parameter_specs(parallel, counted="shared", low="shared_experts", recomputed_by=recomputed)
        if self.gate:
            hidden = self.mlp.hidden_size
            meta = ParamMeta(role="gate", fan_in=hidden, partial_over_tp=parallel.sequence_parallel)
            yield ParamSpec(name="gate_weight", shape=(1, hidden), meta=meta, counted="shared")

    def saved_tensors(self, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        yield from self.mlp.saved_tensors_as("shared", "shared_experts", parallel, sizes)
        if self.gate:
            hidden = self.mlp.hidden_size
            mark = {"recomputed_by": ("shared_experts",)}
            yield saved_tensor("shared", "output", "T H", sizes.residual * hidden, sizes.activation_itemsize, mark)
            yield saved_tensor("shared", "gate", "T", sizes.residual * 2, sizes.internal_itemsize, mark)


@dataclass(frozen=True, kw_only=True)
class MoEConfig(FeedForwardConfig):
    """An MoE layer: router, token dispatch, experts, combine, and optional shared experts."""

    router: RouterConfig
    experts: ExpertsConfig
    capacity: CapacityConfig | None = None
    """Limit on tokens per expert; None means that no token is dropped."""
    shared: SharedExpertsConfig | None = None
    latent_size: int | None = None
    """Width to which hidden states are projected for the routed experts (`--moe-latent-size`); None means no
    projection."""
    dispatcher: Literal["local", "allgather", "alltoall", "flex"] = "local"
    """Token dispatcher (`--moe-token-dispatcher-type`). A single expert-parallel rank always uses "local"."""
    transport_backend: str = "auto"
    """Requested transport (`--moe-flex-dispatcher-backend`, or `--moe-alltoall-backend` for "alltoall")."""
    expert_rank_capacity_factor: float | None = None
    """Bound of the rows of a rank's experts relative to the balanced share, for the flex dispatcher
    (`--moe-expert-rank-capacity-factor`); None means a bound that no routing exceeds."""
    push: PushConfig = PushConfig()
    hybridep: HybridEPConfig = HybridEPConfig()
    fp8_dispatch: bool = False
    """Sends the tokens of layers with FP8 experts in dispatch as the bytes that fc1 multiplies
    (`--moe-dispatch-fwd-dtype`)."""
    fp8_combine_grad: bool = False
    """Sends the gradients of layers with FP8 experts in the backward of combine as the bytes that the backward of fc2
    multiplies (`--moe-combine-bwd-dtype`)."""
    row_alignment: int = 1
    """Multiple to which the rows of an expert are padded (`--moe-router-padding-for-quantization`)."""
    echo: EchoConfig | None = None
    """Clones of busy experts on other ranks (`--moe-enable-echo`); None means that rows are processed on the rank of
    their expert."""
    shared_overlap: bool = False
    """Overlaps shared experts with dispatch and combine (`--moe-shared-expert-overlap`); `latent_size` must be None."""

    module: ClassVar[str] = "megatron_moe.moe.moe_layer:MoELayer"
    registered_as: ClassVar[str] = "moe"
    selecting_flags: ClassVar[Mapping[str, Any]] = MappingProxyType({"moe_layer_freq": True})
    whole_module: ClassVar[str] = "moe"
    memory_labels: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"": "mlp", "router": "router", "experts": "experts", "shared_experts": "shared"}
    )
    megatron_names: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {
            **FeedForwardConfig.megatron_names,
            "mlp.experts.linear_fc1.weight": ("mlp.experts.experts.linear_fc1.weight",),
            "mlp.experts.linear_fc2.weight": ("mlp.experts.experts.linear_fc2.weight",),
            "mlp.router.expert_table": ("mlp.router.tid2eid",),
        }
    )

    def as_flags(self) -> dict[str, Any]:
        experts, shared = self.experts, self.shared
        return {
            "num_experts": experts.num_experts,
            "moe_ffn_hidden_size": experts.ffn_hidden_size,
            "add_bias_linear": experts.bias,
            **experts.activation.as_flags(),
            **self.router.as_flags(),
            "moe_latent_size": self.latent_size,
            "moe_apply_probs_on_input": experts.probs_on_input,
            "moe_shared_expert_intermediate_size": shared and shared.mlp.ffn_hidden_size,
            "moe_shared_expert_gate": shared is not None and shared.gate,
        }

    def choose_transport(self, parallel: ParallelConfig, *, has_peer_access: bool = True) -> TransportChoice:
        """Chooses the transport over the ranks of `parallel`; see `transport.choose_transport`."""
        return choose_transport(
            self.dispatcher,
            self.transport_backend,
            num_ranks=parallel.etp * parallel.ep,
            ranks_per_host=parallel.ranks_per_host,
            spans_hosts=parallel.experts_span_hosts,
            shares_memory=parallel.shares_memory,
            has_peer_access=has_peer_access,
            expert_choice="expert_choice" in self.router.balancing,
            pads_experts=self.capacity is not None and self.capacity.pad,
            missing_libraries=parallel.missing_libraries,
            clones_experts=self.echo is not None,
        )

    def transport(self, parallel: ParallelConfig) -> ExpertTransport:
        """Transport of the tokens between the expert-parallel ranks of `parallel`."""
        return self.choose_transport(parallel).transport

    def exchange_formats(
        self, low_precision: LowPrecisionConfig | None
    ) -> tuple[OperandFormat | None, OperandFormat | None]:
        """FP8 formats in which the flex dispatcher sends tokens and gradients of a layer with the recipe
        `low_precision`; None means the format of the activations."""
        if low_precision is None or low_precision.fused_block is None:
            return None, None
        tokens, grads = low_precision.inputs, low_precision.grads
        return tokens if self.fp8_dispatch else None, grads if self.fp8_combine_grad else None

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        """Values of `--recompute-modules` that apply. Overlapped shared experts run in two nodes and cannot be
        recomputed alone."""
        alone = self.shared is not None and not self.shared_overlap
        return ("moe_act", "shared_experts", "moe") if alone else ("moe_act", "moe")

    @property
    def routed_experts(self) -> "MoEConfig":
        return self

    @property
    def num_routed_experts(self) -> int:
        return self.router.num_experts

    @property
    def can_overlap_microbatches(self) -> bool:
        return self.dispatcher != "allgather" and not self.shared_overlap

    @property
    def uses_route_kernel(self) -> bool:
        return "sinkhorn" not in self.router.balancing

    def assumed_load_problems(self, parallel: ParallelConfig, imbalance: float) -> Iterator[tuple[str, str]]:
        experts, topk, capacity = self.router.num_experts, self.router.topk, self.capacity
        most = min(parallel.ep, experts / topk)
        if imbalance > most:
            what = (
                f"--emulate-imbalance {imbalance:g}, but the experts of one of {parallel.ep} expert-parallel "
                f"ranks receive at most {most:g} times a balanced share of top-{topk} choices among {experts}"
            )
            yield what, f"give at most {most:g}"
        if capacity is not None and not capacity.pad and (imbalance > 1 or capacity.factor < 1):
            what = "an emulation cannot predict dropped tokens when experts have a capacity but no padding"
            yield what, "add --moe-pad-expert-input-to-capacity, or emulate balanced load"

    def without_host_reads(self) -> "MoEConfig":
        # one GEMM per expert reads the offsets of the experts' rows on the host
        return replace(self, experts=replace(self.experts, grouped=True))

    def exchange(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> TokenExchange | None:
        num_ranks = parallel.ep * parallel.etp
        if num_ranks == 1:
            return None
        transport, router = self.transport(parallel), self.router
        return TokenExchange(
            transport=transport,
            width=self.experts.hidden_size,
            num_experts=router.num_experts,
            topk=router.topk,
            num_groups=router.num_groups,
            group_topk=router.group_topk,
            rows=self.rows(parallel, sizes.residual, sizes.imbalance),
            row_alignment=self.row_alignment,
            formats=self.exchange_formats(low),
            sums_before_sending=transport.sums_before_sending or self.push.num_sms is not None,
            buffer_bytes=transport.buffer_bytes(self, num_ranks, sizes.activation_itemsize),
            clone_bytes=self._bytes_sent_to_clones(parallel, sizes),
        )

    def _clone_elements(self, parallel: ParallelConfig) -> int:
        """Number of weight elements of a rank's clones if all slots are in use."""
        if self.echo is None or parallel.ep == 1:
            return 0
        of_expert = sum(prod(shape) for _, shape, _ in self.experts.matrices()) // parallel.etp
        return self.echo.moe_num_echo_experts // parallel.ep * of_expert

    def _bytes_sent_to_clones(self, parallel: ParallelConfig, sizes: ActivationSizes) -> float:
        """Bytes of weights and gradients that a rank sends per microbatch if all clones are in use."""
        if self.echo is None:
            return 0.0
        times = 2 if self.echo.moe_echo_recompute_expert_dispatch else 1
        return float(self._clone_elements(parallel) * (times * sizes.activation_itemsize + sizes.internal_itemsize))

    def rows(self, parallel: ParallelConfig, num_tokens: int, imbalance: float = 1.0) -> float:
        """Number of rows R (pairs of token and selected expert, and padding) that the experts of the most loaded rank
        process for one microbatch with `num_tokens` tokens per rank. With expert parallelism, R is `imbalance` times
        the balanced load, with three exceptions: padding to the expert capacity makes R constant, the all-gather
        dispatcher allocates buffers for the largest possible R, and the flex dispatcher for the R of
        `--moe-expert-rank-capacity-factor`. Blocks of `row_alignment` rows add the padding of any routing to R.
        """
        ranks, router = parallel.ep * parallel.etp, self.router
        local = router.num_experts // parallel.ep
        if self.capacity is not None and self.capacity.pad:
            return ranks * local * router.expert_capacity(num_tokens, self.capacity.factor)
        most: float = ranks * num_tokens * min(router.topk, local)
        bound = self.transport(parallel).rows
        if bound is RowBound.ANY_ROUTING:
            return most
        rows = parallel.etp * num_tokens * router.topk * (imbalance if parallel.ep > 1 else 1.0)
        if bound is RowBound.BOUNDED:
            factor = self.expert_rank_capacity_factor
            rows = most if factor is None else min(most, int(factor * parallel.etp * num_tokens * router.topk))
        return most_rows(int(rows), local, self.row_alignment) if self.row_alignment > 1 else rows

    def expected_rows(self, parallel: ParallelConfig, num_tokens: int) -> ExpectedRows | None:
        router, align = self.router, self.row_alignment
        if "expert_choice" in router.balancing:
            return None
        capacity = None if self.capacity is None else router.expert_capacity(num_tokens, self.capacity.factor)
        ranks, local = parallel.ep * parallel.etp, router.num_experts // parallel.ep
        share = router.topk / router.num_experts
        per_rank, pads = num_tokens * share, self.capacity is not None and self.capacity.pad
        if capacity is not None:
            accepted = capacity
            per_rank = accepted - binomial_mean(lambda count: max(accepted - count, 0), num_tokens, share)
        routed = computed = ranks * local * per_rank
        if capacity is not None and pads and self.transport(parallel).computes_padding:
            computed = float(local * (ceil(ranks * capacity / align) * align))
        elif align > 1 and not pads:
            computed += local * binomial_mean(lambda count: -count % align, ranks * num_tokens, share)
        return ExpectedRows(routed=routed, computed=computed, allocated=max(computed, self.rows(parallel, num_tokens)))

    def parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        yield from self.router.parameters(parallel)
        fields: dict[str, Any] = {"active_experts": self.router.topk, "recomputed_by": ("moe",)}
        for spec in self.experts.parameter_specs(parallel, counted="experts", low="experts", **fields):
            yield spec.named(f"experts.{spec.name}")
        for spec in () if self.shared is None else self.shared.parameters(parallel):
            yield spec.named(f"shared_experts.{spec.name}")
        if self.latent_size is not None:
            hidden, latent = self.router.hidden_size, self.latent_size
            fields = {"counted": "latent", "low": "experts", "recomputed_by": ("moe",)}
            yield from linear_parameters("fc1_latent_proj", (latent, hidden), parallel, **fields)
            yield from linear_parameters("fc2_latent_proj", (hidden, latent), parallel, init="output", **fields)

    def saved_tensors(self, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        shared = () if self.shared is None else self.shared.saved_tensors(parallel, sizes)
        for each in (*self.router.saved_tensors(sizes), *self._saved_by_experts(parallel, sizes), *shared):
            yield replace(each, recomputed_by=(*each.recomputed_by, "moe"))

    def _saved_by_experts(self, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        """Tensors that routed experts save. The output of fc2 is saved only with `probs_on_output`."""
        experts, size, tensor = self.experts, sizes.activation_itemsize, partial(saved_tensor, "experts")
        rows, hidden = self.rows(parallel, sizes.residual, sizes.imbalance), experts.hidden_size
        factor, ffn = experts.activation.fc1_width_factor, experts.ffn_hidden_size // parallel.etp
        clones = self._clone_elements(parallel)
        if clones and self.echo is not None and not self.echo.moe_echo_recompute_expert_dispatch:
            yield tensor("weights of clones", "3 F H" if factor == 2 else "2 F H", clones, size)
        if not self.transport(parallel).delivers_tokens:
            yield tensor("row index", "R", rows * 2, INDEX)
        yield tensor("probabilities", "R", rows, self.router.probability_bytes(sizes))
        num_local = self.router.num_experts // parallel.ep
        even = {"even_rows": parallel.etp * sizes.residual * self.router.topk}
        even["padding_rows"] = num_local * (self.row_alignment - 1)
        padded = {"low": "experts", "rows_of_experts": (int(rows), num_local)}
        fused = {"fused_bytes": 0} if experts.supports_fused_casts else {}
        gathered = self._gathered_bytes(parallel, sizes)
        marks = {**even, **padded, "gathered_bytes": gathered, "row_width": hidden, "offloaded_by": "expert_fc1"}
        yield tensor("rows", "R H", rows * hidden, size, marks)
        marks = {**even, "row_width": factor * ffn, "offloaded_by": "moe_act", "is_activation_input": bool(fused)}
        yield tensor("fc1 output", "R 2F" if factor == 2 else "R F", rows * factor * ffn, size, marks)
        marks = {**even, **padded, **fused, "row_width": ffn, "recomputed_by": ("moe_act",)}
        yield tensor("activation", "R F", rows * ffn, size, marks)
        if experts.probs_on_output:
            yield tensor("results before their probability", "R H", rows * hidden, size)
        if experts.probs_on_input:
            yield tensor("rows before their probability", "R H", rows * hidden, sizes.internal_itemsize)
        if self.latent_size:
            yield tensor("latent sum", "T L", sizes.residual * self.latent_size, size, {"low": "experts"})

    def _gathered_bytes(self, parallel: ParallelConfig, sizes: ActivationSizes) -> int | None:
        """See `SavedActivation.gathered_bytes`."""
        ranks = self.transport(parallel).ranks_gathered_in_fc1(parallel.ep * parallel.etp)
        size = sizes.residual * self.experts.hidden_size * sizes.activation_itemsize
        return None if ranks is None or not self.experts.supports_fused_casts else ranks * size

    def backward_workspace(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        """Peak bytes in the backward of routed and shared experts, without the buffers of the token dispatcher. Clones
        add their weight gradients, as sent and as received by the home ranks of their experts."""
        shared = 0.0 if self.shared is None else self.shared.mlp.backward_workspace(parallel, sizes, low)
        clones = 2.0 * self._clone_elements(parallel) * sizes.internal_itemsize
        return max(self._workspace_of_experts(parallel, sizes, low) + clones, shared)

    def _workspace_of_experts(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        """Peak bytes of routed experts: gradient of fc1's output plus the larger of the gradients of fc2's and fc1's
        input. With fused casts: the activation, gradients of the outputs of fc2, the activation and fc1, and their FP8
        copies. With FP8 weight gradients, most of them exist in FP8 only, on one rank also the gradient of fc2's
        output. Fused casts also restore an activation input that was saved in FP8."""
        experts, size = self.experts, sizes.activation_itemsize
        rows = self.rows(parallel, sizes.residual, sizes.imbalance)
        ffn, hidden = experts.ffn_hidden_size // parallel.etp, experts.hidden_size
        factor = experts.activation.fc1_width_factor
        if low is None or low.fused_block is None or not experts.supports_fused_casts:
            return rows * size * (factor * ffn + max(ffn, hidden))
        copied, wide = hidden + factor * ffn, hidden + (2 + factor) * ffn
        if low.of_experts.weight_grad:
            copied, wide = 2 * copied + ffn, ffn + (0 if parallel.ep * parallel.etp == 1 else hidden)
        if low.activation_inputs:
            wide += factor * ffn
        return rows * (size * wide + bytes_per_fp8_element(low) * copied)

    def delayed_wgrad_bytes(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        """Bytes of the inputs and output gradients of fc1 and fc2, which delayed weight gradients keep."""
        experts, rows = self.experts, self.rows(parallel, sizes.residual, sizes.imbalance)
        hidden, tokens = 2 * experts.hidden_size, 0.0
        ffn = (1 + experts.activation.fc1_width_factor) * (experts.ffn_hidden_size // parallel.etp)
        gathered = self._gathered_bytes(parallel, sizes) if low is not None and low.fused_block else None
        if gathered == 0:  # the gradient of fc2's output is kept as tokens too
            tokens, hidden = float(sizes.residual * hidden * sizes.activation_itemsize), 0
        elif gathered and low is not None and not low.of_experts.weight_grad:
            tokens, hidden = float(gathered), experts.hidden_size
        if low is not None and low.of_experts.weight_grad:
            padding = row_padding_factor(low, int(rows), self.router.num_experts // parallel.ep)
            return tokens + rows * (hidden + ffn) * bytes_per_fp8_element(low) * padding
        return tokens + rows * (hidden + ffn) * sizes.activation_itemsize

    def layout_problem(self, parallel: ParallelConfig) -> str | None:
        experts = self.experts
        return (
            indivisible("--expert-model-parallel-size", parallel.ep, experts.num_experts, "expert")
            or indivisible("--expert-tensor-parallel-size", parallel.etp, experts.ffn_hidden_size, "expert channel")
            or (self.shared.mlp.layout_problem(parallel) if self.shared else None)
        )

    def gemm_sizes(self, parallel: ParallelConfig) -> Iterator[tuple[str, int, int]]:
        if self.latent_size is not None:
            yield "--moe-latent-size", self.latent_size, 1
        yield "--moe-ffn-hidden-size", self.experts.ffn_hidden_size, parallel.etp
        if self.shared is not None:
            yield "--moe-shared-expert-intermediate-size", self.shared.mlp.ffn_hidden_size, parallel.tp

    def name_rules(self, model_type: str) -> Iterator[NameRule]:
        num = self.experts.num_experts
        if model_type == "gpt_oss":
            for kind in ("weight", "bias"):
                yield NameRule(f"router.{kind}", (f"mlp.router.{kind}",))
            first = ("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias")
            yield NameRule("experts.linear_fc1.weight", first[:1], "interleaved_gate_up")
            yield NameRule("experts.linear_fc1.bias", first[1:], "interleaved_gate_up")
            yield NameRule("experts.linear_fc2.weight", ("mlp.experts.down_proj",), "transposed")
            yield NameRule("experts.linear_fc2.bias", ("mlp.experts.down_proj_bias",))
        elif model_type in ("mixtral", "minimax_m2", "kimi_linear"):
            gate = "gate." if model_type == "kimi_linear" else ""
            yield NameRule("router.weight", ("block_sparse_moe.gate.weight",))
            yield NameRule("router.expert_bias", (f"block_sparse_moe.{gate}e_score_correction_bias",))
            yield from mlp_names("experts.", "block_sparse_moe.experts.{e}", ("w1", "w3", "w2"), num)
            if gate:
                yield from mlp_names("shared_experts.", "block_sparse_moe.shared_experts")
        elif model_type == "nemotron_h":
            yield from ungated_mlp_names("experts.", "mixer.experts.{e}", num)
            yield from ungated_mlp_names("shared_experts.", "mixer.shared_experts")
            for name in ("fc1_latent_proj.weight", "fc2_latent_proj.weight"):
                yield NameRule(name, (f"mixer.{name}",))
            yield NameRule("router.weight", ("mixer.gate.weight",))
            yield NameRule("router.expert_bias", ("mixer.gate.e_score_correction_bias",))
        elif model_type == "deepseek_v4":
            yield NameRule("router.weight", ("ffn.gate.weight",))
            yield NameRule("router.expert_bias", ("ffn.gate.bias",))
            yield NameRule("router.expert_table", ("ffn.gate.tid2eid",), "vocabulary")
            for name, hf_name, number in (("experts.", "experts.{e}", num), ("shared_experts.", "shared_experts", 0)):
                yield from mlp_names(name, f"ffn.{hf_name}", ("w1", "w3", "w2"), number)
        else:
            yield NameRule("router.weight", ("mlp.gate.weight",))
            yield from mlp_names("experts.", "mlp.experts.{e}", num_experts=num)
            shared = "mlp.shared_expert" if model_type.startswith("qwen") else "mlp.shared_experts"
            yield from mlp_names("shared_experts.", shared)
            yield NameRule("shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",))
            if model_type == "ernie4_5_moe":
                yield NameRule("router.expert_bias", ("mlp.moe_statics.e_score_correction_bias",), "row")
            else:
                yield NameRule("router.expert_bias", ("mlp.gate.e_score_correction_bias",))
