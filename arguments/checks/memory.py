"""Rules about saved activations: recompute, offloading and the paged stash."""

from arguments import derive
from arguments.checks.violation import RuleFlags, Violations, conflict, enabled_options, lacks, missing_feature
from arguments.flags import Flags
from megatron_moe.config.transport import RowBound

_OFFLOAD = "--fine-grained-activation-offloading"
_PAGED = "--moe-paged-stash"
_FULL = "--recompute-granularity full"
_SELECTIVE = "--recompute-granularity selective"


def full_recompute_selects_layers(flags: RuleFlags) -> Violations:
    """--recompute-method and --recompute-num-layers select the layers of full recompute."""
    if flags.recompute_granularity == "full" and (not flags.recompute_method or not flags.recompute_num_layers):
        remedy = "set --recompute-method uniform or block, and --recompute-num-layers"
        yield f"{_FULL} does not select layers", remedy


def given_recompute_layer_options(flags: Flags) -> list[str]:
    """Returns the options --recompute-method and --recompute-num-layers that are set."""
    given = {"--recompute-method": flags.recompute_method, "--recompute-num-layers": flags.recompute_num_layers}
    return [name for name, value in given.items() if value is not None]


def recompute_method_needs_full(flags: RuleFlags) -> Violations:
    """Selective recompute applies to all layers, so layers cannot be selected."""
    names = " and ".join(given_recompute_layer_options(flags))
    if flags.recompute_granularity == "selective" and names:
        yield conflict(names, _SELECTIVE, f"leave out {names}, or give {_FULL}")


def full_recompute_has_no_modules(flags: RuleFlags) -> Violations:
    """Full recompute recomputes whole layers; --recompute-modules applies only to selective recompute."""
    if flags.recompute_modules is not None and flags.recompute_granularity == "full":
        yield conflict("--recompute-modules", _FULL, f"give {_SELECTIVE}, or leave out --recompute-modules")


def recompute_modules_exist(flags: RuleFlags) -> Violations:
    """A module that belongs to an optional feature exists only if the feature is enabled."""
    has_streams = derive.residual_connection(flags) == "hyper_connections"
    if "mhc" in (flags.recompute_modules or ()) and not has_streams:
        yield "--recompute-modules mhc has nothing to recompute: there are no hyper-connections", "leave out mhc"
    elif "mla_up_proj" in (flags.recompute_modules or ()) and not flags.multi_latent_attention:
        remedy = "leave out mla_up_proj, or give --multi-latent-attention"
        yield "--recompute-modules mla_up_proj has nothing to recompute: attention is not multi-latent", remedy


def overlapped_shared_experts_are_not_recomputed(flags: RuleFlags) -> Violations:
    """With overlap, the shared experts run in two separate steps, which cannot be recomputed as one module."""
    if "shared_experts" in (flags.recompute_modules or ()) and flags.moe_shared_expert_overlap:
        remedy = "leave out --moe-shared-expert-overlap, or do not recompute shared_experts"
        yield conflict("--recompute-modules shared_experts", "--moe-shared-expert-overlap", remedy)


def saved_activations_can_be_distributed(flags: RuleFlags) -> Violations:
    """--distribute-saved-activations shards the inputs saved by full recompute over the tensor-parallel ranks."""
    if not flags.distribute_saved_activations:
        return
    if flags.recompute_granularity != "full":
        yield lacks("--distribute-saved-activations", _FULL, f"give {_FULL}, or leave it out")
    elif flags.tensor_model_parallel_size == 1:
        yield "--distribute-saved-activations needs several tensor-parallel ranks", "remove it"
    elif flags.sequence_parallel:
        remedy = "leave out --distribute-saved-activations"
        yield conflict("--distribute-saved-activations", "--sequence-parallel, which already distributes them", remedy)


def offload_modules_match_switch(flags: RuleFlags) -> Violations:
    """--offload-modules selects the modules of fine-grained activation offloading."""
    if flags.fine_grained_activation_offloading == bool(flags.offload_modules):
        return
    if flags.offload_modules:
        yield lacks("--offload-modules", _OFFLOAD, f"give {_OFFLOAD}, or leave out --offload-modules")
    else:
        yield f"{_OFFLOAD} requires a list of modules", "give --offload-modules, such as expert_fc1 moe_act"


def offloaded_modules_free_memory(flags: RuleFlags) -> Violations:
    """core_attn and attn_proj save the same tensor, so memory is freed only if both modules are offloaded."""
    if "attn_proj" in flags.offload_modules and "core_attn" not in flags.offload_modules:
        remedy = "add core_attn, or remove attn_proj"
        yield "--offload-modules attn_proj frees no memory: core_attn saves the same tensor", remedy


def offloaded_modules_are_not_recomputed(flags: RuleFlags) -> Violations:
    """A recomputed module saves no inner activations that could be offloaded."""
    if not flags.fine_grained_activation_offloading:
        return
    if flags.recompute_granularity == "full":
        yield conflict(_OFFLOAD, f"{_FULL}, which saves layer inputs only", f"leave out {_OFFLOAD}")
    inside = [name for name in derive.offloaded_modules(flags) if name in ("expert_fc1", "moe_act")]
    if flags.recompute_granularity == "selective" and "moe" in (flags.recompute_modules or ()) and inside:
        yield conflict(
            f"--offload-modules {' '.join(inside)}",
            "--recompute-modules moe, which saves no inner activations",
            f"leave out {' '.join(inside)}, or recompute moe_act instead of moe",
        )


@missing_feature
def paged_stash_has_unused_rows(flags: RuleFlags) -> Violations:
    """A paged stash saves memory only if the expert buffers contain unused rows."""
    if not flags.moe_paged_stash:
        return
    if not flags.num_experts:
        yield f"{_PAGED} has no effect: no layer has experts", f"leave out {_PAGED}"
    elif flags.moe_pad_expert_input_to_capacity:
        remedy = "leave out one of them"
        yield conflict(_PAGED, "--moe-pad-expert-input-to-capacity: all rows of every expert count as used", remedy)
    ranks = derive.expert_ranks(flags)
    rows = derive.expert_transport(flags, flags.ranks_per_host).transport.rows
    if ranks > 1 and flags.moe_token_dispatcher_type == "alltoall" and rows is RowBound.RECEIVED:
        yield conflict(
            _PAGED,
            "--moe-token-dispatcher-type alltoall over NCCL, whose buffers hold only received rows",
            f"leave out {_PAGED}, or use --moe-token-dispatcher-type allgather",
        )


@missing_feature
def paged_stash_supports_saved_tensors(flags: RuleFlags) -> Violations:
    """The paged stash stores only expert inputs, outputs of the first GEMM, and activations, before quantisation."""
    if not flags.moe_paged_stash:
        return
    others = {
        "--moe-apply-probs-on-input": flags.moe_apply_probs_on_input,
        "--no-moe-memory-efficient-permutation": not flags.moe_memory_efficient_permutation,
    }
    if any(others.values()):
        yield conflict(_PAGED, f"{enabled_options(others)}, which saves additional tensors", "leave out one of them")


@missing_feature
def paged_stash_excludes_other_policies(flags: RuleFlags) -> Violations:
    """The paged stash cannot be combined with offload or recompute of the same expert activations, or with a CUDA graph
    of the module moe."""
    if not flags.moe_paged_stash:
        return
    offloaded = [name for name in derive.offloaded_modules(flags) if name in ("expert_fc1", "moe_act")]
    selective = flags.recompute_granularity == "selective" and "moe" in (flags.recompute_modules or ())
    others = {
        f"--offload-modules {' '.join(offloaded)}": offloaded,
        _FULL: flags.recompute_granularity == "full",
        "--recompute-modules moe": selective,
        "--cuda-graph-modules moe": "moe" in derive.captured_modules(flags, flags.ranks_per_host),
    }
    if any(others.values()):
        yield conflict(_PAGED, enabled_options(others), "leave out one of them")


def expert_wgrad_interval_is_supported(flags: RuleFlags) -> Violations:
    """Deferred weight gradients keep the expert inputs of several microbatches in full-size buffers, not in pages."""
    option = f"--moe-expert-wgrad-interval {flags.moe_expert_wgrad_interval}"
    if flags.moe_expert_wgrad_interval == 1:
        return
    if not flags.num_experts:
        yield f"{option} has no effect: no layer has experts", "--moe-expert-wgrad-interval 1"
    elif flags.moe_paged_stash:
        problem = f"{option} cannot be combined with {_PAGED}: the inputs of deferred GEMMs are not stored in pages"
        yield problem, f"--moe-expert-wgrad-interval 1, or leave out {_PAGED}"
