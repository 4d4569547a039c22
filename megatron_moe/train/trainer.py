"""Training step: pipeline schedule, gradient reduction, clipping, optimizer step, router updates.

A step does not synchronise with the device: its results stay on the device in a `StepOutcome`, which the host reads one
step later. A bool tensor on the device disables the update of a step that fails a check, for example because its loss
is not finite. A failure that ends the run also disables the updates of all later steps.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_moe.config.logging import LoggingConfig
from megatron_moe.config.resilience import ResilienceConfig
from megatron_moe.config.training import LoopConfig, StepCounts
from megatron_moe.data.batch import MicroBatch, num_routed
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.logs.timers import Timers
from megatron_moe.memory.cuda_graphs.full_iteration import FullIterationGraph
from megatron_moe.model.gpt import LossOutput, training_objective
from megatron_moe.moe.balancing import update_routers
from megatron_moe.moe.router import Router
from megatron_moe.moe.routing_trace import RoutingReplay, RoutingTrace
from megatron_moe.optim.clip_grads import clip_coefficient, count_zeros, gradient_norms
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.grad_buffers import GradBuffers, finish_grads
from megatron_moe.optim.loss_scale import LossScaler
from megatron_moe.optim.lr_scheduler import LRSchedule
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.rng import Key, RNGKey
from megatron_moe.parallel.streams import Streams
from megatron_moe.precision.linear_quantizer import ModelQuantizers
from megatron_moe.resilience.numerics_guard import SpikeLimit
from megatron_moe.resilience.replica_check import check_replicas
from megatron_moe.resilience.rerun import Repeatability
from megatron_moe.train.logit_clip import LogitClip
from megatron_moe.train.pipeline_stage import Pipeline
from megatron_moe.train.step_results import StepOutcome, largest_overflows
from megatron_moe.train.train_state import TrainState


@dataclass(frozen=True)
class RetainedStep:
    """Inputs and results of a step on this rank, kept so that the step can be repeated for diagnosis."""

    state: TrainState
    """Training state before the step."""
    batches: Sequence[MicroBatch]
    counts: StepCounts
    local: Tensor
    """fp64 [2]: sum of this rank's token losses and number of its tokens; zeros except on the last pipeline stage."""

    @property
    def iteration(self) -> int:
        """Iteration that the step completes."""
        return self.state.iteration + 1


@dataclass(frozen=True)
class RepeatedStep:
    """Results of a repeated step, stored on the device."""

    losses: dict[int, Tensor]
    """Microbatch index on this rank -> sum of its token losses; empty except on the last pipeline stage."""
    local: Tensor
    """fp64 [2]: sum of this rank's token losses and number of its tokens; zeros except on the last pipeline stage."""
    loss: Tensor
    """Mean loss per token over all ranks."""
    num_tokens: Tensor
    """Number of tokens over all ranks."""


class Trainer:
    """Runs training steps; owns the model, the gradient buffers and the optimizer."""

    def __init__(
        self,
        pipeline: Pipeline,
        buffers: GradBuffers,
        optimizer: Optimizer,
        schedule: LRSchedule,
        metrics: MetricAccumulator,
        *,
        loop: LoopConfig,
        resilience: ResilienceConfig,
        logging: LoggingConfig,
        timers: Timers | None = None,
        memory_guard: Callable[[int], AbstractContextManager[object]] = nullcontext,
        low_precision: ModelQuantizers | None = None,
    ) -> None:
        """
        Args:
            timers: None disables timing.
            memory_guard: takes the iteration; returns a context manager that reports out-of-memory errors.
            low_precision: state of FP8 or FP4 GEMMs; None if the run has none.
        """
        self.loop = loop
        self.resilience = resilience
        self.logging = logging
        self._memory_guard = memory_guard
        self.low_precision = low_precision
        self.context = pipeline.context
        self.pipeline = pipeline
        self.model = pipeline.model
        self.buffers = buffers
        self.optimizer = optimizer
        self.schedule = schedule
        self.metrics = metrics
        self.timers = timers or Timers(0, self.context.device)
        self.kernels = buffers.kernels
        scaling = optimizer.config.loss_scaling
        self.loss_scaler = None if scaling is None else LossScaler(scaling, self.context.device)
        """Scale of the loss of fp16 runs; None if the loss is not scaled."""
        self._logits = LogitClip(
            self.model, self.context, optimizer.config.qk_clip, log=logging.log_max_attention_logit
        )
        self.routers = [module for module in self.model.modules() if isinstance(module, Router)]
        self.recent: deque[RetainedStep] = deque(maxlen=2)
        """The two newest steps: the host reads the results of a step only after it has launched the next one."""
        repeats_steps = resilience.rerun_mode == "report_stats"
        self.repeatability = Repeatability(self.context.device) if repeats_steps else None
        """Statistics for `--rerun-mode report_stats`, which computes every step twice; None in other modes."""
        wanted = (resilience.check_for_spiky_loss, resilience.check_for_large_grads)
        self._limits = [
            SpikeLimit(self.context.device) if want and resilience.on_spike != "report" else None for want in wanted
        ]
        """Spike limits of the loss and of the gradient norm; None if spikes are ignored or only reported."""
        self.full_iteration: FullIterationGraph | None = None
        """CUDA graph of forward and backward of a whole step; None if steps are not captured as a whole."""
        self.routing_trace: RoutingTrace | None = None
        """Writer of expert choices (`--moe-routing-trace-path`), set by `trace_routing`; None if they are not
        written."""
        self.routing_replay: RoutingReplay | None = None
        """Expert choices that replace those of the routers (`--moe-routing-replay-path`); None means that the routers
        select."""
        self._may_continue = torch.ones((), device=self.context.device, dtype=torch.bool)
        """Device bool: False once a step has failed a check that ends the run. No update is applied afterwards."""

    def trace_routing(self, trace: RoutingTrace) -> None:
        """Makes the following steps write the expert choices of their routers."""
        self.routing_trace, self.metrics.trace_routing = trace, trace.add

    def step(
        self,
        batches: Sequence[MicroBatch],
        state: TrainState,
        counts: StepCounts | None = None,
        *,
        without_stash: bool = False,
    ) -> StepOutcome:
        """Trains on this rank's microbatches of one global batch; `state` is the state before the step.

        `counts`: samples and tokens of the global batch; None means that every row of the microbatches is one sample.
        `without_stash`: saves all rows of experts whole, although the run has a paged stash. Raises MemoryProblem if
        device memory runs out."""
        stash = self.model.saved_tensors.stash if without_stash else None
        with self._memory_guard(state.iteration + 1), nullcontext() if stash is None else stash.disabled():
            return self._step(batches, state, counts or self._counts_of(batches))

    def _counts_of(self, batches: Sequence[MicroBatch]) -> StepCounts:
        rows, seq_length = (batches[0].whole or batches[0]).tokens_BS.shape
        num_samples = len(batches) * rows * self.context.group("dp").size
        return StepCounts(num_samples, num_samples * seq_length)

    def _step(self, batches: Sequence[MicroBatch], state: TrainState, counts: StepCounts) -> StepOutcome:
        iteration, lr = state.iteration + 1, self.schedule.lr(state.trained_samples)
        self.timers.begin_step()
        trial = self._trial(batches, iteration) if self.repeatability else None
        if self.routing_trace is not None:
            self.routing_trace.begin_step(iteration)
        with self.timers.span("forward-backward", level=1):
            loss, num_tokens, local = self._forward_backward(batches, iteration)
        if self.routing_trace is not None:
            self.routing_trace.end_step(iteration)
        self.recent.append(RetainedStep(replace(state), batches, counts, local.clone()))
        with self.timers.span("all-grads-sync", level=1):
            self._finish_grads(num_tokens)
        with self.timers.span("optimizer", level=1):
            norms, extra_scalars, apply_update, state_is_finite = self._update(loss, lr, state.trained_samples)
        if self.repeatability and trial is not None:
            self.repeatability.add(trial, torch.stack([local[0], norms["all"].double()]))
        return StepOutcome(
            loss=loss,
            norms=norms,
            extra_scalars=extra_scalars,
            apply_update=apply_update,
            state_is_finite=state_is_finite,
            counts=counts,
            learning_rate=self.schedule.lr(state.trained_samples + counts.num_samples),
            applied_learning_rate=lr,
            iteration=iteration,
        )

    def repeat(self, batches: Sequence[MicroBatch], iteration: int) -> RepeatedStep:
        """Repeats forward and backward of a step; each rank's gradients stay unreduced in the buffers."""
        losses: dict[int, Tensor] = {}
        loss, num_tokens, local = self._forward_backward(batches, iteration, losses)
        self.buffers.complete_local_grads()
        return RepeatedStep(losses, local, loss, num_tokens)

    def prepare_repetition(self, iteration: int, overflow: float) -> list[RetainedStep]:
        """Prepares the repetition of all steps from an iteration on, whose updates were not applied because expert rows
        exceeded their bound (by `overflow`, relative to it) or the pages of the stash: raises the bound, destroys CUDA
        graphs, so that the next step runs eagerly, and returns these steps, which must be taken again in order."""
        if overflow:
            assert self.model.expert_comm is not None
            self.model.expert_comm.raise_row_bound(overflow)
        graphs = self.full_iteration or self.pipeline.graph_instances
        if graphs is not None:
            graphs.discard()
        if self.routing_trace is not None:
            self.routing_trace.discard_from(iteration)
        self._may_continue.fill_(True)
        self.metrics.take_all()
        steps = [step for step in self.recent if step.iteration >= iteration]
        self.recent = deque((step for step in self.recent if step.iteration < iteration), maxlen=2)
        return steps

    def rerun_grad_norm(self, repeated: RepeatedStep) -> Tensor:
        """Reduces the gradients of a repeated step and returns their norm over all ranks."""
        self._finish_grads(repeated.num_tokens)
        norm = gradient_norms(self.buffers, self.context)["all"]
        return norm if self.loss_scaler is None else norm / self.loss_scaler.scale

    def _finish_grads(self, num_tokens: Tensor) -> None:
        finish_grads(self.buffers, self.context, token_count=num_tokens if self.loop.calculate_per_token_loss else None)

    def _trial(self, batches: Sequence[MicroBatch], iteration: int) -> Tensor:
        """Repeats a step without an update and restores metrics and router buffers afterwards. Returns fp64 [2]: sum of
        this rank's token losses, and norm of the gradients over all ranks."""
        metrics, self.metrics = self.metrics, MetricAccumulator()
        kept = [(buffer, buffer.clone()) for router in self.routers for buffer in router.buffers()]
        repeated = self.repeat(batches, iteration)
        norm = self.rerun_grad_norm(repeated)
        for buffer, value in kept:
            buffer.copy_(value)
        self.metrics = metrics
        return torch.stack([repeated.local[0], norm.double()])

    def _forward_backward(
        self, batches: Sequence[MicroBatch], iteration: int, losses: dict[int, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs forward and backward, which fill the gradient buffers. Returns the mean loss and number of tokens of the
        global batch, and fp64 [2]: sum of this rank's token losses and number of its tokens.

        `losses`: dict to fill with microbatch losses when a step is repeated without gradient reduction, otherwise
        None.
        """
        self.model.train()
        if self.model.expert_comm is not None:
            self.model.expert_comm.begin_step()
        if self.model.saved_tensors.stash is not None:
            self.model.saved_tensors.stash.begin_step()
        if self.low_precision is not None:
            self.low_precision.begin_step(iteration)
        self.buffers.begin_step(len(batches), early=losses is None)
        prepared = self.prepare_microbatches(batches, iteration)
        if self.full_iteration is None or losses is not None:
            local = self._run(prepared, losses)
        else:
            drawn = [self.model.draw_forced_logits(batch, self.context.dtype) for batch in prepared]
            local = self.full_iteration.run(drawn, self._captured_step, self.metrics)
            self.optimizer.store.mark_replayed()
            if self.buffers.data_parallel.overlap_grad_reduce:
                self.buffers.reducer.mark_replayed()
        self.optimizer.finish_gather()  # also gathers weights that no forward has used
        totals = local.clone()
        # collective over pp, dp_cp: 16 bytes each; only the last stage has losses
        all_reduce_(totals, self.context.group("pp"))
        all_reduce_(totals, self.context.group("dp_cp"))
        return totals[0] / totals[1].clamp(min=1), totals[1], local

    def _captured_step(self, prepared: Sequence[MicroBatch]) -> Tensor:
        """Runs `_run` for the capture of a whole step, and then waits for all work on other streams, because a graph
        must join the streams that it forks."""
        self.optimizer.store.begin_step()
        local = self._run(prepared, streams=Streams())
        self.optimizer.store.wait_for_pending()
        if self.buffers.data_parallel.overlap_grad_reduce:
            self.buffers.complete_local_grads()
            self.buffers.reducer.finish()
        return local

    def _run(
        self, prepared: Sequence[MicroBatch], losses: dict[int, Tensor] | None = None, streams: Streams | None = None
    ) -> Tensor:
        """Runs forward and backward. Returns fp64 [2]: sum of this rank's token losses and number of its tokens."""
        totals = torch.zeros(2, device=self.context.device, dtype=torch.float64)

        def loss_for_backward(output: LossOutput, batch: MicroBatch, index: int) -> Tensor:
            per_token = self.loop.calculate_per_token_loss
            scalar, sums = training_objective(output, batch, mtp=self.model.config.mtp, per_token=per_token)
            loss_sum, num_tokens = (value.detach().double() for value in sums["lm loss"])
            totals.add_(torch.stack([loss_sum, num_tokens]))
            if losses is not None:
                losses[index] = loss_sum
            scalar = scalar if per_token else scalar / len(prepared)
            return scalar if self.loss_scaler is None else scalar * self.loss_scaler.scale

        self.pipeline.run(prepared, loss_for_backward, gradients=self.buffers, streams=streams)
        return totals

    def _update(
        self, loss: Tensor, lr: float, samples: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
        """Clips gradients, applies the update and updates the routers. Returns values for the fields of `StepOutcome`
        named `norms`, `extra_scalars`, `apply_update` (False: the update was not applied) and `state_is_finite`."""
        extra_scalars = largest_overflows(self.context, self.model.expert_comm, self.model.saved_tensors.stash)
        for overflow in extra_scalars.values():
            self._may_continue = self._may_continue & (overflow == 0)
        norms = gradient_norms(self.buffers, self.context, self.optimizer.nonfinite)
        state_is_finite = norms.pop("nonfinite") == 0
        scale: Tensor | float = 1.0
        if self.loss_scaler is not None:
            scale = extra_scalars["loss_scale"] = self.loss_scaler.scale.clone()
            self.loss_scaler.update(~torch.isfinite(norms["all"]), valid=self._may_continue)
            norms = {part: norm / scale for part, norm in norms.items()}
        if self.logging.log_num_zeros_in_grad:
            extra_scalars["num_zeros"] = count_zeros(self.buffers)
        apply_update = self._accept(loss, norms["all"]) & state_is_finite
        if self.low_precision is not None:
            # called first, because the optimizer may quantise weights with the new scales
            self.low_precision.end_step(apply_update)
        self.optimizer.step(
            lr=lr,
            decoupled_lr=self.schedule.decoupled_lr(samples),
            weight_decay=self.schedule.weight_decay(samples),
            grad_scale=clip_coefficient(norms["all"], self.optimizer.config.clip_grad) / scale,
            apply_update=apply_update,
            row_factors=self._logits.end_step(apply_update, self.metrics),
        )
        for router in self.routers:
            router.record_bias(self.metrics)
        update_routers(self.routers, self.context, apply_update=apply_update)
        if self.logging.log_params_norm:
            extra_scalars["params_norm"] = self.optimizer.params_norm()
        return norms, extra_scalars, apply_update, state_is_finite

    def _accept(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Checks loss and gradient norm for non-finite values and spikes. Returns a device bool: False if this step
        fails a check, or if its update must not be applied because of an overflow or an earlier failure."""
        config, accepted = self.resilience, torch.ones_like(self._may_continue)
        valid = self._may_continue
        checks: list[tuple[Tensor, str]] = []
        if self.loop.check_for_nan_in_loss_and_grad:
            checks.append((torch.isfinite(loss) & torch.isfinite(norm), config.on_nonfinite))
        for value, limit in zip((loss, norm), self._limits, strict=True):
            if limit is not None:
                checks.append((limit.is_normal(value, valid), config.on_spike))
        for passed, reaction in checks:
            if reaction == "skip":
                accepted = accepted & passed
            else:
                self._may_continue = self._may_continue & passed
        return self._may_continue & accepted

    def state_is_finite(self) -> bool:
        """True if no update so far stored a non-finite weight or moment on any rank. Collective; synchronises with the
        device."""
        self.optimizer.finish_gather()
        # collective over world: 4 bytes
        return not all_reduce_(self.optimizer.nonfinite.float(), self.context.group("world"), "max").item()

    def compare_replicas(self, iteration: int) -> None:
        """Compares the data-parallel replicas of the weights, if `iteration` is a multiple of
        `--check-weight-hash-across-dp-replicas-interval`. Raises DriftProblem if replicas differ in any bit."""
        interval = self.resilience.check_weight_hash_across_dp_replicas_interval
        if interval and iteration % interval == 0:
            self.optimizer.finish_gather()
            check_replicas(self.model, self.context, iteration)

    def after_restore(self, *, with_optimizer: bool) -> None:
        """Called after a checkpoint has been loaded: copies master weights to weights or, if no optimizer state was
        loaded, weights to master weights."""
        if with_optimizer:
            self.optimizer.weights_from_masters()
        else:
            self.optimizer.masters_from_weights()

    def prepare_microbatches(self, batches: Sequence[MicroBatch], iteration: int) -> list[MicroBatch]:
        """Copies of the microbatches whose contexts have all fields that a training step sets: auxiliary loss scale,
        RNG key, metrics, replayed routing and timers."""
        group, cp = self.context.group("dp"), self.context.group("cp")
        # Context-parallel ranks hold different tokens and need different random numbers.
        scope: Key = ("cp", cp.rank) if cp.size > 1 else ()
        prepared = []
        for index, batch in enumerate(batches):
            # Gradients are averaged over dp x cp, but a loss is the sum of its parts on the cp ranks.
            aux_loss_scale: Tensor | float = cp.size / len(batches)
            if self.loop.calculate_per_token_loss:
                aux_loss_scale = num_routed(batch.whole or batch)
            if self.loss_scaler is not None:
                aux_loss_scale = aux_loss_scale * self.loss_scaler.scale
            number, replay = index * group.size + group.rank, self.routing_replay
            mb = replace(
                batch.context,
                aux_loss_scale=aux_loss_scale,
                rng=RNGKey(self.loop.seed, iteration, number, scope),
                metrics=self.metrics,
                forced_routing=batch.context.forced_routing if replay is None else replay.choices(iteration, number),
                timers=self.timers if self.timers.times_nodes else None,
                training=True,
            )
            prepared.append(replace(batch, context=mb))
        return prepared
