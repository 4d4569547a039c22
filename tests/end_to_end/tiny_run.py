"""Command line of a tiny run: a byte-level MoE on sources of the standard library."""

import json
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tests.helpers.programs import run_script
from tests.helpers.ranks import REPOSITORY

MODEL = """
--num-layers 3 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-layer-freq ([0]*1+[1]*2)
--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type aux_loss --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--seq-length 64 --max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0
--tokenizer-type ByteTokenizer --make-vocab-size-divisible-by 8
""".split()
TRAINING = """
--micro-batch-size 2 --global-batch-size 8 --train-iters 12 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine
--lr-warmup-iters 2 --log-interval 1 --eval-interval 6 --eval-iters 1 --split 90,10,0 --no-plots --device cpu
--no-progress-bar
""".split()


@lru_cache(maxsize=1)
def _sources() -> str:
    folder = Path(json.__file__).parent.parent
    return "".join((folder / name).read_text() for name in ("argparse.py", "tarfile.py"))


def make_data(folder: Path, parts: Sequence[str] = (), *, name: str = "corpus") -> str:
    """Writes byte-level `.bin/.idx` files of the given documents or of real text; returns their prefix."""
    text = folder / "corpus.jsonl"
    parts = parts or _sources().split("\nclass ")
    text.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
    command = ["tools/preprocess_data.py", "--input", text, "--output-prefix", folder / name]
    succeed(run_script(*command, "--tokenizer-type", "ByteTokenizer", "--append-eod"))
    return str(folder / f"{name}_text_document")


def arguments(data: str, run: Path | None, *more: str) -> list[str]:
    """Command line of a tiny run; later flags win."""
    line = [*MODEL, *TRAINING, "--data-path", data]
    if run is not None:
        line += ["--run-dir", str(run)]
    return [*line, *more]


def records(run: Path) -> list[dict]:
    """Rows of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def metric_values(run: Path, name: str) -> dict[int, float]:
    """iteration -> value of a metric; the first one where a run is also evaluated at its end."""
    return {row["iteration"]: row[name] for row in reversed(records(run)) if name in row}


def losses(run: Path) -> dict[int, float]:
    """iteration -> training loss."""
    return {row["iteration"]: row["lm loss"] for row in records(run) if "lm loss" in row}


def succeed(process: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process


def generate(checkpoints: Path, *flags: str) -> subprocess.CompletedProcess:
    """Runs tools/generate.py on the CPU."""
    return run_script(REPOSITORY / "tools" / "generate.py", "--load", checkpoints, "--device", "cpu", *flags)
