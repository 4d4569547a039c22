"""How long a step of a plan takes by a simple model, part by part. Every share that it uses is stated in `rates.py`.

    step = (work of a rank + exchanges that nothing hides) / (1 - bubble) + gradients and weights + optimizer

Work is that of the mean pipeline rank; what ranks wait for one another because stages differ is in the bubble. Not in
it: waiting for the host, uneven routing, and kernels that disturb one another.
"""

from dataclasses import dataclass

from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.activations import num_bytes
from megatron_moe.cost_model.flops import flops_per_step
from megatron_moe.cost_model.hardware import GPU
from megatron_moe.cost_model.memory import RankMemory
from megatron_moe.cost_model.placement import Placement
from megatron_moe.cost_model.shards import held_by_rank
from megatron_moe.cost_model.step_time import pipeline_bubble
from megatron_moe.cost_model.traffic import (
    Communication,
    Destinations,
    Traffic,
)
from megatron_moe.planner.rates import (
    HIDDEN_AT_BEST,
    HOST_MEMORY,
    OFFLOAD_DISTURBANCE,
    Rates,
    rates_of,
)
from megatron_moe.planner.work import LayerWork, Work

_TENSOR_FORWARD = 0.4
"""Of the traffic of tensor parallel ranks: 2 of the 5 passes of a layer are forward (docs/communication-volume.md)."""


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Seconds of one step on the ranks of a middle stage."""

    dense: float
    core_attention: float
    experts: float
    bandwidth: float
    recompute: float
    tensor_parallel: float
    expert_parallel: float
    """Exchanges of rows that nothing hides."""
    context_parallel: float
    offload: float
    """Copies of activations to host memory and back, as far as they are seen."""
    bubble: float
    pipeline: float
    """Sends at the ends of a step."""
    data_parallel: float
    """Gradients and weights that nothing hides."""
    optimizer: float
    flops: float
    """Of the whole step, as Megatron counts them."""
    world_size: int

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """(what, seconds) of everything that takes time, the longest first."""
        names = [name for name in self.__dataclass_fields__ if name not in ("flops", "world_size")]
        found = [(name.replace("_", " "), float(getattr(self, name))) for name in names]
        return tuple(sorted((each for each in found if each[1] > 0), key=lambda each: -each[1]))

    @property
    def total(self) -> float:
        return sum(seconds for _, seconds in self.parts)

    @property
    def tflops(self) -> float:
        """TFLOP/s of a GPU."""
        return self.flops / self.total / self.world_size / 1e12


class Estimator:
    """Estimates of one plan. `placements`: where its groups stand."""

    def __init__(
        self,
        plan: RunPlan,
        gpu: GPU,
        placements: dict[str, Placement],
        destinations: Destinations | None = None,
    ) -> None:
        self.plan, self.gpu = plan, gpu
        self.rates: Rates = rates_of(gpu, plan.precision)
        self.num_microbatches = plan.batch.global_size // (plan.batch.micro * plan.parallel.dp)
        self.rank = plan.layout.pp // 2
        """The pipeline rank whose communication counts."""
        self.stages = LayerWork(plan, self.rates).of_stages()
        known = destinations or Destinations()
        self.traffic = Communication(plan, placements, self.num_microbatches, known).of_rank(self.rank)
        chunks = plan.layout.chunks(self.rank)
        own = sum(len(stage.layers) + stage.num_mtp for stage in chunks)
        depths = plan.model.mtp.num_layers if plan.model.mtp else 0
        self._mean_layers = (len(plan.model.layers) + depths) / (plan.layout.pp * max(own, 1))
        """Layers of the mean rank, as a multiple of those of `rank`."""

    def without_bubble(self) -> StepEstimate:
        """What no schedule can be faster than."""
        return self._step(0.0)

    def step(self) -> StepEstimate:
        """The whole step."""
        plan = self.plan
        idle = pipeline_bubble(plan.schedule(self.num_microbatches), [work.total for work in self.stages])
        return self._step(idle)

    def _step(self, idle: float) -> StepEstimate:
        plan, work = self.plan, self._work()
        tensor = self._in_layers("tp")
        experts, context = self._experts(work), self._context(work)
        offload = self._offload(work)
        recompute = plan.memory.recompute
        again = work.again
        if recompute.granularity == "full":
            again += tensor * _TENSOR_FORWARD
        if recompute.granularity == "full" or "moe" in recompute.modules:
            again += experts / 2 if recompute.granularity != "none" else 0.0
        busy = work.total - work.again + again + tensor + experts + context + offload
        return StepEstimate(
            dense=work.dense,
            core_attention=work.core_attention,
            experts=work.experts,
            bandwidth=work.bandwidth,
            recompute=again,
            tensor_parallel=tensor,
            expert_parallel=experts,
            context_parallel=context,
            offload=offload,
            bubble=busy * idle / (1 - idle),
            pipeline=self._pipeline(),
            data_parallel=self._data_parallel(work),
            optimizer=self._optimizer(),
            flops=float(flops_per_step(plan.model, plan.batch.global_size, plan.data.seq_length)),
            world_size=plan.parallel.world_size,
        )

    def _work(self) -> Work:
        """Of the mean pipeline rank in a step."""
        return sum(self.stages, Work()) * (self.num_microbatches / self.plan.layout.pp)

    def _of(self, *groups: str) -> list[Traffic]:
        return [each for each in self.traffic if each.group in groups]

    def _seconds(self, *groups: str) -> float:
        return sum(each.seconds(self.gpu) for each in self._of(*groups))

    def _in_layers(self, *groups: str) -> float:
        """Of the mean rank."""
        return self._seconds(*groups) * self._mean_layers

    def _experts(self, work: Work) -> float:
        found = self._in_layers("ep", "etp", "etp_ep")
        if not self.plan.pipeline.overlap:
            return found
        return max((1 - HIDDEN_AT_BEST) * found, found - work.total)

    def _context(self, work: Work) -> float:
        """A ring's parts travel beside the attention of the parts that are there; heads are waited for."""
        core = self.plan.model.layers[0].mixer.core
        found = self._in_layers("cp")
        return max(0.0, found - work.core_attention) if core.context_exchange == "p2p" else found

    def _pipeline(self) -> float:
        """At the beginning and at the end of a step a hidden state passes all stages with nothing to hide it."""
        pp, vpp = self.plan.layout.pp, self.plan.layout.vpp
        return self._seconds("pp") * (pp - 1) / (self.num_microbatches * vpp)

    def _data_parallel(self, work: Work) -> float:
        """Gradients hide behind the last backward, weights behind the first forward."""
        exposed = 0.0
        for what, share in (("gradients", 2 / 3), ("weights", 1 / 3)):
            found = [each for each in self._of("dp_cp", "edp") if each.what.startswith(what)]
            beside = work.total / self.num_microbatches * share if all(each.hidden for each in found) else 0.0
            exposed += max(0.0, sum(each.seconds(self.gpu) for each in found) - beside)
        return exposed

    def _offload(self, work: Work) -> float:
        """Copies to the host hide behind the forward, those back behind the backward."""
        if not self.plan.memory.offload.modules:
            return 0.0
        moved = RankMemory(self.plan).moved_per_microbatch(self.rank) * self.num_microbatches
        unseen = moved / self.rates.host_link - work.total / 3
        return max(OFFLOAD_DISTURBANCE * work.total, unseen)

    def _optimizer(self) -> float:
        """Every byte of state read and written once, and gradients twice; on the host at the pace of its memory."""
        plan, parallel, precision = self.plan, self.plan.parallel, self.plan.precision
        held = held_by_rank(plan.model, plan.layout, self.rank, parallel)
        owners = (parallel.dp * parallel.cp, parallel.edp) if plan.data_parallel.sharded_optimizer else (1, 1)
        owned = held.attention / owners[0] + held.expert / owners[1]
        state = num_bytes(precision.master) + num_bytes(precision.exp_avg) + num_bytes(precision.exp_avg_sq)
        each = 2 * state + 2 * num_bytes(precision.grads) + num_bytes(precision.params)
        away = plan.memory.offload.optimizer_fraction * owned
        travels = (num_bytes(precision.grads) + num_bytes(precision.params)) / self.rates.host_link
        return (owned - away) * each / self.rates.memory + away * (each / HOST_MEMORY + travels)
