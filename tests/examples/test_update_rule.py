"""A matrix update rule registered by an imported file: layouts, resuming under another one, state of its fallback."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_moe.config.emulation import EmulationConfig
from megatron_moe.config.imports import import_file
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.memory import RankMemory
from megatron_moe.memory_emulation.rank import emulate_rank
from tests.helpers.checkpoint_files import stored_tensors
from tests.helpers.command_lines import plan_of as plan_of_flags
from tests.helpers.example_proofs import check_layout, check_replay, covering, with_fp8
from tests.helpers.tolerances import EXACT, FP64_LAYOUT
from tests.parity.cells import plan_of
from tests.parity.dimensions import cell_of
from tests.train.test_resharding import resume, train_and_save

FILE = Path(__file__).parent / "update_rule.py"
LAYOUTS = (
    *covering("dispatcher=alltoall zero=on"),
    "dp=2 zero=on",
    "dp=2",
    "tp=2 sp=on",
    "dp=2 ep=2 zero=on dispatcher=alltoall",
    "pp=2 accumulation=4 zero=on recompute=small",
    "tp=2 sp=on dp=2 etp=2 zero=on dispatcher=alltoall shared=on",
    "dp=4 ep=2 zero=on overlap=params dispatcher=alltoall attention=mla",
)


@pytest.fixture(autouse=True)
def imported() -> None:
    import_file(str(FILE))


def plan(layout: str, *, overlapped: bool = False) -> RunPlan:
    plan = plan_of(cell_of(f"{layout} balance=none"))
    optimizer = replace(plan.optimizer, optimizer="preconditioned_momentum", overlap_optimizer_step=overlapped)
    return replace(plan, optimizer=optimizer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_rank(layout: str) -> None:
    check_layout(plan(layout))


def test_the_overlapped_step_equals_one_rank() -> None:
    check_layout(plan("dp=2 zero=on", overlapped=True))


def test_layouts_with_fp8_gemms_equal_one_rank() -> None:
    check_layout(with_fp8(plan("tp=2 sp=on dp=2 zero=on")))


def test_replayed_graphs_equal_eager_steps() -> None:
    check_replay(plan("accumulation=2"))


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("dp=2 zero=on", "tp=2 sp=on pp=2 accumulation=2 ep=2 dispatcher=alltoall"),
        ("tp=2 sp=on dp=2 etp=2 zero=on dispatcher=alltoall", "dp=4 ep=4 zero=on dispatcher=alltoall"),
    ],
)
def test_a_checkpoint_resumes_on_another_layout(writer: str, reader: str, tmp_path: Path) -> None:
    train_and_save(plan(writer), tmp_path / "a")
    resume(plan(reader), tmp_path / "a", tmp_path / "b")
    saved = stored_tensors(tmp_path / "a" / "iter_0000001")
    assert {key.partition(".")[0] for key in saved} == {
        *("model", "optimizer", "momentum", "covariance", "exp_avg", "exp_avg_sq")
    }
    fc2 = "decoder.layers.1.mlp.experts.linear_fc2.weight"
    num_experts, rows, _ = saved[f"model.{fc2}"].shape
    assert saved[f"covariance.{fc2}"].shape == (num_experts, rows, rows)
    assert f"exp_avg.{fc2}" not in saved and "momentum.embedding.word_embeddings.weight" not in saved
    EXACT.check_all(stored_tensors(tmp_path / "b" / "iter_0000001"), saved, "loaded and saved again")
    straight = stored_tensors(tmp_path / "a" / "iter_0000002")
    FP64_LAYOUT.check_all(stored_tensors(tmp_path / "b" / "iter_0000002"), straight, "one step further")


@pytest.mark.parametrize("rule", ["preconditioned_momentum", "muon"])
def test_the_dry_run_and_the_emulation_know_the_state(rule: str) -> None:
    flags = f"--import {FILE} --optimizer {rule} --bf16 --hidden-size 1024 --ffn-hidden-size 4096"
    plan = plan_of_flags(f"{flags} --moe-ffn-hidden-size 1024 --transformer-impl local --micro-batch-size 1")
    emulated = emulate_rank(replace(plan, emulation=EmulationConfig(), device="cpu"), 0, torch.device("meta"))
    closed = RankMemory(plan).state_of_rank(0).moments
    assert emulated.timeline.peak().categories["moments"] == pytest.approx(closed, rel=0.01)
