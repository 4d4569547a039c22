"""Rules about CUDA graphs: captured modules and full iterations."""

from collections.abc import Sequence
from types import MappingProxyType

from arguments import derive
from arguments.checks.violation import Violation, functions_returning, missing_feature
from arguments.values import LayerPattern

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
"""Captured module -> modules of selective recompute inside it."""


def full_iteration_has_no_modules(cuda_graph_impl: str, cuda_graph_modules: tuple[str, ...]) -> Violation:
    """A full iteration is captured as one graph."""
    if cuda_graph_impl != "full_iteration" or not cuda_graph_modules:
        return None
    names = " ".join(cuda_graph_modules)
    return f"{_FULL_ITERATION} with --cuda-graph-modules {names}", "leave out --cuda-graph-modules"


def captured_modules_do_not_overlap(cuda_graph_modules: tuple[str, ...]) -> Violation:
    """Module moe includes its router and preprocessing."""
    inner = [name for name in ("moe_router", "moe_preprocess") if name in cuda_graph_modules]
    if "moe" not in cuda_graph_modules or not inner:
        return None
    return f"--cuda-graph-modules moe contains {' and '.join(inner)}", "keep moe, or its parts"


def preprocess_capture_needs_router(cuda_graph_modules: tuple[str, ...]) -> Violation:
    """Megatron requires moe_router for moe_preprocess."""
    if "moe_preprocess" not in cuda_graph_modules or "moe_router" in cuda_graph_modules:
        return None
    return "--cuda-graph-modules moe_preprocess without moe_router", "add moe_router"


def captured_modules_exist(
    cuda_graph_impl: str,
    cuda_graph_modules: tuple[str, ...],
    num_layers: int,
    num_experts: int | None,
    moe_layer_freq: LayerPattern,
) -> Violation:
    """Captured modules must exist in at least one layer."""
    if "mamba" in cuda_graph_modules:
        return "--cuda-graph-modules mamba has nothing to capture: Mamba layers are not available", "leave out mamba"
    if cuda_graph_impl == "none" or (not isinstance(moe_layer_freq, int) and len(moe_layer_freq) != num_layers):
        return None
    moe = derive.moe_layers(num_layers, num_experts, moe_layer_freq)
    if "mlp" in cuda_graph_modules and all(moe):
        return "--cuda-graph-modules mlp has nothing to capture: every layer has experts", "leave out mlp"
    moe_modules = [name for name in cuda_graph_modules if name.startswith("moe")]
    if moe_modules and not any(moe):
        return (
            f"--cuda-graph-modules {' '.join(moe_modules)} has nothing to capture: no layer has experts",
            "leave it out",
        )
    return None


@missing_feature
def captured_modules_are_deterministic(
    cuda_graph_impl: str, attention_dropout: float, hidden_dropout: float, moe_input_jitter_eps: float | None
) -> Violation:
    """A replayed graph would reuse the random numbers of its capture."""
    random_ops = {
        "--attention-dropout": attention_dropout,
        "--hidden-dropout": hidden_dropout,
        "--moe-input-jitter-eps": moe_input_jitter_eps or 0.0,
    }
    given = [f"{name} {value:g}" for name, value in random_ops.items() if value]
    if cuda_graph_impl == "none" or not given:
        return None
    return f"{_IMPL} {cuda_graph_impl} with {', '.join(given)}: a replay draws no random numbers", "set them to 0"


@missing_feature
def captured_modules_are_not_recomputed(
    cuda_graph_impl: str,
    cuda_graph_modules: tuple[str, ...],
    recompute_granularity: str | None,
    recompute_modules: tuple[str, ...] | None,
) -> Violation:
    """Captured modules keep their activations in a graph memory pool, so recomputing them saves nothing."""
    if cuda_graph_impl == "none" or recompute_granularity is None:
        return None
    if cuda_graph_impl == "full_iteration" or recompute_granularity == "full":
        return (
            f"{_IMPL} {cuda_graph_impl} with --recompute-granularity {recompute_granularity}",
            "leave one of them out",
        )
    captured = cuda_graph_modules or tuple(_RECOMPUTED_IN)
    recomputed = sorted(set(recompute_modules or ("core_attn",)) & _modules_inside(captured))
    if not recomputed:
        return None
    return (
        f"--recompute-modules {' '.join(recomputed)} is inside captured modules ({' '.join(captured)})",
        "remove it from --recompute-modules, or capture other --cuda-graph-modules",
    )


def _modules_inside(captured: Sequence[str]) -> set[str]:
    return {module for name in captured for module in _RECOMPUTED_IN.get(name, ())}


@missing_feature
def captured_experts_use_grouped_gemm(
    cuda_graph_impl: str, cuda_graph_modules: tuple[str, ...], num_experts: int | None, moe_grouped_gemm: bool
) -> Violation:
    """Experts that run one by one need a host read of the number of rows of each."""
    experts_captured = cuda_graph_impl == "full_iteration" or "moe" in cuda_graph_modules
    if cuda_graph_impl == "none" or not experts_captured or not num_experts or moe_grouped_gemm:
        return None
    what = _FULL_ITERATION if cuda_graph_impl == "full_iteration" else "--cuda-graph-modules moe"
    return (
        f"{what} without --moe-grouped-gemm: experts run one by one, and the host reads the number of rows of each",
        "set --moe-grouped-gemm, or capture attn and moe_router",
    )


@missing_feature
def captured_expert_rows_are_not_deferred(
    moe_expert_wgrad_interval: int,
    cuda_graph_impl: str,
    cuda_graph_modules: tuple[str, ...],
    bf16: bool,
    moe_grouped_gemm: bool,
    tensor_model_parallel_size: int,
    expert_model_parallel_size: int,
    expert_tensor_parallel_size: int | None,
) -> Violation:
    """The next replay overwrites captured rows that a deferred weight gradient still needs."""
    if moe_expert_wgrad_interval == 1 or cuda_graph_impl in ("none", "full_iteration"):
        return None
    ranks = derive.expert_ranks(expert_model_parallel_size, expert_tensor_parallel_size, tensor_model_parallel_size)
    captured = cuda_graph_modules or (("moe",) if derive.experts_are_recorded(ranks, bf16, moe_grouped_gemm) else ())
    rows = [name for name in captured if name in ("moe", "moe_preprocess")]
    if not rows:
        return None
    return (
        f"--moe-expert-wgrad-interval {moe_expert_wgrad_interval} with captured {' '.join(rows)} ({_IMPL} "
        f"{cuda_graph_impl}): the next replay overwrites the expert rows",
        "use --moe-expert-wgrad-interval 1, or capture other modules: --cuda-graph-modules attn moe_router",
    )


@missing_feature
def captured_modules_have_no_collectives(
    cuda_graph_impl: str,
    cuda_graph_modules: tuple[str, ...],
    tensor_model_parallel_size: int,
    context_parallel_size: int,
    expert_model_parallel_size: int,
    expert_tensor_parallel_size: int | None,
) -> Violation:
    """Collectives are not captured, and NCCL's all-to-all reads its split sizes on the host."""
    if cuda_graph_impl == "none":
        return None
    sizes = {
        "--tensor-model-parallel-size": tensor_model_parallel_size,
        "--context-parallel-size": context_parallel_size,
    }
    inside = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if inside:
        return (
            f"{_IMPL} {cuda_graph_impl} with {' and '.join(inside)}: layers communicate inside captured modules",
            "remove one of them",
        )
    etp = expert_tensor_parallel_size or tensor_model_parallel_size
    experts_captured = cuda_graph_impl == "full_iteration" or "moe" in cuda_graph_modules
    if not experts_captured or expert_model_parallel_size * etp == 1:
        return None
    what = _FULL_ITERATION if cuda_graph_impl == "full_iteration" else "--cuda-graph-modules moe"
    return (
        f"{what} with experts over {expert_model_parallel_size * etp} ranks: rows are exchanged inside, and the host "
        f"reads how many",
        "capture attn and moe_router",
    )


@missing_feature
def full_iteration_supports_schedule(
    cuda_graph_impl: str,
    pipeline_model_parallel_size: int,
    data_parallel_size: int,
    overlap_grad_reduce: bool,
    mtp_num_layers: int | None,
) -> Violation:
    """Pipeline and gradient-bucket communication within the step cannot be captured, and multi-token prediction is not
    supported."""
    if cuda_graph_impl != "full_iteration":
        return None
    others = {
        f"--pipeline-model-parallel-size {pipeline_model_parallel_size}": pipeline_model_parallel_size > 1,
        "--overlap-grad-reduce": overlap_grad_reduce and data_parallel_size > 1,
        f"--mtp-num-layers {mtp_num_layers}": bool(mtp_num_layers),
    }
    given = [name for name, enabled in others.items() if enabled]
    if not given:
        return None
    return f"{_FULL_ITERATION} with {' and '.join(given)}", "capture modules: --cuda-graph-impl local"


@missing_feature
def captured_work_has_no_overlap(
    cuda_graph_impl: str,
    data_parallel_size: int,
    overlap_param_gather: bool,
    overlap_optimizer_step: bool,
    overlap_moe_expert_parallel_comm: bool,
    delay_wgrad_compute: bool,
    moe_shared_expert_overlap: bool,
) -> Violation:
    """A captured graph cannot wait for other work, and no other work can run between its kernels. Captured modules wait
    for weights before their replay, and expert exchanges run between them; both are inside a captured iteration."""
    full_iteration = cuda_graph_impl == "full_iteration"
    others = {
        "--overlap-param-gather": full_iteration and overlap_param_gather and data_parallel_size > 1,
        "--overlap-optimizer-step": full_iteration and overlap_optimizer_step,
        "--overlap-moe-expert-parallel-comm": full_iteration and overlap_moe_expert_parallel_comm,
        "--delay-wgrad-compute": delay_wgrad_compute,
        "--moe-shared-expert-overlap": full_iteration and moe_shared_expert_overlap,
    }
    given = [name for name, enabled in others.items() if enabled]
    if cuda_graph_impl == "none" or not given:
        return None
    return f"{_IMPL} {cuda_graph_impl} with {' and '.join(given)}", "leave one of them out"


@missing_feature
def straggler_log_needs_uncaptured_attention(
    cuda_graph_impl: str, cuda_graph_modules: tuple[str, ...], log_straggler: bool
) -> Violation:
    """Timing events inside a captured graph cannot be queried."""
    captured = cuda_graph_impl == "full_iteration" or not cuda_graph_modules or "attn" in cuda_graph_modules
    if cuda_graph_impl == "none" or not captured or not log_straggler:
        return None
    return (
        f"--log-straggler with {_IMPL} {cuda_graph_impl}: it times attention, which is captured",
        "remove --log-straggler, or capture other modules: --cuda-graph-modules moe_router",
    )


RULES = functions_returning(Violation, globals())
