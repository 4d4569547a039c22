"""Expert load under uniformly random routing: ranks to which a token is sent, and rows that a rank receives.

Each token selects K of E experts, and all sets of K experts are equally likely. With group limits, a token first
selects g of G groups, then K experts of these groups. docs/communication-volume.md derives the distributions.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, log, sqrt

from megatron_moe.config.moe import RouterConfig
from megatron_moe.config.parallel import ParallelConfig

_ROUNDING = 1e-12
"""A variance below this multiple of the squared mean is a rounding error."""


@dataclass(frozen=True, kw_only=True)
class LoadSpread:
    """Mean and standard deviation of a random count."""

    mean: float
    std: float


@dataclass(frozen=True)
class LoadChoice:
    """Random routing: a token selects `group_topk` of `num_groups` groups of experts, then `topk` of their experts."""

    num_experts: int
    topk: int
    num_groups: int = 1
    group_topk: int = 1

    @classmethod
    def of(cls, router: RouterConfig) -> "LoadChoice":
        """Random routing with the top-k and the numbers of experts and groups of `router`."""
        if not router.num_groups or not router.group_topk:
            return cls(router.num_experts, router.topk)
        return cls(router.num_experts, router.topk, router.num_groups, router.group_topk)

    def destinations(self, num_parts: int) -> LoadSpread:
        """Number of parts to which a token is sent. A part (rank or domain) has E / num_parts consecutive experts."""
        equal = self._parts_are_equal(num_parts)
        hit = [1 - self._missed([part], num_parts) for part in range(1 if equal else num_parts)]
        hit *= num_parts // len(hit)
        mean, both = sum(hit), 0.0
        firsts = [0] if equal else range(num_parts)
        for first in firsts:
            for second in range(num_parts):
                if first != second:
                    both += hit[first] + hit[second] - 1 + self._missed([first, second], num_parts)
        both *= num_parts / len(firsts)
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
        return sum(weight * _none(self._candidates, held, self.topk) for held, weight in self._held(parts, num_parts))

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
        """Pairs (n, probability that n of the experts on `parts` are in the groups that a token selects)."""
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
    """Mean number of copies of a token in the hierarchical exchange, of groups of etp x ep ranks on several hosts."""

    num_hosts: int
    ranks_per_host: int
    per_token: float
    """Number of hosts to which a token is sent; may include the token's own host."""
    forwarded: float
    """Number of ranks to which these hosts forward a token."""


Destinations = Callable[[LoadChoice, int], LoadSpread]
"""Function (random routing, total ranks or domains) -> number of ranks or domains to which a token is sent."""


def token_copies(
    router: RouterConfig, parallel: ParallelConfig, destinations: Destinations = LoadChoice.destinations
) -> TokenCopies:
    """Copies of a token between the hosts of `parallel`. If a group has different numbers of ranks on its hosts, every
    rank counts as a host (`parallel.grid.split_by_host`)."""
    choice, num_ranks = LoadChoice.of(router), parallel.ep * parallel.etp
    ranks_per_host = parallel.ranks_per_host or num_ranks
    if num_ranks % ranks_per_host:
        ranks_per_host = 1
    num_hosts = num_ranks // ranks_per_host
    if ranks_per_host % parallel.etp:  # parts of an expert are on different hosts
        per_token = destinations(choice, parallel.ep).mean * parallel.etp / ranks_per_host
    else:
        per_token = destinations(choice, num_hosts).mean
    return TokenCopies(
        num_hosts=num_hosts,
        ranks_per_host=ranks_per_host,
        per_token=per_token,
        forwarded=destinations(choice, parallel.ep).mean * parallel.etp,
    )


def _none(total: int, held: int, drawn: int) -> float:
    """Probability that `drawn` random items out of `total` include none of `held` particular items."""
    return comb(total - held, drawn) / comb(total, drawn)


def fullest(spread: LoadSpread, num_parts: int) -> float:
    """Approximate mean of the maximum of `num_parts` row counts: mean + sqrt(2 ln num_parts) standard deviations."""
    return spread.mean + spread.std * sqrt(2 * log(num_parts)) if num_parts > 1 else spread.mean
