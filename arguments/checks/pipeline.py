"""Rules about pipeline stages, the schedule, and overlap of expert communication."""

from typing import Any

from arguments import derive
from arguments.checks.violation import Violation, functions_returning, takes_flags
from megatron_moe.pipeline.layout import LayoutError
from megatron_moe.pipeline.schedule import ScheduleConfig, ScheduleError, check_schedule


def layer_placement_given_once(
    pipeline_model_parallel_layout: str | None,
    num_layers_per_virtual_pipeline_stage: int | None,
    num_virtual_stages_per_pipeline_rank: int | None,
    decoder_first_pipeline_num_layers: int | None,
    decoder_last_pipeline_num_layers: int | None,
    account_for_embedding_in_pipeline_split: bool,
    account_for_loss_in_pipeline_split: bool,
) -> Violation:
    """A layout places all layers; otherwise either the first and last stage are given, or embedding and loss count as
    layers."""
    ends = decoder_first_pipeline_num_layers is not None or decoder_last_pipeline_num_layers is not None
    counted = account_for_embedding_in_pipeline_split or account_for_loss_in_pipeline_split
    virtual = num_layers_per_virtual_pipeline_stage is not None, num_virtual_stages_per_pipeline_rank is not None
    if all(virtual):
        return "both the number of virtual stages and their number of layers are given", "remove one of the two"
    if pipeline_model_parallel_layout is not None:
        written = pipeline_model_parallel_layout != derive.AUTO and virtual[1]
        if ends or counted or virtual[0] or written:
            return (
                f"--pipeline-model-parallel-layout {pipeline_model_parallel_layout} with other flags that place layers",
                "remove the other flags, or the layout",
            )
    elif ends and (counted or virtual[0]):
        return (
            "the layers of the first or last stage are given, and other flags place them too",
            "combine them only with --num-virtual-stages-per-pipeline-rank, or use a layout",
        )
    return None


@takes_flags(derive.PLACEMENT)
def layers_fit_stages(**placement: Any) -> Violation:
    """Every layer belongs to one stage. Without a layout, all stages except the first and the last have the same number
    of layers."""
    try:
        derive.pipeline_layout(**placement)
    except LayoutError as error:
        if placement["pipeline_model_parallel_layout"] not in (None, derive.AUTO):
            return str(error), "fix the layout (docs/schedule.md has the syntax), or use `auto`"
        return str(error), "--pipeline-model-parallel-layout auto places any number of layers"
    return None


def microbatches_fill_stages(
    data_parallel_size: int,
    virtual_stages: int,
    pipeline_model_parallel_size: int,
    microbatch_group_size_per_virtual_pipeline_stage: int | None,
    micro_batch_size: int,
    global_batch_size: int | None,
    rampup_batch_size: tuple[int, int, int] | None,
) -> Violation:
    """A rank with virtual stages runs microbatches in groups; a group smaller than the pipeline would deadlock."""
    last = derive.global_batch_size(global_batch_size, micro_batch_size, data_parallel_size)
    start, increment, _ = rampup_batch_size or (last, 1, 0)
    unit = micro_batch_size * data_parallel_size
    growing = range(start, last, max(increment, 1))
    if any(size % unit for size in (*growing[:2], last)):
        return None  # checked by global_batch_is_whole_microbatches and rampup_steps_are_whole
    group = microbatch_group_size_per_virtual_pipeline_stage or pipeline_model_parallel_size
    for size in (*growing[: group if virtual_stages > 1 else 1], last):  # later sizes repeat the remainders
        config = ScheduleConfig(
            num_microbatches=size // unit,
            pp=pipeline_model_parallel_size,
            vpp=virtual_stages,
            group_size=microbatch_group_size_per_virtual_pipeline_stage,
        )
        try:
            check_schedule(config)
        except ScheduleError as error:
            return str(error), _fitting_batch(config, unit)
    return None


def ep_overlap_has_exchange(
    overlap_moe_expert_parallel_comm: bool,
    num_experts: int | None,
    expert_model_parallel_size: int,
    moe_token_dispatcher_type: str,
    pipeline_model_parallel_size: int,
    virtual_stages: int,
) -> Violation:
    """Two microbatches overlap to hide the all-to-all of the experts; with pipeline parallelism this needs virtual
    stages."""
    if not overlap_moe_expert_parallel_comm or expert_model_parallel_size == 1:
        return None  # no exchange to overlap: the plain schedule runs
    if not num_experts:
        return None  # checked by ep_divides_experts
    if moe_token_dispatcher_type == "allgather":
        return (
            "--overlap-moe-expert-parallel-comm with --moe-token-dispatcher-type allgather",
            "use --moe-token-dispatcher-type alltoall",
        )
    if pipeline_model_parallel_size > 1 and virtual_stages == 1:
        return (
            f"--overlap-moe-expert-parallel-comm over {pipeline_model_parallel_size} pipeline ranks needs virtual "
            f"stages",
            "give --num-virtual-stages-per-pipeline-rank 2 or a layout with more stages",
        )
    return None


def ep_overlap_supports_recompute_and_mtp(
    overlap_moe_expert_parallel_comm: bool,
    mtp_num_layers: int | None,
    recompute_granularity: str | None,
    recompute_method: str | None,
    recompute_num_layers: int | None,
    recompute_modules: tuple[str, ...] | None,
) -> Violation:
    """Overlapped layers run node by node and cannot be recomputed as a whole."""
    if not overlap_moe_expert_parallel_comm:
        return None
    whole = recompute_granularity == "full" or recompute_method is not None or recompute_num_layers is not None
    if whole or "moe" in (recompute_modules or ()):
        what = "whole layers" if whole else "whole MoE blocks"
        return (
            f"--overlap-moe-expert-parallel-comm with recompute of {what}",
            "recompute smaller modules: --recompute-granularity selective --recompute-modules core_attn moe_act",
        )
    if mtp_num_layers is not None and mtp_num_layers > 1:
        return (
            f"--overlap-moe-expert-parallel-comm with {mtp_num_layers} layers of multi-token prediction",
            "use --mtp-num-layers 1",
        )
    return None


def early_release_needs_ep_overlap(
    overlap_moe_expert_parallel_comm: bool, ep_overlap_early_attn_memory_release: bool
) -> Violation:
    """Early release reorders the nodes of overlapped microbatches."""
    if ep_overlap_early_attn_memory_release and not overlap_moe_expert_parallel_comm:
        return (
            "--ep-overlap-early-attn-memory-release without --overlap-moe-expert-parallel-comm",
            "add --overlap-moe-expert-parallel-comm, or leave it out",
        )
    return None


def _fitting_batch(config: ScheduleConfig, unit: int) -> str:
    if config.pp == 1:
        return "leave out virtual stages, or raise --pipeline-model-parallel-size"
    more = -(-config.num_microbatches // config.pp) * config.pp
    return f"{more} microbatches fit groups of {config.pp}: --global-batch-size {more * unit}"


RULES = functions_returning(Violation, globals())
