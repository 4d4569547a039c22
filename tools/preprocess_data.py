"""Tokenizes text into token files for training.

    python tools/preprocess_data.py --input data/corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model --append-eod --workers 2

Reads JSONL, or .txt files with <|endoftext|> lines between documents; both may be compressed (.gz, .zst). Writes
`<prefix>_<key>_document.bin` and `.idx`; pass the path without suffix to --data-path. The output is written atomically
and does not depend on the number of workers.
"""

import argparse
import functools
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from megatron_moe.config.data import TokenizerConfig
from megatron_moe.config.exit_codes import DataProblem, EnvironmentProblem, ExitCode
from megatron_moe.config.text import counted, num_bytes_text
from megatron_moe.data.indexed import IndexedWriter, token_dtype, unfinished_files
from megatron_moe.data.textfiles import BadLine, TextChunk, format_of, parse_record, read_chunks
from megatron_moe.data.tokenizer import Tokenizer, load_tokenizer
from tools._common import (
    TOKENIZER_TYPES,
    map_in_order,
    reports_errors,
    run_main,
    start_workers,
    tokenizer_config,
    tool_parser,
)

_CHUNKS_AHEAD = 4
"""Maximum number of chunks in flight per worker."""
_SHOWN_BAD_LINES = 20
_SIZED = ("NullTokenizer", "TikTokenizer")


@dataclass
class Encoded:
    """Tokenized chunk of documents, with its malformed lines."""

    num_bytes: int
    """Bytes of the chunk's text, after decompression."""
    file_bytes: int
    """Bytes of the input file that were read for the chunk, before decompression."""
    documents: list[list[np.ndarray]] = field(default_factory=list)
    """Token ids: for every document a list with one int32 array per key."""
    bad: list[str] = field(default_factory=list)
    """"file, line n: reason" of every malformed line."""


@functools.cache
def tokenizer_of(config: TokenizerConfig) -> Tokenizer:
    """Loads the tokenizer once per process."""
    return load_tokenizer(config)


def encode(config: TokenizerConfig, keys: tuple[str, ...], append_eod: bool, chunk: TextChunk) -> Encoded:
    """Parses and tokenizes the records of a chunk, in order; runs in a worker."""
    tokenizer = tokenizer_of(config)
    end = [tokenizer.eod] if append_eod else []
    encoded = Encoded(num_bytes=sum(len(record.content) for record in chunk.records), file_bytes=chunk.file_bytes)
    for record in chunk.records:
        try:
            ids = [tokenizer.encode(text) for text in parse_record(record, keys)]
        except (BadLine, DataProblem) as error:  # NullTokenizer raises DataProblem
            encoded.bad.append(f"{record.path}, line {record.line}: {error}")
            continue
        encoded.documents.append([np.array(each + end if each else each, dtype=np.int32) for each in ids])
    return encoded


class Progress:
    """Displays progress in documents and bytes: as a bar on a terminal, otherwise as lines."""

    def __init__(self, log_interval: int, file_bytes: int) -> None:
        self.documents = self.tokens = self.empty = self.num_bytes = self.bad = 0
        self._interval = self._next_line = log_interval
        self._begin = time.perf_counter()
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("reading", total=file_bytes)
            self._bar.start()

    def __str__(self) -> str:
        seconds = max(time.perf_counter() - self._begin, 1e-9)
        rates = f"{self.documents / seconds:,.0f} docs/s, {num_bytes_text(self.num_bytes / seconds)}/s"
        return f"{counted(self.documents, 'document')}, {counted(self.tokens, 'token')} ({rates})"

    def show(self, file_bytes: int) -> None:
        """Updates the display. `file_bytes`: bytes of the input files processed since the last call."""
        if self._bar is not None:
            self._bar.update(self._task, advance=file_bytes, description=str(self))
        elif self.documents >= self._next_line:
            print(f"processed {self}", file=sys.stderr, flush=True)
            self._next_line = self.documents - self.documents % self._interval + self._interval

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def write_documents(
    results: Iterable[Encoded], writers: Sequence[IndexedWriter], progress: Progress, on_bad: str
) -> None:
    """Writes token ids to one writer per key; skips empty texts. `on_bad`: "fail" or "skip", for malformed lines."""
    for encoded in results:
        for reason in encoded.bad:
            if on_bad == "fail":
                raise DataProblem(f"{reason}; repair the line, or skip such lines with --on-bad-line skip")
            progress.bad += 1
            if progress.bad <= _SHOWN_BAD_LINES:
                print(f"skipped {reason}", file=sys.stderr)
        for document in encoded.documents:
            for ids, writer in zip(document, writers, strict=True):
                progress.empty += not len(ids)
                if len(ids):
                    writer.add_sequence(ids)
                    writer.end_document()
                    progress.tokens += len(ids)
            progress.documents += 1
        progress.num_bytes += encoded.num_bytes
        progress.show(encoded.file_bytes)


def preprocess(args: argparse.Namespace) -> Progress:
    config = tokenizer_config(args)
    encode_chunk = functools.partial(encode, config, tuple(args.json_keys), args.append_eod)
    dtype = token_dtype(tokenizer_of(config).vocab_size)
    chunks = (chunk for path in args.input for chunk in read_chunks(path))
    with ExitStack() as stack:
        pool = start_workers(args.workers) if args.workers > 1 else None
        if pool is not None:
            stack.callback(pool.shutdown, cancel_futures=True)
        progress = Progress(args.log_interval, sum(path.stat().st_size for path in args.input if path.is_file()))
        stack.callback(progress.stop)
        prefixes = [f"{args.output_prefix}_{key}_document" for key in args.json_keys]
        for path in (path for prefix in prefixes for path in unfinished_files(prefix)):
            print(f"{path} belongs to a process that may be running; remove it if that was killed", file=sys.stderr)
        writers = [stack.enter_context(IndexedWriter(prefix, dtype)) for prefix in prefixes]
        results = map_in_order(pool, encode_chunk, chunks, _CHUNKS_AHEAD * args.workers)
        write_documents(results, writers, progress, args.on_bad_line)
        if progress.tokens == 0:
            raise DataProblem(f"no text in {', '.join(map(str, args.input))}; check --input and --json-keys")
    return progress


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    add = parser.add_argument
    add("--input", type=Path, nargs="+", required=True, help="files to read, in this order")
    add("--output-prefix", required=True, help="path prefix of the output, without _<key>_document.bin")
    add("--json-keys", nargs="+", default=["text"], help="keys of the texts in JSONL, one pair of files per key")
    add("--tokenizer-type", choices=TOKENIZER_TYPES, required=True)
    add("--tokenizer-model", type=Path, help="file, or for HuggingFaceTokenizer the folder, of the tokenizer")
    add("--vocab-file", type=Path, help="GPT2BPETokenizer: JSON file with the vocabulary")
    add("--merge-file", type=Path, help="GPT2BPETokenizer: text file with the merges")
    add("--vocab-size", type=int, help="NullTokenizer: number of ids; TikTokenizer: truncates the vocabulary")
    add("--tiktoken-pattern", choices=("v1", "v2"))
    add("--tiktoken-num-special-tokens", type=int, default=1000)
    add(
        "--tokenizer-special-tokens",
        nargs="+",
        default=[],
        help="TikTokenizer: names of special tokens, as in training",
    )
    add("--null-tokenizer-eod-id", type=int, help="NullTokenizer: end-of-document id (default: the last id)")
    add("--append-eod", action="store_true", help="end every document with the end-of-document token")
    add("--workers", type=int, default=1, help="processes that tokenize (default: %(default)s)")
    add("--log-interval", type=int, default=1000, help="documents per progress line if not on a terminal")
    add("--on-bad-line", choices=("fail", "skip"), default="fail", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    args.tokenizer_special_tokens = tuple(args.tokenizer_special_tokens)  # hashable, for `tokenizer_of`
    if args.workers < 1 or args.log_interval < 1:
        parser.error("--workers and --log-interval must be at least 1")
    if len(args.json_keys) > 1 and any(format_of(path) == "text" for path in args.input):
        parser.error("plain text has no keys: give one --json-keys")
    if len(set(args.json_keys)) < len(args.json_keys):
        parser.error(f"--json-keys {' '.join(args.json_keys)} has duplicate keys")
    if args.vocab_size is not None and args.tokenizer_type not in _SIZED:
        parser.error(f"--vocab-size has no effect on {args.tokenizer_type}, whose vocabulary has a fixed size")
    return args


@reports_errors
def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    try:
        progress = preprocess(args)
    except BrokenProcessPool:
        raise EnvironmentProblem("a worker died, most likely out of memory; use fewer --workers") from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {args.output_prefix}: {error.strerror}; choose another path") from None
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return ExitCode.INTERRUPTED
    skipped = [counted(progress.bad, "malformed line")] if progress.bad else []
    skipped += [counted(progress.empty, "empty text")] if progress.empty else []
    print(f"wrote {progress}" + (f"; skipped {' and '.join(skipped)}" if skipped else ""))
    for key in args.json_keys:
        print(f"--data-path {args.output_prefix}_{key}_document")
    return ExitCode.OK


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as for Ctrl-C
    run_main(main)
