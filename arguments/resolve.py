"""Converts checked flags to the `RunPlan`. Apart from `resolve_model`, no other module reads flag groups."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from arguments import derive
from arguments.flags import Flags, from_flags
from arguments.resolve_model import model_config
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.data import OTHER_TOKENIZER_NAMES, DataConfig, TokenizerConfig
from megatron_moe.config.faults import parse_fault
from megatron_moe.config.logging import LoggingConfig, ProfileConfig
from megatron_moe.config.memory import (
    ActivationOffloadConfig,
    CudaGraphConfig,
    GraphModule,
    MemoryConfig,
    PagedStashConfig,
    RecomputeConfig,
)
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.optimizer import LRConfig, OptimizerConfig, OptimizerOffloadConfig
from megatron_moe.config.parallel import DataParallelConfig, Launch, ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.precision import LowPrecision, PrecisionConfig
from megatron_moe.config.resilience import ResilienceConfig
from megatron_moe.config.run import KernelConfig, RunPlan
from megatron_moe.config.training import BatchConfig, LoopConfig
from megatron_moe.pipeline.auto_layout import flop_costs
from megatron_moe.pipeline.layout import PipelineLayout

_MAX_TIMEOUT_S = 10**9  # threading timeouts overflow at about 300 years


def run_plan(flags: Flags, launch: Launch, vocab_size: int, **provenance: Any) -> RunPlan:
    """Builds the plan from checked flags. `provenance` holds the plan's fields on its origin (command line, notes,
    ...)."""
    parallel = parallel_config(flags, launch)
    batch = batch_config(flags, parallel.dp)
    loop = _loop(flags, batch)
    model = model_config(flags, vocab_size)
    layout = _layout(flags, model)
    return from_flags(
        RunPlan,
        flags,
        model=model,
        parallel=replace(parallel, virtual_stages=layout.vpp),
        pipeline=_pipeline(flags, layout),
        data_parallel=_data_parallel(flags, parallel),
        precision=_precision(flags),
        memory=_memory(flags),
        optimizer=_optimizer(flags),
        lr_schedule=_lr(flags, batch, loop),
        batch=batch,
        data=_data(flags, vocab_size),
        loop=loop,
        checkpoint=_checkpoint(flags),
        logging=from_flags(LoggingConfig, flags),
        profile=_profile(flags),
        resilience=_resilience(flags, loop),
        kernels=_kernels(flags),
        cuda_graphs=_graphs(flags, model),
        launch=launch,
        **provenance,
    )


def parallel_config(flags: Flags, launch: Launch) -> ParallelConfig:
    parallel, pipeline = flags.parallel, flags.pipeline
    tp = parallel.tensor_model_parallel_size
    return from_flags(
        ParallelConfig,
        flags,
        tp=tp,
        pp=pipeline.pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
        cp_sub_axes=_cp_sub_axes(flags),
        max_seqlen_per_dp_cp_rank=parallel.max_seqlen_per_dp_cp_rank if parallel.hybrid_context_parallel else None,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size or tp,
        world_size=launch.world_size,
        sequence_parallel=parallel.sequence_parallel and tp > 1,
        order="tp-cp-ep-pp-dp" if parallel.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )


def _cp_sub_axes(flags: Flags) -> tuple[int, int] | None:
    parallel = flags.parallel
    sizes = parallel.hierarchical_context_parallel_sizes
    if parallel.context_parallel_size == 1 or sizes is None or "a2a+p2p" not in parallel.cp_comm_type:
        return None
    heads, ring = sizes
    return heads, ring


def _layout(flags: Flags, model: ModelConfig) -> PipelineLayout:
    return from_flags(derive.pipeline_layout, flags, costs=flop_costs(model, flags.model.seq_length))


def _pipeline(flags: Flags, layout: PipelineLayout) -> PipelineConfig:
    parallel = flags.parallel
    # one expert-parallel rank has no expert communication to overlap
    overlap = parallel.overlap_moe_expert_parallel_comm and parallel.expert_model_parallel_size > 1
    return from_flags(PipelineConfig, flags, layout=layout, overlap=overlap)


def _data_parallel(flags: Flags, grid: ParallelConfig) -> DataParallelConfig:
    # without replicas there is no gradient or parameter communication to overlap
    has_replicas = max(grid.dp * grid.cp, grid.edp) > 1
    return from_flags(
        DataParallelConfig,
        flags,
        overlap_grad_reduce=flags.parallel.overlap_grad_reduce and has_replicas,
        overlap_param_gather=flags.parallel.overlap_param_gather and has_replicas,
    )


def batch_config(flags: Flags, data_parallel_size: int) -> BatchConfig:
    size = from_flags(derive.global_batch_size, flags, data_parallel_size=data_parallel_size)
    return from_flags(BatchConfig, flags, global_batch_size=size)


def tokenizer_config(flags: Flags) -> TokenizerConfig:
    name = from_flags(derive.tokenizer_type, flags)
    assert name is not None
    return from_flags(
        TokenizerConfig,
        flags,
        tokenizer_type=OTHER_TOKENIZER_NAMES.get(name, name),
        tokenizer_special_tokens=flags.data.tokenizer_special_tokens or (),
    )


def _precision(flags: Flags) -> PrecisionConfig:
    precision = flags.precision
    low_params = precision.fp8_param_gather or precision.fp4_param_gather
    params, grads = ("bf16" if precision.bf16 else "fp32"), "fp32"
    if precision.grad_reduce_in_bf16 or precision.main_grads_dtype == "bf16":
        grads = "bf16"
    # the 16-bit remainder completes a bf16 parameter only
    has_remainders = precision.use_precision_aware_optimizer and precision.bf16 and not low_params
    return from_flags(
        PrecisionConfig,
        flags,
        params="fp64" if precision.fp64 else params,
        grads="fp64" if precision.fp64 else grads,
        main_params_dtype="fp64" if precision.fp64 else precision.main_params_dtype,
        store_param_remainders=(
            precision.store_param_remainders and has_remainders and precision.main_params_dtype == "fp32"
        ),
        low_precision=_low_precision(flags),
        low_precision_params=low_params,
    )


def _low_precision(flags: Flags) -> LowPrecision | None:
    precision = flags.precision
    if precision.fp4_format is not None:
        return precision.fp4_recipe
    return None if precision.fp8_format is None else precision.fp8_recipe


def _memory(flags: Flags) -> MemoryConfig:
    recompute, offload = flags.recompute, flags.offload
    cpu_step = offload.optimizer_offload_fraction if offload.optimizer_cpu_offload else 0.0
    streamed = offload.optimizer_state_offload_fraction if offload.chunked_optimizer_state_offload else 0.0
    return from_flags(
        MemoryConfig,
        flags,
        recompute=from_flags(
            RecomputeConfig,
            flags,
            recompute_granularity=recompute.recompute_granularity or "none",
            recompute_method=recompute.recompute_method or "uniform",
            recompute_num_layers=recompute.recompute_num_layers or 1,
            recompute_modules=recompute.recompute_modules or ("core_attn",),
        ),
        offload=from_flags(
            ActivationOffloadConfig,
            flags,
            offload_modules=offload.offload_modules if offload.fine_grained_activation_offloading else (),
            optimizer_fraction=max(cpu_step, streamed),
        ),
        paged_stash=from_flags(PagedStashConfig, flags) if offload.moe_paged_stash else None,
    )


def _optimizer(flags: Flags) -> OptimizerConfig:
    offload, state = flags.offload, OptimizerOffloadConfig()
    if offload.optimizer_cpu_offload:
        fraction = offload.optimizer_offload_fraction
        state = from_flags(OptimizerOffloadConfig, flags, fraction=fraction, cpu_step=True)
    elif offload.chunked_optimizer_state_offload:
        chunk_bytes = offload.optimizer_state_offload_chunk_size_mb << 20
        state = OptimizerOffloadConfig(fraction=offload.optimizer_state_offload_fraction, chunk_bytes=chunk_bytes)
    return from_flags(OptimizerConfig, flags, offload=state)


def _lr(flags: Flags, batch: BatchConfig, loop: LoopConfig) -> LRConfig:
    """Converts schedule lengths to samples: iterations are multiplied by the global batch size."""
    optimizer, size = flags.optimizer, batch.global_batch_size
    if flags.training.train_samples is not None:
        length, wsd = flags.training.train_samples, optimizer.lr_wsd_decay_samples
        decay, warmup = optimizer.lr_decay_samples, optimizer.lr_warmup_samples
    else:
        length, wsd = loop.train_iters * size, _times(optimizer.lr_wsd_decay_iters, size)
        decay, warmup = _times(optimizer.lr_decay_iters, size), optimizer.lr_warmup_iters * size
    decay = length if decay is None else decay
    share = optimizer.lr_warmup_fraction
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    return from_flags(
        LRConfig,
        flags,
        max_lr=optimizer.lr,
        init_lr=optimizer.lr_warmup_init,
        style=optimizer.lr_decay_style,
        warmup_samples=warmup if share is None else share * decay,
        decay_samples=decay,
        wsd_style=optimizer.lr_wsd_decay_style,
        wsd_decay_samples=wsd,
        start_weight_decay=optimizer.weight_decay if start is None else start,
        end_weight_decay=optimizer.weight_decay if end is None else end,
        weight_decay_style=optimizer.weight_decay_incr_style,
        weight_decay_samples=length,
    )


def _times(iterations: int | None, size: int) -> int | None:
    return None if iterations is None else iterations * size


def _loop(flags: Flags, batch: BatchConfig) -> LoopConfig:
    training = flags.training
    train_iters = training.train_iters
    if train_iters is None:
        assert training.train_samples is not None
        train_iters = batch.steps_for(training.train_samples)
    eval_iters = from_flags(derive.eval_iters, flags, train_iters=train_iters)
    return from_flags(LoopConfig, flags, train_iters=train_iters, eval_iters=eval_iters)


def _data(flags: Flags, vocab_size: int) -> DataConfig:
    data = flags.data
    return from_flags(
        DataConfig,
        flags,
        split="969, 30, 1" if data.split is None else data.split,
        tokenizer=tokenizer_config(flags),
        vocab_size=vocab_size,
        reset_position_ids=data.reset_position_ids or data.dataloader_inter_document_masking,
        reset_attention_mask=data.reset_attention_mask or data.dataloader_inter_document_masking,
        dataloader_type="cyclic" if data.dataloader_type == "cyclic" else "single",
    )


def _checkpoint(flags: Flags) -> CheckpointConfig:
    checkpoint = flags.checkpoint
    sources = (checkpoint.load, checkpoint.pretrained_checkpoint)
    hf_folders = [source.removeprefix("hf:") for source in sources if source and source.startswith("hf:")]
    hf_config = checkpoint.save_hf_config or next(iter(hf_folders), None)
    return from_flags(
        CheckpointConfig,
        flags,
        save=from_flags(derive.save_folder, flags),
        load=checkpoint.load or None,
        load_optim=checkpoint.load_optim and not flags.moe.moe_use_upcycling,
        max_save_failures=1 if checkpoint.on_save_failure == "stop" else CheckpointConfig.max_save_failures,
        save_hf_config=Path(hf_config) if hf_config else None,
    )


def _deadlines(flags: Flags, loop: LoopConfig) -> tuple[tuple[str, float], ...]:
    """Watchdog timeout in seconds of each phase. An evaluation gets one step timeout per batch and one more; with
    --full-validation the number of batches is unknown, so there is no timeout."""
    resilience = flags.resilience
    steps = 0 if flags.data.full_validation else 1 + loop.eval_iters
    phases = {
        "start": resilience.start_deadline,
        "step": resilience.step_deadline,
        "evaluation": resilience.step_deadline * steps,
        "save": resilience.save_deadline,
        "exit": resilience.exit_deadline,
    }
    return tuple((phase, float(min(seconds, _MAX_TIMEOUT_S))) for phase, seconds in phases.items() if seconds)


def _resilience(flags: Flags, loop: LoopConfig) -> ResilienceConfig:
    resilience = flags.resilience
    signals = (resilience.exit_signal, "SIGTERM", "SIGINT", "SIGUSR1") if resilience.exit_signal_handler else ()
    return from_flags(
        ResilienceConfig,
        flags,
        exit_signals=tuple(dict.fromkeys(signals)),
        watchdog=_deadlines(flags, loop),
        faults=tuple(map(parse_fault, resilience.inject)),
    )


def _profile(flags: Flags) -> ProfileConfig:
    logging = flags.logging
    tool: Literal["none", "cuda", "torch"] = "none"
    if logging.profile:
        tool = "torch" if logging.use_pytorch_profiler else "cuda"
    snapshot = logging.memory_snapshot_path if logging.record_memory_history else None
    return from_flags(ProfileConfig, flags, tool=tool, memory_snapshot=snapshot)


def _graphs(flags: Flags, model: ModelConfig) -> CudaGraphConfig:
    kernels = flags.kernels
    warmup = max(kernels.cuda_graph_warmup_steps, 1)  # the first step compiles kernels and creates library plans
    match kernels.cuda_graph_impl:
        case "none":
            return CudaGraphConfig(cuda_graph_warmup_steps=warmup)
        case "full_iteration":
            return CudaGraphConfig(full_iteration=True, cuda_graph_warmup_steps=warmup)
    modules: Any = kernels.cuda_graph_modules or _all_graph_modules(flags, model)  # checks/cuda_graphs.py rejects mamba
    return CudaGraphConfig(cuda_graph_modules=modules, cuda_graph_warmup_steps=warmup)


def _all_graph_modules(flags: Flags, model: ModelConfig) -> tuple[GraphModule, ...]:
    """Modules of the model that can be captured."""
    modules: list[GraphModule] = ["attn"]
    if not all(layer.is_moe for layer in model.layers):
        modules.append("mlp")
    if any(layer.is_moe for layer in model.layers):
        ranks = from_flags(derive.expert_ranks, flags)
        captures_experts = from_flags(derive.experts_are_recorded, flags, num_expert_ranks=ranks)
        modules.append("moe" if captures_experts else "moe_router")
    return tuple(modules)


def _kernels(flags: Flags) -> KernelConfig:
    requests = (request.partition("=") for request in flags.kernels.kernel_per_op)
    return from_flags(KernelConfig, flags, kernel_per_op=tuple((op, backend) for op, _, backend in requests))
