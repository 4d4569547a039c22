"""Parses the flags of `--fake-init-process-group`: which ranks to emulate, and which expert load to assume."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from arguments.dry_run.request import assumed_machine
from arguments.errors import FlagErrors, Problem
from arguments.parser import Settings
from megatron_moe.config.emulation import EmulationConfig
from megatron_moe.config.run import RunPlan

_OPTIONS = ("emulate_rank", "emulate_imbalance", "emulate_json", "emulate_plot")


@dataclass(frozen=True)
class Emulation:
    """Options of a memory emulation (`--fake-init-process-group`), and the environment in which it runs."""

    config: EmulationConfig
    environ: Mapping[str, str]
    """Environment variables of rank 0 of the emulated cluster."""


def parse_emulation(start: Settings, environ: Mapping[str, str]) -> Emulation | None:
    """Parses the emulation flags. Returns None if `--fake-init-process-group` is not given, or `--dry-run` is given.

    The world size is taken from the flags, otherwise from the launcher, otherwise from the recipe, otherwise it is 1.

    Raises FlagErrors.
    """
    values = {name: start.setting(name).value for name in ("fake_process_group", "dry_run", *_OPTIONS)}
    if not values["fake_process_group"]:
        given = [name for name in _OPTIONS if start.setting(name).value != start.registry.flags[name].default]
        if given:
            what = f"{start.registry.flags[given[0]].option} without --fake-init-process-group"
            raise FlagErrors.of(what, "add --fake-init-process-group")
        return None
    if values["dry_run"]:
        return None
    plot = _path(values["emulate_plot"])
    if plot is not None and plot.suffix != ".png":
        raise FlagErrors.of(f"--emulate-plot {plot} is not a PNG file", "end its name with .png")
    gpu, first = assumed_machine(start, environ)
    config = EmulationConfig(
        ranks=_ranks(str(values["emulate_rank"]), int(first["WORLD_SIZE"]), environ),
        emulate_imbalance=values["emulate_imbalance"],
        gpu=gpu.kind,
        gpu_memory=gpu.memory_gib if gpu.is_custom else None,
        emulate_json=_path(values["emulate_json"]),
        emulate_plot=plot,
    )
    return Emulation(config, first)


def _ranks(request: str, world_size: int, environ: Mapping[str, str]) -> tuple[int, ...]:
    if request == "all":
        return ()
    number = environ.get("RANK", "0") if request == "own" else request
    if not number.isdecimal() or int(number) >= world_size:
        what = f"--emulate-rank {number} is not a rank of a world of {world_size}"
        raise FlagErrors.of(what, f"give 0 to {world_size - 1}, or all, or another --world-size")
    return (int(number),)


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def with_emulation(plan: RunPlan, emulated: Emulation) -> RunPlan:
    """Returns the plan with the emulation added. Raises FlagErrors if the requested expert load cannot be emulated."""
    imbalance = emulated.config.emulate_imbalance
    problems = [
        Problem(what=what, remedy=remedy)
        for config in dict.fromkeys(layer.feed_forward for layer in plan.model.layers)
        for what, remedy in config.assumed_load_problems(plan.parallel, imbalance)
    ]
    if problems:
        raise FlagErrors(problems)
    return replace(plan, emulation=emulated.config)
