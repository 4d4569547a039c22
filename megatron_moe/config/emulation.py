"""Memory emulation (`--fake-init-process-group`): emulated ranks and the expert load assumed on them."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class EmulationConfig:
    """Options of a memory emulation."""

    ranks: tuple[int, ...] = ()
    """Global ranks to emulate, one after the other; empty: the first rank of every pipeline stage."""
    emulate_imbalance: float = 1.0
    """Number of rows that the emulated rank's experts receive, as a multiple of an even load."""
    gpu: str = "h100"
    """Kind of GPU to emulate (`cost_model.hardware.GPUS`)."""
    emulate_json: Path | None = None
    """Output file of the results."""
    emulate_plot: Path | None = None
    """Output file of the memory timeline, a PNG."""


@dataclass(frozen=True)
class RoutedLoad:
    """Assumed distribution of routed rows over experts; it is the same for every sending rank.

    Expert-parallel rank `hot` receives `imbalance` times an even share, divided equally over its experts. The experts
    of all other ranks receive equal numbers of the remaining rows.
    """

    num_ranks: int
    """Expert-parallel size."""
    hot: int
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        assert 0.0 <= self.imbalance <= self.num_ranks, f"imbalance {self.imbalance} over {self.num_ranks} ranks"

    def counts(self, num_experts: int, num_choices: int) -> tuple[int, ...]:
        """Number of rows per expert if the tokens of one rank select `num_choices` experts in total."""
        num_local = num_experts // self.num_ranks
        first = self.hot * num_local
        num_hot = num_choices if self.num_ranks == 1 else round(num_choices * self.imbalance / self.num_ranks)
        hot = _divide_evenly(num_hot, num_local)
        rest = _divide_evenly(num_choices - num_hot, num_experts - num_local)
        return (*rest[:first], *hot, *rest[first:])


def _divide_evenly(total: int, parts: int) -> list[int]:
    """Divides `total` into `parts` integers that differ by at most 1, larger ones first."""
    return [total // parts + (index < total % parts) for index in range(parts)]
