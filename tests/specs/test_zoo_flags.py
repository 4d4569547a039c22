"""The flags of public recipes, given on a command line, mean the published models."""

import json
from pathlib import Path
from typing import Any

import pytest

from arguments.read import read_plan
from megatron_moe.specs.families.derive import differences, model_spec_from_hf
from megatron_moe.specs.model import ModelSpec
from tests.zoo import ZooRow, model_spec, zoo_rows

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data_files" / "hf_configs.json").read_text()
)
ROWS = zoo_rows()

_VALUES = (
    *("num-layers", "hidden-size", "ffn-hidden-size", "moe-ffn-hidden-size", "num-attention-heads", "rotary-base"),
    *(
        "rotary-percent",
        "normalization",
        "norm-epsilon",
        "num-experts",
        "moe-router-topk",
        "moe-layer-freq",
        "softmax-type",
    ),
    *("moe-router-score-function", "moe-router-num-groups", "moe-router-group-topk", "moe-router-topk-scaling-factor"),
    *("vocab-size", "kv-channels", "q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim"),
)
_SWITCHES = ("moe-shared-expert-gate", "moe-router-pre-softmax", "moe-router-enable-expert-bias", "add-qkv-bias")
_RUN = "--micro-batch-size 1 --seq-length 8 --train-iters 1 --max-position-embeddings 64 --mock-data --lr 1e-3 --swiglu"


def flags(row: ZooRow) -> list[str]:
    """The row as a command line."""
    words = [*_RUN.split(), "--tokenizer-type", "NullTokenizer", "--make-vocab-size-divisible-by", "1"]
    for flag in _VALUES:
        if row.cells[flag] != "-":
            words += [f"--{flag}", row.cells[flag]]
    words += [f"--{flag}" for flag in _SWITCHES if row.yes(flag)]
    words += _attention_flags(row)
    if row.integer("moe-shared-expert-intermediate-size"):
        words += ["--moe-shared-expert-intermediate-size", row.cells["moe-shared-expert-intermediate-size"]]
    if row.integer("mtp-num-layers"):
        words += ["--mtp-num-layers", row.cells["mtp-num-layers"]]
    if not row.yes("tied-embeddings"):
        words.append("--untie-embeddings-and-output-weights")
    if not row.yes("linear-bias"):
        words.append("--disable-bias-linear")
    if row.cells["activation"] == "quick_gelu":
        words.remove("--swiglu")
        words += "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0".split()
    return words


def _attention_flags(row: ZooRow) -> list[str]:
    words = []
    if row.is_mla:
        words += ["--multi-latent-attention", "--position-embedding-type", "rope"]
    else:
        words += ["--group-query-attention", "--num-query-groups", row.cells["num-query-groups"]]
        words += ["--position-embedding-type", "rope" if row.cells["yarn"] == "-" else "yarn"]
    if row.cells["qk-layernorm"] != "False" and row.cells["qk-layernorm"] != "none":
        words.append("--qk-layernorm")
    if row.cells["qk-layernorm"] == "full":
        words += ["--qk-layernorm-over", "all-heads"]
    if row.cells["window-size"] != "-":
        words += ["--window-size", "127,0", "--window-attn-skip-freq", "2"]
    yarn = dict(pair.split("=") for pair in row.cells["yarn"].split()) if row.cells["yarn"] != "-" else {}
    for key, flag in (
        ("factor", "rotary-scaling-factor"),
        ("beta_fast", "yarn-beta-fast"),
        ("mscale", "mscale"),
        ("mscale_all_dim", "mscale-all-dim"),
    ):
        if key in yarn:
            words += [f"--{flag}", yarn[key]]
    if yarn.get("truncate") == "0":
        words.append("--no-yarn-correction-range-round-to-int")
    return words


def from_flags(row: ZooRow) -> ModelSpec:
    return read_plan(flags(row), {}).model


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_command_line_means_the_architecture_of_its_row(row: ZooRow):
    assert differences(from_flags(row), model_spec(row)) == []


@pytest.mark.parametrize("row", [row for row in ROWS if str(row) in PUBLISHED], ids=str)
def test_a_command_line_means_the_published_config(row: ZooRow):
    found = differences(from_flags(row), model_spec_from_hf(PUBLISHED[str(row)], mtp=True))
    latent_norm = "layers 0-26 mixer norm eps: 1e-05, published 1e-06"
    assert found == ([latent_norm] if str(row) == "Moonlight-16B-A3B" else [])
