"""Shows a pipeline schedule: `python tools/show_schedule.py --pp 4 --vpp 2 --microbatches 8 [--draw chart.png]`.

Prints a chart, the bubble fraction, the peak of in-flight microbatches per rank, and whether the schedule deadlocks
with blocking sends. --layout adds the layers of every stage. `python tools/show_schedule.py --gpus 1024 -- --config
my.yaml` shows the schedule and stages of a run; stage times are proportional to floating-point operations.

Exit code 0: valid; 1: it deadlocks or is wrong; 2: no schedule exists for these sizes.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from arguments.launch import rank_0_of
from arguments.read import read_plan
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.pipeline import ScheduleConfig
from megatron_moe.config.pipeline_layout import LayoutError, parse_layout
from megatron_moe.cost_model.stage_costs import cost_table, flop_costs
from megatron_moe.pipeline.schedule import ScheduleError, build_schedule
from megatron_moe.pipeline.simulator import Durations, SimulationReport, simulate
from tools._common import (
    add_cluster_options,
    reports_errors,
    requested_cluster,
    run_main,
    split_at_dashes,
    tool_parser,
    writing,
)
from tools.schedule_drawing import draw_schedule, text_chart, text_legend

CHARTS = (".svg", ".png", ".pdf")
_OF_SIZES = ("pp", "vpp", "microbatches", "group_size", "layout")
_OF_RUNS = ("gpus", "nodes", "gpus_per_node")


def parse(argv: Sequence[str], *, has_run: bool) -> argparse.Namespace:
    """Parses the tool's own options. `has_run`: whether the flags of a run follow them, after `--`."""
    parser = tool_parser(__doc__)
    parser.add_argument("--pp", type=int, default=1, help="pipeline ranks")
    parser.add_argument("--vpp", type=int, default=1, help="virtual stages per rank")
    parser.add_argument("--microbatches", type=int, default=8, help="per step")
    parser.add_argument("--group-size", type=int, help="consecutive microbatches of a virtual stage (default: pp)")
    parser.add_argument("--overlap", action="store_true", help="overlap forwards with backwards, in pairs")
    parser.add_argument("--split-backward", action="store_true", help="separate input and weight gradients")
    parser.add_argument("--forward-only", action="store_true", help="evaluation")
    parser.add_argument("--forward-time", type=float, default=1.0, help="forward time of a microbatch on a rank")
    parser.add_argument("--backward-time", type=float, default=2.0, help="half for input, half for weight gradients")
    parser.add_argument("--transfer-time", type=float, default=0.0, help="time of one message")
    parser.add_argument("--queue", type=int, help="messages in flight per sender (default: unlimited; 0: blocking)")
    parser.add_argument("--layout", help="layers of the stages, such as 'Ett|(ttt|)*2tL'; defines --vpp")
    add_cluster_options(parser, "--ranks")
    parser.add_argument("--lists", action="store_true", help="print every rank's actions, including sends and receives")
    parser.add_argument("--draw", type=Path, action="append", default=[], metavar="FILE", help=" or ".join(CHARTS))
    columns = shutil.get_terminal_size((120, 40)).columns
    parser.add_argument("--width", type=int, default=columns, help="width of the text chart in columns")
    options = parser.parse_args(argv)
    for name in _OF_SIZES if has_run else _OF_RUNS:
        if getattr(options, name) != parser.get_default(name):
            needed = "with" if has_run else "without"
            parser.error(f"--{name.replace('_', '-')} has no effect {needed} the flags of a run after --; leave it out")
    times = (options.forward_time, options.backward_time)
    if not all(0 < time < inf for time in times) or not 0 <= options.transfer_time < inf:
        parser.error("--forward-time and --backward-time must be larger than 0, --transfer-time at least 0")
    if options.queue is not None and options.queue < 0:
        parser.error(f"--queue {options.queue} is less than 0")
    invalid = [str(path) for path in options.draw if path.suffix not in CHARTS]
    if invalid:
        parser.error(f"--draw {invalid[0]} does not end with {', '.join(CHARTS)}")
    return options


@dataclass(frozen=True)
class ShownSchedule:
    """Schedule sizes, and optional details of the stages."""

    config: ScheduleConfig
    table: str = ""
    """Text that lists the layers of every stage; empty if no layout is given."""
    stage_costs: tuple[float, ...] = ()


def of_sizes(options: argparse.Namespace) -> ShownSchedule:
    """Schedule of the sizes and layout in the tool's own options."""
    pp, vpp, table = options.pp, options.vpp, ""
    if options.layout is not None:
        layout = parse_layout(options.layout, pp=pp, num_layers=None, num_mtp=None)
        if vpp not in (1, layout.vpp):
            raise LayoutError(f"--vpp {vpp}, but --layout {options.layout} has {layout.vpp} per rank; leave --vpp out")
        vpp, table = layout.vpp, layout.table()
    sizes = ScheduleConfig(num_microbatches=options.microbatches, pp=pp, vpp=vpp, group_size=options.group_size)
    return ShownSchedule(sizes, table)


def of_run(options: argparse.Namespace, words: Sequence[str]) -> ShownSchedule:
    """Schedule of a training run, even if the run needs a feature or data that is still missing. Raises FlagErrors."""
    plan = read_plan(words, rank_0_of(requested_cluster(options, words, {}).world_size), waiting=True)
    config = plan.pipeline_schedule(plan.num_microbatches)
    if plan.unknown_layers:
        return ShownSchedule(config, f"layers of {' '.join(plan.unknown_layers)} cannot be built yet")
    costs = flop_costs(plan.model, plan.data.seq_length)
    stage_costs = tuple(map(costs.of_stage, plan.layout.stages))
    return ShownSchedule(config, f"{plan.layout}\n{cost_table(plan.layout, costs)}", stage_costs)


def name(config: ScheduleConfig) -> str:
    """Formats the kind and sizes of a schedule."""
    kind = "one stage" if config.pp == 1 else "1F1B" if config.vpp == 1 else "interleaved 1F1B"
    extras = ", overlapped" * config.overlap + ", backward split" * config.split_backward
    extras += ", forward only" * config.forward_only
    virtual = f", VPP {config.vpp} in groups of {config.group}" if config.vpp > 1 else ""
    return f"{kind}{extras}: PP {config.pp}{virtual}, {config.num_microbatches} microbatches"


def verdict(strict: SimulationReport, loose: SimulationReport) -> str:
    """Formats simulation results. Blocking sends were simulated for the report `strict`, buffered sends for `loose`."""
    lines = ["no deadlock with blocking sends; every microbatch once, in order"]
    if found := dict.fromkeys((*strict.problems, *loose.problems)):
        lines = ["WRONG:", *(f"  {problem}" for problem in found)]
    in_flight = " ".join(map(str, loose.in_flight))
    lines.append(f"bubble {loose.bubble:.1%} of time {loose.time:.4g}; peak in flight per rank: {in_flight}")
    return "\n".join(lines)


@reports_errors
def main(argv: Sequence[str]) -> int:
    own, words = split_at_dashes(argv)
    options = parse(own, has_run=bool(words))
    try:
        shown = of_run(options, words) if words else of_sizes(options)
        config = replace(
            shown.config,
            overlap=options.overlap or shown.config.overlap,
            split_backward=options.split_backward or shown.config.split_backward,
            forward_only=options.forward_only,
        )
        schedule = build_schedule(config)
    except (ScheduleError, LayoutError) as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIG
    durations = Durations(
        forward=options.forward_time,
        backward_input=options.backward_time / 2,
        backward_weight=options.backward_time / 2,
        transfer=options.transfer_time,
        stage_costs=shown.stage_costs,
    )
    strict = simulate(config.stages, schedule, durations=durations, depth=0)
    loose = simulate(config.stages, schedule, durations=durations, depth=options.queue)
    print(name(config))
    if shown.table:
        print("", shown.table, "", sep="\n")
    if options.lists:
        for rank, entries in enumerate(schedule):
            print(f"rank {rank}: {' '.join(map(str, entries))}")
    print("", text_chart(loose, config.vpp, options.width), "", text_legend(config.vpp), sep="\n")
    print(verdict(strict, loose))
    for path in options.draw:
        deadlock = "no deadlock" if not strict.problems else strict.problems[0]
        with writing(path):
            draw_schedule(loose, config.vpp, f"{name(config)}     bubble {loose.bubble:.1%}, {deadlock}", path)
        print(f"wrote {path}")
    return ExitCode.BUG if strict.problems or loose.problems else ExitCode.OK


if __name__ == "__main__":
    run_main(main)
