"""Where tokens come from."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import flag


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """Data sets, their split and blend, masks, and the tokenizer."""

    data_path: tuple[str, ...] = flag((), essential=True)
    """Prefixes of .bin/.idx files, or weight and prefix in turn; `--split` divides them."""
    train_data_path: tuple[str, ...] = flag(())
    """Prefixes for training alone."""
    valid_data_path: tuple[str, ...] = flag(())
    """Prefixes for validation alone."""
    test_data_path: tuple[str, ...] = flag(())
    """Prefixes for the test alone."""
    data_args_path: str | None = flag(None)
    """File with the words of `--data-path`."""
    per_split_data_args_path: str | None = flag(None)
    """JSON file with the words of `--train-data-path` and its kin, under train, valid and test."""
    split: str | None = flag(None, essential=True)
    """Shares of training, validation and test, such as 99,1,0. Not set: 969, 30, 1."""
    mock_data: bool = flag(
        False, status="close", essential=True, note="--split holds; Megatron-LM always takes thirds of these documents"
    )
    """Random documents instead of files."""
    data_cache_path: str | None = flag(None)
    """Folder for indices. Not set: beside the data."""
    mmap_bin_files: bool = flag(True)
    """Map token files into memory."""
    num_workers: int = flag(2, least=0, status="close", note="any number above 0 is one thread of every rank")
    """Who makes the microbatches of the next step ahead; 0: nobody."""
    dataloader_type: Literal["single", "cyclic", "external"] | None = flag(
        None, status="refused", works=("single", "cyclic"), note="data comes from .bin/.idx files; use single or cyclic"
    )
    """Samples in order once, or shuffled again in every pass. Not set: single."""
    reset_position_ids: bool = flag(False)
    """Positions start again after every end of document."""
    reset_attention_mask: bool = flag(False)
    """Attention stays inside of a document."""
    eod_mask_loss: bool = flag(False)
    """No loss where the input is the end of a document, whose next token is another document's."""
    mid_level_dataset_surplus: float = flag(0.005, least=0)
    """Share by which every data set of a weighted blend is built larger than its part."""
    multiple_validation_sets: bool = flag(False)
    """A loss of its own for every validation data set."""
    full_validation: bool = flag(False)
    """Every evaluation reads the whole validation set, without a last batch that is not full."""

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
    ) = flag(
        None,
        status="not yet",
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
        note="use SentencePieceTokenizer, HuggingFaceTokenizer, TikTokenizer, GPT2BPETokenizer or NullTokenizer",
        essential=True,
    )
    """What turns text into tokens; NullTokenizer knows only numbers, ByteTokenizer is ours. Not set: GPT2BPETokenizer
    with --vocab-file and --merge-file."""
    tokenizer_model: str | None = flag(None, essential=True)
    """File of the tokenizer: a SentencePiece model, a tiktoken file, a folder with tokenizer.json, or the Hugging Face
    repository of which the local cache has a copy."""
    vocab_size: int | None = flag(None, least=1)
    """Tokens in the vocabulary before padding. Not set: the tokenizer knows."""
    vocab_file: str | None = flag(None)
    """GPT2BPETokenizer: JSON file with the vocabulary."""
    merge_file: str | None = flag(None)
    """GPT2BPETokenizer: text file with the merges."""
    tiktoken_pattern: Literal["v1", "v2"] | None = flag(None)
    """Version of the tiktoken pattern."""
    tiktoken_num_special_tokens: int = flag(1000, least=0)
    """Special tokens of a tiktoken vocabulary."""
    tokenizer_special_tokens: tuple[str, ...] | None = flag(None)
    """Names of special tokens of a tiktoken vocabulary."""
    null_tokenizer_eod_id: int | None = flag(None, least=0)
    """NullTokenizer: id that ends a document. Not set: the last one."""
    trust_remote_code: bool = flag(False, status="refused", harmless=True, note="no code is downloaded or executed")
    """Run code that comes with a tokenizer."""
    null_tokenizer_pad_id: int = flag(-1, least=-1)
    """NullTokenizer: id of padding; -1: none."""
    dataloader_inter_document_masking: bool = flag(
        False, status="close", note="means --reset-attention-mask and --reset-position-ids"
    )
    """Sequences are packed documents: attention stays inside of each, and positions begin anew."""
