"""Rules about data sets and tokenizers."""

import re

from arguments import derive
from arguments.checks.violation import RuleFlags, Violation, functions_returning
from megatron_moe.config.exit_codes import counted

_NEEDS_A_MODEL = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
)


def data_is_given(flags: RuleFlags) -> Violation:
    """A run needs training data."""
    if flags.data_path or flags.train_data_path or flags.mock_data or flags.skip_train:
        return None
    return "there is no training data", "give --data-path, --train-data-path or --mock-data"


def data_is_split_one_way(flags: RuleFlags) -> Violation:
    """Either one blend is split by --split, or every split has its own paths."""
    if flags.data_path and (flags.train_data_path or flags.valid_data_path or flags.test_data_path):
        return "--data-path and paths per split are both given", "use --data-path alone, or a path for every split"
    return None


def split_applies_to_data_path(flags: RuleFlags) -> Violation:
    """--split divides --data-path; the paths of a split are used whole."""
    if flags.split is not None and (flags.train_data_path or flags.valid_data_path or flags.test_data_path):
        return f"--split {flags.split} does not apply to paths per split", "remove --split, or use --data-path"
    return None


def split_is_valid(flags: RuleFlags) -> Violation:
    """--split has up to three weights: training, validation, test."""
    if flags.split is None:
        return None
    parts = [part.strip() for part in flags.split.split(",")]
    if not 1 <= len(parts) <= 3 or not all(re.fullmatch(r"\d+\.?\d*|\.\d+", part) for part in parts):
        return f"--split {flags.split} is not a list of up to three weights", "write it like 99,1,0"
    if sum(map(float, parts)) == 0:
        return f"--split {flags.split} leaves every split empty", "write it like 99,1,0"
    return None


def blends_pair_weights_with_prefixes(flags: RuleFlags) -> Violation:
    """A blend is a list of prefixes, or of alternating weights and prefixes."""
    for words in (flags.data_path, flags.train_data_path, flags.valid_data_path, flags.test_data_path):
        numbers = [_is_number(word) for word in words]
        in_turn = numbers == [place % 2 == 0 for place in range(len(words))] and len(words) % 2 == 0
        if any(numbers) and not in_turn:
            return (
                f"{' '.join(words)} mixes weights and prefixes",
                "alternate weights and prefixes, or give prefixes only",
            )
    return None


def tokenizer_is_complete(flags: RuleFlags) -> Violation:
    """A tokenizer has a type and a file (GPT2BPETokenizer has two); NullTokenizer has a vocabulary size instead."""
    kind = derive.tokenizer_type(flags)
    if kind is None:
        return "the tokenizer is not given", "set --tokenizer-type, and --tokenizer-model for most types"
    if kind in _NEEDS_A_MODEL and not flags.tokenizer_model:
        return f"{kind} without a file", "set --tokenizer-model"
    if kind == "GPT2BPETokenizer" and not (flags.vocab_file and flags.merge_file):
        return "GPT2BPETokenizer without its vocabulary or merges file", "set --vocab-file and --merge-file"
    if kind == "NullTokenizer" and flags.vocab_size is None:
        return "NullTokenizer without a vocabulary size", "set --vocab-size"
    return None


def null_token_ids_are_in_vocabulary(flags: RuleFlags) -> Violation:
    """Every token id needs a row of the embedding."""
    largest = max(flags.null_tokenizer_eod_id or 0, flags.null_tokenizer_pad_id)
    if flags.tokenizer_type != "NullTokenizer" or flags.vocab_size is None or largest < flags.vocab_size:
        return None
    return (
        f"id {largest} is not below the {counted(flags.vocab_size, 'id')} of NullTokenizer",
        f"--vocab-size {largest + 1}, or less",
    )


def full_validation_has_no_weights(flags: RuleFlags) -> Violation:
    """Blend weights set how often each data set is sampled; full validation reads every data set exactly once."""
    words = flags.valid_data_path or flags.data_path
    if flags.full_validation and not flags.multiple_validation_sets and any(map(_is_number, words)):
        return "--full-validation with weighted validation data", "list prefixes without weights in --valid-data-path"
    return None


def multiple_validation_sets_are_given(flags: RuleFlags) -> Violation:
    """Losses per validation set need separate validation sets."""
    if flags.multiple_validation_sets and not flags.valid_data_path:
        return "--multiple-validation-sets without --valid-data-path", "set --valid-data-path"
    return None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


RULES = functions_returning(Violation, globals())
