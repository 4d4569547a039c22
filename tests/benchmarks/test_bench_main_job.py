"""Tests of bench_main_job: selection of variants, and the reference of the comparison."""

import shlex
from pathlib import Path

import pytest

from benchmarks.harness import bench_main_job
from benchmarks.harness.bench_main_job import Variant, VariantResult, chosen_variants, main
from megatron_moe.config.exit_codes import EnvironmentProblem, ExitCode


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the variants that ran. The loss of a variant starts at 2 and ends at its position in the list."""
    names: list[str] = []

    def run_variant(variant: Variant, iterations: int, folder: Path, more: list[str]) -> VariantResult:
        names.append(variant.name)
        return VariantResult(
            variant, shlex.join(["command", *more]), {1: 2.0, iterations: float(len(names))}, 1.0, 10.0
        )

    monkeypatch.setattr(bench_main_job, "run_variant", run_variant)
    monkeypatch.setattr(bench_main_job, "draw", lambda results, path: None)
    return names


def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_main_job.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_main_job.torch.cuda, "get_device_name", lambda: "NVIDIA H200")


def test_only_chosen_variants_run_and_the_first_is_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[str]
):
    with_gpu(monkeypatch)
    words = ["--iterations", "70", "--output-dir", str(tmp_path), "--variants", "GPU, bf16", "GPU, fp32"]
    words += ["--", "--lr", "1e-3"]
    assert main(words) == ExitCode.OK
    assert runs == ["GPU, fp32", "GPU, bf16"]
    (document,) = tmp_path.glob("*-h200-main-job.md")
    text = document.read_text()
    assert "| GPU, fp32 | 2.0000 | 1.0000 | 1.0000 | reference |  |  | 10.0 |" in text
    assert "| GPU, bf16 | 2.0000 | 2.0000 | 1.0000 | 0.0e+00 (at 1) | 0.0e+00 (at 1) | 1.0e+00 (at 70) | 10.0 |" in text
    assert "--iterations 70 --variants 'GPU, bf16' 'GPU, fp32' -- --lr 1e-3`" in text
    assert "command --lr 1e-3" in text
    assert "no GPU" not in text


def test_a_variant_for_a_gpu_is_refused_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(EnvironmentProblem, match="--variants 'GPU, bf16' needs a GPU"):
        chosen_variants(["CPU, fp32", "GPU, bf16"], False)
    monkeypatch.setattr(bench_main_job.torch.cuda, "is_available", lambda: False)
    assert main(["--output-dir", str(tmp_path), "--variants", "GPU, fp32"]) == ExitCode.ENVIRONMENT
    assert "torch sees none here" in capsys.readouterr().err
    assert runs == []
