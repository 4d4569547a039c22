"""What a run asks of its pipeline."""

from dataclasses import dataclass

from megatron_moe.pipeline.layout import PipelineLayout
from megatron_moe.pipeline.schedule import ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Where layers stand and in which order microbatches pass them."""

    layout: PipelineLayout | None = None
    """None: the same number of layers on every stage."""
    group_size: int | None = None
    """Microbatches that a virtual stage takes in a row; None: the number of pipeline ranks."""
    overlap: bool = False
    """Forward and backward of different microbatches interleave, node by node."""
    split_backward: bool = False
    """Weight gradients are computed apart from those of inputs."""
    early_attention_backward: bool = False
    """In a pair the backward of attention comes before the forward of the experts (`pair_slots`)."""

    def schedule(self, layout: PipelineLayout, num_microbatches: int, *, forward_only: bool = False) -> ScheduleConfig:
        """Schedule of one step, or of an evaluation, of a model with this layout."""
        return ScheduleConfig(
            num_microbatches=num_microbatches,
            pp=layout.pp,
            vpp=layout.vpp,
            group_size=self.group_size,
            overlap=self.overlap,
            split_backward=self.split_backward,
            forward_only=forward_only,
        )
