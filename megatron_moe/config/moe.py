"""Mixture of Experts: router, experts, shared experts and token dispatch."""

from dataclasses import dataclass, replace
from typing import Literal

from megatron_moe.config.functions import Balancing, Options, ScoreFunction
from megatron_moe.config.mlp import MLPConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.precision import LowPrecisionConfig, OperandFormat
from megatron_moe.config.registry import BALANCING, SCORE_FUNCTIONS
from megatron_moe.config.transport import ExpertTransport, TransportChoice, choose_transport


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
    """Number of expert groups in group-limited routing (arXiv 2412.19437 section 2.1.2); None: no group limit."""
    group_topk: int | None = None
    """Number of groups from which a token may select experts."""
    scaling_factor: float | None = None
    """Factor on the probabilities of the selected experts (`--moe-router-topk-scaling-factor`)."""
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
    """Number format of the router's linear layer (`--moe-router-dtype`); None: the format of the activations."""
    force_balancing: bool = False
    """Replaces the logits by random ones, to benchmark even load (`--moe-router-force-load-balancing`)."""
    force_biased: float | None = None
    """Replaces logits by random ones plus a random bias per expert, to benchmark uneven load. This number is the
    standard deviation of the biases. If it is negative, they are drawn only once (`--moe-router-force-biased`)."""
    force_skew: float | None = None
    """Replaces logits by random ones, to benchmark uneven load: the load of the busiest expert over the mean load
    (`--moe-router-force-skew`). Expert popularity is log-normal, in an order drawn for every step and layer."""
    linear_bias: bool = False
    """Adds a learned bias to the router's linear layer, as in GPT-OSS (`--add-bias-linear`)."""
    quantile_ema: float = 0.0
    """Weight of old thresholds in quantile balancing's moving average (`--moe-router-quantile-balancing-ema`)."""

    options: Options = ()
    """Flags that the score function, the balancing losses and registered metrics request."""

    @property
    def scores(self) -> ScoreFunction:
        entry: ScoreFunction = SCORE_FUNCTIONS.get(self.score_function)
        return entry

    @property
    def selects_on_logits(self) -> bool:
        """Whether experts are selected by their logits, and the score function is applied to the selected ones only."""
        return self.scores.over_experts and not self.pre_softmax

    @property
    def balancing_losses(self) -> tuple[tuple[Balancing, float], ...]:
        """(loss, coefficient) of the balancing losses whose coefficient is not 0, in order of registration."""
        coeffs = dict(zip(self.balancing, self.aux_loss_coeffs, strict=True))
        entries = [(BALANCING.get(name), coeffs[name]) for name in BALANCING.names() if coeffs.get(name)]
        return tuple((entry, coeff) for entry, coeff in entries if entry.function is not None)

    @property
    def forced_by(self) -> str:
        """Flag that replaces the router's logits by random ones; empty if the router selects the experts."""
        options = {
            "--moe-router-force-load-balancing": self.force_balancing,
            "--moe-router-force-biased": self.force_biased is not None,
            "--moe-router-force-skew": self.force_skew is not None,
        }
        return next((option for option, is_on in options.items() if is_on), "")


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """Expert capacity: maximum number of tokens that one expert accepts from one rank's microbatch."""

    factor: float
    """Capacity, as a multiple of the number of tokens per expert at an even load (`--moe-expert-capacity-factor`)."""
    policy: Literal["probs", "position"] = "probs"
    """Tokens that a full expert keeps: those of highest probability, or the earliest (`--moe-token-drop-policy`)."""
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


@dataclass(frozen=True, kw_only=True)
class SharedExpertsConfig:
    """Shared experts: one MLP that processes every token, with an optional sigmoid gate per token."""

    mlp: MLPConfig
    gate: bool = False

    @property
    def num_params(self) -> int:
        """Number of parameters of the MLP and the gate."""
        return self.mlp.num_params + (self.mlp.hidden_size if self.gate else 0)


DEEPEP_SMS = 20
"""Multiprocessors of DeepEP's kernels by default."""


@dataclass(frozen=True, kw_only=True)
class HybridEPConfig:
    """Settings of the HybridEP library (`--moe-flex-dispatcher-backend hybridep`): the branch of DeepEP that has
    `deep_ep.HybridEPBuffer`. None: the library's default."""

    fuse_permute: bool = False
    """Sorts rows in the kernels that send and receive them (`--moe-permute-fusion-into-hybridep`)."""
    num_blocks_permute: int | None = None
    num_blocks_unpermute: int | None = None
    num_sms_preprocessing: int | None = None


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """An MoE layer: router, token dispatch, experts, combine, and optional shared experts."""

    router: RouterConfig
    experts: ExpertsConfig
    capacity: CapacityConfig | None = None
    """Limit on tokens per expert; None: no token is dropped."""
    shared: SharedExpertsConfig | None = None
    latent_size: int | None = None
    """Width to which hidden states are projected for the routed experts (`--moe-latent-size`); None: no projection."""
    dispatcher: Literal["local", "allgather", "alltoall", "flex"] = "local"
    """Token dispatcher (`--moe-token-dispatcher-type`). A single expert-parallel rank always uses "local"."""
    transport_backend: str = "auto"
    """Requested transport (`--moe-flex-dispatcher-backend`, or `--moe-alltoall-backend` for "alltoall")."""
    expert_rank_capacity_factor: float | None = None
    """Bound of the rows of a rank's experts relative to the even share, for the flex dispatcher
    (`--moe-expert-rank-capacity-factor`); None: what no routing exceeds."""
    flex_dispatcher_num_sms: int | None = None
    """Multiprocessors of a push (`--moe-flex-dispatcher-num-sms`); None: all."""
    hybridep: HybridEPConfig = HybridEPConfig()
    fp8_dispatch: bool = False
    """Dispatch sends the tokens of layers with FP8 experts as the bytes that fc1 multiplies
    (`--moe-dispatch-fwd-dtype`)."""
    fp8_combine_grad: bool = False
    """The backward of combine sends the gradients of layers with FP8 experts as the bytes that the backward of fc2
    multiplies (`--moe-combine-bwd-dtype`)."""
    row_alignment: int = 1
    """Multiple to which the rows of an expert are padded (`--moe-router-padding-for-quantization`)."""
    shared_overlap: bool = False
    """Overlaps shared experts with dispatch and combine (`--moe-shared-expert-overlap`); `latent_size` must be None."""

    def choose_transport(self, parallel: ParallelConfig, *, has_peer_access: bool = True) -> TransportChoice:
        """Transport over the ranks of `parallel`; see the function."""
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
        )

    def transport(self, parallel: ParallelConfig) -> ExpertTransport:
        """Transport over the ranks of `parallel`."""
        return self.choose_transport(parallel).transport

    def exchange_formats(
        self, low_precision: LowPrecisionConfig | None
    ) -> tuple[OperandFormat | None, OperandFormat | None]:
        """FP8 formats in which the flex dispatcher sends tokens and gradients of a layer with this recipe; None: in the
        format of the activations."""
        if low_precision is None or low_precision.fused_block is None:
            return None, None
        tokens, grads = low_precision.inputs, low_precision.grads
        return tokens if self.fp8_dispatch else None, grads if self.fp8_combine_grad else None

    @property
    def latent_elements(self) -> int:
        """Number of weight elements of the projections into and out of the latent space."""
        return 2 * self.router.hidden_size * self.latent_size if self.latent_size else 0

    def shard(self, parallel: ParallelConfig) -> "MoEConfig":
        """Config of one rank's shard: experts sharded over ep, their channels over etp, shared experts over tp."""
        experts = replace(
            self.experts,
            num_experts=self.experts.num_experts // parallel.ep,
            ffn_hidden_size=self.experts.ffn_hidden_size // parallel.etp,
        )
        shared = self.shared and replace(self.shared, mlp=self.shared.mlp.shard(parallel))
        return replace(self, experts=experts, shared=shared)
