"""Rules about data sets and tokenizers."""

import re

from arguments import derive
from arguments.checks.violation import Violation
from megatron_moe.config.exit_codes import counted

_NEEDS_A_MODEL = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
)


def data_comes_from_somewhere(
    data_path: tuple[str, ...], train_data_path: tuple[str, ...], mock_data: bool, skip_train: bool
) -> Violation:
    """A run needs tokens."""
    if data_path or train_data_path or mock_data or skip_train:
        return None
    return "there is no training data", "give --data-path, --train-data-path or --mock-data"


def data_is_split_once(
    data_path: tuple[str, ...],
    train_data_path: tuple[str, ...],
    valid_data_path: tuple[str, ...],
    test_data_path: tuple[str, ...],
) -> Violation:
    """Either one blend is split by shares, or every split names its own files."""
    if data_path and (train_data_path or valid_data_path or test_data_path):
        return "data is given both to be split and by split", "use --data-path alone, or the paths of every split"
    return None


def splits_of_their_own_are_not_shared(
    split: str | None,
    train_data_path: tuple[str, ...],
    valid_data_path: tuple[str, ...],
    test_data_path: tuple[str, ...],
) -> Violation:
    """Shares divide --data-path; files of a split belong to it as a whole."""
    if split is not None and (train_data_path or valid_data_path or test_data_path):
        return f"--split {split} has nothing to divide", "leave out --split, or use --data-path"
    return None


def shares_are_numbers(split: str | None) -> Violation:
    """A split is up to three shares: training, validation, test."""
    if split is None:
        return None
    parts = [part.strip() for part in split.split(",")]
    if not 1 <= len(parts) <= 3 or not all(re.fullmatch(r"\d+\.?\d*|\.\d+", part) for part in parts):
        return f"--split {split} is not up to three shares", "write it like 99,1,0"
    if sum(map(float, parts)) == 0:
        return f"--split {split} gives nothing to anybody", "write it like 99,1,0"
    return None


def weights_have_prefixes(
    data_path: tuple[str, ...],
    train_data_path: tuple[str, ...],
    valid_data_path: tuple[str, ...],
    test_data_path: tuple[str, ...],
) -> Violation:
    """A blend is a list of prefixes, or weight and prefix in turn."""
    for words in (data_path, train_data_path, valid_data_path, test_data_path):
        numbers = [_is_number(word) for word in words]
        in_turn = numbers == [place % 2 == 0 for place in range(len(words))] and len(words) % 2 == 0
        if any(numbers) and not in_turn:
            return f"{' '.join(words)} mixes weights and prefixes", "write weight and prefix in turn, or prefixes alone"
    return None


def tokenizer_is_complete(
    tokenizer_type: str | None,
    tokenizer_model: str | None,
    vocab_size: int | None,
    vocab_file: str | None,
    merge_file: str | None,
) -> Violation:
    """A tokenizer has a kind and a file, that of GPT-2 two; NullTokenizer has a vocabulary size instead."""
    kind = derive.tokenizer_type(tokenizer_type, vocab_file, merge_file)
    if kind is None:
        return "the tokenizer is not given", "give --tokenizer-type, and --tokenizer-model for most kinds"
    if kind in _NEEDS_A_MODEL and not tokenizer_model:
        return f"{kind} has no file", "give --tokenizer-model"
    if kind == "GPT2BPETokenizer" and not (vocab_file and merge_file):
        return "GPT2BPETokenizer lacks its vocabulary or its merges", "give --vocab-file and --merge-file"
    if kind == "NullTokenizer" and vocab_size is None:
        return "NullTokenizer does not know its vocabulary", "give --vocab-size"
    return None


def null_ids_are_in_the_vocabulary(
    tokenizer_type: str | None, vocab_size: int | None, null_tokenizer_eod_id: int | None, null_tokenizer_pad_id: int
) -> Violation:
    """Every id needs a row of the embedding."""
    largest = max(null_tokenizer_eod_id or 0, null_tokenizer_pad_id)
    if tokenizer_type != "NullTokenizer" or vocab_size is None or largest < vocab_size:
        return None
    return (
        f"id {largest} is not below the {counted(vocab_size, 'id')} of NullTokenizer",
        f"--vocab-size {largest + 1}, or less",
    )


def whole_sets_are_not_weighted(
    full_validation: bool, valid_data_path: tuple[str, ...], data_path: tuple[str, ...], multiple_validation_sets: bool
) -> Violation:
    """Weights say how often a data set is read, and reading all of every set once leaves nothing to say."""
    words = valid_data_path or data_path
    if full_validation and not multiple_validation_sets and any(map(_is_number, words)):
        return "--full-validation has weights of data sets to follow", "list prefixes alone in --valid-data-path"
    return None


def sets_to_tell_apart(multiple_validation_sets: bool, valid_data_path: tuple[str, ...]) -> Violation:
    """Losses by validation set need validation sets of their own."""
    if multiple_validation_sets and not valid_data_path:
        return "--multiple-validation-sets has no sets to tell apart", "give --valid-data-path"
    return None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


RULES = (
    data_comes_from_somewhere,
    data_is_split_once,
    splits_of_their_own_are_not_shared,
    shares_are_numbers,
    weights_have_prefixes,
    tokenizer_is_complete,
    sets_to_tell_apart,
    null_ids_are_in_the_vocabulary,
    whole_sets_are_not_weighted,
)
