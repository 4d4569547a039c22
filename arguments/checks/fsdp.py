"""Rules about fully sharded data parallelism (`--use-megatron-fsdp`)."""

from arguments import derive
from arguments.checks.violation import RuleFlags, Violations, enabled_options, lacks, missing_feature
from megatron_moe.config.text import counted

_STRATEGY = "--data-parallel-sharding-strategy"


def gradient_sharding_excludes_delayed_gradients(flags: RuleFlags) -> Violations:
    """Gradients of a layer are reduced as soon as its backward has run, so weight gradients cannot be delayed."""
    delayed = enabled_options(
        {
            "--delay-wgrad-compute": flags.delay_wgrad_compute,
            "--moe-expert-wgrad-interval": flags.moe_expert_wgrad_interval > 1,
        }
    )
    if derive.shards_gradients(flags) and delayed:
        yield _given(flags, delayed), f"leave out {delayed}, or use {_STRATEGY} optim"


def gradient_sharding_excludes_averaging(flags: RuleFlags) -> Violations:
    """Sharded gradients are summed over microbatches and replicas and then scaled, so collectives cannot average
    them."""
    if derive.shards_gradients(flags) and flags.ddp_average_in_collective:
        yield _given(flags, "--ddp-average-in-collective"), "leave out --ddp-average-in-collective"


@missing_feature
def captured_experts_are_sharded(flags: RuleFlags) -> Violations:
    """The weight gradients of a captured MoE layer are either all stored or all accumulated. Gradients of sharded
    weights are reduced after every microbatch and therefore stored, those of weights without replicas are accumulated
    over microbatches."""
    captured = "moe" in derive.captured_modules(flags, flags.ranks_per_host)
    if not (captured and flags.num_experts and derive.shards_gradients(flags)):
        return
    copies = flags.num_ranks // (flags.pipeline_model_parallel_size * derive.expert_ranks(flags))
    unit = flags.micro_batch_size * flags.data_parallel_size
    num_microbatches = derive.global_batch_size(flags, flags.data_parallel_size) // unit
    if copies == 1 and flags.num_ranks > flags.pipeline_model_parallel_size and num_microbatches > 1:
        yield (
            _given(flags, f"--cuda-graph-modules moe and one copy of the experts in {num_microbatches} microbatches"),
            "capture attn and moe_router",
        )


def double_buffers_exclude_interleaved_microbatches(flags: RuleFlags) -> Violations:
    """Forward and backward of two overlapped microbatches use the weights of four layers at once, more than two buffers
    hold."""
    overlap = flags.overlap_moe_expert_parallel_comm and flags.expert_model_parallel_size > 1
    if derive.shards_gradients(flags) and derive.gathers_into_two_buffers(flags) and overlap:
        option = "--fsdp-double-buffer" if flags.fsdp_double_buffer else f"--cuda-graph-impl {flags.cuda_graph_impl}"
        yield _given(flags, f"{option} and --overlap-moe-expert-parallel-comm"), f"leave out {option}"


def instances_divide_data_parallel_ranks(flags: RuleFlags) -> Violations:
    """Each replica of the sharded weights is sharded over the same number of ranks, for dense and for expert
    weights."""
    instances = flags.num_distributed_optimizer_instances
    if not derive.shards_gradients(flags) or instances == 1:
        return
    etp = flags.expert_tensor_parallel_size or flags.tensor_model_parallel_size
    expert_ranks = flags.num_ranks // (flags.pipeline_model_parallel_size * flags.expert_model_parallel_size * etp)
    for ranks, grid in ((flags.data_parallel_size, "attention"), (expert_ranks, "experts")):
        if ranks % instances:
            described = counted(ranks, "data-parallel rank")
            remedy = "use a divisor"
            yield f"--num-distributed-optimizer-instances {instances} does not divide the {described} of {grid}", remedy


def outer_sharding_needs_replicas(flags: RuleFlags) -> Violations:
    """--outer-dp-sharding-strategy shards optimizer state over the replicas of sharded weights, which must exist."""
    if flags.outer_dp_sharding_strategy == "no_shard":
        return
    option = "--outer-dp-sharding-strategy optim"
    if derive.sharding_strategy(flags) != "optim_grads_params":
        yield lacks(option, "sharded weights", f"use --use-megatron-fsdp {_STRATEGY} optim_grads_params")
    elif flags.num_distributed_optimizer_instances == 1:
        remedy = "set --num-distributed-optimizer-instances to 2 or more"
        yield f"{option} has no effect with one replica of the weights", remedy


def meta_device_start_needs_gradient_sharding(flags: RuleFlags) -> Violations:
    """Creating the model unit by unit requires buffers per unit, which exist only with sharded gradients."""
    if flags.init_model_with_meta_device and not derive.shards_gradients(flags):
        yield lacks("--init-model-with-meta-device", "sharded gradients", "use --use-megatron-fsdp")


def sharded_weights_exclude_reads_between_steps(flags: RuleFlags) -> Violations:
    """With ZeRO-3, no rank has all weights between steps, so they cannot be compared there."""
    option = "--check-weight-hash-across-dp-replicas-interval"
    if derive.sharding_strategy(flags) == "optim_grads_params" and flags.check_weight_hash_across_dp_replicas_interval:
        yield _given(flags, option), f"leave out {option}, or use {_STRATEGY} optim_grads"


def _given(flags: RuleFlags, other: str) -> str:
    return f"--use-megatron-fsdp {_STRATEGY} {flags.data_parallel_sharding_strategy} cannot be combined with {other}"
