"""Rules about CUDA graphs, which capture modules of layers or full iterations."""

from types import MappingProxyType

from arguments import derive
from arguments.checks.violation import RuleFlags, Violations, enabled, missing_feature

_IMPL = "--cuda-graph-impl"
_FULL_ITERATION = f"{_IMPL} full_iteration"
_RECOMPUTED_IN = MappingProxyType(
    {
        "attn": {"core_attn", "mla_up_proj", "layernorm"},
        "mlp": {"mlp", "layernorm"},
        "moe": {"moe", "moe_act", "shared_experts", "layernorm"},
        "moe_router": {"moe"},
        "moe_preprocess": {"moe"},
    }
)
"""Maps each module of --cuda-graph-modules to the modules of --recompute-modules that it contains."""


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
    modules = () if flags.cuda_graph_impl == "none" else flags.cuda_graph_modules
    if "moe_preprocess" in modules and "moe_router" not in modules:
        yield "--cuda-graph-modules moe_preprocess without moe_router", "add moe_router"


def captured_modules_exist(flags: RuleFlags) -> Violations:
    """Captured modules must exist in at least one layer."""
    if flags.cuda_graph_impl == "none":
        return
    if "mamba" in flags.cuda_graph_modules:
        yield "--cuda-graph-modules mamba has nothing to capture: Mamba layers are not available", "leave out mamba"
    if not isinstance(flags.moe_layer_freq, int) and len(flags.moe_layer_freq) != flags.num_layers:
        return
    moe = derive.moe_layers(flags.num_layers, flags.num_experts, flags.moe_layer_freq)
    if "mlp" in flags.cuda_graph_modules and all(moe):
        yield "--cuda-graph-modules mlp has nothing to capture: every layer has experts", "leave out mlp"
    moe_modules = [name for name in flags.cuda_graph_modules if name.startswith("moe")]
    if moe_modules and not any(moe):
        yield (
            f"--cuda-graph-modules {' '.join(moe_modules)} has nothing to capture: no layer has experts",
            "leave it out",
        )


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
    """The activations of captured modules stay in a graph memory pool, so recomputing them saves no memory."""
    if flags.cuda_graph_impl == "none" or flags.recompute_granularity is None:
        return
    if flags.cuda_graph_impl == "full_iteration" or flags.recompute_granularity == "full":
        yield (
            f"{_IMPL} {flags.cuda_graph_impl} with --recompute-granularity {flags.recompute_granularity}",
            "leave one of them out",
        )
    captured: tuple[str, ...] = flags.cuda_graph_modules or tuple(_RECOMPUTED_IN)
    inside = {module for name in captured for module in _RECOMPUTED_IN.get(name, ())}
    recomputed = sorted(set(flags.recompute_modules or ("core_attn",)) & inside)
    if recomputed:
        yield (
            f"--recompute-modules {' '.join(recomputed)} is inside captured modules ({' '.join(captured)})",
            "remove it from --recompute-modules, or capture other --cuda-graph-modules",
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
    by_default = ("moe",) if derive.experts_are_captured(flags, flags.ranks_per_host) else ()
    captured = flags.cuda_graph_modules or by_default
    rows = [name for name in captured if name in ("moe", "moe_preprocess")]
    if rows:
        yield (
            f"--moe-expert-wgrad-interval {flags.moe_expert_wgrad_interval} with captured {' '.join(rows)} ({_IMPL} "
            f"{flags.cuda_graph_impl}): the next replay overwrites the expert rows",
            "use --moe-expert-wgrad-interval 1, or capture other modules: --cuda-graph-modules attn moe_router",
        )


@missing_feature
def captured_modules_have_no_collectives(flags: RuleFlags) -> Violations:
    """Capture of collectives is not supported; NCCL's all-to-all also reads its split sizes on the host. Kernels that
    exchange tokens through symmetric memory can be captured."""
    if flags.cuda_graph_impl == "none":
        return
    sizes = {
        "--tensor-model-parallel-size": flags.tensor_model_parallel_size,
        "--context-parallel-size": flags.context_parallel_size,
    }
    inside = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if inside:
        yield (
            f"{_IMPL} {flags.cuda_graph_impl} with {' and '.join(inside)}: layers communicate inside captured modules",
            "remove one of them",
        )
    capture, ranks = _expert_capture(flags), derive.expert_ranks(flags)
    is_captured = derive.expert_transport(flags, flags.ranks_per_host).transport.is_captured
    if capture and ranks > 1 and flags.num_experts and not is_captured:
        exchange = (
            f"the graph contains the token exchange of --moe-token-dispatcher-type {flags.moe_token_dispatcher_type}, "
            "which the host or NCCL takes part in"
        )
        yield (
            f"{capture} with experts over {ranks} ranks: {exchange}",
            "use --moe-token-dispatcher-type flex, or capture attn and moe_router",
        )
    router = _FULL_ITERATION if flags.cuda_graph_impl == "full_iteration" else f"{_IMPL} {flags.cuda_graph_impl}"
    captured = not flags.cuda_graph_modules or {"moe", "moe_router"} & set(flags.cuda_graph_modules)
    balancing = "global_aux_loss" in flags.moe_router_load_balancing_type and any(flags.moe_aux_loss_coeff)
    if captured and balancing and flags.num_experts and flags.data_parallel_size > 1:
        yield (
            f"{router} with --moe-router-load-balancing-type global_aux_loss over {flags.data_parallel_size} "
            "data-parallel ranks: routers sum their token counts over these ranks",
            "use seq_aux_loss, or capture attn only",
        )


@missing_feature
def full_iteration_supports_schedule(flags: RuleFlags) -> Violations:
    """A full-iteration graph supports neither pipeline communication, nor gradient reduction that overlaps with
    backward, nor multi-token prediction."""
    if flags.cuda_graph_impl != "full_iteration":
        return
    others = {
        f"--pipeline-model-parallel-size {flags.pipeline_model_parallel_size}": flags.pipeline_model_parallel_size > 1,
        "--overlap-grad-reduce": flags.overlap_grad_reduce and flags.data_parallel_size > 1,
        f"--mtp-num-layers {flags.mtp_num_layers}": flags.mtp_num_layers,
    }
    if any(others.values()):
        yield f"{_FULL_ITERATION} with {enabled(others)}", "capture modules: --cuda-graph-impl local"


@missing_feature
def captured_work_has_no_overlap(flags: RuleFlags) -> Violations:
    """A running graph cannot wait for work on other streams, so a full-iteration graph supports no overlap. Graphs of
    single modules compute weight gradients right after input gradients."""
    full_iteration = flags.cuda_graph_impl == "full_iteration"
    others = {
        "--overlap-param-gather": full_iteration and flags.overlap_param_gather and flags.data_parallel_size > 1,
        "--overlap-optimizer-step": full_iteration and flags.overlap_optimizer_step,
        "--overlap-moe-expert-parallel-comm": full_iteration and flags.overlap_moe_expert_parallel_comm,
        "--delay-wgrad-compute": flags.delay_wgrad_compute,
        "--overlap-dispatch-backward-with-experts-wgrad": (
            not full_iteration and flags.overlap_dispatch_backward_with_experts_wgrad
        ),
        "--moe-shared-expert-overlap": full_iteration and flags.moe_shared_expert_overlap,
    }
    if flags.cuda_graph_impl != "none" and any(others.values()):
        yield f"{_IMPL} {flags.cuda_graph_impl} with {enabled(others)}", "leave one of them out"
    if flags.cuda_graph_impl != "none" and "moe" in flags.cuda_graph_modules and flags.overlap_moe_expert_parallel_comm:
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
        yield (
            f"--log-straggler with {_IMPL} {flags.cuda_graph_impl}: it times attention, which is captured",
            "remove --log-straggler, or capture other modules: --cuda-graph-modules moe_router",
        )
