"""Which steps of a run are looked at closely, and how."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ProfileSpec:
    """Traces of some steps, marks for the parts of a step, the history of the device's memory."""

    tool: Literal["none", "cuda", "torch"] = "none"
    """cuda: mark the stretch for an external profiler; torch: write a trace."""
    after: int = 10
    """Iterations before the first profiled one."""
    last: int = 12
    """The last profiled iteration."""
    ranks: tuple[int, ...] = ()
    """Empty: all."""
    shapes: bool = False
    stacks: bool = False
    marks: bool = False
    """The parts of the model have names in profiles."""
    memory_snapshot: str | None = None
    """File for the history of allocations, the rank's number added to its name; None: none is recorded."""
