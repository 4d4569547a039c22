"""A rank of a cluster that is not there (`--fake-init-process-group`): which, and what is assumed of the others."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class EmulationConfig:
    """What is asked of an emulation."""

    ranks: tuple[int, ...] = ()
    """Ranks of the world that are played, one after the other; none given: the first rank of every pipeline stage."""
    imbalance: float = 1.0
    """Rows that the played rank's experts get, as a multiple of an even share."""
    gpu: str = "h100"
    """Kind of the device that is meant, where none is there."""
    json: Path | None = None
    """Where the figures are written."""
    plot: Path | None = None
    """Where the timeline is drawn, as PNG."""


@dataclass(frozen=True)
class RoutedLoad:
    """How many rows every expert gets, assumed alike for all ranks: they all send as this one does.

    The experts of expert-parallel rank `hot` get `imbalance` times an even share, the others share the rest evenly.
    """

    num_ranks: int
    """Expert-parallel ranks."""
    hot: int
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        most = float(self.num_ranks)
        assert 0.0 <= self.imbalance <= most, f"imbalance {self.imbalance} over {self.num_ranks} ranks"

    def counts(self, num_experts: int, num_choices: int) -> tuple[int, ...]:
        """Choices of every expert, of `num_choices` that one rank's tokens make."""
        num_local = num_experts // self.num_ranks
        first = self.hot * num_local
        wanted = num_choices if self.num_ranks == 1 else round(num_choices * self.imbalance / self.num_ranks)
        mine = _shared_out(wanted, num_local)
        others = _shared_out(num_choices - wanted, num_experts - num_local)
        return (*others[:first], *mine, *others[first:])


def _shared_out(total: int, parts: int) -> list[int]:
    """As evenly as whole numbers allow, the larger ones first."""
    if parts == 0:
        return []
    share, rest = divmod(total, parts)
    return [share + (place < rest) for place in range(parts)]
