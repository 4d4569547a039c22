"""Checks token files: `python tools/check_data.py data/my_text_document --vocab-size 50257 [--eod 50256]`

Takes prefixes of .bin/.idx pairs. Checks the index, the size of the .bin, and every token against the vocabulary;
prints statistics of documents, lengths and ids. Exit code 0: valid; 4: invalid.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from megatron_moe.config.data import OTHER_TOKENIZER_NAMES, TokenizerConfig
from megatron_moe.config.exit_codes import DataProblem, ExitCode
from megatron_moe.data.examine import DataReport, examine
from megatron_moe.data.tokenizer import load_tokenizer
from tools._common import reports_errors, run_main, tool_parser


@reports_errors
def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    vocab_size, eod, valid = options.vocab_size, options.eod, True
    if options.tokenizer_type or options.tokenizer_model:
        name = options.tokenizer_type or "HuggingFaceTokenizer"
        kind: Any = OTHER_TOKENIZER_NAMES.get(name, name)
        tokenizer = load_tokenizer(
            TokenizerConfig(tokenizer_type=kind, tokenizer_model=options.tokenizer_model, vocab_size=vocab_size)
        )
        vocab_size, eod = vocab_size or tokenizer.vocab_size, tokenizer.eod if eod is None else eod
    for prefix in options.prefixes:
        try:
            found = examine(Path(prefix.removesuffix(".bin").removesuffix(".idx")), vocab_size=vocab_size, eod=eod)
        except DataProblem as problem:
            print(f"{prefix}: DAMAGED\n    {problem}")
            valid = False
            continue
        print(f"{found.prefix}: {'valid' if not found.problems else 'INVALID'}")
        for name, value in _rows(found, vocab_size, eod):
            print(f"  {name:<22} {value}")
        for line in found.problems:
            print(f"    {line}")
        valid = valid and not found.problems
    return ExitCode.OK if valid else DataProblem.code


def _rows(found: DataReport, vocab_size: int | None, eod: int | None) -> Iterator[tuple[str, str]]:
    """(name, value) of the statistics."""
    yield "tokens", f"{found.num_tokens:,} of {found.dtype}"
    yield "sequences", f"{found.num_sequences:,}"
    yield "documents", f"{found.num_documents:,}, {found.num_empty:,} of them empty"
    if found.lengths is not None:
        each = found.lengths
        spread = f"{each.shortest:,} min, {each.median:,.1f} median, {each.mean:,.1f} mean, {each.longest:,} max"
        yield "tokens per document", spread
    if found.largest_id is not None:
        yield "ids", f"{found.smallest_id:,} to {found.largest_id:,}, {found.num_distinct:,} distinct"
        yield "vocabulary", "not given, not checked" if vocab_size is None else f"{vocab_size:,}"
    if eod is not None:
        yield "documents with end", f"{found.num_ended:,} end with id {eod}"


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__)
    parser.add_argument("prefixes", nargs="+", help="common prefixes of .bin and .idx files, as for --data-path")
    parser.add_argument("--vocab-size", type=int, help="number of ids; the tokenizer's when one is given")
    parser.add_argument("--eod", type=int, help="end-of-document id; the tokenizer's when one is given")
    kinds = get_args(get_type_hints(TokenizerConfig)["tokenizer_type"])
    parser.add_argument(
        "--tokenizer-type",
        choices=[kind for kind in (*kinds, *OTHER_TOKENIZER_NAMES) if kind != "GPT2BPETokenizer"],
        help="as for pretrain_moe.py (with a model: HuggingFaceTokenizer)",
    )
    parser.add_argument("--tokenizer-model", type=Path, help="as for pretrain_moe.py")
    return parser


if __name__ == "__main__":
    run_main(main)
