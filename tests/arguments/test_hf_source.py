"""`--load hf:DIR` takes model flags, tokenizer and defaults from a Hugging Face folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from arguments.errors import Finished, FlagErrors
from arguments.read import read_plan
from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.model_differences import config_differences
from megatron_moe.config.run import RunPlan
from tools import plan as plan_tool

PUBLISHED = json.loads((Path(__file__).parents[1] / "data_files" / "hf_configs.json").read_text())
QWEN = {
    **next(values for values in PUBLISHED.values() if values["model_type"] == "qwen3_moe"),
    **{"router_aux_loss_coef": 0.001, "torch_dtype": "bfloat16"},
}


def folder_of(values: dict[str, Any], path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    (path / "tokenizer.json").write_text("{}")
    return path


def planned(words: str, vocab_size: int = 1000) -> RunPlan:
    """Plans a typical command line, which has only data and the number of iterations besides `--load hf:DIR`."""
    return read_plan([*words.split(), "--data-path", "x", "--train-iters", "10"], {}, lambda config: vocab_size)


def test_a_folder_gives_model_tokenizer_and_defaults(tmp_path):
    folder = folder_of(QWEN, tmp_path / "hf")
    found = planned(f"--load hf:{folder}")
    assert config_differences(found.model, model_config_from_hf(QWEN)) == []
    assert found.data.tokenizer.tokenizer_model == folder and found.data.seq_length == 4096
    assert found.model.moe_configs[0].router.aux_loss_coeffs == (QWEN["router_aux_loss_coef"],)
    assert found.batch.micro_batch_size == 1 and found.lr_schedule.max_lr == 1e-5 and found.precision.params == "bf16"
    (line,) = [note for note in found.notes if note.startswith(f"--load hf:{folder}: ")]
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    found_model = planned(f"--load hf:{folder}").data.tokenizer
    assert found_model.tokenizer_type == "SentencePieceTokenizer"
    assert found_model.tokenizer_model == folder / "tokenizer.model"
    for flag in (
        f"--hidden-size {QWEN['hidden_size']}",
        "--moe-aux-loss-coeff 0.001",
        "--seq-length 4096",
        "--lr 1e-5",
        "--bf16",
    ):
        assert flag in line
    assert "--tokenizer-model" in line


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_the_flags_named_at_start_describe_the_same_model(name, tmp_path):
    values = next(each for each in PUBLISHED.values() if each["model_type"] == name)
    folder = folder_of(values, tmp_path / "hf")
    found = planned(f"--load hf:{folder}")
    (note,) = [each for each in found.notes if each.startswith(f"--load hf:{folder}: ")]
    read = planned(note.removeprefix(f"--load hf:{folder}: "))
    assert read.model == found.model and read.data == found.data
    assert (read.batch, read.lr_schedule, read.precision) == (found.batch, found.lr_schedule, found.precision)


def test_the_balancing_loss_of_deepseek_is_that_of_sequences(tmp_path):
    values = next(each for each in PUBLISHED.values() if each["model_type"] == "deepseek_v3")
    for seq_aux, kind in ((True, "seq_aux_loss"), (False, "aux_loss")):
        folder = folder_of({**values, "aux_loss_alpha": 0.003, "seq_aux": seq_aux}, tmp_path / "hf")
        router = planned(f"--load hf:{folder}").model.moe_configs[0].router
        assert (router.balancing, router.aux_loss_coeffs) == ((kind,), (0.003,))


def test_the_coefficient_of_gpt_oss_is_not_used(tmp_path):
    folder = folder_of({**PUBLISHED["GPT-OSS-20B"], "router_aux_loss_coef": 0.9}, tmp_path)
    assert planned(f"--load hf:{folder}").model.moe_configs[0].router.aux_loss_coeffs == (0.0,)


def test_the_language_model_of_a_model_of_images_is_read(tmp_path):
    values = PUBLISHED["Qwen3.5-35B-A3B"]
    found = planned(f"--load hf:{folder_of(values, tmp_path)}")
    assert config_differences(found.model, model_config_from_hf(values["text_config"])) == []
    assert found.model.moe_configs[0].router.aux_loss_coeffs == (values["text_config"]["router_aux_loss_coef"],)
    assert found.precision.params == "bf16"


def test_a_folder_without_its_prefix_is_rejected(tmp_path):
    """Without the prefix hf:, the run would otherwise start from random weights."""
    folder = folder_of(QWEN, tmp_path / "hf")
    with pytest.raises(FlagErrors) as caught:
        planned(f"--load {folder}")
    assert [problem.remedy for problem in caught.value.problems] == [f"--load hf:{folder}"]
    (folder / "iter_0000010").mkdir()
    with pytest.raises(FlagErrors) as caught:
        planned(f"--load {folder}")
    assert not any("--load" in problem.what for problem in caught.value.problems)


def test_the_command_line_overrides_defaults_but_not_the_model(tmp_path):
    folder = folder_of(QWEN, tmp_path / "hf")
    more = (
        f"--seq-length 128 --lr 3e-4 --moe-aux-loss-coeff 0.01 --hidden-size {QWEN['hidden_size']} --moe-layer-freq 1"
    )
    found = planned(f"--load hf:{folder} {more} --attention-dropout 0.1")
    assert found.data.seq_length == 128 and found.lr_schedule.max_lr == 3e-4
    assert not any("--lr 1e-5" in note for note in found.notes)
    with pytest.raises(FlagErrors) as caught:
        planned(f"--load hf:{folder} --hidden-size 1024 --rotary-base 10000")
    said = [problem.what for problem in caught.value.problems]
    assert f"--hidden-size 1024 contradicts {QWEN['hidden_size']} of {folder}/config.json" in said
    assert f"--rotary-base 10000 contradicts {float(QWEN['rope_theta'])} of {folder}/config.json" in said


def test_files_may_change_the_model(tmp_path):
    folder, path = folder_of(QWEN, tmp_path / "hf"), tmp_path / "longer.yaml"
    path.write_text("rotary-base: 5e6\n")
    changed = f"--load hf:{folder} --config {path}"
    plan = planned(changed)
    assert plan.model.layers[0].mixer.rope.base == 5e6
    last = len(plan.model.layers) - 1
    differing = f"layers 0-{last} mixer rope base: 5000000.0, published 1000000.0"
    what = f"the model differs from {folder}/config.json: {differing}"
    assert f"{what}; an export needs another config.json" in plan.notes
    exporting = "--save-hf-interval 1 --run-dir s"
    assert not any("differs from" in note for note in planned(f"--load hf:{folder} {exporting}").notes)

    with pytest.raises(FlagErrors) as caught:
        planned(f"{changed} {exporting}")
    (problem,) = caught.value.problems
    assert problem.what == f"{what}; exports would have that config.json" and "--save-hf-config" in problem.remedy
    other = folder_of({**QWEN, "rope_theta": 5e6}, tmp_path / "other")
    assert planned(f"{changed} {exporting} --save-hf-config {other}")
    path.write_text("rotary-base: 5e6\nqk-layernorm: false\nmoe-router-topk: 3\nmoe-ffn-hidden-size: 8\n")
    assert any("; 1 more; an export" in note for note in planned(changed).notes)


def test_layers_without_weights_are_left_out(tmp_path):
    deepseek = next(values for values in PUBLISHED.values() if values.get("num_nextn_predict_layers"))
    folder = folder_of(deepseek, tmp_path / "hf")
    names = {"model.embed_tokens.weight": "a"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert planned(f"--load hf:{folder}").model.mtp is None
    names[f"model.layers.{deepseek['num_hidden_layers']}.eh_proj.weight"] = "a"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert planned(f"--load hf:{folder}").model.num_mtp == deepseek["num_nextn_predict_layers"]


def test_layers_with_names_of_their_own_are_found(tmp_path):
    sizes = {"hidden_size": 64, "vocab_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes |= {"n_groups": 2, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_routed_experts": 8}
    sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}
    patterns = {"num_nextn_predict_layers": 1, "hybrid_override_pattern": "ME", "mtp_hybrid_override_pattern": "*E"}
    nemotron = {"model_type": "nemotron_h", "mlp_hidden_act": "relu2", "num_hidden_layers": 2, **sizes, **patterns}
    folder = folder_of(nemotron, tmp_path)
    assert planned(f"--load hf:{folder}", 100).model.mtp is None
    names = {"weight_map": {"mtp.layers.1.final_layernorm.weight": "model-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(names))
    model = planned(f"--load hf:{folder}", 100).model
    assert model.num_mtp == 1 and model.mtp_layer.mixer.registered_as == "attention" and model.mtp_layer.is_moe


@pytest.mark.parametrize(("name", "state"), [("", "has no config.json"), ("/nowhere", "is not a folder")])
def test_a_folder_without_a_config_is_missing(name, state, tmp_path, capsys):
    location, sentence = f"hf:{tmp_path}{name}", f"--load hf:{tmp_path}{name}: {tmp_path}{name} {state}"
    with pytest.raises(FlagErrors) as caught:
        planned(f"--load {location}")
    (problem,) = caught.value.problems
    assert problem.what == f"{sentence}, and no other flags describe the model"
    assert plan_tool.main(["--load", location]) == ExitCode.CONFIG
    assert sentence in capsys.readouterr().err


def test_a_model_is_planned_from_its_folder_alone(tmp_path, capsys):
    folder = folder_of({**QWEN, "num_hidden_layers": 2}, tmp_path / "hf")
    words = ["--from-hf-config", str(folder), "--gpu", "h100", "--gpus", "2", "--best", "1"]
    assert plan_tool.main([*words, "--write", str(tmp_path / "plans")]) == ExitCode.OK
    assert "give --tokens or --train-iters" in capsys.readouterr().out
    assert plan_tool.main([*words, "--tokens", "1e12"]) == ExitCode.OK
    assert " GPU hours" in capsys.readouterr().out
    with pytest.raises(Finished) as caught:
        written = str(tmp_path / "plans" / "plan-01.yaml")
        read_plan(["--config", written, "--dry-run=json", "--mock-data", "--train-iters", "9"], {})
    assert json.loads(caught.value.text)["memory"]["fits"]


def test_a_model_that_no_family_computes_is_not_exported_during_training(tmp_path):
    folder = folder_of(QWEN, tmp_path / "hf")
    words = f"--from-hf-config {folder} --seq-length 128 --micro-batch-size 1 --lr 1 --run-dir {tmp_path}/run"
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder} --save-hf-interval 5"
    assert planned(f"{words} {tokenizer}").checkpoint.hf_description is not None
    with pytest.raises(FlagErrors, match="(?s)no model family .*--qk-l2-norm"):
        planned(f"{words} {tokenizer} --no-qk-layernorm --qk-l2-norm")
