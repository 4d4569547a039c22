"""Megatron's tokenizer types with a common interface; nothing is downloaded.

`load_tokenizer` raises `DataProblem` if a model file is missing, does not match the tokenizer type, or has no
end-of-document token, and `EnvironmentProblem` if the required package is not installed.
"""

import base64
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_moe.config.data import TokenizerConfig
from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.data.textfiles import optional_package

NO_TOKEN = -1
"""Id that marks a missing token, e.g. the padding token of a tokenizer that has none."""
_END_NAMES = ("<eod>", "<EOD>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_REPOSITORY = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")
_TIKTOKEN_SPECIALS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_TIKTOKEN_VOCAB = 1 << 17
_TIKTOKEN_PATTERNS = MappingProxyType(
    {
        # Letter sequences, and single digits.
        "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        # Like v1, but also splits between lower and upper case.
        "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Conversion between text and token ids."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    vocab_size: int
    """Largest token id plus 1, special tokens included."""
    eod: int
    """End-of-document id."""
    pad: int = NO_TOKEN
    """Padding id; -1 if there is none or if another special token has the same id."""
    fingerprint: str
    """Identifier of the encoding. Tokenizers with equal fingerprints encode every text to the same ids."""


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Loads the tokenizer that `config` describes. Raises DataProblem or EnvironmentProblem."""
    if config.tokenizer_type == "NullTokenizer":
        if config.vocab_size is None or config.vocab_size < 2:
            raise DataProblem(f"NullTokenizer needs --vocab-size of at least 2, it is {config.vocab_size}")
        return _null_tokenizer(config.vocab_size, config.null_tokenizer_eod_id, config.null_tokenizer_pad_id)
    if config.tokenizer_type == "GPT2BPETokenizer":
        return _gpt2_bpe_tokenizer(config)
    if config.tokenizer_type == "ByteTokenizer":
        return _byte_tokenizer()
    if config.tokenizer_model is None:
        raise DataProblem(f"--tokenizer-type {config.tokenizer_type} needs --tokenizer-model")
    if config.tokenizer_type == "HuggingFaceTokenizer":
        return _hugging_face_tokenizer(local_copy(config.tokenizer_model))
    if not config.tokenizer_model.exists():
        raise DataProblem(
            f"tokenizer model {config.tokenizer_model} does not exist; give a local path, nothing is downloaded"
        )
    if config.tokenizer_type == "SentencePieceTokenizer":
        return _sentence_piece_tokenizer(config.tokenizer_model)
    return _tik_tokenizer(config)


def local_copy(model: Path) -> Path:
    """Returns `model` if the path exists, else the copy of the Hugging Face repository `model` in the local cache.

    The cache has one folder `snapshots/<revision>` per downloaded revision; `refs/main` names the current revision.
    Never uses the network. Raises `DataProblem` if the cache has no copy.
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
    """Download folder of the Hugging Face libraries, as set by their environment variables or by default."""
    for name, inside in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser() / inside
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "huggingface" / "hub"


def vocab_size_of(config: TokenizerConfig) -> int:
    """Vocabulary size of the tokenizer that `config` describes, without padding."""
    return load_tokenizer(config).vocab_size


def _null_tokenizer(vocab_size: int, eod: int | None, pad: int) -> Tokenizer:
    """Tokenizer for text of token ids separated by spaces. If `eod` is None, the last id is end-of-document."""
    end = vocab_size - 1 if eod is None else eod
    for name, token in (("--null-tokenizer-eod-id", end), ("--null-tokenizer-pad-id", max(pad, 0))):
        if token >= vocab_size:
            raise DataProblem(f"{name} {token} is not below --vocab-size {vocab_size}")

    def parse_ids(text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataProblem(f"NullTokenizer reads ids separated by spaces, not {text[:40]!r}") from error
        invalid = next((number for number in ids if not 0 <= number < vocab_size), None)
        if invalid is not None:
            raise DataProblem(f"id {invalid} is not below the vocabulary size {vocab_size}; check --vocab-size")
        return ids

    return Tokenizer(
        encode=parse_ids,
        decode=lambda ids: " ".join(map(str, ids)),
        vocab_size=vocab_size,
        eod=end,
        pad=pad,
        fingerprint=f"NullTokenizer-{vocab_size}" + ("" if eod is None else f"-{eod}"),
    )


def _byte_tokenizer() -> Tokenizer:
    """Tokenizer whose ids 0 to 255 are UTF-8 bytes; id 256 is end-of-document."""
    return Tokenizer(
        encode=lambda text: list(text.encode()),
        decode=lambda ids: bytes(number for number in ids if number < 256).decode(errors="replace"),
        vocab_size=257,
        eod=256,
        fingerprint="ByteTokenizer",
    )


def _sentence_piece_tokenizer(path: Path) -> Tokenizer:
    """Loads a SentencePiece model. End-of-document is its end-of-sentence piece or, if missing, one of `_END_NAMES`."""
    content = _read(path)
    processor = optional_package("sentencepiece", "this tokenizer").SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise DataProblem(f"{path} is not a SentencePiece model ({error}); check --tokenizer-type") from error
    unknown = processor.unk_id()
    pieces = (processor.piece_to_id(name) for name in _END_NAMES)
    eod = _end_id(path, [processor.eos_id(), *(piece for piece in pieces if piece != unknown)])
    return Tokenizer(
        encode=processor.encode,
        decode=lambda ids: processor.decode(list(ids)),
        vocab_size=processor.get_piece_size(),
        eod=eod,
        pad=_unambiguous(processor.pad_id(), (processor.bos_id(), processor.eos_id(), unknown, eod)),
        fingerprint=_fingerprint("SentencePieceTokenizer", content),
    )


def llama_tokenizer_config(path: Path) -> dict[str, Any]:
    """Content of a tokenizer_config.json with which transformers' LlamaTokenizer reproduces the ids of a SentencePiece
    model. It adds no special pieces that the model lacks and keeps the model's rule for a leading space."""
    processor = optional_package("sentencepiece", "this tokenizer").SentencePieceProcessor(model_file=str(path))
    ids = {"bos_token": processor.bos_id(), "unk_token": processor.unk_id(), "pad_token": processor.pad_id()}
    names = {name: processor.id_to_piece(number) if number >= 0 else None for name, number in ids.items()}
    return {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": processor.encode("a", out_type=str)[0].startswith("\u2581"),
        **names,
        "eos_token": processor.id_to_piece(_sentence_piece_tokenizer(path).eod),
    }


def _hugging_face_tokenizer(path: Path) -> Tokenizer:
    """Loads a tokenizer.json; `path` is this file or its folder.

    A tokenizer_config.json in this folder names the special tokens. As in Megatron, `encode` adds the special tokens
    that the tokenizer adds by default.
    """
    package = optional_package("tokenizers", "this tokenizer")
    file = path / "tokenizer.json" if path.is_dir() else path
    content = _read(file)
    model = _json(file, content).get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise DataProblem(
            f"{file} has no model with a vocabulary, so it is not a tokenizer.json; check --tokenizer-type"
        )
    try:
        tokenizer = package.Tokenizer.from_str(content.decode())
    except Exception as error:
        if type(error) is Exception:  # the package raises plain Exception
            raise DataProblem(f"{file} is not a tokenizer.json ({error}); check --tokenizer-model") from error
        raise
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config_file = file.with_name("tokenizer_config.json")
    config = _json(config_file, _read(config_file)) if config_file.is_file() else {}

    def token_id(name: object) -> int:
        found = tokenizer.token_to_id(name) if isinstance(name, str) else None
        return NO_TOKEN if found is None else found

    def id_of_role(role: str) -> int:
        """Id of the special token for `role`, e.g. "eos". Its config entry is a string or {"content": string}."""
        entry = config.get(f"{role}_token")
        return token_id(entry.get("content") if isinstance(entry, dict) else entry)

    eod = _end_id(file, [id_of_role("eos"), id_of_role("sep"), *map(token_id, _END_NAMES)])
    return _of_package(
        tokenizer,
        vocab=tokenizer.get_vocab(with_added_tokens=True),
        eod=eod,
        pad=_unambiguous(id_of_role("pad"), (*map(id_of_role, ("bos", "eos", "unk", "sep", "cls")), eod)),
        fingerprint=_fingerprint("HuggingFaceTokenizer", content, json.dumps(config, sort_keys=True).encode()),
    )


def _gpt2_bpe_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Loads the byte-level BPE of GPT-2 from vocab.json and merges.txt; <|endoftext|> is end-of-document."""
    package = optional_package("tokenizers", "this tokenizer")
    if config.vocab_file is None or config.merge_file is None:
        raise DataProblem("--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file")
    contents = (_read(config.vocab_file), _read(config.merge_file))
    vocab = _json(config.vocab_file, contents[0])
    tokenizer = package.Tokenizer(
        package.models.BPE(vocab=vocab, merges=_bpe_merges(config.merge_file, contents[1], vocab))
    )
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    eod = _end_id(config.vocab_file, [int(vocab.get("<|endoftext|>", NO_TOKEN))])
    return _of_package(tokenizer, vocab=vocab, eod=eod, fingerprint=_fingerprint("GPT2BPETokenizer", *contents))


def _of_package(tokenizer: Any, *, vocab: Mapping[str, int], **fields: Any) -> Tokenizer:
    """Wraps a tokenizer of the Hugging Face package `tokenizers`. `fields`: other fields of the result."""
    return Tokenizer(
        encode=lambda text: tokenizer.encode(text).ids,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
        vocab_size=max(vocab.values(), default=-1) + 1,
        **fields,
    )


def _tik_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Loads a tiktoken vocabulary: a JSON list of {rank, token_bytes (base64), token_str}, or a `.tiktoken` file with
    lines "base64 rank". The first `tiktoken_num_special_tokens` ids are special tokens (<unk>, <s>, </s>, … and
    fillers), followed by the tokens in rank order. The total number of ids is limited to `config.vocab_size`, or, if it
    is not set, to 131,072 as in Megatron."""
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
    encoding = package.Encoding(
        name=config.tokenizer_model.stem,
        pat_str=_TIKTOKEN_PATTERNS[pattern],
        mergeable_ranks={token: number + num_special for number, token in enumerate(ranks)},
        special_tokens={name: number for number, name in enumerate(names)},
    )
    return Tokenizer(
        encode=lambda text: encoding.encode(text, allowed_special="all"),
        decode=lambda ids: encoding.decode(list(ids)),
        vocab_size=num_special + len(ranks),
        eod=names.index("</s>"),
        pad=names.index("<pad>"),
        fingerprint=_fingerprint("TikTokenizer", content, repr((pattern, names, len(ranks))).encode()),
    )


def _bpe_merges(path: Path, content: bytes, vocab: dict[str, Any]) -> list[tuple[str, str]]:
    """Parses the token pairs of a merges.txt, in merge order. Skips a "#version: 0.2" line."""
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
            f"the special tokens {' '.join(names)} (--tokenizer-special-tokens) must be distinct, include "
            f"{' '.join(_TIKTOKEN_SPECIALS)}, and number at most --tiktoken-num-special-tokens "
            f"{config.tiktoken_num_special_tokens}"
        )
    return names + [f"<SPECIAL_{number}>" for number in range(len(names), config.tiktoken_num_special_tokens)]


def _tiktoken_ranks(path: Path, content: bytes) -> list[bytes]:
    """Parses a tiktoken file into the bytes of every token, in rank order."""
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
    """Returns `pad`, or `NO_TOKEN` if another special token has the same id."""
    return NO_TOKEN if pad in others else pad


def _end_id(path: Path, candidates: Sequence[int]) -> int:
    """End-of-document id: the first candidate that is not `NO_TOKEN`. Raises `DataProblem` if there is none."""
    found = next((candidate for candidate in candidates if candidate != NO_TOKEN), None)
    if found is None:
        raise DataProblem(
            f"tokenizer {path} has no token that ends a document (an end-of-sentence token, or one of "
            f"{' '.join(_END_NAMES)}); add one, --append-eod and --eod-mask-loss need it"
        )
    return found
