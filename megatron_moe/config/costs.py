"""Value types that component configs return to the cost model: FLOPs, saved tensors and token counts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, exp, floor, lgamma, log, log1p, sqrt
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Self, TypeVar

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.precision import LowPrecisionConfig

Number = TypeVar("Number", int, float)
TRAINING_FLOPS = 6
"""Training FLOPs per multiply-add of a GEMM: 2 in forward, 2 for the input gradient, 2 for the weight gradient."""
FORWARD_FLOPS = 2
"""FLOPs per multiply-add of a GEMM in forward."""
_BYTES = MappingProxyType({"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1})
WHOLE_LAYER = "whole layer"
"""Entry in `SavedActivation.recomputed_by`: the tensor is in an MTP layer and is freed by uniform full recompute."""
_DEVIATIONS = 8
"""Standard deviations around the mean within which values of a random count are summed."""
INDEX = 8
"""Bytes of an int64 index."""


def bytes_per_element(fmt: str) -> int:
    """Bytes per element of a number format."""
    return _BYTES[fmt]


def bytes_per_fp8_element(config: LowPrecisionConfig) -> float:
    """Bytes per element of an activation or gradient that is quantised by an FP8 or FP4 recipe."""
    return config.inputs.bytes_per_element


def row_padding_factor(config: LowPrecisionConfig, num_rows: int, num_experts: int) -> float:
    """Number of rows in a columnwise copy, which pads each expert's rows to whole blocks, relative to the number of
    expert rows."""
    length = config.inputs.block[1]
    return (num_rows // length + num_experts) * length / num_rows if length and num_rows else 1.0


def most_rows(num_choices: int, num_experts: int, align: int) -> int:
    """Largest number of rows that any routing needs. Each used expert adds at most `align - 1` padding rows."""
    return (num_choices + min(num_choices, num_experts) * (align - 1)) // align * align


@dataclass(frozen=True, kw_only=True)
class ExpectedRows:
    """Expected numbers of rows of one rank's experts in one layer and microbatch, under random balanced routing."""

    routed: float
    """Rows that hold a token, without padding rows."""
    computed: float
    """Rows that the experts' GEMMs process: rows with a token, and rows that pad the experts to their capacity or to
    whole blocks."""
    allocated: float
    """Rows of the buffers. The transport may bound them by the worst routing."""


def binomial_mean(value: Callable[[int], float], num_tokens: int, share: float) -> float:
    """Mean of `value(count)`, where `count` of `num_tokens` tokens make a choice that has probability `share`."""
    mean = num_tokens * share
    if share >= 1:
        return value(num_tokens)
    reach = _DEVIATIONS * sqrt(mean * (1 - share)) + _DEVIATIONS
    first, last = max(0, floor(mean - reach)), min(num_tokens, ceil(mean + reach))
    all_orders, chosen, other = lgamma(num_tokens + 1), log(share), log1p(-share)

    def probability(count: int) -> float:
        orders = all_orders - lgamma(count + 1) - lgamma(num_tokens - count + 1)
        return exp(orders + count * chosen + (num_tokens - count) * other)

    return sum(value(count) * probability(count) for count in range(first, last + 1))


@dataclass(frozen=True, kw_only=True)
class CostSum(Generic[Number]):
    """Base of dataclasses whose fields are all numbers. Supports field-wise addition and multiplication by a factor."""

    def __add__(self, other: Self) -> Self:
        return type(self)(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __mul__(self, factor: Number) -> Self:
        return type(self)(**{name: value * factor for name, value in vars(self).items()})

    @property
    def total(self) -> Number:
        """Sum of all fields."""
        total: Number = sum(vars(self).values())
        return total


@dataclass(frozen=True, kw_only=True)
class FlopCount(CostSum[int]):
    """FLOPs of forward and backward by part of the model, excluding recompute."""

    attention: int = 0
    """Linear projections of attention and other mixers."""
    core_attention: int = 0
    """Work of a mixer outside its projections; for attention, the GEMMs of queries times keys and of probabilities
    times values."""
    indexer: int = 0
    """Scores of a sparse-attention indexer, and the attention probabilities that its loss needs."""
    dense_mlp: int = 0
    experts: int = 0
    """Routed experts (K per token) and the projections into and out of their latent space."""
    shared: int = 0
    connections: int = 0
    """Projections of hyper-connections."""
    mtp: int = 0
    """Layers and input projections of multi-token prediction. The logits of multi-token prediction are in `head`."""
    head: int = 0
    """Projection to logits, for the next token and for every depth of multi-token prediction."""


@dataclass(frozen=True, kw_only=True)
class ActivationSizes:
    """Token counts of one microbatch on one rank, and bytes per element."""

    residual: int
    """Number of tokens in this rank's shard of the residual stream (dimension T)."""
    inner: int
    """Number of tokens inside attention and MLP, after the all-gather of sequence parallelism (dimension U)."""
    activation_itemsize: int
    """Bytes per activation element."""
    internal_itemsize: int
    """Bytes per element of values that are computed in fp32, or in fp64 if activations are fp64."""
    length: int
    """Full sequence length S, before context parallelism splits it."""
    imbalance: float = 1.0
    """Number of expert rows of the most loaded expert-parallel rank, divided by the mean over ranks."""

    def gathered_bytes_per_channel(self, parallel: ParallelConfig) -> float:
        """Bytes per channel of an activation that is all-gathered over tp, and of its gradient if both are communicated
        at the same time; 0 without sequence parallelism."""
        if not parallel.sequence_parallel or parallel.tp == 1:
            return 0.0
        return float(self.inner * self.activation_itemsize * (2 if parallel.tp_comm_overlap else 1))


@dataclass(frozen=True, kw_only=True)
class SavedActivation:
    """Name, size and options of one tensor that is saved for backward."""

    module: str
    """input_norm, attention, mlp_norm, mlp, router, experts, shared, final_norm, head, mtp, embedding or positions."""
    name: str
    shape: str
    bytes: int
    elements: int
    rows_of_experts: tuple[int, int] | None = None
    """(number of rows, number of experts) if the rows are sorted by expert, because quantised copies pad each expert's
    rows; None for other tensors."""
    low: str = ""
    """Value of `--low-precision-activation-modules` with which the tensor is saved in the format of an FP8 or FP4
    recipe, because only GEMMs read it; empty if it is never saved in that format."""
    shared: bool = False
    """True if two layers save the tensor; in formats with `LowPrecisionConfig.fused_block` they share one copy."""
    read_unless: str = ""
    """Module whose backward also reads the unquantised tensor unless `--recompute-modules` contains the module; empty
    if only GEMMs read the tensor."""
    is_activation_input: bool = False
    """Whether `LowPrecisionConfig.activation_inputs` applies to the tensor."""
    fused_bytes: int | None = None
    """Bytes of the tensor if the casts to FP8 are fused into other ops (`LowPrecisionConfig.fused_block`); None if
    fusion does not change them."""
    gathered_bytes: int | None = None
    """Bytes of the tokens that are saved instead of the tensor if fc1 of the experts gathers its input rows from them.
    This needs fused casts and, if any tokens are saved, weight gradients that are not in FP8. None if fc1 gathers no
    rows."""
    recomputed_by: tuple[str, ...] = ()
    """Values of `--recompute-modules` that free this tensor after forward, and possibly `WHOLE_LAYER`."""
    offloaded_by: str = ""
    """Value of `--offload-modules` that moves this tensor to host memory; empty if the tensor is never offloaded."""
    even_rows: int = 0
    """Number of rows at an even expert load, for sizing the paged stash. 0: the tensor is never stashed."""
    padding_rows: int = 0
    """Largest number of rows that pad the experts to whole blocks, in addition to `even_rows`."""
    row_width: int = 0
    """Number of elements per row, for tensors that the paged stash may store."""

    @property
    def even_bytes(self) -> int:
        """Bytes of the tensor with an even expert load."""
        return self.even_rows * self.row_width * self.bytes // max(self.elements, 1)


def saved_tensor(
    module: str, name: str, shape: str, elements: float, size: int, marks: Mapping[str, Any] = MappingProxyType({})
) -> SavedActivation:
    """Creates the `SavedActivation` of a tensor with `elements` elements of `size` bytes. `marks`: further fields."""
    count = int(elements)
    return SavedActivation(module=module, name=name, shape=shape, bytes=count * size, elements=count, **marks)


class QuantizedCopyBytes(NamedTuple):
    """Bytes per element of the quantised copies of a tensor; 0 without FP8 or FP4."""

    row: float
    """Bytes per element of the rowwise copy."""
    column: float
    """Bytes per element of the columnwise copy, for weight gradients; 0 if these are not computed in FP8 or FP4."""

    @classmethod
    def of(cls, low: LowPrecisionConfig | None) -> "QuantizedCopyBytes":
        if low is None:
            return cls(0.0, 0.0)
        return cls(bytes_per_fp8_element(low), bytes_per_fp8_element(low) if low.weight_grad else 0.0)

    @property
    def grad(self) -> float:
        """Bytes per element of both copies of an output gradient, which one kernel makes."""
        return self.row + self.column
