"""Compute time of one microbatch in the layers of one rank, forward and backward, by kind of work.

The efficiencies below are fractions of the rates in data sheets. Those of bf16 GEMMs, attention and memory were
measured on one H200 with recipe q6, that of FP8 for a single GEMM shape (`benchmarks/2026-11-23-h200-fp8.md`); all are
assumed for every GPU. Rates of host links and host memory are estimates. Launch overhead is not modelled.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache, partial

from megatron_moe.config.component import UNSHARDED
from megatron_moe.config.costs import CostSum, FlopCount, bytes_per_element
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.pipeline_layout import StageLayout
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.activations import activation_sizes, layer_tensors
from megatron_moe.cost_model.flops import count_layer_flops, gemm_flops
from megatron_moe.cost_model.hardware import GPU
from megatron_moe.cost_model.shards import elements_of_layer

DENSE = 0.77
"""Efficiency of GEMMs outside the experts, as a fraction of the peak."""
GROUPED = 0.68
"""Efficiency of the experts' grouped GEMMs, as a fraction of the peak; traffic of weights is counted separately."""
CORE_ATTENTION = 0.41
"""Efficiency of attention, forward and backward, as a fraction of the bf16 peak; causal FLOPs are counted."""
LOW_PRECISION = 0.64
"""Efficiency of FP8 GEMMs, as a fraction of the peak; measured for a blockwise 8192 x 4096 x 4096 GEMM."""
BANDWIDTH = 0.89
"""Attainable memory bandwidth, as a fraction of the data sheet's value."""
PASSES = 7.5
"""Bytes moved by bandwidth-bound kernels (norms, RoPE, router, permutation, activation, residual sums) in forward and
backward, as a multiple of the activation bytes that a layer saves. Measured: 7.7 (Qwen3 with 6 layers) and 7.1
(Mixtral with 8 layers)."""
LOGIT_PASSES = 3.0
"""Bytes moved by the loss, as a multiple of the logits' bytes: one read in forward, a read and a write in backward."""
RECOMPUTE_PASSES = 3.0
"""Bytes moved by bandwidth-bound kernels in recompute, as a multiple of the bytes that recompute frees."""
QUANTIZATION_PASSES = 3.0
"""Bytes moved to quantise a GEMM's operands in forward and backward, as a multiple of the input's bytes (estimate)."""
OFFLOAD_SLOWDOWN = 0.018
"""Relative slowdown of computation by overlapped activation copies; published values are 1.6 to 2 %."""
MOST_OVERLAP = 0.95
"""Maximum fraction of expert communication that overlaps with another microbatch; a published value."""
HOST_MEMORY = 60e9
"""Host memory bandwidth per GPU during an optimizer step on the CPU, in bytes per second; an estimate."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Attainable rates of one GPU, in FLOP/s and bytes per second."""

    dense: float
    head: float
    """FLOP/s of the output head, which always uses the parameters' format."""
    experts: float
    core_attention: float
    memory: float
    host_link: float
    """Bytes per second of copies between device and host memory, per direction."""


def rates_of(gpu: GPU, precision: PrecisionConfig) -> Rates:
    """Attainable rates of a GPU for the number formats in `precision`."""
    peak, _ = gpu.peak_flops_for(precision.params)
    low = gpu.fp8 * LOW_PRECISION
    return Rates(
        dense=low if precision.low_precision else peak * DENSE,
        head=peak * DENSE,
        experts=low if precision.low_precision else peak * GROUPED,
        core_attention=peak * CORE_ATTENTION,
        memory=gpu.hbm * BANDWIDTH,
        host_link=gpu.host_link,
    )


_FORWARD = 1 / 3
"""Fraction of a layer's training FLOPs that the forward takes."""


@dataclass(frozen=True, kw_only=True)
class Work(CostSum[float]):
    """Compute time in seconds, by kind of work."""

    dense: float = 0.0
    """GEMMs outside the experts, including the output head."""
    core_attention: float = 0.0
    """Attention and the scores of indexers, whose efficiency is assumed to be that of attention."""
    experts: float = 0.0
    bandwidth: float = 0.0
    """Kernels that are bound by memory bandwidth, such as norms, permutations and casts."""
    recompute: float = 0.0


class LayerWork:
    """Calculates the compute time of a plan's layers and stages."""

    def __init__(self, plan: RunPlan, rates: Rates) -> None:
        self.plan = plan
        self.rates = rates
        self.sizes = activation_sizes(plan)
        self._share = plan.batch.micro_batch_size / (plan.parallel.tp * plan.parallel.cp)
        """A rank's FLOPs for one microbatch, divided by the FLOPs of one whole sequence."""
        self.of_layer = cache(self._of_layer)
        """Function that maps a LayerConfig to the work of one microbatch in a layer of this kind, without recompute."""
        self.tensors = cache(partial(layer_tensors, parallel=plan.parallel, sizes=self.sizes))
        """Function that maps a LayerConfig to the tensors that a layer with this config saves without recompute."""
        self._of_modules = cache(self._recompute_of_modules)

    def of_stages(self) -> list[Work]:
        """Work of one microbatch in each stage, recompute included."""
        layers = self.plan.model.layers
        kinds = {layer: kind for kind, layer in enumerate(dict.fromkeys(layers))}
        kind_of = [kinds[layer] for layer in layers]
        found: dict[object, Work] = {}
        keys = []
        for stage in self.plan.layout.stages:
            key = tuple(kind_of[index] for index in stage.layers), stage.num_mtp, stage.loss
            keys.append(key)
            if key not in found:
                found[key] = self.of_stage(stage)
        return [found[key] for key in keys]

    def of_stage(self, stage: StageLayout) -> Work:
        """Work of one microbatch in one stage, recompute included."""
        model, recompute = self.plan.model, self.plan.memory.recompute
        work = Work()
        layers = ((model.layers[index], recompute.recomputes_layer(place)) for place, index in enumerate(stage.layers))
        for (layer, whole), count in Counter(layers).items():
            work += (self.of_layer(layer) + Work(recompute=self.recompute(layer, whole))) * count
        if stage.num_mtp:
            layer = model.mtp_layer
            elements = 2 * model.hidden_size**2 * model.residual.num_streams
            projection = 6 * elements * self.plan.data.seq_length * self._share / self.rates.dense
            whole = recompute.recompute_method == "uniform"
            one = self.of_layer(layer) + Work(recompute=self.recompute(layer, whole), dense=projection)
            work += one * model.num_mtp
        return work + self._head() if stage.loss else work

    def _of_layer(self, layer: LayerConfig) -> Work:
        rates, flops = self.rates, count_layer_flops(layer, self.plan.data.seq_length)
        tensors = self.tensors(layer)
        num_bytes_moved = PASSES * sum(each.bytes for each in tensors)
        if self.plan.precision.low_precision:
            num_bytes_moved += QUANTIZATION_PASSES * sum(each.bytes for each in tensors if each.low)
        return Work(
            dense=(flops.attention + flops.dense_mlp + flops.shared + flops.connections) * self._share / rates.dense,
            core_attention=(flops.core_attention + flops.indexer) * self._share / rates.core_attention,
            experts=flops.experts * self._share / rates.experts + self._expert_weight_traffic(layer) / rates.memory,
            bandwidth=num_bytes_moved / rates.memory,
        )

    def _expert_weight_traffic(self, layer: LayerConfig) -> float:
        """Bytes of device memory traffic per microbatch for expert weights (read in forward and backward) and their
        gradients (read and written every `moe_expert_wgrad_interval` microbatches). GEMMs with few rows do not hide
        this traffic."""
        plan, precision = self.plan, self.plan.precision
        weight = 1 if precision.low_precision else bytes_per_element(precision.params)
        interval = max(1, min(plan.memory.moe_expert_wgrad_interval, plan.num_microbatches))
        gradient = 2 * bytes_per_element(precision.grads) / interval
        return elements_of_layer(layer, plan.parallel).expert * (2.0 * weight + gradient)

    def _head(self) -> Work:
        """Work of logits and loss, for the next token and for each MTP depth."""
        plan, model = self.plan, self.plan.model
        num_logits = self.sizes.inner * (model.vocab_size // plan.parallel.tp) * (1 + model.num_mtp)
        return Work(
            dense=6 * model.hidden_size * num_logits / self.rates.head,
            bandwidth=LOGIT_PASSES * num_logits * self.sizes.activation_itemsize / self.rates.memory,
        )

    def recompute(self, layer: LayerConfig, whole: bool) -> float:
        """Seconds to recompute a layer for one microbatch. `whole`: whether full recompute includes the layer."""
        if whole:
            return _FORWARD * self.of_layer(layer).total
        return self._of_modules(layer, self.plan.memory.recompute.recompute_modules)

    def _recompute_of_modules(self, layer: LayerConfig, modules: tuple[str, ...]) -> float:
        """Seconds to recompute modules of a layer, estimated from their FLOPs and the bytes that recompute frees."""
        freed = sum(each.bytes for each in self.tensors(layer) if set(modules) & set(each.recomputed_by))
        flops, share = self._forward_of(layer, set(modules)), self._share
        seconds = (flops.attention + flops.dense_mlp + flops.shared) * share / self.rates.dense
        seconds += flops.core_attention * share / self.rates.core_attention
        seconds += flops.experts * share / self.rates.experts
        return seconds + RECOMPUTE_PASSES * freed / self.rates.memory

    def _forward_of(self, layer: LayerConfig, modules: set[str]) -> FlopCount:
        """FLOPs to repeat the forward of modules in a layer, for one sequence."""
        length = self.plan.data.seq_length
        parameters = layer.parameters(UNSHARDED)
        repeated = (spec for spec in parameters if modules & set(spec.recomputed_by))
        core = layer.mixer.flops(length).core_attention // 3 if modules & {"core_attn"} else 0
        return gemm_flops(repeated, length, forward_only=True) + FlopCount(core_attention=core)
