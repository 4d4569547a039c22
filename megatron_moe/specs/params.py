"""What a parameter is, apart from its values: role, grid, sharding. Pure data, no torch.

A parameter's global name is its path in the module tree. Layers are kept under their global index, so the path does
not depend on the pipeline stage: `decoder.layers.7.mlp.experts.linear_fc1.weight`.
"""

from dataclasses import dataclass
from typing import Literal

Role = Literal["matrix", "embedding", "position", "head", "router", "norm", "bias", "gate", "sink", "vector"]
Grid = Literal["attention", "expert"]


@dataclass(frozen=True, kw_only=True)
class ParamMeta:
    """Carried by every `torch.nn.Parameter` as `.meta`."""

    role: Role
    grid: Grid = "attention"
    init: Literal["normal", "output", "embedding", "zeros", "ones"] = "normal"
    """normal: std; output: output_std (matrices that write to the residual stream); see `InitSpec`."""
    fan_in: int = 1
    """Inputs summed into one output, for unit-gain initial values."""
    num_experts: int | None = None
    """The parameter is a stack over experts in dim 0; each slice is drawn and saved by its global expert id."""
    tp_dim: int | None = None
    """Dim split over tensor parallel ranks of its grid, counted within one expert for stacks; None: replicated."""
    splits: tuple[int, ...] = ()
    """Sizes along `tp_dim` that are sharded one by one: gate and up, or q, k, v of every query group."""
    decay: bool = True
    """Weight decay applies."""
