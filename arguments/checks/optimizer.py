"""Rules about optimizer state, its dtypes and offloading, and about gradient and weight communication."""

from arguments import derive
from arguments.checks.violation import RuleFlags, Violations, conflict, lacks
from megatron_moe.config.registry import UPDATE_RULES
from megatron_moe.config.text import counted

_AWARE = "--use-precision-aware-optimizer"


def state_dtypes_need_precision_aware_optimizer(flags: RuleFlags) -> Violations:
    """Megatron keeps all optimizer state in fp32 unless the precision-aware optimizer is enabled."""
    named = {
        "--main-grads-dtype": flags.main_grads_dtype,
        "--main-params-dtype": flags.main_params_dtype,
        "--exp-avg-dtype": flags.exp_avg_dtype,
        "--exp-avg-sq-dtype": flags.exp_avg_sq_dtype,
    }
    narrow = ", ".join(f"{name} {value}" for name, value in named.items() if value != "fp32")
    if not flags.use_precision_aware_optimizer and narrow:
        yield lacks(narrow, _AWARE, f"give {_AWARE}")


def narrow_main_dtypes_need_bf16(flags: RuleFlags) -> Violations:
    """The dtype of main parameters and main gradients must not be narrower than the dtype of the model parameters."""
    named = {"--main-grads-dtype": flags.main_grads_dtype, "--main-params-dtype": flags.main_params_dtype}
    narrow = " and ".join(f"{name} {value}" for name, value in named.items() if value != "fp32")
    if not flags.bf16 and narrow:
        yield conflict(narrow, "parameters in a wider dtype", "set --bf16, or remove it")


def fp64_has_no_narrow_moments(flags: RuleFlags) -> Violations:
    """With --fp64, all optimizer state is fp64."""
    if flags.fp64 and (flags.exp_avg_dtype, flags.exp_avg_sq_dtype) != ("fp32", "fp32"):
        remedy = "leave out --fp64, or --exp-avg-dtype and --exp-avg-sq-dtype"
        yield conflict("--fp64", f"moments in {flags.exp_avg_dtype} and {flags.exp_avg_sq_dtype}", remedy)


def main_grads_have_one_dtype(flags: RuleFlags) -> Violations:
    """The optimizer reads main gradients from the accumulation buffer, so they have the dtype of the buffer."""
    if flags.main_grads_dtype == "bf16" and flags.accumulate_allreduce_grads_in_fp32:
        remedy = "remove one of them: the optimizer reads the accumulation buffer"
        yield conflict("--main-grads-dtype bf16", "--accumulate-allreduce-grads-in-fp32", remedy)


def scaled_state_needs_nan_check(flags: RuleFlags) -> Violations:
    """fp16 and fp8 state has one scale per block of elements, which a single non-finite value would corrupt."""
    scaled = sorted({flags.main_params_dtype, flags.exp_avg_dtype, flags.exp_avg_sq_dtype} & {"fp16", "fp8"})
    if not flags.check_for_nan_in_loss_and_grad and scaled:
        yield (
            f"optimizer state in {' and '.join(scaled)} has one scale per 128 elements and needs the NaN check",
            "leave out --no-check-for-nan-in-loss-and-grad",
        )


def one_way_to_offload_optimizer_state(flags: RuleFlags) -> Violations:
    """Offloaded optimizer state is updated either on the CPU or on the GPU."""
    if flags.optimizer_cpu_offload and flags.chunked_optimizer_state_offload:
        yield (
            "--optimizer-cpu-offload updates the state on the CPU, --chunked-optimizer-state-offload on the GPU",
            "keep one of them",
        )


def matrix_rules_exclude_offload_and_fp16_masters(flags: RuleFlags) -> Violations:
    """Update rules for whole matrices cannot use offloaded state, which is updated in chunks of elements, or fp16
    master weights, whose blocks share a scale."""
    spec = UPDATE_RULES.get(flags.optimizer)
    offload = _state_offload(flags)
    if spec.alignment == "matrix" and offload:
        remedy = f"leave out {offload}"
        yield f"--optimizer {flags.optimizer} updates whole matrices, which {offload} does not support", remedy
    if spec.alignment == "matrix" and flags.main_params_dtype == "fp16":
        yield (
            f"--optimizer {flags.optimizer} updates whole matrices, which --main-params-dtype fp16 does not support",
            "use --main-params-dtype fp32",
        )


def qk_clip_scales_weights_that_set_the_logits(flags: RuleFlags) -> Violations:
    """QK-clip scales the projection weights of q and k, which has no effect if a norm follows the projection. A rank
    must have whole query groups, and the master weights on the GPU in a format without shared scales."""
    if not flags.qk_clip:
        return
    if flags.qk_clip_alpha == 0 or flags.qk_clip_threshold == 0:
        given = f"--qk-clip-alpha {flags.qk_clip_alpha:g} and --qk-clip-threshold {flags.qk_clip_threshold:g}"
        yield f"{given}: both must be above 0", "leave them out for 0.5 and 100"
    normed = flags.qk_l2_norm or (flags.qk_layernorm and not flags.multi_latent_attention)
    if normed:
        norm = "--qk-l2-norm" if flags.qk_l2_norm else "--qk-layernorm"
        yield conflict("--qk-clip", f"{norm}: the norm cancels the scaling of the weights", "remove --qk-clip")
    num_groups = flags.num_query_groups if flags.group_query_attention else flags.num_attention_heads
    if not flags.multi_latent_attention and flags.tensor_model_parallel_size > num_groups:
        yield (
            f"--qk-clip cannot be combined with {flags.tensor_model_parallel_size} tensor-parallel ranks, which "
            f"divide the rows of {counted(num_groups, 'query group')}",
            f"use --tensor-model-parallel-size {num_groups} or less",
        )
    if offload := _state_offload(flags):
        yield conflict("--qk-clip", f"{offload}: master weights in host memory are not rescaled")
    if flags.main_params_dtype == "fp16":
        remedy = "use --main-params-dtype fp32"
        yield conflict("--qk-clip", "--main-params-dtype fp16, whose blocks of elements share a scale", remedy)


def fractions_are_at_most_one(flags: RuleFlags) -> Violations:
    """Offload fractions range from 0 to 1."""
    given = {
        "--activation-offload-fraction": flags.activation_offload_fraction,
        "--optimizer-offload-fraction": flags.optimizer_offload_fraction,
        "--optimizer-state-offload-fraction": flags.optimizer_state_offload_fraction,
    }
    wrong = ", ".join(f"{name} {value:g}" for name, value in given.items() if value > 1)
    if wrong:
        yield f"{wrong} is above 1", "use a number from 0 to 1"


def torch_cpu_optimizer_excludes_fp64(flags: RuleFlags) -> Violations:
    """torch's CPU optimizer updates fp32 state only."""
    if flags.fp64 and flags.optimizer_cpu_offload and flags.use_torch_optimizer_for_cpu_offload:
        yield conflict("--fp64", "torch's CPU optimizer", "leave out --use-torch-optimizer-for-cpu-offload")


def full_iteration_excludes_optimizer_offload(flags: RuleFlags) -> Violations:
    """A captured iteration runs no host code, and all its memory has fixed device addresses."""
    offload = _state_offload(flags)
    if flags.cuda_graph_impl == "full_iteration" and offload:
        yield conflict("--cuda-graph-impl full_iteration", offload, "remove one of them, or capture modules of layers")


def param_gather_overlap_needs_sharded_optimizer(flags: RuleFlags) -> Violations:
    """The distributed optimizer all-gathers weights in the buckets that --overlap-grad-reduce creates."""
    sharded = derive.sharding_strategy(flags) != "no_shard"
    reduces_early = flags.overlap_grad_reduce or derive.shards_gradients(flags)
    if not flags.overlap_param_gather or (sharded and reduces_early):
        return
    missing = "--overlap-grad-reduce" if sharded else "--use-distributed-optimizer"
    yield lacks("--overlap-param-gather", missing, f"give {missing}")


def optimizer_overlap_excludes_offload(flags: RuleFlags) -> Violations:
    """--overlap-optimizer-step supports only state in GPU memory; offloaded state is copied during the step."""
    offload = _state_offload(flags)
    if flags.overlap_optimizer_step and offload:
        yield conflict("--overlap-optimizer-step", offload)


def _state_offload(flags: RuleFlags) -> str:
    """Returns the option that offloads optimizer state, or an empty string if the state is not offloaded."""
    if flags.optimizer_cpu_offload:
        return "--optimizer-cpu-offload"
    return "--chunked-optimizer-state-offload" if flags.chunked_optimizer_state_offload else ""


def optimizer_overlap_needs_param_gather_overlap(flags: RuleFlags) -> Violations:
    """If the forward pass first waits for all gathered weights, it cannot overlap with the optimizer step."""
    gathers_early = flags.overlap_param_gather or derive.sharding_strategy(flags) != "optim"
    if flags.overlap_optimizer_step and flags.use_distributed_optimizer and not gathers_early:
        remedy = "add --overlap-param-gather"
        yield conflict("--overlap-optimizer-step", "--use-distributed-optimizer without --overlap-param-gather", remedy)


def bucket_size_given_once(flags: RuleFlags) -> Violations:
    """The number of buckets already determines the bucket size."""
    if flags.ddp_bucket_size is not None and flags.ddp_num_buckets is not None:
        yield (
            f"--ddp-bucket-size {flags.ddp_bucket_size} and --ddp-num-buckets {flags.ddp_num_buckets} are both given",
            "use one of them",
        )


def per_token_loss_excludes_averaging(flags: RuleFlags) -> Violations:
    """With a per-token loss, gradients are summed over ranks and divided by the number of tokens, not averaged."""
    if flags.ddp_average_in_collective and flags.calculate_per_token_loss:
        remedy = "remove --ddp-average-in-collective"
        yield conflict("--ddp-average-in-collective", "--calculate-per-token-loss", remedy)


def fp32_accumulation_needs_distributed_optimizer(flags: RuleFlags) -> Violations:
    """fp32 accumulation sums gradients in shards, and only the distributed optimizer shards gradients."""
    if flags.ddp_reduce_scatter_with_fp32_accumulation and derive.sharding_strategy(flags) == "no_shard":
        remedy = "set --use-distributed-optimizer"
        yield lacks("--ddp-reduce-scatter-with-fp32-accumulation", "--use-distributed-optimizer", remedy)


def bf16_grad_reduce_needs_bf16(flags: RuleFlags) -> Violations:
    """The dtype of gradients must not be narrower than the dtype of the parameters."""
    if flags.grad_reduce_in_bf16 and not flags.bf16:
        remedy = "set --bf16, or remove --grad-reduce-in-bf16"
        yield conflict("--grad-reduce-in-bf16", "parameters in a wider dtype", remedy)
