"""Dry runs and proxy runs of every shipped recipe, published layout and public model."""

import csv
import hashlib
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from arguments.errors import Finished, FlagErrors
from arguments.read import read_plan
from arguments.recipes import recipe_names
from tests.helpers.programs import run_ranks
from tests.helpers.zoo import command_line, zoo_rows

STARTS, TRAINS = "starts", "trains"
PROXY = ("--proxy", "--train-iters", "2", "--device", "cpu", "--no-progress-bar", "--no-plots")
_FILE = Path(__file__).parent / "published.tsv"
_PARTS = Path(__file__).parents[2] / "scripts" / "recipes" / "parts"


@dataclass(frozen=True)
class Case:
    """A command line, without `--dry-run`."""

    source: str
    name: str
    words: tuple[str, ...]


def shipped() -> list[Case]:
    return [Case("scripts/recipes", name, ("--recipe", name)) for name in recipe_names()]


def published() -> Iterator[Case]:
    """Rows of published.tsv: layouts of the Model Zoo, Megatron-LM's dev branch and Megatron-Bridge, as flags over our
    model files. The pipeline layout is `auto` if the source gives none. --max-position-embeddings is at least the
    sequence length."""
    with _FILE.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
            parts = [str(_PARTS / f"{part}.yaml") for part in ("pretrain", *row["parts"].split())]
            machine = ["--gpu", row["gpu"], "--world-size", row["gpus"]]
            yield Case(row["source"], row["recipe"], ("--config", *parts, *machine, *row["flags"].split()))


def models() -> list[Case]:
    """One rank of every public model whose layers this program has."""
    return [Case("tests/data_files/zoo_models.tsv", str(row), tuple(command_line(row))) for row in zoo_rows()]


def dry_run(case: Case) -> str:
    """Returns `STARTS`, or the first reason why the run would not start."""
    try:
        read_plan([*case.words, "--dry-run=json"], {}, vocab_size_of=lambda config: config.vocab_size or 512)
    except FlagErrors as error:
        return error.problems[0].what
    except Finished as finished:
        found = json.loads(finished.text)
        return STARTS if found["would_start"] else [*found["cannot_train_yet"], *found["missing_inputs"]][0]
    raise AssertionError("a dry run ends with a report")


def proxy_digest(case: Case, words: Sequence[str] = PROXY, num_ranks: int = 2) -> str:
    """Returns a digest of what the proxy runs, which is equal for rows that run the same. Raises FlagErrors."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{num_ranks}", "LOCAL_WORLD_SIZE": f"{num_ranks}"}
    plan = read_plan([*case.words, *words], ranks, vocab_size_of=lambda config: config.vocab_size or 512)
    run = replace(plan, environment_reasons=(), resolved_yaml="", command_line="", notes=())
    return hashlib.sha256(repr(run).encode()).hexdigest()[:16]


def proxy(case: Case) -> str:
    """Returns `TRAINS` if two CPU ranks complete two steps, else the reason that they print, or their last line."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        try:
            done = run_ranks(2, [*case.words, *PROXY, "--run-dir", run], cwd=Path(folder))
        except subprocess.TimeoutExpired:
            return "still running at the time limit"
        metrics = run / "metrics.jsonl"
        losses = metrics.read_text().count('"lm loss"') if metrics.exists() else 0
    return TRAINS if done.returncode == 0 and losses == 2 else failure(done)


def failure(done: subprocess.CompletedProcess) -> str:
    """Returns the first problem that an ended run printed, or its last line."""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    first = next((line.removeprefix("1. ") for line in lines if line.startswith("1. ")), None)
    return first or (lines[-1] if lines else "no output")
