"""Expert load metrics of the router of each layer, recorded on the device in every training step."""

import math
from dataclasses import dataclass

from torch import Tensor

from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ProcessGroup


def record_load(
    metrics: MetricAccumulator, layer: int, counts_E: Tensor, group: ProcessGroup, *, dropless: bool = False
) -> None:
    """Records load metrics of one microbatch, whose tokens are split over the ranks of `group`.

    `counts_E`: choices per expert on this rank, dropped ones included. `dropless`: True if choices are never dropped.
    moe/max_violation      largest load / mean load - 1 (arXiv 2408.15664), with load = number of choices of an expert
    moe/load_entropy       entropy of the experts' load shares, divided by log E: 1 if equal, 0 if one expert has all
    moe/dead_experts       number of experts without tokens
    moe/tokens_per_expert  number of tokens of each expert [E], summed over microbatches and ranks
    moe/dropped_tokens     0 if `dropless`; otherwise the caller records it with `record_drops`
    """
    metrics.collect("moe/load", layer, counts_E, _Loads(group, dropless))


@dataclass(frozen=True)
class _Loads:
    """Callback of `MetricAccumulator.collect` that computes load metrics of many layers and microbatches at once."""

    group: ProcessGroup
    dropless: bool

    def __call__(self, metrics: MetricAccumulator, numbers: dict[int, int], counts_nE: Tensor) -> None:
        # tp x cp: 8 * E bytes per layer and microbatch; no gradient flows through counts
        loads_nE = all_reduce_(counts_nE.clone(), self.group).double()
        shares_nE = loads_nE / loads_nE.sum(dim=1, keepdim=True).clamp(min=1)
        num_experts = counts_nE.shape[1]
        # the clamp makes 0 log 0 = 0
        entropy_n = -(shares_nE * shares_nE.clamp(min=1e-300).log()).sum(dim=1) / math.log(max(num_experts, 2))
        violation_n = (shares_nE.amax(dim=1) * num_experts - 1).clamp(min=0)
        dead_n = (loads_nE == 0).sum(dim=1)
        end = 0
        for layer, number in numbers.items():
            mine, end = slice(end, end + number), end + number
            count = loads_nE.new_full((), number)
            metrics.record("moe/max_violation", violation_n[mine].sum(), layer=layer, count=count)
            metrics.record("moe/load_entropy", entropy_n[mine].sum(), layer=layer, count=count)
            metrics.record("moe/dead_experts", dead_n[mine].sum(), layer=layer, count=count)
            tokens_E = counts_nE[mine].sum(dim=0)
            metrics.record("moe/tokens_per_expert", tokens_E, layer=layer, reduction="sum")
            if self.dropless:
                record_drops(metrics, layer, tokens_E.new_zeros(()), tokens_E.sum())


def record_drops(metrics: MetricAccumulator, layer: int, dropped: Tensor, total: Tensor) -> None:
    """Records moe/dropped_tokens: the fraction of dropped choices, or of unselected tokens with expert choice."""
    metrics.record("moe/dropped_tokens", dropped, layer=layer, count=total)
