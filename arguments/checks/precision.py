"""Rules about FP8 and FP4 GEMMs."""

from arguments import derive
from arguments.checks.violation import RuleFlags, Violations, conflict, enabled_options, lacks, missing_feature
from arguments.precision_file import read_module_precision
from megatron_moe.config.precision import low_precision_config, quantization_recipe
from megatron_moe.config.registry import QUANTIZATION_RECIPES
from megatron_moe.config.text import counted


def _low_precision(flags: RuleFlags) -> str:
    """Returns the option that requests FP8 or FP4 GEMMs, or an empty string."""
    if flags.fp8_format:
        return f"--fp8-format {flags.fp8_format}"
    return f"--fp4-format {flags.fp4_format}" if flags.fp4_format else ""


def one_low_precision_format(flags: RuleFlags) -> Violations:
    """GEMMs are computed either in FP8 or in FP4."""
    if flags.fp8_format and flags.fp4_format:
        yield conflict(f"--fp8-format {flags.fp8_format}", f"--fp4-format {flags.fp4_format}")


def fp8_recipe_is_for_fp8(flags: RuleFlags) -> Violations:
    """FP4 recipes are selected by --fp4-recipe, not by --fp8-recipe."""
    if quantization_recipe(flags.fp8_recipe).family != "fp8":
        yield f"--fp8-recipe {flags.fp8_recipe}", f"use --fp4-format e2m1 --fp4-recipe {flags.fp8_recipe}"


def loss_scaling_needs_the_nan_check(flags: RuleFlags) -> Violations:
    """Loss scaling for fp16 finds overflows with the NaN check, skips these steps and halves the scale, at the least to
    --min-loss-scale. After --loss-scale-window steps without overflow, it doubles the scale. A captured step does not
    read the scale."""
    if not flags.fp16:
        return
    if not flags.check_for_nan_in_loss_and_grad:
        remedy = "leave out --no-check-for-nan-in-loss-and-grad"
        yield lacks("--fp16", "the NaN check, which finds the overflows of scaled gradients", remedy)
    if flags.cuda_graph_impl == "full_iteration":
        yield conflict(
            "--fp16", "--cuda-graph-impl full_iteration: a captured step does not read the loss scale", "use --bf16"
        )
    if flags.min_loss_scale > flags.initial_loss_scale:
        yield (
            f"--min-loss-scale {flags.min_loss_scale:g} exceeds --initial-loss-scale {flags.initial_loss_scale:g}",
            "lower --min-loss-scale",
        )


def low_precision_needs_bf16(flags: RuleFlags) -> Violations:
    """FP8 and FP4 tensor cores read operands quantised from bf16 and return bf16. The emulation has no such limit."""
    if _low_precision(flags) and not flags.bf16 and not flags.emulate_low_precision:
        yield conflict(_low_precision(flags), "parameters in a wider dtype", "add --bf16, or --emulate-low-precision")


def emulation_needs_low_precision(flags: RuleFlags) -> Violations:
    """--emulate-low-precision concerns FP8 and FP4 GEMMs only."""
    if flags.emulate_low_precision and not _low_precision(flags):
        yield "--emulate-low-precision has no effect: no GEMM is computed in FP8 or FP4", "add --fp8-format"


def low_precision_activations_need_weight_gradients(flags: RuleFlags) -> Violations:
    """Saving inputs in low precision requires weight gradients that are computed from these copies."""
    option = "--low-precision-activation-modules"
    if flags.low_precision_activation_modules is None:
        return
    if not _low_precision(flags):
        yield f"{option} has no effect: all GEMMs use the dtype of the parameters", "add --fp8-format, or leave it out"
    elif not flags.fp8_wgrad:
        yield conflict(option, "--no-fp8-wgrad, which reads the unquantised inputs")


def saved_activation_inputs_need_scales_per_row(flags: RuleFlags) -> Violations:
    """Saving activation inputs in FP8 requires a recipe that quantises blocks within a row. Neither the paged stash nor
    activations with a bias support it."""
    option = "--activation-func-fp8-input-store"
    if not flags.activation_func_fp8_input_store:
        return
    if not flags.fp8_format or low_precision_config(flags.fp8_recipe).fused_block is None:
        given = f"--fp8-recipe {flags.fp8_recipe}" if flags.fp8_format else "GEMMs in the dtype of the parameters"
        yield conflict(option, given, "use --fp8-format and --fp8-recipe blockwise or mxfp8, or leave it out")
    elif flags.moe_paged_stash:
        yield conflict(option, "--moe-paged-stash, whose pages hold rows in bf16")
    elif flags.add_bias_linear:
        yield conflict(option, "--add-bias-linear, whose activations save bf16")


def fp8_output_layer_needs_mxfp8(flags: RuleFlags) -> Violations:
    """The output layer supports only the FP8 recipe with the smallest blocks, and no loss in chunks."""
    if not flags.fp8_output_proj:
        return
    if not flags.fp8_format or flags.fp8_recipe != "mxfp8":
        given = f"--fp8-recipe {flags.fp8_recipe}" if flags.fp8_format else "GEMMs in the dtype of the parameters"
        yield conflict("--fp8-output-proj", given, "use --fp8-format and --fp8-recipe mxfp8, or leave it out")
    elif flags.cross_entropy_loss_fusion and flags.cross_entropy_fusion_impl == "linear":
        yield conflict(
            "--fp8-output-proj", "--cross-entropy-fusion-impl linear, which fuses the output layer into the loss"
        )


def bf16_layers_are_on_first_and_last_stage(flags: RuleFlags) -> Violations:
    """--first-last-layers-bf16 may select only layers of the first and the last pipeline rank, and not with delayed
    scaling."""
    if not flags.first_last_layers_bf16 or not flags.fp8_format:  # Megatron does not check them for FP4
        return
    if quantization_recipe(flags.fp8_recipe).has_history:
        remedy = "use another recipe, such as tensorwise"
        yield conflict("--first-last-layers-bf16", f"--fp8-recipe {flags.fp8_recipe}", remedy)
    most = flags.num_layers // flags.pipeline_model_parallel_size
    for option, number in (
        ("--num-layers-at-start-in-bf16", flags.num_layers_at_start_in_bf16),
        ("--num-layers-at-end-in-bf16", flags.num_layers_at_end_in_bf16),
    ):
        if number > most:
            yield f"{option} {number} exceeds the {counted(most, 'layer')} of a pipeline rank", f"use at most {most}"


def router_padding_needs_low_precision(flags: RuleFlags) -> Violations:
    """Expert rows are padded for the blocks of FP8 and FP4, by dispatchers that sort rows after the exchange. The
    number of rows must not be fixed by expert choice."""
    padding = "--moe-router-padding-for-quantization"
    if not flags.moe_router_padding_for_quantization:
        return
    if not _low_precision(flags):
        remedy = "add --fp8-format, or leave it out"
        yield f"{padding} has no effect: all GEMMs use the dtype of the parameters", remedy
    elif flags.num_experts and flags.moe_token_dispatcher_type == "allgather" and flags.expert_model_parallel_size > 1:
        yield conflict(padding, "--moe-token-dispatcher-type allgather", "use alltoall or flex, or leave it out")
    elif "expert_choice" in flags.moe_router_load_balancing_type:
        yield conflict(padding, "expert choice, which selects a fixed number of rows")


def fp8_exchange_matches_the_recipe(flags: RuleFlags) -> Violations:
    """Tokens are sent in the format that the expert GEMMs read, so the exchange format must match the recipe."""
    recipes = {
        dtype: name for name in QUANTIZATION_RECIPES.names() if (dtype := quantization_recipe(name).exchange_dtype)
    }
    for option, dtype in _fp8_exchanges(flags).items():
        if not flags.fp8_format or quantization_recipe(flags.fp8_recipe).exchange_dtype != dtype:
            given = f"--fp8-recipe {flags.fp8_recipe}" if flags.fp8_format else "experts that do not compute in FP8"
            needed = f"--fp8-format e4m3 --fp8-recipe {recipes[dtype]}"
            yield conflict(f"{option} {dtype}", given, f"use {needed}, or {option} bf16")


def fp8_exchange_has_a_transport(flags: RuleFlags) -> Violations:
    """Only the flex dispatcher can send FP8, within one host, through symmetric memory (which replaces ncclep) or,
    for multiples of 128 elements per token, DeepEP."""
    options = " and ".join(f"{option} {dtype}" for option, dtype in _fp8_exchanges(flags).items())
    if not options:
        return
    ranks, remedy = derive.expert_ranks(flags), "use bf16, or --moe-token-dispatcher-type flex within one host"
    library, width = flags.moe_flex_dispatcher_backend, flags.moe_latent_size or flags.hidden_size
    transport = derive.expert_transport(flags, flags.ranks_per_host).transport
    if not flags.num_experts or ranks == 1:
        yield f"{options} cannot have an effect: no token is sent to another rank", "leave them out"
    elif flags.moe_token_dispatcher_type != "flex":
        yield conflict(options, f"--moe-token-dispatcher-type {flags.moe_token_dispatcher_type}", remedy)
    elif not transport.sends_fp8 and transport.name == library:
        yield conflict(options, f"--moe-flex-dispatcher-backend {library}", "use symmetric or deepep, or bf16")
    elif not transport.sends_fp8:
        yield f"{options} over {ranks} expert ranks, with {flags.ranks_per_host} on a host", remedy
    elif library == "deepep" and width % 128:
        yield conflict(
            options,
            f"--moe-flex-dispatcher-backend deepep and tokens of {width} elements, not multiples of 128",
            "use --moe-flex-dispatcher-backend symmetric, or bf16",
        )


def fp8_exchange_excludes_changes_of_rows(flags: RuleFlags) -> Violations:
    """Expert GEMMs can read the received bytes only if the rows are not changed between the exchange and their
    quantisation."""
    if flags.moe_dispatch_fwd_dtype != "bf16" and flags.moe_apply_probs_on_input:
        yield conflict(
            f"--moe-dispatch-fwd-dtype {flags.moe_dispatch_fwd_dtype}",
            "--moe-apply-probs-on-input, which scales received tokens",
        )
    if flags.moe_combine_bwd_dtype == "bf16":
        return
    changes = {
        "--no-moe-memory-efficient-permutation": not flags.moe_memory_efficient_permutation,
        "biases of experts": flags.add_bias_linear,
    }
    if any(changes.values()):
        yield conflict(
            f"--moe-combine-bwd-dtype {flags.moe_combine_bwd_dtype}",
            f"{enabled_options(changes)}, whose gradients need the format of the activations",
            "add --disable-bias-linear and leave out --no-moe-memory-efficient-permutation, or use bf16",
        )


def _fp8_exchanges(flags: RuleFlags) -> dict[str, str]:
    """Maps each option that requests an FP8 exchange to its value."""
    dtypes = {
        "--moe-dispatch-fwd-dtype": flags.moe_dispatch_fwd_dtype,
        "--moe-combine-bwd-dtype": flags.moe_combine_bwd_dtype,
    }
    return {option: dtype for option, dtype in dtypes.items() if dtype != "bf16"}


@missing_feature
def logits_have_the_dtype_of_the_parameters(flags: RuleFlags) -> Violations:
    """Logits have the dtype of the parameters, like the results of all other layers."""
    params = "fp64" if flags.fp64 else "bf16" if flags.bf16 else "fp32"
    if flags.output_logit_dtype not in (None, params):
        given = f"--output-logit-dtype {flags.output_logit_dtype}"
        yield conflict(given, f"parameters in {params}", "leave it out; the loss is computed in fp32 or wider")


def precision_file_is_valid(flags: RuleFlags) -> Violations:
    """The file selects recipes of modules by name patterns; kernels are selected for one recipe per run."""
    if flags.te_precision_config_file is None:
        return
    option = f"--te-precision-config-file {flags.te_precision_config_file}"
    try:
        overrides = read_module_precision(flags.te_precision_config_file)
    except ValueError as error:
        yield f"{option}: {error}", "correct the file"
        return
    if not _low_precision(flags):
        yield lacks(option, "--fp8-format or --fp4-format", "add one of them")
        return
    own = f"{flags.fp4_recipe} e2m1" if flags.fp4_format else f"{flags.fp8_recipe} {flags.fp8_format}"
    others = sorted({each.config.name for each in overrides if each.config} - {own})
    if others and not flags.emulate_low_precision:
        yield f"{option} uses {', '.join(others)} besides {own}", "use one recipe, or --emulate-low-precision"


def stored_weights_need_a_sharded_optimizer(flags: RuleFlags) -> Violations:
    """Weights stored in FP8 or FP4 require FP8 or FP4 GEMMs and the distributed optimizer, whose ranks quantise their
    master weights."""
    for option, is_on, low in (
        ("--fp8-param-gather", flags.fp8_param_gather, flags.fp8_format),
        ("--fp4-param-gather", flags.fp4_param_gather, flags.fp4_format),
    ):
        fmt = option.replace("param-gather", "format")
        if is_on and not low:
            yield lacks(option, fmt, f"add {fmt}, or leave it out")
        elif is_on and derive.sharding_strategy(flags) == "no_shard":
            yield lacks(option, "--use-distributed-optimizer", "add it")


def reused_gradients_need_mxfp8(flags: RuleFlags) -> Violations:
    """--reuse-grad-buf-for-mxfp8-param-ag applies only to mxfp8, the only recipe whose weights Megatron-LM does not
    gather in place."""
    if flags.reuse_grad_buf_for_mxfp8_param_ag and flags.fp8_recipe != "mxfp8":
        remedy = "leave it out, or use --fp8-recipe mxfp8"
        yield conflict("--reuse-grad-buf-for-mxfp8-param-ag", f"--fp8-recipe {flags.fp8_recipe}", remedy)
