"""Conversion of config.json to flags and back: every public family, settings without a flag, and rejected configs."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arguments.errors import Finished, FlagErrors
from arguments.flags import Registry
from arguments.huggingface import AnotherModel, model_flags, rebuilt_from_flags
from arguments.read import read_plan
from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.mla import MLAConfig
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.model_differences import config_differences
from megatron_moe.config.run import RunPlan
from tests.helpers.command_lines import plan_of
from tests.helpers.zoo import model_config, zoo_rows

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data_files" / "hf_configs.json").read_text()
)
REST = (
    "--seq-length 128 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --tokenizer-type NullTokenizer "
    "--make-vocab-size-divisible-by 1"
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""Llama 3's RoPE scaling, the only one that --use-rope-scaling can express."""
ARCHITECTURES = (
    "--hidden-dropout 0 --attention-dropout 0 --apply-residual-connection-post-layernorm",
    "--normalization LayerNorm --apply-layernorm-1p --add-bias-linear --squared-relu --no-swiglu",
    "--window-size 15,0 --window-attn-skip-freq 2 --softmax-type learnable --attention-output-gate",
    "--window-size 15,0 --window-attn-skip-freq [1,1,0,0] --softmax-type off-by-one",
    "--no-rope-freq 4 --rotary-percent 0.5 --rotary-interleaved --rotary-base 5e5",
    "--no-rope-freq [0,1,1,0] --use-rope-scaling --rope-scaling-factor 4",
    "--rotary-seq-len-interpolation-factor 2 --qk-layernorm --qk-layernorm-over all-heads",
    "--position-embedding-type none --moe-layer-freq 2 --mtp-num-layers 2",
    "--position-embedding-type learned_absolute --no-untie-embeddings-and-output-weights",
    "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-gate --moe-latent-size 32",
    "--moe-router-topk 1 --moe-router-pre-softmax --moe-apply-probs-on-input --num-query-groups 4 --add-qkv-bias",
    "--no-group-query-attention --multi-latent-attention --q-lora-rank 24 --rotary-scaling-factor 4 --mscale 0.7 "
    "--mscale-all-dim 0.7 --original-max-position-embeddings 64",
    "--num-experts 0 --moe-aux-loss-coeff 0",
    "--hybrid-layer-pattern ME*- --position-embedding-type none --squared-relu --no-swiglu --mamba-num-groups 2 "
    "--mamba-num-heads 4 --mamba-head-dim 8 --mamba-state-dim 12 --moe-latent-size 32",
    "--hybrid-layer-pattern G*M+E- --moe-layer-freq 1 --position-embedding-type rope --window-size 15,0 "
    "--window-attn-skip-freq 2 --no-rope-freq [0,1,0,0,0,0] --mamba-num-heads 4 --mamba-head-dim 8 "
    "--kv-lora-rank 24 --rope-type rope",
    "--mixer gated_delta_net attention --feed-forward none mlp moe --linear-key-head-dim 24",
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-value-heads 16 "
    "--linear-key-head-dim 24 --linear-value-head-dim 20 --linear-conv-kernel-dim 3 --attention-output-gate",
    "--experimental-attention-variant kda --linear-attention-freq [1,1,0,1] --no-group-query-attention "
    "--multi-latent-attention --rope-type none --position-embedding-type none --linear-num-value-heads 16",
)
"""Further combinations of flags that define a model."""


def unsaid(model: ModelConfig) -> list[str]:
    """Lists the differences between a model and the model defined by its exported flags."""
    return config_differences(rebuilt_from_flags(model), model)


def folder_of(tmp_path: Path, name: str, **change: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED[name], **change}))
    return str(tmp_path)


def plan_from(folder: str, more: str = "") -> RunPlan:
    return read_plan(["--from-hf-config", folder, *shlex.split(f"{REST} {more}")], {})


def answer_to(*words: str) -> str:
    with pytest.raises(Finished) as caught:
        read_plan(words, {})
    return caught.value.text


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_built_from_its_config_alone(tmp_path, name):
    plan = plan_from(folder_of(tmp_path, name))
    published = model_config_from_hf(PUBLISHED[name], mtp=True)
    assert config_differences(plan.model, published) == unsaid(published)
    assert plan.model.vocab_size == published.vocab_size


@pytest.mark.parametrize("row", zoo_rows(), ids=str)
def test_flags_describe_every_model_of_the_public_table(row):
    assert unsaid(model_config(row)) == []


@pytest.mark.parametrize("more", ARCHITECTURES)
def test_flags_of_a_model_give_the_same_model(more):
    assert unsaid(plan_of(more).model) == []


def test_flags_of_a_model_give_the_layer_of_multi_token_prediction():
    model = plan_of(
        "--mtp-num-layers 2 --mtp-mixer gated_delta_net --mtp-feed-forward mlp --linear-key-head-dim 24"
    ).model
    assert model.mtp is not None and model.mtp.layer is not None
    assert model_flags(model)["mtp_mixer"] == "gated_delta_net"
    again = rebuilt_from_flags(model)
    assert (
        config_differences(replace(again, layers=(again.mtp_layer,)), replace(model, layers=(model.mtp_layer,))) == []
    )


def test_a_config_has_the_lowest_precedence_and_its_values_have_an_origin(tmp_path):
    folder = folder_of(tmp_path, "Mixtral-8x7B")
    plan = plan_from(folder, "--num-layers 2")
    assert (len(plan.model.layers), plan.model.hidden_size) == (2, 4096)
    (line,) = [line for line in plan.resolved_yaml.splitlines() if line.startswith("  hidden-size:")]
    assert line.split() == ["hidden-size:", "4096", "#", f"{tmp_path}/config.json"]


def test_settings_without_a_flag_are_noted(tmp_path):
    notes = plan_from(folder_of(tmp_path, "Moonlight-16B-A3B")).notes
    assert any("no flag for: layers 0-26 mixer norm eps: 1e-05, published 1e-06" in note for note in notes)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"rope_type": "linear", "factor": 2.5}, "scaling_factor: 2.0, published 2.5"),
        ({**LLAMA3, "high_freq_factor": 8.0}, "high_freq_factor: 4.0, published 8.0"),
        ({**LLAMA3, "low_freq_factor": 2.0}, "low_freq_factor: 1.0, published 2.0"),
        (
            {**LLAMA3, "original_max_position_embeddings": 4096, "high_freq_factor": 2.0},
            "original_max_positions: 8192, published 4096",
        ),
    ],
)
def test_settings_that_change_results_and_have_no_flag_are_rejected(tmp_path, change, said):
    with pytest.raises(FlagErrors) as problems:
        plan_from(folder_of(tmp_path, "Qwen3-30B-A3B", rope_scaling=change))
    report = problems.value.report()
    assert f"no flag describes its layers 0-47 mixer rope {said}" in report and "without --from-hf-config" in report
    for scaling in (LLAMA3, {"rope_type": "linear", "factor": 2.0}):
        plan = plan_from(folder_of(tmp_path, "Qwen3-30B-A3B", rope_scaling=scaling))
        published = model_config_from_hf({**PUBLISHED["Qwen3-30B-A3B"], "rope_scaling": scaling})
        assert config_differences(plan.model, published) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_agrees_with_the_config_it_came_from(tmp_path, name):
    folder = folder_of(tmp_path, name)
    words = ("--from-hf-config", folder, "--check-against-hf", folder)
    if unsaid(model_config_from_hf(PUBLISHED[name])):
        with pytest.raises(AnotherModel, match="mixer norm eps"):
            read_plan(words, {})
    else:
        assert answer_to(*words) == f"The flags describe the model of {folder}/config.json."


def test_differences_are_printed_as_a_table_and_set_the_exit_code(tmp_path):
    folder = folder_of(tmp_path, "DeepSeek-V3")
    words = f"--from-hf-config {folder} --check-against-hf {folder} --rotary-base 5000 --moe-router-topk 4"
    with pytest.raises(AnotherModel) as caught:
        read_plan(words.split(), {})
    assert caught.value.code == ExitCode.CONFIG
    assert str(caught.value).splitlines() == [
        f"2 differences from {folder}/config.json:",
        "  layers 0-60 mixer rope base: 5000.0, published 10000.0",
        "  layers 3-60 feed_forward router topk: 4, published 8",
        "",
        "In flags:",
        "  flag               this run  published",
        "  --rotary-base      5000.0    10000.0",
        "  --moe-router-topk  4         8",
    ]


def test_training_options_are_shown_but_are_not_differences(tmp_path):
    folder = folder_of(tmp_path, "GPT-OSS-20B")
    text = answer_to("--from-hf-config", folder, "--check-against-hf", folder, "--hidden-dropout", "0.1")
    assert text.splitlines()[0].endswith("Choices of this run:")
    assert text.splitlines()[-1].split() == ["--hidden-dropout", "0.1", "0.0"]


def test_mtp_layers_are_a_training_option(tmp_path):
    folder = folder_of(tmp_path, "DeepSeek-V3")
    text = answer_to("--from-hf-config", folder, "--check-against-hf", folder, "--mtp-num-layers", "0")
    assert text.splitlines()[-1].split() == ["--mtp-num-layers", "not", "set", "1"]


def test_an_incompletely_described_model_cannot_be_compared(tmp_path):
    with pytest.raises(FlagErrors) as caught:
        read_plan(["--check-against-hf", folder_of(tmp_path, "Mixtral-8x7B"), "--hidden-size", "12"], {})
    required = [problem.what for problem in caught.value.problems]
    assert required == [
        "--num-layers is required",
        "--max-position-embeddings is required",
        "--num-attention-heads is required",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"model_type": "llama"}', "has model type llama, which is not supported. Supported model types: mixtral"),
        ('{"model_type": "mixtral"}', "has no hidden_size"),
        (json.dumps({**PUBLISHED["Qwen3-30B-A3B"], "head_dim": "x"}), "holds an invalid value"),
        (json.dumps({**PUBLISHED["Qwen3-30B-A3B"], "num_attention_heads": 0}), "holds an invalid value"),
        (json.dumps({**PUBLISHED["Qwen3-30B-A3B"], "num_hidden_layers": 0}), "holds an invalid value"),
    ],
)
@pytest.mark.parametrize("option", ["--from-hf-config", "--check-against-hf"])
def test_a_config_without_a_model_is_rejected(tmp_path, option, text, sentence):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(FlagErrors) as caught:
        read_plan([option, str(tmp_path)], {})
    (problem,) = caught.value.problems
    assert str(tmp_path / "config.json") in problem.what and sentence in problem.what


def test_model_without_equivalent_flags_is_detected():
    config = plan_of("--multi-latent-attention --rope-type rope --no-group-query-attention").model
    mixer = config.layers[0].mixer
    assert isinstance(mixer, MLAConfig)
    odd = replace(config.layers[0], mixer=replace(mixer, rope=replace(mixer.rope, interleaved=False)))
    assert unsaid(replace(config, layers=(odd,) * 4)) != []


def test_every_value_belongs_to_a_flag():
    registry = Registry.declared()
    for name in PUBLISHED:
        assert set(model_flags(model_config_from_hf(PUBLISHED[name]))) <= set(registry.flags)
