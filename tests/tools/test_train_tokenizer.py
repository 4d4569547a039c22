"""tools/train_tokenizer.py: training, sampling and rejected input."""

import json
import time
from pathlib import Path

import pytest

from megatron_moe.config.data import TokenizerConfig
from megatron_moe.data.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.thinned import thinned
from tools.make_corpus import main as make_corpus
from tools.train_tokenizer import main, sample_lines


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    assert make_corpus(["--output-dir", str(folder)]) == 0
    return folder / "corpus.jsonl"


def tokenizer_at(path: Path) -> Tokenizer:
    return load_tokenizer(TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=path))


def train(corpus: Path, output: Path, *options: str) -> Tokenizer:
    assert main(["--input", str(corpus), "--output", str(output), *options]) == 0
    return tokenizer_at(output)


def texts_of(corpus: Path, count: int) -> list[str]:
    return [json.loads(line)["text"] for line in corpus.read_text().splitlines()[:count]]


def test_quickstart_tokenizer_is_lossless_and_trained_within_a_minute(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    begin = time.process_time()  # CPU time of this process, independent of the machine's load
    tokenizer = train(corpus, tmp_path / "new" / "tokenizer.model", "--vocab-size", "4096")
    assert time.process_time() - begin < 40
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (4096, 1, -1)
    num_bytes = num_tokens = 0
    for text in [*texts_of(corpus, 60), " leading,  double\t\n\n  spaces \n", "中文 🙂"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod not in ids
        num_bytes, num_tokens = num_bytes + len(text.encode()), num_tokens + len(ids)
    assert num_bytes / num_tokens > 2.5
    assert "4096 pieces, <eod> is 1" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["tokenizer.model"]


@pytest.mark.parametrize("kind", thinned(["bpe", "unigram"]))
def test_the_same_text_gives_the_same_model(corpus: Path, tmp_path: Path, kind: str) -> None:
    options = ("--vocab-size", "500", "--model-type", kind, "--sample-mb", "0.2")
    first = train(corpus, tmp_path / "a.model", *options)
    assert first.fingerprint == train(corpus, tmp_path / "b.model", *options).fingerprint
    assert first.vocab_size == 500


def test_eod_in_text_is_not_the_eod_token(corpus: Path, tmp_path: Path) -> None:
    tokenizer = train(corpus, tmp_path / "a.model", "--vocab-size", "400", "--sample-mb", "0.1")
    assert tokenizer.eod not in tokenizer.encode("a <eod> b")
    assert tokenizer.decode(tokenizer.encode("a <eod> b")) == "a <eod> b"


def test_sampled_lines_are_spread_over_all_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [f"{document} {line} ....." for document in range(20) for line in range(50)]
    path.write_text("".join(json.dumps({"text": "\n".join(lines[at : at + 50])}) + "\n" for at in range(0, 1000, 50)))
    total = sum(len(line) + 1 for line in lines)
    sampled = list(sample_lines([path], "text", total // 4))
    assert sum(len(line) + 1 for line in sampled) == pytest.approx(total / 4, rel=0.02)
    assert {line.split()[0] for line in sampled} == {str(document) for document in range(20)}
    assert list(sample_lines([path], "text", 2 * total)) == lines


@pytest.mark.parametrize("character", ["a", "中", "🙂"])
def test_long_lines_are_split(tmp_path: Path, character: str) -> None:
    """SentencePiece would skip them."""
    text = character * 9001
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": text}))
    sampled = list(sample_lines([tmp_path / "in.jsonl"], "text", 10**9))
    assert "".join(sampled) == text and max(len(line.encode()) for line in sampled) < 4000


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        ('{"text": ""}\n', (), "no text to train a tokenizer on"),
        ('{"txt": "a"}\n', (), 'line 1: no text under the key "text"'),
        ('{"text": "a b c"}\n', ("--vocab-size", "4096"), "could not make 4096 pieces"),
        ('{"text": "a b c"}\n', ("--vocab-size", "4000000000"), "could not make 4000000000 pieces"),
        ('{"text": "\\ud83d"}\n', (), "line 1: unpaired surrogate"),
    ],
)
def test_invalid_input_is_reported_and_writes_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: str, options: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    assert main(["--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "t.model"), *options]) == 4
    error = capsys.readouterr().err
    assert sentence in error
    assert not (tmp_path / "t.model").exists()


@pytest.mark.parametrize(
    "options", ["--vocab-size 258", "--sample-mb 0", "--sample-mb nan", "--sample-mb inf", "--model-type word"]
)
def test_invalid_options_are_rejected(options: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--input", "a.jsonl", "--output", "t.model", *options.split()])
