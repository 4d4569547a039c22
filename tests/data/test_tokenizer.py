"""Every type of tokenizer, with small models trained by the tests."""

import base64
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from megatron_moe.config.data import TokenizerConfig
from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.data.tokenizer import load_tokenizer

TEXTS = [
    "def read(self, size=-1):\n    return self.buffer.read(size)\n",
    "  two  spaces, a\ttab and Größe 中文 🙂",
    "",
    "line\n\n\nline",
]


def train_sentencepiece(path: Path, **options) -> Path:
    model = io.BytesIO()
    settings = {
        "sentence_iterator": iter(["the cat sat on the mat", "a dog ran to the cat", "self read buffer size"] * 20),
        "model_writer": model,
        "vocab_size": 300,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "hard_vocab_limit": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(**{**settings, **options})
    path.write_bytes(model.getvalue())
    return path


def sentencepiece_config(path: Path) -> TokenizerConfig:
    return TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=path)


def train_huggingface(path: Path, specials: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    tokenizer.save(str(path))
    return tokenizer


def huggingface_config(path: Path) -> TokenizerConfig:
    return TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=path)


def tiktoken_entries(merges: list[bytes]) -> list[dict]:
    tokens = [bytes([number]) for number in range(256)] + merges
    return [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate(tokens)
    ]


def write_tiktoken(path: Path, merges: list[bytes]) -> Path:
    entries = tiktoken_entries(merges)
    if path.suffix == ".json":
        path.write_text(json.dumps(entries))
    else:
        path.write_text("".join(f"{entry['token_bytes']} {entry['rank']}\n" for entry in entries))
    return path


def tiktoken_config(path: Path, **changes) -> TokenizerConfig:
    return TokenizerConfig(
        tokenizer_type="TikTokenizer", tokenizer_model=path, **{"tiktoken_num_special_tokens": 10, **changes}
    )


@pytest.fixture(scope="module")
def every_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenizerConfig]:
    folder = tmp_path_factory.mktemp("tokenizers")
    train_huggingface(folder / "tokenizer.json", ["<|endoftext|>"])
    return {
        "sentencepiece": sentencepiece_config(train_sentencepiece(folder / "sp.model")),
        "huggingface": huggingface_config(folder / "tokenizer.json"),
        "tiktoken": tiktoken_config(write_tiktoken(folder / "tik.json", [b"re", b"rea", b"read"])),
        "byte": TokenizerConfig(tokenizer_type="ByteTokenizer"),
    }


@pytest.mark.parametrize("name", ["sentencepiece", "huggingface", "tiktoken", "byte"])
def test_text_round_trips(every_tokenizer: dict[str, TokenizerConfig], name: str) -> None:
    tokenizer = load_tokenizer(every_tokenizer[name])
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(type(number) is int and 0 <= number < tokenizer.vocab_size for number in ids)
        assert tokenizer.eod not in ids
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert load_tokenizer(every_tokenizer[name]).fingerprint == tokenizer.fingerprint


def test_fingerprints_of_different_models_differ(every_tokenizer: dict[str, TokenizerConfig], tmp_path: Path) -> None:
    configs = [*every_tokenizer.values(), TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10)]
    configs.append(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=11))
    configs.append(tiktoken_config(every_tokenizer["tiktoken"].tokenizer_model or tmp_path, tiktoken_pattern="v1"))
    configs.append(
        tiktoken_config(every_tokenizer["tiktoken"].tokenizer_model or tmp_path, tiktoken_num_special_tokens=11)
    )
    configs.append(sentencepiece_config(train_sentencepiece(tmp_path / "other.model", vocab_size=290)))
    assert len({load_tokenizer(config).fingerprint for config in configs}) == len(configs)


def test_null_tokenizer_encodes_numbers_and_eod_is_the_last_id() -> None:
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=128))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (128, 127, -1)
    assert tokenizer.encode(" 3 1  2\n") == [3, 1, 2]
    assert tokenizer.decode([3, 1, 2]) == "3 1 2"
    with pytest.raises(DataProblem, match="reads ids separated by spaces, not 'some text'"):
        tokenizer.encode("some text")


def test_ids_of_a_null_tokenizer_can_be_chosen() -> None:
    plain = load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10))
    chosen = load_tokenizer(
        TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10, null_tokenizer_eod_id=3, null_tokenizer_pad_id=4)
    )
    assert (plain.eod, plain.pad, chosen.eod, chosen.pad) == (9, -1, 3, 4)
    assert plain.fingerprint != chosen.fingerprint
    with pytest.raises(DataProblem, match="--null-tokenizer-pad-id 10 is not below --vocab-size 10"):
        load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=10, null_tokenizer_pad_id=10))


@pytest.mark.parametrize("vocab_size", [None, 0, 1])
def test_null_tokenizer_needs_a_vocabulary_size(vocab_size: int | None) -> None:
    with pytest.raises(DataProblem, match="--vocab-size"):
        load_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=vocab_size))


def test_byte_tokenizer_is_utf8() -> None:
    tokenizer = load_tokenizer(TokenizerConfig(tokenizer_type="ByteTokenizer"))
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (257, 256, -1)
    assert tokenizer.encode("aß") == [97, 195, 159]
    assert tokenizer.decode([97, 256, 195]) == "a\ufffd"


@pytest.mark.parametrize(
    ("options", "eod", "pad"),
    [
        ({"unk_id": 0, "eos_id": 1, "eos_piece": "<eod>", "bos_id": -1}, 1, -1),
        ({"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": 3}, 2, 3),
        ({"unk_id": 0, "bos_id": -1, "eos_id": -1, "user_defined_symbols": ["<|endoftext|>"]}, 1, -1),
    ],
)
def test_sentencepiece_ends_documents_with_its_end_piece(tmp_path: Path, options: dict, eod: int, pad: int) -> None:
    tokenizer = load_tokenizer(sentencepiece_config(train_sentencepiece(tmp_path / "sp.model", **options)))
    assert (tokenizer.eod, tokenizer.pad) == (eod, pad)
    path = train_sentencepiece(tmp_path / "no_end.model", unk_id=0, bos_id=-1, eos_id=-1)
    with pytest.raises(DataProblem, match="no token that ends a document"):
        load_tokenizer(sentencepiece_config(path))


def test_huggingface_folder_names_its_special_tokens(tmp_path: Path) -> None:
    train_huggingface(tmp_path / "tokenizer.json", ["<a>", "<b>", "<|endoftext|>"])
    by_name = load_tokenizer(huggingface_config(tmp_path))
    assert (by_name.eod, by_name.pad) == (2, -1)
    config = {"eos_token": {"content": "<b>", "lstrip": False}, "pad_token": "<a>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    by_config = load_tokenizer(huggingface_config(tmp_path))
    assert (by_config.eod, by_config.pad) == (1, 0)
    assert by_config.fingerprint != by_name.fingerprint


def test_a_pad_token_equal_to_eod_is_ignored(tmp_path: Path) -> None:
    train_huggingface(tmp_path / "tokenizer.json", ["<a>", "<b>"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<b>", "pad_token": "<b>"}))
    tokenizer = load_tokenizer(huggingface_config(tmp_path))
    assert (tokenizer.eod, tokenizer.pad) == (1, -1)


def test_huggingface_applies_the_post_processor(tmp_path: Path) -> None:
    tokenizer = train_huggingface(tmp_path / "tokenizer.json", ["<s>", "</s>"])
    plain = load_tokenizer(huggingface_config(tmp_path)).encode("read")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(huggingface_config(tmp_path)).encode("read") == [0, *plain]


def test_huggingface_ignores_truncation_and_padding_of_the_file(tmp_path: Path) -> None:
    tokenizer = train_huggingface(tmp_path / "tokenizer.json", ["</s>"])
    expected = tokenizer.encode(TEXTS[0]).ids
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=500)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(huggingface_config(tmp_path)).encode(TEXTS[0]) == expected


@pytest.mark.parametrize("name", ["tik.json", "tik.tiktoken"])
def test_tiktoken_ranks_follow_the_special_tokens(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(tiktoken_config(write_tiktoken(tmp_path / name, [b"re", b"rea", b"read"])))
    assert tokenizer.vocab_size == 10 + 256 + 3
    assert (tokenizer.eod, tokenizer.pad) == (2, 4)
    assert tokenizer.encode("read") == [10 + 258]
    assert tokenizer.encode("a</s><SPECIAL_9>") == [10 + 97, 2, 9]


def test_tiktoken_vocabulary_is_truncated_to_its_size(tmp_path: Path) -> None:
    path = write_tiktoken(tmp_path / "tik.json", [b"re", b"rea", b"read"])
    tokenizer = load_tokenizer(tiktoken_config(path, vocab_size=268))
    assert tokenizer.vocab_size == 268
    assert tokenizer.encode("read") == [10 + 257, 10 + 100]


def test_tiktoken_patterns_split_words_differently(tmp_path: Path) -> None:
    path = write_tiktoken(tmp_path / "tik.json", [b"aB", b"ab"])
    first = load_tokenizer(tiktoken_config(path, tiktoken_pattern="v1"))
    second = load_tokenizer(tiktoken_config(path, tiktoken_pattern="v2"))
    assert first.encode("aB") == [266]
    assert second.encode("aB") == [10 + 97, 10 + 66]
    assert load_tokenizer(tiktoken_config(path)).encode("aB") == second.encode("aB")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tiktoken_pattern": "v3"}, "must be v1 or v2, not v3"),
        ({"tiktoken_num_special_tokens": 3}, "number at most --tiktoken-num-special-tokens 3"),
        ({"tokenizer_special_tokens": ("<unk>", "</s>")}, "include <unk> <s> </s>"),
    ],
)
def test_contradictory_tiktoken_options_are_rejected(tmp_path: Path, changes: dict, sentence: str) -> None:
    path = write_tiktoken(tmp_path / "tik.json", [])
    with pytest.raises(DataProblem, match=sentence):
        load_tokenizer(tiktoken_config(path, **changes))


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer"])
def test_missing_model_is_named(tmp_path: Path, kind) -> None:
    with pytest.raises(DataProblem, match="absent.model does not exist"):
        load_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=tmp_path / "absent.model"))
    with pytest.raises(DataProblem, match=f"{kind} needs --tokenizer-model"):
        load_tokenizer(TokenizerConfig(tokenizer_type=kind))


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer"])
@pytest.mark.parametrize(
    "content", [b"", b"not a model", b"\xff\xfe\x00", b"[1, 2]", b'{"model": {}}', b'[{"rank": 0}]']
)
def test_a_model_of_another_kind_is_rejected_by_name(tmp_path: Path, kind, content: bytes) -> None:
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    with pytest.raises(DataProblem, match=r"foreign\.json"):
        load_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=path, tiktoken_num_special_tokens=10))


MISSING_RANK = json.dumps([entry for entry in tiktoken_entries([b"re", b"rea"]) if entry["rank"] != 200]).encode()


@pytest.mark.parametrize(
    ("kind", "content", "problem"),
    [
        ("HuggingFaceTokenizer", b'{"model": {"vocab": {}}}', ""),
        (
            "HuggingFaceTokenizer",
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
            "",
        ),
        ("HuggingFaceTokenizer", b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}', ""),
        ("HuggingFaceTokenizer", b'{"model": ' + b"[" * 100_000, ""),
        ("TikTokenizer", b"[]", ""),
        ("TikTokenizer", b'[{"rank": 0, "token_bytes": "YQ=="}, {"rank": "1", "token_bytes": "Yg=="}]', ""),
        ("TikTokenizer", b"[" * 100_000, ""),
        ("TikTokenizer", MISSING_RANK, ".*ranks must be 0, 1, 2"),
    ],
)
def test_a_damaged_model_is_rejected_by_name(tmp_path: Path, kind, content: bytes, problem: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataProblem, match=rf"tokenizer\.json{problem}"):
        load_tokenizer(
            TokenizerConfig(
                tokenizer_type=kind, tokenizer_model=tmp_path / "tokenizer.json", tiktoken_num_special_tokens=10
            )
        )


def test_special_tokens_that_are_not_strings_are_ignored(tmp_path: Path) -> None:
    train_huggingface(tmp_path / "tokenizer.json", ["</s>"])
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": 5, "pad_token": ["</s>"]}')
    tokenizer = load_tokenizer(huggingface_config(tmp_path))
    assert (tokenizer.eod, tokenizer.pad) == (0, -1)


@pytest.mark.parametrize("number", [-1, 99_999_999_999])
def test_invalid_ids_in_vocab_json_are_rejected(tmp_path: Path, number: int) -> None:
    config = gpt2_config(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(vocab | {"a": number}))
    with pytest.raises(DataProblem, match="check --vocab-file"):
        load_tokenizer(config)


def test_folder_without_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataProblem, match="cannot read tokenizer model .*tokenizer.json: No such file"):
        load_tokenizer(huggingface_config(tmp_path))


def test_a_repository_is_read_from_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("socket.socket.connect", lambda *arguments: pytest.fail("a connection was opened"))
    config = huggingface_config(Path("Qwen/Qwen3-30B-A3B"))
    repository = tmp_path / "home" / "hub" / "models--Qwen--Qwen3-30B-A3B"
    sentence = (
        f"Qwen/Qwen3-30B-A3B does not exist, and no tokenizer.json .* Hugging Face cache {tmp_path}/home/hub; "
        "nothing is downloaded: .* hf download Qwen/Qwen3-30B-A3B"
    )
    with pytest.raises(DataProblem, match=sentence):
        load_tokenizer(config)
    (repository / "snapshots" / "only-weights").mkdir(parents=True)
    with pytest.raises(DataProblem, match=sentence):
        load_tokenizer(config)
    expected = {}
    for revision, special in (("old", "<eod>"), ("new", "<eos>")):
        folder = repository / "snapshots" / revision
        folder.mkdir()
        train_huggingface(folder / "tokenizer.json", [special])
        expected[revision] = load_tokenizer(huggingface_config(folder)).fingerprint
    os.utime(repository / "snapshots" / "old" / "tokenizer.json", (1, 1))
    assert load_tokenizer(config).fingerprint == expected["new"], "the latest without a current revision"
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("old")
    assert load_tokenizer(config).fingerprint == expected["old"]
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    with pytest.raises(DataProblem, match=f"Hugging Face cache {tmp_path}/other; "):
        load_tokenizer(config)


def test_tokenizers_and_token_files_need_no_torch() -> None:
    modules = "tokenizer, indexed, samples, cache, textfiles"
    code = f"import sys; from megatron_moe.data import {modules}; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=300)


def gpt2_config(
    folder: Path, merges: str | None = None, specials: tuple[str, ...] = ("<|endoftext|>",)
) -> TokenizerConfig:
    """Writes GPT-2's two tokenizer files from a tokenizer that the test trains."""
    model = json.loads(train_huggingface(folder / "tokenizer.json", list(specials)).to_str())["model"]
    lines = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) if merges is None else merges)
    return TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer", vocab_file=folder / "vocab.json", merge_file=folder / "merges.txt"
    )


def test_gpt2_files_give_the_ids_of_tokenizer_json(tmp_path: Path) -> None:
    two = load_tokenizer(gpt2_config(tmp_path))
    one = load_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=tmp_path / "tokenizer.json")
    )
    assert (two.vocab_size, two.eod, two.pad) == (one.vocab_size, one.eod, -1)
    for text in TEXTS:
        assert two.encode(text) == one.encode(text)
        assert two.decode(two.encode(text)) == text


@pytest.mark.parametrize("merges", ["a b c\nd e f\n", "zzz yyy\n", "\n\nx\ny\n"])
def test_merges_of_another_vocabulary_are_rejected(tmp_path: Path, merges: str) -> None:
    with pytest.raises(DataProblem, match="does not hold the merges of its vocabulary"):
        load_tokenizer(gpt2_config(tmp_path, merges))


def test_gpt2_without_eod_or_files_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataProblem, match="no token that ends a document"):
        load_tokenizer(gpt2_config(tmp_path, specials=()))
    with pytest.raises(DataProblem, match="needs --vocab-file and --merge-file"):
        load_tokenizer(TokenizerConfig(tokenizer_type="GPT2BPETokenizer"))
