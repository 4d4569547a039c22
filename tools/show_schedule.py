"""Shows a pipeline schedule: `python tools/show_schedule.py --pp 4 --vpp 2 --microbatches 8 [--draw chart.png]`.

Prints a chart, the bubble fraction, the peak of in-flight microbatches per rank, and whether the schedule deadlocks
with blocking sends. --layout adds the layers of every stage. `python tools/show_schedule.py --gpus 1024 -- --config
my.yaml` shows the schedule and stages of a run, with stage times by their floating-point operations.

Exit code 0: valid; 1: it deadlocks or is wrong; 2: no schedule exists for these sizes.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # started as a script, from any folder

from arguments.errors import Finished  # noqa: E402
from arguments.read import read_plan  # noqa: E402
from megatron_moe.config.exit_codes import ExitCode, RunError  # noqa: E402
from megatron_moe.pipeline.auto_layout import cost_table, flop_costs  # noqa: E402
from megatron_moe.pipeline.layout import LayoutError, parse_layout  # noqa: E402
from megatron_moe.pipeline.schedule import ScheduleConfig, ScheduleError, build_schedule  # noqa: E402
from megatron_moe.pipeline.simulator import Durations, SimulationReport, simulate  # noqa: E402
from tools._common import add_cluster_options, requested_cluster, split_at_dashes, writing  # noqa: E402
from tools.schedule_drawing import draw, text_chart, text_legend  # noqa: E402

CHARTS = (".svg", ".png", ".pdf")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pp", type=int, default=1, help="pipeline ranks")
    parser.add_argument("--vpp", type=int, default=1, help="virtual stages per rank")
    parser.add_argument("--microbatches", type=int, default=8, help="per step")
    parser.add_argument("--group-size", type=int, help="consecutive microbatches of a virtual stage (default: pp)")
    parser.add_argument("--overlap", action="store_true", help="overlap forwards with backwards, in pairs")
    parser.add_argument("--split-backward", action="store_true", help="separate input and weight gradients")
    parser.add_argument("--forward-only", action="store_true", help="evaluation")
    parser.add_argument("--forward-time", type=float, default=1.0, help="time of one microbatch on a rank")
    parser.add_argument("--backward-time", type=float, default=2.0, help="half of it for inputs, half for weights")
    parser.add_argument("--transfer-time", type=float, default=0.0, help="time of one message")
    parser.add_argument("--queue", type=int, help="messages in flight per sender (default: unlimited; 0: blocking)")
    parser.add_argument("--layout", help="layers of the stages, such as 'Ett|(ttt|)*2tL'; defines --vpp")
    add_cluster_options(parser, "--ranks")
    parser.add_argument("--lists", action="store_true", help="print every rank's actions, including sends and receives")
    parser.add_argument(
        "--draw", type=Path, action="append", default=[], metavar="FILE", help="chart: .svg, .png, .pdf"
    )
    parser.add_argument(
        "--width", type=int, default=shutil.get_terminal_size((120, 40)).columns, help="columns of the text"
    )
    options = parser.parse_args(argv)
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
    """Schedule with optional details of its stages."""

    config: ScheduleConfig
    table: str = ""
    """Layers of every stage, if known."""
    stage_costs: tuple[float, ...] = ()


def of_sizes(options: argparse.Namespace) -> ShownSchedule:
    """Schedule of the given sizes and layout."""
    layout = None
    if options.layout is not None:
        layout = parse_layout(options.layout, pp=options.pp, num_layers=None, num_mtp=None)
    config = ScheduleConfig(
        num_microbatches=options.microbatches,
        pp=options.pp,
        vpp=layout.vpp if layout else options.vpp,
        group_size=options.group_size,
    )
    return ShownSchedule(config, layout.table() if layout else "")


def of_run(options: argparse.Namespace, words: Sequence[str]) -> ShownSchedule:
    """Schedule of a training run, even if it lacks a feature or data. Raises FlagErrors."""
    ranks = str(requested_cluster(options, words, {}).world_size)
    environ = {"RANK": "0", "WORLD_SIZE": ranks, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": ranks}
    plan = read_plan(words, environ, waiting=True)
    num_microbatches = plan.batch.global_batch_size // (plan.batch.micro_batch_size * plan.parallel.dp)
    if plan.unknown_layers:
        table = f"layers of {' '.join(plan.unknown_layers)} cannot be built yet"
        return ShownSchedule(plan.schedule(num_microbatches), table)
    costs = flop_costs(plan.model, plan.data.seq_length)
    return ShownSchedule(
        plan.schedule(num_microbatches),
        f"{plan.layout}\n{cost_table(plan.layout, costs)}",
        tuple(costs.of(stage) for stage in plan.layout.stages),
    )


def name(config: ScheduleConfig) -> str:
    """Kind and sizes of a schedule."""
    kind = "one stage" if config.pp == 1 else "1F1B" if config.vpp == 1 else "interleaved 1F1B"
    extras = (
        ", overlapped" * config.overlap
        + ", backward split" * config.split_backward
        + ", forward only" * config.forward_only
    )
    virtual = f", VPP {config.vpp} in groups of {config.group}" if config.vpp > 1 else ""
    return f"{kind}{extras}: PP {config.pp}{virtual}, {config.num_microbatches} microbatches"


def verdict(strict: SimulationReport, loose: SimulationReport) -> str:
    """Lines about correctness and cost."""
    right = "no deadlock with blocking sends; every microbatch once, in order"
    found = [*strict.problems, *(problem for problem in loose.problems if problem not in strict.problems)]
    lines = [right] if not found else ["WRONG:", *(f"  {problem}" for problem in found)]
    in_flight = " ".join(map(str, loose.in_flight))
    return "\n".join(
        [*lines, f"bubble {loose.bubble:.1%} of time {loose.time:.4g}; peak in flight per rank: {in_flight}"]
    )


def main(argv: Sequence[str]) -> int:
    own, words = split_at_dashes(argv)
    options = parse(own)
    try:
        shown = of_run(options, words) if words else of_sizes(options)
        config = replace(
            shown.config,
            overlap=options.overlap or shown.config.overlap,
            split_backward=options.split_backward or shown.config.split_backward,
            forward_only=options.forward_only,
        )
        schedule = build_schedule(config)
    except Finished as answer:
        print(answer.text)
        return int(answer.code)
    except (ScheduleError, LayoutError, RunError) as error:
        print(error, file=sys.stderr)
        return int(ExitCode.CONFIG)
    half = options.backward_time / 2
    durations = Durations(
        forward=options.forward_time,
        backward_input=half,
        backward_weight=half,
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
        try:
            with writing(path):
                draw(loose, config.vpp, f"{name(config)}     bubble {loose.bubble:.1%}, {deadlock}", path)
        except RunError as error:
            print(error, file=sys.stderr)
            return int(error.code)
        print(f"wrote {path}")
    return int(ExitCode.BUG if strict.problems or loose.problems else ExitCode.OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
