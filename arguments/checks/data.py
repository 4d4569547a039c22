"""Rules about data sets and tokenizers."""

import re

from arguments import derive
from arguments.checks.violation import Violation, functions_returning
from megatron_moe.config.exit_codes import counted

_NEEDS_A_MODEL = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
)


def data_is_given(
    data_path: tuple[str, ...], train_data_path: tuple[str, ...], mock_data: bool, skip_train: bool
) -> Violation:
    """A run needs training data."""
    if data_path or train_data_path or mock_data or skip_train:
        return None
    return "there is no training data", "give --data-path, --train-data-path or --mock-data"


def data_is_split_one_way(
    data_path: tuple[str, ...],
    train_data_path: tuple[str, ...],
    valid_data_path: tuple[str, ...],
    test_data_path: tuple[str, ...],
) -> Violation:
    """Either one blend is split by --split, or every split has its own paths."""
    if data_path and (train_data_path or valid_data_path or test_data_path):
        return "--data-path and paths per split are both given", "use --data-path alone, or a path for every split"
    return None


def split_applies_to_data_path(
    split: str | None,
    train_data_path: tuple[str, ...],
    valid_data_path: tuple[str, ...],
    test_data_path: tuple[str, ...],
) -> Violation:
    """--split divides --data-path; the paths of a split are used whole."""
    if split is not None and (train_data_path or valid_data_path or test_data_path):
        return f"--split {split} does not apply to paths per split", "remove --split, or use --data-path"
    return None


def split_is_valid(split: str | None) -> Violation:
    """--split has up to three weights: training, validation, test."""
    if split is None:
        return None
    parts = [part.strip() for part in split.split(",")]
    if not 1 <= len(parts) <= 3 or not all(re.fullmatch(r"\d+\.?\d*|\.\d+", part) for part in parts):
        return f"--split {split} is not a list of up to three weights", "write it like 99,1,0"
    if sum(map(float, parts)) == 0:
        return f"--split {split} leaves every split empty", "write it like 99,1,0"
    return None


def blends_pair_weights_with_prefixes(
    data_path: tuple[str, ...],
    train_data_path: tuple[str, ...],
    valid_data_path: tuple[str, ...],
    test_data_path: tuple[str, ...],
) -> Violation:
    """A blend is a list of prefixes, or of alternating weights and prefixes."""
    for words in (data_path, train_data_path, valid_data_path, test_data_path):
        numbers = [_is_number(word) for word in words]
        in_turn = numbers == [place % 2 == 0 for place in range(len(words))] and len(words) % 2 == 0
        if any(numbers) and not in_turn:
            return (
                f"{' '.join(words)} mixes weights and prefixes",
                "alternate weights and prefixes, or give prefixes only",
            )
    return None


def tokenizer_is_complete(
    tokenizer_type: str | None,
    tokenizer_model: str | None,
    vocab_size: int | None,
    vocab_file: str | None,
    merge_file: str | None,
) -> Violation:
    """A tokenizer has a type and a file (GPT2BPETokenizer has two); NullTokenizer has a vocabulary size instead."""
    kind = derive.tokenizer_type(tokenizer_type, vocab_file, merge_file)
    if kind is None:
        return "the tokenizer is not given", "set --tokenizer-type, and --tokenizer-model for most types"
    if kind in _NEEDS_A_MODEL and not tokenizer_model:
        return f"{kind} without a file", "set --tokenizer-model"
    if kind == "GPT2BPETokenizer" and not (vocab_file and merge_file):
        return "GPT2BPETokenizer without its vocabulary or merges file", "set --vocab-file and --merge-file"
    if kind == "NullTokenizer" and vocab_size is None:
        return "NullTokenizer without a vocabulary size", "set --vocab-size"
    return None


def null_token_ids_are_in_vocabulary(
    tokenizer_type: str | None, vocab_size: int | None, null_tokenizer_eod_id: int | None, null_tokenizer_pad_id: int
) -> Violation:
    """Every token id needs a row of the embedding."""
    largest = max(null_tokenizer_eod_id or 0, null_tokenizer_pad_id)
    if tokenizer_type != "NullTokenizer" or vocab_size is None or largest < vocab_size:
        return None
    return (
        f"id {largest} is not below the {counted(vocab_size, 'id')} of NullTokenizer",
        f"--vocab-size {largest + 1}, or less",
    )


def full_validation_has_no_weights(
    full_validation: bool, valid_data_path: tuple[str, ...], data_path: tuple[str, ...], multiple_validation_sets: bool
) -> Violation:
    """Blend weights set how often each data set is sampled; full validation reads every data set exactly once."""
    words = valid_data_path or data_path
    if full_validation and not multiple_validation_sets and any(map(_is_number, words)):
        return "--full-validation with weighted validation data", "list prefixes without weights in --valid-data-path"
    return None


def multiple_validation_sets_are_given(multiple_validation_sets: bool, valid_data_path: tuple[str, ...]) -> Violation:
    """Losses per validation set need separate validation sets."""
    if multiple_validation_sets and not valid_data_path:
        return "--multiple-validation-sets without --valid-data-path", "set --valid-data-path"
    return None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


RULES = functions_returning(Violation, globals())
