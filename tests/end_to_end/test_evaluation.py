"""Evaluation on several validation sets and a test set, during training and with --skip-train."""

import pytest

from megatron_moe.config.exit_codes import ExitCode
from pretrain_moe import main
from tests.end_to_end.tiny_run import MODEL, TRAINING, make_data, records

COMMON = [*MODEL, *TRAINING[: TRAINING.index("--split")], "--device", "cpu", "--no-progress-bar", "--no-plots"]


TEXT = "lm loss validation-corpus_text_document"
DIGITS = "lm loss validation-digits_text_document"


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Writes a data set of digits, which differs from program text, and returns its prefix."""
    parts = [f"{7919**4 * number:0500d}" for number in range(40)]
    return make_data(tmp_path_factory.mktemp("digits"), parts, name="digits")


@pytest.fixture(scope="module")
def flags(data, digits):
    """Flags of a run on program text, evaluated on program text and on digits."""
    paths = ["--train-data-path", data, "--valid-data-path", data, digits, "--test-data-path", digits]
    return [*COMMON, *paths, "--multiple-validation-sets", "--train-iters", "6", "--save-interval", "6"]


@pytest.fixture(scope="module")
def trained(flags, tmp_path_factory):
    """Folder of a finished run."""
    run = tmp_path_factory.mktemp("evaluation") / "run"
    assert main([*flags, "--run-dir", str(run)], {}) == ExitCode.OK
    return run


def measured(run):
    """Last value of every evaluated metric, by name."""
    rows = {name: value for row in records(run) for name, value in row.items()}
    return {name: value for name, value in rows.items() if "validation" in name or "test" in name}


def test_every_validation_set_and_the_test_set_have_separate_losses(trained):
    found = measured(trained)
    assert {name for name in found if not name.endswith(" ppl")} == {TEXT, DIGITS, "lm loss test"}
    assert found[DIGITS] - found[TEXT] > 0.5, "the model was trained on text only"
    assert abs(found["lm loss test"] - found[DIGITS]) < 0.1, "the test set contains digits too"


@pytest.mark.parametrize("folder", ["", "checkpoints", "checkpoints/iter_0000006"])
def test_skip_train_repeats_the_evaluation_of_the_run(folder, trained, flags, tmp_path, capfd):
    alone = ["--skip-train", "--load", str(trained / folder), "--lr", "1", "--run-dir", str(tmp_path / "run")]
    assert main([*flags, *alone], {}) == ExitCode.OK
    assert measured(tmp_path / "run") == measured(trained)
    assert not list((tmp_path / "run").rglob("manifest.json"))
    assert "on test set" in capfd.readouterr().out


def test_skip_train_without_a_checkpoint_is_rejected(flags, tmp_path, capfd):
    assert main([*flags, "--skip-train", "--load", str(tmp_path)], {}) == ExitCode.CHECKPOINT
    assert "which is required by --skip-train" in capfd.readouterr().err


def test_a_finished_run_records_every_evaluation_once(flags, tmp_path, capfd):
    """A second launch evaluates only what is not recorded, here the test set, whose record is removed. A third launch
    evaluates nothing; --skip-train repeats everything."""
    run, again = tmp_path / "run", []
    assert main([*flags, "--run-dir", str(run)], {}) == ExitCode.OK
    path = run / "metrics.jsonl"
    complete = path.read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in complete if "lm loss test" not in line))
    for more in ([], [], ["--skip-train"]):
        assert main([*flags, "--run-dir", str(run), *more], {}) == ExitCode.OK
        again.append(path.read_text().splitlines())
    evaluations = [line for line in complete if "lm loss validation" in line or "lm loss test" in line]
    assert len(evaluations) == 3
    assert again == [complete, complete, [*complete, *evaluations]]
    assert "the test loss of iteration 6 is in metrics.jsonl already" in capfd.readouterr().out
