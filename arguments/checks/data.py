"""Rules about data sets and tokenizers."""

import re

from arguments import derive
from arguments.checks.violation import RuleFlags, Violations, conflict, lacks
from arguments.values import is_number

_NEEDS_A_MODEL = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
)


def data_is_given(flags: RuleFlags) -> Violations:
    """A run needs training data."""
    if not flags.data_path and not flags.train_data_path and not flags.mock_data and not flags.skip_train:
        yield "there is no training data", "give --data-path, --train-data-path or --mock-data"


def data_is_split_one_way(flags: RuleFlags) -> Violations:
    """Either --split divides one blend into training, validation and test data, or every split has separate paths."""
    if flags.data_path and (flags.train_data_path or flags.valid_data_path or flags.test_data_path):
        yield "--data-path and paths per split are both given", "use --data-path alone, or a path for every split"


def split_applies_to_data_path(flags: RuleFlags) -> Violations:
    """--split divides the data of --data-path; data given separately for each split are not divided."""
    if flags.split is not None and (flags.train_data_path or flags.valid_data_path or flags.test_data_path):
        yield f"--split {flags.split} does not apply to paths per split", "remove --split, or use --data-path"


def split_is_valid(flags: RuleFlags) -> Violations:
    """--split has up to three weights: training, validation, test."""
    if flags.split is None:
        return
    parts = [part.strip() for part in flags.split.split(",")]
    if not 1 <= len(parts) <= 3 or not all(re.fullmatch(r"\d+\.?\d*|\.\d+", part) for part in parts):
        yield f"--split {flags.split} is not a list of up to three weights", "write it like 99,1,0"
    elif sum(map(float, parts)) == 0:
        yield f"--split {flags.split} leaves every split empty", "write it like 99,1,0"


def blends_pair_weights_with_prefixes(flags: RuleFlags) -> Violations:
    """A data blend is given as file prefixes, or as alternating weights and file prefixes."""
    for words in (flags.data_path, flags.train_data_path, flags.valid_data_path, flags.test_data_path):
        numbers = [is_number(word) for word in words]
        alternating = numbers == [index % 2 == 0 for index in range(len(words))] and len(words) % 2 == 0
        if any(numbers) and not alternating:
            remedy = "alternate weights and prefixes, or give prefixes only"
            yield f"{' '.join(words)} mixes weights and prefixes", remedy


def tokenizer_is_complete(flags: RuleFlags) -> Violations:
    """A tokenizer needs a type and its files; NullTokenizer needs a vocabulary size instead of files."""
    kind = derive.tokenizer_type(flags)
    if kind is None:
        yield "the tokenizer is not given", "set --tokenizer-type, and --tokenizer-model for most types"
    elif kind in _NEEDS_A_MODEL and not flags.tokenizer_model:
        yield lacks(kind, "a file", "set --tokenizer-model")
    elif kind == "GPT2BPETokenizer" and not (flags.vocab_file and flags.merge_file):
        yield lacks("GPT2BPETokenizer", "its vocabulary or merges file", "set --vocab-file and --merge-file")
    elif kind == "NullTokenizer" and flags.vocab_size is None:
        yield lacks("NullTokenizer", "a vocabulary size", "set --vocab-size")


def null_token_ids_are_in_vocabulary(flags: RuleFlags) -> Violations:
    """Token ids must be smaller than the vocabulary size."""
    largest = max(flags.null_tokenizer_eod_id or 0, flags.null_tokenizer_pad_id)
    if flags.tokenizer_type == "NullTokenizer" and flags.vocab_size is not None and largest >= flags.vocab_size:
        remedy = f"--vocab-size {largest + 1}, or a smaller token id"
        yield f"token id {largest} is not below --vocab-size {flags.vocab_size} of NullTokenizer", remedy


def full_validation_has_no_weights(flags: RuleFlags) -> Violations:
    """Blend weights set how often each data set is sampled; full validation reads every data set exactly once."""
    words = flags.valid_data_path or flags.data_path
    if flags.full_validation and not flags.multiple_validation_sets and any(map(is_number, words)):
        remedy = "list prefixes without weights in --valid-data-path"
        yield conflict("--full-validation", "weighted validation data", remedy)


def multiple_validation_sets_are_given(flags: RuleFlags) -> Violations:
    """--multiple-validation-sets applies only to the data sets of --valid-data-path."""
    if flags.multiple_validation_sets and not flags.valid_data_path:
        yield lacks("--multiple-validation-sets", "--valid-data-path", "set --valid-data-path")
