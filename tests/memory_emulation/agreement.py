"""The closed form beside the emulation, recipe by recipe. `python -m tests.memory_emulation.agreement` prints the
table of
`benchmarks/2026-11-21-2-cores-agreement.md` for the recipes that are named, or for all that can be emulated."""

import sys
from dataclasses import dataclass, replace

import torch

from arguments import plan_search
from arguments.checks.run import broken_rules
from arguments.flags import Registry
from arguments.parser import Settings
from arguments.proxy.rewrite import Draft
from arguments.recipes import about, recipe_names
from megatron_moe.config.emulation import EmulationConfig
from megatron_moe.config.parallel import Launch
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GIB
from megatron_moe.cost_model.memory import RankBytes, RankMemory, heaviest
from megatron_moe.memory_emulation.rank import emulate_rank
from megatron_moe.parallel.grid import all_groups

STATE = ("weights", "gradients", "master weights", "moments")
FEATURES = frozenset(
    {
        "deepseek-v4-flash-gb200-128",
        "deepseek-v4-pro-gb300-256",
        "nemotron-3-nano-30b-a3b-h100-16",
        "qwen3-next-80b-a3b-h100-128",
    }
)
"""Recipes whose layers are not available."""


@dataclass(frozen=True)
class Compared:
    """The fullest rank of a plan, in bytes."""

    emulated: dict[str, int]
    """By category."""
    closed: RankBytes

    @property
    def peak(self) -> int:
        return sum(self.emulated.values())

    @property
    def ratio(self) -> float:
        """Emulated over closed form."""
        return self.peak / self.closed.total


def can_be_emulated() -> list[str]:
    """Recipes whose features exist, but for what other hardware or later versions bring."""
    return [name for name in recipe_names() if name not in FEATURES]


def without_hardware(recipe: str, registry: Registry) -> tuple[Settings, list[str]]:
    """The settings of a recipe without what only other hardware or later versions have, and the flags that this took
    back: libraries behind dispatchers, graphs, FP8, and the pages that fixed buffers need."""
    settings = plan_search.settings_of(["--recipe", recipe], registry)
    draft = Draft(settings, {})
    if draft.value("moe_token_dispatcher_type") == "flex":
        draft.put("moe_token_dispatcher_type", "alltoall", "no such library here")
    for name in ("cuda_graph_impl", "cuda_graph_modules", "moe_paged_stash"):
        draft.reset("only with other hardware", name)
    for name, flag in registry.flags.items():
        waits = draft.settings.known(name) and not flag.available(draft.value(name))
        if waits and (flag.group == "precision" or flag.declaration.harmless):
            draft.reset("not available", name)
    changed = [name for name, old in settings.values.items() if draft.settings.setting(name).value != old.value]
    return draft.settings, [registry.flags[name].option for name in changed]


def missing(settings: Settings, world_size: int) -> list[str]:
    """What the settings ask for and this program does not have or allow."""
    flags = settings.registry.flags
    found = [
        flag.option
        for name, flag in flags.items()
        if settings.known(name) and not flag.available(settings.setting(name).value)
    ]
    broken = broken_rules(settings, Launch(world_size=world_size, launcher="dry run"))
    return found + [problem.what for problem in broken]


def plan_of(recipe: str, registry: Registry) -> RunPlan:
    """What of a recipe can be emulated."""
    settings, _ = without_hardware(recipe, registry)
    world_size = about(recipe, registry).gpus
    assert not missing(settings, world_size), f"{recipe}: {missing(settings, world_size)}"
    return plan_search.as_given(settings, world_size)


def compare(plan: RunPlan) -> Compared:
    """Plays the rank that the closed form holds to be the fullest."""
    plan = replace(plan, emulation=EmulationConfig(), device="cpu")
    count = plan.batch.global_batch_size // (plan.batch.micro_batch_size * plan.parallel.dp)
    closed = heaviest(RankMemory(plan).all_ranks(count))
    rank = all_groups(plan.parallel)["pp"][0][closed.rank]
    return Compared(dict(emulate_rank(plan, rank, torch.device("meta")).timeline.peak().categories), closed)


def line(recipe: str, found: Compared, taken_back: list[str]) -> str:
    """One row of the table."""
    closed, emulated = found.closed, found.emulated
    at_work = found.peak - emulated["activations"] - sum(emulated[name] for name in STATE)
    cells = [
        recipe,
        str(closed.rank),
        *(f"{size / GIB:.2f}" for size in (found.peak, closed.total)),
        f"{found.ratio:.4f}",
        f"{emulated['activations'] / GIB:.2f} / {closed.kept / GIB:.2f}",
        f"{at_work / GIB:.2f} / {(closed.total - closed.state.total - closed.kept) / GIB:.2f}",
        " ".join(f"`{flag}`" for flag in taken_back),
    ]
    return f"| {' | '.join(cells)} |"


def main(names: list[str]) -> None:
    registry = Registry.declared()
    for name in names or can_be_emulated():
        print(line(name, compare(plan_of(name, registry)), without_hardware(name, registry)[1]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
