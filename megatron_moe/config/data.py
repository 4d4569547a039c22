"""Tokenizer and datasets."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

OTHER_TOKENIZER_NAMES: Mapping[str, str] = MappingProxyType(
    {"GPTSentencePieceTokenizer": "SentencePieceTokenizer", "Llama2Tokenizer": "SentencePieceTokenizer"}
)
"""Megatron's aliases of `TokenizerConfig.tokenizer_type`."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer (`--tokenizer-*`)."""

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
    """GPT2BPETokenizer only."""
    merge_file: Path | None = None
    """GPT2BPETokenizer only."""
    null_tokenizer_eod_id: int | None = None
    """NullTokenizer: id of the end-of-document token; None: the last id."""
    null_tokenizer_pad_id: int = -1
    """NullTokenizer: id of the padding token; -1: none."""
    vocab_size: int | None = None
    """NullTokenizer: vocabulary size; TikTokenizer: maximum vocabulary size. Others read the size from their files."""
    tiktoken_pattern: str | None = None
    """TikTokenizer: pre-tokenization pattern, v1 or v2; None: v2."""
    tiktoken_num_special_tokens: int = 1000
    """TikTokenizer only."""
    tokenizer_special_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Datasets, batch contents and data loader."""

    train_data_path: tuple[str, ...] = ()
    """Prefixes of the training datasets, or alternating weights and prefixes (`--train-data-path`); empty: the
    training part of `data_path`."""
    valid_data_path: tuple[str, ...] = ()
    """Same as `train_data_path`, for validation (`--valid-data-path`)."""
    test_data_path: tuple[str, ...] = ()
    """Same as `train_data_path`, for testing (`--test-data-path`)."""
    data_path: tuple[str, ...] = ()
    """Prefixes, or alternating weights and prefixes, divided by `split` (`--data-path`)."""
    split: str = "969, 30, 1"
    """Proportions of training, validation and test data in `data_path`."""
    mock_data: bool = False
    """Synthetic data (`--mock-data`)."""
    mock_documents: int = 100_000
    """Documents of the synthetic data: 205 million tokens, as in Megatron. Tests with short sequences use fewer."""
    data_cache_path: Path | None = None
    """Directory of index caches (`--data-cache-path`)."""
    seq_length: int
    seed: int = 1234
    tokenizer: TokenizerConfig
    vocab_size: int
    """Vocabulary size without padding; token ids in the data that are not below it are an error."""
    eod_mask_loss: bool = False
    """Excludes end-of-document tokens from the loss."""
    reset_position_ids: bool = False
    """Restarts position ids at each document."""
    reset_attention_mask: bool = False
    """Limits attention to tokens of the same document."""
    mmap_bin_files: bool = True
    """Memory-maps .bin files instead of reading them."""
    num_workers: int = 0
    """Above 0: one thread per rank reads the next batches ahead; 0: the training thread reads them."""
    drop_last_partial_validation: bool = True
    """Drops the last sample of a validation dataset if it is shorter than `seq_length`."""
    multiple_validation_sets: bool = False
    """Reports a loss for each validation dataset instead of blending them."""
    full_validation: bool = False
    """An evaluation covers each validation dataset once, regardless of `LoopConfig.eval_iters`."""
    mid_level_dataset_surplus: float = 0.005
    """Extra samples built per dataset of a weighted blend, as a fraction (`--mid-level-dataset-surplus`)."""
    dataloader_type: Literal["single", "cyclic"] = "single"
    """single: samples in index order; cyclic: shuffled anew in each epoch (`--dataloader-type`)."""
