"""Builds a text corpus from the standard library of this Python, which every machine has.

    python tools/make_corpus.py --output-dir data/quickstart

Writes `corpus.jsonl`, one {"text": ...} per source or documentation file, and with --text also `corpus.txt`. Test
packages are excluded. Files are ordered by a hash of their paths, so that any part of the corpus is a fair sample.
"""

import hashlib
import io
import json
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.text import counted, num_bytes_text
from megatron_moe.data.textfiles import TEXT_SEPARATOR, write_whole
from tools._common import reports_errors, run_main, tool_parser

_EXCLUDED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_SUFFIXES = frozenset({".py", ".rst", ".txt"})
_MIN_BYTES = 1_000_000
"""Minimum size of the standard library's text. A smaller library has no sources on disk or is a zip file."""


def corpus_files(library: Path) -> list[Path]:
    """Source and documentation files below `library`, ordered by a hash of their relative paths."""
    found = []
    for folder, folders, files in os.walk(library):
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        for name in files:
            generated = name.startswith("_sysconfigdata")
            if not generated and (Path(name).suffix in _SUFFIXES or name.startswith("LICENSE")):
                found.append(Path(folder, name))
    return sorted(found, key=lambda path: hashlib.sha256(path.relative_to(library).as_posix().encode()).digest())


def read_text(path: Path) -> str | None:
    """Text of a file; None if it is blank or cannot be decoded. Python files are decoded as their coding line says."""
    content = path.read_bytes()
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0] if path.suffix == ".py" else "utf-8"
        text = content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return None
    return text if text.strip() else None


def documents(library: Path) -> Iterator[str]:
    """Text of every file of the corpus."""
    yield from filter(None, map(read_text, corpus_files(library)))


def write_corpus(library: Path, output_dir: Path, *, plain_text: bool) -> dict[Path, int]:
    """Writes each corpus file atomically; returns path -> size in bytes."""
    texts = list(documents(library))
    size = sum(len(text.encode()) for text in texts)
    if size < _MIN_BYTES:
        raise EnvironmentProblem(
            f"the standard library at {library} has {size:,} bytes of text in {len(texts)} files, too few for a "
            f"corpus; use a Python with installed sources, or give your own text to tools/preprocess_data.py"
        )
    print(f"{counted(len(texts), 'document')}, {num_bytes_text(size)} of text from {library}")
    contents = {"corpus.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts)}
    if plain_text:
        contents["corpus.txt"] = "".join(f"{text.rstrip()}\n{TEXT_SEPARATOR}\n" for text in texts)
    for name, content in contents.items():
        write_whole(output_dir / name, content.encode())
    return {output_dir / name: len(content.encode()) for name, content in contents.items()}


@reports_errors
def main(argv: Sequence[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write into; created if missing")
    parser.add_argument("--text", action="store_true", help="write corpus.txt as well")
    args = parser.parse_args(argv)
    sizes = write_corpus(Path(sysconfig.get_path("stdlib")), args.output_dir, plain_text=args.text)
    for path, size in sizes.items():
        print(f"{path}: {num_bytes_text(size)}")
    return 0


if __name__ == "__main__":
    run_main(main)
