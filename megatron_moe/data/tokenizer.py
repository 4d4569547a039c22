"""Tokenizers with a common interface and Megatron's names; nothing is downloaded.

`load_tokenizer` raises `DataProblem` if a model file is missing, of another kind, or has no end-of-document token,
and `EnvironmentProblem` if the required package is not installed.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megatron_moe.config.data import TokenizerConfig
from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.data.textfiles import optional_package

NO_TOKEN = -1
"""Id that stands for a missing token, e.g. of a tokenizer without padding token."""
_END_NAMES = ("<eod>", "<EOD>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_REPOSITORY = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")
_TIKTOKEN_SPECIALS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_TIKTOKEN_VOCAB = 1 << 17
_TIKTOKEN_PATTERNS = MappingProxyType(
    {
        # Letter sequences, and single digits.
        "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        # As v1, also split between lower and upper case.
        "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)


class Tokenizer(Protocol):
    """Converts between text and token ids."""

    vocab_size: int
    """Largest id + 1."""
    eod: int
    """End-of-document id."""
    pad: int
    """Padding id; -1 if there is no padding token, or if another special token has the same id."""
    fingerprint: str
    """Hash that changes when the tokenizer may encode a text differently."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Loads the tokenizer of `config`."""
    if config.tokenizer_type == "NullTokenizer":
        if config.vocab_size is None or config.vocab_size < 2:
            raise DataProblem(f"NullTokenizer needs --vocab-size of at least 2, it is {config.vocab_size}")
        return NullTokenizer(config.vocab_size, eod=config.null_tokenizer_eod_id, pad=config.null_tokenizer_pad_id)
    if config.tokenizer_type == "GPT2BPETokenizer":
        return GPT2BPETokenizer(config)
    if config.tokenizer_type == "ByteTokenizer":
        return ByteTokenizer()
    if config.tokenizer_model is None:
        raise DataProblem(f"--tokenizer-type {config.tokenizer_type} needs --tokenizer-model")
    if config.tokenizer_type == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(local_copy(config.tokenizer_model))
    if not config.tokenizer_model.exists():
        raise DataProblem(
            f"tokenizer model {config.tokenizer_model} does not exist; give a local path, nothing is downloaded"
        )
    if config.tokenizer_type == "SentencePieceTokenizer":
        return SentencePieceTokenizer(config.tokenizer_model)
    return TikTokenizer(config)


def local_copy(model: Path) -> Path:
    """Returns `model` if the path exists, else the copy of the Hugging Face repository `model` in the local cache.

    The cache has one folder `snapshots/<revision>` per downloaded revision; `refs/main` names the current revision.
    Never uses the network. Raises `DataProblem` if there is no copy.
    """
    if model.exists():
        return model
    problem = f"tokenizer model {model} does not exist"
    if not _REPOSITORY.fullmatch(str(model)):
        raise DataProblem(f"{problem}; give a local path, nothing is downloaded")
    cache = _hub_cache()
    folder = cache / f"models--{str(model).replace('/', '--')}"
    found = (path for path in folder.glob("snapshots/*/tokenizer.json") if path.is_file())
    copies = sorted(found, key=lambda path: path.stat().st_mtime)
    try:
        current = (folder / "refs" / "main").read_text().strip()
    except OSError:
        current = ""
    copies += [path for path in copies if path.parent.name == current]
    if not copies:
        raise DataProblem(
            f"{problem}, and no tokenizer.json of a repository of that name is in the Hugging Face cache {cache}; "
            f"nothing is downloaded: give a local path, or run: hf download {model} --include 'tokenizer*'"
        )
    return copies[-1].parent


def _hub_cache() -> Path:
    """Download folder of Hugging Face's libraries, according to their environment variables."""
    for name, inside in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser() / inside
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "huggingface" / "hub"


def vocab_size_of(config: TokenizerConfig) -> int:
    """Unpadded vocabulary size of a tokenizer."""
    return load_tokenizer(config).vocab_size


class NullTokenizer:
    """Tokenizer for text that consists of ids separated by spaces; `eod` defaults to the last id."""

    def __init__(self, vocab_size: int, *, eod: int | None = None, pad: int = NO_TOKEN) -> None:
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1 if eod is None else eod
        self.pad = pad
        for name, token in (("--null-tokenizer-eod-id", self.eod), ("--null-tokenizer-pad-id", max(pad, 0))):
            if token >= vocab_size:
                raise DataProblem(f"{name} {token} is not below --vocab-size {vocab_size}")
        self.fingerprint = f"NullTokenizer-{vocab_size}" + ("" if eod is None else f"-{eod}")

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataProblem(f"NullTokenizer reads ids separated by spaces, not {text[:40]!r}") from error
        invalid = next((number for number in ids if not 0 <= number < self.vocab_size), None)
        if invalid is not None:
            raise DataProblem(f"id {invalid} is not below the vocabulary size {self.vocab_size}; check --vocab-size")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(number) for number in ids)


class ByteTokenizer:
    """Tokenizer that uses UTF-8 bytes as ids 0 to 255; id 256 is end-of-document."""

    vocab_size = 257
    eod = 256
    pad = NO_TOKEN
    fingerprint = "ByteTokenizer"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(number for number in ids if number < 256).decode(errors="replace")


class SentencePieceTokenizer:
    """Tokenizer with a SentencePiece model, whose end-of-sentence piece is end-of-document."""

    def __init__(self, path: Path) -> None:
        package = optional_package("sentencepiece", "this tokenizer")
        content = _read(path)
        self._processor = package.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
        except RuntimeError as error:
            raise DataProblem(f"{path} is not a SentencePiece model ({error}); check --tokenizer-type") from error
        self.fingerprint = _fingerprint("SentencePieceTokenizer", content)
        self.vocab_size = self._processor.get_piece_size()
        unknown = self._processor.unk_id()
        pieces = (self._processor.piece_to_id(name) for name in _END_NAMES)
        self.eod = _end_id(path, [self._processor.eos_id(), *(piece for piece in pieces if piece != unknown)])
        specials = (self._processor.bos_id(), self._processor.eos_id(), self._processor.unk_id(), self.eod)
        self.pad = _unambiguous(self._processor.pad_id(), specials)

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(ids))


class _TokenizersTokenizer:
    """Base class of tokenizers that use the package `tokenizers`."""

    _tokenizer: Any

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class HuggingFaceTokenizer(_TokenizersTokenizer):
    """Tokenizer from `tokenizer.json`, or a folder with this file; `tokenizer_config.json` names special tokens.

    Encoding adds the special tokens that the tokenizer adds by default, as in Megatron.
    """

    def __init__(self, path: Path) -> None:
        package = optional_package("tokenizers", "this tokenizer")
        file = path / "tokenizer.json" if path.is_dir() else path
        content = _read(file)
        model = _json(file, content).get("model")
        if not isinstance(model, dict) or "vocab" not in model:
            raise DataProblem(
                f"{file} has no model with a vocabulary, so it is not a tokenizer.json; check --tokenizer-type"
            )
        try:
            self._tokenizer = package.Tokenizer.from_str(content.decode())
        except Exception as error:
            if type(error) is Exception:  # the package raises plain Exception
                raise DataProblem(f"{file} is not a tokenizer.json ({error}); check --tokenizer-model") from error
            raise
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        config_file = file.with_name("tokenizer_config.json")
        config = _json(config_file, _read(config_file)) if config_file.is_file() else {}
        self.fingerprint = _fingerprint("HuggingFaceTokenizer", content, json.dumps(config, sort_keys=True).encode())
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        ends = [self._named(config, "eos_token"), self._named(config, "sep_token"), *map(self._token_id, _END_NAMES)]
        self.eod = _end_id(file, ends)
        specials = [self._named(config, f"{name}_token") for name in ("bos", "eos", "unk", "sep", "cls")]
        self.pad = _unambiguous(self._named(config, "pad_token"), (*specials, self.eod))

    def _named(self, config: dict[str, Any], key: str) -> int:
        """Id of the token under `key` in tokenizer_config.json, where it is a string or {"content": string}."""
        entry = config.get(key)
        name = entry.get("content") if isinstance(entry, dict) else entry
        return self._token_id(name) if isinstance(name, str) else NO_TOKEN

    def _token_id(self, name: str) -> int:
        found = self._tokenizer.token_to_id(name)
        return NO_TOKEN if found is None else found


class GPT2BPETokenizer(_TokenizersTokenizer):
    """Byte-level BPE of GPT-2 from vocab.json and merges.txt; <|endoftext|> is end-of-document."""

    pad = NO_TOKEN

    def __init__(self, config: TokenizerConfig) -> None:
        package = optional_package("tokenizers", "this tokenizer")
        if config.vocab_file is None or config.merge_file is None:
            raise DataProblem("--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file")
        contents = (_read(config.vocab_file), _read(config.merge_file))
        vocab = _json(config.vocab_file, contents[0])
        merges = _bpe_merges(config.merge_file, contents[1], vocab)
        self._tokenizer = package.Tokenizer(package.models.BPE(vocab=vocab, merges=merges))
        self._tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = package.decoders.ByteLevel()
        self.fingerprint = _fingerprint("GPT2BPETokenizer", *contents)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.eod = _end_id(config.vocab_file, [int(vocab.get("<|endoftext|>", NO_TOKEN))])


class TikTokenizer:
    """Tokenizer from a JSON list of {rank, token_bytes (base64), token_str}, or a file of lines "base64 rank".

    The first `num_special_tokens` ids are special tokens (<unk>, <s>, </s>, … and fillers), followed by the tokens in
    rank order. `config.vocab_size` limits the number of ids; default, as in Megatron: 131,072 ids in total.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        assert config.tokenizer_model is not None
        package = optional_package("tiktoken", "this tokenizer")
        content = _read(config.tokenizer_model)
        num_special = config.tiktoken_num_special_tokens
        ranks = _tiktoken_ranks(config.tokenizer_model, content)
        ranks = ranks[: max(0, (config.vocab_size or _TIKTOKEN_VOCAB) - num_special)]
        names = _tiktoken_specials(config)
        pattern = config.tiktoken_pattern or "v2"
        if pattern not in _TIKTOKEN_PATTERNS:
            raise DataProblem(f"--tiktoken-pattern must be v1 or v2, not {pattern}")
        self._encoding = package.Encoding(
            name=config.tokenizer_model.stem,
            pat_str=_TIKTOKEN_PATTERNS[pattern],
            mergeable_ranks={token: number + num_special for number, token in enumerate(ranks)},
            special_tokens={name: number for number, name in enumerate(names)},
        )
        self.fingerprint = _fingerprint("TikTokenizer", content, repr((pattern, names, len(ranks))).encode())
        self.vocab_size = num_special + len(ranks)
        self.eod = names.index("</s>")
        self.pad = names.index("<pad>")

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(list(ids))


def _bpe_merges(path: Path, content: bytes, vocab: dict[str, Any]) -> list[tuple[str, str]]:
    """Reads the pairs of tokens in merge order; skips a first line such as "#version: 0.2"."""
    pairs = [tuple(line.split()) for line in content.decode(errors="replace").splitlines() if line.strip()]
    merges = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2 and pair[0] != "#version:"]
    known = all(isinstance(number, int) and 0 <= number < 1 << 31 for number in vocab.values())
    if not known or len(merges) < len(pairs) - 1 or not all({*pair, "".join(pair)} <= vocab.keys() for pair in merges):
        raise DataProblem(
            f"{path} does not hold the merges of its vocabulary, a pair of tokens on every line; check --vocab-file "
            f"and --merge-file"
        )
    return merges


def _tiktoken_specials(config: TokenizerConfig) -> list[str]:
    names = list(config.tokenizer_special_tokens or _TIKTOKEN_SPECIALS)
    missing = [name for name in _TIKTOKEN_SPECIALS if name not in names]
    if missing or len(set(names)) != len(names) or len(names) > config.tiktoken_num_special_tokens:
        raise DataProblem(
            f"--tokenizer-special-tokens {' '.join(names)} must be different names, include "
            f"{' '.join(_TIKTOKEN_SPECIALS)} and fit --tiktoken-num-special-tokens {config.tiktoken_num_special_tokens}"
        )
    return names + [f"<SPECIAL_{number}>" for number in range(len(names), config.tiktoken_num_special_tokens)]


def _tiktoken_ranks(path: Path, content: bytes) -> list[bytes]:
    """Reads the bytes of every token, in rank order."""
    try:
        if path.suffix == ".tiktoken":
            pairs = [line.split() for line in content.splitlines() if line.strip()]
            entries = [(int(rank), base64.b64decode(token, validate=True)) for token, rank in pairs]
        else:
            entries = [
                (entry["rank"], base64.b64decode(entry["token_bytes"], validate=True)) for entry in json.loads(content)
            ]
        entries.sort(key=lambda entry: entry[0])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataProblem(
            f'{path} is neither a JSON list of {{rank, token_bytes, token_str}} nor lines of "base64 rank" '
            f"({type(error).__name__}: {error}); check --tokenizer-type"
        ) from error
    tokens = [token for _, token in entries]
    if not tokens or [rank for rank, _ in entries] != list(range(len(entries))) or len(set(tokens)) != len(tokens):
        raise DataProblem(f"{path}: ranks must be 0, 1, 2, … and every token different; the file is damaged")
    return tokens


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataProblem(
            f"cannot read tokenizer model {path}: {error.strerror}; give the file (or, for HuggingFaceTokenizer, the "
            f"folder with tokenizer.json) as --tokenizer-model"
        ) from error


def _json(path: Path, content: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataProblem(f"{path} is not JSON ({error}); check --tokenizer-type and --tokenizer-model") from error
    return parsed if isinstance(parsed, dict) else {}


def _fingerprint(kind: str, *contents: bytes) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return f"{kind}-{digest.hexdigest()[:16]}"


def _unambiguous(pad: int, others: Sequence[int]) -> int:
    """The pad id, or `NO_TOKEN` if another special token has the same id."""
    return NO_TOKEN if pad in others else pad


def _end_id(path: Path, candidates: Sequence[int]) -> int:
    """First candidate that is not `NO_TOKEN`. Raises `DataProblem` if there is none."""
    found = next((candidate for candidate in candidates if candidate != NO_TOKEN), None)
    if found is None:
        raise DataProblem(
            f"tokenizer {path} has no token that ends a document (an end-of-sentence token, or one of "
            f"{' '.join(_END_NAMES)}); add one, --append-eod and --eod-mask-loss need it"
        )
    return found
