"""Rules about what the optimizer keeps, in which formats and where, and how gradients and weights travel to and from
it."""

from arguments.checks.violation import Violation

_AWARE = "--use-precision-aware-optimizer"


def formats_belong_to_the_precision_aware_optimizer(
    use_precision_aware_optimizer: bool,
    main_grads_dtype: str,
    main_params_dtype: str,
    exp_avg_dtype: str,
    exp_avg_sq_dtype: str,
) -> Violation:
    """Megatron's rule: without the switch everything is fp32."""
    named = {
        "--main-grads-dtype": main_grads_dtype,
        "--main-params-dtype": main_params_dtype,
        "--exp-avg-dtype": exp_avg_dtype,
        "--exp-avg-sq-dtype": exp_avg_sq_dtype,
    }
    narrow = ", ".join(f"{name} {value}" for name, value in named.items() if value != "fp32")
    if use_precision_aware_optimizer or not narrow:
        return None
    return f"{narrow} without {_AWARE}", f"give {_AWARE}"


def formats_are_of_bf16_parameters(bf16: bool, main_grads_dtype: str, main_params_dtype: str) -> Violation:
    """Masters and gradients are not kept in a narrower format than the parameters."""
    named = {"--main-grads-dtype": main_grads_dtype, "--main-params-dtype": main_params_dtype}
    narrow = " and ".join(f"{name} {value}" for name, value in named.items() if value != "fp32")
    if bf16 or not narrow:
        return None
    return f"{narrow} for parameters in a wider format", "give --bf16, or leave it out"


def double_precision_is_everywhere(fp64: bool, exp_avg_dtype: str, exp_avg_sq_dtype: str) -> Violation:
    """A proof in double precision keeps all state in it."""
    if fp64 and (exp_avg_dtype, exp_avg_sq_dtype) != ("fp32", "fp32"):
        return f"--fp64 with moments in {exp_avg_dtype} and {exp_avg_sq_dtype}", "leave out --fp64, or the formats"
    return None


def gradients_have_one_format(main_grads_dtype: str, accumulate_allreduce_grads_in_fp32: bool) -> Violation:
    """The optimizer reads the buffer in which gradients are summed."""
    if main_grads_dtype == "bf16" and accumulate_allreduce_grads_in_fp32:
        return (
            "--main-grads-dtype bf16 with --accumulate-allreduce-grads-in-fp32",
            "leave one of them out: the optimizer reads gradients where they are summed",
        )
    return None


def blocks_hold_finite_numbers(
    check_for_nan_in_loss_and_grad: bool, main_params_dtype: str, exp_avg_dtype: str, exp_avg_sq_dtype: str
) -> Violation:
    """One number that is not finite would spoil the scale of its whole block for good."""
    scaled = sorted({main_params_dtype, exp_avg_dtype, exp_avg_sq_dtype} & {"fp16", "fp8"})
    if check_for_nan_in_loss_and_grad or not scaled:
        return None
    return (
        f"optimizer state in {' and '.join(scaled)}, whose 128 neighbours share a scale, without a check for numbers "
        f"that are not finite",
        "leave out --no-check-for-nan-in-loss-and-grad",
    )


def state_waits_in_one_way(optimizer_cpu_offload: bool, chunked_optimizer_state_offload: bool) -> Violation:
    """The host steps the state, or the device does."""
    if optimizer_cpu_offload and chunked_optimizer_state_offload:
        return (
            "--optimizer-cpu-offload steps the state on the host, --chunked-optimizer-state-offload on the device",
            "keep one of them",
        )
    return None


def fractions_are_at_most_one(optimizer_offload_fraction: float, optimizer_state_offload_fraction: float) -> Violation:
    """A share of the state."""
    given = {
        "--optimizer-offload-fraction": optimizer_offload_fraction,
        "--optimizer-state-offload-fraction": optimizer_state_offload_fraction,
    }
    wrong = ", ".join(f"{name} {value:g}" for name, value in given.items() if value > 1)
    return (f"{wrong} is more than there is", "use a number from 0 to 1") if wrong else None


def torch_steps_in_fp32(
    fp64: bool, use_torch_optimizer_for_cpu_offload: bool, optimizer_cpu_offload: bool
) -> Violation:
    """A proof in double precision has one arithmetic."""
    if fp64 and optimizer_cpu_offload and use_torch_optimizer_for_cpu_offload:
        return "--fp64 with torch's optimizer on the host", "leave out --use-torch-optimizer-for-cpu-offload"
    return None


def whole_steps_ask_no_host(
    cuda_graph_impl: str, optimizer_cpu_offload: bool, chunked_optimizer_state_offload: bool
) -> Violation:
    """A recorded step has no host in it, and all its memory stands at fixed places."""
    name = "--optimizer-cpu-offload" if optimizer_cpu_offload else "--chunked-optimizer-state-offload"
    if cuda_graph_impl != "full_iteration" or not (optimizer_cpu_offload or chunked_optimizer_state_offload):
        return None
    return f"--cuda-graph-impl full_iteration with {name}", "leave one of them out, or record parts of layers"


def weights_travel_when_shards_are_stepped(
    overlap_param_gather: bool, use_distributed_optimizer: bool, overlap_grad_reduce: bool
) -> Violation:
    """Only a sharded optimizer gathers weights, and its gradients come in the same buckets."""
    if not overlap_param_gather or (use_distributed_optimizer and overlap_grad_reduce):
        return None
    missing = "--overlap-grad-reduce" if use_distributed_optimizer else "--use-distributed-optimizer"
    return f"--overlap-param-gather without {missing} has nothing to overlap", f"give {missing}"


def updates_hide_on_the_device(
    overlap_optimizer_step: bool, optimizer_cpu_offload: bool, chunked_optimizer_state_offload: bool
) -> Violation:
    """State in host memory travels on streams of its own."""
    name = "--optimizer-cpu-offload" if optimizer_cpu_offload else "--chunked-optimizer-state-offload"
    if overlap_optimizer_step and (optimizer_cpu_offload or chunked_optimizer_state_offload):
        return f"--overlap-optimizer-step with {name}", "leave one of them out"
    return None


def updates_hide_where_weights_are_waited_for(
    overlap_optimizer_step: bool, use_distributed_optimizer: bool, overlap_param_gather: bool
) -> Violation:
    """A forward that waits for all weights leaves nothing to hide the update under."""
    if overlap_optimizer_step and use_distributed_optimizer and not overlap_param_gather:
        return (
            "--overlap-optimizer-step with --use-distributed-optimizer, and all weights gathered before the forward",
            "give --overlap-param-gather too",
        )
    return None


def buckets_have_one_size(ddp_bucket_size: int | None, ddp_num_buckets: int | None) -> Violation:
    """The size of a bucket follows from their number."""
    if ddp_bucket_size is not None and ddp_num_buckets is not None:
        return f"buckets of {ddp_bucket_size} elements and {ddp_num_buckets} of them are both given", "keep one of them"
    return None


def token_sums_are_not_averaged(ddp_average_in_collective: bool, calculate_per_token_loss: bool) -> Violation:
    """With a loss per token gradients are summed over ranks and divided by the tokens of all ranks."""
    if ddp_average_in_collective and calculate_per_token_loss:
        return "a mean over ranks is not a mean over tokens", "leave --ddp-average-in-collective out"
    return None


def fp32_sums_are_sharded(
    ddp_reduce_scatter_with_fp32_accumulation: bool, use_distributed_optimizer: bool
) -> Violation:
    """Gradients are summed where they arrive, each shard at its owner."""
    if ddp_reduce_scatter_with_fp32_accumulation and not use_distributed_optimizer:
        return "only a sharded optimizer sums gradients in shards", "give --use-distributed-optimizer"
    return None


def bf16_gradients_are_of_bf16_weights(grad_reduce_in_bf16: bool, bf16: bool) -> Violation:
    """Gradients are not kept in a narrower format than the weights."""
    if grad_reduce_in_bf16 and not bf16:
        return "gradients in bf16 of weights in a wider format", "give --bf16, or leave --grad-reduce-in-bf16 out"
    return None


RULES = (
    weights_travel_when_shards_are_stepped,
    updates_hide_on_the_device,
    updates_hide_where_weights_are_waited_for,
    buckets_have_one_size,
    token_sums_are_not_averaged,
    fp32_sums_are_sharded,
    bf16_gradients_are_of_bf16_weights,
    formats_belong_to_the_precision_aware_optimizer,
    formats_are_of_bf16_parameters,
    double_precision_is_everywhere,
    gradients_have_one_format,
    blocks_hold_finite_numbers,
    state_waits_in_one_way,
    fractions_are_at_most_one,
    torch_steps_in_fp32,
    whole_steps_ask_no_host,
)
