"""Number formats of parameters, gradients, optimizer state and GEMMs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from megatron_moe.config.registry import ELEMENTS, QUANTIZATION_RECIPES

FloatName = Literal["fp64", "fp32", "bf16", "fp16"]
StateName = Literal["fp32", "bf16", "fp16", "fp8"]
ActivationModule = Literal["qkv_linear", "attn_proj", "mlp", "experts", "shared_experts", "mtp"]
ACTIVATION_MODULES: tuple[ActivationModule, ...] = get_args(ActivationModule)
LinearRole = ActivationModule | Literal["expert_latent", "head"]
"""Role of a linear layer in the model. "mtp": a layer of multi-token prediction outside of its transformer layer;
"expert_latent": a projection into or out of the latent space of routed experts."""

WHOLE = (0, 0)
"""Value of `OperandFormat.block` for formats with one scale per matrix."""


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """Number format of quantised elements, registered in `ELEMENTS`."""

    dtype: str
    """torch dtype of the stored elements, in the form "torch:int8"."""
    largest: float
    """Largest number; larger ones saturate."""
    bits: int = 8
    """Bits per element. Several E2M1 elements share a byte."""
    is_integer: bool = False
    """Whether casts to the dtype truncate, so that values must be rounded to nearest first."""


ELEMENTS.register("e4m3", ElementFormat(dtype="torch:float8_e4m3fn", largest=448.0))
ELEMENTS.register("e5m2", ElementFormat(dtype="torch:float8_e5m2", largest=57344.0))
ELEMENTS.register("e2m1", ElementFormat(dtype="torch:uint8", largest=6.0, bits=4))


@dataclass(frozen=True, kw_only=True)
class OperandFormat:
    """Low-precision format of one kind of GEMM operand: inputs, weights or output gradients."""

    element: str
    """Name of the element format in registry `ELEMENTS`."""
    block: tuple[int, int]
    """Shape of the blocks that share a scale: (1, n) along the GEMM's reduction dim, (n, n), or `WHOLE`."""
    scale: Literal["fp32", "power of 2", "e8m0", "e4m3"]
    """Format of the scales. e8m0 (mxfp8): a biased exponent; e4m3 (nvfp4): multiplied by an fp32 scale per tensor."""
    hadamard: bool = False
    """Applies a 16x16 random Hadamard transform to the columnwise copy before it is quantised (nvfp4)."""
    stochastic: bool = False
    """Rounds stochastically instead of to nearest (nvfp4)."""

    @property
    def bits(self) -> int:
        """Bits per element."""
        element: ElementFormat = ELEMENTS.get(self.element)
        return element.bits

    @property
    def scale_bytes(self) -> float:
        """Bytes of scales per element; one scale per matrix is not counted."""
        each = 1 if self.scale in ("e8m0", "e4m3") else 4
        return 0.0 if self.block == WHOLE else each / (self.block[0] * self.block[1])

    @property
    def bytes_per_element(self) -> float:
        """Bytes per element of one copy, with its scales."""
        return self.bits / 8 + self.scale_bytes

    def can_store_weights(self, width: int) -> bool:
        """Whether weights with rows of `width` elements are stored in this format. Rows in E2M1 must be whole blocks,
        because GEMMs read padded rows of packed elements."""
        return self.element != "e2m1" or width % self.block[1] == 0

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` FP8 elements and of the scales of its blocks."""
        return width + -(-width // self.block[1]) * (1 if self.scale == "e8m0" else 4)


@dataclass(frozen=True, kw_only=True)
class LowPrecisionConfig:
    """Scaling recipe of FP8 or FP4 GEMMs and the layers to which it applies."""

    recipe: str
    """Name in registry `QUANTIZATION_RECIPES`."""
    inputs: OperandFormat
    """Format of the inputs of linear layers."""
    weights: OperandFormat
    grads: OperandFormat
    """Format of the output gradients of linear layers."""
    weight_grad: bool = True
    """Computes weight gradients from columnwise FP8 or FP4 copies. If False, computes them in the format of the
    parameters, from the unquantised inputs and gradients."""
    expert_weight_grad: bool = True
    """Includes the weight gradients of routed experts in `weight_grad` (`--fp8-expert-wgrad`)."""
    activation_modules: tuple[ActivationModule, ...] = ACTIVATION_MODULES
    """Modules whose linear layers save their inputs in low precision for the weight gradient, where this takes less
    memory than the unquantised inputs (`--low-precision-activation-modules`). Other modules save unquantised inputs."""
    activation_inputs: bool = False
    """Saves the inputs of the activations of MLPs and experts in low precision, from which backward computes the
    activation and its gradient (`--activation-func-fp8-input-store`). Requires `fused_block`."""
    output_layer: bool = False
    """Also computes the output layer in low precision."""
    layers_at_start: int = 0
    """Number of layers at the start of the decoder whose GEMMs use the format of the parameters."""
    layers_at_end: int = 0
    """Number of layers at the end of the decoder whose GEMMs use the format of the parameters."""
    margin: int = 0
    """Divides the scales of delayed scaling by 2^margin (`--fp8-margin`)."""
    amax_history_len: int = 1
    """Number of steps whose largest magnitudes delayed scaling keeps (`--fp8-amax-history-len`)."""
    amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """Magnitude in the history from which the scale is computed (`--fp8-amax-compute-algo`)."""
    emulate: bool = False
    """Computes GEMMs from dequantised operands, on devices without the format (`--emulate-low-precision`)."""

    @property
    def fused_block(self) -> int | None:
        """Block length of FP8 formats with scales per block of a row, to which ops can quantise their results; None for
        other formats."""
        is_fused = self.inputs.block[0] == self.grads.block[0] == 1 and self.inputs.element != "e2m1"
        return self.inputs.block[1] if is_fused else None

    def covers(self, layer: int, num_layers: int) -> bool:
        """Whether the decoder layer with index `layer` uses the recipe: the first and last layers may be left in
        bf16."""
        return self.layers_at_start <= layer < num_layers - self.layers_at_end

    @property
    def of_experts(self) -> "LowPrecisionConfig":
        """Recipe of the routed experts, which compute weight gradients in low precision only if
        `expert_weight_grad`."""
        return self if self.expert_weight_grad else replace(self, weight_grad=False)

    @property
    def name(self) -> str:
        """Formats recipe and format, as in `blockwise e4m3`, `tensorwise hybrid` and `nvfp4 e2m1`."""
        return f"{self.recipe} {'hybrid' if self.grads.element == 'e5m2' else self.grads.element}"


@dataclass(frozen=True, kw_only=True)
class ModulePrecision:
    """Recipe of the modules whose name matches a pattern (`--te-precision-config-file`)."""

    pattern: str
    """Pattern of module names with `*`, `?` and `[]`, such as `*.mlp.experts.linear_fc1`."""
    config: LowPrecisionConfig | None
    """Recipe of the modules; None means that their GEMMs use the format of the parameters."""
    in_low_precision: bool = True
    """Whether `config` applies to modules that would use the recipe of the run."""
    in_params_dtype: bool = False
    """Whether `config` applies to modules that would use the format of the parameters, for example in layers that the
    recipe excludes."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of a run."""

    params: FloatName = "fp32"
    """Format of parameters and activations. Softmax, norms and losses use fp64 if `params` is fp64, else fp32."""
    grads: FloatName = "fp32"
    """Format in which gradients are accumulated and reduced."""
    main_params_dtype: FloatName = "fp32"
    """Format of master weights (`--main-params-dtype`). If equal to `params`, no separate master weights are stored."""
    deterministic_mode: bool = False
    exp_avg_dtype: StateName = "fp32"
    """Format of Adam's first moment (`--exp-avg-dtype`). If `main_params_dtype` is fp64, the moment is always fp64."""
    exp_avg_sq_dtype: StateName = "fp32"
    """Format of Adam's second moment (`--exp-avg-sq-dtype`). If `main_params_dtype` is fp64, it is always fp64."""
    store_param_remainders: bool = False
    """Stores only the low 16 bits of fp32 master weights; the bf16 parameters are the high 16 bits. This is lossless
    (`--store-param-remainders`). Weights stored in FP8 or FP4 have whole master weights."""
    low_precision: LowPrecisionConfig | None = None
    """FP8 or FP4 GEMMs (`--fp8-format`, `--fp4-format`); None means that GEMMs use the format `params`."""
    module_precision: tuple[ModulePrecision, ...] = ()
    """Recipes of single modules; the first matching pattern decides."""
    low_precision_params: bool = False
    """Stores and gathers weights in their GEMM's FP8 or FP4 format (`--fp8-param-gather`, `--fp4-param-gather`)."""

    @property
    def recipe(self) -> str | None:
        """Scaling recipe of FP8 or FP4 GEMMs; None means that GEMMs use the format `params`."""
        return None if self.low_precision is None else self.low_precision.recipe


class OperandFormats(NamedTuple):
    """Formats of the three kinds of operands of a linear layer's GEMMs."""

    inputs: OperandFormat
    weights: OperandFormat
    grads: OperandFormat


@dataclass(frozen=True, kw_only=True)
class QuantizationRecipe:
    """Scaling recipe of FP8 or FP4 GEMMs, registered in `QUANTIZATION_RECIPES`."""

    formats: Callable[..., OperandFormats]
    """Function that returns the operand formats. Its argument `hybrid` selects gradients with more exponent bits."""
    family: Literal["fp8", "fp4"] = "fp8"
    """Flag that selects the recipe: `--fp8-recipe` or `--fp4-recipe`."""
    label: str = "FP8"
    """Short name in tables."""
    row_alignment: int = 16
    """Multiple to which `--moe-router-padding-for-quantization` pads the rows of an expert."""
    least_capability: tuple[int, int] | None = None
    """Least CUDA compute capability of GPUs with tensor cores for the recipe; None means that it is always emulated."""
    has_history: bool = False
    """Whether scales are computed from the magnitudes of earlier steps, instead of from the tensor."""
    exchange_dtype: str | None = None
    """Value of `--moe-dispatch-fwd-dtype` for which tokens are sent in the format of inputs; None if they cannot be
    sent in it."""


def _block_formats(*, hybrid: bool, blocks: int = 128, power_of_2: bool = True) -> OperandFormats:
    inputs = OperandFormat(element="e4m3", block=(1, blocks), scale="power of 2" if power_of_2 else "fp32")
    return _with_grads(inputs, replace(inputs, block=(blocks, blocks)), hybrid)


def _tensor_formats(*, hybrid: bool) -> OperandFormats:
    inputs = OperandFormat(element="e4m3", block=WHOLE, scale="fp32")
    return _with_grads(inputs, inputs, hybrid)


def _mxfp8_formats(*, hybrid: bool, blocks: int = 32) -> OperandFormats:
    inputs = OperandFormat(element="e4m3", block=(1, blocks), scale="e8m0")
    return _with_grads(inputs, inputs, hybrid)


def _nvfp4_formats(*, hybrid: bool, blocks: int = 16) -> OperandFormats:
    inputs = OperandFormat(element="e2m1", block=(1, blocks), scale="e4m3", hadamard=True)
    weights = OperandFormat(element="e2m1", block=(blocks, blocks), scale="e4m3")
    return OperandFormats(inputs, weights, replace(inputs, stochastic=True))


def _with_grads(inputs: OperandFormat, weights: OperandFormat, hybrid: bool) -> OperandFormats:
    return OperandFormats(inputs, weights, replace(inputs, element="e5m2" if hybrid else "e4m3"))


QUANTIZATION_RECIPES.register("tensorwise", QuantizationRecipe(formats=_tensor_formats, least_capability=(8, 9)))
QUANTIZATION_RECIPES.register(
    "delayed", QuantizationRecipe(formats=_tensor_formats, least_capability=(8, 9), has_history=True)
)
QUANTIZATION_RECIPES.register(
    "mxfp8",
    QuantizationRecipe(
        formats=_mxfp8_formats, label="MXFP8", row_alignment=32, least_capability=(10, 0), exchange_dtype="mxfp8"
    ),
)
QUANTIZATION_RECIPES.register(
    "blockwise",
    QuantizationRecipe(
        formats=_block_formats, label="FP8 blockwise", row_alignment=128, least_capability=(9, 0), exchange_dtype="fp8"
    ),
)
QUANTIZATION_RECIPES.register(
    "nvfp4",
    QuantizationRecipe(
        formats=_nvfp4_formats, family="fp4", label="NVFP4", row_alignment=128, least_capability=(10, 0)
    ),
)


def quantization_recipe(name: str) -> QuantizationRecipe:
    """Returns the registered recipe of this name."""
    recipe: QuantizationRecipe = QUANTIZATION_RECIPES.get(name)
    return recipe


def low_precision_config(
    recipe: str, *, hybrid: bool = False, blocks: int | None = None, power_of_2: bool = True, **options: Any
) -> LowPrecisionConfig:
    """Builds the operand formats of a scaling recipe.

    `hybrid`: E5M2 gradients and E4M3 inputs and weights; False: E4M3 throughout. `blocks`: block length, None for that
    of the recipe; `power_of_2`: rounds scales of the blockwise recipe down to powers of two. `options`: see
    `LowPrecisionConfig`.
    """
    changes: dict[str, Any] = {} if blocks is None else {"blocks": blocks}
    if not power_of_2:
        changes["power_of_2"] = False
    formats = quantization_recipe(recipe).formats(hybrid=hybrid, **changes)
    return LowPrecisionConfig(recipe=recipe, **formats._asdict(), **options)
