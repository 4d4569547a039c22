"""Tokenizer and datasets."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from megatron_moe.config.packing import PackingConfig

INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Header of .idx files, which precedes the lengths of the sequences (`data/indexed.py`)."""
MOCK_LENGTH_END = 4096
"""Lengths of the documents of `--mock-data` are drawn uniformly from [1, this number)."""
MOCK_DOCUMENTS = 100_000
"""Number of synthetic documents in Megatron."""
OTHER_TOKENIZER_NAMES: Mapping[str, str] = MappingProxyType(
    {"GPTSentencePieceTokenizer": "SentencePieceTokenizer", "Llama2Tokenizer": "SentencePieceTokenizer"}
)
"""Aliases of tokenizer types: other name that Megatron accepts -> value of `TokenizerConfig.tokenizer_type`."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Type, files and vocabulary of the tokenizer (`--tokenizer-*`)."""

    tokenizer_type: Literal[
        "SentencePieceTokenizer",
        "HuggingFaceTokenizer",
        "TikTokenizer",
        "GPT2BPETokenizer",
        "ByteTokenizer",
        "NullTokenizer",
    ]
    tokenizer_model: Path | None = None
    vocab_file: Path | None = None
    """GPT2BPETokenizer: vocabulary file. None for other tokenizers."""
    merge_file: Path | None = None
    """GPT2BPETokenizer: file of BPE merges. None for other tokenizers."""
    null_tokenizer_eod_id: int | None = None
    """NullTokenizer only: id of the end-of-document token. None means the last id of the vocabulary."""
    null_tokenizer_pad_id: int = -1
    """NullTokenizer only: id of the padding token; -1 means that there is none."""
    vocab_size: int | None = None
    """NullTokenizer: vocabulary size. TikTokenizer: maximum vocabulary size. Other tokenizers ignore it."""
    tiktoken_pattern: str | None = None
    """TikTokenizer only: pre-tokenization pattern, "v1" or "v2"; None means "v2"."""
    tiktoken_num_special_tokens: int = 1000
    """TikTokenizer only: number of ids at the start of the vocabulary that are special tokens."""
    tokenizer_special_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Datasets, batch contents and data loader."""

    train_data_path: tuple[str, ...] = ()
    """Path prefixes of the training datasets, or alternating blend weights and prefixes (`--train-data-path`). If
    empty, the training part of `data_path` is used."""
    valid_data_path: tuple[str, ...] = ()
    """Validation datasets, in the form of `train_data_path` (`--valid-data-path`)."""
    test_data_path: tuple[str, ...] = ()
    """Test datasets, in the form of `train_data_path` (`--test-data-path`)."""
    data_path: tuple[str, ...] = ()
    """Datasets in the form of `train_data_path` (`--data-path`). `split` divides each of them into three parts."""
    split: str = "969, 30, 1"
    """Relative sizes of the training, validation and test parts of `data_path`."""
    mock_data: bool = False
    mock_documents: int = MOCK_DOCUMENTS
    """Number of synthetic documents. The default gives 205 million tokens."""
    data_cache_path: Path | None = None
    """Directory for cached dataset indices (`--data-cache-path`); None means PREFIX/cache/GPTDataset_indices of each
    dataset."""
    seq_length: int
    seed: int = 1234
    tokenizer: TokenizerConfig
    vocab_size: int
    """Vocabulary size without padding. Token ids in the data must be below it."""
    eod_mask_loss: bool = False
    """Excludes end-of-document tokens from the loss."""
    reset_position_ids: bool = False
    """Restarts position ids at each document."""
    reset_attention_mask: bool = False
    """Limits attention to tokens of the same document."""
    mmap_bin_files: bool = True
    num_workers: int = 0
    """If 0, the training thread reads each batch. If above 0, one background thread per rank prefetches batches."""
    drop_last_partial_validation: bool = True
    """Drops the last sample of a validation dataset if it is shorter than `seq_length`."""
    multiple_validation_sets: bool = False
    """Reports a loss for each validation dataset instead of blending them."""
    full_validation: bool = False
    """Each evaluation reads every validation dataset once and ignores `--eval-iters`."""
    mid_level_dataset_surplus: float = 0.005
    """Number of spare samples per dataset of a blend, divided by the number needed (`--mid-level-dataset-surplus`)."""
    packing: PackingConfig | None = None
    """Packing of whole documents into rows (`--use-varlen-dataset`). None means that samples of `seq_length` tokens are
    cut from the concatenated documents."""
    dataloader_type: Literal["single", "cyclic"] = "single"
    """single: reads samples in index order; cyclic: reshuffles them in each epoch (`--dataloader-type`)."""
