"""tools/preprocess_data.py: identical bytes for every input format and number of workers, and no incomplete files."""

import base64
import contextlib
import fcntl
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard

from arguments.flags import Registry
from arguments.values import allowed_values
from megatron_moe.config.data import TokenizerConfig
from megatron_moe.data.indexed import IndexedTokens
from megatron_moe.data.tokenizer import load_tokenizer
from tools.preprocess_data import main, parse
from tools.train_tokenizer import main as train_tokenizer

ROOT = Path(__file__).parent.parent.parent
BYTES = ("--tokenizer-type", "ByteTokenizer")
TEXTS = ["one two", "zwei ß", "", "three\nlines\n\n", "last"]


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def run(folder: Path, *options: str, name: str = "out", source: str = "in.jsonl") -> int:
    return main(["--input", str(folder / source), "--output-prefix", str(folder / name), *options])


def program(folder: Path, *options: str) -> dict:
    """Arguments of `subprocess` for the tool as a program."""
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(folder / "in.jsonl")]
    command += ["--output-prefix", str(folder / "out"), *options]
    return {"args": command, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, "text": True}


def decoded(prefix: Path) -> list[str]:
    tokens = IndexedTokens(prefix)
    return [bytes(tokens.get(number).tolist()).decode() for number in range(len(tokens))]


def output_of(folder: Path, name: str) -> tuple[bytes, bytes]:
    return tuple((folder / f"{name}_text_document{suffix}").read_bytes() for suffix in (".bin", ".idx"))  # type: ignore


def test_documents_become_sequences_and_empty_texts_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl(TEXTS))
    assert run(tmp_path, *BYTES) == 0
    assert decoded(tmp_path / "out_text_document") == [text for text in TEXTS if text]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        "out_text_document.bin",
        "out_text_document.idx",
    ]
    out = capsys.readouterr().out
    assert "wrote 5 documents" in out and "skipped 1 empty text" in out
    assert "docs/s" in out and "B/s" in out
    assert f"--data-path {tmp_path / 'out_text_document'}" in out


def test_append_eod_ends_every_document(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl(TEXTS))
    assert run(tmp_path, *BYTES, "--append-eod") == 0
    tokens = IndexedTokens(tmp_path / "out_text_document")
    assert [tokens.get(number)[-1] for number in range(len(tokens))] == [256] * 4
    assert tokens.get(0).tolist() == [*b"one two", 256]
    assert tokens.dtype == "uint16"


def test_every_json_key_has_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"q": "a", "a": "b"}\n{"q": "", "a": "d"}\n')
    assert run(tmp_path, *BYTES, "--json-keys", "q", "a") == 0
    assert decoded(tmp_path / "out_q_document") == ["a"]
    assert decoded(tmp_path / "out_a_document") == ["b", "d"]


def test_compressed_input_gives_the_same_files(tmp_path: Path) -> None:
    content = jsonl(TEXTS * 50)
    (tmp_path / "in.jsonl").write_bytes(content)
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "in.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(content))
    for name in ("in.jsonl", "in.jsonl.gz", "in.jsonl.zst"):
        assert run(tmp_path, *BYTES, source=name, name=f"from-{name}") == 0
        assert output_of(tmp_path, f"from-{name}") == output_of(tmp_path, "from-in.jsonl")


def test_plain_text_is_read_document_by_document(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\n<|endoftext|>\ntwo\nlines\n<|endoftext|>\n")
    assert run(tmp_path, *BYTES, source="in.txt") == 0
    assert decoded(tmp_path / "out_text_document") == ["one\n", "two\nlines\n"]


def test_several_inputs_are_read_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(jsonl(["b1", "b2"]))
    (tmp_path / "a.txt").write_text("a")
    inputs = [str(tmp_path / "b.jsonl"), str(tmp_path / "a.txt")]
    assert main(["--input", *inputs, "--output-prefix", str(tmp_path / "out"), *BYTES]) == 0
    assert decoded(tmp_path / "out_text_document") == ["b1", "b2", "a"]


def test_two_workers_write_the_bytes_of_one(tmp_path: Path) -> None:
    # Six chunks of a megabyte, of unequal work.
    texts = [f"document {number} " + "word " * (number * 7919 % 4000) for number in range(600)]
    (tmp_path / "in.jsonl").write_bytes(jsonl(texts))
    assert run(tmp_path, *BYTES, "--append-eod", name="one") == 0
    assert run(tmp_path, *BYTES, "--append-eod", "--workers", "2", name="two") == 0
    assert output_of(tmp_path, "one") == output_of(tmp_path, "two")


def test_program_runs_with_a_trained_tokenizer_and_workers(tmp_path: Path) -> None:
    texts = [f"def function_{number}(self):\n    return {number}\n" for number in range(300)]
    (tmp_path / "in.jsonl").write_bytes(jsonl(texts))
    model = tmp_path / "t.model"
    assert train_tokenizer(["--input", str(tmp_path / "in.jsonl"), "--output", str(model), "--vocab-size", "300"]) == 0
    options = f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {model} --append-eod --workers 2"
    call = program(tmp_path, *options.split(), "--log-interval", "100")
    done = subprocess.run(**call, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "processed 300 documents" in done.stderr
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=model))
    tokens = IndexedTokens(tmp_path / "out_text_document")
    assert len(tokens) == 300
    for number, text in enumerate(texts):
        ids = tokens.get(number).tolist()
        assert ids[-1] == tokenizer.eod
        assert tokenizer.decode(ids[:-1]) == text


def test_tokenizer_names_equal_those_of_the_launcher(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flag = Registry.declared().flags["tokenizer_type"]
    names = [name for name in allowed_values(flag.type) if flag.available(name)]
    for name in names:
        assert parse(["--input", "x", "--output-prefix", "y", "--tokenizer-type", name]).tokenizer_type == name
    assert {"Llama2Tokenizer", "GPTSentencePieceTokenizer"} < set(names)
    (tmp_path / "in.jsonl").write_bytes(jsonl(["a"]))
    assert run(tmp_path, "--tokenizer-type", "Llama2Tokenizer") == 4
    assert "--tokenizer-type SentencePieceTokenizer needs --tokenizer-model" in capsys.readouterr().err


def test_gpt2_tokenizer_files_are_accepted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl(["a"]))
    assert run(tmp_path, "--tokenizer-type", "GPT2BPETokenizer") == 4
    assert "needs --vocab-file and --merge-file" in capsys.readouterr().err
    files = ("--vocab-file", str(tmp_path / "vocab.json"), "--merge-file", str(tmp_path / "merges.txt"))
    (tmp_path / "vocab.json").write_text('{"a": 0, "<|endoftext|>": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    assert run(tmp_path, "--tokenizer-type", "GPT2BPETokenizer", *files) == 0
    assert IndexedTokens(tmp_path / "out_text_document").get(0).tolist() == [0]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_malformed_line_is_fatal_by_default_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture, workers: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl(["a", "b"]) + b'{"text": "c"\n' + jsonl(["d"]))
    assert run(tmp_path, *BYTES, "--workers", workers) == 4
    error = capsys.readouterr().err
    assert "in.jsonl, line 3: not JSON" in error and "--on-bad-line skip" in error
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_malformed_lines_are_skipped_and_counted_on_request(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl(["a"]) + b"nonsense\n" + jsonl(["b"]) + b'{"text": 1}\n[]\n')
    assert run(tmp_path, *BYTES, "--on-bad-line", "skip") == 0
    assert decoded(tmp_path / "out_text_document") == ["a", "b"]
    captured = capsys.readouterr()
    for line in (2, 4, 5):
        assert f"in.jsonl, line {line}: " in captured.err
    assert "skipped 3 malformed lines" in captured.out


NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "9")


def test_special_tokens_are_those_of_the_options(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl(["1 2"]))
    assert run(tmp_path, *NULL, "--append-eod", "--null-tokenizer-eod-id", "3") == 0
    assert IndexedTokens(tmp_path / "out_text_document").get(0).tolist() == [1, 2, 3]
    names = ("</s>", "<unk>", "<s>", "<mask>", "<pad>", "<cls>", "<sep>")
    ranks = [{"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode()} for byte in range(256)]
    (tmp_path / "vocab.json").write_text(json.dumps(ranks))
    tik = ("--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(tmp_path / "vocab.json"), "--append-eod")
    sizes = ("--tiktoken-num-special-tokens", "7", "--tokenizer-special-tokens", *names)
    assert run(tmp_path, *tik, *sizes) == 0
    assert IndexedTokens(tmp_path / "out_text_document").get(0).tolist() == [
        ord("1") + 7,
        ord(" ") + 7,
        ord("2") + 7,
        0,
    ]


def test_texts_without_valid_ids_are_malformed_lines(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl(["1 2", "3 x", "9", "4"]))
    assert run(tmp_path, *NULL) == 4
    assert "in.jsonl, line 2: NullTokenizer reads ids" in capsys.readouterr().err
    assert run(tmp_path, *NULL, "--on-bad-line", "skip") == 0
    assert "skipped 2 malformed lines" in capsys.readouterr().out
    assert len(IndexedTokens(tmp_path / "out_text_document")) == 2


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        (b"", BYTES, "no text in"),
        (jsonl(["", ""]), BYTES, "no text in"),
        (jsonl(["a"]), ("--tokenizer-type", "SentencePieceTokenizer"), "needs --tokenizer-model"),
        (jsonl(["a"]), ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/absent"), "does not exist"),
        (jsonl(["1 x"]), NULL, "reads ids"),
        (jsonl(["1 70000"]), NULL, "id 70000 is not below"),
        (jsonl(["1 -2"]), NULL, "id -2 is not below"),
        (jsonl(["1 99999999999"]), NULL, "is not below"),
        (b'{"text": "\\ud83d"}\n', BYTES, "in.jsonl, line 1: unpaired surrogate"),
        (b"[" * 100_000 + b"\n", BYTES, "in.jsonl, line 1: not JSON"),
    ],
)
def test_invalid_input_exits_with_one_message_and_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: bytes, options: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    assert run(tmp_path, *options) == 4
    assert sentence in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_missing_input_and_unwritable_output_are_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path, *BYTES) == 4
    assert "in.jsonl: No such file" in capsys.readouterr().err
    (tmp_path / "in.jsonl").write_bytes(jsonl(["a"]))
    assert run(tmp_path, *BYTES, name="in.jsonl/out") == 3
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        (*BYTES, "--workers", "0"),
        (*BYTES, "--log-interval", "0"),
        (*BYTES, "--on-bad-line", "ask"),
        ("--tokenizer-type", "NoTokenizer"),
        (*BYTES, "--vocab-size", "300"),
        (*BYTES, "--json-keys", "text", "text"),
        (*BYTES, "--json-keys", "a", "b", "--input", "in.txt"),
    ],
)
def test_invalid_options_exit_with_the_code_of_flag_errors(tmp_path: Path, options: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as leave:
        run(tmp_path, *options)
    assert leave.value.code == 2


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_files(signal_number: signal.Signals, tmp_path: Path) -> None:
    fifo = tmp_path / "in.jsonl"
    os.mkfifo(fifo)
    call = program(tmp_path, *BYTES, "--workers", "2")
    tool = subprocess.Popen(**call, stderr=subprocess.PIPE, start_new_session=True)
    # Opening waits for the tool to read, so it is inside its work; the input then never ends.
    with open(fifo, "wb", buffering=0) as source, contextlib.suppress(BrokenPipeError):
        source.write(jsonl(["a"] * 10))
        os.killpg(tool.pid, signal_number)
        # Python handles a signal that arrives just before read(2) after it returns, so the input continues.
        for _ in range(1200):
            if tool.poll() is not None:
                break
            source.write(jsonl(["a"]))
            time.sleep(0.05)
    _, error = tool.communicate(timeout=300)
    assert (tool.returncode, error.strip().splitlines()[-1]) == (130, "interrupted; nothing was written")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_incomplete_files_of_dead_processes_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl(TEXTS))
    left = tmp_path / "out_text_document.bin.writing-1"
    left.write_bytes(b"abc")
    ended = subprocess.Popen(["true"])
    ended.wait()
    stale = [tmp_path / f"out_text_document{suffix}.writing-{ended.pid}" for suffix in (".bin", ".idx")]
    for other in ("out_text_document.bin.writing-old", f"another_text_document.bin.writing-{ended.pid}"):
        (tmp_path / other).write_bytes(b"")
    for path in stale:
        path.write_bytes(b"abc")
    with open(stale[0]) as locked:  # as by a process of another host
        fcntl.flock(locked, fcntl.LOCK_EX)
        assert run(tmp_path, *BYTES) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"{path} belongs to a process that may be running; remove it if that was killed" for path in (left, stale[0])
    ]
    assert run(tmp_path, *BYTES) == 0
    assert left.exists() and not any(path.exists() for path in stale)
    assert len(list(tmp_path.glob("*.writing-*"))) == 3


def _small_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_full_disk_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(jsonl(["word " * 1000] * 40))
    done = subprocess.run(**program(tmp_path, *BYTES), capture_output=True, timeout=300, preexec_fn=_small_files)
    assert done.returncode == 3, done.stderr
    assert "cannot write" in done.stderr and "File too large" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
