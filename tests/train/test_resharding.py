"""Resuming on another layout: bitwise equal state after loading, and equal numbers in the next step."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_moe.build import build_train_state_config
from megatron_moe.checkpoint.load import find_checkpoint, load_checkpoint
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.fsdp import FSDPConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.checkpointing import saved_tensors
from megatron_moe.train.train_state import TrainState
from megatron_moe.train.trainer import Trainer
from tests.helpers.checkpoint_files import stored_tensors
from tests.helpers.pipelines import make_trainer, run_steps
from tests.helpers.ranks import on_threads
from tests.helpers.tiny_models import with_streams_and_hash
from tests.helpers.tolerances import EXACT, FP64_LAYOUT
from tests.parity.cells import plan_of
from tests.parity.dimensions import cell_of

MODELS = {
    "bias, mtp": "balance=bias mtp=on",
    "tied, shared": "balance=bias head=tied shared=on mtp=on",
    "streams, hash": "balance=bias mtp=on",
    "mla, latent": "balance=none attention=mla latent=on",
}
MOVED = "dispatcher=alltoall"
PAIRS = (
    ("bias, mtp", "plain", f"tp=2 sp=on pp=2 accumulation=2 ep=2 {MOVED}"),
    ("streams, hash", "pp=2 vpp=2 accumulation=2", f"tp=2 sp=on cp=2 ep=2 zero=on {MOVED}"),
    ("bias, mtp", "tp=4 sp=on groups=shared dp=2 zero=on", "tp=2 sp=on"),
    ("bias, mtp", "pp=2 accumulation=2", f"tp=4 sp=on groups=shared ep=4 {MOVED}"),
    ("tied, shared", f"tp=2 sp=on ep=2 {MOVED}", "pp=4 accumulation=4"),
    ("bias, mtp", "pp=2 vpp=2 accumulation=4", f"dp=4 zero=on ep=4 experts=sequential {MOVED}"),
    ("mla, latent", f"dp=4 zero=on ep=2 {MOVED}", f"tp=2 sp=on dp=2 etp=2 {MOVED}"),
    ("tied, shared", f"tp=2 sp=on dp=2 etp=2 ep=2 {MOVED}", "cp=2 dp=2 zero=on"),
    ("bias, mtp", "cp=2 dp=2 zero=on", "pp=2 cp=2 accumulation=2"),
    ("mla, latent", f"cp=2 ep=2 experts=sequential {MOVED}", "plain"),
    ("tied, shared", "pp=4 accumulation=4", "pp=2 vpp=2 dp=2 accumulation=2 zero=on"),
    ("mla, latent", f"tp=2 sp=on pp=2 etp=2 zero=on {MOVED}", f"tp=4 sp=on ep=4 {MOVED}"),
    ("mla, latent", "tp=4 sp=on", "dp=2 zero=on"),
    ("tied, shared", "pp=2 vpp=2 dp=2 accumulation=2 zero=on", f"cp=4 ep=4 {MOVED}"),
    ("bias, mtp", f"dp=2 cp=2 ep=2 experts=sequential {MOVED}", f"tp=2 sp=on pp=2 vpp=2 etp=2 accumulation=2 {MOVED}"),
)
"""(model, layout that saves, layout that resumes). Every size of every axis occurs among the saving and among the
loading layouts."""
NUM_IN_CI = 7


def plan(model: str, layout: str) -> RunPlan:
    found = plan_of(cell_of(f"{MODELS[model]} {layout}".replace(" plain", "")))
    return replace(found, model=with_streams_and_hash(found.model)) if model == "streams, hash" else found


def save(plan: RunPlan, trainer: Trainer, state: TrainState, folder: Path, context: ParallelContext) -> None:
    saver = CheckpointSaver(folder, context, say=lambda line: None)
    with trainer.optimizer.unquantized_weights():
        tensors = saved_tensors(trainer, optimizer=True)
        assert saver.save(state.iteration, tensors, state.to_json(build_train_state_config(plan))) is not None
    saver.close()


def save_on_rank(context: ParallelContext, plan: RunPlan, folder: Path) -> None:
    """Trains two steps and saves a checkpoint after each."""
    trainer, state = make_trainer(plan, context), TrainState()
    for _ in range(2):
        run_steps(plan, trainer, state, 1)
        save(plan, trainer, state, folder, context)


def train_and_save(plan: RunPlan, folder: Path) -> None:
    """Runs `save_on_rank` on all ranks."""
    run(plan, lambda context: save_on_rank(context, plan, folder))


def resume_on_rank(context: ParallelContext, plan: RunPlan, source: Path, folder: Path) -> None:
    """Loads the checkpoint of step 1, saves it again, runs step 2 and saves that."""
    other_seed = replace(plan, loop=replace(plan.loop, seed=99))
    trainer = make_trainer(other_seed, context)
    found = find_checkpoint(CheckpointConfig(load=str(source), ckpt_step=1), context, say=lambda line: None)
    assert found is not None
    with trainer.optimizer.unquantized_weights():
        loaded = load_checkpoint(found, saved_tensors(trainer, optimizer=True), context)
    trainer.after_restore(with_optimizer=True)
    trainer.loop, state = plan.loop, TrainState.from_json(loaded.train_state)
    save(plan, trainer, state, folder, context)
    run_steps(plan, trainer, state, 1)
    save(plan, trainer, state, folder, context)


def resume(plan: RunPlan, source: Path, folder: Path) -> None:
    """Runs `resume_on_rank` on all ranks."""
    run(plan, lambda context: resume_on_rank(context, plan, source, folder))


def run(plan: RunPlan, main) -> None:
    dtype = torch.float64 if plan.precision.params == "fp64" else torch.bfloat16
    if plan.parallel.world_size == 1:
        main(ParallelContext.single(dtype=dtype))
    else:
        on_threads(plan.parallel, main, dtype=dtype)


@pytest.mark.parametrize(
    "model, writer, reader",
    [
        pytest.param(*pair, id="{}: {} -> {}".format(*pair), marks=[pytest.mark.slow] if n >= NUM_IN_CI else [])
        for n, pair in enumerate(PAIRS)
    ],
)
def test_a_checkpoint_resumes_on_another_layout(model: str, writer: str, reader: str, tmp_path: Path) -> None:
    train_and_save(plan(model, writer), tmp_path / "a")
    resume(plan(model, reader), tmp_path / "a", tmp_path / "b")
    saved = stored_tensors(tmp_path / "a" / "iter_0000001")
    assert {key.partition(".")[0] for key in saved} == {"model", "exp_avg", "exp_avg_sq", "optimizer"}
    assert any("mtp" in key or "expert_bias" in key for key in saved) or model == "mla, latent"
    EXACT.check_all(stored_tensors(tmp_path / "b" / "iter_0000001"), saved, "loaded and saved again")
    straight = stored_tensors(tmp_path / "a" / "iter_0000002")
    FP64_LAYOUT.check_all(stored_tensors(tmp_path / "b" / "iter_0000002"), straight, "one step further")


@pytest.mark.slow
def test_p3_resume_on_the_same_layout_is_bitwise_equal(tmp_path: Path) -> None:
    same = plan("bias, mtp", PAIRS[0][2])
    train_and_save(same, tmp_path / "a")
    resume(same, tmp_path / "a", tmp_path / "b")
    EXACT.check_all(stored_tensors(tmp_path / "b" / "iter_0000002"), stored_tensors(tmp_path / "a" / "iter_0000002"))


@pytest.mark.slow
def test_bf16_moments_resume_on_other_rank_counts(tmp_path: Path) -> None:
    """Resumes from two ranks on one rank and vice versa. Checkpoints store moments in fp32."""
    precision = PrecisionConfig(
        params="bf16", grads="fp32", main_params_dtype="fp32", exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"
    )
    sharded, single = (replace(plan("bias, mtp", name), precision=precision) for name in ("dp=2 zero=on", "plain"))
    train_and_save(sharded, tmp_path / "a")
    resume(single, tmp_path / "a", tmp_path / "b")
    resume(sharded, tmp_path / "b", tmp_path / "c")
    saved = stored_tensors(tmp_path / "a" / "iter_0000001")
    kinds = {key.partition(".")[0]: value.dtype for key, value in saved.items() if "word_embeddings" in key}
    assert kinds == {
        "model": torch.bfloat16,
        "master": torch.float32,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    }
    EXACT.check_all(stored_tensors(tmp_path / "b" / "iter_0000001"), saved, "on one rank")
    EXACT.check_all(stored_tensors(tmp_path / "c" / "iter_0000001"), saved, "on two again")


def test_checkpoints_move_between_sharding_strategies(tmp_path: Path) -> None:
    """Resumes a ZeRO-1 checkpoint with sharded weights with replicas, with sharded gradients, and with expert
    parallelism."""
    config = FSDPConfig(outer_dp_sharding_strategy="optim")
    first = plan("bias, mtp", "dp=2 zero=on")
    sharded = with_fsdp(plan("bias, mtp", "dp=4 zero=on"), config, instances=2)
    gradients = with_fsdp(plan("bias, mtp", "dp=2 zero=on"), FSDPConfig(shards_weights=False))
    experts = with_fsdp(plan("bias, mtp", f"dp=4 zero=on ep=2 {MOVED}"), FSDPConfig(fsdp_double_buffer=True))
    train_and_save(first, tmp_path / "0")
    saved = stored_tensors(tmp_path / "0" / "iter_0000001")
    straight = stored_tensors(tmp_path / "0" / "iter_0000002")
    for number, reader in enumerate((sharded, gradients, experts, first), start=1):
        resume(reader, tmp_path / f"{number - 1}", tmp_path / f"{number}")
        EXACT.check_all(stored_tensors(tmp_path / f"{number}" / "iter_0000001"), saved, "loaded and saved again")
        FP64_LAYOUT.check_all(stored_tensors(tmp_path / f"{number}" / "iter_0000002"), straight, "one step further")


def with_muon(plan: RunPlan) -> RunPlan:
    return replace(plan, optimizer=replace(plan.optimizer, optimizer="muon"))


def test_momentum_of_muon_moves_between_sharding_strategies(tmp_path: Path) -> None:
    """Ranks own whole matrices, other ones with each strategy: ZeRO-1, then ZeRO-3, then ZeRO-2."""
    first = with_muon(plan("bias, mtp", "dp=2 zero=on"))
    train_and_save(first, tmp_path / "0")
    saved = stored_tensors(tmp_path / "0" / "iter_0000001")
    assert {key.partition(".")[0] for key in saved} == {"model", "exp_avg", "exp_avg_sq", "momentum", "optimizer"}
    straight = stored_tensors(tmp_path / "0" / "iter_0000002")
    for number, config in enumerate((FSDPConfig(), FSDPConfig(shards_weights=False)), start=1):
        resume(with_fsdp(first, config), tmp_path / f"{number - 1}", tmp_path / f"{number}")
        EXACT.check_all(stored_tensors(tmp_path / f"{number}" / "iter_0000001"), saved, "loaded and saved again")
        FP64_LAYOUT.check_all(stored_tensors(tmp_path / f"{number}" / "iter_0000002"), straight, "one step further")


def test_a_run_of_muon_continues_with_adamw_and_new_moments(tmp_path: Path) -> None:
    """AdamW has one step count, which starts at zero like the moments of matrices, so all other moments do, too."""
    after = plan("bias, mtp", "dp=2 zero=on")
    train_and_save(with_muon(after), tmp_path / "a")
    saved = stored_tensors(tmp_path / "a" / "iter_0000001")
    assert saved["optimizer.step_count"] == 1 and any(key.startswith("exp_avg.") for key in saved)

    def resumed(context: ParallelContext) -> tuple[list[str], int, float]:
        trainer, notes = make_trainer(after, context), list[str]()
        found = find_checkpoint(CheckpointConfig(load=str(tmp_path / "a"), ckpt_step=1), context, say=notes.append)
        assert found is not None
        load_checkpoint(found, saved_tensors(trainer, optimizer=True), context, say=notes.append)
        trainer.after_restore(with_optimizer=True)
        moments = [each.data.abs().sum() for each in trainer.optimizer.named_state() if each.kind != "master"]
        return notes, int(trainer.optimizer.step_count), float(sum(moments))

    note = (
        "the checkpoint contains optimizer state of another update rule for some parameters; their state is "
        "initialised anew; exp_avg and exp_avg_sq of all other parameters and the step count start at zero too"
    )
    assert on_threads(after.parallel, resumed, dtype=torch.float64) == [([note], 0, 0.0), ([], 0, 0.0)]


def with_fsdp(plan: RunPlan, config: FSDPConfig, instances: int = 1) -> RunPlan:
    parallel = replace(plan.parallel, num_distributed_optimizer_instances=instances)
    data_parallel = replace(plan.data_parallel, overlap_grad_reduce=True, fsdp=config)
    return replace(plan, parallel=parallel, data_parallel=data_parallel)
