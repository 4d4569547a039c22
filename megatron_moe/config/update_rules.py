"""Declarations of update rules: their state, alignment and parameters. This module does not import torch.

`OptimizerConfig.optimizer` names the rule of a run in `UPDATE_RULES`. The rule updates the parameters that it covers,
and its fallback rule all others: with a rule for matrices, AdamW updates embeddings and norms. Layout, memory,
emulation and checkpoints are derived from the declarations.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.config.precision import PrecisionConfig, StateName
from megatron_moe.config.registry import UPDATE_RULES, resolve

OwnerAlignment = Literal["element", "block_1x32", "block_128x128", "matrix"]
"""Part of a matrix that must not be divided between owner ranks: an element, a block with one scale, or the matrix. A
stack of experts has one matrix per expert."""
MOST_BATCHED_ELEMENTS = 1 << 26
"""Maximum number of elements of the matrices that Muon orthogonalises together; it bounds temporary memory."""
_BYTES = MappingProxyType({"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1})


class StateSpec(NamedTuple):
    """One kind of state that an update rule stores in addition to the master weights."""

    name: str
    """Name of the state in checkpoints."""
    format: StateName = "fp32"
    """Storage format. If the master weights are fp64, the state is fp64."""
    root: bool = False
    """True if the square root of the values is stored in the formats fp16 and fp8."""
    matrix_shape: Callable[[int, int], tuple[int, ...]] | None = None
    """Shape of the state of one matrix with the given rows and columns, before tensor parallelism; ranks that share a
    matrix have equal copies. None means that the state has one value per element of the parameter."""

    def num_bytes(self, precision: PrecisionConfig) -> int:
        """Bytes per value of this state."""
        return _BYTES["fp64" if precision.main_params_dtype == "fp64" else self.format]

    def values_of(self, rows: int, columns: int) -> int:
        """Number of values that this state has for one matrix."""
        return rows * columns if self.matrix_shape is None else prod(self.matrix_shape(rows, columns))


class EqualMatrices(NamedTuple):
    """Matrices of equal shape that one rank updates."""

    shape: tuple[int, int]
    """(rows, columns) before tensor parallelism."""
    shard: tuple[int, int]
    """(rows, columns) of a tensor-parallel rank."""
    number: int


@dataclass(frozen=True, kw_only=True)
class UpdateRuleSpec:
    """Declaration of an update rule, such as AdamW, Muon or Lion (`--optimizer`)."""

    rule: str | Callable[[OptimizerConfig, PrecisionConfig], Any]
    """Function that returns the `optim.state.UpdateRule`, or its name "package.module:name", which is imported when the
    optimizer is built."""
    states: Callable[[OptimizerConfig, PrecisionConfig], tuple[StateSpec, ...]]
    """Function (optimizer config, precision config) -> declarations of the state that the rule stores."""
    alignment: OwnerAlignment = "element"
    """Smallest part of a matrix that the rule can update independently of the rest."""
    workspace: Callable[[OptimizerConfig, PrecisionConfig, EqualMatrices], float] = lambda *_: 0.0
    """Function that returns the temporary bytes in the update of equal matrices."""
    covers: Callable[[str, ParamMeta], bool] = lambda name, meta: True
    """Whether the rule can update the parameter with this global name and metadata. A rule with the alignment `element`
    covers all parameters."""
    fallback: Callable[[OptimizerConfig], str] = lambda config: "adam"
    """Function that returns the name of the rule that updates the parameters that this rule does not cover."""

    def new_rule(self, config: OptimizerConfig, precision: PrecisionConfig) -> Any:
        return resolve(self.rule)(config, precision)


def rule_of(name: str, meta: ParamMeta, config: OptimizerConfig) -> str:
    """Name of the rule that updates a parameter."""
    rule = config.optimizer
    while not (spec := spec_of(rule)).covers(name, meta):
        fallback = spec.fallback(config)
        assert fallback != rule, f"no update rule for {name}: {rule} does not cover it and has no fallback"
        rule = fallback
    return rule


def is_elementwise(config: OptimizerConfig) -> bool:
    """Whether the rule of a run updates every element independently, and therefore covers all parameters."""
    return spec_of(config.optimizer).alignment == "element"


def state_bytes_per_element(config: OptimizerConfig, precision: PrecisionConfig) -> int:
    """Bytes of state that the rule of a run stores per element of a parameter, without master weights."""
    states = spec_of(config.optimizer).states(config, precision)
    return sum(state.num_bytes(precision) for state in states if state.matrix_shape is None)


def spec_of(rule: str) -> UpdateRuleSpec:
    spec: UpdateRuleSpec = UPDATE_RULES.get(rule)
    return spec


def _adam_states(config: OptimizerConfig, precision: PrecisionConfig) -> tuple[StateSpec, ...]:
    second = StateSpec("exp_avg_sq", precision.exp_avg_sq_dtype, root=True)
    return StateSpec("exp_avg", precision.exp_avg_dtype), second


UPDATE_RULES.register("adam", UpdateRuleSpec(rule="megatron_moe.optim.adamw:AdamW", states=_adam_states))
UPDATE_RULES.register(
    "lion",
    UpdateRuleSpec(
        rule="megatron_moe.optim.lion:Lion",
        states=lambda config, precision: (StateSpec("exp_avg", precision.exp_avg_dtype),),
    ),
)


def _muon_workspace(config: OptimizerConfig, precision: PrecisionConfig, matrices: EqualMatrices) -> float:
    """Bytes of Newton-Schulz iterations: the update, two iterates and two Gram matrices, or, while the second Gram
    matrix is computed, one iterate and three of them. With the mode "duplicated", the shard of the update is added."""
    shape, shard, number = matrices
    mode = "blockwise" if shape == shard else config.muon.muon_tp_mode
    rows, columns = shape if mode == "duplicated" else shard
    side = min(rows, columns)
    if mode == "distributed":  # Gram matrices have the size of the dim that is not sharded
        side = columns if rows < shape[0] else rows
    size, gram, kept = rows * columns, side * side, prod(shard) if mode == "duplicated" else 0
    itemsize = 4 if config.muon.muon_fp32_matmul_prec == "high" else 2
    itemsize = 8 if precision.main_params_dtype == "fp64" else itemsize
    batched = max(1, min(number, MOST_BATCHED_ELEMENTS // prod(shape)))
    return float(batched * itemsize * (2 * size + 2 * gram + max(size, gram) + kept))


_MUON = UpdateRuleSpec(
    rule="megatron_moe.optim.muon:Muon",
    states=lambda config, precision: (StateSpec("momentum"),),
    alignment="matrix",
    workspace=_muon_workspace,
    covers=lambda name, meta: meta.role in ("matrix", "router", "gate") and not meta.mixed_rows,
    fallback=lambda config: config.muon.muon_scalar_optimizer,
)
UPDATE_RULES.register("muon", _MUON)
UPDATE_RULES.register("dist_muon", _MUON)
_ADAPTIVE = replace(
    _MUON,
    rule="megatron_moe.optim.adaptive_muon:AdaptiveMuon",
    states=lambda config, precision: (StateSpec("momentum"), StateSpec("moment2")),
)
UPDATE_RULES.register("adaptive_muon", _ADAPTIVE)
