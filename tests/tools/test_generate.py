"""tools/generate.py continues texts with the model of a checkpoint."""

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

import pretrain_moe
from megatron_moe.checkpoint.manifest import MANIFEST
from megatron_moe.config.exit_codes import ExitCode
from tests.checkpoint.hf_models import configs, hf_model, saved
from tools import convert_checkpoint
from tools.generate import main, sample_token

RUN = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 16 --num-experts 2 --moe-router-topk 2 "
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --seq-length 16 "
    "--untie-embeddings-and-output-weights --max-position-embeddings 16 --micro-batch-size 1 --mock-data "
    "--train-iters 1 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 4 --device cpu"
)
"""Flags of a tiny model; its vocabulary of 4 is padded to 128."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint folder of a one-step run."""
    save = tmp_path_factory.mktemp("trained") / "ckpt"
    assert pretrain_moe.main([*RUN.split(), "--save", str(save), "--save-interval", "1"], {}) == ExitCode.OK
    return save


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint folder."""
    return shutil.copytree(trained, tmp_path / "ckpt")


def test_only_ids_of_the_vocabulary_are_chosen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--load", str(folder), "--prompt", "1 2", "--device", "cpu", "--temperature", "100"]
    assert main(words) == ExitCode.OK
    ids = [int(word) for word in capsys.readouterr().out.splitlines()[-1].split()]
    assert ids[:2] == [1, 2] and max(ids) < 4, ids


@pytest.mark.parametrize("content", [None, b"", b"{}"])
def test_a_damaged_manifest_is_named(content: bytes | None, folder: Path, tmp_path: Path, capsys) -> None:
    manifest = folder / "iter_0000001" / MANIFEST
    manifest.unlink()
    if content is not None:
        manifest.write_bytes(content)
    assert main(["--load", str(folder)]) == ExitCode.CHECKPOINT
    assert MANIFEST in capsys.readouterr().err
    assert convert_checkpoint.main(["--load", str(folder), "--save", f"hf:{tmp_path}/out"]) == ExitCode.CHECKPOINT
    assert MANIFEST in capsys.readouterr().err


def test_a_hugging_face_folder_is_sampled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(hf_model(configs()["qwen3_moe"]), tmp_path / "hf")
    assert main(["--load", f"hf:{folder}", "--max-new-tokens", "3", "--device", "cpu"]) == ExitCode.OK
    assert f"--- hf:{folder}, 3 new tokens" in capsys.readouterr().out
    assert main(["--load", f"hf:{tmp_path}/nowhere"]) == ExitCode.CONFIG
    assert f"{tmp_path}/nowhere/config.json cannot be read" in capsys.readouterr().err


def test_a_relative_tokenizer_is_found_from_another_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Tokenizer(models.WordLevel({"<|endoftext|>": 0, "word": 1}, unk_token="word")).save("tokenizer.json")
    words = RUN.replace("NullTokenizer --vocab-size 4", "HuggingFaceTokenizer --tokenizer-model tokenizer.json")
    assert pretrain_moe.main([*words.split(), "--save", "runs/ckpt", "--save-interval", "1"], {}) == ExitCode.OK
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    load = ["--load", str(tmp_path / "runs" / "ckpt")]
    assert main([*load, "--prompt", "word", "--max-new-tokens", "1", "--device", "cpu"]) == ExitCode.OK
    assert convert_checkpoint.main([*load, "--save", "hf:out"]) == ExitCode.OK
    assert Path("out/tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    changes = ["--tokenizer-model", "nowhere.json"]
    assert convert_checkpoint.main([*load, "--save", "hf:out2", *changes]) == ExitCode.DATA
    assert "nowhere.json does not exist" in capsys.readouterr().err


def test_the_smallest_temperature_selects_the_most_likely_id() -> None:
    assert sample_token(torch.tensor([1.0, 3.0, 2.0]).double(), 5e-324, 2, (0, "generate", 0)) == 1


def test_files_that_do_not_describe_the_model_may_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*RUN.split(), "--save", str(tmp_path / "ckpt"), "--save-interval", "1", "--bf16", "--fp8-format", "e4m3"]
    words += ["--fp8-recipe", "tensorwise", "--emulate-low-precision"]
    files = {"data-args-path": "1 corpus", "te-precision-config-file": "configs: {}\nmatchers: {}\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        words += [f"--{name}", str(tmp_path / name)]
    assert pretrain_moe.main(words, {}) == ExitCode.OK
    for name in files:
        (tmp_path / name).unlink()
    assert main(["--load", str(tmp_path / "ckpt"), "--prompt", "1", "--device", "cpu"]) == ExitCode.OK
    assert "new tokens" in capsys.readouterr().out
