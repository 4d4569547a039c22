"""Pipeline parallelism: layer placement and schedule."""

from dataclasses import dataclass

from megatron_moe.pipeline.layout import PipelineLayout


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Placement of layers on pipeline stages, and the schedule."""

    layout: PipelineLayout | None = None
    """None: the same number of layers on every stage."""
    group_size: int | None = None
    """Consecutive microbatches per virtual stage (`--microbatch-group-size-per-virtual-pipeline-stage`); None: pp."""
    overlap: bool = False
    """Interleaves the forward of one microbatch with the backward of another to hide expert communication
    (`--overlap-moe-expert-parallel-comm`)."""
    split_backward: bool = False
    """Computes weight gradients after input gradients, as separate actions (`--delay-wgrad-compute`)."""
    early_attention_backward: bool = False
    """With `overlap`, runs the backward of attention before the other microbatch's experts
    (`--ep-overlap-early-attn-memory-release`)."""
