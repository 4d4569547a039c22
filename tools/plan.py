"""Searches layouts and memory options: `python tools/plan.py --recipe NAME [--gpu KIND] [--gpus N] [FLAGS]`

The flags specify the model: a recipe, `--config` or `--from-hf-config DIR`. Searches all layouts, microbatch sizes,
recompute and offload options that fit in GPU memory, and prints the ten fastest by the cost model with reasons.
`--write DIR` writes each as a recipe for `pretrain_moe.py --config`. `--fit` keeps the layout and selects the cheapest
memory options with which it fits. Needs neither torch nor a GPU; docs/planning.md explains the cost model.

Exit code 0: a plan fits; 7: none fits; 2: invalid flags.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from arguments import plan_search
from arguments.errors import FlagErrors
from arguments.parser import Settings
from arguments.read import flag_registry
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.cost_model.hardware import GIB, GPU, GPUS
from megatron_moe.planner.search import PlannedLayout
from tools._common import (
    add_cluster_options,
    positive,
    reports_errors,
    requested_cluster,
    run_main,
    tool_parser,
    writing,
)


@reports_errors
def main(argv: Sequence[str]) -> int:
    options, words = _parse(argv)
    return _fit(options, words) if options.fit else _search(options, words)


def _search(options: argparse.Namespace, words: Sequence[str]) -> ExitCode:
    settings, gpu, num_gpus = _inputs(options, words)
    planner = plan_search.planner_of(settings, gpu, options.imbalance)
    start = plan_search.to_search(settings, gpu, num_gpus)
    found = planner.best(start, options.best, partial(plan_search.legal, settings))
    if not found:
        print(f"no layout fits {num_gpus} {gpu.name} with any memory options; use more GPUs or shorter sequences")
        return ExitCode.MEMORY
    print(f"the fastest layouts on {num_gpus:,} {gpu.name} by the cost model (docs/planning.md)")
    for place, each in enumerate(found, 1):
        _print(place, each, gpu)
        if options.write:
            title = f"Plan {place} for {num_gpus} {gpu.name}: {plan_search.layout_text(each)}"
            ready = plan_search.settings_for(settings, each.plan)
            _write(options.write, f"plan-{place:02}", plan_search.recipe(ready, each, gpu, title))
    return ExitCode.OK


def _fit(options: argparse.Namespace, words: Sequence[str]) -> ExitCode:
    settings, gpu, num_gpus = _inputs(options, words)
    if problems := plan_search.forbidden(settings, num_gpus):
        raise FlagErrors(problems)
    planner = plan_search.planner_of(settings, gpu, options.imbalance)
    plan = plan_search.as_given(settings, gpu, num_gpus)
    now = planner.evaluate(plan)
    verdict = "fits" if planner.fits(now.memory) else "does not fit"
    print(f"current: {plan_search.layout_text(now)}\n  {verdict}: {now.memory.total / GIB:.1f} of {gpu.memory_gib} GiB")
    found = planner.fit_with_optimizer(plan)
    if found is None:
        print("no memory options suffice: use a smaller --micro-batch-size, more GPUs, or search without --fit")
        return ExitCode.MEMORY
    ready = plan_search.settings_for(settings, found.plan, layout=False)
    _print(1, found, gpu)
    title = f"The cheapest memory options on {num_gpus} {gpu.name}: {plan_search.layout_text(found)}"
    if options.write:
        _write(options.write, "fit", plan_search.recipe(ready, found, gpu, title))
    return ExitCode.OK


def _inputs(options: argparse.Namespace, words: Sequence[str]) -> tuple[Settings, GPU, int]:
    settings = plan_search.settings_of(words, flag_registry(words, {}))
    if problems := settings.problems or plan_search.unplannable(settings):
        raise FlagErrors(problems)
    cluster = requested_cluster(options, words, {})
    return settings, cluster.gpu, cluster.world_size


def _print(place: int, found: PlannedLayout, gpu: GPU) -> None:
    print(f"\n{place:>2}. {plan_search.layout_text(found)}")
    for line in plan_search.reasons(found, gpu):
        print(f"    {line}")


def _write(folder: Path, name: str, text: str) -> None:
    path = folder / f"{name}.yaml"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"    written: {path}")


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = tool_parser(__doc__, allow_abbrev=False)
    parser.add_argument("--gpu", type=str.lower, choices=sorted(GPUS), help="kind of GPU (the recipe's, or h100)")
    add_cluster_options(parser)
    parser.add_argument("--best", type=positive, default=10, help="number of layouts to print (10)")
    parser.add_argument("--imbalance", type=float, default=1.0, help="expert rows of the fullest rank / mean (1)")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write each as a recipe to this folder")
    parser.add_argument("--fit", action="store_true", help="keep the layout; select the cheapest memory options")
    options, words = parser.parse_known_args(argv)
    if not 1 <= options.imbalance < inf:
        parser.error(f"--imbalance {options.imbalance:g} must be at least 1 (1: evenly distributed rows)")
    return options, words


if __name__ == "__main__":
    run_main(main)
