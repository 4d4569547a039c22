"""Seconds that one microbatch takes in the layers of one rank, forward and backward, by kind of work."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from megatron_moe.config.attention import MLAConfig
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.activations import (
    ActivationSizes,
    SavedTensor,
    layer_tensors,
    num_bytes,
)
from megatron_moe.cost_model.flops import FlopCount, count_layer_flops
from megatron_moe.cost_model.shards import held_by_layer
from megatron_moe.pipeline.layout import StageLayout
from megatron_moe.planner.rates import (
    LOGIT_PASSES,
    LOW_PASSES,
    PASSES,
    PASSES_AGAIN,
    Rates,
)

_FORWARD = 1 / 3
"""Of a layer's operations."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds."""

    dense: float = 0.0
    """Matrices outside the experts, head included."""
    core_attention: float = 0.0
    experts: float = 0.0
    bandwidth: float = 0.0
    """Kernels that do little more than move data."""
    again: float = 0.0
    """Computed a second time, in the backward."""

    def __add__(self, other: "Work") -> "Work":
        return Work(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def __mul__(self, times: float) -> "Work":
        return Work(**{each.name: getattr(self, each.name) * times for each in fields(self)})

    @property
    def total(self) -> float:
        return self.dense + self.core_attention + self.experts + self.bandwidth + self.again


class LayerWork:
    """Work of the layers of a plan."""

    def __init__(self, plan: RunPlan, rates: Rates) -> None:
        self.plan = plan
        self.rates = rates
        self.sizes = ActivationSizes.of(plan)
        self._share = plan.batch.micro / (plan.parallel.tp * plan.parallel.cp)
        """Of the operations of one sequence: those of a rank for one microbatch."""
        self._plain: dict[LayerConfig, Work] = {}
        self._tensors: dict[LayerConfig, list[SavedTensor]] = {}
        self._again: dict[tuple[LayerConfig, tuple[str, ...]], float] = {}

    def of_stages(self) -> list[Work]:
        """One microbatch in every stage, with what its recompute adds."""
        model, known = self.plan.model, {}
        kinds = {layer: kind for kind, layer in enumerate(dict.fromkeys(model.layers))}
        of_index = [kinds[layer] for layer in model.layers]
        found = []
        for stage in self.plan.layout.stages:
            key = (tuple(of_index[index] for index in stage.layers), stage.num_mtp, stage.loss)
            if key not in known:
                known[key] = self.of_stage(stage)
            found.append(known[key])
        return found

    def of_stage(self, stage: StageLayout) -> Work:
        """One microbatch in one stage."""
        model, recompute = self.plan.model, self.plan.memory.recompute
        work = Work()
        first = recompute.num_layers if recompute.granularity == "full" and recompute.method == "block" else 0
        for (layer, early), count in Counter(self._places(stage, first)).items():
            work += (self.of_layer(layer) + Work(again=self.again(layer, early))) * count
        depths = model.mtp.num_layers if model.mtp and stage.num_mtp else 0
        if depths:
            layer = model.layers[-1]
            joined = 6 * 2 * model.hidden_size**2 * self.plan.data.seq_length * self._share / self.rates.dense
            work += (self.of_layer(layer) + Work(again=self.again(layer, True), dense=joined)) * depths
        return work + self._head() if stage.loss else work

    def of_layer(self, layer: LayerConfig) -> Work:
        """Without anything computed again."""
        if layer not in self._plain:
            self._plain[layer] = self._of_layer(layer)
        return self._plain[layer]

    def _of_layer(self, layer: LayerConfig) -> Work:
        rates, flops = self.rates, count_layer_flops(layer, self.plan.data.seq_length)
        tensors = self.tensors(layer)
        moved = PASSES * sum(each.bytes for each in tensors)
        if self.plan.precision.low:
            moved += LOW_PASSES * sum(each.bytes for each in tensors if each.low)
        return Work(
            dense=(flops.attention + flops.dense_mlp + flops.shared) * self._share / rates.dense,
            core_attention=flops.core_attention * self._share / rates.core_attention,
            experts=flops.experts * self._share / rates.experts + self._weights_of_experts(layer) / rates.memory,
            bandwidth=moved / rates.memory,
        )

    def _weights_of_experts(self, layer: LayerConfig) -> float:
        """Bytes: read forward and backward; the gradient read and written, once for several microbatches where it
        waits for them. A few rows per expert do not hide them."""
        plan, precision = self.plan, self.plan.precision
        weight = 1 if precision.low else num_bytes(precision.params)
        number = plan.batch.global_size // (plan.batch.micro * plan.parallel.dp)
        together = max(1, min(plan.memory.expert_wgrad_interval, number))
        gradient = 2 * num_bytes(precision.grads) / together
        return held_by_layer(layer, plan.parallel).expert * (2.0 * weight + gradient)

    def _head(self) -> Work:
        """Logits and loss, once per depth of multi-token prediction too; in the parameters' format."""
        plan, model = self.plan, self.plan.model
        times = 1 + (model.mtp.num_layers if model.mtp else 0)
        rank = self.sizes.inner * (model.vocab_size // plan.parallel.tp) * times
        return Work(
            dense=6 * model.hidden_size * rank / self.rates.head,
            bandwidth=LOGIT_PASSES * rank * self.sizes.activation / self.rates.memory,
        )

    def tensors(self, layer: LayerConfig) -> list[SavedTensor]:
        """What a layer keeps when nothing is recomputed."""
        if layer not in self._tensors:
            self._tensors[layer] = layer_tensors(layer, self.plan.parallel, self.sizes)
        return self._tensors[layer]

    def _places(self, stage: StageLayout, first: int) -> Iterator[tuple[LayerConfig, bool]]:
        """(layer, is it one of the `first` ones of the stage)."""
        for place, index in enumerate(stage.layers):
            yield self.plan.model.layers[index], place < first

    def again(self, layer: LayerConfig, early: bool) -> float:
        """Seconds to compute again what recompute made the forward forget; `early`: the layer is one of the first that
        "block" recomputes."""
        recompute = self.plan.memory.recompute
        if recompute.granularity == "none":
            return 0.0
        if recompute.granularity == "full":
            whole = recompute.method == "uniform" or early
            return _FORWARD * self.of_layer(layer).total if whole else 0.0
        if (layer, recompute.modules) not in self._again:
            self._again[layer, recompute.modules] = self._of_modules(layer, recompute.modules)
        return self._again[layer, recompute.modules]

    def _of_modules(self, layer: LayerConfig, modules: tuple[str, ...]) -> float:
        """Seconds to compute modules of a layer again: their matrices, and passes over what they had freed."""
        wanted = set(modules)
        freed = sum(each.bytes for each in self.tensors(layer) if wanted & set(each.recomputed_by))
        if "moe" in wanted and isinstance(layer.feed_forward, MoEConfig):
            wanted -= {"moe_act", "shared_experts"}
        flops, share = self._forward_of(layer, wanted), self._share
        seconds = (flops.attention + flops.dense_mlp + flops.shared) * share / self.rates.dense
        seconds += flops.core_attention * share / self.rates.core_attention
        seconds += flops.experts * share / self.rates.experts
        return seconds + PASSES_AGAIN * freed / self.rates.memory

    def _forward_of(self, layer: LayerConfig, modules: set[str]) -> FlopCount:
        """Operations of the matrices of modules, forward alone, of one sequence."""
        whole = count_layer_flops(layer, self.plan.data.seq_length)
        none = FlopCount()
        third = {each.name: getattr(whole, each.name) // 3 for each in fields(whole)}
        forward, moe = replace(none, **third), "moe" in modules
        return FlopCount(
            attention=self._up_projections(layer) if "mla_up_proj" in modules else 0,
            core_attention=forward.core_attention if "core_attn" in modules else 0,
            dense_mlp=forward.dense_mlp if "mlp" in modules else 0,
            experts=forward.experts if moe else 0,
            shared=forward.shared if moe or "shared_experts" in modules else 0,
        )

    def _up_projections(self, layer: LayerConfig) -> int:
        config, seq = layer.mixer, self.plan.data.seq_length
        if not isinstance(config, MLAConfig):
            return 0
        query = (config.q_lora_rank or 0) * config.num_heads * config.q_head_dim
        return 2 * seq * (query + config.kv_lora_rank * config.num_heads * (config.qk_head_dim + config.v_head_dim))
