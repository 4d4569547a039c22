"""The shell commands of README.md and of all pages in docs/ run as printed, in a folder where a user would type them.

Commands that need a cluster, many GPUs or minutes get more flags from `CHANGES`. Commands that install or test the
project itself are run by CI (`ELSEWHERE`), and those that time a GPU with the tests that need one. Every command must
print what its page promises: the output below it, or the text of `SHOWS`.
"""

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.end_to_end.tiny_run import MODEL, TRAINING
from tests.helpers.process_pool import free_port
from tests.helpers.programs import run_script
from tests.helpers.ranks import REPOSITORY
from tests.tools.test_import_megatron import MODELS as MEGATRON_MODELS

PAGES = ("README.md", *(str(path.relative_to(REPOSITORY)) for path in sorted((REPOSITORY / "docs").glob("*.md"))))
CONVERSION = "docs/conversion.md"
"""Page whose commands use the results of earlier commands."""
ELSEWHERE = {
    "python3 -m venv": "scripts/quickstart.sh",
    "bash scripts/install.sh": "scripts/quickstart.sh",
    "bash scripts/test.sh": ".ci/run",
}
"""Maps the beginning of a command to the test file that runs the same script."""
TINY = [*MODEL, *TRAINING[:-3], "--device", "cpu", "--mock-data", "--train-iters", "4", "--save-interval", "4"]
CHANGES = {
    "torchrun --nproc-per-node 8 pretrain_moe.py $MEGATRON": ("--nproc-per-node 8", "--nproc-per-node 2"),
    "bash scripts/launch.sh": ("--config my.yaml", "--config my.yaml --dry-run"),
    "torchrun --nproc-per-node 4 pretrain_moe.py --recipe m27": ("--recipe m27", "--recipe m27 --proxy"),
    "python pretrain_moe.py --recipe quickstart --import": (
        "--recipe",
        "--dry-run --data-path data/my_text_document --tokenizer-type HuggingFaceTokenizer "
        "--tokenizer-model tokenizer.json --recipe",
    ),
    "python tools/preprocess_data.py --input my.jsonl --output-prefix data": ("--workers 8", "--workers 1"),
    "python pretrain_moe.py --config my.yaml --log-throughput": ("--log-throughput", "--proxy --log-throughput"),
    "python benchmarks/harness/profile_step.py": ("my.yaml", "my.yaml --proxy"),
    "python benchmarks/harness/bench_step.py": ("600", "60"),
    "python pretrain_moe.py --load hf:models/Qwen3-30B-A3B --data-path my_text_document --train-iters 1000 --save-hf": (
        "--save-hf-interval 500",
        "--save-hf-interval 2",
    ),
    "python tools/generate.py --load hf:runs": ("iter_0001000", "iter_0000004"),
    "python pretrain_moe.py --load hf:": ("--train-iters 1000", "--train-iters 4 --save-interval 4 --device cpu"),
    "python pretrain_moe.py --from-hf-config": (
        "qwen3.yaml",
        "qwen3.yaml --seq-length 64 --train-iters 4 --device cpu",
    ),
}
"""Maps the beginning of a command to (words, their replacement)."""
NIGHTLY = (
    *("quickstart.sh", "torchrun", "--proxy", "generate.py", "launch.sh", "verify_layout", "--emulate-rank"),
    *("show_schedule", "--write plans", "--log-throughput", "compare_losses", "plot_run", "--format markdown"),
)
"""Commands with these words start ranks, train or search for more than five seconds."""
ON_A_GPU = "benchmarks/harness"
SHELL = re.compile(r"[|&;<>$*`\\]")
"""Characters that the shell interprets. Other commands of Python scripts run in forked processes."""
CODES = {
    "python tools/inspect_checkpoint.py runs/my --against": 12,  # they differ
    "python pretrain_moe.py --config zoo.yaml --dry-run": 15,  # the plan is valid, but the file names no data
}
"""Maps the beginning of a command to its exit code if that is not 0."""
SHOWS = (
    ("--print-config > mine.yaml", r"\n  hidden-size: 32 +# zoo\.yaml:\d+\n"),
    ("--dry-run=json > plan.json", r'"would_start": true'),
    ("--config zoo.yaml --dry-run", r"would not start\n  there is no training data"),
    ("--gpu-hour-price", r"GPU hours, cost [\d,]+"),
    ("--gpu rtx4090", r"on 1 RTX 4090[\s\S]*bound at RTX 4090's"),
    ("--import tests/examples/score_function.py", r"score function softsign: computed by plain torch"),
    ("--optimizer muon --muon-momentum", r"--muon-extra-scale-factor 0.2 \(command line\)"),
    ("--muon-tp-mode blockwise", r"--muon-tp-mode blockwise \(command line\)"),
    ("--qk-clip", r"--qk-clip on \(command line\)"),
    ("--setup site.sh", r"module load enroot\nexport NCCL_SOCKET_IFNAME=ib0"),
    ("for tp in", r"(sbatch \S+/layout/tp\d-ep\d+/job\.sbatch\n){4}"),
    ("for lr in", r"(sbatch \S+/lr-\de-4/job\.sbatch\n){2}"),
    ("--submit", r"^sbatch \S+/runs/my/job\.sbatch"),
    ("tools/launch.py", r"#SBATCH --nodes=4\n[\s\S]*#SBATCH --partition=batch\n"),
    ("--emulate-rank", r"Emulation of 1,024 ranks: "),
    ("--dry-run", r"\nstages, with parameters per rank\n[\s\S]*peak memory per rank[\s\S]*\ntime\n"),
    ("scripts/launch.sh", r"peak memory per rank"),
    ("--from-hf-config models/Qwen3-30B-A3B --gpus 8", r"layouts on 8 H100[\s\S]*\n 1\. TP1 [\s\S]*memory: "),
    ("tools/plan.py", r"\n 1\. TP1 [\s\S]* memory: [\s\S]* time: estimate ± 20%: "),
    ("tools/preprocess_data.py", r"wrote 80 documents[\s\S]*--data-path \S*my_text_document"),
    ("tools/check_data.py", r"my_text_document"),
    ("tools/summarize_run.py", r"s/step.*TFLOP/s.*tokens/s.*loss"),
    ("tools/compare_losses.py", r"iteration +runs/my +runs/other +relative\n"),
    ("tools/plot_run.py", r"^wrote runs/my/plots/run\.html"),
    ("tools/generate.py", r" new tokens, temperature 0\.8\n\n ?Once upon a time"),
    ("tools/verify_layout.py", r"\d+ ranks, \d+ steps: \d+ s\n"),
    ("tools/show_schedule.py", r"chart\.png"),
    ("tools/import_megatron.py", r"runs/megatron/checkpoints"),
    ("tools/check_checkpoint.py", r"iter_0000004"),
    ("runs/my --against runs/old", r"runs/my"),
    ("tools/inspect_checkpoint.py", r"iter_0000004"),
    ("--compare-logits 16", r"logits"),
    ("tools/convert_checkpoint.py", r"exports/my|checkpoints/qwen3"),
    (
        "scripts/quickstart.sh",
        r"validation loss at iteration 250 \| lm loss value: (3|4\.[01])[\s\S]*\ndef read\(self, ",
    ),
    ("--load hf:models", r"--load hf:models/Qwen3-30B-A3B:\s+--[\s\S]*finished after 4 iterations"),
    ("pretrain_moe.py", r"finished after \d+ iterations"),
    ("> site.sh", r"^module load enroot\nexport NCCL_SOCKET_IFNAME=ib0\n$"),
)
"""(words of a command, pattern that its output contains). The first entry that applies counts."""
NOT_COMMANDS = {
    ("docs/checkpoint-format.md", "checkpoints/"): "list of files",
    ("docs/checkpoint-format.md", '{"format": "megatron_moe checkpoint"'): "content of a file",
    ("docs/folding.md", "first pipeline stage"): "picture, compared by tests/config/test_documents.py",
    ("docs/folding.md", "tp     [0 1] [2 3]"): "picture, compared by tests/config/test_documents.py",
}
"""(page, beginning of a text or JSON block) -> what it is."""
CODE = ("python", "yaml")
"""Languages of blocks that other tests run: tests/docs/test_python.py, tests/examples and the fixtures of this file."""


class Block(NamedTuple):
    """Fenced block of a page."""

    language: str
    text: str


def blocks_of(page: str) -> list[Block]:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    found = re.findall(r"^( *)```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [Block(language, re.sub(f"^{indent}", "", block, flags=re.MULTILINE)) for indent, language, block in found]


def outputs_of(page: str) -> dict[str, str]:
    """Command -> output below it, of the blocks in which the line of a command starts with a dollar sign."""
    shown = [block.text.removeprefix("$ ").partition("\n") for block in blocks_of(page) if block.language == "console"]
    return {command: output.strip("\n") for command, _, output in shown}


def commands_of(page: str) -> list[str]:
    """Commands of the fenced blocks, with continued lines and loops joined and comments removed."""
    blocks = [block.text for block in blocks_of(page) if block.language in ("bash", "sh", "shell")]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found: list[str] = []
    for line in lines:
        bare = re.sub(r"\s+", " ", re.sub(r"(^|\s+)#.*", "", line)).strip()
        if found and found[-1].startswith("for ") and found[-1].count("for ") > found[-1].count("done"):
            found[-1] += f"{' ' if found[-1].endswith('do') else '; '}{bare}"
        elif bare:
            found.append(bare)
    return [*found, *outputs_of(page)]


COMMANDS = {command: page for page in PAGES for command in commands_of(page)}


def runs_elsewhere(command: str) -> str | None:
    return next((where for start, where in ELSEWHERE.items() if command.startswith(start)), None)


def cases() -> list[Any]:
    """All commands that do not need the results of earlier commands of their page."""
    return [
        pytest.param(command, id=command, marks=marks_of(command))
        for command, page in COMMANDS.items()
        if page != CONVERSION and not runs_elsewhere(command)
    ]


def marks_of(command: str) -> list[pytest.MarkDecorator]:
    if ON_A_GPU in command:
        return [pytest.mark.gpu1]
    return [pytest.mark.slow] * any(word in command for word in NIGHTLY)


def yaml_of(page: str, name: str) -> str:
    """Reads a YAML file shown on a page."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    (indent, shown), *_ = re.findall(rf"( *)```yaml\n( *# {name}\n.*?) *```", text, re.DOTALL)
    return re.sub(f"^{indent}", "", shown, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the repository with text, tokenizer, data and two runs."""
    root = tmp_path_factory.mktemp("clone")
    for path in REPOSITORY.iterdir():
        if not path.name.startswith(".") and path.name not in ("runs", "data", "README.md"):
            (root / path.name).symlink_to(path)
    texts = ["def read(self, size):", "Once upon a time there was a tokenizer."] * 40
    (root / "my.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "my.yaml").write_text(yaml_of("README.md", "my.yaml"))
    (root / "zoo.yaml").write_text("MODEL_ARGS:\n" + _as_yaml([*MODEL, *TRAINING, "--global-batch-size", "512"], "  "))
    (root / "data").mkdir()
    stubs = root / "stubs"
    stubs.mkdir()
    (stubs / "sbatch").write_text('#!/usr/bin/env bash\necho "sbatch $*"\n')
    (stubs / "sbatch").chmod(stat.S_IRWXU)
    run(root, f"python pretrain_moe.py {' '.join(map(_quoted, TINY))} --run-dir runs/my")
    for name in ("other", "layout/tp1-ep8"):
        shutil.copytree(root / "runs" / "my", root / "runs" / name)
    run(root, next(each for each in COMMANDS if each.startswith("python tools/preprocess_data.py")))
    return root


@pytest.fixture
def with_other_checkpoints(root: Path, tmp_path: Path) -> Path:
    """A clone that also has a Hugging Face model and a Megatron checkpoint."""
    from tests.checkpoint.hf_models import configs, hf_model  # imports transformers

    for path in root.iterdir():
        if path.name != "runs":
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(root / "runs" / "my", tmp_path / "runs" / "old")
    config = configs()["qwen3_moe"]
    config.vocab_size = 320
    model = tmp_path / "models" / "Qwen3-30B-A3B"
    hf_model(config).save_pretrained(model)
    shutil.copy(root / "tokenizer.json", model)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "qwen3.yaml").write_text(yaml_of(CONVERSION, "qwen3.yaml"))
    (tmp_path / "megatron.yaml").write_text(_as_yaml(MEGATRON_MODELS["gqa"].split()))
    with tarfile.open(REPOSITORY / "tests/data_files/megatron/megatron-core-0.19.2.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path / "archive")
    shutil.copytree(tmp_path / "archive" / "gqa" / "iter_0000003", tmp_path / "ckpts" / "iter_0010000")
    return tmp_path


def _as_yaml(words: list[str], indent: str = "") -> str:
    """Converts a command line to a file."""
    starts = [place for place, word in enumerate(words) if word.startswith("--")] + [len(words)]
    pairs = [(words[start], words[start + 1 : end]) for start, end in zip(starts, starts[1:], strict=False)]
    prefix = "--" if indent else ""
    return "".join(
        f"{indent}{prefix}{flag.removeprefix('--')}: {json.dumps(' '.join(values)) if values else 'true'}\n"
        for flag, values in pairs
    )


def _quoted(word: str) -> str:
    return f"'{word}'" if "(" in word else word


def shown_by(command: str) -> str | None:
    """Pattern of the output of a command; None if no entry of `SHOWS` applies."""
    return next((pattern for words, pattern in SHOWS if words in command), None)


def run(root: Path, command: str) -> None:
    """Runs a command in a shell and checks its exit code and its output, or the file that receives the output."""
    code = next((code for start, code in CODES.items() if command.startswith(start)), 0)
    page, pattern = COMMANDS.get(command), shown_by(command)
    stated = outputs_of(page).get(command) if page else None
    target = re.search(r" > (\S+)$", command)
    for start, (words, others) in CHANGES.items():
        if command.startswith(start):
            assert words in command, f"{command}: {words}"
            command = command.replace(words, others)
    if "torchrun" in command:
        command = command.replace("torchrun", f"torchrun --master-port {free_port()}")
    environment = {
        "PATH": f"{root / 'stubs'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MEGATRON_ARGUMENTS": " ".join([*(word for word in TINY if "(" not in word and word != "--moe-layer-freq")]),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "100",
    }
    words = shlex.split(command)
    if words[0] == "python" and words[1].endswith(".py") and not SHELL.search(command):
        done = run_script(*words[1:], cwd=root, **environment)
    else:
        shell, environment = ["bash", "-c", command], {**os.environ, **environment}
        environment.pop("VIRTUAL_ENV", None)  # scripts/quickstart.sh installs into an active environment
        done = subprocess.run(shell, cwd=root, env=environment, capture_output=True, text=True, timeout=1800)
    output = f"{done.stdout}{(root / target[1]).read_text() if target else ''}"
    assert done.returncode == code, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert stated is None or stated in output, f"{command}: the page shows another output\n{output[-2000:]}"
    assert stated or pattern is None or re.search(pattern, output), f"{command}: no {pattern!r} in\n{output[-2000:]}"


@pytest.mark.parametrize("command", cases())
def test_the_command_runs(command: str, root: Path) -> None:
    run(root, command)


@pytest.mark.slow
def test_the_commands_about_checkpoints_run_in_their_order(with_other_checkpoints: Path) -> None:
    commands = commands_of(CONVERSION)
    assert len(commands) > 10
    for command in commands:
        run(with_other_checkpoints, command)


def test_every_other_command_is_run_by_ci() -> None:
    named = {command: where for command in COMMANDS if (where := runs_elsewhere(command))}
    assert len(COMMANDS) - len(named) > 40 and named
    for command, where in named.items():
        script = re.findall(r"scripts/\w+\.sh", command)
        text = (REPOSITORY / where).read_text(encoding="utf-8")
        assert all(name in text or f"/../{name}" in text for name in script), f"{where}: {command}"


def test_all_commands_are_in_executed_code_blocks() -> None:
    """Commands may be neither in indented blocks nor in blocks of another language."""
    start = re.compile(r"^(?: {4}|\t)(?:python|bash|torchrun|make) \S", re.MULTILINE)
    for page in PAGES:
        text = re.sub(r"^( *)```(\w*)\n.*?^ *```", "", (REPOSITORY / page).read_text(), flags=re.DOTALL | re.MULTILINE)
        assert not start.search(text), page


def test_every_command_has_an_expected_output() -> None:
    missing = [
        command
        for command, page in COMMANDS.items()
        if not (runs_elsewhere(command) or ON_A_GPU in command or command in outputs_of(page) or shown_by(command))
    ]
    assert missing == []


def test_every_entry_of_the_tables_applies_to_a_command() -> None:
    for start in (*CHANGES, *CODES, *ELSEWHERE):
        assert any(command.startswith(start) for command in COMMANDS), start
    used = {next(words for words, _ in SHOWS if words in command) for command in COMMANDS if shown_by(command)}
    assert {words for words, _ in SHOWS} == used


def test_blocks_of_other_languages_are_no_commands() -> None:
    """A block is run, compared with the output of its command, or listed with the reason why it is neither."""
    found = set()
    for page in PAGES:
        for language, text in blocks_of(page):
            if language in ("bash", "sh", "shell", "console", *CODE):
                continue
            listed = [key for key in NOT_COMMANDS if key[0] == page and text.strip().startswith(key[1])]
            assert len(listed) == 1, f"{page}: the block {text[:60]!r} is not run"
            found |= set(listed)
    assert found == set(NOT_COMMANDS)
