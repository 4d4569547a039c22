"""How many ranks the experts of a token stand on, and how unevenly rows fall on ranks, when routing is even and random.

A token chooses K of E experts, every set of K alike (with group limits: first g of G groups, every set alike, then K of
their experts). Counts are then hypergeometric. Derivations are in docs/communication-volume.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, log, sqrt

from megatron_moe.config.moe import RouterConfig

_ROUNDING = 1e-12
"""A variance smaller than this times the mean's square is the rounding of its terms."""


@dataclass(frozen=True, kw_only=True)
class LoadSpread:
    """Mean and standard deviation."""

    mean: float
    std: float


@dataclass(frozen=True)
class LoadChoice:
    """K of E experts, from g of G groups of neighbours."""

    num_experts: int
    topk: int
    num_groups: int = 1
    group_topk: int = 1

    @classmethod
    def of(cls, router: RouterConfig) -> "LoadChoice":
        """What a router does when all experts are equally likely."""
        if not router.num_groups or not router.group_topk:
            return cls(router.num_experts, router.topk)
        return cls(router.num_experts, router.topk, router.num_groups, router.group_topk)

    def destinations(self, num_parts: int) -> LoadSpread:
        """Parts (ranks, nodes) on which a token has experts; each part holds E / num_parts neighbouring experts."""
        alike = self._alike(num_parts)
        hit = [1 - self._missed([part], num_parts) for part in range(1 if alike else num_parts)]
        hit *= num_parts // len(hit)
        mean, both = sum(hit), 0.0
        firsts = [0] if alike else range(num_parts)
        for first in firsts:
            for second in range(num_parts):
                if first != second:
                    both += hit[first] + hit[second] - 1 + self._missed([first, second], num_parts)
        both *= num_parts / len(firsts)
        variance = mean + both - mean * mean
        return LoadSpread(mean=mean, std=sqrt(variance) if variance > _ROUNDING * mean * mean else 0.0)

    def rows(self, num_parts: int, num_tokens: int) -> LoadSpread:
        """Rows that one part gets of `num_tokens` tokens that choose independently."""
        mean = self.topk / num_parts
        variance = max(0.0, self._mean_square(num_parts) - mean * mean)
        return LoadSpread(mean=num_tokens * mean, std=sqrt(num_tokens * variance))

    def _alike(self, num_parts: int) -> bool:
        """Do all parts meet the borders of groups in the same way?"""
        per_group, per_part = self.num_experts // self.num_groups, self.num_experts // num_parts
        return max(per_group, per_part) % min(per_group, per_part) == 0

    def _missed(self, parts: Sequence[int], num_parts: int) -> float:
        """Probability that a token has no expert on any of the parts."""
        return sum(weight * _none(self._open, held, self.topk) for held, weight in self._held(parts, num_parts))

    def _mean_square(self, num_parts: int) -> float:
        """Of a token's experts on one part."""
        total = 0.0
        for held, weight in self._held([0], num_parts):
            mean = self.topk * held / self._open
            variance = mean * (1 - held / self._open) * (self._open - self.topk) / max(1, self._open - 1)
            total += weight * (variance + mean * mean)
        return total

    @property
    def _open(self) -> int:
        """Experts among which a token chooses when its groups are chosen."""
        return self.num_experts // self.num_groups * self.group_topk

    def _held(self, parts: Sequence[int], num_parts: int) -> list[tuple[int, float]]:
        """(experts of the parts that are in the chosen groups, probability)."""
        per_group, per_part = self.num_experts // self.num_groups, self.num_experts // num_parts
        of_groups: dict[int, int] = {}
        for part in parts:
            for expert in range(part * per_part, (part + 1) * per_part):
                group = expert // per_group
                of_groups[group] = of_groups.get(group, 0) + 1
        # distribution over (groups chosen, experts held), one group after the other
        found = {(0, 0): 1}
        for experts in of_groups.values():
            following: dict[tuple[int, int], int] = {}
            for (chosen, held), ways in found.items():
                for take in (0, 1):
                    at = (chosen + take, held + take * experts)
                    following[at] = following.get(at, 0) + ways
            found = following
        others, all_ways = self.num_groups - len(of_groups), comb(self.num_groups, self.group_topk)
        spread: dict[int, float] = {}
        for (chosen, held), ways in found.items():
            if 0 <= self.group_topk - chosen <= others:
                weight = ways * comb(others, self.group_topk - chosen) / all_ways
                spread[held] = spread.get(held, 0.0) + weight
        return list(spread.items())


def _none(total: int, held: int, drawn: int) -> float:
    """Probability that none of `held` among `total` is among `drawn` drawn ones."""
    return comb(total - held, drawn) / comb(total, drawn)


def fullest(spread: LoadSpread, num_parts: int) -> float:
    """About how many rows the fullest of several parts gets: the mean and sqrt(2 ln n) standard deviations."""
    return spread.mean + spread.std * sqrt(2 * log(num_parts)) if num_parts > 1 else spread.mean
