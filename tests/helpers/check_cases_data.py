"""Cases of the data rules (arguments/checks/data.py)."""

from tests.helpers.check_cases import Case

CASES = (
    Case("data_is_given", "", "no training data", "--mock-data", "--data-path"),
    Case("data_is_split_one_way", "--train-data-path a", "--data-path and paths per split", "", "--split"),
    Case(
        "split_applies_to_data_path",
        "--train-data-path a --split 9,1,0",
        "--split 9,1,0 does not apply to paths per split",
        "--train-data-path a",
        "--data-path --split",
    ),
    Case("split_is_valid", "--split 99,1,0,0", "not a list of up to three weights", "--split '969, 30, 1'"),
    Case("split_is_valid", "--split 99,x", "not a list of up to three weights", "--split 99,.5"),
    Case("split_is_valid", "--split 0,0,0", "leaves every split empty", "--split 0,0,1"),
    Case("blends_pair_weights_with_prefixes", "--data-path 0.3 a b", "mixes weights", "--data-path 0.3 a 0.7 b"),
    Case("tokenizer_is_complete", "", "is not given", "--tokenizer-type ByteTokenizer", "--tokenizer-type"),
    Case("tokenizer_is_complete", "", "without a file", "--tokenizer-model y", "--tokenizer-model"),
    Case(
        "tokenizer_is_complete",
        "--tokenizer-type GPT2BPETokenizer --vocab-file v",
        "without its vocabulary or merges file",
        "--tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m",
    ),
    Case(
        "tokenizer_is_complete",
        "--merge-file m",
        "GPT2BPETokenizer without its vocabulary or merges file",
        "--vocab-file v --merge-file m",
        "--tokenizer-type --tokenizer-model",
    ),
    Case(
        "tokenizer_is_complete",
        "--tokenizer-type NullTokenizer",
        "without a vocabulary size",
        "--tokenizer-type NullTokenizer --vocab-size 99",
    ),
    Case(
        "null_token_ids_are_in_vocabulary",
        "--tokenizer-type NullTokenizer --vocab-size 99 --null-tokenizer-eod-id 99",
        "id 99 is not below the 99 ids",
        "--tokenizer-type NullTokenizer --vocab-size 99 --null-tokenizer-eod-id 98 --null-tokenizer-pad-id 0",
    ),
    Case(
        "full_validation_has_no_weights",
        "--full-validation --train-data-path a --valid-data-path 1 b 2 c",
        "with weighted validation data",
        "--full-validation --train-data-path 1 a 2 d --valid-data-path b c",
        "--data-path --split",
    ),
    Case(
        "multiple_validation_sets_are_given",
        "--multiple-validation-sets",
        "without --valid-data-path",
        "--multiple-validation-sets --train-data-path a --valid-data-path b c",
        "--data-path --split",
    ),
)
