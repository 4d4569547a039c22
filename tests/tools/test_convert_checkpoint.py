"""tools/convert_checkpoint.py as a program."""

import json
from pathlib import Path

import pytest
import torch

from megatron_moe.config.exit_codes import ExitCode
from pretrain_moe import main as train
from tests.checkpoint.hf_models import configs, hf_model, saved
from tests.checkpoint.test_huggingface import change_config, tensors_in
from tests.end_to_end.tiny_run import MODEL as MODEL_FLAGS
from tests.end_to_end.tiny_run import TRAINING
from tests.helpers.checkpoint_files import verify
from tests.helpers.tolerances import EXACT
from tools import generate
from tools.convert_checkpoint import main

MODEL = "qwen3_moe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return saved(hf_model(configs()[MODEL]), tmp_path_factory.mktemp("published"))


def test_there_and_back_with_the_same_logits(folder: Path, tmp_path: Path, capsys):
    assert main(["--load", f"hf:{folder}", "--save", str(tmp_path / "ours"), "--compare-logits", "12"]) == ExitCode.OK
    assert verify(tmp_path / "ours" / "iter_0000000") == []
    back = ["--load", str(tmp_path / "ours"), "--save", f"hf:{tmp_path}/back", "--hf-config", str(folder)]
    assert main([*back, "--shard-size", "20KB", "--compare-logits", "12"]) == ExitCode.OK
    EXACT.check_all(tensors_in(tmp_path / "back"), tensors_in(folder), "tensors")
    said = capsys.readouterr().out
    assert said.count("logits on 12 positions, fp32") == 2 and said.count("the same at 12") == 2
    assert "67 padding rows of the vocabulary were left out" in said
    report = (tmp_path / "back" / "conversion.md").read_text()
    assert "| model.norm.weight | F32 | [32] | decoder.final_layernorm.weight |" in report
    assert "experts.5.up_proj.weight | F32 | [12, 32] | decoder.layers.1.mlp.experts.linear_fc1.weight[5] |" in report
    assert report.count("\n| model.") == len(tensors_in(folder)) - 1  # and lm_head


def test_a_checkpoint_of_the_quickstart_is_exported_for_transformers(tmp_path: Path, capsys):
    run = tmp_path / "run"
    data = "--mock-data --tokenizer-type NullTokenizer --vocab-size 96 --data-path".split()
    short = "--train-iters 2 --lr-warmup-iters 1 --save-interval 2 --seq-length 32 --device cpu".split()
    assert train(["--recipe", "quickstart", *data, *short, "--run-dir", str(run)], {}) == ExitCode.OK
    assert main(["--load", str(run), "--save", f"hf:{tmp_path}/hf", "--compare-logits", "12"]) == ExitCode.OK
    assert "the class Qwen3MoeForCausalLM of transformers loads the folder" in capsys.readouterr().out


def test_top_1_with_a_renormalised_softmax_is_converted(tmp_path: Path):
    """The router of such a model has no gradient, but its weights can be converted."""
    config = configs()[MODEL]
    one = {**config.to_dict(), "num_experts_per_tok": 1, "norm_topk_prob": True}
    folder = saved(hf_model(type(config)(**one)), tmp_path / "hf")
    words = ["--load", f"hf:{folder}", "--save", str(tmp_path / "ours"), "--compare-logits", "12"]
    assert main(words) == ExitCode.OK
    back = ["--load", str(tmp_path / "ours"), "--save", f"hf:{tmp_path}/back", "--hf-config", str(folder)]
    assert main(back) == ExitCode.OK
    EXACT.check_all(tensors_in(tmp_path / "back"), tensors_in(folder), "tensors")


def test_an_unknown_family_is_named_before_anything_is_missing(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "mamba2", "num_hidden_layers": "many"}')
    words = ["--load", f"hf:{tmp_path}", "--save", str(tmp_path / "ours")]
    assert main(words) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert "has model type mamba2, which is not supported. Supported model types: mixtral," in said
    assert "missing" not in said


def test_a_different_epsilon_of_latent_norms_is_noted(tmp_path: Path, capsys):
    """Covers Moonlight, whose flags have one epsilon, while transformers uses 1e-6 for the latent norms."""
    folder = saved(hf_model(configs()["deepseek_v3, yarn"]), tmp_path / "published")
    assert main(["--load", f"hf:{folder}", "--save", str(tmp_path / "ours")]) == ExitCode.OK
    capsys.readouterr()
    back = ["--load", str(tmp_path / "ours"), "--save", f"hf:{tmp_path}/back", "--hf-config", str(folder)]
    assert main(back) == ExitCode.OK
    EXACT.check_all(tensors_in(tmp_path / "back"), tensors_in(folder), "tensors")
    line = (
        "layers 0-2 mixer norm eps: 0.0001, published 1e-06: transformers uses the latter for the q and kv latent norms"
    )
    assert line in capsys.readouterr().out and line in (tmp_path / "back" / "conversion.md").read_text()


def test_a_run_with_kernels_of_a_gpu_is_converted_and_sampled_on_a_cpu(folder: Path, tmp_path: Path, capsys):
    words = ["--load", f"hf:{folder}", "--save", str(tmp_path / "ours"), "--compare-logits", "5"]
    assert main([*words, "--kernel-backend", "hopper"]) == ExitCode.OK
    assert "kernel-backend: hopper" in (tmp_path / "ours" / "iter_0000000" / "run.yaml").read_text()
    back = ["--load", str(tmp_path / "ours"), "--save", f"hf:{tmp_path}/back", "--hf-config", str(folder)]
    assert main([*back, "--compare-logits", "5"]) == ExitCode.OK
    capsys.readouterr()
    words = ["--load", str(tmp_path / "ours"), "--prompt", "1 2", "--max-new-tokens", "2", "--device", "cpu"]
    assert generate.main(words) == ExitCode.OK
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 2 ")


def test_logits_of_experts_of_an_odd_width_are_compared(tmp_path: Path):
    """Rows of 44 bytes are rejected by the grouped GEMM that transformers uses by default."""
    config = configs()[MODEL]
    odd = saved(hf_model(type(config)(**{**config.to_dict(), "moe_intermediate_size": 11})), tmp_path / "odd")
    assert main(["--load", f"hf:{odd}", "--save", str(tmp_path / "ours"), "--compare-logits", "9"]) == ExitCode.OK


@pytest.mark.parametrize("change", [{"model_type": "kimi_k2"}, {"use_cache": "yes"}], ids=["family", "type of a value"])
def test_a_folder_that_transformers_cannot_read_is_converted_with_a_note(change: dict, tmp_path: Path, capsys):
    folder = saved(hf_model(configs()["deepseek_v3, yarn"]), tmp_path / "published")
    change_config(folder, **change)
    words = ["--load", f"hf:{folder}", "--save", str(tmp_path / "ours"), "--compare-logits", "12"]
    assert main(words) == ExitCode.ENVIRONMENT
    assert "transformers cannot read" in capsys.readouterr().err
    assert verify(tmp_path / "ours" / "iter_0000000") == [] and (tmp_path / "ours" / "conversion.md").is_file()


@pytest.mark.parametrize("number", ["0", "-3", "many"])
def test_logits_are_compared_on_some_positions(number: str, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--load", "hf:a", "--save", "b", "--compare-logits", number])
    assert caught.value.code == ExitCode.CONFIG
    assert f"--compare-logits: {number!r} is not an integer of at least 1" in capsys.readouterr().err


def test_different_logits_set_the_exit_code(folder: Path, tmp_path: Path, capsys):
    words = ["--load", f"hf:{folder}", "--save", str(tmp_path), "--compare-logits", "12", "--rotary-base", "77"]
    assert main(words) == ExitCode.DRIFT
    assert "rope base: 77.0, published 10000.0" in capsys.readouterr().out


def test_a_contradictory_model_flag_is_rejected(folder: Path, tmp_path: Path, capsys):
    words = ["--load", f"hf:{folder}", "--save", str(tmp_path / "ours"), "--moe-ffn-hidden-size", "16"]
    assert main(words) == ExitCode.CHECKPOINT
    assert "another shape: decoder.layers.1.mlp.experts.linear_fc1.weight" in capsys.readouterr().err


def test_an_unknown_family_is_rejected(folder: Path, tmp_path: Path, capsys):
    other = saved(hf_model(configs()[MODEL]), tmp_path / "other")
    change_config(other, model_type="llama")
    assert main(["--load", f"hf:{other}", "--save", str(tmp_path / "ours")]) == ExitCode.CONFIG
    assert "model type llama" in capsys.readouterr().err


@pytest.mark.parametrize(
    "size",
    [{"hidden_size": 1 << 62}, {"vocab_size": 1 << 62}, {"num_experts": 60_000}, {"num_attention_heads": 1 << 62}],
    ids=str,
)
def test_a_model_far_too_large_for_its_files_is_not_built(size: dict, tmp_path: Path, capsys):
    other = saved(hf_model(configs()[MODEL]), tmp_path / "other")
    change_config(other, **size)
    assert main(["--load", f"hf:{other}", "--save", str(tmp_path / "ours")]) == ExitCode.CHECKPOINT
    assert f"parameters, but {other} holds 11" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--load", "a", "--save", "b"], ExitCode.CONFIG, "one of --load a and --save b must be hf:FOLDER"),
        (["--load", "hf:a", "--save", "hf:b"], ExitCode.CONFIG, "one of --load hf:a and --save hf:b must be hf:FOLDER"),
        (["--load", "nowhere", "--save", "hf:b"], ExitCode.CHECKPOINT, "nowhere contains no checkpoint"),
        (["--load", "hf:nowhere", "--save", "b"], ExitCode.CHECKPOINT, "nowhere/config.json does not exist"),
    ],
)
def test_impossible_conversions_are_rejected_with_one_message(words: list[str], code: ExitCode, said: str, capsys):
    assert main(words) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("size", ["many", "5TB", "GB", "²GB"])
def test_an_invalid_shard_size_is_rejected(size: str, folder: Path, tmp_path: Path, capsys):
    assert main(["--load", f"hf:{folder}", "--save", str(tmp_path / "ours")]) == ExitCode.OK
    words = ["--load", str(tmp_path / "ours"), "--save", f"hf:{tmp_path}/b", "--hf-config", str(folder)]
    assert main([*words, "--shard-size", size]) == ExitCode.CONFIG
    assert f"--shard-size {size} is not a size" in capsys.readouterr().err


def test_a_rounded_export_has_the_logits_of_the_rounded_model(folder: Path, tmp_path: Path, capsys):
    assert main(["--load", f"hf:{folder}", "--save", str(tmp_path / "ours")]) == ExitCode.OK
    words = ["--load", str(tmp_path / "ours"), "--save", f"hf:{tmp_path}/b", "--hf-config", str(folder)]
    assert main([*words, "--dtype", "bf16", "--shard-size", "20000", "--compare-logits", "8"]) == ExitCode.OK
    assert len(list((tmp_path / "b").glob("model-*.safetensors"))) > 1
    assert {value.dtype for value in tensors_in(tmp_path / "b").values()} == {torch.bfloat16}


def test_without_a_config_the_export_generates_one(folder: Path, tmp_path: Path, capsys):
    assert main(["--load", f"hf:{folder}", "--save", str(tmp_path / "ours")]) == ExitCode.OK
    words = ["--load", str(tmp_path / "ours"), "--save", f"hf:{tmp_path}/b", "--compare-logits", "8"]
    assert main(words) == ExitCode.OK
    said = capsys.readouterr().out
    assert (
        "config.json is generated, without tokenizer files; the class Qwen3MoeForCausalLM of transformers loads" in said
    )
    assert {path.name for path in (tmp_path / "b").iterdir()} >= {"config.json", "generation_config.json"}


def test_a_model_without_a_family_is_rejected_by_its_flags(folder: Path, tmp_path: Path, capsys):
    assert main(["--load", f"hf:{folder}", "--save", str(tmp_path / "ours")]) == ExitCode.OK
    words = ["--load", str(tmp_path / "ours"), "--save", f"hf:{tmp_path}/b", "--glu-linear-offset", "1"]
    assert main(words) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert "no model family of transformers computes this model" in said and "--glu-linear-offset" in said


def test_a_model_of_megatrons_defaults_is_rejected_by_its_flags(tmp_path: Path, capsys):
    """No family has GELU, LayerNorm, learned positions and biases, so no config.json can be generated."""
    defaults = "--no-swiglu --add-bias-linear --normalization LayerNorm --position-embedding-type learned_absolute"
    words = [*MODEL_FLAGS, *TRAINING, "--mock-data", "--train-iters", "4", *defaults.split()]
    export = ["--load", str(tmp_path / "run"), "--save", f"hf:{tmp_path}/b"]
    assert train([*words, "--run-dir", str(tmp_path / "run")], {}) == ExitCode.OK
    assert main(export) == ExitCode.CHECKPOINT
    assert "a run with --mock-data saves only with --save-interval" in capsys.readouterr().err
    assert train([*words, "--run-dir", str(tmp_path / "run"), "--save-interval", "4"], {}) == ExitCode.OK
    assert main(export) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert "no model family of transformers computes this model" in said
    for flag in ("--swiglu", "--normalization", "--position-embedding-type", "--add-bias-linear"):
        assert flag in said, flag


def test_a_hugging_face_folder_without_its_prefix_is_named(folder: Path, capsys):
    assert generate.main(["--load", str(folder), "--prompt", "a"]) == ExitCode.CHECKPOINT
    said = capsys.readouterr().err
    assert f"{folder} is a folder of a Hugging Face model, not of checkpoints" in said and f"hf:{folder}" in said


def test_a_config_with_an_invalid_length_is_rejected(folder: Path, tmp_path: Path, capsys):
    values = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": "long"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert main(["--load", f"hf:{tmp_path}", "--save", str(tmp_path / "ours")]) != ExitCode.OK
    assert "max_position_embeddings is 'long'" in capsys.readouterr().err


def test_help_about_flags_is_printed_by_the_converter(folder: Path, tmp_path: Path, capsys):
    words = ["--load", f"hf:{folder}", "--save", str(tmp_path / "ours"), "--print-config"]
    assert main(words) == ExitCode.OK and capsys.readouterr().out.startswith("model:")
    assert not (tmp_path / "ours").exists()
