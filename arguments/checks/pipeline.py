"""Rules about pipeline stages, the schedule, and overlap of expert communication."""

from arguments import derive
from arguments.checks.violation import RuleFlags, Violations, conflict, enabled_options, lacks, lists_given_flags
from megatron_moe.config.pipeline import ScheduleConfig
from megatron_moe.config.pipeline_layout import LayoutError
from megatron_moe.pipeline.schedule import ScheduleError, check_schedule


def layer_placement_given_once(flags: RuleFlags) -> Violations:
    """Layers are assigned to stages in one of three ways: by a layout; by the layer counts of the first and the last
    stage; or evenly, where flags can count the embedding and the loss as layers."""
    ends = flags.decoder_first_pipeline_num_layers is not None or flags.decoder_last_pipeline_num_layers is not None
    counted = flags.account_for_embedding_in_pipeline_split or flags.account_for_loss_in_pipeline_split
    virtual = (
        flags.num_layers_per_virtual_pipeline_stage is not None,
        flags.num_virtual_stages_per_pipeline_rank is not None,
    )
    if all(virtual):
        yield "both the number of virtual stages and their number of layers are given", "remove one of the two"
    elif flags.pipeline_model_parallel_layout is not None:
        written = flags.pipeline_model_parallel_layout != derive.AUTO and virtual[1]
        if ends or counted or virtual[0] or written:
            yield (
                f"--pipeline-model-parallel-layout {flags.pipeline_model_parallel_layout} with other flags that "
                f"place layers",
                "remove the other flags, or the layout",
            )
    elif ends and (counted or virtual[0]):
        yield (
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers is given with other flags that "
            "place layers",
            "combine them only with --num-virtual-stages-per-pipeline-rank, or use a layout",
        )


@lists_given_flags
def layers_fit_stages(flags: RuleFlags) -> Violations:
    """Every layer belongs to one stage. Without a layout, all stages except the first and the last have the same number
    of layers."""
    try:
        derive.pipeline_layout(flags)
    except LayoutError as error:
        if flags.pipeline_model_parallel_layout not in (None, derive.AUTO):
            yield str(error), "fix the layout (docs/schedule.md has the syntax), or use `auto`"
        yield str(error), "--pipeline-model-parallel-layout auto places any number of layers"


def microbatches_fill_stages(flags: RuleFlags) -> Violations:
    """With virtual stages, microbatches run in groups; a group smaller than the number of pipeline ranks deadlocks."""
    last = derive.global_batch_size(flags, flags.data_parallel_size)
    start, increment, _ = flags.rampup_batch_size or (last, 1, 0)
    unit = flags.micro_batch_size * flags.data_parallel_size
    growing = range(start, last, max(increment, 1))
    steps = {size for _, size in derive.step_batch_sizes(flags)}
    if any(size % unit for size in (*growing[:2], *steps, last)):
        return  # checked by global_batch_is_whole_microbatches, rampup_steps_are_whole and step_batch_sizes_are_whole
    group = flags.microbatch_group_size_per_virtual_pipeline_stage or flags.pipeline_model_parallel_size
    few = growing[: group if flags.virtual_stages > 1 else 1]  # later sizes repeat the remainders
    for size in dict.fromkeys((*few, *sorted(steps), last)):
        config = ScheduleConfig(
            num_microbatches=size // unit,
            pp=flags.pipeline_model_parallel_size,
            vpp=flags.virtual_stages,
            group_size=flags.microbatch_group_size_per_virtual_pipeline_stage,
        )
        try:
            check_schedule(config)
        except ScheduleError as error:
            schedule = "the sizes of --step-batch-size-schedule" if size in steps else "--global-batch-size"
            option = "the start and increment of --rampup-batch-size" if size in growing else schedule
            yield str(error), _fitting_batch(config, unit, option)


def ep_overlap_has_exchange(flags: RuleFlags) -> Violations:
    """The token exchange of one microbatch overlaps with computation of another, unless the dispatcher is allgather.
    With pipeline parallelism, this overlap needs virtual stages."""
    if not flags.overlap_moe_expert_parallel_comm or flags.expert_model_parallel_size == 1:
        return  # nothing to overlap, so the plain schedule is used
    if not flags.num_experts:
        return  # checked by expert_parallelism_needs_experts
    if flags.moe_token_dispatcher_type == "allgather":
        remedy = "use --moe-token-dispatcher-type alltoall"
        yield conflict("--overlap-moe-expert-parallel-comm", "--moe-token-dispatcher-type allgather", remedy)
    elif flags.pipeline_model_parallel_size > 1 and flags.virtual_stages == 1:
        yield (
            f"--overlap-moe-expert-parallel-comm over {flags.pipeline_model_parallel_size} pipeline ranks needs "
            f"virtual stages",
            "give --num-virtual-stages-per-pipeline-rank 2 or a layout with more stages",
        )


def wgrad_overlap_excludes_other_delays(flags: RuleFlags) -> Violations:
    """Weight gradients can be delayed either until the next exchange of the microbatch or by the pipeline schedule, not
    both."""
    others = {
        "--overlap-moe-expert-parallel-comm": flags.overlap_moe_expert_parallel_comm,
        "--delay-wgrad-compute": flags.delay_wgrad_compute,
    }
    if flags.overlap_dispatch_backward_with_experts_wgrad and any(others.values()):
        yield conflict(
            "--overlap-dispatch-backward-with-experts-wgrad",
            f"{enabled_options(others)}, which also delays weight gradients",
            "choose one of them",
        )


def ep_overlap_excludes_whole_layer_recompute_and_several_mtp_layers(flags: RuleFlags) -> Violations:
    """With --overlap-moe-expert-parallel-comm, a layer runs as separate schedule nodes and cannot be recomputed as a
    whole. Only one layer of multi-token prediction is supported."""
    if not flags.overlap_moe_expert_parallel_comm:
        return
    whole = (
        flags.recompute_granularity == "full"
        or flags.recompute_method is not None
        or flags.recompute_num_layers is not None
    )
    if whole or "moe" in (flags.recompute_modules or ()):
        what = "whole layers" if whole else "whole MoE blocks"
        remedy = "recompute smaller modules: --recompute-granularity selective --recompute-modules core_attn moe_act"
        yield conflict("--overlap-moe-expert-parallel-comm", f"recomputation of {what}", remedy)
    elif flags.mtp_num_layers is not None and flags.mtp_num_layers > 1:
        yield conflict(
            "--overlap-moe-expert-parallel-comm",
            f"{flags.mtp_num_layers} layers of multi-token prediction",
            "use --mtp-num-layers 1",
        )


def early_release_needs_ep_overlap(flags: RuleFlags) -> Violations:
    """Early release of attention memory reorders the steps of two microbatches that overlap."""
    if flags.ep_overlap_early_attn_memory_release and not flags.overlap_moe_expert_parallel_comm:
        remedy = "add --overlap-moe-expert-parallel-comm, or leave it out"
        yield lacks("--ep-overlap-early-attn-memory-release", "--overlap-moe-expert-parallel-comm", remedy)


def _fitting_batch(config: ScheduleConfig, unit: int, option: str) -> str:
    """Remedy for a batch of `config.num_microbatches` microbatches of `unit` sequences, which `option` sets."""
    group = config.group
    if config.pp == 1:
        return "leave out virtual stages, or raise --pipeline-model-parallel-size"
    if group < config.pp:
        return f"--microbatch-group-size-per-virtual-pipeline-stage {config.pp}"
    if option != "--global-batch-size":
        return f"use multiples of {group * unit} for {option}"
    more = -(-config.num_microbatches // group) * group
    return f"{more} microbatches fit groups of {group}: --global-batch-size {more * unit}"
