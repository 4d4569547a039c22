"""One training step: microbatches through the schedule, gradients finished, clipped, applied, routers updated.

Nothing here waits for the device. The step's results stay on the device in a `StepOutcome`; the loop reads them one
step later. The verdict (is everything finite?) masks the update on the device, so a non-finite number never reaches the
weights however late the host learns of it. Where a bad step ends the run, the verdict stays bad from then on.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron_moe.config.logging import LoggingConfig
from megatron_moe.config.resilience import ResilienceConfig
from megatron_moe.config.training import LoopConfig
from megatron_moe.data.batch import MicroBatch, num_routed
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.logs.timers import Timers
from megatron_moe.memory.cuda_graphs.full_iteration import FullIterationGraph
from megatron_moe.model.gpt import LossOutput, objective
from megatron_moe.moe.balancing import update_routers
from megatron_moe.moe.router import Router
from megatron_moe.optim.clip_grads import clip_coefficient, count_zeros, gradient_norms
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.grad_buffers import GradBuffers, finish_grads
from megatron_moe.optim.lr_scheduler import LRSchedule
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.rng import Key, RNGKey
from megatron_moe.parallel.streams import Streams
from megatron_moe.resilience.numerics_guard import SpikeLimit
from megatron_moe.resilience.replica_check import check_replicas
from megatron_moe.resilience.rerun import Repeatability
from megatron_moe.train.pipeline_stage import Pipeline
from megatron_moe.train.step_results import StepOutcome
from megatron_moe.train.train_state import TrainState


@dataclass(frozen=True)
class RetainedStep:
    """What a step was made of, for a look at it afterwards."""

    iteration: int
    consumed_samples: int
    """Over all ranks, before it."""
    batches: Sequence[MicroBatch]
    local: Tensor
    """fp64 [2]: sum of this rank's own losses, and the tokens it is over."""


@dataclass(frozen=True)
class RepeatedStep:
    """What a repetition of a step found, on the device."""

    losses: dict[int, Tensor]
    """What this rank knows: index of the microbatch -> sum over its tokens."""
    local: Tensor
    """As in `RetainedStep`."""
    loss: Tensor
    num_tokens: Tensor
    """Over all ranks, as the loss."""


class Trainer:
    """Owns the step: model, gradient buffers and optimizer of one run."""

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
        micro_batch_size: int,
        timers: Timers | None = None,
        memory_guard: Callable[[int], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """
        Args:
            timers: None: nothing is timed.
            memory_guard: context of the step of an iteration, which reports a lack of memory.
        """
        self.loop = loop
        self.resilience = resilience
        self.logging = logging
        self.micro_batch_size = micro_batch_size
        self._memory_guard = memory_guard
        self.context = pipeline.context
        self.pipeline = pipeline
        self.model = pipeline.model
        self.buffers = buffers
        self.optimizer = optimizer
        self.schedule = schedule
        self.metrics = metrics
        self.timers = timers or Timers(0, self.context.device)
        self.kernels = buffers.kernels
        self.routers = [module for module in self.model.modules() if isinstance(module, Router)]
        self.recent: deque[RetainedStep] = deque(maxlen=2)
        """The step that was launched last, and the one that the host reads then."""
        rehearses = resilience.rerun == "report_stats"
        self.repeatability = Repeatability(self.context.device) if rehearses else None
        """With `--rerun-mode report_stats`: every step is computed twice."""
        self._limits = _spike_limits(resilience, self.context.device)
        self.full_iteration: FullIterationGraph | None = None
        """Records and replays forward and backward; None: they are computed."""
        self._proceed = torch.ones((), device=self.context.device, dtype=torch.bool)
        self._sound = self._proceed
        self._kept = self._proceed
        """Becomes False at a step that ends the run, and stays so."""

    def step(self, batches: Sequence[MicroBatch], state: TrainState) -> StepOutcome:
        """Trains on the microbatches of one global batch (this rank's part); `state` is how things stand before it.

        Raises MemoryProblem when the device has no room.
        """
        with self._memory_guard(state.iteration + 1):
            return self._step(batches, state)

    def _step(self, batches: Sequence[MicroBatch], state: TrainState) -> StepOutcome:
        iteration, lr = state.iteration + 1, self.schedule.lr(state.trained_samples)
        rehearsal = self._rehearse(batches, iteration) if self.repeatability else None
        with self.timers.span("forward-backward", level=1):
            loss, num_tokens, local = self._forward_backward(batches, iteration)
        self.recent.append(RetainedStep(iteration, state.consumed_samples, batches, local.clone()))
        with self.timers.span("all-grads-sync", level=1):
            per_token = self.loop.per_token_loss
            finish_grads(self.buffers, self.context, token_count=num_tokens if per_token else None)
        with self.timers.span("optimizer", level=1):
            norms, figures = self._update(loss, lr, state.trained_samples)
        if self.repeatability and rehearsal is not None:
            self.repeatability.add(rehearsal, torch.stack([local[0], norms["all"].double()]))
        num_samples = len(batches) * self.micro_batch_size * self.context.group("dp").size
        return StepOutcome(
            loss=loss,
            norms=norms,
            figures=figures,
            proceed=self._proceed,
            sound=self._sound,
            num_samples=num_samples,
            learning_rate=self.schedule.lr(state.trained_samples + num_samples),
            applied_learning_rate=lr,
            iteration=iteration,
        )

    def repeat(self, batches: Sequence[MicroBatch], iteration: int) -> RepeatedStep:
        """The same forward and backward once more; every rank leaves its own gradients, unreduced, in the buffers."""
        losses: dict[int, Tensor] = {}
        loss, num_tokens, local = self._forward_backward(batches, iteration, losses)
        self.buffers.complete()
        return RepeatedStep(losses, local, loss, num_tokens)

    def norm_of(self, repeated: RepeatedStep) -> Tensor:
        """Reduces the gradients that a repetition has left; their norm over all ranks."""
        per_token = self.loop.per_token_loss
        finish_grads(self.buffers, self.context, token_count=repeated.num_tokens if per_token else None)
        return gradient_norms(self.buffers, self.context)["all"]

    def _rehearse(self, batches: Sequence[MicroBatch], iteration: int) -> Tensor:
        """Computes a step that is still to be taken, and leaves no trace: [this rank's loss, norm of all gradients]."""
        metrics, self.metrics = self.metrics, MetricAccumulator()
        kept = [(buffer, buffer.clone()) for router in self.routers for buffer in router.buffers()]
        repeated = self.repeat(batches, iteration)
        norm = self.norm_of(repeated)
        for buffer, value in kept:
            buffer.copy_(value)
        self.metrics = metrics
        return torch.stack([repeated.local[0], norm.double()])

    def _forward_backward(
        self, batches: Sequence[MicroBatch], iteration: int, losses: dict[int, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Leaves this rank's gradients in the buffers. Returns mean loss and number of tokens of the global batch, and
        this rank's own sum and number.

        `losses`: for a repetition, takes the loss of every microbatch; gradients are not reduced then.
        """
        self.model.train()
        if self.model.expert_comm is not None:
            self.model.expert_comm.begin_step()
        self.buffers.begin_step(len(batches), early=losses is None)
        prepared = self.prepare(batches, iteration)
        if self.full_iteration is None or losses is not None:
            local = self._run(prepared, losses)
        else:
            drawn = [self.model.draw_forced(batch, self.context.dtype) for batch in prepared]
            local = self.full_iteration.run(drawn, partial(self._run, streams=Streams()), self.metrics)
        self.optimizer.finish_gather()  # what no forward has read is written now: gradients of nothing are zeroed
        totals = local.clone()
        # pp, dp_cp: 16 bytes; the last stage has the losses, whose mean is over the tokens of the global batch
        all_reduce_(totals, self.context.group("pp"))
        all_reduce_(totals, self.context.group("dp_cp"))
        return totals[0] / totals[1].clamp(min=1), totals[1], local

    def _run(
        self, prepared: Sequence[MicroBatch], losses: dict[int, Tensor] | None = None, streams: Streams | None = None
    ) -> Tensor:
        """Forward and backward. Returns this rank's sum of losses and number of tokens, fp64 [2]."""
        totals = torch.zeros(2, device=self.context.device, dtype=torch.float64)

        def take_loss(output: LossOutput, batch: MicroBatch) -> Tensor:
            per_token = self.loop.per_token_loss
            scalar, sums = objective(output, batch, mtp=self.model.config.mtp, per_token=per_token)
            loss_sum, num_tokens = (value.detach().double() for value in sums["lm loss"])
            totals.add_(torch.stack([loss_sum, num_tokens]))
            if losses is not None:
                losses[self._index(batch)] = loss_sum
            return scalar if per_token else scalar / len(prepared)

        self.pipeline.run(prepared, take_loss, gradients=self.buffers, streams=streams)
        return totals

    def _update(self, loss: Tensor, lr: float, samples: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Norm, verdict, clipped update, routers. Returns gradient norms and the figures that the log wants."""
        logging, figures = self.logging, {}
        norms = gradient_norms(self.buffers, self.context, self.optimizer.nonfinite)
        self._sound = norms.pop("nonfinite") == 0
        if logging.log_num_zeros:
            figures["num_zeros"] = count_zeros(self.buffers)
        overflow = None if self.model.expert_comm is None else self.model.expert_comm.any_overflow()
        if overflow is not None:
            figures["overflow"] = overflow
        self._proceed = self._verdict(loss, norms["all"], overflow)
        self.optimizer.step(
            lr=lr,
            decoupled_lr=self.schedule.decoupled_lr(samples),
            weight_decay=self.schedule.weight_decay(samples),
            grad_scale=clip_coefficient(norms["all"], self.optimizer.config.clip_grad),
            proceed=self._proceed,
        )
        for router in self.routers:
            router.record_bias(self.metrics)
        update_routers(self.routers, self.context, proceed=self._proceed)
        if logging.log_params_norm:
            figures["params_norm"] = self.optimizer.params_norm()
        return norms, figures

    def _verdict(self, loss: Tensor, norm: Tensor, overflow: Tensor | None) -> Tensor:
        """bool scalar on the device: True if the update is applied.

        After a step that stops the run (non-finite, spike, overflow of expert rows), and after an update that stored
        non-finite values, it stays False until the host has read it and stopped.
        """
        config, kept, now = self.resilience, self._kept, torch.ones_like(self._proceed)
        if overflow is not None:
            kept = kept & ~overflow
        if self.loop.check_nonfinite:
            finite = torch.isfinite(loss) & torch.isfinite(norm)
            kept, now = (kept, now & finite) if config.on_nonfinite == "skip" else (kept & finite, now)
        for value, limit in zip((loss, norm), self._limits, strict=True):
            if limit is not None:
                usual = limit.usual(value)
                kept, now = (kept, now & usual) if config.on_spike == "skip" else (kept & usual, now)
        self._kept = kept
        return kept & now & self._sound

    def is_sound(self) -> bool:
        """True if no update so far stored a weight or moment that is not finite, on any rank. All ranks call it; waits
        for the device."""
        self.optimizer.finish_gather()
        # world: 4 bytes
        return not all_reduce_(self.optimizer.nonfinite.float(), self.context.group("world"), "max").item()

    def compare_replicas(self, iteration: int) -> None:
        """Every so many iterations, with `--check-weight-hash-across-dp-replicas-interval`: are all copies of the
        weights the same bits? Raises DriftProblem."""
        interval = self.resilience.compare_replicas_interval
        if interval and iteration % interval == 0:
            self.optimizer.finish_gather()
            check_replicas(self.model, self.context, iteration)

    def restored(self, *, with_optimizer: bool) -> None:
        """To be called when weights, and perhaps the optimizer's state, were loaded into place."""
        if with_optimizer:
            self.optimizer.weights_from_masters()
        else:
            self.optimizer.masters_from_weights()

    def _index(self, batch: MicroBatch) -> int:
        """Which of this rank's microbatches of the step a prepared one is."""
        assert batch.context.rng is not None, "a microbatch that was not prepared"
        return batch.context.rng.microbatch // self.context.group("dp").size

    def prepare(self, batches: Sequence[MicroBatch], iteration: int) -> list[MicroBatch]:
        """Sets scales, RNG keys and metrics in the context of every microbatch."""
        group, cp = self.context.group("dp"), self.context.group("cp")
        # Ranks with other parts of the sequence draw other numbers.
        scope: Key = ("cp", cp.rank) if cp.size > 1 else ()
        prepared = []
        for index, batch in enumerate(batches):
            # Gradients are averaged over dp x cp, but the parts of a loss on cp ranks add up to the loss.
            aux_loss_scale: Tensor | float = cp.size / len(batches)
            if self.loop.per_token_loss:
                aux_loss_scale = num_routed(batch.whole or batch)
            mb = replace(
                batch.context,
                aux_loss_scale=aux_loss_scale,
                rng=RNGKey(self.loop.seed, iteration, index * group.size + group.rank, scope),
                metrics=self.metrics,
                training=True,
            )
            prepared.append(replace(batch, context=mb))
        return prepared


def _spike_limits(config: ResilienceConfig, device: torch.device) -> tuple[SpikeLimit | None, SpikeLimit | None]:
    """Of loss and gradient norm, where a spike is kept from the weights."""
    wanted = (config.report_spiky_loss, config.report_large_grads)
    loss, norm = (SpikeLimit(device) if want and config.on_spike != "report" else None for want in wanted)
    return loss, norm
