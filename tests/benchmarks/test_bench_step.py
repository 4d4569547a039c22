"""Tests of bench_step: flags of its cases, and remarks on failed or omitted cases."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arguments.read import read_plan
from benchmarks.harness import bench_step
from benchmarks.harness.bench_step import COLUMNS, CaseOutcome, outcomes, report, row
from benchmarks.harness.profile_step import Profile
from benchmarks.harness.step_cases import CASES, StepCase, words_of
from benchmarks.harness.timed_run import CommunicationTime, Reading, Share, TimedRun, graph_pool_bytes
from megatron_moe.config.exit_codes import ExitCode, MemoryProblem
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.moe.router_metrics import record_load
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads

BY_NAME = {case.name: case for case in CASES}
SHAPES = {
    "qn4": 151_936,
    "nn9": 131_072,
    "q6": 151936,
    "m8": 163840,
    "ds4": 129280,
    "x2": 32000,
    "m27": 163840,
    "q24": 151936,
}


def plan_of(case: StepCase) -> RunPlan:
    words = words_of(case, Path("my/corpus"), Path("my/tokenizer.model"), Path("my/traces"))
    size = str(case.num_gpus)
    ranks = {"RANK": "0", "WORLD_SIZE": size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": size}
    return read_plan(
        words,
        ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"} if case.num_gpus > 1 else {},
        vocab_size_of=lambda config: (config.tokenizer_type == "NullTokenizer" and config.vocab_size) or 8000,
    )


def result(ms: float, *, tflops: float = 400.0, kinds: tuple[Share, ...] = (), board: Reading | None = None) -> Profile:
    return Profile(
        step_ms=(ms + 1, ms, ms - 1), tflops=tflops, tokens_per_second=1.0, peak_mib=85129.4,
        losses=(12.5, 11.0, 10.25), loads=(1.5, 2.5), rows=(1.0, 1.5), kinds=kinds, kernels=(), board=board,
    )  # fmt: skip


def cells(line: str) -> list[str]:
    found = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    assert len(found) == len(COLUMNS)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_keeps_the_vocabulary_of_its_recipe(case):
    """The tokenizer of the benchmark has a smaller vocabulary, which would change the size of the output layer."""
    plan, is_long = plan_of(case), case.name.startswith("long-")
    assert plan.model.vocab_size == (8192 if is_long else SHAPES[case.model]) and plan.model.vocab_size % 128 == 0
    assert plan.parallel.world_size == case.num_gpus and plan.data.seq_length == (65_536 if is_long else 4096)
    assert (plan.parallel.cp == 2) == (is_long or "cp2" in case.name)
    assert case.balanced in BY_NAME or not case.unbalanced
    assert plan.loop.train_iters >= case.warmup + case.steps + case.traced


def test_a_row_contains_the_measured_values():
    board = Reading(watts=698.4, limit_watts=700.0, sm_mhz=1530.0)
    balanced = CaseOutcome(BY_NAME["q6"], (), 20.0, result(361.3, board=board))
    skewed = CaseOutcome(BY_NAME["q6-skewed"], (), 19.6, result(366.4, tflops=394.4))
    assert cells(row(balanced, [])) == [
        "Q6, micro batch 2", "3 + 10", "361.3 (360.3, 362.3)", "400.0", "400", "490", "", "85,129",
        "698 of 700", "1530", "", "", "", "12.500 to 10.250", "", "1.25, at most 1.50", "20",
    ]  # fmt: skip
    assert cells(row(skewed, [balanced]))[3:7] == ["394.4", "92%", "97%", "98.6%"]
    assert cells(row(skewed, [balanced]))[8:15] == ["", "", "", "", "", "12.500 to 10.250", "2.00, at most 2.50"]
    assert cells(row(skewed, []))[6] == "not measured"


def test_a_case_that_fails_or_exceeds_the_time_does_not_affect_others(capsys):
    clock = count(0.0, 10.0)
    cases = [(BY_NAME[name], ("--recipe", name)) for name in ("q6", "m8", "q6-learned", "ds4")]

    def measure(case: StepCase, words: Sequence[str]) -> Profile:
        if case.name == "q6":
            raise MemoryProblem("no room | at all\nhere")
        return result(500.0)

    budget = sum(case.seconds for case, _ in cases[:2]) + BY_NAME["ds4"].seconds + 30
    done = list(outcomes(cases, budget, measure, lambda: next(clock)))
    assert [each.result is not None for each in done] == [False, True, False, True]
    assert done[0].remark == "failed: MemoryProblem: no room | at all here"
    assert done[2].remark.startswith(f"left out: it takes about {cases[2][0].seconds:.0f} s, and ")
    assert "MemoryProblem" in capsys.readouterr().err
    text = report(done, "Machine", "command", {"m8": "m8.png"})
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert [cells(line)[0] for line in table] == ["case", *(case.title for case, _ in cases)]
    assert cells(table[1])[2].startswith("failed") and cells(table[3])[2].startswith("left out")
    assert "![m8](m8.png)" in text and "`--recipe q6-learned`" in text


def test_loads_are_of_the_steps_since_they_were_taken():
    metrics, context = MetricAccumulator(), ParallelContext.single()
    stand_in: Any = SimpleNamespace(trainer=SimpleNamespace(metrics=metrics), context=context)
    assert TimedRun.take_loads(stand_in) == ()
    for before, after in (([9, 1, 1, 1], [3, 1, 0, 0]), ([2, 2, 2, 2], [1, 1, 1, 1])):
        for layer, counts in enumerate((before, after)):
            record_load(metrics, layer, torch.tensor(counts), context.group("tp_cp"))
    assert TimedRun.take_loads(stand_in) == (2.0, 2.0)
    assert TimedRun.take_loads(stand_in) == ()


LAYOUTS = {
    "layout-ep2": (1, 1, 1, 1, 2), "layout-tp2": (2, 1, 1, 1, 2), "layout-tp2-overlap": (2, 1, 1, 1, 2),
    "layout-cp2": (1, 2, 1, 1, 2),
    "layout-pp2": (1, 1, 2, 1, 1), "layout-vpp2": (1, 1, 2, 2, 1), "m27x4-flex": (1, 1, 1, 1, 4),
    "m27x4-tp2-ep4": (2, 1, 1, 1, 4), "q24x4-cp2-ep4": (1, 2, 1, 1, 4), "m27x4-pp2-ep2": (1, 1, 2, 1, 2),
    "m27x4-vpp2-ep2": (1, 1, 2, 2, 2), "q24x4-vpp2-ep2": (1, 1, 2, 2, 2), "q24x4-pp4": (1, 1, 4, 1, 1),
    "m27x4-tp2-pp2": (2, 1, 2, 1, 2),
}  # fmt: skip
"""Maps the name of a case to its tp, cp, pp, vpp and ep."""


def test_cases_have_the_layouts_of_their_names():
    for name, sizes in LAYOUTS.items():
        parallel = plan_of(BY_NAME[name]).parallel
        assert (parallel.tp, parallel.cp, parallel.pp, parallel.virtual_stages, parallel.ep) == sizes, name
        assert bool(parallel.tp_comm_overlap) == name.endswith("-overlap")


def test_a_traced_row_has_kernels_idle_time_and_exposed_communication():
    shares = (Share("expert GEMM", 300.0, 20.0), Share("idle", 4.25, 0.0))
    kernels = (Share("a", 200.0, 1200.0), Share("b", 100.0, 34.0))
    traced = replace(result(310.0, kinds=shares), kernels=kernels, communication=CommunicationTime(7.0, 2.5))
    found = dict(zip(COLUMNS, cells(row(CaseOutcome(BY_NAME["layout-tp2"], (), 9.0, traced), [])), strict=True))
    assert (found["kernels"], found["idle ms"], found["exposed ms"]) == ("1,234", "4.2", "2.5")


def test_cases_over_two_gpus_differ_in_routing_only():
    plans = {case.name: plan_of(case) for case in CASES if case.num_gpus == 2 and case.name[:3] in ("m27", "q24")}
    router = {name: plan.model.layers[-1].feed_forward.router for name, plan in plans.items()}
    assert router["m27-skew4.4"] == replace(router["m27"], force_skew=4.4)
    assert plans["q24-replayed"].loop.moe_routing_replay_path == Path("my/traces/q24")
    assert plans["q24-moe-graphs"].cuda_graphs.cuda_graph_modules == ("attn", "moe")
    assert {plan.batch.global_batch_size for plan in plans.values()} == {32}


def test_rows_of_the_fullest_rank_include_those_beyond_the_bound():
    """Two ranks receive 30 and 10 rows, then 20 and 28, of which 4 exceed the bound."""
    config = ParallelConfig(world_size=2, ep=2)

    def taken(context: ParallelContext) -> tuple[float, ...]:
        comm = SimpleNamespace(etp_ep=context.group("ep"))
        model = SimpleNamespace(expert_comm=comm)
        stand_in: Any = SimpleNamespace(trainer=SimpleNamespace(model=model), _rows=[])
        seen = []
        for number, beyond in ((30, None), (20, 0)) if context.rank == 0 else ((10, None), (24, 4)):
            overflow = None if beyond is None else torch.tensor(beyond)
            rows: Any = SimpleNamespace(offsets_e=torch.tensor([3, number]), overflow=overflow)
            TimedRun._record_rows(stand_in, seen.append, rows)
        assert len(seen) == 2
        assert TimedRun.take_rows(stand_in) == pytest.approx((1.5, 28 / 24))
        return TimedRun.take_rows(stand_in)

    assert on_threads(config, taken) == [(), ()]


def test_graph_memory_is_the_part_of_the_pools_that_is_not_allocated(monkeypatch):
    def segment(pool: tuple[int, int], total: int, allocated: int) -> dict[str, object]:
        return {"segment_pool_id": pool, "total_size": total, "allocated_size": allocated}

    segments = [segment((0, 0), 100, 10), segment((0, 1), 70, 20), segment((0, 2), 5, 5)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    pipeline = SimpleNamespace(graph_instances=None)
    computed: Any = SimpleNamespace(trainer=SimpleNamespace(full_iteration=None, pipeline=pipeline))
    recorded: Any = SimpleNamespace(trainer=SimpleNamespace(full_iteration=object(), pipeline=pipeline))
    assert (graph_pool_bytes(computed), graph_pool_bytes(recorded)) == (0, 50)


def test_a_missing_gpu_is_reported(capsys):
    assert bench_step.main(["--cases", "q6"]) == ExitCode.ENVIRONMENT
    assert "torch finds no GPU here" in capsys.readouterr().err
