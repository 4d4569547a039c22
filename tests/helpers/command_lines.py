"""Small command lines for tests of the flags."""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from arguments.errors import FlagErrors, Problem
from arguments.read import read_plan
from megatron_moe.config.data import TokenizerConfig
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.run import RunPlan

SMALL = """
    --num-layers 4 --hidden-size 256 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --ffn-hidden-size 512 --moe-ffn-hidden-size 128 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm
    --moe-aux-loss-coeff 1e-2 --moe-layer-freq "([0]*1+[1]*3)" --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 128
    --max-position-embeddings 128 --micro-batch-size 4 --global-batch-size 16 --train-iters 200 --lr 1e-3
    --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 20 --tokenizer-type SentencePieceTokenizer
    --tokenizer-model x.model --data-path corpus_text_document --split 98,2,0 --eval-interval 50 --eval-iters 4
    --log-interval 10 --run-dir runs/a --save-interval 100
"""
"""Flags of a small Mixture-of-Experts model that all rules accept."""

VOCAB_SIZE = 1000


ROOT = Path(__file__).resolve().parents[2]
_COUNTED = """
import cProfile, sys
profile = cProfile.Profile()
profile.enable()
import pretrain_moe
code = pretrain_moe.main(sys.argv[1:], {})
profile.disable()
assert 'torch' not in sys.modules
print(sum(entry.callcount for entry in profile.getstats()), file=sys.stderr)
sys.exit(code)
"""


def calls_of(words: Sequence[str]) -> tuple[str, int]:
    """Runs the program in a separate process. Returns its output and its number of function calls, including imports,
    which is the same on every machine."""
    done = subprocess.run([sys.executable, "-c", _COUNTED, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, ExitCode.NOT_READY), done.stderr
    return done.stdout, int(done.stderr)


def vocab_size_of(config: TokenizerConfig) -> int:
    """Vocabulary size that replaces the tokenizer's."""
    return VOCAB_SIZE if config.vocab_size is None or config.tokenizer_type != "NullTokenizer" else config.vocab_size


def words(text: str, without: str = "") -> list[str]:
    """Words of a command line without the flags named in `without` and their values."""
    found, leave_out = [], False
    for word in shlex.split(text):
        if word.startswith("--"):
            leave_out = word in without.split()
        if not leave_out:
            found.append(word)
    return found


def plan_of(more: str = "", without: str = "", environ: Mapping[str, str] | None = None) -> RunPlan:
    """Plan of the small command line with flags added or removed."""
    argv = [*words(SMALL, without), *shlex.split(more)]
    return read_plan(argv, environ or {}, vocab_size_of=vocab_size_of)


def problems_of(more: str = "", without: str = "", environ: Mapping[str, str] | None = None) -> tuple[Problem, ...]:
    """Problems of the small command line with flags added or removed; empty if it is valid."""
    try:
        plan_of(more, without, environ)
    except FlagErrors as errors:
        return errors.problems
    return ()


def texts_of(more: str = "", without: str = "", environ: Mapping[str, str] | None = None) -> list[str]:
    """Messages of `problems_of`."""
    return [problem.what for problem in problems_of(more, without, environ)]
