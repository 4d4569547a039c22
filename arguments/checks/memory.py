"""Rules about what is kept between forward and backward, and where."""

from arguments.checks.complaint import Complaint

RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""Modules of selective recompute."""
_WHOLE = "--recompute-granularity full"
_CHOSEN = "--recompute-granularity selective"


def whole_layers_are_counted(
    recompute_granularity: str | None, recompute_method: str | None, recompute_num_layers: int | None
) -> Complaint:
    """Whole layers are recomputed in chunks, or as many as a number says."""
    if recompute_granularity != "full" or (recompute_method and recompute_num_layers):
        return None
    return (
        f"{_WHOLE} does not say which layers",
        "give --recompute-method uniform or block, and --recompute-num-layers",
    )


def method_belongs_to_whole_layers(
    recompute_granularity: str | None, recompute_method: str | None, recompute_num_layers: int | None
) -> Complaint:
    """Chosen modules are recomputed in every layer."""
    given = [("--recompute-method", recompute_method), ("--recompute-num-layers", recompute_num_layers)]
    names = " and ".join(name for name, value in given if value is not None)
    if recompute_granularity == "full" or not names:
        return None
    return f"{names} without {_WHOLE}", f"leave out {names}, or give {_WHOLE}"


def modules_belong_to_a_choice(
    recompute_granularity: str | None, recompute_modules: tuple[str, ...] | None
) -> Complaint:
    """Modules are recomputed where modules are chosen."""
    if recompute_modules is None or recompute_granularity == "selective":
        return None
    return f"--recompute-modules without {_CHOSEN}", f"give {_CHOSEN}, or leave out --recompute-modules"


def modules_can_be_recomputed(
    recompute_modules: tuple[str, ...] | None, multi_latent_attention: bool, enable_hyper_connections: bool
) -> Complaint:
    """What can be recomputed has a name."""
    known = (*RECOMPUTED, "mhc") if enable_hyper_connections else RECOMPUTED
    strange = [name for name in recompute_modules or () if name not in known]
    if strange:
        return f"--recompute-modules {' '.join(strange)} is no module", f"choose from {', '.join(RECOMPUTED)}"
    if "mla_up_proj" in (recompute_modules or ()) and not multi_latent_attention:
        return (
            "--recompute-modules mla_up_proj has nothing to recompute: attention is not multi-latent",
            "leave out mla_up_proj, or give --multi-latent-attention",
        )
    return None


def overlapped_shared_experts_are_kept(
    recompute_modules: tuple[str, ...] | None, moe_shared_expert_overlap: bool
) -> Complaint:
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
) -> Complaint:
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


RULES = (
    whole_layers_are_counted,
    method_belongs_to_whole_layers,
    modules_belong_to_a_choice,
    modules_can_be_recomputed,
    overlapped_shared_experts_are_kept,
    saved_inputs_can_be_spread,
)
