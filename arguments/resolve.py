"""Converts checked flags to the `RunPlan`. Apart from `resolve_model`, no other module reads flag groups."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from arguments import derive
from arguments.flags import Flags, from_flags
from arguments.groups.checkpoint import CheckpointFlags
from arguments.groups.logging import LoggingFlags
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
    return RunPlan(
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
        logging=_logging(flags),
        profile=_profile(flags.logging),
        resilience=_resilience(flags, loop),
        kernels=_kernels(flags),
        cuda_graphs=_graphs(flags, model),
        launch=launch,
        device=flags.kernels.device,
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
        distributed_timeout_minutes=float(parallel.distributed_timeout_minutes),
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
    return PipelineConfig(
        layout=layout,
        microbatch_group_size_per_virtual_pipeline_stage=flags.pipeline.microbatch_group_size_per_virtual_pipeline_stage,
        # one expert-parallel rank has no expert communication to overlap
        overlap=parallel.overlap_moe_expert_parallel_comm and parallel.expert_model_parallel_size > 1,
        delay_wgrad_compute=parallel.delay_wgrad_compute,
        ep_overlap_early_attn_memory_release=parallel.ep_overlap_early_attn_memory_release,
    )


def _data_parallel(flags: Flags, grid: ParallelConfig) -> DataParallelConfig:
    parallel = flags.parallel
    # without replicas there is no gradient or parameter communication to overlap
    has_replicas = max(grid.dp * grid.cp, grid.edp) > 1
    return DataParallelConfig(
        use_distributed_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce and has_replicas,
        overlap_param_gather=parallel.overlap_param_gather and has_replicas,
        ddp_bucket_size=parallel.ddp_bucket_size,
        ddp_num_buckets=parallel.ddp_num_buckets,
        ddp_pad_buckets_for_high_nccl_busbw=parallel.ddp_pad_buckets_for_high_nccl_busbw,
        ddp_average_in_collective=parallel.ddp_average_in_collective,
        ddp_reduce_scatter_with_fp32_accumulation=parallel.ddp_reduce_scatter_with_fp32_accumulation,
    )


def batch_config(flags: Flags, data_parallel_size: int) -> BatchConfig:
    training = flags.training
    return BatchConfig(
        micro_batch_size=training.micro_batch_size,
        global_batch_size=from_flags(derive.global_batch_size, flags, data_parallel_size=data_parallel_size),
        rampup_batch_size=training.rampup_batch_size,
    )


def tokenizer_config(flags: Flags) -> TokenizerConfig:
    data = flags.data
    name = from_flags(derive.tokenizer_type, flags)
    assert name is not None
    return from_flags(
        TokenizerConfig,
        flags,
        tokenizer_type=OTHER_TOKENIZER_NAMES.get(name, name),
        tokenizer_model=_path(data.tokenizer_model),
        vocab_file=_path(data.vocab_file),
        merge_file=_path(data.merge_file),
        null_tokenizer_eod_id=data.null_tokenizer_eod_id,
        null_tokenizer_pad_id=data.null_tokenizer_pad_id,
        tiktoken_num_special_tokens=data.tiktoken_num_special_tokens,
        tokenizer_special_tokens=data.tokenizer_special_tokens or (),
    )


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _precision(flags: Flags) -> PrecisionConfig:
    precision = flags.precision
    low_params = precision.fp8_param_gather or precision.fp4_param_gather
    if precision.fp64:
        return PrecisionConfig(
            params="fp64", grads="fp64", main_params_dtype="fp64", deterministic_mode=precision.deterministic_mode
        )
    return PrecisionConfig(
        params="bf16" if precision.bf16 else "fp32",
        grads="bf16" if precision.grad_reduce_in_bf16 or precision.main_grads_dtype == "bf16" else "fp32",
        main_params_dtype=precision.main_params_dtype,
        deterministic_mode=precision.deterministic_mode,
        exp_avg_dtype=precision.exp_avg_dtype,
        exp_avg_sq_dtype=precision.exp_avg_sq_dtype,
        store_param_remainders=(
            precision.use_precision_aware_optimizer
            and precision.store_param_remainders
            and precision.bf16
            and precision.main_params_dtype == "fp32"
            and not low_params  # the 16-bit remainder completes a bf16 parameter only
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
    return MemoryConfig(
        recompute=RecomputeConfig(
            recompute_granularity=recompute.recompute_granularity or "none",
            recompute_method=recompute.recompute_method or "uniform",
            recompute_num_layers=recompute.recompute_num_layers or 1,
            recompute_modules=recompute.recompute_modules or ("core_attn",),
            distribute_saved_activations=recompute.distribute_saved_activations,
        ),
        offload=ActivationOffloadConfig(
            offload_modules=offload.offload_modules if offload.fine_grained_activation_offloading else (),
            activation_offload_fraction=offload.activation_offload_fraction,
            min_offloaded_tensor_size=offload.min_offloaded_tensor_size,
            delta_offload_bytes_across_pp_ranks=offload.delta_offload_bytes_across_pp_ranks,
            fine_grained_offloading_max_inflight_offloads=offload.fine_grained_offloading_max_inflight_offloads,
            optimizer_fraction=max(cpu_step, streamed),
        ),
        paged_stash=_stash(flags),
        moe_expert_wgrad_interval=flags.moe.moe_expert_wgrad_interval,
    )


def _stash(flags: Flags) -> PagedStashConfig | None:
    offload = flags.offload
    if not offload.moe_paged_stash:
        return None
    return PagedStashConfig(
        moe_paged_stash_page_size=offload.moe_paged_stash_page_size,
        moe_paged_stash_buffer_size_factor_cuda=offload.moe_paged_stash_buffer_size_factor_cuda,
    )


def _optimizer(flags: Flags) -> OptimizerConfig:
    optimizer = flags.optimizer
    return from_flags(
        OptimizerConfig,
        flags,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        apply_wd_to_qk_layernorm=optimizer.apply_wd_to_qk_layernorm,
        offload=_state_offload(flags),
        overlap_optimizer_step=optimizer.overlap_optimizer_step,
    )


def _state_offload(flags: Flags) -> OptimizerOffloadConfig:
    offload = flags.offload
    if offload.optimizer_cpu_offload:
        return OptimizerOffloadConfig(
            fraction=offload.optimizer_offload_fraction,
            cpu_step=True,
            overlap_cpu_optimizer_d2h_h2d=offload.overlap_cpu_optimizer_d2h_h2d,
            use_torch_optimizer_for_cpu_offload=offload.use_torch_optimizer_for_cpu_offload,
            pin_cpu_grads=offload.pin_cpu_grads,
            pin_cpu_params=offload.pin_cpu_params,
        )
    if offload.chunked_optimizer_state_offload:
        return OptimizerOffloadConfig(
            fraction=offload.optimizer_state_offload_fraction,
            chunk_bytes=offload.optimizer_state_offload_chunk_size_mb << 20,
        )
    return OptimizerOffloadConfig()


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
        override_opt_param_scheduler=optimizer.override_opt_param_scheduler,
        use_checkpoint_opt_param_scheduler=optimizer.use_checkpoint_opt_param_scheduler,
    )


def _times(iterations: int | None, size: int) -> int | None:
    return None if iterations is None else iterations * size


def _loop(flags: Flags, batch: BatchConfig) -> LoopConfig:
    training = flags.training
    train_iters = training.train_iters
    if train_iters is None:
        assert training.train_samples is not None
        train_iters = batch.steps_for(training.train_samples)
    minutes = training.exit_duration_in_mins
    return from_flags(
        LoopConfig,
        flags,
        train_iters=train_iters,
        eval_iters=from_flags(derive.eval_iters, flags, train_iters=train_iters),
        exit_duration_in_mins=None if minutes is None else float(minutes),
        calculate_per_token_loss=flags.model.calculate_per_token_loss,
        check_for_nan_in_loss_and_grad=flags.resilience.check_for_nan_in_loss_and_grad,
    )


def _data(flags: Flags, vocab_size: int) -> DataConfig:
    data = flags.data
    return from_flags(
        DataConfig,
        flags,
        train_data_path=data.train_data_path,
        valid_data_path=data.valid_data_path,
        test_data_path=data.test_data_path,
        data_path=data.data_path,
        split="969, 30, 1" if data.split is None else data.split,
        mock_data=data.mock_data,
        data_cache_path=_path(data.data_cache_path),
        tokenizer=tokenizer_config(flags),
        vocab_size=vocab_size,
        reset_position_ids=data.reset_position_ids or data.dataloader_inter_document_masking,
        reset_attention_mask=data.reset_attention_mask or data.dataloader_inter_document_masking,
        mmap_bin_files=data.mmap_bin_files,
        mid_level_dataset_surplus=data.mid_level_dataset_surplus,
        dataloader_type="cyclic" if data.dataloader_type == "cyclic" else "single",
    )


def _checkpoint(flags: Flags) -> CheckpointConfig:
    checkpoint, moe = flags.checkpoint, flags.moe
    return from_flags(
        CheckpointConfig,
        flags,
        save=from_flags(derive.save_folder, flags),
        load=checkpoint.load or None,
        pretrained_checkpoint=checkpoint.pretrained_checkpoint,
        skip_train=flags.training.skip_train,
        load_optim=checkpoint.load_optim and not moe.moe_use_upcycling,
        override_ckpt_iteration=checkpoint.override_ckpt_iteration,
        exit_on_missing_checkpoint=checkpoint.exit_on_missing_checkpoint,
        keep_last_checkpoints=checkpoint.keep_last_checkpoints,
        save_retain_interval=checkpoint.save_retain_interval,
        keep_best_checkpoint=checkpoint.keep_best_checkpoint,
        async_save=checkpoint.async_save,
        max_save_failures=1 if checkpoint.on_save_failure == "stop" else CheckpointConfig.max_save_failures,
        moe_use_upcycling=moe.moe_use_upcycling,
        moe_upcycling_granularity=moe.moe_upcycling_granularity,
        save_hf_interval=checkpoint.save_hf_interval,
        save_hf_config=_hf_config(checkpoint),
    )


def _hf_config(checkpoint: CheckpointFlags) -> Path | None:
    """Folder with the config.json that exports copy: given, or the hf: folder that weights are loaded from."""
    sources = (checkpoint.load, checkpoint.pretrained_checkpoint)
    folders = [source.removeprefix("hf:") for source in sources if source and source.startswith("hf:")]
    return _path(checkpoint.save_hf_config or next(iter(folders), None))


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
        check_weight_hash_across_dp_replicas_interval=resilience.check_weight_hash_across_dp_replicas_interval,
        max_skipped_iterations=resilience.max_skipped_iterations,
        check_for_spiky_loss=resilience.check_for_spiky_loss,
        check_for_large_grads=resilience.check_for_large_grads,
        distributed_timeout_seconds_after_init=resilience.distributed_timeout_seconds_after_init,
        rerun_mode=resilience.rerun_mode,
        faults=tuple(map(parse_fault, resilience.inject)),
    )


def _logging(flags: Flags) -> LoggingConfig:
    logging = flags.logging
    return from_flags(
        LoggingConfig,
        flags,
        run_dir=_path(logging.run_dir),
        log_style=logging.log_style,
        tensorboard_dir=_path(logging.tensorboard_dir),
        tensorboard_log_interval=logging.tensorboard_log_interval,
        wandb_project=logging.wandb_project or "",
        wandb_exp_name=logging.wandb_exp_name or "",
        wandb_entity=logging.wandb_entity or "",
        wandb_save_dir=_path(logging.wandb_save_dir),
        log_num_zeros_in_grad=logging.log_num_zeros_in_grad,
        log_memory_to_tensorboard=logging.log_memory_to_tensorboard,
        log_memory_interval=logging.log_memory_interval,
        log_device_memory_used=logging.log_device_memory_used,
        log_timers_to_tensorboard=logging.log_timers_to_tensorboard,
        log_validation_ppl_to_tensorboard=logging.log_validation_ppl_to_tensorboard,
        log_world_size_to_tensorboard=logging.log_world_size_to_tensorboard,
        straggler_minmax_count=logging.straggler_minmax_count,
        timing_log_level=logging.timing_log_level,
        timing_log_option=logging.timing_log_option,
        moe_per_layer_logging=flags.moe.moe_per_layer_logging,
    )


def _profile(logging: LoggingFlags) -> ProfileConfig:
    tool: Literal["none", "cuda", "torch"] = "none"
    if logging.profile:
        tool = "torch" if logging.use_pytorch_profiler else "cuda"
    return ProfileConfig(
        tool=tool,
        profile_step_start=logging.profile_step_start,
        profile_step_end=logging.profile_step_end,
        profile_ranks=logging.profile_ranks,
        pytorch_profiler_collect_shapes=logging.pytorch_profiler_collect_shapes,
        pytorch_profiler_collect_callstack=logging.pytorch_profiler_collect_callstack,
        nvtx_ranges=logging.nvtx_ranges,
        memory_snapshot=logging.memory_snapshot_path if logging.record_memory_history else None,
    )


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
    kernels = flags.kernels
    requests = (request.partition("=") for request in kernels.kernel_per_op)
    return from_flags(
        KernelConfig,
        flags,
        kernel_backend=kernels.kernel_backend,
        kernel_per_op=tuple((op, backend) for op, _, backend in requests),
        kernel_cache_dir=_path(kernels.kernel_cache_dir),
    )
