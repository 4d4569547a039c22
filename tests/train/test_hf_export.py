"""Hugging Face exports during training."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf
from megatron_moe.checkpoint.huggingface.folder import read_config
from megatron_moe.checkpoint.huggingface.load import load_hf
from megatron_moe.config.checkpoint import CheckpointConfig, HFDescription
from megatron_moe.config.data import TokenizerConfig
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline_layout import place_layers
from megatron_moe.config.run import RunPlan
from megatron_moe.kernels.reference.backend import bundle
from megatron_moe.model.gpt import GPT
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train import hf_export
from megatron_moe.train.checkpointing import model_tensors
from megatron_moe.train.hf_export import HuggingFaceExport
from tests.checkpoint.hf_models import VOCAB, configs, hf_model, saved
from tests.checkpoint.test_huggingface import LAYOUTS, hf_tensors, over_ranks, tensors_in
from tests.helpers import tiny
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT
from tests.train.test_checkpointing import Notes, start

CONFIGS = configs()


def published(name: str, folder: Path) -> ModelConfig:
    return model_config_from_hf(read_config(saved(hf_model(CONFIGS[name]), folder)))


def exported(context: ParallelContext, config: ModelConfig, folder: Path, output: Path) -> list[str]:
    """Loads a folder on this rank and exports it; returns the notes."""
    pp, reported = context.group("pp"), Notes()
    counts = [len(config.layers)] if pp.size == 1 else [1, len(config.layers) - 1]
    model = GPT(config, context, bundle(), chunks=place_layers(counts, pp.size, 0, 0).chunks(pp.rank))
    load_hf(folder, model, config, pp)
    made = HuggingFaceExport(config, context, folder, output, reported)
    made.save(5, model_tensors(model))
    made.save(5, model_tensors(model))
    return reported


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3, yarn", "gpt_oss, yarn"])
def test_every_layout_exports_the_complete_model_once(name: str, layout: ParallelConfig, tmp_path: Path):
    config = over_ranks(published(name, tmp_path / "hf"))
    reported = on_threads(layout, lambda c: exported(c, config, tmp_path / "hf", tmp_path / "out"), dtype=torch.float32)
    EXACT.check_all(tensors_in(tmp_path / "out" / "iter_0000005"), tensors_in(tmp_path / "hf"), "tensors")
    path = tmp_path / "out" / "iter_0000005"
    assert reported == [[f"exported iteration 5 as a Hugging Face folder to {path}"], *[[]] * (layout.world_size - 1)]


def test_norm_that_transformers_computes_differently_is_reported(tmp_path: Path):
    config = published("deepseek_v3, yarn", tmp_path / "hf")
    trained = tuple(replace(layer, mixer=replace(layer.mixer, norm=layer.norm)) for layer in config.layers)
    reported = Notes()
    plan = tiny.plan(model=replace(config, layers=trained))
    HuggingFaceExport(plan.model, ParallelContext.single(), tmp_path / "hf", tmp_path / "out", reported)
    (line,) = reported
    assert line.startswith("exports to Hugging Face: layers 0-2 mixer norm eps: 0.0001, published 1e-06")


def test_a_config_is_generated_for_a_model_without_a_folder(tmp_path: Path):
    config = published("qwen2_moe", tmp_path / "hf")
    model, reported = GPT(config, ParallelContext.single(), bundle()), Notes()
    description = HFDescription(
        vocab_size=VOCAB, tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB)
    )
    made = HuggingFaceExport(config, ParallelContext.single(), description, tmp_path / "out", reported)
    made.save(5, model_tensors(model))
    assert "config.json for Qwen2MoeForCausalLM is generated" in reported[0]
    written = tmp_path / "out" / "iter_0000005"
    assert model_config_from_hf(read_config(written)) == config and (written / "generation_config.json").is_file()


def test_failed_export_is_reported_and_blocks_no_rank(tmp_path: Path, monkeypatch):
    config = over_ranks(published("qwen2_moe", tmp_path / "hf"))

    def full(folder, export, values, template, **options):
        for _ in range(10):
            next(values)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hf_export, "write_folder", full)
    reported = on_threads(
        LAYOUTS["ep4"], lambda c: exported(c, config, tmp_path / "hf", tmp_path / "out"), dtype=torch.float32
    )
    (line,) = reported[0]
    assert "failed" in line and "No space left" in line and "training continues" in line


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    """Plan that starts from a folder and exports every second iteration."""
    config = published("olmoe", tmp_path / "hf")
    place = CheckpointConfig(
        save=tmp_path / "run",
        load=f"hf:{tmp_path}/hf",
        save_hf_interval=2,
        save_hf_config=tmp_path / "hf",
        save_interval=3,
    )
    data = replace(tiny.plan().data, vocab_size=61, tokenizer=replace(tiny.plan().data.tokenizer, vocab_size=61))
    return tiny.plan(model=config, checkpoint=place, data=data)


def test_exports_at_the_interval_and_at_the_end(plan: RunPlan, tmp_path: Path):
    run = start(plan)
    due = []
    for _ in range(5):
        run.train(1)
        due.append(run.checkpoints.is_due(run.state.iteration))
        run.checkpoints.save_if_due(run.state, run.loader)
    run.checkpoints.save_last(run.state, run.loader)
    assert due == [False, True, True, True, False]
    assert sorted(path.name for path in (tmp_path / "run" / "hf").iterdir()) == [f"iter_000000{n}" for n in (2, 4, 5)]
    expected = hf_tensors(run.trainer.model, plan.model, read_config(tmp_path / "hf"))
    EXACT.check_all(tensors_in(tmp_path / "run" / "hf" / "iter_0000005"), expected, "tensors")
    assert read_config(tmp_path / "run" / "hf" / "iter_0000005")["dtype"] == "float64"


def test_config_of_another_model_is_rejected_at_start(plan: RunPlan):
    other = replace(plan.model, layers=plan.model.layers[:1])
    with pytest.raises(CheckpointProblem, match="number of layers: 1, published 2"):
        start(replace(plan, model=other))
