"""Exports as a run goes: whatever the layout, the folder has the whole model, and a failure costs one line."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_moe.checkpoint.hf_folder import read_config
from megatron_moe.checkpoint.huggingface import load_hf
from megatron_moe.kernels.reference import bundle
from megatron_moe.model.gpt import GPT
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.exitcodes import CheckpointProblem
from megatron_moe.specs.families.derive import model_spec_from_hf
from megatron_moe.specs.model import ModelSpec
from megatron_moe.specs.parallel import ParallelSpec
from megatron_moe.specs.pipeline.layout import place_layers
from megatron_moe.specs.run import RunPlan
from megatron_moe.specs.train import CheckpointSpec
from megatron_moe.train import exports
from megatron_moe.train.checkpoints import model_tensors
from megatron_moe.train.exports import Exports
from tests import tiny
from tests.checkpoint.hf_models import configs, hf_model, saved
from tests.checkpoint.test_huggingface import LAYOUTS, hf_tensors, over_ranks, tensors_in
from tests.ranks import on_threads
from tests.tolerances import EXACT
from tests.train.test_checkpoints import Notes, start

CONFIGS = configs()


def published(name: str, folder: Path) -> ModelSpec:
    return model_spec_from_hf(read_config(saved(hf_model(CONFIGS[name]), folder)))


def exported(context: ParallelContext, spec: ModelSpec, folder: Path, output: Path) -> list[str]:
    """Loads a folder on this rank and writes it again; what was reported."""
    pp, said = context.group("pp"), Notes()
    counts = [len(spec.layers)] if pp.size == 1 else [1, len(spec.layers) - 1]
    model = GPT(spec, context, bundle(), chunks=place_layers(counts, pp.size, 0, 0).chunks(pp.rank))
    load_hf(folder, model, spec, pp)
    made = Exports(tiny.plan(model=spec), context, folder, output, said)
    made.save(5, model_tensors(model))
    made.save(5, model_tensors(model))
    return said


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3, yarn", "gpt_oss, yarn"])
def test_every_layout_exports_the_whole_model_once(name: str, layout: ParallelSpec, tmp_path: Path):
    spec = over_ranks(published(name, tmp_path / "hf"))
    said = on_threads(layout, lambda c: exported(c, spec, tmp_path / "hf", tmp_path / "out"), dtype=torch.float32)
    EXACT.check_all(tensors_in(tmp_path / "out" / "iter_0000005"), tensors_in(tmp_path / "hf"), "tensors")
    path = tmp_path / "out" / "iter_0000005"
    assert said == [[f"exported iteration 5 as a Hugging Face folder to {path}"], *[[]] * (layout.world_size - 1)]


def test_latent_norms_that_transformers_computes_otherwise_are_told_at_the_start(tmp_path: Path):
    spec = published("deepseek_v3, yarn", tmp_path / "hf")
    trained = tuple(replace(layer, mixer=replace(layer.mixer, norm=layer.norm)) for layer in spec.layers)
    said = Notes()
    plan = tiny.plan(model=replace(spec, layers=trained))
    Exports(plan, ParallelContext.single(), tmp_path / "hf", tmp_path / "out", said)
    (line,) = said
    assert line.startswith("exports to Hugging Face: layers 0-2 mixer norm eps: 0.0001, published 1e-06")


def test_a_failure_in_the_middle_costs_one_line_and_no_rank_waits(tmp_path: Path, monkeypatch):
    spec = over_ranks(published("qwen2_moe", tmp_path / "hf"))

    def full(folder, export, values, template, **options):
        for _ in range(10):
            next(values)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(exports, "write_folder", full)
    said = on_threads(
        LAYOUTS["ep4"], lambda c: exported(c, spec, tmp_path / "hf", tmp_path / "out"), dtype=torch.float32
    )
    (line,) = said[0]
    assert "failed" in line and "No space left" in line and "training goes on" in line


@pytest.fixture
def plan(tmp_path: Path) -> RunPlan:
    """A run from a folder that exports every second iteration."""
    spec = published("olmoe", tmp_path / "hf")
    place = CheckpointSpec(
        save=tmp_path / "run", load=f"hf:{tmp_path}/hf", hf_interval=2, hf_config=tmp_path / "hf", save_interval=3
    )
    data = replace(tiny.plan().data, vocab_size=61, tokenizer=replace(tiny.plan().data.tokenizer, vocab_size=61))
    return tiny.plan(model=spec, checkpoint=place, data=data)


def test_a_run_exports_at_its_interval_and_at_its_end(plan: RunPlan, tmp_path: Path):
    run = start(plan)
    due = []
    for _ in range(5):
        run.train(1)
        due.append(run.checkpoints.due(run.state.iteration))
        run.checkpoints.save_if_due(run.state, run.loader)
    run.checkpoints.save_last(run.state, run.loader)
    assert due == [False, True, True, True, False]
    assert sorted(path.name for path in (tmp_path / "run" / "hf").iterdir()) == [f"iter_000000{n}" for n in (2, 4, 5)]
    expected = hf_tensors(run.trainer.model, plan.model, read_config(tmp_path / "hf"))
    EXACT.check_all(tensors_in(tmp_path / "run" / "hf" / "iter_0000005"), expected, "tensors")
    assert read_config(tmp_path / "run" / "hf" / "iter_0000005")["dtype"] == "float64"


def test_a_config_of_another_model_ends_the_run_at_its_start(plan: RunPlan):
    other = replace(plan.model, layers=plan.model.layers[:1])
    with pytest.raises(CheckpointProblem, match="number of layers: 1, published 2"):
        start(replace(plan, model=other))
