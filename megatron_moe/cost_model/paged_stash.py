"""Size of the paged stash for the schedule's peak of in-flight expert rows."""

from collections import Counter
from math import ceil

from megatron_moe.config.memory import PagedStashConfig
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.memory import RankMemory


def pages_of_rank(plan: RunPlan, rank: int) -> dict[int, int]:
    """Number of pages of a pipeline rank for each row width. Every in-flight tensor of expert rows gets its rows at an
    even load times `moe_paged_stash_buffer_size_factor_cuda`, and one partial page."""
    assert plan.memory.paged_stash is not None, "the plan has no paged stash"
    memory = RankMemory(plan)
    chunks = [_pages(layers, memory, plan.memory.paged_stash) for layers in memory.layers_of_chunks(rank)]
    peak: Counter[int] = Counter()
    for in_flight, _ in memory.moments(rank, plan.num_microbatches):
        now: Counter[int] = Counter()
        for count, pages in zip(in_flight, chunks, strict=True):
            now += Counter({width: count * each for width, each in pages.items()})
        peak |= now
    return dict(peak)


def _pages(layers: list[LayerConfig], memory: RankMemory, config: PagedStashConfig) -> Counter[int]:
    """Pages of one microbatch for each row width."""
    plan, found = memory.plan, Counter[int]()
    for layer in layers:
        feed_forward = layer.shard(plan.parallel).feed_forward
        if not isinstance(feed_forward, MoEConfig):
            continue
        experts = feed_forward.experts
        even = plan.parallel.etp * memory.sizes.residual * feed_forward.router.topk
        widths = [experts.hidden_size, experts.activation.fan * experts.ffn_hidden_size]
        recompute = plan.memory.recompute
        if not (recompute.recompute_granularity == "selective" and "moe_act" in recompute.recompute_modules):
            widths.append(experts.ffn_hidden_size)
        for width in widths:
            found[width] += (
                ceil(config.moe_paged_stash_buffer_size_factor_cuda * even / config.moe_paged_stash_page_size) + 1
            )
    return found
