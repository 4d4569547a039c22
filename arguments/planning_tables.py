"""Tables of docs/planning.md, which compare estimated with measured steps, and found with published layouts."""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

from arguments import plan_search, plan_settings
from arguments.flags import Registry
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GPUS
from megatron_moe.planner.search import PlannedLayout, Planner

SEARCHED = (
    ("deepseek-v3-h100-1024", "h100", 1024),
    ("deepseek-v3-gb200-256", "gb200", 256),
    ("qwen3-235b-a22b-h100-256", "h100", 256),
    ("qwen3-30b-a3b-h100-32", "h100", 32),
)
"""(recipe, GPU, number of GPUs) of the comparison with published layouts."""


def with_rows(document: str, rows: Iterable[str]) -> str:
    """Replaces the rows of a table in a document. The table is the one that contains the first cell of the new rows."""
    lines, new = document.splitlines(), list(rows)
    first = new[0].split("|")[1]
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"|{first}|"))
    end = next(number for number, line in enumerate(lines) if number > begin and not line.startswith("|"))
    return "\n".join([*lines[:begin], *new, *lines[end:]]) + "\n"


def measured_steps(measurements_path: Path) -> Iterator[tuple[RunPlan, float, float, str]]:
    """Yields (plan, measured ms, estimated ms, source) of steps on H200. `measurements_path`: file with lines of ms,
    number of GPUs, flags, and document of the measurement."""
    registry, gpu = Registry.declared(), GPUS["h200"]
    lines = measurements_path.read_text().splitlines()[1:]
    for measured, num_gpus, flags, source in (line.split("\t") for line in lines):
        settings = plan_search.settings_of(flags.split(), registry)
        assert not settings.problems, f"{flags}: {settings.problems}"
        plan = plan_settings.plan_as_given(settings, gpu, int(num_gpus))
        yield plan, float(measured), Planner(gpu).estimator(plan).step().total * 1e3, source


def estimate_accuracy_rows(measurements_path: Path) -> Iterator[str]:
    """Markdown rows with ratios of measured to estimated step times, one row per source, number format and number of
    GPUs."""
    groups: dict[str, list[float]] = {}
    for plan, measured, estimated, source in measured_steps(measurements_path):
        kind = "FP8" if plan.precision.low_precision else "bf16"
        name = f"[{kind}, {plan.parallel.world_size} H200](../benchmarks/{source})"
        groups.setdefault(name, []).append(measured / estimated)
    for name, ratios in groups.items():
        yield f"| {name} | {len(ratios)} | {min(ratios):.2f} | {median(ratios):.2f} | {max(ratios):.2f} |"


def searched_row(case: tuple[str, str, int]) -> str:
    """Row of the comparison with published layouts: estimated steps of the recipe and of the best layout found."""
    name, kind, num_gpus = case
    settings, gpu = plan_search.settings_of(["--recipe", name], Registry.declared()), GPUS[kind]
    planner = plan_settings.planner_of(settings, gpu)
    published = planner.evaluate(plan_settings.plan_as_given(settings, gpu, num_gpus))
    accepts = partial(plan_settings.breaks_no_rule, settings)
    best = planner.fastest_plans(plan_search.search_start_plan(settings, gpu, num_gpus), 10, accepts)[0]
    return search_row(name, published, best)


def search_row(name: str, published: PlannedLayout, best: PlannedLayout) -> str:
    times = f"{published.step.total * 1e3:,.0f} | {best.step.total * 1e3:,.0f}"
    return f"| `{name}` | {times} | {plan_settings.layout_text(best)} |"
