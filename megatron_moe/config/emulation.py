"""Memory emulation of single ranks (`--fake-init-process-group`): options and assumed expert load."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class EmulationConfig:
    """Options of a memory emulation."""

    ranks: tuple[int, ...] = ()
    """Global ranks to emulate, one after the other. If empty, one rank of every pipeline stage is emulated."""
    emulate_imbalance: float = 1.0
    """Number of tokens routed to the emulated rank's experts, as a multiple of the number at a balanced load."""
    gpu: str = "h100"
    """GPU model to emulate, a key of `cost_model.hardware.GPUS`."""
    gpu_memory: float | None = None
    """Memory of the GPU in GiB; None means the memory of the GPU model."""
    emulate_json: Path | None = None
    """JSON output file of the results. None if it is not written."""
    emulate_plot: Path | None = None
    """PNG output file with a plot of memory over time. None if it is not written."""


@dataclass(frozen=True)
class RoutedLoad:
    """Assumed distribution of routed tokens over experts, equal for the tokens of all source ranks.

    One expert-parallel rank receives `imbalance` times a balanced share, divided equally over its experts. The experts
    of all other ranks receive equal numbers of the remaining tokens.
    """

    num_ranks: int
    """Number of expert-parallel ranks."""
    busiest_ep_rank: int
    imbalance: float = 1.0
    """Load of `busiest_ep_rank` divided by the mean load of all expert-parallel ranks."""

    def __post_init__(self) -> None:
        assert 0.0 <= self.imbalance <= self.num_ranks, f"imbalance {self.imbalance} over {self.num_ranks} ranks"

    def counts(self, num_experts: int, num_choices: int) -> tuple[int, ...]:
        """Number of tokens per global expert if the tokens of one rank select `num_choices` experts in total."""
        num_local = num_experts // self.num_ranks
        first = self.busiest_ep_rank * num_local
        num_busiest = num_choices if self.num_ranks == 1 else round(num_choices * self.imbalance / self.num_ranks)
        busiest = _divide_evenly(num_busiest, num_local)
        rest = _divide_evenly(num_choices - num_busiest, num_experts - num_local)
        return (*rest[:first], *busiest, *rest[first:])


def _divide_evenly(total: int, parts: int) -> list[int]:
    """Divides `total` into `parts` integers that differ by at most 1, larger ones first."""
    return [total // parts + (index < total % parts) for index in range(parts)]
