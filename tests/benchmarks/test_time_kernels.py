"""The table of kernels: a row for every op that we wrote a kernel for, and cells that fail alone."""

import pytest
import torch

from benchmarks.harness import time_kernels
from benchmarks.harness.kernel_case import Case
from benchmarks.harness.kernel_cases import NOT_TIMED, cases
from megatron_moe.kernels import reference
from megatron_moe.kernels.kernel_set import OPS
from megatron_moe.kernels.ops import GroupedPart
from megatron_moe.kernels.registry import BACKENDS, discover

OURS = ("triton", "hopper")
"""Backends that are our own kernels; under the interpreter of these tests Triton's run too."""
SMALL = (
    "--tokens 64 --seq 32 --hidden 32 --ffn 24 --experts 4 --topk 2 --vocab 128 --heads 4 --groups 2 --head-dim 16 "
    "--weights 1000"
).split()
CPU, FP32 = torch.device("cpu"), torch.float32


@pytest.fixture(scope="module")
def small_cases() -> dict[str, Case]:
    return {case.name: case for case in cases(time_kernels.parse(SMALL), CPU, FP32)}


@pytest.fixture
def ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that moves 1 TB/s and computes 2 PFLOP/s."""
    monkeypatch.setattr(time_kernels, "measure_ceilings", lambda device, dtype: time_kernels.Ceilings(1.0, 2.0, 1.5))


def test_every_op_has_a_row_or_a_reason(small_cases: dict[str, Case]):
    timed = {case.op for case in small_cases.values()}
    assert timed | set(NOT_TIMED) == set(OPS)
    assert not timed & set(NOT_TIMED)


def test_no_op_with_a_kernel_of_our_own_is_left_out(small_cases: dict[str, Case]):
    ours = {op for backend in discover(BACKENDS) if backend.name in OURS for op in backend.provides}
    assert len(ours) > 20
    assert ours <= {case.op for case in small_cases.values()}


def test_every_row_says_what_it_must_move(small_cases: dict[str, Case]):
    assert [name for name, case in small_cases.items() if case.gigabytes <= 0] == []
    products = ("linear", "grouped", "gate", "attention")
    wrong = [name for name, case in small_cases.items() if (case.teraflop > 0) is not name.startswith(products)]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("rms_norm", 5 * 64 * 32 + 3 * 32),
        ("add_rms_norm", 8 * 64 * 32 + 3 * 32),
        # 4 heads, 2 keys and 2 values of 16; half of cos and of sin of 32 places, twice
        ("query_key_value (without norms)", 64 * 16 * (4 * (4 + 2) + 2 * 2) + 2 * 32 * 16),
        ("query_key_value (with norms)", 64 * 16 * (5 * (4 + 2) + 2 * 2) + 6 * 16 + 2 * 32 * 16),
        # 4 heads: keys of 16 and 8, values of 16, 8 shared
        ("latent_key_value", 64 * ((64 + 8 + 96) + (96 + 64) + (128 + 8))),
        ("grouped_weight_grad (parts: 1, stored in fp32)", 128 * (48 + 32) + 4 * 48 * 32),
        ("grouped_weight_grad (parts: 2, added to fp32)", 2 * 128 * (48 + 32) + 2 * 4 * 48 * 32),
    ],
)
def test_bytes_of_a_row(small_cases: dict[str, Case], name: str, elements: int):
    assert small_cases[name].gigabytes == pytest.approx(4 * elements / 1e9)


def test_pairs_of_attention(small_cases: dict[str, Case]):
    """Of 32 places each sees itself and those before it; two products forward, five backward."""
    assert small_cases["attention (causal)"].teraflop == pytest.approx(14 * 2 * 4 * 16 * (32 * 33 // 2) / 1e12)
    windowed = small_cases["attention (window of 1)"].teraflop
    assert windowed == pytest.approx(14 * 2 * 4 * 16 * 32 / 1e12)


def test_rows_of_experts_are_unequal_and_whole(small_cases: dict[str, Case]):
    seen = []

    class Kernels:
        def grouped_weight_grad(self, parts: list[GroupedPart], out: torch.Tensor, accumulate: bool) -> None:
            seen.extend(parts)

    small_cases["grouped_weight_grad (parts: 2, added to fp32)"].run(Kernels())
    ends = [part.offsets_e.tolist() for part in seen]
    assert len(ends) == 2 and ends[0] != ends[1]
    assert all(each == sorted(each) and each[-1] == 128 for each in ends)


@pytest.mark.slow
def test_all_rows_come_with_times(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ceilings: None,
    small_cases: dict[str, Case],
):
    """One run each: under the interpreter our kernels take long."""
    monkeypatch.setattr(time_kernels, "milliseconds", lambda work, device: time_kernels.host_milliseconds(work, int))
    assert time_kernels.main(SMALL) == 0
    head, _, columns, _, *rows = capsys.readouterr().out.splitlines()
    assert "a copy reaches 1 TB/s, a product 2000 TFLOP/s, and 1500 when it is repeated" in head
    names = [each.strip() for each in columns.strip("|").split("|")]
    assert len(rows) == len(small_cases)
    for row in rows:
        cells = dict(zip(names, (each.strip() for each in row.strip("|").split("|")), strict=True))
        assert float(cells["reference"]) > 0
        assert float(cells[cells["auto takes"]]) > 0
        assert cells["of the ceiling"].endswith("%")


def test_the_rows_of_some_ops_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ceilings: None
):
    monkeypatch.setattr(time_kernels, "milliseconds", lambda work, device: 1.0)
    assert time_kernels.main([*SMALL, "--ops", "rope", "query_key_value"]) == 0
    rows = capsys.readouterr().out.splitlines()[4:]
    assert [row.split("|")[1].strip() for row in rows] == [
        "rope",
        "query_key_value (with norms)",
        "query_key_value (without norms)",
    ]


def times_of(run, inputs=()) -> tuple[dict[str, float | str], time_kernels.Meter]:
    meter = time_kernels.Meter(CPU, FP32, 0.0)
    return meter.measure(Case("rms_norm", run, inputs, 1.0), "torch_native"), meter


@pytest.mark.parametrize(
    ("problem", "cell", "failed"),
    [(torch.OutOfMemoryError("no room"), "out of memory", False), (ValueError("broken"), "failed", True)],
)
def test_a_cell_fails_alone(capsys: pytest.CaptureFixture[str], problem: Exception, cell: str, failed: bool):
    def run(kernels):
        if kernels.rms_norm is reference.rms_norm:
            raise problem

    times, meter = times_of(run)
    assert times["reference"] == cell
    assert float(times["torch_native"]) > 0
    assert meter.failed is failed
    assert ("broken" in capsys.readouterr().err) is failed


def test_a_backend_takes_over_the_ops_of_a_row_and_no_other():
    case = Case("grouped_forward", lambda kernels: None, beside=("grouped_weight_grad", "linear_forward"))
    given = dict(time_kernels.bundles(case, "torch_native", CPU, FP32))["torch_native"]
    theirs = {choice.op for choice in given.choices if choice.backend == "torch_native"}
    assert theirs == {"grouped_forward", "grouped_weight_grad"}  # it has no linear_forward


def test_a_row_without_torch_compile_is_timed_with_what_auto_takes_alone():
    case = Case("attention", lambda kernels: None, compiled=None)
    assert [name for name, _ in time_kernels.bundles(case, "torch_native", CPU, FP32)] == ["reference", "torch_native"]
    assert "compiled" not in time_kernels.Meter(CPU, FP32, 9.0).measure(case, "torch_native")


def test_backward_counts():
    """Of all results, and of the gradients of all inputs."""
    gone_back = []
    x = torch.ones(3, requires_grad=True)
    x.register_hook(gone_back.append)
    times_of(lambda kernels, x: (2 * x, 3 * x), (x,))
    assert len(gone_back) >= 8
    assert gone_back[0].shape == x.shape


def test_the_longer_of_moving_and_computing_is_the_ceiling():
    ceilings = time_kernels.Ceilings(4.0, 0.8, 0.7)
    moves = Case("x", lambda k: None, gigabytes=4.0, teraflop=0.4)
    computes = Case("x", lambda k: None, gigabytes=1.0, teraflop=0.8)
    assert time_kernels.achieved(moves, 2.0, ceilings) == "2.00 TB/s | 50%"
    assert time_kernels.achieved(computes, 4.0, ceilings) == "200 TFLOP/s | 25%"
    assert time_kernels.achieved(moves, "failed", ceilings) == " | "


def test_compiling_stops_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch):
    compiled, resets = [], []
    monkeypatch.setattr(torch, "compile", lambda run, dynamic: compiled.append(run) or run)
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(len(compiled)))
    meter = time_kernels.Meter(CPU, FP32, 1e-9)
    case = Case("rms_norm", lambda kernels: None, (), 1.0)
    assert float(meter.measure(case, "torch_native")["compiled"]) > 0
    assert meter.measure(case, "torch_native")["compiled"] == "no time"
    assert len(compiled) == 1
    assert resets == [0]  # else torch.compile gives up after some rows, and times plain torch


def test_operands_are_not_quantised(small_cases: dict[str, Case]):
    """What is timed is what a bf16 run computes."""
    seen = []

    class Kernels:
        def grouped_forward(self, *given: torch.Tensor) -> None:
            seen.extend(given[:2])

    small_cases["grouped_forward"].run(Kernels())
    assert [tuple(each.shape) for each in seen] == [(128, 32), (4, 48, 32)]
