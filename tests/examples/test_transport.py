"""A transport of expert-parallel ranks registered by an imported file."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import EnvironmentProblem, ExitCode
from megatron_moe.config.imports import import_file
from megatron_moe.config.model import with_experts
from megatron_moe.config.run import RunPlan
from pretrain_moe import main
from tests.end_to_end.tiny_run import arguments, losses, succeed
from tests.helpers.command_lines import calls_of, plan_of, texts_of
from tests.helpers.example_proofs import COVER, check_layout, check_memory, check_replay, with_fp8
from tests.helpers.programs import run_ranks
from tests.parity import cells
from tests.parity.dimensions import cell_of

FILE = str(Path(__file__).parent / "transport.py")
USE = ["--import", FILE, "--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "gather"]
EP2 = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def plan_of_cell(name: str) -> RunPlan:
    import_file(FILE)
    plan = cells.plan_of(cell_of(f"{name} dispatcher=flex balance=none"))
    return replace(plan, model=with_experts(plan.model, lambda moe: replace(moe, transport_backend="gather")))


@pytest.mark.parametrize(
    "cell",
    [
        *COVER,
        "dp=2 ep=2 capacity=drop",
        "tp=2 sp=on ep=2 recompute=moe shared=overlap",
        "tp=2 sp=on dp=2 ep=2 etp=2 recompute=small accumulation=2",
        "pp=2 vpp=2 dp=2 ep=2 overlap=experts accumulation=4",
    ],
)
def test_layouts_equal_one_rank(cell):
    check_layout(plan_of_cell(cell))


def test_layouts_with_fp8_gemms_equal_one_rank():
    check_layout(with_fp8(plan_of_cell("dp=2 ep=2")))


def test_replayed_graphs_equal_eager_steps():
    """Two ranks. Attention and router are captured; the exchange, whose collectives wait on the host, runs eagerly."""
    check_replay(plan_of_cell("dp=2 ep=2"), ("attn", "moe_router", "moe_preprocess"))


def test_graphs_cannot_contain_the_exchange():
    with pytest.raises(EnvironmentProblem, match="token exchange of the transport gather"):
        check_replay(plan_of_cell("dp=2 ep=2"), ("moe",))


def test_emulated_memory_agrees_with_the_cost_model():
    sizes = "--bf16 --seq-length 1024 --max-position-embeddings 1024 --hidden-size 1024 --ffn-hidden-size 4096"
    words = f"{' '.join(USE)} {sizes} --moe-ffn-hidden-size 1024 --transformer-impl local --micro-batch-size 1"
    check_memory(plan_of(f"{words} --expert-model-parallel-size 2", environ=EP2), rel=0.05)


def test_a_dry_run_needs_no_torch():
    """`calls_of` asserts that torch is not imported."""
    text, _ = calls_of(["--recipe", "m27", "--nodes", "2", "--dry-run", *USE, "--expert-model-parallel-size", "2"])
    assert "gather transport" in text and "dispatch: tokens of all ranks" in text


def test_other_names_and_features_are_rejected_in_one_sentence():
    (text,) = texts_of(f"{' '.join(USE[2:])}")
    assert "--moe-flex-dispatcher-backend gather" in text and "is not one of symmetric, copies, hierarchical" in text
    plan = plan_of(f"{' '.join(USE)} --expert-model-parallel-size 2", environ={**EP2, "LOCAL_WORLD_SIZE": "1"})
    assert plan.model.moe_configs[0].transport(plan.parallel).name == "gather"
    texts = texts_of(
        f"{' '.join(USE)} --expert-model-parallel-size 2 --cuda-graph-impl local --cuda-graph-modules moe", environ=EP2
    )
    assert any("the graph contains the token exchange" in text for text in texts)


@pytest.mark.slow
def test_two_ranks_train_and_one_rank_resumes(data, tmp_path):
    """Nightly, because runs of `test_components.py` resume with imported files."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    command = arguments(data, run, *USE, "--train-iters", "8", "--save-interval", "5", "--exit-interval", "5")
    ranks = ["--expert-model-parallel-size", "2"]
    succeed(run_ranks(2, [*command, *ranks], cwd=tmp_path))
    assert main(["--config", str(run / "run.yaml"), "--exit-interval", "8", *ranks[:1], "1"], {}) == ExitCode.OK
    assert main(arguments(data, whole, "--train-iters", "8"), {}) == ExitCode.OK
    for iteration in range(1, 9):
        assert losses(run)[iteration] == pytest.approx(losses(whole)[iteration], rel=1e-4)
