"""Tests of bench_offload: lower bound of the copy time that cannot be overlapped with computation."""

import pytest

from benchmarks.harness import bench_offload
from benchmarks.harness.bench_offload import Measured
from megatron_moe.config.exit_codes import ExitCode


def test_copies_extend_a_step_by_what_computation_does_not_hide() -> None:
    """A step of 300 ms has a forward of 100 ms and a backward of 200 ms; the link copies 2 and 1 bytes per ms."""
    plain = Measured(300.0, 8 << 20)
    assert bench_offload.limit_ms(Measured(0.0, 0, 200.0, 200.0), 300.0, (2.0, 1.0)) == pytest.approx(0.0)
    assert bench_offload.limit_ms(Measured(0.0, 0, 260.0, 210.0), 300.0, (2.0, 1.0)) == pytest.approx(30.0 + 10.0)
    text = bench_offload.report(Measured(345.0, 4 << 20, 260.0, 210.0), plain, (2.0, 1.0))
    assert text.startswith("345.00 ms (+15.0%), limit +40.00 ms (+13.3%)") and text.endswith("peak 4 MiB")


def test_without_a_gpu_it_ends_with_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_offload.main(["core_attn", "--", "--recipe", "q6"]) == ExitCode.ENVIRONMENT
    assert "torch finds no GPU here" in capsys.readouterr().err
