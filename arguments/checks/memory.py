"""Rules about saved activations: recompute, offloading and the paged stash."""

from arguments import derive
from arguments.checks.violation import Violation, functions_returning, missing_feature

_OFFLOAD = "--fine-grained-activation-offloading"
_PAGED = "--moe-paged-stash"
_FULL = "--recompute-granularity full"
_SELECTIVE = "--recompute-granularity selective"


def full_recompute_selects_layers(
    recompute_granularity: str | None, recompute_method: str | None, recompute_num_layers: int | None
) -> Violation:
    """Full recompute needs a method and a number of layers."""
    if recompute_granularity != "full" or (recompute_method and recompute_num_layers):
        return None
    return (f"{_FULL} does not select layers", "give --recompute-method uniform or block, and --recompute-num-layers")


def given_recompute_layer_flags(recompute_method: str | None, recompute_num_layers: int | None) -> list[str]:
    """Returns the given flags that select layers for full recompute."""
    given = {"--recompute-method": recompute_method, "--recompute-num-layers": recompute_num_layers}
    return [name for name, value in given.items() if value is not None]


def recompute_method_needs_full(
    recompute_granularity: str | None, recompute_method: str | None, recompute_num_layers: int | None
) -> Violation:
    """Selective recompute applies to every layer."""
    names = " and ".join(given_recompute_layer_flags(recompute_method, recompute_num_layers))
    if recompute_granularity != "selective" or not names:
        return None
    return f"{names} with {_SELECTIVE}", f"leave out {names}, or give {_FULL}"


def recompute_modules_need_selective(
    recompute_granularity: str | None, recompute_modules: tuple[str, ...] | None
) -> Violation:
    """Only selective recompute has a list of modules."""
    if recompute_modules is None or recompute_granularity == "selective":
        return None
    return f"--recompute-modules without {_SELECTIVE}", f"give {_SELECTIVE}, or leave out --recompute-modules"


def recompute_modules_exist(
    recompute_modules: tuple[str, ...] | None, multi_latent_attention: bool, enable_hyper_connections: bool
) -> Violation:
    """The module of a feature exists only if the feature is enabled."""
    if "mhc" in (recompute_modules or ()) and not enable_hyper_connections:
        return "--recompute-modules mhc has nothing to recompute: there are no hyper-connections", "leave out mhc"
    if "mla_up_proj" in (recompute_modules or ()) and not multi_latent_attention:
        return (
            "--recompute-modules mla_up_proj has nothing to recompute: attention is not multi-latent",
            "leave out mla_up_proj, or give --multi-latent-attention",
        )
    return None


def overlapped_shared_experts_are_not_recomputed(
    recompute_modules: tuple[str, ...] | None, moe_shared_expert_overlap: bool
) -> Violation:
    """Overlapped shared experts run in two halves at different nodes of the layer."""
    if "shared_experts" not in (recompute_modules or ()) or not moe_shared_expert_overlap:
        return None
    return (
        "--recompute-modules shared_experts with --moe-shared-expert-overlap",
        "leave out --moe-shared-expert-overlap, or do not recompute shared_experts",
    )


def saved_activations_can_be_distributed(
    distribute_saved_activations: bool,
    recompute_granularity: str | None,
    tensor_model_parallel_size: int,
    sequence_parallel: bool,
) -> Violation:
    """Tensor-parallel ranks each keep a part of the inputs that they would otherwise all save."""
    if not distribute_saved_activations:
        return None
    if recompute_granularity != "full":
        return f"--distribute-saved-activations without {_FULL}", f"give {_FULL}, or leave it out"
    if tensor_model_parallel_size == 1:
        return "--distribute-saved-activations needs several tensor-parallel ranks", "remove it"
    if sequence_parallel:
        return (
            "--distribute-saved-activations with --sequence-parallel, which already distributes them",
            "leave out --distribute-saved-activations",
        )
    return None


def offload_modules_match_switch(
    fine_grained_activation_offloading: bool, offload_modules: tuple[str, ...]
) -> Violation:
    """--offload-modules selects the modules of fine-grained activation offloading."""
    if fine_grained_activation_offloading == bool(offload_modules):
        return None
    if offload_modules:
        return f"--offload-modules without {_OFFLOAD}", f"give {_OFFLOAD}, or leave out --offload-modules"
    return f"{_OFFLOAD} without modules", "give --offload-modules, such as expert_fc1 moe_act"


def offloaded_modules_free_memory(offload_modules: tuple[str, ...]) -> Violation:
    """The output projection of attention saves the tensor that core attention saves too."""
    if "attn_proj" in offload_modules and "core_attn" not in offload_modules:
        return (
            "--offload-modules attn_proj frees no memory: core_attn saves the same tensor",
            "add core_attn, or remove attn_proj",
        )
    return None


def offloaded_modules_are_not_recomputed(
    fine_grained_activation_offloading: bool,
    offload_modules: tuple[str, ...],
    recompute_granularity: str | None,
    recompute_modules: tuple[str, ...] | None,
) -> Violation:
    """A recomputed module saves no inner activations that could be offloaded."""
    if not fine_grained_activation_offloading:
        return None
    if recompute_granularity == "full":
        return f"{_OFFLOAD} with {_FULL}, which saves layer inputs only", f"leave out {_OFFLOAD}"
    inside = [name for name in offload_modules if name in ("expert_fc1", "moe_act")]
    if recompute_granularity == "selective" and "moe" in (recompute_modules or ()) and inside:
        return (
            f"--offload-modules {' '.join(inside)} with --recompute-modules moe, which saves no inner activations",
            f"leave out {' '.join(inside)}, or recompute moe_act instead of moe",
        )
    return None


@missing_feature
def offloading_excludes_cuda_graphs(fine_grained_activation_offloading: bool, cuda_graph_impl: str) -> Violation:
    """Activations of a captured graph have fixed device addresses."""
    if not fine_grained_activation_offloading or cuda_graph_impl == "none":
        return None
    return f"{_OFFLOAD} with --cuda-graph-impl {cuda_graph_impl}", "leave out one of them"


@missing_feature
def paged_stash_has_unused_rows(
    moe_paged_stash: bool,
    num_experts: int | None,
    moe_token_dispatcher_type: str,
    moe_pad_expert_input_to_capacity: bool,
    expert_model_parallel_size: int,
    expert_tensor_parallel_size: int | None,
    tensor_model_parallel_size: int,
) -> Violation:
    """A paged stash saves memory if expert buffers have more rows than are used."""
    if not moe_paged_stash:
        return None
    if not num_experts:
        return f"{_PAGED} without effect: no layer has experts", f"leave out {_PAGED}"
    if moe_pad_expert_input_to_capacity:
        return (
            f"{_PAGED} with --moe-pad-expert-input-to-capacity: all rows of every expert count as used",
            "leave out one of them",
        )
    ranks = derive.expert_ranks(expert_model_parallel_size, expert_tensor_parallel_size, tensor_model_parallel_size)
    if ranks > 1 and moe_token_dispatcher_type == "alltoall":
        return (
            f"{_PAGED} with --moe-token-dispatcher-type alltoall, whose buffers have exactly the received rows",
            f"leave out {_PAGED}, or use --moe-token-dispatcher-type allgather",
        )
    return None


@missing_feature
def paged_stash_supports_saved_tensors(
    moe_paged_stash: bool,
    add_bias_linear: bool,
    moe_apply_probs_on_input: bool,
    moe_memory_efficient_permutation: bool,
    fp8_format: str | None,
    fp4_format: str | None,
) -> Violation:
    """Pages hold the expert inputs, the output of the first GEMM and the activation, in the activation dtype."""
    if not moe_paged_stash:
        return None
    others = {
        "--add-bias-linear": add_bias_linear,
        "--moe-apply-probs-on-input": moe_apply_probs_on_input,
        "--no-moe-memory-efficient-permutation": not moe_memory_efficient_permutation,
        f"--fp8-format {fp8_format}": fp8_format,
        f"--fp4-format {fp4_format}": fp4_format,
    }
    names = [name for name, given in others.items() if given]
    if not names:
        return None
    return f"{_PAGED} with {' and '.join(names)}, which saves other rows too", "leave out one of them"


@missing_feature
def paged_stash_excludes_other_policies(
    moe_paged_stash: bool,
    offload_modules: tuple[str, ...],
    recompute_granularity: str | None,
    recompute_modules: tuple[str, ...] | None,
    cuda_graph_impl: str,
) -> Violation:
    """An activation is offloaded, recomputed, captured or kept in pages."""
    if not moe_paged_stash:
        return None
    offloaded = [name for name in offload_modules if name in ("expert_fc1", "moe_act")]
    selective = recompute_granularity == "selective" and "moe" in (recompute_modules or ())
    others = {
        f"--offload-modules {' '.join(offloaded)}": bool(offloaded),
        _FULL: recompute_granularity == "full",
        "--recompute-modules moe": selective,
        f"--cuda-graph-impl {cuda_graph_impl}": cuda_graph_impl != "none",
    }
    names = [name for name, given in others.items() if given]
    return (f"{_PAGED} with {' and '.join(names)}", "leave out one of them") if names else None


def expert_wgrad_interval_is_supported(
    moe_expert_wgrad_interval: int, num_experts: int | None, moe_paged_stash: bool
) -> Violation:
    """Deferred weight gradients keep the expert rows of several microbatches at full buffer size."""
    option = f"--moe-expert-wgrad-interval {moe_expert_wgrad_interval}"
    if moe_expert_wgrad_interval == 1:
        return None
    if not num_experts:
        return f"{option} without effect: no layer has experts", "--moe-expert-wgrad-interval 1"
    if moe_paged_stash:
        problem = f"{option} with {_PAGED}: deferred rows are saved outside the pages, at full size"
        return problem, f"--moe-expert-wgrad-interval 1, or leave out {_PAGED}"
    return None


def paged_stash_needs_nan_check(moe_paged_stash: bool, check_for_nan_in_loss_and_grad: bool) -> Violation:
    """Rows that overflow the pages are restored as NaN."""
    if not moe_paged_stash or check_for_nan_in_loss_and_grad:
        return None
    return (
        f"{_PAGED} without --check-for-nan-in-loss-and-grad would train on rows that overflowed the pages",
        "leave out --no-check-for-nan-in-loss-and-grad",
    )


def activation_offload_fraction_is_at_most_one(activation_offload_fraction: float) -> Violation:
    """A fraction is at most 1."""
    if activation_offload_fraction <= 1:
        return None
    return f"--activation-offload-fraction {activation_offload_fraction} is above 1", "use 1.0 or less"


RULES = functions_returning(Violation, globals())
