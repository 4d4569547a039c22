"""Rules about what is kept between forward and backward, and where."""

from arguments import derive
from arguments.checks.violation import Violation

_MOVED = "--fine-grained-activation-offloading"
_PAGED = "--moe-paged-stash"
_WHOLE = "--recompute-granularity full"
_CHOSEN = "--recompute-granularity selective"


def whole_layers_are_counted(
    recompute_granularity: str | None, recompute_method: str | None, recompute_num_layers: int | None
) -> Violation:
    """Whole layers are recomputed in chunks, or as many as a number says."""
    if recompute_granularity != "full" or (recompute_method and recompute_num_layers):
        return None
    return (
        f"{_WHOLE} does not say which layers",
        "give --recompute-method uniform or block, and --recompute-num-layers",
    )


def whole_layer_flags(recompute_method: str | None, recompute_num_layers: int | None) -> list[str]:
    """The given flags that say which whole layers are recomputed."""
    given = {"--recompute-method": recompute_method, "--recompute-num-layers": recompute_num_layers}
    return [name for name, value in given.items() if value is not None]


def method_belongs_to_whole_layers(
    recompute_granularity: str | None, recompute_method: str | None, recompute_num_layers: int | None
) -> Violation:
    """Chosen modules are recomputed in every layer."""
    names = " and ".join(whole_layer_flags(recompute_method, recompute_num_layers))
    if recompute_granularity != "selective" or not names:
        return None
    return f"{names} with {_CHOSEN}", f"leave out {names}, or give {_WHOLE}"


def modules_belong_to_a_choice(
    recompute_granularity: str | None, recompute_modules: tuple[str, ...] | None
) -> Violation:
    """Modules are recomputed where modules are chosen."""
    if recompute_modules is None or recompute_granularity == "selective":
        return None
    return f"--recompute-modules without {_CHOSEN}", f"give {_CHOSEN}, or leave out --recompute-modules"


def modules_can_be_recomputed(
    recompute_modules: tuple[str, ...] | None, multi_latent_attention: bool, enable_hyper_connections: bool
) -> Violation:
    """A module of a feature exists only where the model has that feature."""
    if "mhc" in (recompute_modules or ()) and not enable_hyper_connections:
        return "--recompute-modules mhc has nothing to recompute: there are no hyper-connections", "leave out mhc"
    if "mla_up_proj" in (recompute_modules or ()) and not multi_latent_attention:
        return (
            "--recompute-modules mla_up_proj has nothing to recompute: attention is not multi-latent",
            "leave out mla_up_proj, or give --multi-latent-attention",
        )
    return None


def overlapped_shared_experts_are_kept(
    recompute_modules: tuple[str, ...] | None, moe_shared_expert_overlap: bool
) -> Violation:
    """Shared experts that work while rows travel have their two halves in two places."""
    if "shared_experts" not in (recompute_modules or ()) or not moe_shared_expert_overlap:
        return None
    return (
        "--recompute-modules shared_experts with --moe-shared-expert-overlap",
        "leave out --moe-shared-expert-overlap, or do not recompute shared_experts",
    )


def saved_inputs_can_be_spread(
    distribute_saved_activations: bool,
    recompute_granularity: str | None,
    tensor_model_parallel_size: int,
    sequence_parallel: bool,
) -> Violation:
    """Ranks of tensor parallelism share out what all of them would keep."""
    if not distribute_saved_activations:
        return None
    if recompute_granularity != "full":
        return f"--distribute-saved-activations without {_WHOLE}", f"give {_WHOLE}, or leave it out"
    if tensor_model_parallel_size == 1:
        return "--distribute-saved-activations has no ranks to spread them over", "leave it out"
    if sequence_parallel:
        return (
            "--distribute-saved-activations with --sequence-parallel, whose ranks keep different parts already",
            "leave out --distribute-saved-activations",
        )
    return None


def offloaded_modules_are_named(
    fine_grained_activation_offloading: bool, offload_modules: tuple[str, ...]
) -> Violation:
    """Modules are chosen where what they save is to move."""
    if fine_grained_activation_offloading == bool(offload_modules):
        return None
    if offload_modules:
        return f"--offload-modules without {_MOVED}", f"give {_MOVED}, or leave out --offload-modules"
    return f"{_MOVED} without modules", "give --offload-modules, such as expert_fc1 moe_act"


def modules_can_be_offloaded(offload_modules: tuple[str, ...]) -> Violation:
    """The last matrix of attention takes what attention itself keeps too."""
    if "attn_proj" in offload_modules and "core_attn" not in offload_modules:
        return (
            "--offload-modules attn_proj frees nothing: core_attn keeps the same tensor",
            "give core_attn as well, or leave out attn_proj",
        )
    return None


def offloaded_modules_are_kept(
    fine_grained_activation_offloading: bool,
    offload_modules: tuple[str, ...],
    recompute_granularity: str | None,
    recompute_modules: tuple[str, ...] | None,
) -> Violation:
    """Of what runs again in the backward nothing inside is kept that could move."""
    if not fine_grained_activation_offloading:
        return None
    if recompute_granularity == "full":
        return f"{_MOVED} with {_WHOLE}, of which inputs of layers alone are kept", f"leave out {_MOVED}"
    inside = [name for name in offload_modules if name in ("expert_fc1", "moe_act")]
    if recompute_granularity == "selective" and "moe" in (recompute_modules or ()) and inside:
        return (
            f"--offload-modules {' '.join(inside)} with --recompute-modules moe, which keeps nothing inside of it",
            f"leave out {' '.join(inside)}, or recompute moe_act instead of moe",
        )
    return None


def offloading_and_graphs_exclude_each_other(
    fine_grained_activation_offloading: bool, cuda_graph_impl: str
) -> Violation:
    """What a replay saves stands at fixed places of the device."""
    if not fine_grained_activation_offloading or cuda_graph_impl == "none":
        return None
    return f"{_MOVED} with --cuda-graph-impl {cuda_graph_impl}", "leave out one of them"


def pages_keep_unused_rows_out(
    moe_paged_stash: bool,
    num_experts: int | None,
    moe_token_dispatcher_type: str,
    moe_pad_expert_input_to_capacity: bool,
    expert_model_parallel_size: int,
    expert_tensor_parallel_size: int | None,
    tensor_model_parallel_size: int,
) -> Violation:
    """Pages save where buffers have a bound and fewer rows come."""
    if not moe_paged_stash:
        return None
    if not num_experts:
        return f"{_PAGED} has nothing to keep: no layer has experts", f"leave out {_PAGED}"
    if moe_pad_expert_input_to_capacity:
        return (
            f"{_PAGED} with --moe-pad-expert-input-to-capacity: all rows of every expert count as used",
            "leave out one of them",
        )
    ranks = derive.expert_ranks(expert_model_parallel_size, expert_tensor_parallel_size, tensor_model_parallel_size)
    if ranks > 1 and moe_token_dispatcher_type == "alltoall":
        return (
            f"{_PAGED} with --moe-token-dispatcher-type alltoall, whose buffers have exactly the rows that come",
            f"leave out {_PAGED}, or use --moe-token-dispatcher-type allgather",
        )
    return None


def pages_keep_rows_of_experts_alone(
    moe_paged_stash: bool,
    add_bias_linear: bool,
    moe_apply_probs_on_input: bool,
    moe_memory_efficient_permutation: bool,
    fp8_format: str | None,
    fp4_format: str | None,
) -> Violation:
    """Pages have room for the rows of a layer, its first product and its activation, in the activations' format."""
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
    return f"{_PAGED} with {' and '.join(names)}, which keeps other rows as well", "leave out one of them"


def pages_stand_alone(
    moe_paged_stash: bool,
    offload_modules: tuple[str, ...],
    recompute_granularity: str | None,
    recompute_modules: tuple[str, ...] | None,
    cuda_graph_impl: str,
) -> Violation:
    """What waits on the host, is computed again or stands in a recording is not in pages."""
    if not moe_paged_stash:
        return None
    away = [name for name in offload_modules if name in ("expert_fc1", "moe_act")]
    selective = recompute_granularity == "selective" and "moe" in (recompute_modules or ())
    others = {
        f"--offload-modules {' '.join(away)}": bool(away),
        _WHOLE: recompute_granularity == "full",
        "--recompute-modules moe": selective,
        f"--cuda-graph-impl {cuda_graph_impl}": cuda_graph_impl != "none",
    }
    names = [name for name, given in others.items() if given]
    return (f"{_PAGED} with {' and '.join(names)}", "leave out one of them") if names else None


def rows_wait_for_weight_gradients_of_experts(
    moe_expert_wgrad_interval: int, num_experts: int | None, moe_paged_stash: bool
) -> Violation:
    """What waits are rows of experts, whole tensors of what buffers have room for; pages are there to have none."""
    asked = f"--moe-expert-wgrad-interval {moe_expert_wgrad_interval}"
    if moe_expert_wgrad_interval == 1:
        return None
    if not num_experts:
        return f"{asked} has nothing to compute later: no layer has experts", "--moe-expert-wgrad-interval 1"
    if moe_paged_stash:
        problem = f"{asked} with {_PAGED}: rows would wait outside of the pages, at full size"
        return problem, f"--moe-expert-wgrad-interval 1, or leave out {_PAGED}"
    return None


def lost_rows_are_noticed(moe_paged_stash: bool, check_for_nan_in_loss_and_grad: bool) -> Violation:
    """Rows that found no room come back as no number."""
    if not moe_paged_stash or check_for_nan_in_loss_and_grad:
        return None
    return (
        f"{_PAGED} without --check-for-nan-in-loss-and-grad would train on rows that found no room",
        "leave out --no-check-for-nan-in-loss-and-grad",
    )


def fractions_are_shares(activation_offload_fraction: float) -> Violation:
    """A share is at most the whole."""
    if activation_offload_fraction <= 1:
        return None
    return f"--activation-offload-fraction {activation_offload_fraction} is more than all", "use 1.0 or less"


RULES = (
    whole_layers_are_counted,
    method_belongs_to_whole_layers,
    modules_belong_to_a_choice,
    modules_can_be_recomputed,
    overlapped_shared_experts_are_kept,
    saved_inputs_can_be_spread,
    offloaded_modules_are_named,
    modules_can_be_offloaded,
    offloaded_modules_are_kept,
    rows_wait_for_weight_gradients_of_experts,
    lost_rows_are_noticed,
    fractions_are_shares,
)
WAITING = (
    offloading_and_graphs_exclude_each_other,
    pages_keep_unused_rows_out,
    pages_keep_rows_of_experts_alone,
    pages_stand_alone,
)
"""Rules of this program that concern speed and memory alone."""
