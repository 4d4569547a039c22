"""Pipeline parallelism: layer placement and schedule."""

from dataclasses import dataclass

from megatron_moe.config.pipeline_layout import PipelineLayout, StageMap


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Parameters of a pipeline schedule: 1F1B, interleaved, or overlapped with the expert exchange."""

    num_microbatches: int
    pp: int = 1
    vpp: int = 1
    """Model chunks per rank (`StageMap`)."""
    group_size: int | None = None
    """Number of microbatches that a rank runs in one chunk before the next chunk; None means `pp`. Used only if vpp >
    1."""
    overlap: bool = False
    """Pairs forwards with backwards in the steady phase (`OverlappedPair`), to hide expert communication."""
    split_backward: bool = False
    """Computes and sends the input gradient before the weight gradients are computed."""
    forward_only: bool = False
    """Schedules forwards only, for evaluation."""

    @property
    def group(self) -> int:
        return self.pp if self.group_size is None or self.vpp == 1 else self.group_size

    @property
    def stages(self) -> StageMap:
        return StageMap(self.pp, self.vpp)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Placement of layers on pipeline stages, and the schedule."""

    layout: PipelineLayout | None = None
    """Layers of every pipeline stage; None means the same number of layers on every stage."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None
    """Number of microbatches that a rank runs on one virtual stage before it switches to another stage; None means
    pp."""
    overlap: bool = False
    """Interleaves the forward of one microbatch with the backward of another to hide expert communication
    (`--overlap-moe-expert-parallel-comm`)."""
    delay_wgrad_compute: bool = False
    """Computes weight gradients after input gradients, as separate schedule actions (`--delay-wgrad-compute`)."""
    overlap_dispatch_backward_with_experts_wgrad: bool = False
    """Delays weight gradients until the next exchange of gradients between expert-parallel ranks, within the backward
    of one microbatch (`--overlap-dispatch-backward-with-experts-wgrad`)."""
    ep_overlap_early_attn_memory_release: bool = False
    """With `overlap`, runs the backward of attention before the forward of the other microbatch's experts
    (`--ep-overlap-early-attn-memory-release`)."""

    @property
    def defers_weight_grads(self) -> bool:
        """Whether the weight gradients of a module may be computed after later input gradients."""
        return self.delay_wgrad_compute or self.overlap_dispatch_backward_with_experts_wgrad

    def delays_weight_grads(self, pp: int) -> bool:
        """Whether all weight gradients of a microbatch follow its input gradients, in a schedule of `pp` ranks."""
        return self.delay_wgrad_compute and not self.overlap and pp > 1

    def pipeline_schedule(
        self, layout: PipelineLayout, num_microbatches: int, *, forward_only: bool = False
    ) -> ScheduleConfig:
        """Parameters of the pipeline schedule of one training step or, if `forward_only`, of an evaluation."""
        return ScheduleConfig(
            num_microbatches=num_microbatches,
            pp=layout.pp,
            vpp=layout.vpp,
            group_size=self.microbatch_group_size_per_virtual_pipeline_stage,
            overlap=self.overlap,
            split_backward=self.delay_wgrad_compute,
            forward_only=forward_only,
        )
