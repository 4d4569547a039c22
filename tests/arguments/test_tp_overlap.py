"""--tp-comm-overlap: the GEMMs that its flags and its file select, error messages, and reasons why it has no effect."""

from pathlib import Path

import pytest

from arguments import tp_overlap
from arguments.flags import Registry
from arguments.plan_search import settings_of
from arguments.tp_overlap import read_overlap_file
from megatron_moe.config.run import RunPlan
from megatron_moe.config.tp_overlap import GEMMS, NO_EFFECT, OVERLAPPED
from tests.helpers.command_lines import plan_of, texts_of

DRY = "--attention-dropout 0 --hidden-dropout 0"
ON = "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --device cpu"
DYNAMIC = "--context-parallel-size 2 --dynamic-context-parallel --max-seqlen-per-dp-cp-rank 64"
FILE = Path(__file__).parents[1] / "data_files" / "tp_overlap.yaml"


def write(folder: Path, text: str | None) -> str:
    path = folder / "overlap.yaml"
    if text is not None:
        path.write_text(text)
    return str(path)


def overlap_plan(words: str, ranks: int = 2, ranks_per_host: int = 2) -> RunPlan:
    values = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks_per_host, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 29500}
    environ = {name: str(value) for name, value in values.items()}
    return plan_of(words, environ=environ | {"MASTER_ADDR": "localhost"})


def test_all_gemms_with_communication_overlap_by_default() -> None:
    plan = overlap_plan(ON)
    assert plan.parallel.tp_comm_overlap == OVERLAPPED
    assert set(GEMMS) - set(OVERLAPPED) == {"proj_wgrad", "fc2_wgrad"}
    assert not [note for note in plan.notes if "overlap" in note]
    assert overlap_plan(ON.replace("--tp-comm-overlap", "")).parallel.tp_comm_overlap == ()


@pytest.mark.parametrize(
    ("option", "off"),
    [
        ("--disable-tp-comm-overlap-ag", {"qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"}),
        ("--disable-tp-comm-overlap-rs", {"proj_fprop", "fc2_fprop"}),
        ("--disable-tp-comm-bulk-dgrad", {"qkv_dgrad", "fc1_dgrad"}),
        ("--no-tp-comm-bulk-wgrad", {"qkv_wgrad", "fc1_wgrad"}),
    ],
)
def test_switches_of_transformer_engine_select_gemms(option: str, off: set[str]) -> None:
    assert set(overlap_plan(f"{ON} {option}").parallel.tp_comm_overlap) == set(OVERLAPPED) - off


def test_a_file_switches_gemms_off_and_its_other_settings_are_reported() -> None:
    plan = overlap_plan(f"{ON} --tp-comm-overlap-cfg {FILE}")
    assert set(plan.parallel.tp_comm_overlap) == set(OVERLAPPED) - {"fc2_dgrad"}
    (note,) = (note for note in plan.notes if str(FILE) in note)
    keys = "aggregate, num_sm, num_splits, fc2_wgrad"
    assert note == f"without effect in {FILE}: {keys} (copy engines communicate, without a kernel)"


@pytest.mark.parametrize("more", ["", "--proxy"])
def test_a_file_is_read_once_because_it_may_be_a_pipe(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, paths = tp_overlap.read_overlap_file, list[str]()
    monkeypatch.setattr(tp_overlap, "read_overlap_file", lambda path: paths.append(path) or read(path))
    plan = overlap_plan(f"{ON} {more} --tp-comm-overlap-cfg {FILE}")
    assert "fc2_dgrad" not in plan.parallel.tp_comm_overlap and f" {FILE} " in plan.resolved_yaml
    assert paths == [str(FILE)]


def test_the_planner_reads_the_file() -> None:
    words = f"--recipe quickstart --tp-comm-overlap --tp-comm-overlap-cfg {FILE}".split()
    settings = settings_of(words, Registry.declared())
    assert settings.problems == [] and settings.flags.tp_comm_overlap_cfg.off == ("fc2_dgrad",)
    (problem,) = settings_of([*words[:-1], "none.yaml"], Registry.declared()).problems
    assert problem.what.startswith("--tp-comm-overlap-cfg none.yaml cannot be read: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must be a mapping of GEMMs, such as qkv_fprop, to settings"),
        ("a: {", "is not YAML in line 1: "),
        (None, "cannot be read: No such file or directory"),
        ("qkv_fwd: {method: bulk}", "has the unknown GEMM qkv_fwd; known are qkv_fprop, qkv_dgrad"),
        ("qkv_fprop: {sms: 3}", "has the unknown key sms in qkv_fprop; known are method, num_sm"),
        ("qkv_fprop: {method: ring}", "has the unknown method ring in qkv_fprop; known are ring_exchange, pipeline"),
        ("qkv_fprop: bulk", "has qkv_fprop: 'bulk', which is neither false nor a mapping of settings"),
    ],
)
def test_other_files_are_rejected_with_file_and_key(text: str | None, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=message):
        read_overlap_file(path)
    (found,) = texts_of(f"--tp-comm-overlap-cfg {path}")
    assert message in found and path in found


@pytest.mark.parametrize(
    ("words", "ranks", "ranks_per_host", "reason"),
    [
        (ON, 2, 1, "the 2 tensor-parallel ranks are on several hosts (ranks per host: 1), which share no memory"),
        (f"{ON} {DYNAMIC}", 4, 4, "--dynamic-context-parallel changes the number of positions per rank"),
        (
            ON.replace("cpu", "auto"),
            2,
            2,
            "a rank has 256 rows per microbatch, and copies of fewer than 512 rows do not",
        ),
    ],
)
def test_one_note_says_why_nothing_overlaps(words: str, ranks: int, ranks_per_host: int, reason: str) -> None:
    plan = overlap_plan(words, ranks, ranks_per_host)
    assert plan.parallel.tp_comm_overlap == ()
    (note,) = (note for note in plan.notes if note.startswith(f"{NO_EFFECT}: "))
    assert reason in note


def test_the_beginning_of_the_notes_is_written_once() -> None:
    root = Path(tp_overlap.__file__).parents[1]
    sources = [path for folder in ("arguments", "megatron_moe") for path in (root / folder).rglob("*.py")]
    assert [each.name for each in sources if NO_EFFECT in each.read_text()] == ["tp_overlap.py"]


def test_quantised_layers_are_named_as_an_exception() -> None:
    low = "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --emulate-low-precision"
    note = "--tp-comm-overlap has no effect on linear layers whose GEMMs are quantised"
    assert note in overlap_plan(f"{ON} {low}").notes


@pytest.mark.parametrize(
    ("graphs", "noted"), [("", True), (f"{DRY} --cuda-graph-impl local --cuda-graph-modules attn", False)]
)
def test_a_note_recommends_graphs_for_overlapped_gemms(graphs: str, noted: bool) -> None:
    notes = overlap_plan(f"{ON.replace('cpu', 'auto')} --seq-length 4096 --max-position-embeddings 4096 {graphs}").notes
    assert any(note.startswith("--tp-comm-overlap without CUDA graphs: ") for note in notes) == noted
