"""Times the steps of recipes on one GPU, or on two or four under torchrun, and writes a table.

    python benchmarks/harness/bench_step.py [--cases q6 m8 ...] [--budget 600] [--output-dir benchmarks] [--
    --manual-gc ...]
    torchrun --nproc-per-node 2 benchmarks/harness/bench_step.py [--cases m27 layout-tp2 ...] [--trace-dir data/routing]
    torchrun --nproc-per-node 4 benchmarks/harness/bench_step.py [--cases m27x4-flex ...] [--trace-dir data/routing]

Rewrites `<date>-<machine>-step-table.md` after every case, so that an interrupted run keeps its results. Failed cases,
and cases that exceed the budget, have a remark in their row. Flags after `--` are added to every case. Weights are
initialised on the device. Cases with learned routing train on the corpus of `bash scripts/quickstart.sh`. Cases with
replayed routing read the folders m27 and q24 of `--trace-dir`, written by `--moe-routing-trace-path` in a run with the
same layers, experts, top-k, sequence length and micro batch. Without torchrun, a case for several GPUs is timed on its
rank 0 alone: communication takes no time, so the step time has only the computation and launch overhead of one rank.
"""

import argparse
import contextlib
import gc
import os
import shlex
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from benchmarks.harness.profile_step import Profile, draw, profile, store  # noqa: E402
from benchmarks.harness.step_cases import CASES, StepCase, words_of  # noqa: E402
from benchmarks.harness.timed_run import plan_to_run, require_gpu  # noqa: E402
from megatron_moe.config.exit_codes import ExitCode, RunError  # noqa: E402
from tools._common import split_at_dashes  # noqa: E402

FAILURES = (RunError, RuntimeError, AssertionError, OSError, TypeError, ValueError)
"""Exceptions that end a case but not the benchmark."""
COLUMNS = (
    "case", "steps", "ms per step (minimum, maximum)", "TFLOP/s", "target", "aim", "of balanced", "peak MiB",
    "W of limit", "SM MHz", "kernels", "idle ms", "exposed ms", "loss, first to last", "busiest expert", "fullest rank",
    "took s",
)  # fmt: skip


@dataclass(frozen=True)
class CaseOutcome:
    """Result of a case, or the reason why there is none."""

    case: StepCase
    words: Sequence[str]
    """Arguments of pretrain_moe.py."""
    seconds: float = 0.0
    result: Profile | None = None
    remark: str = ""
    """Reason for a missing result."""


def num_processes() -> int:
    """Number of processes that the launcher started, one per GPU."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def measured(case: StepCase, words: Sequence[str]) -> Profile:
    """Builds and times a case; redirects its output to stderr. In a single process, a case for several GPUs is timed
    on rank 0 alone."""
    num_absent = case.num_gpus - num_processes()
    with contextlib.redirect_stdout(sys.stderr):
        return profile(
            plan_to_run(words, num_absent),
            warmup=case.warmup,
            steps=case.steps,
            traced=case.traced,
            trace=None,
            quick=True,
            peers=num_absent == 0,
        )


def outcomes(
    cases: Sequence[tuple[StepCase, Sequence[str]]],
    budget: float,
    measure: Callable[[StepCase, Sequence[str]], Profile] = measured,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[CaseOutcome]:
    """Runs all cases in order. `budget`: total seconds for all cases."""
    begin = clock()
    for case, words in cases:
        start = clock()
        left = budget - (start - begin)
        if case.seconds > left:
            remark = f"left out: it takes about {case.seconds:.0f} s, and {left:.0f} s were left"
            yield CaseOutcome(case, words, remark=remark)
            continue
        result, remark = None, ""
        try:
            result = measure(case, words)
        except FAILURES as error:
            remark = "failed: " + " ".join(f"{type(error).__name__}: {error}".split())[:300]
            traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()
        yield CaseOutcome(case, words, clock() - start, result, remark)


def row(outcome: CaseOutcome, before: Sequence[CaseOutcome]) -> str:
    """Formats an outcome as a table row. `before`: earlier outcomes, which include the balanced case."""
    case, result = outcome.case, outcome.result
    if result is None:
        cells = (
            case.title,
            "",
            outcome.remark.replace("|", "\\|"),
            *[""] * (len(COLUMNS) - 4),
            f"{outcome.seconds:.0f}",
        )
        return f"| {' | '.join(cells)} |"
    times = sorted(result.step_ms)
    cells = (
        case.title,
        f"{case.warmup} + {case.steps}",
        f"{result.median_ms:.1f} ({times[0]:.1f}, {times[-1]:.1f})",
        f"{result.tflops:.1f}",
        case.target,
        case.aim,
        _of_balanced(outcome, before),
        f"{result.peak_mib:,.0f}",
        f"{result.board.watts:.0f} of {result.board.limit_watts:.0f}" if result.board else "",
        f"{result.board.sm_mhz:.0f}" if result.board else "",
        *_traced(result),
        f"{result.losses[0]:.3f} to {result.losses[-1]:.3f}",
        _spread(result.loads) if case.unbalanced else "",
        _spread(result.rows),
        f"{outcome.seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def _traced(result: Profile) -> tuple[str, str, str]:
    """Formats kernels per step, idle milliseconds, and milliseconds in which only communication kernels run."""
    if not result.kernels:
        return "", "", ""
    idle = sum(share.milliseconds for share in result.kinds if share.name == "idle")
    exposed = f"{result.communication.exposed:.1f}" if result.communication else ""
    return f"{sum(share.calls for share in result.kernels):,.0f}", f"{idle:.1f}", exposed


def _of_balanced(outcome: CaseOutcome, before: Sequence[CaseOutcome]) -> str:
    if not outcome.case.unbalanced:
        return ""
    figures = [each.result.tflops for each in before if each.case.name == outcome.case.balanced and each.result]
    return f"{outcome.result.tflops / figures[0]:.1%}" if figures and outcome.result else "not measured"


def _spread(ratios: Sequence[float]) -> str:
    return f"{sum(ratios) / len(ratios):.2f}, at most {max(ratios):.2f}" if ratios else ""


def report(done: Sequence[CaseOutcome], machine: str, command: str, pictures: Mapping[str, str]) -> str:
    """Formats the benchmark's Markdown document. `pictures` maps the name of a case to the file of its chart."""
    head = (
        f"{date.today()}, torch {torch.__version__}, `{command}`. bf16, sequence 4096, global batch 8 where a row does "
        "not say otherwise; weights drawn on the device. Steps: warm-up + timed; the median of the timed ones is "
        "reported. TFLOP/s by Megatron's formula. Peak: largest allocation after the warm-up plus memory of CUDA graph "
        "pools. W of limit and SM MHz: power draw, its limit and the SM clock, medians over the timed steps. Busiest "
        "expert: its load over the mean load, mean over the microbatches of the timed steps and over layers, and of "
        "the worst layer. Fullest rank: its expert rows over the mean of the ranks, mean and largest of all "
        "microbatches and layers; --moe-expert-rank-capacity-factor must be at least the largest. Kernels, idle and "
        "exposed: of a traced step, number of kernels, time without any, and time in which only communication runs."
    )
    lines = [f"# Steps on {machine}", "", *textwrap.wrap(head, 120, break_on_hyphens=False), ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [row(outcome, done[:place]) for place, outcome in enumerate(done)]
    lines += _breakdown([outcome for outcome in done if outcome.result and outcome.result.kinds])
    lines += [line for name, picture in pictures.items() for line in ("", f"![{name}]({picture})")]
    lines += [
        "",
        "Flags of the cases, which `python benchmarks/harness/profile_step.py --quick-init -- FLAGS` times alone:",
        "",
    ]
    lines += [f"- {outcome.case.title}: `{shlex.join(outcome.words)}`" for outcome in done]
    return "\n".join(lines) + "\n"


def _breakdown(traced: Sequence[CaseOutcome]) -> list[str]:
    """Markdown table of the kernel time per step by kernel kind and case; empty if no case was traced."""
    tables = {
        each.case.title: {share.name: share.milliseconds for share in each.result.kinds}
        for each in traced
        if each.result
    }
    kinds = dict.fromkeys(kind for table in tables.values() for kind in table)
    if not tables:
        return []
    lines = ["", "Milliseconds per step over all kernels of a kind, two steps traced:", ""]
    lines += [f"| kind | {' | '.join(tables)} |", "|---" * (len(tables) + 1) + "|"]
    for kind in sorted(kinds, key=lambda kind: kind == "idle"):
        cells = [f"{table[kind]:.1f}" if kind in table else "" for table in tables.values()]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES if case.num_gpus == num_processes()]
    possible = [case.name for case in CASES] if num_processes() == 1 else names
    parser.add_argument("--cases", nargs="+", metavar="NAME", choices=possible, default=names, help=", ".join(possible))
    parser.add_argument(
        "--budget",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="time limit of all cases together, in seconds",
    )
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks"))
    parser.add_argument("--kernels-dir", type=Path, help="folder for the kernel lists of traced cases")
    parser.add_argument("--data-path", type=Path, default=Path("data/quickstart/corpus_text_document"))
    parser.add_argument("--tokenizer-model", type=Path, default=Path("data/quickstart/tokenizer.model"))
    parser.add_argument("--trace-dir", type=Path, metavar="DIR", default=Path("data/routing"))
    return parser


def main(argv: list[str]) -> int:
    own, theirs = split_at_dashes(argv)
    options = parser().parse_args(own)
    try:
        require_gpu("the steps on a GPU are")
    except RunError as problem:
        print(problem, file=sys.stderr)
        return int(problem.code)
    machine = f"{num_processes()} {torch.cuda.get_device_name().replace('NVIDIA ', '')}"
    done = write(options, theirs, machine)
    return int(ExitCode.BUG if any(each.seconds and not each.result for each in done) else ExitCode.OK)


def _alone(case: StepCase) -> StepCase:
    """Returns the case, marked as timed on rank 0 alone if it is for several GPUs."""
    if case.num_gpus == num_processes():
        return case
    return replace(case, title=f"{case.title}, rank 0 without peers")


def command_of(options: argparse.Namespace, theirs: Sequence[str]) -> str:
    """Command line for the document, without folders of this machine."""
    every = len(options.cases) == len(parser().get_default("cases"))
    chosen = [] if every else ["--cases", *options.cases]
    start = ["python"] if num_processes() == 1 else ["torchrun", "--nproc-per-node", f"{num_processes()}"]
    return shlex.join([*start, "benchmarks/harness/bench_step.py", *chosen, *(["--", *theirs] if theirs else [])])


def write(options: argparse.Namespace, theirs: Sequence[str], machine: str) -> list[CaseOutcome]:
    """Runs the cases and writes the document after each; only the first of several ranks prints and writes."""
    if os.environ.get("RANK", "0") != "0":
        options.output_dir = Path(tempfile.mkdtemp())
        sys.stdout = sys.stderr
    options.output_dir.mkdir(parents=True, exist_ok=True)
    stem = f"{date.today()}-{machine.lower().replace(' ', '-')}-step-table"
    chosen = [_alone(case) for case in CASES if case.name in options.cases]
    words = [words_of(case, options.data_path, options.tokenizer_model, options.trace_dir, theirs) for case in chosen]
    done: list[CaseOutcome] = []
    pictures: dict[str, str] = {}
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for outcome in outcomes(list(zip(chosen, words, strict=True)), options.budget):
        print(row(outcome, done), flush=True)
        done.append(outcome)
        name, result = outcome.case.name, outcome.result
        if result and result.kinds:
            pictures[name] = f"{stem}-{name}.png"
            draw(result, options.output_dir / pictures[name])
            if options.kernels_dir:
                store(result, options.kernels_dir / name)
        (options.output_dir / f"{stem}.md").write_text(report(done, machine, command_of(options, theirs), pictures))
        if num_processes() > 1 and outcome.seconds and not result:
            break  # no `continue`: another rank may wait for this one until torchrun terminates it
    return done


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
