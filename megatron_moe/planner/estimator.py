"""Step-time estimate of a plan, by component, with the efficiencies of `work.py`.

Step time = (compute + exposed communication and offload in layers) / (1 - bubble) + pipeline + data_parallel +
optimizer. Compute and layer communication are means over pipeline ranks. The bubble includes idle time due to unequal
stages. Launch overhead, unbalanced routing, and interference of concurrent kernels are not modelled.
"""

from dataclasses import dataclass, replace
from typing import Any

from megatron_moe.config.costs import bytes_per_element
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.config.update_rules import state_bytes_per_element
from megatron_moe.cost_model.flops import flops_per_step
from megatron_moe.cost_model.hardware import GPU
from megatron_moe.cost_model.memory import RankMemory
from megatron_moe.cost_model.placement import Placement
from megatron_moe.cost_model.shards import elements_of_rank
from megatron_moe.cost_model.step_time import pipeline_bubble
from megatron_moe.cost_model.traffic import Communication, Traffic
from megatron_moe.planner.work import HOST_MEMORY, MOST_OVERLAP, OFFLOAD_SLOWDOWN, LayerWork, Rates, Work, rates_of

_ERROR, _LOW_PRECISION_ERROR = 0.2, 0.3
"""Largest deviation of measured from estimated step times, relative to the estimate, rounded up: the steps of
`benchmarks/step_times.tsv`, on one and two H200. Other GPUs and steps over several hosts were not measured."""
_TENSOR_FORWARD = 0.4
"""Share of the forward in tensor-parallel traffic: 2 of 5 collectives of an MLP (docs/communication-volume.md)."""


@dataclass(frozen=True, kw_only=True)
class StepEstimate(Work):
    """Estimated time of one step in seconds, by component. "Exposed" means not overlapped with computation."""

    tensor_parallel: float
    expert_parallel: float
    """Exposed time of dispatch and combine."""
    context_parallel: float
    offload: float
    """Exposed time of copies of activations to host memory and back."""
    bubble: float
    pipeline: float
    """Point-to-point transfers at the start and end of a step."""
    data_parallel: float
    """Exposed time of gradient reduction and weight gathering."""
    optimizer: float
    flops: float
    """FLOPs of the step over all ranks, according to Megatron's formula."""
    world_size: int

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """(component, seconds) of all nonzero components, longest first."""
        sizes = {"flops", "world_size"}
        found = [(name.replace("_", " "), float(value)) for name, value in vars(self).items() if name not in sizes]
        return tuple(sorted((each for each in found if each[1] > 0), key=lambda each: -each[1]))

    @property
    def total(self) -> float:
        """Duration of the step in seconds."""
        return sum(seconds for _, seconds in self.parts)

    @property
    def tflops(self) -> float:
        """TFLOP/s per GPU, with the FLOPs of Megatron's formula."""
        return self.flops / self.total / self.world_size / 1e12


def known_error(precision: PrecisionConfig) -> float:
    """Largest measured deviation of step times from their estimates, relative to the estimate."""
    return _LOW_PRECISION_ERROR if precision.low_precision else _ERROR


def estimate_values(plan: RunPlan, step: StepEstimate) -> dict[str, Any]:
    """Estimated step time and throughput of a plan as JSON values, with `known_error`."""
    tokens = plan.batch.global_batch_size * plan.data.seq_length
    return {
        "error": known_error(plan.precision),
        "step_ms": step.total * 1e3,
        "tflops_per_gpu": step.tflops,
        "tokens_per_second_per_gpu": tokens / step.total / plan.parallel.world_size,
        "parts_ms": {name: seconds * 1e3 for name, seconds in step.parts},
    }


class Estimator:
    """Estimates the step time of a plan. `placements`: placement of groups on nodes, by group name ("ep", ...)."""

    def __init__(self, plan: RunPlan, gpu: GPU, placements: dict[str, Placement]) -> None:
        self.plan, self.gpu = plan, gpu
        self.rates: Rates = rates_of(gpu, plan.precision)
        self.rank = plan.layout.pp // 2
        """Pipeline rank, the middle one, whose communication represents that of all ranks."""
        self.stages = LayerWork(plan, self.rates).of_stages()
        self.traffic = Communication(plan, placements).of_rank(self.rank)
        num_layers = sum(len(stage.layers) + stage.num_mtp for stage in plan.layout.chunks(self.rank))
        self._mean_layers = (len(plan.model.layers) + plan.model.num_mtp) / (plan.layout.pp * max(num_layers, 1))
        """Factor that converts times of `rank` to means over pipeline ranks: mean layers per rank divided by layers of
        `rank`."""

    def step(self, *, bubble: bool = True) -> StepEstimate:
        """Estimate of the whole step. `bubble=False` omits the bubble, which gives a lower bound for every schedule."""
        plan = self.plan
        idle = 0.0
        if bubble:
            schedule = plan.pipeline_schedule(plan.num_microbatches)
            costs = [work.total for work in self.stages], [work.dense + work.experts for work in self.stages]
            idle = pipeline_bubble(schedule, *costs)
        # mean over pipeline ranks, for all microbatches of a step
        work = sum(self.stages, Work()) * (self.plan.num_microbatches / plan.layout.pp)
        tensor = self._tensor()
        experts, context = self._experts(work), self._context(work)
        offload = self._offload(work)
        recompute, recomputed = plan.memory.recompute, work.recompute
        if recompute.recompute_method is not None:
            recomputed += tensor * _TENSOR_FORWARD
        if recompute.recompute_method is not None or "moe" in recompute.recompute_modules:
            recomputed += experts / 2
        busy = work.total - work.recompute + recomputed + tensor + experts + context + offload
        return StepEstimate(
            **vars(replace(work, recompute=recomputed)),
            tensor_parallel=tensor,
            expert_parallel=experts,
            context_parallel=context,
            offload=offload,
            bubble=busy * idle / (1 - idle),
            pipeline=self._pipeline(),
            data_parallel=self._data_parallel(work),
            optimizer=self._optimizer(),
            flops=float(flops_per_step(plan.model, plan.batch.global_batch_size, plan.data.seq_length)),
            world_size=plan.parallel.world_size,
        )

    def _of(self, *groups: str) -> list[Traffic]:
        return [each for each in self.traffic if each.group in groups]

    def _seconds(self, *groups: str) -> float:
        return sum(each.seconds(self.gpu) for each in self._of(*groups))

    def _in_layers(self, *groups: str) -> float:
        """Seconds of communication in `groups` for the layers of a pipeline rank, on average and without overlap."""
        return self._seconds(*groups) * self._mean_layers

    def _tensor(self) -> float:
        """Exposed seconds of tensor parallelism. The copies of `--tp-comm-overlap` are assumed to be hidden to the same
        extent as expert communication."""
        exposed = [(1 - MOST_OVERLAP if each.hidden else 1.0) * each.seconds(self.gpu) for each in self._of("tp")]
        return sum(exposed) * self._mean_layers

    def _experts(self, work: Work) -> float:
        found = self._in_layers("ep", "etp", "etp_ep")
        if not self.plan.pipeline.overlap:
            return found
        return max((1 - MOST_OVERLAP) * found, found - work.total)

    def _context(self, work: Work) -> float:
        """Exposed seconds of context parallelism. Only the ring ("p2p") overlaps communication with attention."""
        found = self._in_layers("cp")
        hides = self.plan.model.layers[0].mixer.ring_channels(self.plan.parallel)
        return max(0.0, found - work.core_attention) if hides else found

    def _pipeline(self) -> float:
        """Exposed seconds of pipeline transfers: one pass through all ranks at the start and at the end of a step."""
        pp, vpp = self.plan.layout.pp, self.plan.layout.vpp
        return self._seconds("pp") * (pp - 1) / (self.plan.num_microbatches * vpp)

    def _data_parallel(self, work: Work) -> float:
        """Exposed seconds of gradient reduction (can overlap with one backward) and weight gathering (one forward)."""
        exposed = 0.0
        for what, share in (("gradients", 2 / 3), ("weights", 1 / 3)):
            found = [each for each in self._of("dp_cp", "edp") if each.what.startswith(what)]
            # sharded gradients and weights are communicated in every microbatch
            parts = self.plan.num_microbatches if self.plan.data_parallel.fsdp is None else 1
            hidden = work.total / parts * share if all(each.hidden for each in found) else 0.0
            exposed += max(0.0, sum(each.seconds(self.gpu) for each in found) - hidden)
        return exposed

    def _offload(self, work: Work) -> float:
        """Exposed seconds of activation offload. Copies to the host overlap with the forward (1/3 of compute time)."""
        if not self.plan.memory.offload.offload_modules:
            return 0.0
        num_bytes_moved = RankMemory(self.plan).offloaded_bytes_per_microbatch(self.rank) * self.plan.num_microbatches
        exposed = num_bytes_moved / self.rates.host_link - work.total / 3
        return max(OFFLOAD_SLOWDOWN * work.total, exposed)

    def _optimizer(self) -> float:
        """Seconds of the optimizer step: memory traffic, plus copies for the part of the state that is on the host."""
        plan, parallel, precision = self.plan, self.plan.parallel, self.plan.precision
        held = elements_of_rank(plan.model, plan.layout, self.rank, parallel)
        owners = (parallel.dp * parallel.cp, parallel.edp) if plan.data_parallel.use_distributed_optimizer else (1, 1)
        owned = held.attention / owners[0] + held.expert / owners[1]
        state = bytes_per_element(precision.main_params_dtype) + state_bytes_per_element(plan.optimizer, precision)
        each = 2 * state + 2 * bytes_per_element(precision.grads) + bytes_per_element(precision.params)
        offloaded = plan.memory.offload.optimizer_fraction * owned
        copies = (bytes_per_element(precision.grads) + bytes_per_element(precision.params)) / self.rates.host_link
        return (owned - offloaded) * each / self.rates.memory + offloaded * (each / HOST_MEMORY + copies)
