"""The command lines of public recipes resolve to the published models."""

import json
from pathlib import Path
from typing import Any

import pytest

from arguments.read import read_plan
from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.model_differences import config_differences, model_differences, recorded_model
from tests.helpers.zoo import ZooRow, command_line, model_config, zoo_rows

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data_files" / "hf_configs.json").read_text()
)
ROWS = zoo_rows()


def from_flags(row: ZooRow) -> ModelConfig:
    return read_plan(command_line(row), {}).model


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_command_line_means_the_architecture_of_its_row(row: ZooRow):
    assert config_differences(from_flags(row), model_config(row)) == []


def test_records_of_checkpoints_with_former_class_names_compare_equal():
    model = from_flags(next(row for row in ROWS if str(row) == "Moonlight-16B-A3B"))
    former = json.loads(json.dumps(recorded_model(model)).replace('Config"', 'Spec"'))
    assert former["type"] == "ModelSpec"
    assert model_differences(model, former, "checkpoint") == []


@pytest.mark.parametrize("row", [row for row in ROWS if str(row) in PUBLISHED], ids=str)
def test_a_command_line_means_the_published_config(row: ZooRow):
    found = config_differences(from_flags(row), model_config_from_hf(PUBLISHED[str(row)], mtp=True))
    own_norm = {"Moonlight-16B-A3B": "0-26", "GLM-4.7-Flash": "0-46"}.get(str(row))
    assert found == ([f"layers {own_norm} mixer norm eps: 1e-05, published 1e-06"] if own_norm else [])
