"""Tests of bench_hybrid_loss: the models that it trains."""

from pathlib import Path

import pytest

from arguments.read import read_plan
from benchmarks.harness.bench_hybrid_loss import COMMON, MODELS

MIXERS = {
    "Nemotron-3-like": {"mamba", "attention", "none"},
    "Qwen3-Next-like": {"gated_delta_net", "attention"},
    "Kimi-Linear-like": {"kimi_delta_attention", "mla"},
    "DeepSeek-V3.2-like": {"dsa"},
    "DeepSeek-V4-like": {"compressed_attention"},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_accepted_and_has_its_mixers(name: str, tmp_path: Path) -> None:
    words = [*COMMON.split(), *MODELS[name].split(), "--device", "cpu", "--train-iters", "1", "--mock-data"]
    words += ["--tokenizer-model", "x.model", "--run-dir", str(tmp_path)]
    plan = read_plan([word for word in words if word not in ("--split", "100,0,0")], {}, lambda config: 4096)
    assert {layer.mixer.registered_as for layer in plan.model.layers} == MIXERS[name]
