"""Automatic pipeline layout that balances the cost of stages.

Costs are the FLOPs of GEMMs, forward and backward, per sequence (`cost_model/flops.py`). The cost of the loss includes
the logits of every depth of multi-token prediction. The embedding costs nothing. Memory is not considered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron_moe.config.exit_codes import counted
from megatron_moe.config.model import ModelConfig
from megatron_moe.cost_model.flops import count_flops, count_layer_flops
from megatron_moe.pipeline.layout import LayoutError, PipelineLayout, StageLayout, place_layers


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Costs of each decoder layer and of the embedding, MTP layers and loss, in any unit."""

    layers: tuple[float, ...]
    embedding: float = 0.0
    mtp: float = 0.0
    """Cost of all MTP layers together."""
    loss: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.layers) + self.embedding + self.mtp + self.loss

    def of(self, stage: StageLayout) -> float:
        ends = self.embedding * stage.embedding + self.mtp * (stage.num_mtp > 0) + self.loss * stage.loss
        return ends + sum(self.layers[layer] for layer in stage.layers)


def flop_costs(model: ModelConfig, seq_length: int) -> StageCosts:
    """GEMM FLOPs of one sequence, forward and backward, for each layer, all MTP layers and the loss."""
    whole = count_flops(model, 1, seq_length)
    return StageCosts(
        layers=tuple(float(count_layer_flops(layer, seq_length).total) for layer in model.layers),
        mtp=float(whole.mtp),
        loss=float(whole.head),
    )


def auto_layout(costs: StageCosts, *, pp: int, vpp: int = 1, num_mtp: int = 0) -> PipelineLayout:
    """Layout with the smallest maximum stage cost and, among those, the smallest sum of squared stage costs.

    MTP layers are in one of the last two stages. Raises LayoutError if there are fewer than pp * vpp - 2 layers.
    """
    if len(costs.layers) < pp * vpp - 2:
        raise LayoutError(
            f"{counted(len(costs.layers), 'layer')} cannot fill {counted(pp, 'pipeline rank')} x "
            f"{counted(vpp, 'virtual stage')}: only embedding and loss may have a stage without a layer"
        )
    last = pp * vpp - 1
    mtp_stages = [last - 1, last] if num_mtp and pp > 2 else [last]
    found = [_balance(costs, last + 1, mtp_stage) for mtp_stage in mtp_stages]
    best = min(range(len(found)), key=lambda option: found[option][0])
    return place_layers(found[best][1], pp, num_mtp, mtp_stages[best])


def _balance(costs: StageCosts, num_stages: int, mtp_stage: int) -> tuple[tuple[float, float], list[int]]:
    """Finds the best placement with all MTP layers on `mtp_stage` and no decoder layers on later stages. Returns
    ((maximum stage cost, sum of squared stage costs), number of decoder layers per stage)."""
    ends = [0.0] * num_stages
    ends[0] += costs.embedding
    ends[mtp_stage] += costs.mtp
    ends[-1] += costs.loss
    below = [0.0, *accumulate(costs.layers)]
    maximum = max(_partition(below, ends[: mtp_stage + 1], None)[0], *ends)
    squares, counts = _partition(below, ends[: mtp_stage + 1], maximum)
    rest = ends[mtp_stage + 1 :]
    return (maximum, squares + sum(cost * cost for cost in rest)), counts + [0] * len(rest)


def _partition(below: Sequence[float], ends: Sequence[float], limit: float | None) -> tuple[float, list[int]]:
    """Partitions the layers into consecutive stages by dynamic programming; returns (minimum, layers per stage).

    Minimises the maximum stage cost or, if `limit` is given, the sum of squared stage costs with no cost above `limit`.
    `below[n]` is the cost of the first n layers, `ends[s]` the cost of stage s without its layers.
    """
    infinite = float("inf")
    value = [0.0] + [infinite] * (len(below) - 1)
    choices: list[list[int]] = []
    for fixed in ends:
        best, choice = [infinite] * len(below), [0] * len(below)
        for end in range(len(below)):
            for start in range(end, -1, -1):
                cost = fixed + below[end] - below[start]
                if cost > (best[end] if limit is None else limit):
                    break
                joined = max(value[start], cost) if limit is None else value[start] + cost * cost
                if joined < best[end]:
                    best[end], choice[end] = joined, end - start
        value = best
        choices.append(choice)
    counts, end = [], len(below) - 1
    for choice in reversed(choices):
        counts.append(choice[end])
        end -= choice[end]
    return value[-1], counts[::-1]


def cost_table(layout: PipelineLayout, costs: StageCosts) -> str:
    """Table of stages (rank, chunk, contents, share of the total cost) and a line about the most expensive rank."""
    lines = layout.table().splitlines()
    shares = [costs.of(stage) / costs.total for stage in layout.stages]
    width = max(map(len, lines))
    rows = [f"{lines[0]:<{width}}   cost"]
    rows += [f"{line:<{width}} {share:>6.1%}" for line, share in zip(lines[1:], shares, strict=True)]
    ranks = [sum(shares[rank :: layout.pp]) for rank in range(layout.pp)]
    most, ratio = ranks.index(max(ranks)), max(ranks) * layout.pp
    rows.append(f"rank {most} has the highest cost: {ratio:.3f} times the mean over {layout.pp} ranks")
    return "\n".join(rows)
