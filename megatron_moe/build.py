"""Builds the objects of a run, such as model, trainer, data loaders and checkpointing, from the RunPlan."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial

import torch

from megatron_moe.checkpoint.load import find_progress
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.memory import CudaGraphConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.config.train_state import TrainStateConfig, training_settings
from megatron_moe.cost_model.flops import flops_per_step
from megatron_moe.cost_model.memory import pages_of_rank
from megatron_moe.cost_model.parameters import count_parameters
from megatron_moe.cost_model.stage_costs import cost_table, flop_costs
from megatron_moe.cost_model.state_memory import checkpoint_bytes
from megatron_moe.cost_model.workspace import gathered_shard_bytes, largest_shard_bytes, ring_buffers
from megatron_moe.data.datasets import Datasets, build_datasets
from megatron_moe.data.loader import EvalLoader, RowPacker, TrainLoader, train_loader
from megatron_moe.data.samples import Samples
from megatron_moe.data.tokenizer import load_tokenizer
from megatron_moe.kernels.backends.triton.launcher import shorten_launches
from megatron_moe.kernels.kernel_set import KernelSet
from megatron_moe.kernels.registry import is_installed, select_kernels
from megatron_moe.layers.quantized_module import quantizers_of
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.logs.profiler import StepProfile, annotate_modules
from megatron_moe.logs.reporter import Reporter
from megatron_moe.logs.timers import Timers
from megatron_moe.logs.writers import Sink
from megatron_moe.memory.activation_offload import ActivationOffload
from megatron_moe.memory.cuda_graphs.capture import CaptureReport, CudaGraphRecorder, check_capturable
from megatron_moe.memory.cuda_graphs.full_iteration import FullIterationGraph
from megatron_moe.memory.cuda_graphs.instances import GraphInstancePool
from megatron_moe.memory.paged_stash import PagedStash
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.model.gpt import GPT
from megatron_moe.model.init import init_parameters, initial_shard
from megatron_moe.moe.moe_layer import StandInTransport, new_expert_comm
from megatron_moe.moe.routing_trace import RoutingReplay, RoutingTrace
from megatron_moe.moe.token_dispatcher.base import ExpertComm
from megatron_moe.optim.distributed_optimizer import Optimizer, check_coverage
from megatron_moe.optim.grad_buffers import GradBuffers
from megatron_moe.optim.lr_scheduler import LRSchedule
from megatron_moe.optim.param_store import ParamStore
from megatron_moe.optim.unit_shards import UnitSharding, nccl_fallback_notes
from megatron_moe.optim.unit_store import GatheringStore
from megatron_moe.parallel.collectives import all_reduce_, ignore_renamed_collectives
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import named_parameters
from megatron_moe.parallel.peer_ring import new_context_peers, no_copies_note
from megatron_moe.parallel.sequence_shards import new_peer_shards, no_overlap_note
from megatron_moe.parallel.streams import HostCopies, make_host_copies
from megatron_moe.planner.memory_advice import memory_advice
from megatron_moe.precision.linear_quantizer import ModelQuantizers
from megatron_moe.precision.quantizer_factory import LinearQuantizers
from megatron_moe.resilience import packages
from megatron_moe.resilience.fault_injection import FaultInjector
from megatron_moe.resilience.run_status import RunStatus
from megatron_moe.resilience.stragglers import Stragglers
from megatron_moe.resilience.watchdog import Watchdog
from megatron_moe.train.checkpointing import Checkpointing
from megatron_moe.train.evaluation import Evaluation
from megatron_moe.train.events import GarbageCollection, RunEvents
from megatron_moe.train.oom_report import report_out_of_memory
from megatron_moe.train.pipeline_stage import Pipeline
from megatron_moe.train.step_supervisor import StepSupervisor
from megatron_moe.train.trainer import Trainer
from megatron_moe.train.training_log import TrainingLog


def build_watchdog(plan: RunPlan, status: RunStatus) -> Watchdog:
    launch = plan.process
    seconds, run_dir = dict(plan.resilience.watchdog), plan.logging.run_dir
    return Watchdog(seconds, run_dir, rank=launch.rank, world_size=launch.world_size, status=status)


def set_algorithms(plan: RunPlan) -> None:
    """Sets torch's process-wide options: deterministic algorithms for --deterministic-mode, and filters for torch's
    deprecation warnings."""
    ignore_renamed_collectives()
    if plan.precision.deterministic_mode:
        torch.use_deterministic_algorithms(True)
        # not needed, because no memory is read before it is written
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


def build_context(plan: RunPlan) -> ParallelContext:
    """Creates the process groups with the other ranks, and sets torch's process-wide options."""
    set_algorithms(plan)
    holders = plan.layout.embedding_ranks(tied=plan.model.tied_embeddings)
    return ParallelContext.start(
        replace(plan.parallel, embedding_ranks=holders),
        plan.process,
        device=plan.device,
        dtype=plan.precision.params,
        seed=plan.loop.seed,
    )


def build_reporter(plan: RunPlan, context: ParallelContext, *, sinks: Sequence[Sink] | None = None) -> Reporter:
    return Reporter(
        plan.logging,
        context,
        model=plan.model,
        params_dtype=plan.precision.params,
        seq_length=plan.data.seq_length,
        train_iters=plan.loop.train_iters,
        run_yaml=plan.resolved_yaml,
        command_line=plan.command_line,
        sinks=sinks,
    )


def build_saver(
    plan: RunPlan, context: ParallelContext, reporter: Reporter, stack: ExitStack
) -> CheckpointSaver | None:
    """Builds the saver, which `stack` closes; None without --save. Locks the folder and checks that it is writable."""
    config = plan.checkpoint
    if config.save is None:
        return None
    saver = CheckpointSaver(
        config.save,
        context,
        keep_last=config.keep_last_checkpoints,
        retain_interval=config.save_retain_interval,
        keep_best=config.keep_best_checkpoint,
        fresh=config.fresh,
        stop_after=config.max_save_failures,
        expected_bytes=0 if plan.loop.skip_train else checkpoint_bytes(plan),
        expected_number=config.max_num_checkpoints(plan.loop.train_iters),
        say=reporter.note,
    )
    stack.callback(saver.close)
    return saver


def build_train_state_config(plan: RunPlan) -> TrainStateConfig:
    return TrainStateConfig(
        model=plan.model,
        batch=plan.batch,
        loop=plan.loop,
        seq_length=plan.data.seq_length,
        data_seed=plan.data.seed,
        training=training_settings(plan.optimizer, plan.batch, plan.loop, plan.data, plan.precision, plan.imports),
        run_yaml=plan.resolved_yaml,
    )


def build_checkpointing(
    plan: RunPlan, trainer: Trainer, saver: CheckpointSaver | None, reporter: Reporter, status: RunStatus
) -> Checkpointing:
    return Checkpointing(
        plan.checkpoint,
        build_train_state_config(plan),
        trainer,
        saver,
        reporter,
        status,
        log_progress=plan.logging.log_progress,
        launcher=plan.process.launcher if plan.resilience.exit_signals else None,
    )


def build_memory_guard(plan: RunPlan, context: ParallelContext) -> Callable[..., AbstractContextManager[None]]:
    """Function that takes the iteration (optional) and returns a context manager that reports out-of-memory errors."""
    advice = partial(memory_advice, plan, context.group("pp").rank)
    return partial(report_out_of_memory, context, plan.logging.run_dir, advice)


def build_kernels(plan: RunPlan, context: ParallelContext) -> KernelSet:
    kernels = select_kernels(plan.kernels, context.device, context.dtype, plan.precision.low_precision)
    if context.device.type == "cuda" and is_installed("triton"):
        shorten_launches()
    return kernels


def build_model(
    plan: RunPlan,
    context: ParallelContext,
    kernels: KernelSet,
    *,
    initial: bool = True,
    host_copies: HostCopies | None = None,
    stand_in_transport: StandInTransport | None = None,
) -> GPT:
    """Builds this rank's part of the model and initialises its weights unless `initial` is False. The initial weights
    do not depend on the parallel layout. `host_copies` transfers offloaded activations; None means the device's
    default. `stand_in_transport`: see `new_expert_comm`."""
    saved_tensors = _saved_tensor_policy(plan, context, kernels, host_copies or make_host_copies(context.device))
    with build_memory_guard(plan, context)():
        model = GPT(
            plan.model,
            context,
            kernels,
            chunks=plan.layout.chunks(context.group("pp").rank),
            saved_tensors=saved_tensors,
            expert_comm=_expert_comm(plan, context, kernels, stand_in_transport),
            quantizers=LinearQuantizers(plan.precision, kernels, context.device, len(plan.model.layers)),
            peers=new_peer_shards(context, largest_shard_bytes(plan), kernels.sum_contributions_),
            context_peers=new_context_peers(
                context, ring_buffers(plan), gathered_shard_bytes(plan), kernels.sum_contributions_
            ),
        )
        if initial:
            init_parameters(model, plan.loop.seed, plan.model.init, _init_device(plan, context))
    return model


def _init_device(plan: RunPlan, context: ParallelContext) -> torch.device:
    return torch.device("cpu") if plan.loop.use_cpu_initialization else context.device


def _expert_comm(
    plan: RunPlan, context: ParallelContext, kernels: KernelSet, stand_in: StandInTransport | None
) -> ExpertComm | None:
    """Communication state that all token dispatchers share; None for a model without MoE layers."""
    experts = next(filter(None, (layer.feed_forward.routed_experts for layer in plan.model.layers)), None)
    if experts is None:
        return None
    return new_expert_comm(experts, context, kernels, overlaps_microbatches=plan.pipeline.overlap, stand_in=stand_in)


def _saved_tensor_policy(
    plan: RunPlan, context: ParallelContext, kernels: KernelSet, host_copies: HostCopies
) -> SavedTensorPolicy:
    config, pp_rank, offload, stash = plan.memory.offload, context.group("pp").rank, None, None
    if config.offload_modules:
        offload = ActivationOffload(
            config, host_copies, stay_bytes=config.delta_offload_bytes_across_pp_ranks * pp_rank
        )
    if plan.memory.paged_stash is not None:
        pages, host_pages = (pages_of_rank(plan, pp_rank, host=host) for host in (False, True))
        stash = PagedStash(plan.memory.paged_stash, pages, kernels, host_copies, context.device, host_pages)
    return SavedTensorPolicy(plan.memory.recompute, offload=offload, stash=stash, tp=context.group("tp"))


def build_trainer(
    plan: RunPlan,
    context: ParallelContext,
    model: GPT,
    kernels: KernelSet,
    timers: Timers | None = None,
    *,
    has_peers: bool = True,
) -> Trainer:
    """Builds gradient and parameter buffers, optimizer and trainer. The model's parameters become views of the buffers.

    Args:
        timers: measures parts of a step; None means that nothing is measured. has_peers: False for a single emulated
            rank, which cannot compare parameter counts with other ranks.
    """
    parallel = plan.data_parallel
    memory_guard = build_memory_guard(plan, context)
    with memory_guard():
        buffers = GradBuffers(
            named_parameters(model),
            plan.precision,
            context,
            kernels,
            optimizer=plan.optimizer,
            data_parallel=parallel,
            expert_interval=plan.memory.moe_expert_wgrad_interval,
            sharding=None if parallel.fsdp is None else UnitSharding(parallel.fsdp),
            initial=partial(
                initial_shard, seed=plan.loop.seed, config=plan.model.init, device=_init_device(plan, context)
            ),
        )
        optimizer = Optimizer(buffers, plan.precision, ParamStore if parallel.fsdp is None else GatheringStore)
    low_precision = None
    if plan.precision.low_precision is not None:
        # collective over tp_dp_cp: all ranks of a pipeline stage
        reduce_max = partial(all_reduce_, group=context.group("tp_dp_cp"), op="max")
        low_precision = ModelQuantizers(quantizers_of(model), plan.loop.seed, reduce_max)
        optimizer.on_new_weights = low_precision.invalidate_weights
    if has_peers:
        check_coverage(buffers)
    if plan.optimizer.overlap_optimizer_step:
        optimizer.step_in_forward(model)
    elif parallel.overlap_param_gather or parallel.fsdp is not None:
        optimizer.enable_overlapped_gather(model)
    if plan.pipeline.overlap_dispatch_backward_with_experts_wgrad and model.expert_comm is not None:
        model.expert_comm.weight_grads, buffers.queue.deferred = buffers.queue, True
    pipeline = Pipeline(plan.pipeline, plan.layout, context, model)
    trainer = Trainer(
        pipeline,
        buffers,
        optimizer,
        LRSchedule.of(plan.lr_schedule, plan.optimizer),
        MetricAccumulator(),
        loop=plan.loop,
        resilience=plan.resilience,
        logging=plan.logging,
        timers=timers,
        memory_guard=memory_guard,
        low_precision=low_precision,
    )
    if has_peers and plan.emulation is None:
        trainer.routing_replay = build_routing_replay(plan, trainer)
    if context.device.type == "cuda":
        check_capturable(plan.cuda_graphs, kernels)
        recorder = CudaGraphRecorder(context.device)
        context.before_stop(recorder.destroy)
        record_steps(trainer, recorder, plan.cuda_graphs, plan.memory.moe_expert_wgrad_interval)
    return trainer


def record_steps(trainer: Trainer, recorder: CudaGraphRecorder, config: CudaGraphConfig, interval: int = 1) -> None:
    """Makes the trainer capture and replay the CUDA graphs of `config`. `interval`: `--moe-expert-wgrad-interval`.
    Raises EnvironmentProblem if experts are to be captured, and their token exchange cannot be."""
    rows = {"moe", "moe_preprocess"} & set(config.cuda_graph_modules)
    assert interval == 1 or not rows, f"graphs of {sorted(rows)} with --moe-expert-wgrad-interval {interval}"
    comm = trainer.model.expert_comm
    if comm is not None and not comm.kind.is_captured and (config.full_iteration or "moe" in rows):
        request = "--cuda-graph-impl full_iteration" if config.full_iteration else "--cuda-graph-modules moe"
        raise EnvironmentProblem(
            f"{request}: CUDA graphs cannot contain the token exchange of the transport {comm.kind.name}. Use "
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend symmetric, or capture --cuda-graph-modules "
            "attn moe_router."
        )
    if config.full_iteration:
        trainer.full_iteration = FullIterationGraph(
            recorder, config.cuda_graph_warmup_steps, tuple(trainer.buffers.main_grads)
        )
        data_parallel = trainer.buffers.data_parallel
        if data_parallel.overlap_param_gather or data_parallel.fsdp is not None:
            trainer.optimizer.store.defer_gathers_to_step_start()
    elif config.cuda_graph_modules:
        trainer.model.capture(config.cuda_graph_modules)
        pipeline, num_stages = trainer.pipeline.config, trainer.pipeline.layout.pp
        trainer.pipeline.graph_instances = GraphInstancePool(
            recorder,
            config.cuda_graph_warmup_steps,
            defers_weight_grads=pipeline.defers_weight_grads,
            one_in_flight=num_stages == 1 and not pipeline.overlap,
            copies_input_grads=num_stages > 1,
        )


def build_routing_replay(plan: RunPlan, trainer: Trainer) -> RoutingReplay | None:
    """Reads a routing trace for the decoder layers of this rank; None without `--moe-routing-replay-path` or routers.
    Raises DataProblem if the trace does not fit the run."""
    folder, num_layers = plan.loop.moe_routing_replay_path, len(plan.model.layers)
    routers = [router for router in trainer.routers if router.layer < num_layers]
    if folder is None or not routers:
        return None
    return RoutingReplay(
        folder,
        trainer.context,
        layers=[router.layer for router in routers],
        num_experts=routers[0].config.num_experts,
        topk=routers[0].config.topk,
        num_tokens=plan.batch.micro_batch_size * plan.data.seq_length,
        num_microbatches=plan.num_microbatches,
        train_iters=plan.loop.train_iters,
    )


def trace_routing(plan: RunPlan, trainer: Trainer, note: Callable[[str], None], stack: ExitStack) -> None:
    """Makes the trainer write the expert choices of steps (`--moe-routing-trace-path`). `stack` closes the file."""
    folder, model = plan.logging.moe_routing_trace_path, plan.model
    experts = [router.config.num_experts for router in trainer.routers]
    if folder is None or not experts:
        return
    trace = RoutingTrace(
        folder,
        trainer.context,
        num_experts=experts[0],
        num_layers=len(model.layers),
        mtp_calls=model.mtp.num_layers if model.mtp and model.mtp.repeated_layer else 1,
        last_iteration=plan.logging.moe_routing_trace_max_training_iters,
    )
    stack.callback(trace.close)
    trainer.trace_routing(trace)
    num_tokens = plan.num_microbatches * plan.batch.micro_batch_size * plan.data.seq_length
    num_choices = sum(router.config.topk for router in trainer.routers) * num_tokens // plan.parallel.cp
    share = plan.parallel.tp if plan.parallel.sequence_parallel else 1
    note(f"routing trace: about {4 * num_choices / share / 1e6:,.1f} MB per iteration in {trace.path}")


def build_supervisor(plan: RunPlan, trainer: Trainer, loader: TrainLoader | None, reporter: Reporter) -> StepSupervisor:
    """Builds the `StepSupervisor`, which runs and logs training steps. `loader`: training data, or None for an
    evaluation-only run."""
    return StepSupervisor(trainer, TrainingLog(trainer, reporter, build_stragglers(plan, trainer)), loader)


def build_stragglers(plan: RunPlan, trainer: Trainer) -> Stragglers | None:
    """Builds the straggler detection; None without `--log-straggler`."""
    if not plan.logging.log_straggler:
        return None
    num_samples = plan.batch.global_batch_size / plan.parallel.world_size
    flops = flops_per_step(plan.model, 1, plan.data.seq_length) * num_samples
    mixer = trainer.model.decoder.first_mixer
    return Stragglers(mixer, trainer.context, num_named=plan.logging.straggler_minmax_count, flops=flops)


def build_run_events(
    plan: RunPlan, context: ParallelContext, trainer: Trainer, reporter: Reporter, watchdog: Watchdog, stack: ExitStack
) -> RunEvents:
    """Builds the run-phase events with observers such as watchdog and profiler. `stack` closes the observers."""
    trace_routing(plan, trainer, reporter.note, stack)
    garbage = stack.enter_context(GarbageCollection(plan.loop))
    profile = StepProfile(plan.profile, context, plan.logging.run_dir, plan.logging.log_interval)
    stack.callback(profile.close)
    if plan.profile.nvtx_ranges:
        annotate_modules(trainer.model, context.device)
    if trainer.model.expert_comm is not None and trainer.model.expert_comm.transport is not None:
        watchdog.monitor(trainer.model.expert_comm.peer_problem)
    faults = plan.resilience.faults
    for fault in faults:
        reporter.note(f"--inject: {fault}")
    injectors = [FaultInjector(faults, context.rank, trainer.model).enter] if faults else []
    captured = trainer.full_iteration or trainer.pipeline.graph_instances
    reports = [CaptureReport(captured.summary, reporter.note).enter] if captured is not None else []
    return RunEvents(watchdog.enter, garbage.enter, profile.enter, *reports, *injectors)


def build_data(plan: RunPlan, context: ParallelContext) -> Datasets:
    # a cyclic order does not end, and depends on the number of samples
    progress = (0, 0) if plan.data.dataloader_type == "cyclic" else find_progress(plan.checkpoint, context)
    return build_datasets(plan.data, plan.batch, plan.loop, load_tokenizer(plan.data.tokenizer), context, progress)


def build_train_loader(
    plan: RunPlan, context: ParallelContext, datasets: Datasets, packer: RowPacker | None = None
) -> TrainLoader | None:
    """Loader of the training data; None with `--skip-train`. `packer`: packer of documents; None selects the plan's
    packer."""
    if datasets.train is None:
        return None
    return train_loader(datasets, plan.data, plan.batch, context, packer or build_packer(plan))


def build_packer(plan: RunPlan) -> RowPacker | None:
    """Packer of variable-length data into rows; None for data of fixed length."""
    if plan.data.packing is None:
        return None
    group = plan.pipeline_schedule(plan.num_microbatches).group if plan.parallel.virtual_stages > 1 else 1
    return RowPacker(config=plan.data.packing, seq_length=plan.data.seq_length, ranks=plan.parallel.dp, group=group)


def build_eval_loaders(
    plan: RunPlan, context: ParallelContext, datasets: Datasets
) -> tuple[dict[str, EvalLoader], EvalLoader | None]:
    """Loaders of the validation sets by name, and of the test set; None without a test set."""

    def loader(samples: Samples, eval_iters: int | None) -> EvalLoader:
        packer = build_packer(plan)
        return EvalLoader(samples, plan.batch, datasets.masks, context, eval_iters=eval_iters, packer=packer)

    number = plan.loop.eval_iters
    valid = {
        name: loader(samples, None if plan.data.full_validation else number) for name, samples in datasets.valid.items()
    }
    return valid, None if datasets.test is None else loader(datasets.test, number)


def build_evaluation(plan: RunPlan, pipeline: Pipeline, datasets: Datasets, reporter: Reporter) -> Evaluation:
    return Evaluation(plan.loop, pipeline, *build_eval_loaders(plan, pipeline.context, datasets), reporter)


def log_run_summary(
    plan: RunPlan, context: ParallelContext, kernels: KernelSet, model: GPT, datasets: Datasets, reporter: Reporter
) -> None:
    """Logs the set-up of a run before its first step."""
    for line in run_summary(plan, context, model, datasets):
        reporter.note(line)
    where = "see log.txt" if plan.logging.run_dir else "--run-dir D lists them in D/log.txt"
    reporter.note(kernels.table(), shown=f"{kernels.summary()}; {where}")


def run_summary(plan: RunPlan, context: ParallelContext, model: GPT, datasets: Datasets) -> Iterator[str]:
    """Yields log lines about ranks, packages, parameters, pipeline layout and data, and the notes of the plan."""
    yield str(context)
    yield from packages.summary(packages.find_all())
    yield from plan.notes
    if context.device.type == "cpu" and (plan.cuda_graphs.full_iteration or plan.cuda_graphs.cuda_graph_modules):
        yield "--cuda-graph-impl: no CUDA graphs are captured on a CPU"
    if model.expert_comm is not None and model.expert_comm.note and model.expert_comm.note not in plan.notes:
        yield model.expert_comm.note
    if plan.data_parallel.fsdp is not None:
        yield from nccl_fallback_notes(plan.data_parallel.fsdp, context)
    yield from filter(None, (no_overlap_note(context), no_copies_note(context)))
    held = sum(parameter.numel() for parameter in model.parameters())
    total, active = count_parameters(plan.model), count_parameters(plan.model, active=True)
    yield f"parameters: {total.total:,} in all, {active.total:,} active per token, {held:,} on this rank"
    if plan.layout.pp > 1:
        costs = flop_costs(plan.model, plan.data.seq_length)
        yield f"pipeline layout {plan.layout}, cost in operations:\n{cost_table(plan.layout, costs)}"
    yield from datasets.notes
    packer = build_packer(plan)
    if packer is not None and datasets.train is not None:
        yield packer.describe(datasets.train, plan.batch)
