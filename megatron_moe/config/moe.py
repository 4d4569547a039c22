"""What a feed-forward block is, dense or Mixture-of-Experts: narrow frozen specs, no torch."""

from dataclasses import dataclass
from typing import Literal

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu"]
ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
Balancing = Literal[
    "none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "expert_choice"
]


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """act(gate) * (up + offset) when gated, act(x) when not."""

    kind: ActivationKind = "gelu"
    gated: bool = False
    clamp: float | None = None
    """gate clamped to at most c, up to [-c, c], before the activation."""
    linear_offset: float = 0.0
    """Added to up (GPT-OSS: 1)."""

    @property
    def fan(self) -> int:
        """Width of the first matrix in units of the ffn width."""
        return 2 if self.gated else 1


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """A dense feed-forward block, also a shared expert."""

    hidden_size: int
    ffn_hidden_size: int
    activation: ActivationConfig
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Given tokens, choose k experts each and with what weight."""

    hidden_size: int
    num_experts: int
    topk: int
    score_function: ScoreFunction = "softmax"
    pre_softmax: bool = False
    num_groups: int | None = None
    group_topk: int | None = None
    scaling_factor: float | None = None
    expert_bias: bool = False
    """Aux-loss-free balancing (arXiv 2408.15664): a bias on the selection scores, moved once per global batch."""
    bias_update_rate: float = 1e-3
    balancing: tuple[Balancing, ...] = ("none",)
    aux_loss_coeffs: tuple[float, ...] = (0.0,)
    """One per entry of `balancing`."""
    z_loss_coeff: float | None = None
    input_jitter_eps: float | None = None
    dtype: Literal["fp32", "fp64"] | None = None
    """Of the gate matrix product; None: the activation dtype."""
    force_balancing: bool = False
    force_biased: float | None = None
    linear_bias: bool = False
    """A learned bias on the gate matrix (GPT-OSS)."""
    quantile_ema: float = 0.0
    """Weight of the old value in the update of the quantile thresholds."""


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """How many tokens one expert takes at most from one rank's microbatch. The spec is absent when dropless."""

    factor: float
    policy: Literal["probs", "position"] = "probs"
    pad: bool = False
    """Every expert gets exactly its capacity (`--moe-pad-expert-input-to-capacity`)."""


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The routed experts: one MLP each."""

    num_experts: int
    hidden_size: int
    """Input and output width: the latent width when the experts run in a latent space."""
    ffn_hidden_size: int
    activation: ActivationConfig
    bias: bool = False
    grouped: bool = True
    """One grouped matrix product over all experts (`--moe-grouped-gemm`), or a loop over them."""
    probs_on_input: bool = False
    """Multiply the rows by their probability before the first matrix instead of before the second (k = 1 only)."""
    probs_on_output: bool = False
    """Multiply the rows by their probability after the second matrix, whose results are then kept for the backward: the
    standard permutation."""


@dataclass(frozen=True, kw_only=True)
class SharedExpertsConfig:
    """An ordinary MLP that every token visits, with an optional sigmoid gate per token."""

    mlp: MLPConfig
    gate: bool = False


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The MoE layer: route -> dispatch -> experts -> combine (+ shared experts)."""

    router: RouterConfig
    experts: ExpertsConfig
    capacity: CapacityConfig | None = None
    shared: SharedExpertsConfig | None = None
    latent_size: int | None = None
    dispatcher: Literal["local", "allgather", "alltoall", "flex"] = "local"
    """How rows reach experts on other ranks. Without other ranks every kind is the local one."""
    shared_overlap: bool = False
    """Shared experts work while rows travel; not with a latent space. The numbers are the same."""
