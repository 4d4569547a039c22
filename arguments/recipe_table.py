"""Table of recipes for docs/recipes.md: model, layout, source, and unavailable features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from arguments.checks.run import broken_rules, unavailable_flags, unknown_layers
from arguments.errors import FlagErrors, Problem
from arguments.files import read_files
from arguments.flag import Flag
from arguments.flags import Registry
from arguments.parser import Settings, settle
from arguments.read import read_plan
from arguments.recipes import About, about, find_recipe, recipe_folders, recipe_names
from arguments.resolve import run_plan
from megatron_moe.config.parallel import Launch
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.parameters import ParamCount, count_parameters

_NOT_YET = " is not available yet"
_FORMATS: Mapping[str | None, str] = MappingProxyType(
    {None: "", "delayed": "FP8", "tensorwise": "FP8", "blockwise": "FP8 blockwise", "mxfp8": "MXFP8"}
)
_QUICKSTART_VOCABULARY = 4096
"""Vocabulary of the tokenizer that scripts/quickstart.sh trains; all other recipes give theirs."""
_HEAD = """\
# Recipes

Made by `python tools/docs_gen.py recipes` from `scripts/recipes/`. `--recipe NAME` reads one; the command line wins. A
recipe has the layout, the batch and the kernels that its source published. It trains on random documents until it is
told otherwise: `--no-mock-data --data-path ... --tokenizer-type ... --tokenizer-model ...`. `--proxy` makes any of them
small enough for the machine at hand, on the same paths.

Models are written once, in `scripts/recipes/parts/models/`, and mean the published weights: `tests/recipes/` compares
every field and both numbers of parameters (without multi-token prediction; active ones with embedding and head).

Sources: the [Model Zoo](https://github.com/yanring/Megatron-MoE-ModelZoo), its successor in Megatron-LM's `dev` branch,
and Megatron-Bridge. Published figures are theirs, measured with their programs; nothing here repeats them. "balanced"
means random logits, so that every expert gets its share (`--moe-router-force-load-balancing`). A recipe that waits
names the groups of `docs/flags.md` in which a flag of it is not available yet; `tests/goldens/recipes_waiting.txt` has
the flags. Those that train slower wait for what changes no number: they train with
`--moe-token-dispatcher-type alltoall --allow-ignored-flags`.
"""
_COLUMNS = (
    "recipe", "model", "parameters (active)", "GPUs", "TP x CP x PP (VPP), EP x ETP", "micro / global batch, length",
    "numbers", "source", "published", "status",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A recipe with its settings, plan and status."""

    name: str
    family: str
    """Folder of the recipe, or its own name."""
    about: About
    settings: Settings
    plan: RunPlan
    """Plan on the published number of ranks, including features that are not available."""
    problems: tuple[Problem, ...]
    """Rejected flags."""

    @property
    def waits_for(self) -> tuple[str, ...]:
        """Flags with values that are not available yet."""
        return tuple(dict.fromkeys(map(option_of, self.problems)))

    @property
    def unavailable(self) -> list[Flag | None]:
        """Declarations of the flags in `waits_for`; None for a flag that is only recognised."""
        found = [self.settings.registry.find(text.split()[0]) for text in self.waits_for]
        return [entry and entry[0] for entry in found]

    @property
    def waits_for_speed(self) -> bool:
        """Whether only a dispatcher and flags that do not affect results are unavailable."""
        return bool(self.waits_for) and all(
            flag and (flag.declaration.harmless or flag.name == "moe_token_dispatcher_type")
            for flag in self.unavailable
        )


def option_of(problem: Problem) -> str:
    """The unavailable flag with its value."""
    return problem.what.partition(_NOT_YET)[0]


def row_of(name: str, registry: Registry) -> Row:
    path = find_recipe(name)
    assert path, f"there is no recipe {name}"
    info = about(name, registry)
    settings = settle(registry, [file.flags for file in read_files(path, registry, {})])
    launch = Launch(world_size=info.gpus or 1)
    problems = (*settings.problems, *broken_rules(settings, launch), *unavailable_flags(settings, False))
    family = name if path.parent in recipe_folders() else path.parent.name
    return Row(name, family, info, settings, planned(settings, launch), problems)


def planned(settings: Settings, launch: Launch) -> RunPlan:
    """Plan of settings that break no rule, including features that are not available."""
    flags = settings.flags
    plan = run_plan(flags, launch, flags.vocab_size or _QUICKSTART_VOCABULARY)
    return replace(plan, unknown_layers=unknown_layers(settings))


def rows(registry: Registry) -> list[Row]:
    """All recipes, sorted by family."""
    return sorted((row_of(name, registry) for name in recipe_names()), key=lambda row: (row.family, row.name))


def document(table: Sequence[Row]) -> str:
    """docs/recipes.md."""
    lines = [_HEAD]
    for family in dict.fromkeys(row.family for row in table):
        of_family = [row for row in table if row.family == family]
        lines += [f"## {family}", "", f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]
        lines += [f"| {' | '.join(_cells(row))} |" for row in of_family]
        lines.append("")
        for corrections in dict.fromkeys(row.about.corrections for row in of_family if row.about.corrections):
            names = ", ".join(f"`{row.name}`" for row in of_family if row.about.corrections == corrections)
            lines += [f"Corrected in {names}: {corrections}", ""]
    return "\n".join(lines).rstrip() + "\n"


def waiting(table: Sequence[Row]) -> str:
    """The recipes that cannot train yet, and why, one a line."""
    return "".join(f"{row.name}: {', '.join(row.waits_for)}\n" for row in table if row.waits_for)


def without_proxy() -> str:
    """The recipes that not even `--proxy` can make train, and why, one a line."""
    found = {name: _refused_as_proxy(name) for name in recipe_names()}
    return "".join(f"{name}: {', '.join(flags)}\n" for name, flags in found.items() if flags)


def _refused_as_proxy(name: str) -> list[str]:
    try:
        read_plan(["--recipe", name, "--proxy"], {}, lambda config: config.vocab_size or _QUICKSTART_VOCABULARY)
    except FlagErrors as errors:
        broken = [problem.what for problem in errors.problems if not problem.waits]
        assert not broken, f"--proxy makes {name} break a rule: {broken}"
        return [option_of(problem) for problem in errors.problems]
    return []


def _cells(row: Row) -> tuple[str, ...]:
    plan, parallel, batch = row.plan, row.plan.parallel, row.plan.batch
    stages = f"{parallel.pp} ({parallel.virtual_stages})" if parallel.pp > 1 else "1"
    gpus = f"{row.about.gpus} {row.about.gpu.upper()}".strip() if row.about.gpu else "any"
    return (
        f"`{row.name}`",
        row.about.model,
        _parameters(row),
        gpus,
        f"{parallel.tp} x {parallel.cp} x {stages}, {parallel.ep} x {parallel.etp}",
        f"{batch.micro_batch_size} / {batch.global_batch_size}, {plan.data.seq_length}",
        _numbers(row),
        row.about.source or "ours",
        row.about.published or "-",
        _status(row),
    )


def _status(row: Row) -> str:
    if not row.waits_for:
        return "trains"
    groups = sorted({flag.group for flag in row.unavailable if flag})
    return f"{'trains slower' if row.waits_for_speed else 'waits'}: {', '.join(groups)}"


def _parameters(row: Row) -> str:
    if row.plan.unknown_layers:
        return "not counted"
    model = row.plan.model
    return f"{_size(count_parameters(model))} ({_size(count_parameters(model, active=True))})"


def _size(count: ParamCount) -> str:
    number = count.without_mtp.total
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _numbers(row: Row) -> str:
    """Formats, and whether experts are forced to be balanced."""
    low = _FORMATS[row.settings.setting("fp8_recipe").value if row.settings.setting("fp8_format").value else None]
    balanced = "balanced" if row.settings.setting("moe_router_force_load_balancing").value else ""
    return ", ".join(filter(None, (low or row.plan.precision.params, balanced)))
