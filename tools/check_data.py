"""Checks token files: `python tools/check_data.py data/my_text_document --vocab-size 50257 [--eod 50256]`

Takes prefixes of .bin/.idx pairs. Checks the index, the size of the .bin, and every token against the vocabulary;
prints statistics of documents, lengths and ids. Exit code 0: valid; 4: invalid.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from megatron_moe.config.exit_codes import DataProblem, ExitCode
from megatron_moe.data.indexed import IndexedTokens
from megatron_moe.data.tokenizer import load_tokenizer
from tools._common import TOKENIZER_TYPES, positive, reports_errors, run_main, tokenizer_config, tool_parser

_BLOCK_TOKENS = 1 << 24
_MAX_PROBLEMS = 20


@reports_errors
def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    vocab_size, eod, valid = options.vocab_size, options.eod, True
    if options.tokenizer_type or options.tokenizer_model:
        options.tokenizer_type = options.tokenizer_type or "HuggingFaceTokenizer"
        tokenizer = load_tokenizer(tokenizer_config(options))
        vocab_size, eod = vocab_size or tokenizer.vocab_size, tokenizer.eod if eod is None else eod
    for given in options.prefixes:
        prefix = given.removesuffix(".bin").removesuffix(".idx")
        try:
            rows, problems = check_tokens(Path(prefix), vocab_size, eod)
        except DataProblem as problem:
            print(f"{given}: DAMAGED\n    {problem}")
            valid = False
            continue
        print(f"{prefix}: {'INVALID' if problems else 'valid'}")
        for name, value in rows:
            print(f"  {name:<22} {value}")
        for line in problems:
            print(f"    {line}")
        valid = valid and not problems
    return ExitCode.OK if valid else DataProblem.code


def check_tokens(prefix: Path, vocab_size: int | None, eod: int | None) -> tuple[list[tuple[str, str]], list[str]]:
    """Reads every token of `<prefix>.bin`. Returns statistics as (name, value) pairs, and problems.

    Raises DataProblem if a file is missing or the index is invalid.
    """
    with IndexedTokens(prefix) as tokens:
        ends = np.concatenate(([0], np.cumsum(tokens.sequence_lengths, dtype=np.int64)))[tokens.document_bounds]
        lengths = np.diff(ends)
        distinct, problems = _check_ids(tokens, ends, vocab_size)
        rows = [
            ("tokens", f"{tokens.num_tokens:,} of {tokens.dtype.name}"),
            ("sequences", f"{len(tokens):,}"),
            ("documents", f"{len(lengths):,}, {(lengths == 0).sum():,} of them empty"),
        ]
        if len(lengths):
            spread = f"{np.median(lengths):,.1f} median, {lengths.mean():,.1f} mean"
            rows.append(("tokens per document", f"{lengths.min():,} min, {spread}, {lengths.max():,} max"))
        if len(distinct):
            rows.append(("ids", f"{distinct[0]:,} to {distinct[-1]:,}, {len(distinct):,} distinct"))
            rows.append(("vocabulary", "not given, not checked" if vocab_size is None else f"{vocab_size:,}"))
        if eod is not None:
            num_ended = sum(_last(tokens, document) == eod for document in np.flatnonzero(lengths))
            rows.append(("documents with end", f"{num_ended:,} end with id {eod}"))
    return rows, problems


def _check_ids(tokens: IndexedTokens, ends: np.ndarray, vocab_size: int | None) -> tuple[np.ndarray, list[str]]:
    """Returns the sorted distinct ids of a file, and messages about invalid ids. `ends`: token offsets of documents."""
    distinct = np.empty(0, dtype=np.int64)
    limit = np.iinfo(np.int64).max if vocab_size is None else vocab_size
    expected = "0 or more" if vocab_size is None else f"0 to {vocab_size - 1}"
    problems: list[str] = []
    num_invalid = 0
    stored = np.memmap(tokens.bin_path, dtype=tokens.dtype, mode="r") if tokens.num_tokens else distinct
    for start in range(0, len(stored), _BLOCK_TOKENS):
        block = stored[start : start + _BLOCK_TOKENS]
        distinct = np.union1d(distinct, block)
        if distinct[0] >= 0 and distinct[-1] < limit:
            continue
        places = np.flatnonzero((block < 0) | (block >= limit))
        num_invalid += len(places)
        for place in places[: _MAX_PROBLEMS - len(problems)]:
            document = int(np.searchsorted(ends, start + place, side="right")) - 1
            token = start + int(place) - int(ends[document])
            problems.append(f"document {document}, token {token}: id {block[place]}, expected {expected}")
    if num_invalid > len(problems):
        problems.append(f"and {num_invalid - len(problems)} more ids outside the vocabulary")
    return distinct, problems


def _last(tokens: IndexedTokens, document: int) -> int:
    """Id of the last token of a non-empty document."""
    first, end = tokens.document_bounds[document : document + 2]
    sequence = int(first + np.flatnonzero(tokens.sequence_lengths[first:end])[-1])
    return int(tokens.get(sequence)[-1])


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    parser.add_argument("prefixes", nargs="+", help="common prefixes of .bin and .idx files, as for --data-path")
    parser.add_argument("--vocab-size", type=positive, help="number of ids (default: that of the tokenizer)")
    parser.add_argument("--eod", type=int, help="end-of-document id (default: that of the tokenizer)")
    kinds = [kind for kind in TOKENIZER_TYPES if kind != "GPT2BPETokenizer"]
    default = "as for pretrain_moe.py (with a model: HuggingFaceTokenizer)"
    parser.add_argument("--tokenizer-type", choices=kinds, help=default)
    parser.add_argument("--tokenizer-model", type=Path, help="as for pretrain_moe.py")
    return parser


if __name__ == "__main__":
    run_main(main)
