"""Dense feed-forward module and its activation function."""

from dataclasses import dataclass, replace

from megatron_moe.config.functions import Options
from megatron_moe.config.parallel import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """Activation function: act(gate) * (up + linear_offset) if gated, else act(x)."""

    kind: str = "gelu"
    """Name of the function act in registry `ACTIVATIONS`."""
    gated: bool = False
    clamp: float | None = None
    """Limit c (`--activation-func-clamp-value`): the gate projection is clamped to (-inf, c] and the up projection to
    [-c, c]; None: no clamping."""
    linear_offset: float = 0.0
    """Offset that is added to the up projection (`--glu-linear-offset`). GPT-OSS uses 1."""
    options: Options = ()
    """Flags that the function requests."""

    @property
    def fan(self) -> int:
        """Output width of fc1 as a multiple of the ffn width."""
        return 2 if self.gated else 1


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """A dense feed-forward block, or the shared experts of an MoE layer."""

    hidden_size: int
    ffn_hidden_size: int
    """Inner width (`--ffn-hidden-size`, `--moe-ffn-hidden-size` or `--moe-shared-expert-intermediate-size`)."""
    activation: ActivationConfig
    bias: bool = False
    """Adds biases to fc1 and fc2 (`--add-bias-linear`)."""

    @property
    def matrix_elements(self) -> int:
        """Number of elements of fc1 and fc2, without biases."""
        return (self.activation.fan + 1) * self.ffn_hidden_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """Number of elements of fc1 and fc2, including biases."""
        biases = self.activation.fan * self.ffn_hidden_size + self.hidden_size
        return self.matrix_elements + (biases if self.bias else 0)

    def shard(self, parallel: ParallelConfig) -> "MLPConfig":
        """Config of one tensor-parallel rank's shard: 1 / tp of the ffn channels."""
        return replace(self, ffn_hidden_size=self.ffn_hidden_size // parallel.tp)
