"""Tests of time_kernels: one row for every op with a kernel of this project, even if some measurements fail."""

from collections.abc import Sequence

import pytest
import torch

from benchmarks.harness import time_kernels
from benchmarks.harness.kernel_case import KernelCase
from benchmarks.harness.kernel_cases import EXCHANGE_OPS, NOT_TIMED, cases
from megatron_moe.kernels.kernel_set import LOW_PRECISION_OPS, OPS
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.registry import BACKENDS, discover_backends

OURS = ("triton", "hopper")
"""Backends with kernels of this project; in these tests the Triton kernels are interpreted."""
SMALL = (
    "--tokens 16 --seq 16 --hidden 32 --ffn 24 --experts 4 --topk 2 --vocab 64 --heads 2 --groups 1 --head-dim 16 "
    "--weights 100"
).split()
SLOW_OPS = ("attention", "hyper_connection_read", "linear_attention", "query_key_value", "sparse_attention")
"""Ops whose interpreted kernels take more than half of the time; their rows are measured nightly."""
CPU, FP32 = torch.device("cpu"), torch.float32


@pytest.fixture(scope="module")
def small_cases() -> dict[str, KernelCase]:
    return {case.name: case for case in cases(time_kernels.parse(SMALL), CPU, FP32)}


@pytest.fixture
def ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the measured ceilings by those of a device with 1 TB/s and 2 PFLOP/s."""
    monkeypatch.setattr(time_kernels, "measure_ceilings", lambda device, dtype: time_kernels.Ceilings(1.0, 2.0, 1.5))


def test_every_op_has_a_row_or_a_reason(small_cases: dict[str, KernelCase]):
    timed = {case.op for case in small_cases.values()}
    assert timed | set(NOT_TIMED) == set(OPS)
    assert not timed & set(NOT_TIMED)


def test_every_op_with_a_kernel_of_this_project_is_measured(small_cases: dict[str, KernelCase]):
    ours = {op for backend in discover_backends(BACKENDS) if backend.name in OURS for op in backend.provides}
    assert len(ours) > 20
    assert ours - set(EXCHANGE_OPS) - set(LOW_PRECISION_OPS) <= {case.op for case in small_cases.values()}


def test_every_row_has_its_memory_traffic(small_cases: dict[str, KernelCase]):
    assert [name for name, case in small_cases.items() if case.gigabytes <= 0] == []
    products = ("linear", "grouped", "router_logits", "attention", "sparse_attention", "syrk", "max_logits_")
    wrong = [name for name, case in small_cases.items() if (case.teraflop > 0) is not name.startswith(products)]
    assert wrong == []


@pytest.mark.parametrize(
    "ops",
    [[op for op in OPS if op not in SLOW_OPS], pytest.param(SLOW_OPS, marks=pytest.mark.slow)],
    ids=["most", "slow"],
)
def test_all_rows_come_with_times(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ceilings: None,
    small_cases: dict[str, KernelCase],
    ops: Sequence[str],
):
    """Every op runs once, because interpreted kernels are slow."""
    monkeypatch.setattr(time_kernels, "milliseconds", lambda work, device: time_kernels.host_milliseconds(work, int))
    assert time_kernels.main([*SMALL, "--ops", *ops]) == 0
    head, _, columns, _, *rows = capsys.readouterr().out.splitlines()
    assert "a copy reaches 1 TB/s, a product 2000 TFLOP/s, and 1500 when it is repeated" in head
    names = [each.strip() for each in columns.strip("|").split("|")]
    assert len(rows) == sum(case.op in ops for case in small_cases.values())
    for row in rows:
        cells = dict(zip(names, (each.strip() for each in row.strip("|").split("|")), strict=True))
        assert float(cells["reference"]) > 0
        assert float(cells[cells["auto takes"]]) > 0
        assert cells["of the ceiling"].endswith("%")


def times_of(run, inputs=()) -> tuple[dict[str, float | str], time_kernels.Meter]:
    meter = time_kernels.Meter(CPU, FP32, 0.0)
    return meter.measure(KernelCase("rms_norm", run, inputs, 1.0), "torch_native"), meter


@pytest.mark.parametrize(
    ("problem", "cell", "failed"),
    [(torch.OutOfMemoryError("no room"), "out of memory", False), (ValueError("broken"), "failed", True)],
)
def test_a_failing_measurement_does_not_affect_others(
    capsys: pytest.CaptureFixture[str], problem: Exception, cell: str, failed: bool
):
    def run(kernels):
        if kernels.rms_norm is reference.rms_norm:
            raise problem

    times, meter = times_of(run)
    assert times["reference"] == cell
    assert float(times["torch_native"]) > 0
    assert meter.failed is failed
    assert ("broken" in capsys.readouterr().err) is failed


def test_the_longer_of_moving_and_computing_is_the_ceiling():
    ceilings = time_kernels.Ceilings(4.0, 0.8, 0.7)
    moves = KernelCase("x", lambda k: None, gigabytes=4.0, teraflop=0.4)
    computes = KernelCase("x", lambda k: None, gigabytes=1.0, teraflop=0.8)
    assert time_kernels.achieved(moves, 2.0, ceilings) == "2.00 TB/s | 50%"
    assert time_kernels.achieved(computes, 4.0, ceilings) == "200 TFLOP/s | 25%"
    assert time_kernels.achieved(moves, "failed", ceilings) == " | "


def test_compiling_stops_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch):
    compiled, resets = [], []
    monkeypatch.setattr(torch, "compile", lambda run, dynamic: compiled.append(run) or run)
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(len(compiled)))
    meter = time_kernels.Meter(CPU, FP32, 1e-9)
    case = KernelCase("rms_norm", lambda kernels: None, (), 1.0)
    assert float(meter.measure(case, "torch_native")["compiled"]) > 0
    assert meter.measure(case, "torch_native")["compiled"] == "no time"
    assert len(compiled) == 1
    assert resets == [0]  # otherwise torch.compile falls back to eager after a few sizes
