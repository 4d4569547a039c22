"""Tokenizer and data sets."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

OTHER_TOKENIZER_NAMES: Mapping[str, str] = MappingProxyType(
    {"GPTSentencePieceTokenizer": "SentencePieceTokenizer", "Llama2Tokenizer": "SentencePieceTokenizer"}
)
"""Megatron's other names -> the kind of a `TokenizerConfig`."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer turns text into ids. Kinds have Megatron's names."""

    kind: Literal[
        "SentencePieceTokenizer",
        "HuggingFaceTokenizer",
        "TikTokenizer",
        "GPT2BPETokenizer",
        "ByteTokenizer",
        "NullTokenizer",
    ]
    model: Path | None = None
    vocab_file: Path | None = None
    """Of GPT2BPETokenizer, with `merge_file`."""
    merge_file: Path | None = None
    eod: int | None = None
    """Of NullTokenizer; None: the last id."""
    pad: int = -1
    """Of NullTokenizer; -1: none."""
    vocab_size: int | None = None
    """Of NullTokenizer; TikTokenizer keeps no more ids than this. The other kinds know their own."""
    tiktoken_pattern: str | None = None
    num_special_tokens: int = 1000
    special_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where sequences come from and how they are masked."""

    train: tuple[str, ...] = ()
    """Prefixes, or weight prefix pairs, of this split alone; empty: take `blend` with `split`."""
    valid: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    blend: tuple[str, ...] = ()
    """`--data-path`."""
    split: str = "969, 30, 1"
    mock: bool = False
    mock_documents: int = 100_000
    """As many as Megatron's mock data has: 205 million tokens, too many to index where sequences have a few tokens."""
    cache_dir: Path | None = None
    seq_length: int
    seed: int = 1234
    tokenizer: TokenizerConfig
    vocab_size: int
    """True (unpadded) vocabulary: larger ids in the data are an error."""
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    mmap: bool = True
    num_workers: int = 0
    drop_last_partial_validation: bool = True
    multiple_validation_sets: bool = False
    full_validation: bool = False
    """An evaluation reads every validation set once, whatever `LoopConfig.eval_iters` says."""
    surplus: float = 0.005
    """Share by which every data set of a weighted blend is built larger than its part."""
    dataloader: Literal["single", "cyclic"] = "single"
