"""Tests of bench_offload: lower bound of the copy time that cannot be overlapped with computation."""

from typing import Any

import pytest

from benchmarks.harness import bench_offload
from benchmarks.harness.bench_offload import Measured
from megatron_moe.config.exit_codes import ExitCode

TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--num-experts 4 --micro-batch-size 1 --global-batch-size 2 --train-iters 20 --lr 1e-3 --mock-data --vocab-size 64 "
    "--tokenizer-type NullTokenizer --min-offloaded-tensor-size 1"
)


def test_copies_extend_a_step_by_what_computation_does_not_hide() -> None:
    """A step of 300 ms has a forward of 100 ms and a backward of 200 ms; the link copies 2 and 1 bytes per ms."""
    plain, link = Measured(300.0, 8 << 20), (2.0, 1.0)
    fits = bench_offload.limit_of(Measured(0.0, 0, 200.0, 200.0), 300.0, link)
    assert fits.exposed == pytest.approx(0.0) and fits.fraction == pytest.approx(1.0)
    assert str(fits).endswith("the host link is no limit")
    exceeds = bench_offload.limit_of(Measured(0.0, 0, 260.0, 210.0), 300.0, link)
    assert exceeds.exposed == pytest.approx(30.0 + 10.0) and exceeds.fraction == pytest.approx(100 / 130)
    text = bench_offload.report(Measured(345.0, 4 << 20, 260.0, 210.0), plain, link)
    assert text.startswith("345.00 ms (+15.0%), limit +40.00 ms (+13.3%), rest +5.00 ms") and "peak 4 MiB" in text
    assert text.endswith("the host link is the limit; --activation-offload-fraction 0.77 would fit")


def test_on_the_cpu_it_counts_the_copied_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of two microbatches offloads the attention of three of four layers; the last one's backward follows."""
    measured: list[Measured] = []
    measure = bench_offload.measure

    def record(*arguments: Any) -> Measured:
        measured.append(measure(*arguments))
        return measured[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_offload, "measure", record)
        words = ["core_attn", "--steps", "2", "--link-bytes", "1000", "--", *TINY.split(), "--device", "cpu"]
        assert bench_offload.main(words) == 0
    plain, offloaded = measured
    assert plain.to_host == 0 and offloaded.to_host == offloaded.to_device
    per_layer, rest = divmod(offloaded.to_host, 2 * 3)
    assert rest == 0 and per_layer >= 4 * 32 * 32 * 2, "at least q, k, v and the output of attention"
    assert "host link: " in capsys.readouterr().out


def test_without_a_gpu_it_ends_with_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_offload.main(["core_attn", "--", "--recipe", "q6"]) == ExitCode.ENVIRONMENT
    assert "torch finds no GPU here" in capsys.readouterr().err
