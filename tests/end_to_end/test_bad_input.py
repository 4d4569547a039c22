"""Invalid input: a message with file, position and remedy, the right exit code, and no incomplete files."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_moe.config.exit_codes import ExitCode
from pretrain_moe import main
from tests.end_to_end.tiny_run import arguments
from tests.helpers.programs import PROGRAM, run_script


@pytest.fixture
def reject(capfd):
    """Trains in this process. Asserts that the run returns `code` and prints all `words` without a traceback."""

    def run(argv, code, *words):
        found = main(argv, {})
        output, errors = capfd.readouterr()
        check(found, output, errors, code, words)

    return run


def check(found, output, errors, code, words):
    assert found == int(code), output[-3000:] + errors[-3000:]
    assert "Traceback" not in output + errors, output[-3000:] + errors[-3000:]
    missing = [word for word in words if word not in errors]
    assert not missing, f"{missing} not in: {errors[-2000:]}"


@pytest.fixture
def copied(data, tmp_path):
    """Copies the data, which tests may then damage, and returns the prefix of the copy."""
    for suffix in (".bin", ".idx"):
        shutil.copy(data + suffix, tmp_path / f"corpus{suffix}")
    return tmp_path / "corpus"


def checkpoints(run: Path):
    return list(run.rglob("manifest.json"))


def test_a_truncated_index(reject, copied, tmp_path):
    index = copied.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:-5])
    reject(arguments(str(copied), tmp_path / "run"), ExitCode.DATA, str(index), "bytes")
    assert not checkpoints(tmp_path)


def test_an_index_file_of_another_format_is_rejected(reject, copied, tmp_path):
    copied.with_suffix(".idx").write_bytes(b"PK\x03\x04" + bytes(100))
    reject(arguments(str(copied), tmp_path / "run"), ExitCode.DATA, "corpus.idx")


def test_a_token_id_beyond_the_vocabulary(reject, copied, tmp_path):
    tokens = np.memmap(copied.with_suffix(".bin"), dtype=np.uint16, mode="r+")
    tokens[:] = 4000
    tokens.flush()
    reject(arguments(str(copied), tmp_path / "run"), ExitCode.DATA, "4000", "corpus", "vocabulary of")


def test_an_update_that_makes_weights_nan(reject, data, tmp_path):
    """No checkpoint is saved, although loss and gradients of the only step are finite."""
    more = ["--adam-eps", "0", "--lr-warmup-iters", "0", "--train-iters", "1"]
    argv = [*arguments(data, tmp_path / "run"), *more]
    words = ("iteration 1: its update stored", "the weights of", "--adam-eps 0 gives 0 / 0")
    reject(argv, ExitCode.NUMERICS, *words)
    assert not checkpoints(tmp_path)


def test_missing_data(tmp_path):
    """Runs in a separate process, as users start it."""
    done = run_script(PROGRAM, *arguments(str(tmp_path / "none"), tmp_path / "run"), cwd=tmp_path)
    check(done.returncode, done.stdout, done.stderr, ExitCode.DATA, ["none.idx"])


def test_a_missing_tokenizer(reject, data, tmp_path):
    more = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "nowhere.model"]
    reject(arguments(data, tmp_path / "run", *more), ExitCode.DATA, "nowhere.model", "does not exist")


def test_an_invalid_flag_is_reported(reject, data, tmp_path):
    reject(arguments(data, tmp_path / "run", "--moe-router-topkk", "3"), ExitCode.CONFIG, "--moe-router-topk")
    assert not (tmp_path / "run").exists()


def test_all_invalid_flags_are_reported(reject, data, tmp_path):
    more = ["--moe-router-topk", "9", "--num-query-groups", "3", "--global-batch-size", "7"]
    words = ["--moe-router-topk", "--num-query-groups", "--global-batch-size", "3 problems"]
    reject(arguments(data, tmp_path / "run", *more), ExitCode.CONFIG, *words)


def test_an_unwritable_run_folder(reject, data, tmp_path):
    (tmp_path / "file").write_text("in the way")
    reject(arguments(data, tmp_path / "file" / "run"), ExitCode.ENVIRONMENT, "cannot be written", "--run-dir")


def test_a_checkpoint_of_another_model(reject, data, tmp_path):
    short = ["--train-iters", "1", "--lr-warmup-iters", "0", "--save-interval", "1", "--eval-iters", "0"]
    assert main(arguments(data, tmp_path / "run", *short), {}) == ExitCode.OK
    load = ["--load", str(tmp_path / "run" / "checkpoints"), "--moe-ffn-hidden-size", "40", "--finetune"]
    reject(arguments(data, tmp_path / "other", *short, *load), ExitCode.CHECKPOINT, "does not fit", "40")


def test_a_nonfinite_step_stops_the_run_before_the_update(reject, data, tmp_path):
    more = ["--lr", "1e30", "--min-lr", "0", "--clip-grad", "0", "--lr-warmup-iters", "0", "--save-interval", "100"]
    reject(arguments(data, tmp_path / "run", *more), ExitCode.NUMERICS, "not finite", "rejected")
    assert not checkpoints(tmp_path)


def test_a_model_larger_than_the_memory(reject, data, tmp_path):
    more = ["--make-vocab-size-divisible-by", str(10**12)]
    reject(arguments(data, None, *more), ExitCode.MEMORY, "out of memory before the first", "weights")


def test_a_checkpoint_larger_than_the_free_disk_space(reject, data, tmp_path):
    more = ["--make-vocab-size-divisible-by", str(10**12)]
    reject(arguments(data, tmp_path / "run", *more), ExitCode.ENVIRONMENT, "takes 768 TB", "--save folder")
