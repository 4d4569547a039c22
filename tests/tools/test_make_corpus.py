"""The corpus that every machine has."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from megatron_moe.data.textfiles import read_documents
from tools.make_corpus import corpus_files, documents, main, read_text

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    assert main(["--output-dir", str(folder), "--text"]) == 0
    return folder


def test_corpus_is_at_least_8_megabytes_of_text(made: Path) -> None:
    texts = [json.loads(line)["text"] for line in (made / "corpus.jsonl").read_text().splitlines()]
    assert sum(len(text.encode()) for text in texts) >= 8_000_000
    assert all(text.strip() for text in texts)


def test_plain_text_holds_the_same_documents(made: Path) -> None:
    lines = list(read_documents([made / "corpus.jsonl"], "text"))
    plain = list(read_documents([made / "corpus.txt"], "text"))
    assert [text.rstrip() for text in plain] == [text.rstrip() for text in lines]


def test_the_program_writes_the_same_bytes_again_and_prints_sizes(made: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "make_corpus.py"), "--output-dir", str(tmp_path / "new")]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300, check=True
    )
    assert (tmp_path / "new" / "corpus.jsonl").read_bytes() == (made / "corpus.jsonl").read_bytes()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["corpus.jsonl"]
    assert "MB of text" in run.stdout and "corpus.jsonl: " in run.stdout


def test_tests_and_installed_packages_are_left_out() -> None:
    library = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(library) for path in corpus_files(library)]
    assert Path("json/decoder.py") in files
    folders = {part for path in files for part in path.parts[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert {path.suffix for path in files} <= {".py", ".rst", ".txt", ""}


def small_library(folder: Path) -> Path:
    for name in (
        "a.py",
        "b/c.py",
        "b/notes.txt",
        "LICENSE",
        "test/t.py",
        "b/tests/t.py",
        "data.bin",
        "_sysconfigdata_x.py",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n")
    return folder


def test_order_depends_on_the_relative_paths_only(tmp_path: Path) -> None:
    names = []
    for folder in (tmp_path / "one", tmp_path / "two" / "deep"):
        library = small_library(folder)
        names.append([path.relative_to(library).as_posix() for path in corpus_files(library)])
    assert names[0] == names[1]
    assert sorted(names[0]) == ["LICENSE", "a.py", "b/c.py", "b/notes.txt"]


def test_files_that_are_no_text_or_empty_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# Gr\xfc\xdfe\n")
    (tmp_path / "wrong.py").write_bytes(b"# Gr\xfc\xdfe\n")
    (tmp_path / "wrong.txt").write_bytes(b"Gr\xfc\xdfe\n")
    (tmp_path / "empty.py").write_bytes(b"\n  \n")
    assert read_text(tmp_path / "wrong.py") is None
    assert read_text(tmp_path / "wrong.txt") is None
    assert list(documents(tmp_path)) == ["# -*- coding: latin-1 -*-\n# Grüße\n"]


def test_a_library_without_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(small_library(tmp_path / "library")))
    assert main(["--output-dir", str(tmp_path / "out")]) == 3
    assert "too few for a corpus" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_unwritable_place_ends_with_the_code_of_data(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--output-dir", str(tmp_path / "file")]) == 4
    assert "cannot write" in capsys.readouterr().err
