"""Rules about what of a step is recorded and replayed (CUDA graphs)."""

from collections.abc import Sequence
from types import MappingProxyType

from arguments import derive
from arguments.checks.violation import Violation
from arguments.values import LayerPattern

_IMPL = "--cuda-graph-impl"
_WHOLE_STEP = f"{_IMPL} full_iteration"
_RECOMPUTED_IN = MappingProxyType(
    {
        "attn": {"core_attn", "mla_up_proj", "layernorm"},
        "mlp": {"mlp", "layernorm"},
        "moe": {"moe", "moe_act", "shared_experts", "layernorm"},
        "moe_router": {"moe"},
        "moe_preprocess": {"moe"},
    }
)
"""Modules of selective recompute that touch a recorded part."""


def whole_steps_have_no_parts(cuda_graph_impl: str, cuda_graph_modules: tuple[str, ...]) -> Violation:
    """A whole step is one recording."""
    if cuda_graph_impl != "full_iteration" or not cuda_graph_modules:
        return None
    names = " ".join(cuda_graph_modules)
    return f"{_WHOLE_STEP} with --cuda-graph-modules {names}", "leave out --cuda-graph-modules"


def parts_are_recorded_once(cuda_graph_modules: tuple[str, ...]) -> Violation:
    """The MoE layer contains its router and the sorting of its rows."""
    inner = [name for name in ("moe_router", "moe_preprocess") if name in cuda_graph_modules]
    if "moe" not in cuda_graph_modules or not inner:
        return None
    return f"--cuda-graph-modules moe contains {' and '.join(inner)}", "keep moe, or its parts"


def rows_are_sorted_behind_a_router(cuda_graph_modules: tuple[str, ...]) -> Violation:
    """Megatron's rule: the second needs the first."""
    if "moe_preprocess" not in cuda_graph_modules or "moe_router" in cuda_graph_modules:
        return None
    return "--cuda-graph-modules moe_preprocess without moe_router", "add moe_router"


def parts_exist(
    cuda_graph_impl: str,
    cuda_graph_modules: tuple[str, ...],
    num_layers: int,
    num_experts: int | None,
    moe_layer_freq: LayerPattern,
) -> Violation:
    """A part that is to be recorded is a part of some layer."""
    if "mamba" in cuda_graph_modules:
        return "--cuda-graph-modules mamba has nothing to capture: Mamba layers are not available", "leave out mamba"
    if cuda_graph_impl == "none" or (not isinstance(moe_layer_freq, int) and len(moe_layer_freq) != num_layers):
        return None
    moe = derive.moe_layers(num_layers, num_experts, moe_layer_freq)
    if "mlp" in cuda_graph_modules and all(moe):
        return "--cuda-graph-modules mlp has nothing to record: every layer has experts", "leave out mlp"
    sparse = [name for name in cuda_graph_modules if name.startswith("moe")]
    if sparse and not any(moe):
        return f"--cuda-graph-modules {' '.join(sparse)} has nothing to record: no layer has experts", "leave it out"
    return None


def replays_draw_nothing(
    cuda_graph_impl: str,
    attention_dropout: float,
    hidden_dropout: float,
    moe_input_jitter_eps: float | None,
) -> Violation:
    """A replay would drop the same elements again and again."""
    drawn = {
        "--attention-dropout": attention_dropout,
        "--hidden-dropout": hidden_dropout,
        "--moe-input-jitter-eps": moe_input_jitter_eps or 0.0,
    }
    names = [f"{name} {value:g}" for name, value in drawn.items() if value]
    if cuda_graph_impl == "none" or not names:
        return None
    return f"{_IMPL} {cuda_graph_impl} with {', '.join(names)}: a replay draws no random numbers", "set them to 0"


def recorded_parts_run_once(
    cuda_graph_impl: str,
    cuda_graph_modules: tuple[str, ...],
    recompute_granularity: str | None,
    recompute_modules: tuple[str, ...] | None,
) -> Violation:
    """What is recorded stays in memory of its own; computing it twice would save nothing."""
    if cuda_graph_impl == "none" or recompute_granularity is None:
        return None
    if cuda_graph_impl == "full_iteration" or recompute_granularity == "full":
        return (
            f"{_IMPL} {cuda_graph_impl} with --recompute-granularity {recompute_granularity}",
            "leave one of them out",
        )
    recorded = cuda_graph_modules or tuple(_RECOMPUTED_IN)
    again = sorted(set(recompute_modules or ("core_attn",)) & _touched(recorded))
    if not again:
        return None
    return (
        f"--recompute-modules {' '.join(again)} stands in recorded parts ({' '.join(recorded)})",
        "leave it out of --recompute-modules, or record other --cuda-graph-modules",
    )


def _touched(recorded: Sequence[str]) -> set[str]:
    return {module for part in recorded for module in _RECOMPUTED_IN.get(part, ())}


def recorded_experts_are_one_product(
    cuda_graph_impl: str, cuda_graph_modules: tuple[str, ...], num_experts: int | None, moe_grouped_gemm: bool
) -> Violation:
    """Where experts are multiplied one by one, the host asks how many rows each of them has."""
    whole = cuda_graph_impl == "full_iteration" or "moe" in cuda_graph_modules
    if cuda_graph_impl == "none" or not whole or not num_experts or moe_grouped_gemm:
        return None
    what = _WHOLE_STEP if cuda_graph_impl == "full_iteration" else "--cuda-graph-modules moe"
    return (
        f"{what} without --moe-grouped-gemm: experts are multiplied one by one, and the host reads the rows of each",
        "give --moe-grouped-gemm, or record attn and moe_router",
    )


def recorded_rows_do_not_wait(
    moe_expert_wgrad_interval: int,
    cuda_graph_impl: str,
    cuda_graph_modules: tuple[str, ...],
    bf16: bool,
    moe_grouped_gemm: bool,
    tensor_model_parallel_size: int,
    expert_model_parallel_size: int,
    expert_tensor_parallel_size: int | None,
) -> Violation:
    """Rows that wait for weight gradients stand where the next replay writes, if a recording made them."""
    if moe_expert_wgrad_interval == 1 or cuda_graph_impl in ("none", "full_iteration"):
        return None
    ranks = derive.expert_ranks(expert_model_parallel_size, expert_tensor_parallel_size, tensor_model_parallel_size)
    recorded = cuda_graph_modules or (("moe",) if derive.experts_are_recorded(ranks, bf16, moe_grouped_gemm) else ())
    rows = [name for name in recorded if name in ("moe", "moe_preprocess")]
    if not rows:
        return None
    return (
        f"--moe-expert-wgrad-interval {moe_expert_wgrad_interval} with recorded {' '.join(rows)} ({_IMPL} "
        f"{cuda_graph_impl}): the next replay writes where rows of experts wait",
        "--moe-expert-wgrad-interval 1, or other parts: --cuda-graph-modules attn moe_router",
    )


def recorded_parts_exchange_nothing(
    cuda_graph_impl: str,
    cuda_graph_modules: tuple[str, ...],
    tensor_model_parallel_size: int,
    context_parallel_size: int,
    expert_model_parallel_size: int,
    expert_tensor_parallel_size: int | None,
) -> Violation:
    """Collectives stay outside of recordings, and NCCL's all-to-all reads the numbers of rows on the host."""
    if cuda_graph_impl == "none":
        return None
    sizes = {
        "--tensor-model-parallel-size": tensor_model_parallel_size,
        "--context-parallel-size": context_parallel_size,
    }
    inside = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if inside:
        return f"{_IMPL} {cuda_graph_impl} with {' and '.join(inside)}: layers exchange tensors inside", "leave one out"
    etp = expert_tensor_parallel_size or tensor_model_parallel_size
    whole = cuda_graph_impl == "full_iteration" or "moe" in cuda_graph_modules
    if not whole or expert_model_parallel_size * etp == 1:
        return None
    what = _WHOLE_STEP if cuda_graph_impl == "full_iteration" else "--cuda-graph-modules moe"
    return (
        f"{what} with experts over {expert_model_parallel_size * etp} ranks: rows are exchanged inside, and the host "
        f"reads how many",
        "record attn and moe_router",
    )


def recorded_steps_are_whole(
    cuda_graph_impl: str,
    pipeline_model_parallel_size: int,
    data_parallel_size: int,
    overlap_grad_reduce: bool,
    mtp_num_layers: int | None,
) -> Violation:
    """Stages exchange activations in a step, and data-parallel ranks the gradients of buckets."""
    if cuda_graph_impl != "full_iteration":
        return None
    others = {
        f"--pipeline-model-parallel-size {pipeline_model_parallel_size}": pipeline_model_parallel_size > 1,
        "--overlap-grad-reduce": overlap_grad_reduce and data_parallel_size > 1,
        f"--mtp-num-layers {mtp_num_layers}": bool(mtp_num_layers),
    }
    given = [name for name, there in others.items() if there]
    return (f"{_WHOLE_STEP} with {' and '.join(given)}", "record parts: --cuda-graph-impl local") if given else None


def captured_work_waits_for_nothing(
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
    whole = cuda_graph_impl == "full_iteration"
    others = {
        "--overlap-param-gather": whole and overlap_param_gather and data_parallel_size > 1,
        "--overlap-optimizer-step": whole and overlap_optimizer_step,
        "--overlap-moe-expert-parallel-comm": whole and overlap_moe_expert_parallel_comm,
        "--delay-wgrad-compute": delay_wgrad_compute,
        "--moe-shared-expert-overlap": whole and moe_shared_expert_overlap,
    }
    given = [name for name, there in others.items() if there]
    if cuda_graph_impl == "none" or not given:
        return None
    return f"{_IMPL} {cuda_graph_impl} with {' and '.join(given)}", "leave one of them out"


def timed_attention_is_computed(
    cuda_graph_impl: str, cuda_graph_modules: tuple[str, ...], log_straggler: bool
) -> Violation:
    """A replay has no point inside that could be timed, and events of its recording may not be asked for."""
    recorded = cuda_graph_impl == "full_iteration" or not cuda_graph_modules or "attn" in cuda_graph_modules
    if cuda_graph_impl == "none" or not recorded or not log_straggler:
        return None
    return (
        f"--log-straggler with {_IMPL} {cuda_graph_impl}: it times an attention, which is recorded",
        "leave out --log-straggler, or record other parts: --cuda-graph-modules moe_router",
    )


RULES = (
    whole_steps_have_no_parts,
    parts_are_recorded_once,
    rows_are_sorted_behind_a_router,
    parts_exist,
)
WAITING = (
    replays_draw_nothing,
    recorded_parts_run_once,
    recorded_experts_are_one_product,
    recorded_rows_do_not_wait,
    recorded_parts_exchange_nothing,
    recorded_steps_are_whole,
    captured_work_waits_for_nothing,
    timed_attention_is_computed,
)
"""Rules of this program that concern speed alone."""
