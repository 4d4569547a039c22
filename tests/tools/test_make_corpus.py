"""tools/make_corpus.py: files of the corpus and rejected libraries."""

import json
import sysconfig
from pathlib import Path

import pytest

from tools.make_corpus import corpus_files, documents, main, read_text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    assert main(["--output-dir", str(folder), "--text"]) == 0
    return folder


def test_corpus_is_at_least_8_megabytes_of_text(made: Path) -> None:
    texts = [json.loads(line)["text"] for line in (made / "corpus.jsonl").read_text().splitlines()]
    assert sum(len(text.encode()) for text in texts) >= 8_000_000
    assert all(text.strip() for text in texts)


def test_tests_and_installed_packages_are_left_out() -> None:
    library = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(library) for path in corpus_files(library)]
    assert Path("json/decoder.py") in files
    folders = {part for path in files for part in path.parts[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert {path.suffix for path in files} <= {".py", ".rst", ".txt", ""}


def small_library(folder: Path) -> Path:
    excluded = "test/t.py b/tests/t.py data.bin _sysconfigdata_x.py"
    for name in f"a.py b/c.py b/notes.txt LICENSE {excluded}".split():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n")
    return folder


def test_empty_and_undecodable_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# Gr\xfc\xdfe\n")
    (tmp_path / "wrong.py").write_bytes(b"# Gr\xfc\xdfe\n")
    (tmp_path / "wrong.txt").write_bytes(b"Gr\xfc\xdfe\n")
    (tmp_path / "empty.py").write_bytes(b"\n  \n")
    assert read_text(tmp_path / "wrong.py") is None
    assert read_text(tmp_path / "wrong.txt") is None
    assert list(documents(tmp_path)) == ["# -*- coding: latin-1 -*-\n# Grüße\n"]


def test_library_without_sources_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(small_library(tmp_path / "library")))
    assert main(["--output-dir", str(tmp_path / "out")]) == 3
    assert "too few for a corpus" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
