"""Expert load under uniformly random routing: ranks to which a token is sent, and rows that a rank receives.

Each token selects K of E experts, and all sets of K experts are equally likely. With group limits, a token first
selects g of G groups, then K experts of these groups. docs/communication-volume.md derives the distributions.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import comb, exp, lcm, log, sqrt
from statistics import NormalDist
from typing import Protocol

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.grid import split_by_host

_ROUNDING = 1e-12
"""Variances below this multiple of the squared mean are treated as rounding errors."""


@dataclass(frozen=True, kw_only=True)
class LoadSpread:
    """Mean and standard deviation of a random count."""

    mean: float
    std: float


class RoutingSizes(Protocol):
    """Fields common to `RouterConfig` and `TokenExchange` that determine the distribution of the expert load."""

    @property
    def num_experts(self) -> int: ...
    @property
    def topk(self) -> int: ...
    @property
    def num_groups(self) -> int | None: ...
    @property
    def group_topk(self) -> int | None: ...


@dataclass(frozen=True)
class RandomRouting:
    """Random routing: a token selects `group_topk` of `num_groups` groups of experts, then `topk` of their experts."""

    num_experts: int
    topk: int
    num_groups: int = 1
    group_topk: int = 1

    @classmethod
    def of(cls, router: RoutingSizes) -> "RandomRouting":
        """Creates random routing with the top-k, the number of experts and the groups of `router`."""
        if not router.num_groups or not router.group_topk:
            return cls(router.num_experts, router.topk)
        return cls(router.num_experts, router.topk, router.num_groups, router.group_topk)

    def destinations(self, num_parts: int) -> LoadSpread:
        """Number of parts to which a token is sent. A part (rank or domain) has E / num_parts consecutive experts."""
        pairs: Iterable[tuple[int, int, int]] = ((*pair, 1) for pair in permutations(range(num_parts), 2))
        if self._parts_are_equal(num_parts):
            # by symmetry, parts (0, 1) represent all pairs in one group, and parts (0, n - 1) all other pairs
            near = max(self.num_groups, num_parts) // self.num_groups - 1
            pairs = (0, 1, num_parts * near), (0, num_parts - 1, num_parts * (num_parts - 1 - near))
            hit = [1 - self._missed([0], num_parts)] * num_parts
        else:
            hit = [1 - self._missed([part], num_parts) for part in range(num_parts)]
        mean = sum(hit)
        both = sum(
            count * (hit[first] + hit[second] - 1 + self._missed([first, second], num_parts))
            for first, second, count in pairs
            if count
        )
        variance = mean + both - mean * mean
        return LoadSpread(mean=mean, std=sqrt(variance) if variance > _ROUNDING * mean * mean else 0.0)

    def rows(self, num_parts: int, num_tokens: int) -> LoadSpread:
        """Number of rows that one of `num_parts` ranks receives if `num_tokens` tokens select experts independently."""
        mean = self.topk / num_parts
        variance = max(0.0, self._mean_square(num_parts) - mean * mean)
        return LoadSpread(mean=num_tokens * mean, std=sqrt(num_tokens * variance))

    def _parts_are_equal(self, num_parts: int) -> bool:
        """True if each part (rank or domain) has whole groups, or each group has whole parts. Loads are then equal."""
        per_group, per_part = self.num_experts // self.num_groups, self.num_experts // num_parts
        return max(per_group, per_part) % min(per_group, per_part) == 0

    def _missed(self, parts: Sequence[int], num_parts: int) -> float:
        """Probability that a token selects no expert on any of the given parts (part indices)."""
        held_by_parts, all_choices = self._held(parts, num_parts), comb(self._candidates, self.topk)
        return sum(weight * (comb(self._candidates - held, self.topk) / all_choices) for held, weight in held_by_parts)

    def _mean_square(self, num_parts: int) -> float:
        """Expected value of n^2, where n is the number of experts that a token selects on part 0 (a rank or domain)."""
        total, candidates = 0.0, self._candidates
        for held, weight in self._held([0], num_parts):
            mean = self.topk * held / candidates
            variance = mean * (1 - held / candidates) * (candidates - self.topk) / max(1, candidates - 1)
            total += weight * (variance + mean * mean)
        return total

    @property
    def _candidates(self) -> int:
        """Number of experts in the selected groups."""
        return self.num_experts // self.num_groups * self.group_topk

    def _held(self, parts: Sequence[int], num_parts: int) -> list[tuple[int, float]]:
        """Distribution of the number of experts on `parts` that are in the groups that a token selects, as pairs (n,
        probability)."""
        per_group, per_part = self.num_experts // self.num_groups, self.num_experts // num_parts
        experts = (expert for part in parts for expert in range(part * per_part, (part + 1) * per_part))
        by_group = Counter(expert // per_group for expert in experts)
        # (selected groups, experts in them) -> number of subsets of these groups
        ways = Counter({(0, 0): 1})
        for size in by_group.values():
            ways += Counter({(selected + 1, held + size): count for (selected, held), count in ways.items()})
        num_rest, all_ways = self.num_groups - len(by_group), comb(self.num_groups, self.group_topk)
        distribution: dict[int, float] = defaultdict(float)
        for (selected, held), count in ways.items():
            if 0 <= self.group_topk - selected <= num_rest:
                distribution[held] += count * comb(num_rest, self.group_topk - selected) / all_ways
        return list(distribution.items())


@dataclass(frozen=True, kw_only=True)
class TokenCopies:
    """Mean number of copies of a token in the hierarchical exchange of an etp x ep group that spans several hosts."""

    num_hosts: int
    ranks_per_host: int
    per_token: float
    """Number of hosts to which a token is sent; may include the token's own host."""
    forwarded: float
    """Number of ranks to which these hosts forward a token."""


def token_copies(router: RoutingSizes, parallel: ParallelConfig, *, rank: int | None = None) -> TokenCopies:
    """Copies of a token between the hosts of the etp x ep group of `rank`; None selects the group with the most
    hosts."""
    choice, num_hosts = RandomRouting.of(router), _num_hosts(parallel, rank)
    ranks_per_host = parallel.ep * parallel.etp // num_hosts
    if ranks_per_host % parallel.etp:  # parts of an expert are on different hosts
        per_token = choice.destinations(parallel.ep).mean * parallel.etp / ranks_per_host
    else:
        per_token = choice.destinations(num_hosts).mean
    return TokenCopies(
        num_hosts=num_hosts,
        ranks_per_host=ranks_per_host,
        per_token=per_token,
        forwarded=choice.destinations(parallel.ep).mean * parallel.etp,
    )


def _num_hosts(parallel: ParallelConfig, rank: int | None) -> int:
    """Number of hosts into which the hierarchical exchange splits the group of `rank`, or the maximum over all groups.
    Groups consist of consecutive ranks, so their positions on the hosts repeat."""
    size, per_host = parallel.ep * parallel.etp, parallel.ranks_per_host or parallel.ep * parallel.etp
    starts = range(0, min(parallel.world_size, lcm(size, per_host)), size)
    if rank is not None:
        starts = range(rank // size * size, rank + 1, size)
    return max(len(split_by_host(range(start, start + size), per_host)) for start in starts)


def skewed_log_popularity(num_experts: int, topk: int, max_over_mean: float) -> tuple[float, ...]:
    """Logits of E experts, ascending, under which Gumbel top-K gives the busiest expert `max_over_mean` of the mean
    load: quantiles of a normal distribution, whose standard deviation is found by bisection.

    Each token selects an expert at most once, so `max_over_mean` must be below E / K.
    """
    assert 1 <= max_over_mean < num_experts / topk, (
        f"a maximum load of {max_over_mean} times the mean is impossible with top-{topk} of {num_experts} experts"
    )
    normal = NormalDist()
    quantiles = [normal.inv_cdf((expert + 0.5) / num_experts) for expert in range(num_experts)]
    low, high = 0.0, 1.0
    while _largest_share(quantiles, high, topk) < max_over_mean:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _largest_share(quantiles, middle, topk) < max_over_mean else (low, middle)
    return tuple(high * quantile for quantile in quantiles)


def _largest_share(quantiles: Sequence[float], std: float, topk: int) -> float:
    """Expected load of the most popular expert over the mean load under Gumbel top-K routing.

    Gumbel top-K samples K experts without replacement, with probabilities proportional to rate_e = exp(logit_e). Expert
    e is selected with probability 1 - exp(-t rate_e), approximately, where t solves sum_e(1 - exp(-t rate_e)) = K. The
    error is below 3 %.
    """
    rates, time = [exp(std * (quantile - quantiles[-1])) for quantile in quantiles], 0.0
    while True:
        missing = topk - sum(1 - exp(-time * rate) for rate in rates)
        if missing < 1e-9 * topk:  # Newton's method approaches t from below, because the sum is concave
            return (1 - exp(-time)) * len(rates) / topk
        time += missing / sum(rate * exp(-time * rate) for rate in rates)


def expected_maximum(spread: LoadSpread, num_parts: int) -> float:
    """Approximate mean of the maximum of `num_parts` row counts: mean + sqrt(2 ln num_parts) standard deviations."""
    return spread.mean + spread.std * sqrt(2 * log(num_parts)) if num_parts > 1 else spread.mean
