"""The shell commands of README.md and of docs/development.md run as printed, in a folder where a user would type them.

Commands that need a cluster, many GPUs or minutes get more flags from `CHANGES`. Commands that install or test the
project itself are run by CI (`ELSEWHERE`).
"""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.end_to_end.tiny_run import MODEL, TRAINING
from tests.helpers.ranks import REPOSITORY, free_port

PAGES = ("README.md", "docs/development.md")
ELSEWHERE = {
    "python3 -m venv": "scripts/quickstart.sh",
    "bash scripts/install.sh": "scripts/quickstart.sh",
    "bash scripts/test.sh": ".ci/run",
}
"""Beginning of a command -> file that runs the same script."""
TINY = [*MODEL, *TRAINING[:-3], "--device", "cpu", "--mock-data", "--train-iters", "4", "--save-interval", "4"]
CHANGES = {
    "torchrun --nproc-per-node 8 pretrain_moe.py $MEGATRON": ("--nproc-per-node 8", "--nproc-per-node 2"),
    "bash scripts/quickstart.sh": ("quickstart.sh", "quickstart.sh --train-iters 60"),
    "bash scripts/launch.sh": ("--config my.yaml", "--config my.yaml --dry-run"),
    "torchrun --nproc-per-node 4 pretrain_moe.py --recipe m27": ("--recipe m27", "--recipe m27 --proxy"),
    "python pretrain_moe.py --recipe quickstart --import": ("--recipe", "--dry-run --recipe"),
    "python tools/preprocess_data.py": ("--workers 8", "--workers 1"),
}
"""Beginning of a command -> (words, their replacement)."""
NIGHTLY = ("quickstart.sh", "torchrun", "--proxy", "generate.py", "launch.sh")
"""Commands with these words start ranks or train for more than ten seconds."""
NOT_READY = "15"
"""Exit code of a dry run on a machine without the data or the GPUs."""


def commands_of(page: str) -> list[str]:
    """Commands of the fenced blocks, with continued lines joined and comments removed."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^( *)```bash\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = [line for _, block in blocks for line in block.replace("\\\n", " ").splitlines()]
    bare = [re.sub(r"\s+#.*", "", line).strip() for line in lines]
    return [re.sub(r"\s+", " ", line) for line in bare if line]


COMMANDS = [*dict.fromkeys((page, command) for page in PAGES for command in commands_of(page))]


def runs_elsewhere(command: str) -> str | None:
    return next((where for start, where in ELSEWHERE.items() if command.startswith(start)), None)


def cases() -> list:
    return [
        pytest.param(command, id=command, marks=[pytest.mark.slow] * any(word in command for word in NIGHTLY))
        for _, command in COMMANDS
        if not runs_elsewhere(command)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the repository with the files that the commands name: text, tokenizer, config and runs."""
    root = tmp_path_factory.mktemp("clone")
    for path in REPOSITORY.iterdir():
        if not path.name.startswith(".") and path.name not in ("runs", "data", "README.md"):
            (root / path.name).symlink_to(path)
    texts = ["def read(self, size):", "Once upon a time there was a tokenizer."] * 40
    (root / "my.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    tokenizer.save(str(root / "tokenizer.json"))
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (config,) = re.findall(r"```yaml\n *(# my\.yaml\n.*?) *```", readme, re.DOTALL)
    (root / "my.yaml").write_text(re.sub(r"^   ", "", config, flags=re.MULTILINE))
    (root / "zoo.yaml").write_text("MODEL_ARGS:\n" + "".join(f"  {line}\n" for line in _zoo()))
    (root / "data").mkdir()
    stubs = root / "stubs"
    stubs.mkdir()
    (stubs / "sbatch").write_text('#!/usr/bin/env bash\necho "sbatch $*"\n')
    (stubs / "sbatch").chmod(stat.S_IRWXU)
    run(root, f"python pretrain_moe.py {' '.join(map(_quoted, TINY))} --run-dir runs/my")
    shutil.copytree(root / "runs" / "my", root / "runs" / "other")
    run(root, next(command for _, command in COMMANDS if command.startswith("python tools/preprocess_data.py")))
    return root


def _zoo() -> list[str]:
    """The tiny model in the Model Zoo's form."""
    words = [*MODEL, *TRAINING, "--global-batch-size", "512"]
    starts = [place for place, word in enumerate(words) if word.startswith("--")] + [len(words)]
    pairs = [(words[start], words[start + 1 : end]) for start, end in zip(starts, starts[1:], strict=False)]
    return [f"{flag}: {json.dumps(' '.join(values)) if values else 'true'}" for flag, values in pairs]


def _quoted(word: str) -> str:
    return f"'{word}'" if "(" in word else word


def run(root: Path, command: str) -> str:
    """Runs a command in a shell and returns its output; fails if it fails."""
    for start, (words, others) in CHANGES.items():
        if command.startswith(start):
            assert words in command, f"{command}: {words}"
            command = command.replace(words, others)
    if "torchrun" in command:
        command = command.replace("torchrun", f"torchrun --master-port {free_port()}")
    environment = {
        **os.environ,
        "PATH": f"{root / 'stubs'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MEGATRON_ARGUMENTS": " ".join([*(word for word in TINY if "(" not in word and word != "--moe-layer-freq")]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=root, env=environment, capture_output=True, text=True, timeout=600
    )
    ready = [0, int(NOT_READY)] if "--dry-run" in command else [0]
    assert done.returncode in ready, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.parametrize("command", cases())
def test_the_command_runs(command: str, folder: Path) -> None:
    run(folder, command)


def test_every_other_command_is_run_by_ci() -> None:
    named = {command: where for _, command in COMMANDS if (where := runs_elsewhere(command))}
    assert len(COMMANDS) - len(named) > 15 and named
    for command, where in named.items():
        script = re.findall(r"scripts/\w+\.sh", command)
        text = (REPOSITORY / where).read_text(encoding="utf-8")
        assert all(name in text or f"/../{name}" in text for name in script), f"{where}: {command}"
