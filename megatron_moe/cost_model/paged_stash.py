"""How many pages the rows of experts need that wait for the backward at the same time."""

from collections import Counter
from math import ceil

from megatron_moe.config.memory import PagedStashConfig
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.memory import RankMemory
from megatron_moe.cost_model.shards import share_of_layer


def pages_of_rank(plan: RunPlan, rank: int) -> dict[int, int]:
    """Pages of a pipeline rank by the width of their rows: for every tensor of rows that waits at the fullest moment of
    its schedule, room for the fair share times the factor, and one page that is not full."""
    assert plan.memory.stash is not None, "a plan without pages"
    memory = RankMemory(plan)
    number = plan.batch.global_size // (plan.batch.micro * plan.parallel.dp)
    chunks = [_of_layers(layers, memory, plan.memory.stash) for layers in memory.layers_of_chunks(rank)]
    most: Counter[int] = Counter()
    for in_flight, _ in memory.moments(rank, number):
        now: Counter[int] = Counter()
        for count, pages in zip(in_flight, chunks, strict=True):
            now += Counter({width: count * each for width, each in pages.items()})
        most |= now
    return dict(most)


def _of_layers(layers: list[LayerConfig], memory: RankMemory, config: PagedStashConfig) -> Counter[int]:
    """Of one microbatch."""
    plan, found = memory.plan, Counter[int]()
    for layer in layers:
        feed_forward = share_of_layer(layer, plan.parallel).feed_forward
        if not isinstance(feed_forward, MoEConfig):
            continue
        experts = feed_forward.experts
        fair = plan.parallel.etp * memory.sizes.residual * feed_forward.router.topk
        widths = [experts.hidden_size, experts.activation.fan * experts.ffn_hidden_size]
        recompute = plan.memory.recompute
        if not (recompute.granularity == "selective" and "moe_act" in recompute.modules):
            widths.append(experts.ffn_hidden_size)
        for width in widths:
            found[width] += ceil(config.factor * fair / config.page_size) + 1
    return found
