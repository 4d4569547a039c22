"""Converts checked flags to the `RunPlan`."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from arguments import derive
from arguments.errors import FlagErrors, Problem
from arguments.flags import Flags, from_flags
from arguments.precision_file import read_module_precision
from arguments.resolve_model import model_config
from arguments.tp_overlap import gemms_of_flags
from megatron_moe.config.checkpoint import HUGGING_FACE, CheckpointConfig, HFDescription
from megatron_moe.config.data import OTHER_TOKENIZER_NAMES, DataConfig, TokenizerConfig
from megatron_moe.config.dsa import DSAConfig
from megatron_moe.config.faults import parse_fault
from megatron_moe.config.fsdp import FSDPConfig
from megatron_moe.config.logging import LoggingConfig, ProfileConfig
from megatron_moe.config.memory import (
    ActivationOffloadConfig,
    CudaGraphConfig,
    GraphModule,
    MemoryConfig,
    PagedStashConfig,
    RecomputeConfig,
)
from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.optimizer import (
    LossScaleConfig,
    LRConfig,
    MuonConfig,
    OptimizerConfig,
    OptimizerOffloadConfig,
    QKClipConfig,
)
from megatron_moe.config.packing import PackingConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig, ProcessInfo
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.pipeline_layout import PipelineLayout
from megatron_moe.config.precision import (
    ACTIVATION_MODULES,
    ActivationModule,
    LowPrecisionConfig,
    ModulePrecision,
    PrecisionConfig,
    low_precision_config,
)
from megatron_moe.config.resilience import ResilienceConfig
from megatron_moe.config.run import KernelConfig, RunPlan
from megatron_moe.config.training import BatchConfig, LoopConfig
from megatron_moe.cost_model.stage_costs import flop_costs

_MAX_TIMEOUT_S = 10**9  # larger threading timeouts (about 300 years) overflow


def run_plan(flags: Flags, launch: ProcessInfo, vocab_size: int, **provenance: Any) -> RunPlan:
    """Builds the plan from checked flags. `provenance`: values of further RunPlan fields, such as the command line,
    notes and environment. Raises FlagErrors if a layer cannot be sharded over the ranks."""
    parallel = parallel_config(flags, launch)
    batch = batch_config(flags, parallel.dp)
    loop = _loop(flags, batch)
    model = model_config(flags, vocab_size)
    check_layers(model.layers, parallel)
    layout = derive.pipeline_layout(flags, costs=flop_costs(model, flags.seq_length))
    check_shared_keys(model, layout)
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
        checkpoint=_checkpoint(flags, vocab_size),
        logging=from_flags(LoggingConfig, flags),
        profile=_profile(flags),
        resilience=_resilience(flags, loop),
        kernels=_kernels(flags),
        cuda_graphs=_graphs(flags, model, launch),
        process=launch,
        **provenance,
    )


def check_layers(layers: Iterable[LayerConfig], parallel: ParallelConfig) -> None:
    """Raises FlagErrors if layers cannot be sharded over the ranks."""
    problems = dict.fromkeys(layer.layout_problem(parallel) for layer in dict.fromkeys(layers))
    if any(problems):
        remedy = "choose another number of ranks, or another size of the model"
        raise FlagErrors([Problem(what=problem, remedy=remedy) for problem in problems if problem])


def check_shared_keys(model: ModelConfig, layout: PipelineLayout) -> None:
    """Raises FlagErrors if layers of sparse attention would use keys that another pipeline stage selects."""
    for stage in layout.stages:
        layers = [(f"layer {index}", model.layers[index]) for index in stage.layers]
        layers += [("multi-token prediction", model.mtp_layer)] * (stage.num_mtp > 0)
        sparse = [(name, layer.mixer) for name, layer in layers if isinstance(layer.mixer, DSAConfig)]
        if sparse and sparse[0][1].reuses_topk:
            where = f"{sparse[0][0]}, which has no indexer (--dsa-indexer-topk-freq)"
            what = f"the sparse attention of the pipeline stage {stage} begins with {where}"
            remedy = "begin every stage with a layer that has one: --pipeline-model-parallel-layout"
            raise FlagErrors([Problem(what=what, remedy=remedy)])


def parallel_config(flags: Flags, launch: ProcessInfo) -> ParallelConfig:
    tp = flags.tensor_model_parallel_size
    return from_flags(
        ParallelConfig,
        flags,
        tp=tp,
        pp=flags.pipeline_model_parallel_size,
        cp=flags.context_parallel_size,
        cp_sub_axes=_cp_sub_axes(flags),
        max_seqlen_per_dp_cp_rank=_dynamic_limit(flags),
        ep=flags.expert_model_parallel_size,
        etp=flags.expert_tensor_parallel_size or tp,
        num_distributed_optimizer_instances=(
            flags.num_distributed_optimizer_instances if derive.shards_gradients(flags) else 1
        ),
        world_size=launch.world_size,
        ranks_per_host=launch.local_world_size,
        shares_memory=derive.shares_memory(flags),
        missing_libraries=launch.missing_libraries,
        sequence_parallel=flags.sequence_parallel and tp > 1,
        tp_comm_overlap=gemms_of_flags(flags, launch),
        order="tp-cp-ep-pp-dp" if flags.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )


def _dynamic_limit(flags: Flags) -> int | None:
    if not flags.dynamic_context_parallel:
        return None
    return flags.max_seqlen_per_dp_cp_rank or -(-flags.seq_length // flags.context_parallel_size)


def _cp_sub_axes(flags: Flags) -> tuple[int, int] | None:
    sizes = flags.hierarchical_context_parallel_sizes
    if flags.context_parallel_size == 1 or sizes is None or "a2a+p2p" not in flags.cp_comm_type:
        return None
    heads, ring = sizes
    return heads, ring


def _pipeline(flags: Flags, layout: PipelineLayout) -> PipelineConfig:
    # with one expert-parallel rank, there is no expert communication to overlap
    overlap = flags.overlap_moe_expert_parallel_comm and flags.expert_model_parallel_size > 1
    within = flags.overlap_dispatch_backward_with_experts_wgrad and derive.expert_ranks(flags) > 1
    return from_flags(
        PipelineConfig, flags, layout=layout, overlap=overlap, overlap_dispatch_backward_with_experts_wgrad=within
    )


def _data_parallel(flags: Flags, grid: ParallelConfig) -> DataParallelConfig:
    # without replicas, no gradients or parameters are communicated
    has_replicas = max(grid.dp * grid.cp, grid.edp) > 1
    strategy = derive.sharding_strategy(flags)
    fsdp = None
    if has_replicas and strategy in ("optim_grads", "optim_grads_params"):
        comm = flags.megatron_fsdp_grad_comm_dtype
        fsdp = from_flags(
            FSDPConfig,
            flags,
            shards_weights=strategy == "optim_grads_params",
            fsdp_double_buffer=derive.gathers_into_two_buffers(flags),
            gathers_from_peers=flags.fsdp_gather_backend == "auto" and flags.device != "cpu",
            reduces_through_peers=flags.fsdp_reduce_backend == "auto" and flags.device != "cpu",
            grad_comm=None if comm == "auto" or flags.fp64 else comm,
            num_passes=2 if flags.overlap_moe_expert_parallel_comm and flags.expert_model_parallel_size > 1 else 1,
        )
    return from_flags(
        DataParallelConfig,
        flags,
        use_distributed_optimizer=strategy != "no_shard",
        overlap_grad_reduce=(flags.overlap_grad_reduce or fsdp is not None) and has_replicas,
        overlap_param_gather=flags.overlap_param_gather and has_replicas,
        fsdp=fsdp,
    )


def batch_config(flags: Flags, data_parallel_size: int) -> BatchConfig:
    size = derive.global_batch_size(flags, data_parallel_size=data_parallel_size)
    return from_flags(BatchConfig, flags, global_batch_size=size, step_sizes=derive.step_batch_sizes(flags))


_WITHOUT_FILES = ("NullTokenizer", "ByteTokenizer")
"""Tokenizers that read no files; a recipe's `--tokenizer-model` has no effect on them."""


def tokenizer_config(flags: Flags) -> TokenizerConfig:
    name = derive.tokenizer_type(flags)
    assert name is not None
    config = from_flags(
        TokenizerConfig,
        flags,
        tokenizer_type=OTHER_TOKENIZER_NAMES.get(name, name),
        tokenizer_special_tokens=flags.tokenizer_special_tokens or (),
    )
    return replace(config, tokenizer_model=None) if name in _WITHOUT_FILES else config


def _precision(flags: Flags) -> PrecisionConfig:
    low_params = flags.fp8_param_gather or flags.fp4_param_gather
    params, grads = ("bf16" if flags.bf16 else "fp16" if flags.fp16 else "fp32"), "fp32"
    if flags.grad_reduce_in_bf16 or flags.main_grads_dtype == "bf16":
        grads = "bf16"
    if flags.use_megatron_fsdp and flags.megatron_fsdp_main_grads_dtype != "auto":
        grads = flags.megatron_fsdp_main_grads_dtype
    main_params = flags.main_params_dtype
    if flags.use_megatron_fsdp and flags.megatron_fsdp_main_params_dtype != "auto":
        main_params = flags.megatron_fsdp_main_params_dtype
    # 16-bit remainders exist only for bf16 parameters, which they extend to fp32
    has_remainders = flags.use_precision_aware_optimizer and flags.bf16
    return from_flags(
        PrecisionConfig,
        flags,
        params="fp64" if flags.fp64 else params,
        grads="fp64" if flags.fp64 else grads,
        main_params_dtype="fp64" if flags.fp64 else main_params,
        store_param_remainders=(flags.store_param_remainders and has_remainders and main_params == "fp32"),
        low_precision=_low_precision(flags),
        module_precision=_module_precision(flags),
        low_precision_params=low_params,
    )


def _module_precision(flags: Flags) -> tuple[ModulePrecision, ...]:
    if flags.te_precision_config_file is None:
        return ()
    return read_module_precision(flags.te_precision_config_file, **_low_precision_options(flags))


def _low_precision(flags: Flags) -> LowPrecisionConfig | None:
    if flags.fp4_format is None and flags.fp8_format is None:
        return None
    skips = flags.first_last_layers_bf16
    return low_precision_config(
        flags.fp8_recipe if flags.fp4_format is None else flags.fp4_recipe,
        hybrid=flags.fp8_format == "hybrid",
        output_layer=flags.fp8_output_proj,
        layers_at_start=flags.num_layers_at_start_in_bf16 if skips else 0,
        layers_at_end=flags.num_layers_at_end_in_bf16 if skips else 0,
        **_low_precision_options(flags),
    )


def _low_precision_options(flags: Flags) -> dict[str, Any]:
    """Fields of `LowPrecisionConfig` that are the same for all modules of a run."""
    return {
        "weight_grad": flags.fp8_wgrad,
        "expert_weight_grad": derive.fp8_expert_wgrad(flags),
        "activation_modules": _activation_modules(flags),
        "activation_inputs": flags.activation_func_fp8_input_store,
        "margin": flags.fp8_margin,
        "amax_history_len": flags.fp8_amax_history_len,
        "amax_compute_algo": flags.fp8_amax_compute_algo,
        "emulate": flags.emulate_low_precision,
    }


def _activation_modules(flags: Flags) -> tuple[ActivationModule, ...]:
    chosen: tuple[ActivationModule, ...] | None = flags.low_precision_activation_modules
    return ACTIVATION_MODULES if chosen is None else chosen


def _memory(flags: Flags) -> MemoryConfig:
    cpu_step = flags.optimizer_offload_fraction if flags.optimizer_cpu_offload else 0.0
    streamed = flags.optimizer_state_offload_fraction if flags.chunked_optimizer_state_offload else 0.0
    granularity = flags.recompute_granularity
    return from_flags(
        MemoryConfig,
        flags,
        recompute=from_flags(
            RecomputeConfig,
            flags,
            recompute_method=flags.recompute_method if granularity == "full" else None,
            recompute_num_layers=flags.recompute_num_layers or 1,
            recompute_modules=(flags.recompute_modules or ("core_attn",)) if granularity == "selective" else (),
        ),
        offload=from_flags(
            ActivationOffloadConfig,
            flags,
            offload_modules=derive.offloaded_modules(flags) if flags.fine_grained_activation_offloading else (),
            optimizer_fraction=max(cpu_step, streamed),
        ),
        paged_stash=from_flags(PagedStashConfig, flags) if flags.moe_paged_stash else None,
    )


def _optimizer(flags: Flags) -> OptimizerConfig:
    state = OptimizerOffloadConfig()
    if flags.optimizer_cpu_offload:
        fraction = flags.optimizer_offload_fraction
        state = from_flags(OptimizerOffloadConfig, flags, fraction=fraction, cpu_step=True)
    elif flags.chunked_optimizer_state_offload:
        chunk_bytes = flags.optimizer_state_offload_chunk_size_mb << 20
        state = OptimizerOffloadConfig(fraction=flags.optimizer_state_offload_fraction, chunk_bytes=chunk_bytes)
    qk_clip = from_flags(QKClipConfig, flags) if flags.qk_clip else None
    scaling = from_flags(LossScaleConfig, flags) if flags.fp16 else None
    muon = from_flags(MuonConfig, flags)
    return from_flags(OptimizerConfig, flags, offload=state, muon=muon, qk_clip=qk_clip, loss_scaling=scaling)


def _lr(flags: Flags, batch: BatchConfig, loop: LoopConfig) -> LRConfig:
    """Builds the learning-rate schedule. Lengths in iterations are converted to samples with the global batch size."""
    size = batch.global_batch_size
    if flags.train_samples is not None:
        length, wsd = flags.train_samples, flags.lr_wsd_decay_samples
        decay, warmup = flags.lr_decay_samples, flags.lr_warmup_samples
    else:
        length, wsd = loop.train_iters * size, _times(flags.lr_wsd_decay_iters, size)
        decay, warmup = _times(flags.lr_decay_iters, size), flags.lr_warmup_iters * size
    decay = length if decay is None else decay
    share = flags.lr_warmup_fraction
    start, end = flags.start_weight_decay, flags.end_weight_decay
    return from_flags(
        LRConfig,
        flags,
        max_lr=flags.lr,
        init_lr=flags.lr_warmup_init,
        style=flags.lr_decay_style,
        warmup_samples=warmup if share is None else share * decay,
        decay_samples=decay,
        wsd_style=flags.lr_wsd_decay_style,
        wsd_decay_samples=wsd,
        start_weight_decay=flags.weight_decay if start is None else start,
        end_weight_decay=flags.weight_decay if end is None else end,
        weight_decay_style=flags.weight_decay_incr_style,
        weight_decay_samples=length,
    )


def _times(iterations: int | None, size: int) -> int | None:
    return None if iterations is None else iterations * size


def _loop(flags: Flags, batch: BatchConfig) -> LoopConfig:
    train_iters = flags.train_iters
    if train_iters is None:
        assert flags.train_samples is not None
        train_iters = batch.steps_for(flags.train_samples)
    eval_iters = derive.eval_iters(flags, train_iters=train_iters)
    return from_flags(LoopConfig, flags, train_iters=train_iters, eval_iters=eval_iters)


def _data(flags: Flags, vocab_size: int) -> DataConfig:
    return from_flags(
        DataConfig,
        flags,
        split="969, 30, 1" if flags.split is None else flags.split,
        tokenizer=tokenizer_config(flags),
        vocab_size=vocab_size,
        reset_position_ids=flags.reset_position_ids or flags.dataloader_inter_document_masking,
        reset_attention_mask=flags.reset_attention_mask or flags.dataloader_inter_document_masking,
        dataloader_type="cyclic" if flags.dataloader_type == "cyclic" else "single",
        packing=_packing(flags) if flags.use_varlen_dataset else None,
        mock_documents=derive.mock_documents(flags),
    )


def _packing(flags: Flags) -> PackingConfig:
    alignment = flags.pad_packed_seq_alignment
    return from_flags(
        PackingConfig,
        flags,
        sequence_packing_scheduler=flags.sequence_packing_scheduler or "dp_balanced",
        thd_tail_padding_policy=flags.thd_tail_padding_policy or "append_dummy_seq",
        pad_packed_seq_alignment=1 if alignment in (None, "max") else int(alignment),
    )


def _checkpoint(flags: Flags, vocab_size: int) -> CheckpointConfig:
    sources = (flags.load, flags.pretrained_checkpoint)
    hf_folders = [source.removeprefix(HUGGING_FACE) for source in sources if source and source.startswith(HUGGING_FACE)]
    hf_config = flags.save_hf_config or next(iter(hf_folders), None)
    return from_flags(
        CheckpointConfig,
        flags,
        save=derive.save_folder(flags),
        load=flags.load or None,
        load_optim=flags.load_optim and not flags.moe_use_upcycling,
        max_save_failures=1 if flags.on_save_failure == "stop" else CheckpointConfig.max_save_failures,
        save_hf_config=Path(hf_config) if hf_config else None,
        hf_description=None if hf_config else HFDescription(vocab_size=vocab_size, tokenizer=tokenizer_config(flags)),
    )


def _watchdog_timeouts(flags: Flags, loop: LoopConfig) -> tuple[tuple[str, float], ...]:
    """Watchdog timeout in seconds of each phase that has one. The timeout of an evaluation is (iterations + 1) x
    step timeout. With --full-validation, evaluation has no timeout, because its number of batches is unknown."""
    steps = 0 if flags.full_validation else 1 + loop.eval_iters
    phases = {
        "start": flags.start_deadline,
        "step": flags.step_deadline,
        "evaluation": flags.step_deadline * steps,
        "save": flags.save_deadline,
        "exit": flags.exit_deadline,
    }
    return tuple((phase, float(min(seconds, _MAX_TIMEOUT_S))) for phase, seconds in phases.items() if seconds)


def _resilience(flags: Flags, loop: LoopConfig) -> ResilienceConfig:
    signals = (flags.exit_signal, "SIGTERM", "SIGINT", "SIGUSR1") if flags.exit_signal_handler else ()
    on_nonfinite, most_skipped = flags.on_nonfinite, flags.max_skipped_iterations
    # overflows are expected while dynamic loss scaling searches for a scale
    if flags.fp16 and flags.loss_scale is None:
        on_nonfinite = "skip"
        most_skipped += from_flags(LossScaleConfig, flags).most_overflows
    return from_flags(
        ResilienceConfig,
        flags,
        on_nonfinite=on_nonfinite,
        max_skipped_iterations=most_skipped,
        exit_signals=tuple(dict.fromkeys(signals)),
        watchdog=_watchdog_timeouts(flags, loop),
        faults=tuple(map(parse_fault, flags.inject)),
    )


def _profile(flags: Flags) -> ProfileConfig:
    tool: Literal["none", "cuda", "torch"] = "none"
    if flags.profile:
        tool = "torch" if flags.use_pytorch_profiler else "cuda"
    snapshot = flags.memory_snapshot_path if flags.record_memory_history else None
    return from_flags(ProfileConfig, flags, tool=tool, memory_snapshot=snapshot)


def _graphs(flags: Flags, model: ModelConfig, launch: ProcessInfo) -> CudaGraphConfig:
    warmup = max(flags.cuda_graph_warmup_steps, 1)  # the first step compiles kernels and creates library plans
    match flags.cuda_graph_impl:
        case "none":
            return CudaGraphConfig(cuda_graph_warmup_steps=warmup)
        case "full_iteration":
            return CudaGraphConfig(full_iteration=True, cuda_graph_warmup_steps=warmup)
    modules: tuple[GraphModule, ...] = flags.cuda_graph_modules or _all_graph_modules(flags, model, launch)
    return CudaGraphConfig(cuda_graph_modules=modules, cuda_graph_warmup_steps=warmup)


def _all_graph_modules(flags: Flags, model: ModelConfig, launch: ProcessInfo) -> tuple[GraphModule, ...]:
    """Default of --cuda-graph-modules: all modules of this model that can be captured."""
    mixers = {layer.mixer.node_name for layer in model.layers if layer.mixer.present}
    dense = (layer.feed_forward.present and not layer.is_moe for layer in model.layers)
    attention = "attention" in mixers and derive.selects_keys_in_every_layer(flags)
    present: dict[GraphModule, bool] = {"attn": attention, "mamba": "mamba" in mixers, "mlp": any(dense)}
    modules = [name for name, found in present.items() if found]
    if any(layer.is_moe for layer in model.layers):
        modules += derive.default_expert_modules(flags, launch.local_world_size)
    return tuple(modules)


def _kernels(flags: Flags) -> KernelConfig:
    requests = (request.partition("=") for request in flags.kernel_per_op)
    return from_flags(KernelConfig, flags, kernel_per_op=tuple((op, backend) for op, _, backend in requests))
