"""Dataset and tokenizer flags."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import differs, flag, refused, unsupported
from arguments.values import DataPrefix, FilePath


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """Datasets, splits and blends, document masks, tokenizer."""

    data_path: tuple[DataPrefix, ...] = flag((), essential=True)
    """Path prefixes of .bin/.idx files, each optionally preceded by its blend weight; `--split` divides the samples."""
    train_data_path: tuple[DataPrefix, ...] = flag(())
    """Path prefixes of the training data, as in `--data-path`."""
    valid_data_path: tuple[DataPrefix, ...] = flag(())
    """Path prefixes of the validation data, as in `--data-path`."""
    test_data_path: tuple[DataPrefix, ...] = flag(())
    """Path prefixes of the test data, as in `--data-path`."""
    data_args_path: FilePath | None = flag(None)
    """Text file that contains the values of `--data-path`."""
    per_split_data_args_path: FilePath | None = flag(None)
    """JSON file with the values of `--train-data-path`, `--valid-data-path` and `--test-data-path` under the keys
    train, valid and test."""
    split: str | None = flag(None, essential=True)
    """Ratio of training, validation and test data, such as 99,1,0. Default: 969,30,1."""
    mock_data: bool = differs(False, "--split applies; Megatron-LM always splits mock data into thirds", essential=True)
    """Use random documents instead of files."""
    data_cache_path: FilePath | None = flag(None)
    """Folder for index caches. Default: PREFIX/cache/GPTDataset_indices for each prefix of `--data-path`."""
    mmap_bin_files: bool = flag(True)
    """Memory-map the token files."""
    num_workers: int = differs(2, "every value above 0 starts one prefetch thread per rank", least=0)
    """Number of workers that prefetch the microbatches of the next step; 0 disables prefetching."""
    dataloader_type: Literal["single", "cyclic", "external"] | None = refused(
        None, "data is read from .bin/.idx files; use single or cyclic", works=("single", "cyclic")
    )
    """Sample order: dataset order in one pass (single), or shuffled anew in each pass (cyclic). Default: single."""
    reset_position_ids: bool = flag(False)
    """Restart positions after each end-of-document token."""
    reset_attention_mask: bool = flag(False)
    """Restrict attention to the current document."""
    eod_mask_loss: bool = flag(False)
    """Exclude end-of-document tokens from the loss, because the token after them belongs to another document."""
    mid_level_dataset_surplus: float = flag(0.005, least=0)
    """Additional samples built for each dataset of a weighted blend, as a fraction of its share of the samples."""
    multiple_validation_sets: bool = flag(False)
    """Report a separate loss for each validation dataset."""
    full_validation: bool = flag(False)
    """Evaluate on the whole validation set, excluding an incomplete last batch."""

    tokenizer_type: (
        Literal[
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
            "TikTokenizer",
            "ByteTokenizer",
            "NullTokenizer",
            "GPT2BPETokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "MultimodalTokenizer",
            "NullMultimodalTokenizer",
            "SFTTokenizer",
        ]
        | None
    ) = unsupported(
        None,
        "use SentencePieceTokenizer, HuggingFaceTokenizer, TikTokenizer, GPT2BPETokenizer or NullTokenizer",
        works=(
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
            "TikTokenizer",
            "ByteTokenizer",
            "NullTokenizer",
            "GPT2BPETokenizer",
        ),
        essential=True,
    )
    """Tokenizer. NullTokenizer accepts only token ids; Megatron-LM has no ByteTokenizer. Default: GPT2BPETokenizer if
    --vocab-file and --merge-file are given."""
    tokenizer_model: FilePath | None = flag(None, essential=True)
    """Tokenizer file: a SentencePiece model, a tiktoken file, a folder with tokenizer.json, or the name of a Hugging
    Face repository in the local cache."""
    vocab_size: int | None = flag(None, least=1)
    """Vocabulary size before padding. Default: the vocabulary size of the tokenizer."""
    vocab_file: FilePath | None = flag(None)
    """JSON vocabulary file of GPT2BPETokenizer."""
    merge_file: FilePath | None = flag(None)
    """Merges file of GPT2BPETokenizer."""
    tiktoken_pattern: Literal["v1", "v2"] | None = flag(None)
    """Version of the regular expression with which tiktoken splits text."""
    tiktoken_num_special_tokens: int = flag(1000, least=0)
    """Number of special tokens of a tiktoken vocabulary."""
    tokenizer_special_tokens: tuple[str, ...] | None = flag(None)
    """Special tokens of a tiktoken vocabulary."""
    null_tokenizer_eod_id: int | None = flag(None, least=0)
    """Token id of the end of a document for NullTokenizer. Default: the last id of the vocabulary."""
    trust_remote_code: bool = differs(False, "no effect: no code is downloaded or executed")
    """Execute Python code that is part of a Hugging Face tokenizer."""
    null_tokenizer_pad_id: int = flag(-1, least=-1)
    """Token id of padding for NullTokenizer; -1 means no padding token."""
    dataloader_inter_document_masking: bool = differs(
        False, "equivalent to --reset-attention-mask --reset-position-ids"
    )
    """Treat sequences as packed documents: attention and positions restart at each document."""

    use_varlen_dataset: bool = differs(False, "reads documents from .bin/.idx files, not from text files")
    """Make every document one sequence of the global batch, and pack these sequences into rows of --seq-length."""
    sequence_packing_scheduler: Literal["dp_balanced", "default_dynamic_cp"] | None = differs(
        None,
        "every row has --seq-length positions; rows are distributed so that data-parallel ranks compute about "
        "equally much",
    )
    """Order in which the sequences of a step are packed into rows: as in the dataset (dp_balanced), or by decreasing
    length (default_dynamic_cp, for --dynamic-context-parallel). Default: dp_balanced with --use-varlen-dataset."""
    pad_packed_seq_alignment: str | None = differs(
        None, "every row has --seq-length positions, as with max; a number only aligns the sequences in a row"
    )
    """Sequences in a row start at multiples of this number of tokens. `max` or not set: 1."""
    thd_tail_padding_policy: Literal["append_dummy_seq", "extend_last"] | None = flag(None)
    """Whether padding at the end of a row forms a separate sequence or extends the last one. Default:
    append_dummy_seq."""
    thd_max_packed_sequences: int | None = flag(None, least=1)
    """Maximum number of sequences per row, including the padding sequence of append_dummy_seq. Default: no limit."""
