"""Automatic pipeline layout that balances the FLOPs of stages (`cost_model/stage_costs.py`) and ignores memory."""

from collections.abc import Sequence
from itertools import accumulate

from megatron_moe.config.pipeline_layout import LayoutError, PipelineLayout, place_layers
from megatron_moe.config.text import counted
from megatron_moe.cost_model.stage_costs import StageCosts


def auto_layout(costs: StageCosts, *, pp: int, vpp: int = 1, num_mtp: int = 0) -> PipelineLayout:
    """Layout with the smallest maximum stage cost and, among those, the smallest sum of squared stage costs.

    The `num_mtp` MTP layers are in one of the last two stages. Raises LayoutError if there are fewer than pp * vpp - 2
    layers.
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
