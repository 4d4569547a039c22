"""Each user error ends in one message that names it, with its exit code and without a traceback."""

import importlib
import inspect
import json
from pathlib import Path

import pytest

from megatron_moe.config.exit_codes import ExitCode
from pretrain_moe import main as pretrain
from tests.end_to_end.tiny_run import MODEL, TRAINING

CONFIG, ENVIRONMENT, DATA, CHECKPOINT = ExitCode.CONFIG, ExitCode.ENVIRONMENT, ExitCode.DATA, ExitCode.CHECKPOINT
BYTES = "--tokenizer-type ByteTokenizer"
HUGGING_FACE = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
FILES = {
    "file": "no folder",
    "broken/config.json": "{broken",
    "list/config.json": "[]",
    "other/config.json": '{"model_type": "llama"}',
    "bare/config.json": '{"model_type": "qwen3_moe"}',
    "typed/config.json": '{"model_type": "qwen3_moe", "hidden_size": "many"}',
    "types.yaml": "num-layers: three\nlr: [1, 2]\nswiglu: maybe\n",
    "null.yaml": "num-layers: null\nadam-eps: null\n",
    "list.yaml": "- a\n",
    "tab.yaml": "num-layers: 3\n\thidden-size: 4\n",
    "syntax.py": "def (:\n",
    "key.jsonl": '{"txt": "a"}\n',
    "number.jsonl": '{"text": 3}\n',
    "empty.jsonl": "",
    "text.jsonl": json.dumps({"text": "hello"}) + "\n",
    "tokenizer.json": "{}",
    "lines/metrics.jsonl": "[]\n",
    "manifest/iter_0000001/manifest.json": "{",
}
"""Files in the folder in which the commands run."""

OF_THE_LAUNCHER = {
    "--moe-router-topkk 3": ("--moe-router-topkk is not a flag", "did you mean --moe-router-topk"),
    "--train-iters two": ("--train-iters two is not an integer",),
    "--lr nan": ("--lr nan is not a finite number",),
    "--train-iters 3 stray": ("--train-iters 3 stray takes one value, not 2",),
    "--config nowhere.yaml": ("nowhere.yaml cannot be read: No such file",),
    "--config types.yaml": ("3 problems", "--num-layers three", "(types.yaml:1)", "--lr 1 2 takes one value", "maybe"),
    "--config null.yaml": ("--num-layers cannot be null; give a value", "--adam-eps cannot be null; leave it out"),
    "--config list.yaml": ("list.yaml:1 must contain `name: value` entries",),
    "--config tab.yaml": ("tab.yaml:2 is not YAML",),
    "--recipe quikstart": ("did you mean quickstart?",),
    "--load broken": ("--load hf:broken",),
    "--load file": ("--load file is a file", "give a folder of checkpoints"),
    "--load hf:broken": ("broken/config.json is not JSON",),
    "--load hf:list": ("list/config.json is not a JSON object",),
    "--load hf:other": ("other/config.json: has model type llama, which is not supported. Supported model types:",),
    "--load hf:bare": ("bare/config.json: of model type qwen3_moe has no hidden_size; add it",),
    "--load hf:typed": ("typed/config.json: has hidden_size = 'many', which is not an integer",),
    "--tensor-model-parallel-size 2": ("does not divide 1 rank",),
    "--expert-model-parallel-size 8 --dry-run --world-size 4": ("nearest: --expert-model-parallel-size 4",),
    "--bf16 --fp16": ("several parameter dtypes",),
    "--import nowhere.py": ("--import nowhere.py: the Python file does not exist",),
    "--import syntax.py": ("--import syntax.py raised SyntaxError",),
    "--mixer nope": ("--mixer nope is not one of auto, attention",),
    "--split a,b": ("--split a,b is not a list of up to three weights",),
}
"""Flags -> parts of the message. All are found before torch is imported, with exit code 2."""

OF_TOOLS = [
    *(
        (f"{tool} {place}", CHECKPOINT, f"{place} contains no checkpoint iter_NNNNNNN")
        for tool in ("check_checkpoint", "inspect_checkpoint", "generate --load")
        for place in ("nowhere", "lines", "file")
    ),
    ("check_checkpoint manifest", CHECKPOINT, "crc32 is missing"),
    *((f"{tool} nowhere", DATA, "metrics.jsonl") for tool in ("summarize_run", "plot_run", "compare_losses lines")),
    *((f"{tool} lines", DATA, "line 1 is not a JSON object") for tool in ("summarize_run", "plot_run")),
    ("check_data nowhere", DATA, "nowhere.idx does not exist"),
    ("check_data nowhere --vocab-size -1", CONFIG, "not an integer of at least 1"),
    ("doctor --device cuda", ENVIRONMENT, "broken or missing: device"),
    ("doctor --constraints nowhere", CONFIG, "nowhere is not a file"),
    ("convert_checkpoint --load hf:other --save out", CONFIG, "model type llama"),
    ("convert_checkpoint --load hf:broken --save out", CHECKPOINT, "broken/config.json"),
    ("convert_checkpoint --load manifest --save out", CONFIG, "must be hf:FOLDER"),
    ("generate --load hf:bare", CONFIG, "has no hidden_size"),
    ("plan --recipe nope", CONFIG, "there is no recipe 'nope'"),
    ("plan --from-hf-config other --gpus 8", CONFIG, "model type llama"),
    ("plan --recipe quickstart --gpus 7", CONFIG, "no layout divides 7 GPUs"),
    ("plan --recipe m27 --gpu h900", CONFIG, "invalid choice: 'h900'"),
    ("launch --recipe quickstart --nodes 0 --dry-run", CONFIG, "not an integer of at least 1"),
    ("launch --recipe quickstart --nodes 1 --setup nowhere --dry-run", ENVIRONMENT, "--setup nowhere cannot be read"),
    ("show_schedule --pp 0", CONFIG, "must be at least 1"),
    ("show_schedule --draw x.bmp", CONFIG, "x.bmp does not end with"),
    ("make_corpus --output-dir file", ENVIRONMENT, "cannot write file"),
    *((f"{tool} --input nowhere", DATA, "cannot read nowhere") for tool in ("train_tokenizer", "preprocess_data")),
    *((f"{tool} --input empty.jsonl", DATA, "no text") for tool in ("train_tokenizer", "preprocess_data")),
    *((f"{tool} --input key.jsonl", DATA, "(the line has txt)") for tool in ("train_tokenizer", "preprocess_data")),
    *(
        (f"{tool} --input number.jsonl", DATA, "is not a JSON string")
        for tool in ("train_tokenizer", "preprocess_data")
    ),
    (f"preprocess_data --input text.jsonl {HUGGING_FACE} nowhere", DATA, "tokenizer model nowhere does not exist"),
    (f"preprocess_data --input text.jsonl {HUGGING_FACE} tokenizer.json", DATA, "is not a tokenizer.json"),
    ("verify_layout --recipe quickstart --steps 0", CONFIG, "not an integer of at least 1"),
    ("import_megatron --load nowhere --save out", CONFIG, "there is no training data"),
]
"""(Tool and options, exit code, part of the message)."""
NEEDED = {"train_tokenizer": "--output out.model", "preprocess_data": f"--output-prefix out {BYTES}"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("flags", OF_THE_LAUNCHER)
def test_a_mistake_in_the_launcher(flags, folder, capsys):
    before = contents(folder)
    argv = [*flags.split(), "--data-path", "nowhere", "--run-dir", "run"]
    described = "--recipe" in flags or "--load hf:" in flags
    assert pretrain(argv if described else [*MODEL, *TRAINING, *argv], {}) == CONFIG
    printed = capsys.readouterr()
    missing = [part for part in OF_THE_LAUNCHER[flags] if part not in printed.err]
    assert not missing and "Traceback" not in printed.err, printed.err
    assert contents(folder) == before


@pytest.mark.parametrize(("command", "code", "part"), OF_TOOLS, ids=[command for command, *_ in OF_TOOLS])
def test_a_mistake_in_a_tool(command, code, part, folder, capsys):
    before = contents(folder)
    name, *words = command.split()
    words = [*NEEDED.get(name, "").split(), *words]
    tool = importlib.import_module(f"tools.{name}").main
    needs_environment = len(inspect.signature(tool).parameters) == 2
    try:
        found = tool(words, {}) if needs_environment else tool(words)
    except SystemExit as error:  # argparse
        found = error.code
    printed = capsys.readouterr()
    assert found == code and part in printed.out + printed.err, printed
    assert contents(folder) == before
