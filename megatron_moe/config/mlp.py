"""Dense feed-forward module and its activation function."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from megatron_moe.config.component import FeedForwardConfig, NameRule, ParamSpec, indivisible, linear_parameters
from megatron_moe.config.costs import ActivationSizes, QuantizedCopyBytes, SavedActivation, saved_tensor
from megatron_moe.config.functions import Options
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.precision import LowPrecisionConfig

_SWITCHES = MappingProxyType(
    {
        (True, "silu"): "swiglu",
        (True, "quick_gelu"): "quick_geglu",
        (True, "gelu"): "geglu",
        (False, "squared_relu"): "squared_relu",
        (False, "gelu_tanh"): "openai_gelu",
    }
)
"""(gated, kind) -> flag that selects the activation."""
_DEFAULT = (False, "gelu")


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """Activation function: act(gate) * (up + linear_offset) if gated, else act(x)."""

    kind: str = "gelu"
    """Name of the function act in registry `ACTIVATIONS`."""
    gated: bool = False
    clamp: float | None = None
    """Limit c (`--activation-func-clamp-value`): the gate projection is clamped to (-inf, c] and the up projection to
    [-c, c]; None means no clamping."""
    linear_offset: float = 0.0
    """Offset that is added to the up projection (`--glu-linear-offset`). GPT-OSS uses 1."""
    options: Options = ()
    """Values of the flags that the function requests."""

    def as_flags(self) -> dict[str, Any]:
        """See `Component.as_flags`."""
        selected = (self.gated, self.kind)
        named = selected not in (_DEFAULT, *_SWITCHES)
        return {
            **{switch: selected == each for each, switch in _SWITCHES.items()},
            "activation_func": self.kind if named else None,
            "gated_linear_unit": self.gated and named,
            "glu_linear_offset": self.linear_offset,
            "activation_func_clamp_value": self.clamp,
            **dict(self.options),
        }

    @property
    def fc1_width_factor(self) -> int:
        """Output width of fc1 as a multiple of the ffn width."""
        return 2 if self.gated else 1


@dataclass(frozen=True, kw_only=True)
class MLPConfig(FeedForwardConfig):
    """A dense feed-forward block, or the shared experts of an MoE layer."""

    hidden_size: int
    ffn_hidden_size: int
    """Inner width (`--ffn-hidden-size`, `--moe-ffn-hidden-size` or `--moe-shared-expert-intermediate-size`)."""
    activation: ActivationConfig
    bias: bool = False
    """Adds biases to fc1 and fc2 (`--add-bias-linear`)."""

    module: ClassVar[str] = "megatron_moe.layers.mlp:MLP"
    registered_as: ClassVar[str] = "mlp"
    selecting_flags: ClassVar[Mapping[str, Any]] = MappingProxyType({"moe_layer_freq": False})

    def as_flags(self) -> dict[str, Any]:
        width = {"ffn_hidden_size": self.ffn_hidden_size, "add_bias_linear": self.bias}
        return {**width, **self.activation.as_flags()}

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        return ("mlp",)

    def matrices(self) -> tuple[tuple[str, tuple[int, int], dict[str, Any]], ...]:
        """Returns (name, shape (outputs, inputs), options of `linear_parameters`) of the two matrices."""
        hidden, ffn, factor = self.hidden_size, self.ffn_hidden_size, self.activation.fc1_width_factor
        return (
            ("linear_fc1", (factor * ffn, hidden), {"tp_dim": 0, "splits": (ffn,) * factor}),
            ("linear_fc2", (hidden, ffn), {"tp_dim": 1, "init": "output"}),
        )

    def parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        return self.parameter_specs(parallel, counted="dense_mlp", low="mlp", recomputed_by=("mlp",))

    def parameter_specs(self, parallel: ParallelConfig, **fields: Any) -> Iterator[ParamSpec]:
        """Parameters of the MLP. `fields`: further fields of each `ParamSpec`."""
        for name, shape, options in self.matrices():
            yield from linear_parameters(name, shape, parallel, bias=self.bias, **fields, **options)

    def saved_input_fields(self, parallel: ParallelConfig) -> Mapping[str, Any]:
        return {"low": "" if parallel.sequence_parallel else "mlp"}

    def saved_tensors(self, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        return self.saved_tensors_as("mlp", "mlp", parallel, sizes)

    def saved_tensors_as(
        self, module: str, recomputed_by: str, parallel: ParallelConfig, sizes: ActivationSizes
    ) -> Iterator[SavedActivation]:
        """Tensors that an MLP saves. `module`: its name in reports. `recomputed_by`: value of `--recompute-modules`
        that recomputes it."""
        ffn, factor = self.ffn_hidden_size // parallel.tp, self.activation.fc1_width_factor
        mark = {"recomputed_by": (recomputed_by,)}
        fused: dict[str, object] = {} if self.bias else {"fused_bytes": 0}
        shape, marks = "U 2F" if factor == 2 else "U F", {**mark, "is_activation_input": not self.bias}
        yield saved_tensor(module, "fc1 output", shape, sizes.inner * factor * ffn, sizes.activation_itemsize, marks)
        marks = {**mark, **fused, "low": recomputed_by}
        yield saved_tensor(module, "activation", "U F", sizes.inner * ffn, sizes.activation_itemsize, marks)

    def backward_workspace(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        """Peak bytes over the groups of tensors that exist at the same time: (gathered output gradient, its copies,
        gradient of fc2's input), (gradients of fc2's input and of fc1's output), (gathered input, its copy, gradient of
        fc1's output and its copies). With fused casts, the first two exist at the same time, with the activation and
        its columnwise copy, and the activation input if it was saved in FP8."""
        tokens, gathered, copies = sizes.inner, sizes.gathered_bytes_per_channel(parallel), QuantizedCopyBytes.of(low)
        hidden, ffn, factor = self.hidden_size, self.ffn_hidden_size // parallel.tp, self.activation.fc1_width_factor
        activation_grads: float = tokens * (1 + factor) * ffn * sizes.activation_itemsize
        outer = (gathered + tokens * copies.grad) * hidden + tokens * ffn * sizes.activation_itemsize
        inner = (gathered + (tokens * copies.column if gathered else 0)) * hidden
        if low is not None and low.fused_block is not None and not self.bias:
            activation_grads += outer + tokens * ffn * (copies.column + factor * copies.row)
            if low.activation_inputs:
                activation_grads += tokens * factor * ffn * sizes.activation_itemsize
        return max(activation_grads, outer, inner + tokens * factor * ffn * (sizes.activation_itemsize + copies.grad))

    def layout_problem(self, parallel: ParallelConfig) -> str | None:
        return indivisible("--tensor-model-parallel-size", parallel.tp, self.ffn_hidden_size, "feed-forward channel")

    def gemm_sizes(self, parallel: ParallelConfig) -> Iterator[tuple[str, int, int]]:
        yield "--ffn-hidden-size", self.ffn_hidden_size, parallel.tp

    def name_rules(self, model_type: str) -> Iterator[NameRule]:
        if model_type == "nemotron_h":
            return ungated_mlp_names("", "mixer")
        return mlp_names("", "mlp")


def mlp_names(
    name: str, hf_name: str, matrices: Sequence[str] = ("gate_proj", "up_proj", "down_proj"), num_experts: int = 0
) -> Iterator[NameRule]:
    """Hugging Face names of a gated MLP `name` (empty, or with a dot at the end)."""
    gate, up, down = (f"{hf_name}.{matrix}.weight" for matrix in matrices)
    yield NameRule(f"{name}linear_fc1.weight", (gate, up), "gate_up", num_experts=num_experts)
    yield NameRule(f"{name}linear_fc2.weight", (down,), num_experts=num_experts)


def ungated_mlp_names(name: str, hf_name: str, num_experts: int = 0) -> Iterator[NameRule]:
    """Hugging Face names of an MLP `name` without a gate, in the form of `mlp_names`."""
    yield NameRule(f"{name}linear_fc1.weight", (f"{hf_name}.up_proj.weight",), num_experts=num_experts)
    yield NameRule(f"{name}linear_fc2.weight", (f"{hf_name}.down_proj.weight",), num_experts=num_experts)
