"""Trains a SentencePiece tokenizer.

    python tools/train_tokenizer.py --input data/corpus.jsonl --vocab-size 4096 --output data/tokenizer.model

The tokenizer is lossless: it preserves white space and encodes characters without a piece as bytes. Id 0 is <unk>,
id 1 is <eod> (end of document). The result is deterministic.
"""

import argparse
import io
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from megatron_moe.config.data import TokenizerConfig
from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.config.text import counted
from megatron_moe.data.textfiles import optional_package, read_documents, write_whole
from megatron_moe.data.tokenizer import load_tokenizer
from tools._common import reports_errors, run_main, tool_parser

_NUM_THREADS = 2
"""Number of SentencePiece threads; fixed, because the result depends on it."""
_LONGEST_LINE = 4000
"""Maximum line length in bytes. SentencePiece skips longer lines, so they are split."""
_REPORT_DOCUMENTS = 50
_NUM_SPECIAL = 2 + 256
"""Number of special pieces: <unk>, <eod> and one piece for each of the 256 byte values."""


def sample_lines(paths: list[Path], key: str, limit: int) -> Iterator[str]:
    """Evenly spaced lines of the documents, about `limit` bytes in total."""
    total = sum(len(text.encode()) for text in read_documents(paths, key))
    if total == 0:
        raise DataProblem(f"no text to train a tokenizer on in {', '.join(map(str, paths))}; check --input")
    seen = taken = 0
    for text in read_documents(paths, key):
        for line in chain.from_iterable(map(_split, text.splitlines())):
            size = len(line.encode()) + 1
            seen += size
            # Takes a line whenever the fraction taken is not above limit / total.
            if taken * total <= seen * limit:
                taken += size
                yield line


def _split(line: str) -> list[str]:
    """Splits a line that is longer than `_LONGEST_LINE`."""
    if len(line.encode()) < _LONGEST_LINE:
        return [line]
    length = (_LONGEST_LINE - 1) // 4  # characters have at most 4 bytes
    return [line[start : start + length] for start in range(0, len(line), length)]


def train(lines: Iterator[str], vocab_size: int, model_type: str) -> bytes:
    """Trains and serialises a model. Raises `DataProblem` if the text is too small for `vocab_size` pieces."""
    sentencepiece = optional_package("sentencepiece", "this tool")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            unk_id=0,
            eos_id=1,
            eos_piece="<eod>",
            bos_id=-1,
            pad_id=-1,
            num_threads=_NUM_THREADS,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:  # ValueError: the size is not a 32-bit integer
        raise DataProblem(
            f"SentencePiece could not make {vocab_size} pieces of this text ({error}); "
            f"use another --vocab-size or more text"
        ) from error
    return model.getvalue()


def report(path: Path, texts: Iterator[str]) -> str:
    """Summary line: vocabulary size and end-of-document id of the tokenizer, bytes per token over the first texts."""
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=path))
    sample = list(islice(texts, _REPORT_DOCUMENTS))
    num_bytes = sum(len(text.encode()) for text in sample)
    num_tokens = sum(len(tokenizer.encode(text)) for text in sample)
    return (
        f"{path}: {tokenizer.vocab_size} pieces, <eod> is {tokenizer.eod}, "
        f"{num_bytes / max(1, num_tokens):.2f} bytes per token over {counted(len(sample), 'document')}"
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="JSONL or plain text, also .gz and .zst")
    parser.add_argument("--json-key", default="text", help="key of the text in JSONL (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="output file of the model")
    parser.add_argument("--vocab-size", type=int, default=4096, help="number of pieces (default: %(default)s)")
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="(default: %(default)s)")
    parser.add_argument(
        "--sample-mb",
        type=float,
        default=4.0,
        help="size of the training text, evenly spaced lines, in MB (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if args.vocab_size <= _NUM_SPECIAL:
        parser.error(f"--vocab-size {args.vocab_size} must be larger than {_NUM_SPECIAL}: <unk>, <eod> and 256 bytes")
    if not 0 < args.sample_mb < inf:
        parser.error(f"--sample-mb {args.sample_mb:g} must be a finite number larger than 0")
    return args


@reports_errors
def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    begin = time.perf_counter()
    lines = sample_lines(args.input, args.json_key, int(args.sample_mb * 1e6))
    write_whole(args.output, train(lines, args.vocab_size, args.model_type))
    seconds = time.perf_counter() - begin
    print(f"{report(args.output, read_documents(args.input, args.json_key))}, made in {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    run_main(main)
