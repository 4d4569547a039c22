"""Which pipeline rank holds which stage of the model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StageMap:
    """Stages go round the ranks: chunk c of rank r is stage c * pp + r (arXiv 2104.04473 section 2.2)."""

    pp: int = 1
    vpp: int = 1
    """Model chunks of a rank."""

    @property
    def num_stages(self) -> int:
        return self.pp * self.vpp

    def stage(self, rank: int, chunk: int) -> int:
        """Position in the model of a chunk of a rank."""
        return chunk * self.pp + rank

    def place(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) of a stage."""
        return stage % self.pp, stage // self.pp
