"""Searches layouts and memory options: `python tools/plan.py --recipe NAME [--gpu KIND] [--gpus N] [FLAGS]`

The flags specify the model: a recipe, `--config`, `--from-hf-config DIR` or `--load hf:DIR`. Searches all layouts,
microbatch sizes, recompute and offload options that fit in GPU memory, and prints the ten fastest by the cost model
with reasons. `--write DIR` writes each as a recipe for `pretrain_moe.py --config`. `--fit` keeps the layout and selects
the memory options with which it fits, or the number of GPUs that would be enough. Step times are estimates with a known
error; the length of the run (or `--tokens N`) gives days and GPU hours, `--gpu-hour-price P` the cost. `--gpu-memory`,
`--gpu-tflops`, `--gpu-bandwidth` and `--link-bandwidth` describe any other GPU. Needs neither torch nor a GPU;
docs/planning.md explains the cost model.

Exit code 0: a plan fits; 7: none fits; 2: invalid flags, or sizes that no layout divides.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from arguments import plan_search, plan_settings
from arguments.checks.run import RULES
from arguments.errors import FlagErrors
from arguments.parser import Settings
from arguments.read import flag_registry
from arguments.run_length import ERROR_SOURCE, RunLength
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.parallel import ProcessInfo
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GIB, GPU, GPUS
from megatron_moe.planner.search import PlannedLayout, Planner
from tools._common import (
    add_cluster_options,
    positive,
    reports_errors,
    requested_cluster,
    run_main,
    tool_parser,
    writing,
)

_MOST_DOUBLINGS = 10
"""Maximum number of doublings of the number of GPUs if no layout fits on the given number."""


@reports_errors
def main(argv: Sequence[str]) -> int:
    options, words = _parse(argv)
    return _fit(options, words) if options.fit else _search(options, words)


def _search(options: argparse.Namespace, words: Sequence[str]) -> ExitCode:
    settings, gpu, num_gpus, length = _inputs(options, words)
    planner = plan_settings.planner_of(settings, gpu, options.imbalance)
    accepts = partial(plan_settings.breaks_no_rule, settings)
    start = plan_search.search_start_plan(settings, gpu, num_gpus)
    found = planner.fastest_plans(start, options.best, accepts)
    if not found and not planner.has_layouts(start):
        sizes = f"{num_gpus:,} GPUs, the model and the global batch of {start.batch.global_batch_size:,} sequences"
        print(f"no layout divides {sizes}: change --gpus or --global-batch-size")
        return ExitCode.CONFIG
    if not found:
        print(f"no layout fits {num_gpus:,} {gpu.label} with any memory options")
        enough = _enough(planner, settings, num_gpus)
        print(f"{enough:,} {gpu.label} would be enough: --gpus {enough}" if enough else "use shorter sequences")
        return ExitCode.MEMORY
    print(f"the fastest layouts on {num_gpus:,} {gpu.label} by the cost model (docs/planning.md)")
    print(plan_search.heading_comments(found[0].plan, gpu))
    for place, each in enumerate(found, 1):
        title = f"Plan {place} for {num_gpus} {gpu.label}: {plan_settings.layout_text(each)}"
        ready = plan_settings.settings_for(settings, each.plan)
        _show(place, each, gpu, length)
        _write(options.write, f"plan-{place:02}", plan_search.recipe_text(ready, each, gpu, length, title))
    _print_footer(options, settings, length)
    return ExitCode.OK


def _enough(planner: Planner, settings: Settings, num_gpus: int) -> int | None:
    """Smallest number of GPUs, doubled from `num_gpus`, on which a layout fits; None if there is none."""
    accepts = partial(plan_settings.breaks_no_rule, settings)
    numbers = (num_gpus << doublings for doublings in range(1, _MOST_DOUBLINGS + 1))
    starts = ((number, plan_search.search_start_plan(settings, planner.gpu, number)) for number in numbers)
    return next((number for number, start in starts if planner.find_any_fitting(start, accepts)), None)


def _fit(options: argparse.Namespace, words: Sequence[str]) -> ExitCode:
    settings, gpu, num_gpus, length = _inputs(options, words)
    plan = _given(settings, gpu, num_gpus)
    planner = plan_settings.planner_of(settings, gpu, options.imbalance)
    now = planner.evaluate(plan)
    verdict = "fits" if planner.fits(now.memory) else "does not fit"
    print(plan_search.heading_comments(plan, gpu))
    print(f"current: {plan_settings.layout_text(now)}")
    print(f"  {verdict}: {now.memory.total / GIB:.1f} of {gpu.memory_gib} GiB")
    accepts = partial(plan_settings.breaks_no_rule, settings, layout=False)
    found = planner.ways_to_fit(plan, accepts)
    for place, each in enumerate(found, 1):
        ready = plan_settings.settings_for(settings, each.plan, layout=False)
        title = f"Memory options on {num_gpus} {gpu.label}: {plan_settings.layout_text(each)}"
        _show(place, each, gpu, length)
        name = "fit" if place == 1 else f"fit-{place}"
        _write(options.write, name, plan_search.recipe_text(ready, each, gpu, length, title))
    enough = planner.add_gpus_until_fit(plan, accepts)
    if enough and not planner.fits(now.memory):
        print(f"\nor {enough.plan.parallel.world_size:,} GPUs: {plan_settings.layout_text(enough)}")
    if not found:
        print("no memory options suffice: use more GPUs or shorter sequences, or search without --fit")
    _print_footer(options, settings, length)
    return ExitCode.OK if found else ExitCode.MEMORY


def _print_footer(options: argparse.Namespace, settings: Settings, length: RunLength) -> None:
    print(f"\nestimate ±: {ERROR_SOURCE}")
    if options.write is None:
        print("--write DIR writes these plans as files for pretrain_moe.py --config")
    elif plan_search.lacks_length(settings, length):
        print(
            f"the length of the run is not known: start a plan with pretrain_moe.py --config {options.write}/FILE "
            "--train-iters N, or give --tokens N here"
        )


def _given(settings: Settings, gpu: GPU, num_gpus: int) -> RunPlan:
    """Returns the plan with the layout of the flags. Raises FlagErrors if they break a rule."""
    launch = ProcessInfo(world_size=num_gpus, local_world_size=min(gpu.per_node, num_gpus))
    if problems := plan_settings.violations(settings, launch, RULES):
        raise FlagErrors(problems)
    return plan_settings.plan_as_given(settings, gpu, num_gpus)


def _inputs(options: argparse.Namespace, words: Sequence[str]) -> tuple[Settings, GPU, int, RunLength]:
    settings = plan_search.settings_of(words, flag_registry(words, {}))
    if problems := settings.problems or plan_search.unplannable(settings):
        raise FlagErrors(problems)
    for note in settings.notes:
        print(note)
    cluster = requested_cluster(options, words, {})
    return settings, cluster.gpu, cluster.world_size, RunLength.of(settings)


def _show(place: int, found: PlannedLayout, gpu: GPU, length: RunLength) -> None:
    print(f"\n{place:>2}. {plan_settings.layout_text(found)}")
    for line in plan_search.cost_comments(found, gpu, length):
        print(f"    {line}")


def _write(folder: Path | None, name: str, text: str) -> None:
    if folder is None:
        return
    path = folder / f"{name}.yaml"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"    written: {path}")


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = tool_parser(__doc__, allow_abbrev=False)
    parser.add_argument(
        "--gpu", type=str.lower, choices=sorted(GPUS), help="GPU type (default: that of the recipe, or h100)"
    )
    add_cluster_options(parser)
    parser.add_argument("--best", type=positive, default=10, help="number of layouts to print (10)")
    parser.add_argument(
        "--imbalance",
        type=float,
        default=1.0,
        help="expert rows of the most loaded rank, as a multiple of the mean (default: 1)",
    )
    parser.add_argument("--write", type=Path, metavar="DIR", help="write each layout as a recipe to this folder")
    parser.add_argument("--fit", action="store_true", help="keep the layout; select the cheapest memory options")
    options, words = parser.parse_known_args(argv)
    if not 1 <= options.imbalance < inf:
        parser.error(f"--imbalance {options.imbalance:g} must be at least 1 (1: evenly distributed rows)")
    return options, words


if __name__ == "__main__":
    run_main(main)
