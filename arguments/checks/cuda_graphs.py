"""Rules about CUDA graphs, which capture modules of layers or full iterations."""

from types import MappingProxyType

from arguments import derive
from arguments.checks.violation import RuleFlags, Violations, conflict, missing_feature

_IMPL = "--cuda-graph-impl"
_FULL_ITERATION = f"{_IMPL} full_iteration"
_IN_MOE = ("moe", "moe_router", "moe_preprocess")
_NODES_OF = MappingProxyType({"mlp": ("mlp",), "moe": _IN_MOE, "mhc": ("attn", "mamba", "mlp", *_IN_MOE)})
"""Maps each of the --recompute-modules that is one node of a layer to the --cuda-graph-modules inside this node."""
_OFFLOADED_IN = MappingProxyType(
    {"attn": ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"), "moe": ("expert_fc1", "moe_act")}
)
"""Maps each of the --cuda-graph-modules to the --offload-modules inside it."""


def full_iteration_has_no_modules(flags: RuleFlags) -> Violations:
    """With full_iteration, one graph captures the whole iteration, so no modules can be selected."""
    names = " ".join(flags.cuda_graph_modules)
    if flags.cuda_graph_impl == "full_iteration" and names:
        yield f"{_FULL_ITERATION} with --cuda-graph-modules {names}", "leave out --cuda-graph-modules"


def captured_modules_do_not_overlap(flags: RuleFlags) -> Violations:
    """The module moe already includes moe_router and moe_preprocess."""
    inner = [name for name in ("moe_router", "moe_preprocess") if name in flags.cuda_graph_modules]
    if flags.cuda_graph_impl != "none" and "moe" in flags.cuda_graph_modules and inner:
        yield f"--cuda-graph-modules moe contains {' and '.join(inner)}", f"leave out moe, or {' and '.join(inner)}"


def preprocess_capture_needs_router(flags: RuleFlags) -> Violations:
    """Megatron captures moe_preprocess only together with moe_router."""
    modules = derive.captured_modules(flags, flags.ranks_per_host)
    if "moe_preprocess" in modules and "moe_router" not in modules:
        yield "--cuda-graph-modules moe_preprocess without moe_router", "add moe_router"


@missing_feature
def captured_attention_selects_its_keys(flags: RuleFlags) -> Violations:
    """Graphs of attention modules have no input for the keys that an earlier layer has selected."""
    if "attn" in derive.captured_modules(flags, flags.ranks_per_host) and not derive.selects_keys_in_every_layer(flags):
        remedy = "leave out attn, or capture whole steps: --cuda-graph-impl full_iteration"
        yield conflict("--cuda-graph-modules attn", "--dsa-indexer-topk-freq above 1", remedy)


def captured_modules_exist(flags: RuleFlags) -> Violations:
    """Captured modules must exist in at least one layer."""
    if flags.cuda_graph_impl == "none":
        return
    if "mamba" in flags.cuda_graph_modules and "mamba" not in flags.mixer:
        yield "--cuda-graph-modules mamba has nothing to capture: no layer is a Mamba layer", "leave out mamba"
    if not isinstance(flags.moe_layer_freq, int) and len(flags.moe_layer_freq) != flags.num_layers:
        return
    moe = derive.moe_layers(flags.num_layers, flags.num_experts, flags.moe_layer_freq, flags.feed_forward)
    if "mlp" in flags.cuda_graph_modules and all(moe):
        yield "--cuda-graph-modules mlp has nothing to capture: every layer has experts", "leave out mlp"
    moe_modules = [name for name in flags.cuda_graph_modules if name.startswith("moe")]
    if moe_modules and not any(moe):
        remedy = "leave it out"
        yield f"--cuda-graph-modules {' '.join(moe_modules)} has nothing to capture: no layer has experts", remedy


@missing_feature
def captured_modules_are_deterministic(flags: RuleFlags) -> Violations:
    """A replayed graph would reuse the random numbers drawn during capture."""
    random_ops = {
        "--attention-dropout": flags.attention_dropout,
        "--hidden-dropout": flags.hidden_dropout,
        "--moe-input-jitter-eps": flags.moe_input_jitter_eps or 0.0,
    }
    given = [f"{name} {value:g}" for name, value in random_ops.items() if value]
    if flags.cuda_graph_impl != "none" and given:
        given_text = ", ".join(given)
        yield f"{_IMPL} {flags.cuda_graph_impl} with {given_text}: replays draw no random numbers", "set them to 0"


@missing_feature
def captured_modules_are_not_recomputed(flags: RuleFlags) -> Violations:
    """No part of a layer or module that is recomputed as a whole can be captured, because it runs as one node."""
    if flags.cuda_graph_impl in ("none", "full_iteration") or flags.recompute_granularity is None:
        return
    if flags.recompute_granularity == "full":
        yield (
            f"{_IMPL} {flags.cuda_graph_impl} with --recompute-granularity full, which recomputes whole layers",
            f"leave one of them out, or capture the whole step: {_FULL_ITERATION}",
        )
    captured = derive.captured_modules(flags, flags.ranks_per_host)
    for recomputed in sorted(set(flags.recompute_modules or ()) & set(_NODES_OF)):
        inside = [name for name in captured if name in _NODES_OF[recomputed]]
        if inside and (flags.num_experts or recomputed != "moe"):
            remedy = "remove it from --recompute-modules, or capture other --cuda-graph-modules"
            yield f"--recompute-modules {recomputed} with captured {' '.join(inside)}, which is inside it", remedy


@missing_feature
def captured_modules_are_not_offloaded(flags: RuleFlags) -> Violations:
    """Graphs of modules need their activations at fixed device addresses from forward to backward. A full-iteration
    graph captures the copies, and frees memory only where it waits for one, so unfinished copies must be limited."""
    if not flags.fine_grained_activation_offloading or flags.cuda_graph_impl == "none":
        return
    if flags.cuda_graph_impl == "full_iteration":
        if flags.fine_grained_offloading_max_inflight_offloads is None:
            yield (
                f"--fine-grained-activation-offloading with {_FULL_ITERATION} frees device memory only where the graph "
                "waits for a copy, and the number of unfinished copies is not limited",
                "set --fine-grained-offloading-max-inflight-offloads 2",
            )
        return
    inside: list[str] = [
        name
        for part in derive.captured_modules(flags, flags.ranks_per_host)
        for name in derive.offloaded_modules(flags)
        if name in _OFFLOADED_IN.get(part, ())
    ]
    if inside:
        yield (
            f"--offload-modules {' '.join(inside)} with {_IMPL} {flags.cuda_graph_impl}, whose graphs contain them",
            "offload modules that are not captured, such as expert_fc1 moe_act with --cuda-graph-modules attn "
            f"moe_router, or capture whole steps: {_FULL_ITERATION}",
        )


def delayed_offload_follows_graphs(flags: RuleFlags) -> Violations:
    """Copies are delayed until the next replay of a captured module, so a run needs captured modules."""
    if not flags.delay_offload_until_cuda_graph:
        return
    if not flags.fine_grained_activation_offloading:
        problem = "--delay-offload-until-cuda-graph without --fine-grained-activation-offloading delays nothing"
        yield problem, "leave it out"
    elif flags.cuda_graph_impl in ("none", "full_iteration"):
        yield (
            f"--delay-offload-until-cuda-graph with {_IMPL} {flags.cuda_graph_impl}: no captured module is replayed",
            "leave it out, or capture modules: --cuda-graph-impl local",
        )


@missing_feature
def captured_experts_use_grouped_gemm(flags: RuleFlags) -> Violations:
    """If GEMMs are not grouped, the host reads the number of rows of each expert, which fails during capture."""
    capture = _expert_capture(flags)
    if capture and flags.num_experts and not flags.moe_grouped_gemm:
        reads = "without it the host reads the number of rows of each expert"
        yield f"{capture} without --moe-grouped-gemm: {reads}", "set --moe-grouped-gemm, or capture attn and moe_router"


def _expert_capture(flags: RuleFlags) -> str:
    """Returns the option that captures the experts, or an empty string if they are not captured."""
    if flags.cuda_graph_impl == "full_iteration":
        return _FULL_ITERATION
    captured = flags.cuda_graph_impl != "none" and "moe" in flags.cuda_graph_modules
    return "--cuda-graph-modules moe" if captured else ""


@missing_feature
def captured_expert_rows_are_not_deferred(flags: RuleFlags) -> Violations:
    """Deferred weight gradients need the expert rows of earlier microbatches, which the next replay overwrites."""
    if flags.moe_expert_wgrad_interval == 1 or flags.cuda_graph_impl in ("none", "full_iteration"):
        return
    rows = [name for name in derive.captured_modules(flags, flags.ranks_per_host) if name in ("moe", "moe_preprocess")]
    if rows:
        yield (
            f"--moe-expert-wgrad-interval {flags.moe_expert_wgrad_interval} with captured {' '.join(rows)} ({_IMPL} "
            f"{flags.cuda_graph_impl}): the next replay overwrites the expert rows",
            "use --moe-expert-wgrad-interval 1, or capture other modules: --cuda-graph-modules attn moe_router",
        )


@missing_feature
def captured_exchange_stays_on_device(flags: RuleFlags) -> Violations:
    """NCCL's all-to-all reads its split sizes on the host. Kernels that exchange tokens through symmetric memory or
    HybridEP, and collectives of fixed sizes, can be captured."""
    capture, ranks = _expert_capture(flags), derive.expert_ranks(flags)
    if not capture or ranks == 1 or not flags.num_experts:
        return
    choice = derive.expert_transport(flags, flags.ranks_per_host, flags.missing_libraries)
    if not choice.transport.is_captured:
        exchange = (
            f"the graph contains the token exchange of --moe-token-dispatcher-type {flags.moe_token_dispatcher_type}, "
            "which the host or NCCL takes part in"
        )
        why = f" ({choice.note})" if choice.replaces_request else ""
        backend = "hybridep" if ranks > flags.ranks_per_host else "symmetric"
        is_requested = (flags.moe_token_dispatcher_type, derive.transport_backend(flags)) == ("flex", backend)
        other = f"use --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {backend}, or "
        yield (
            f"{capture} with experts over {ranks} ranks: {exchange}{why}",
            f"{'' if is_requested else other}capture attn and moe_router",
        )


@missing_feature
def full_iteration_includes_gather(flags: RuleFlags) -> Violations:
    """A full-iteration graph captures the weight gathers, so they cannot start during the optimizer step."""
    if flags.cuda_graph_impl == "full_iteration" and flags.overlap_optimizer_step:
        yield f"{_FULL_ITERATION} with --overlap-optimizer-step", "leave out --overlap-optimizer-step"


@missing_feature
def overlapped_experts_are_not_captured(flags: RuleFlags) -> Violations:
    """A graph of a whole MoE layer contains its exchanges, so they cannot overlap with the other microbatch."""
    modules = () if flags.cuda_graph_impl == "none" else flags.cuda_graph_modules
    if "moe" in modules and flags.overlap_moe_expert_parallel_comm:
        yield (
            "--cuda-graph-modules moe with --overlap-moe-expert-parallel-comm: no exchange is left outside the graph "
            "that could overlap with the other microbatch",
            "capture attn and moe_router",
        )


@missing_feature
def straggler_log_needs_uncaptured_attention(flags: RuleFlags) -> Violations:
    """--log-straggler times attention with CUDA events, which cannot be queried if recorded inside a graph."""
    modules = flags.cuda_graph_modules
    captured = flags.cuda_graph_impl == "full_iteration" or not modules or "attn" in modules
    if flags.cuda_graph_impl != "none" and captured and flags.log_straggler:
        remedy = "remove --log-straggler, or capture other modules: --cuda-graph-modules moe_router"
        yield f"--log-straggler with {_IMPL} {flags.cuda_graph_impl}: it times attention, which is captured", remedy
