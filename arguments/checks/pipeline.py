"""Rules about pipeline stages: which layers they hold, and in which order microbatches pass them."""

from typing import Any

from arguments import derive
from arguments.checks.violation import Violation, asks_for
from megatron_moe.pipeline.layout import LayoutError
from megatron_moe.pipeline.schedule import (
    ScheduleConfig,
    ScheduleError,
    check_schedule,
)


def layers_are_placed_once(
    pipeline_model_parallel_layout: str | None,
    num_layers_per_virtual_pipeline_stage: int | None,
    num_virtual_stages_per_pipeline_rank: int | None,
    decoder_first_pipeline_num_layers: int | None,
    decoder_last_pipeline_num_layers: int | None,
    account_for_embedding_in_pipeline_split: bool,
    account_for_loss_in_pipeline_split: bool,
) -> Violation:
    """A layout says all of it; without one, either the ends are given or embedding and loss count as layers."""
    ends = decoder_first_pipeline_num_layers is not None or decoder_last_pipeline_num_layers is not None
    counted = account_for_embedding_in_pipeline_split or account_for_loss_in_pipeline_split
    virtual = num_layers_per_virtual_pipeline_stage is not None, num_virtual_stages_per_pipeline_rank is not None
    if all(virtual):
        return "virtual stages are given by their number and by their layers", "leave out one of the two"
    if pipeline_model_parallel_layout is not None:
        written = pipeline_model_parallel_layout != derive.AUTO and virtual[1]
        if ends or counted or virtual[0] or written:
            return (
                f"the layout {pipeline_model_parallel_layout} places the layers, and so do other flags",
                "leave out the other flags, or the layout",
            )
    elif ends and (counted or virtual[0]):
        return (
            "layers of the first or last rank are given, and other flags share them out too",
            "give --num-virtual-stages-per-pipeline-rank at most, or a layout",
        )
    return None


@asks_for(derive.PLACEMENT)
def layers_fit_the_stages(**placement: Any) -> Violation:
    """Every layer stands on one stage. Without a layout stages have the same number of layers but for the ends."""
    try:
        derive.pipeline_layout(**placement)
    except LayoutError as error:
        if placement["pipeline_model_parallel_layout"] not in (None, derive.AUTO):
            return str(error), "mend the layout (docs/schedule.md has the language), or let `auto` write one"
        return str(error), "--pipeline-model-parallel-layout auto places any number of layers"
    return None


def microbatches_fill_the_stages(
    data_parallel_size: int,
    virtual_stages: int,
    pipeline_model_parallel_size: int,
    microbatch_group_size_per_virtual_pipeline_stage: int | None,
    micro_batch_size: int,
    global_batch_size: int | None,
    rampup_batch_size: tuple[int, int, int] | None,
) -> Violation:
    """A rank with virtual stages takes microbatches in groups; a group smaller than the pipeline would stop it."""
    last = derive.global_batch_size(global_batch_size, micro_batch_size, data_parallel_size)
    start, increment, _ = rampup_batch_size or (last, 1, 0)
    unit = micro_batch_size * data_parallel_size
    growing = range(start, last, max(increment, 1))
    if any(size % unit for size in (*growing[:2], last)):
        return None  # batches that are no whole microbatches have a rule of their own
    group = microbatch_group_size_per_virtual_pipeline_stage or pipeline_model_parallel_size
    for size in (*growing[: group if virtual_stages > 1 else 1], last):  # remainders by the group repeat themselves
        config = ScheduleConfig(
            num_microbatches=size // unit,
            pp=pipeline_model_parallel_size,
            vpp=virtual_stages,
            group_size=microbatch_group_size_per_virtual_pipeline_stage,
        )
        try:
            check_schedule(config)
        except ScheduleError as error:
            return str(error), _mended(config, unit)
    return None


def something_travels_while_another_computes(
    overlap_moe_expert_parallel_comm: bool,
    num_experts: int | None,
    expert_model_parallel_size: int,
    moe_token_dispatcher_type: str,
    pipeline_model_parallel_size: int,
    virtual_stages: int,
) -> Violation:
    """Pairs of microbatches hide an exchange of rows between ranks; over a pipeline they need virtual stages."""
    if not overlap_moe_expert_parallel_comm or expert_model_parallel_size == 1:
        return None  # on one expert-parallel rank nothing travels, and the order is the plain one
    if not num_experts:
        return None  # experts over several ranks are refused by a rule of their own
    if moe_token_dispatcher_type == "allgather":
        return (
            "--overlap-moe-expert-parallel-comm hides an all-to-all, and the dispatcher is allgather",
            "use --moe-token-dispatcher-type alltoall",
        )
    if pipeline_model_parallel_size > 1 and virtual_stages == 1:
        return (
            f"--overlap-moe-expert-parallel-comm over {pipeline_model_parallel_size} pipeline ranks needs virtual "
            f"stages",
            "give --num-virtual-stages-per-pipeline-rank 2 or a layout with more stages",
        )
    return None


def nothing_else_cuts_the_layers_of_a_pair(
    overlap_moe_expert_parallel_comm: bool,
    mtp_num_layers: int | None,
    recompute_granularity: str | None,
    recompute_method: str | None,
    recompute_num_layers: int | None,
    recompute_modules: tuple[str, ...] | None,
) -> Violation:
    """Layers that run node by node cannot be recomputed as wholes."""
    if not overlap_moe_expert_parallel_comm:
        return None
    whole = recompute_granularity == "full" or recompute_method is not None or recompute_num_layers is not None
    if whole or "moe" in (recompute_modules or ()):
        what = "whole layers" if whole else "whole MoE blocks"
        return (
            f"--overlap-moe-expert-parallel-comm runs layers node by node, and {what} are to be recomputed",
            "recompute smaller modules: --recompute-granularity selective --recompute-modules core_attn moe_act",
        )
    if mtp_num_layers is not None and mtp_num_layers > 1:
        return (
            f"--overlap-moe-expert-parallel-comm with {mtp_num_layers} layers of multi-token prediction",
            "use --mtp-num-layers 1",
        )
    return None


def early_release_belongs_to_pairs(
    overlap_moe_expert_parallel_comm: bool, ep_overlap_early_attn_memory_release: bool
) -> Violation:
    """It moves a node of a pair."""
    if ep_overlap_early_attn_memory_release and not overlap_moe_expert_parallel_comm:
        return (
            "--ep-overlap-early-attn-memory-release changes the order of a schedule that is not asked for",
            "add --overlap-moe-expert-parallel-comm, or leave it out",
        )
    return None


def _mended(config: ScheduleConfig, unit: int) -> str:
    if config.pp == 1:
        return "leave out virtual stages, or raise --pipeline-model-parallel-size"
    more = -(-config.num_microbatches // config.pp) * config.pp
    return f"{more} microbatches fit groups of {config.pp}: --global-batch-size {more * unit}"


RULES = (
    layers_are_placed_once,
    layers_fit_the_stages,
    microbatches_fill_the_stages,
    something_travels_while_another_computes,
    nothing_else_cuts_the_layers_of_a_pair,
    early_release_belongs_to_pairs,
)
