"""What the router is doing, per layer: recorded in every training step, on the device."""

import math

from torch import Tensor

from megatron_moe.logs.tally import Tally
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import Group


def record_load(tally: Tally, layer: int, counts_E: Tensor, group: Group) -> None:
    """Records how evenly one microbatch was spread. `counts_E`: tokens of this rank that asked for each expert, before
    any drop; the ranks of `group` share the microbatch.

    moe/max_violation      largest load / mean load - 1 (arXiv 2408.15664)
    moe/load_entropy       entropy of the shares of the load / log E: 1 even, 0 all on one expert
    moe/dead_experts       experts that no token asked for
    moe/tokens_per_expert  [E], summed over microbatches and ranks
    """
    tally.record("moe/tokens_per_expert", counts_E.double(), layer=layer, reduction="sum")
    num_experts = len(counts_E)
    # tp x cp: 8 * E bytes per layer and microbatch; no gradient flows through counts
    counts_E = all_reduce_(counts_E.clone(), group)
    loads_E = counts_E.double()
    total = loads_E.sum().clamp(min=1)
    shares_E = loads_E / total
    # 0 log 0 = 0
    entropy = -(shares_E * shares_E.clamp(min=1e-300).log()).sum() / math.log(max(num_experts, 2))
    tally.record("moe/max_violation", (shares_E.max() * num_experts - 1).clamp(min=0), layer=layer)
    tally.record("moe/load_entropy", entropy, layer=layer)
    tally.record("moe/dead_experts", (counts_E == 0).sum(), layer=layer)


def record_drops(tally: Tally, layer: int, dropped: Tensor, total: Tensor) -> None:
    """Records the part of the choices that went unserved (of the tokens, with expert choice) as moe/dropped_tokens."""
    tally.record("moe/dropped_tokens", dropped, layer=layer, count=total)


def record_bias(tally: Tally, layer: int, expert_bias_E: Tensor) -> None:
    """Records largest - smallest expert bias as moe/expert_bias_range."""
    tally.record("moe/expert_bias_range", expert_bias_E.max() - expert_bias_E.min(), layer=layer)
