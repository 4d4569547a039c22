"""Notes on GEMM sizes that are slow on GPUs, and their remedies."""

import pytest

from arguments.errors import Finished
from arguments.read import read_plan
from tests.helpers.command_lines import plan_of, vocab_size_of

TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
ROUTER = "--bf16 --moe-router-dtype fp32"
MLA = (
    "--multi-latent-attention --q-lora-rank 60 --kv-lora-rank 124 --qk-head-dim 36 --qk-pos-emb-head-dim 20 "
    "--v-head-dim 44 --no-group-query-attention"
)
UNPADDED = "--vocab-size 1001 --make-vocab-size-divisible-by 1"


def slow_notes(more: str, without: str = "", environ: dict[str, str] | None = None) -> list[str]:
    return [note for note in plan_of(f"{ROUTER} {more}", without, environ).notes if "fast GPU kernels" in note]


@pytest.mark.parametrize(
    ("more", "rows", "remedy"),
    [
        (UNPADDED, "1,001", "--make-vocab-size-divisible-by 128 avoids this"),
        ("--vocab-size 1001 --disable-pad-vocab-size", "1,001", "128, without --disable-pad-vocab-size, avoids this"),
        ("--padded-vocab-size 1028", "1,028", "--padded-vocab-size 1152 avoids this"),
    ],
)
def test_an_unaligned_output_head_is_reported_with_a_remedy(more, rows, remedy):
    (note,) = slow_notes(more)
    assert note.startswith(f"the output head has {rows} rows per rank, not a multiple of 8") and note.endswith(remedy)
    assert "755 ms instead of 361" in note


def test_the_remedy_removes_the_note():
    assert slow_notes("--vocab-size 1001 --make-vocab-size-divisible-by 128") == []
    assert slow_notes("--padded-vocab-size 1152") == []


def test_rows_are_counted_per_tensor_parallel_rank():
    over = "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 4 --vocab-size 1000"
    assert slow_notes("--make-vocab-size-divisible-by 4 --vocab-size 1000") == []
    (note,) = slow_notes(over, environ=TWO_RANKS)
    assert note.startswith("the output head has 500 rows per rank")


@pytest.mark.parametrize(("more", "count"), [("", 0), ("--bf16", 2), ("--bf16 --device cpu", 0), ("--fp64", 0)])
def test_only_half_precision_on_gpus_is_reported(more, count):
    notes = plan_of(f"{UNPADDED} --moe-ffn-hidden-size 132 {more}").notes
    assert len([note for note in notes if "fast GPU kernels" in note]) == count


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--hidden-size 260 --kv-channels 64", "--hidden-size 260;"),
        ("--ffn-hidden-size 508 --moe-ffn-hidden-size 132", "--ffn-hidden-size 508, --moe-ffn-hidden-size 132;"),
        ("--kv-channels 60", "--kv-channels 60;"),
        ("--moe-shared-expert-intermediate-size 100", "--moe-shared-expert-intermediate-size 100;"),
        ("--moe-latent-size 68", "--moe-latent-size 68;"),
        (MLA, "--q-lora-rank 60, --kv-lora-rank 124, --qk-head-dim 36, --qk-pos-emb-head-dim 20, --v-head-dim 44;"),
    ],
)
def test_other_sizes_share_one_note(more, named):
    (note,) = slow_notes(more)
    assert note.startswith(f"sizes that are not multiples of 8: {named}")


def test_expert_widths_are_counted_per_expert_tensor_parallel_rank():
    over = "--tensor-model-parallel-size 2 --sequence-parallel --moe-ffn-hidden-size 136 --ffn-hidden-size 520"
    (note,) = slow_notes(over, environ=TWO_RANKS)
    assert note.startswith(
        "sizes that are not multiples of 8 per rank: --ffn-hidden-size 520 (260 on each of 2 ranks), "
        "--moe-ffn-hidden-size 136 (68 on each of 2 ranks);"
    )
    (note,) = slow_notes(f"{over} --expert-tensor-parallel-size 1", environ=TWO_RANKS)
    assert "--moe-ffn" not in note


def test_a_dry_run_reports_it():
    with pytest.raises(Finished) as caught:
        read_plan(["--recipe", "q6", "--vocab-size", "151935", "--dry-run"], {}, vocab_size_of=vocab_size_of)
    assert "the output head has 151,935 rows per rank, not a multiple of 8" in " ".join(caught.value.text.split())


@pytest.mark.parametrize("recipe", ["q6", "m8", "ds4"])
def test_benchmarked_recipes_have_no_such_note(recipe):
    plan = read_plan(["--recipe", recipe], {}, vocab_size_of=lambda config: config.vocab_size or 0)
    assert not [note for note in plan.notes if "fast GPU kernels" in note]
