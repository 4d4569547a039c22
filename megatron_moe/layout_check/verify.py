"""Verifies a layout against one rank in double precision, on processes of this host."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from megatron_moe import build
from megatron_moe.config.model import with_experts
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.layout_check.fault_seeds import FaultSeed
from megatron_moe.layout_check.oracle import record_oracle
from megatron_moe.layout_check.processes import Ranks
from megatron_moe.layout_check.record import RankRecord
from megatron_moe.layout_check.samples import random_datasets
from megatron_moe.layout_check.table import Comparison, ComparisonRow, compare_runs
from megatron_moe.parallel.context import ParallelContext

_COLUMNS = ("quantity", "name", "grid", "compared", "worst error", "ratio", "remark")


def verify_layout(plan: RunPlan, *, num_steps: int, timeout: float, plant: FaultSeed | None = None) -> Comparison:
    """Trains `num_steps` steps on all ranks of the plan and on one rank, and compares their records.

    Args:
        plan: in double precision, with the launch of any of its ranks.
        timeout: seconds that the ranks may take.
        plant: fault seed for the ranks.

    Raises:
        RankFailure: a rank failed or timed out.
    """
    plan = _that_routes(plan)
    ranks = Ranks(plan, num_steps=num_steps, plant=plant)
    return compare_runs(_record_oracle(plan, num_steps), ranks.records(timeout))


def _that_routes(plan: RunPlan) -> RunPlan:
    """Removes forced logits of benchmarks, which would hide the router and differ between context-parallel ranks."""

    def routing(moe: MoEConfig) -> MoEConfig:
        return replace(moe, router=replace(moe.router, force_balancing=False, force_biased=None))

    return replace(plan, model=with_experts(plan.model, routing))


def _record_oracle(plan: RunPlan, num_steps: int) -> RankRecord:
    torch.set_num_threads(1)
    context = ParallelContext.single(seed=plan.loop.seed)
    kernels, datasets = build.build_kernels(plan, context), random_datasets(plan, num_steps=num_steps)
    return record_oracle(plan, context, kernels, datasets, num_steps=num_steps)


def summary(comparison: Comparison) -> str:
    """One line per kind of quantity with its largest error over layers and steps, then the verdict."""
    cells = [_COLUMNS, *(_cells(key, rows) for key, rows in _kinds(comparison.rows))]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_COLUMNS) - 1)]
    lines = ["  ".join([*map(str.ljust, line, widths), line[-1]]).rstrip() for line in cells]
    return "\n".join([*lines, "", *_diagnosis(comparison), comparison.verdict()])


def _diagnosis(comparison: Comparison) -> Iterator[str]:
    """Gradient errors of the first step come first, because all later differences follow from them."""
    wrong = [row for row in comparison.bad if row.what == "gradient"]
    if not wrong:
        return
    right = {_without_numbers(row.name) for row in comparison.rows if row.what == "gradient" and not row.bad}
    yield f"gradients of the first step are wrong in {len(wrong)} parameters, and so is all that follows from them:"
    for (_, name, _), rows in _kinds(wrong):
        some = " (in some layers)" if name in right else ""
        yield f"  {name}{some}  {rows[0].remark}".rstrip()


def _kinds(rows: Sequence[ComparisonRow]) -> Iterator[tuple[tuple[str, str, str], list[ComparisonRow]]]:
    kinds: dict[tuple[str, str, str], list[ComparisonRow]] = {}
    for row in rows:
        kinds.setdefault((row.what, _without_numbers(row.name), row.grid), []).append(row)
    yield from kinds.items()


def _without_numbers(name: str) -> str:
    """Name with layer indices replaced by `*`."""
    name = re.sub(r",? ?(step|layer) \d+", "", name)
    return re.sub(r"\.\d+\.", ".*.", name) or "all"


def _cells(key: tuple[str, str, str], rows: Sequence[ComparisonRow]) -> tuple[str, ...]:
    worst = max(rows, key=lambda row: (row.bad, row.error))
    ratio = "" if worst.ratio is None else f"{worst.ratio:.6g}"
    num_bad = sum(row.bad for row in rows)
    count = f"{len(rows)}" if not num_bad else f"{num_bad} of {len(rows)} WRONG"
    return (*key, count, f"{worst.error:.1e}", ratio, worst.remark)
