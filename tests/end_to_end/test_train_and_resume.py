"""Training runs as a user starts them: run folder, bitwise resume, two ranks, finetuning, generation."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from megatron_moe.config.exit_codes import ExitCode
from pretrain_moe import main
from tests.end_to_end.tiny_run import MODEL, TRAINING, arguments, generate, losses, records, succeed
from tests.helpers.process_pool import free_port
from tests.helpers.programs import PROGRAM, run_ranks, run_script
from tests.helpers.ranks import REPOSITORY, child_environment
from tests.helpers.thinned import nightly_only
from tests.helpers.tolerances import FP64_LAYOUT
from tools import plot_run


@pytest.fixture(scope="module")
def whole_run(data, tmp_path_factory):
    """A run of 12 iterations with a checkpoint after 6 and at the end."""
    run = tmp_path_factory.mktemp("whole") / "run"
    process = succeed(run_script(PROGRAM, *arguments(data, run, "--save-interval", "6", "--plots"), cwd=run.parent))
    return run, process


def test_the_loss_falls_and_the_run_folder_is_complete(whole_run):
    run, process = whole_run
    curve = losses(run)
    assert list(curve) == list(range(1, 13))
    assert curve[12] < curve[1] - 1.0, curve
    found = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    expected = {"run.yaml", "command.txt", "environment.txt", "log.txt", "metrics.jsonl", "status.json"}
    expected |= {"plots/loss.png", "plots/expert_load.png"}
    for iteration in ("iter_0000006", "iter_0000012"):
        expected |= {f"checkpoints/{iteration}/{name}" for name in ("manifest.json", "train_state.json", "run.yaml")}
    assert expected <= found, sorted(expected - found)
    assert any(name.startswith("tensorboard/events") for name in found)
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert " iteration       12/      12 | consumed samples:           96 |" in process.stdout


def test_validation_is_reported_and_falls(whole_run):
    run, process = whole_run
    validation = [row["lm loss validation"] for row in records(run) if "lm loss validation" in row]
    assert len(validation) == 2 and validation[-1] < validation[0], validation
    assert "validation loss at iteration 6 |" in process.stdout
    assert "validation loss at iteration 12 |" in process.stdout


def test_twelve_iterations_equal_six_and_six(whole_run, data, tmp_path):
    """Checkpoints are written asynchronously."""
    whole, _ = whole_run
    run = tmp_path / "run"
    command = arguments(data, run, "--save-interval", "3", "--async-save")
    assert main([*command, "--exit-interval", "6"], {}) == ExitCode.OK
    assert list(losses(run)) == list(range(1, 7))
    succeed(run_script(PROGRAM, *command, cwd=tmp_path))
    assert losses(run) == losses(whole)
    for kind in ("model", "optim"):
        name = f"checkpoints/iter_0000012/{kind}-00000-of-00001.safetensors"
        mine, theirs = load_file(run / name), load_file(whole / name)
        assert mine.keys() == theirs.keys() and len(mine) > 10
        different = [key for key in mine if mine[key].tobytes() != theirs[key].tobytes()]
        assert not different, different
    states = [json.loads((r / "checkpoints/iter_0000012/train_state.json").read_text()) for r in (run, whole)]
    assert states[0] == states[1]


VARIANTS = {
    "mtp, sigmoid, expert bias, z loss": """--mtp-num-layers 1 --moe-router-score-function sigmoid
        --moe-router-enable-expert-bias --moe-z-loss-coeff 1e-3 --moe-router-load-balancing-type seq_aux_loss""",
    "quantile balancing": "--moe-router-load-balancing-type quantile_balancing --moe-aux-loss-coeff 0",
}


@pytest.mark.parametrize("variant", nightly_only(VARIANTS, ["quantile balancing"]))
def test_two_ranks_log_and_evaluate_the_numbers_of_one(variant, data, tmp_path):
    common = ["--fp64", "--kernel-backend", "reference", "--train-iters", "3", "--eval-interval", "2"]
    common += VARIANTS[variant].split()
    assert main(arguments(data, tmp_path / "one", *common), {}) == ExitCode.OK
    succeed(run_ranks(2, arguments(data, tmp_path / "two", *common), cwd=tmp_path))
    one, two = records(tmp_path / "one"), records(tmp_path / "two")
    assert len(one) == len(two) == 3 + 2
    names = {name for row in one for name in row}
    expected = {"lm loss", "lm loss validation", "grad-norm"}
    expected |= {"mtp_1 loss", "z_loss", "seq_load_balancing_loss"} if "mtp" in variant else set()
    assert expected <= names, sorted(names)
    losses_and_norm = [name for name in names if "loss" in name and name != "loss-scale" or name == "grad-norm"]
    for theirs, ours in zip(two, one, strict=True):
        assert theirs.keys() == ours.keys()
        for name in losses_and_norm:
            if name in ours:
                FP64_LAYOUT.check(theirs[name], ours[name], f"{name} of iteration {ours['iteration']}")


@pytest.mark.slow
def test_ranks_started_by_srun_form_one_world(data, tmp_path):
    job = free_port(range(20000, 40000)) - 20000  # the ranks derive the port from the job id
    processes = []
    for rank in range(2):
        slurm = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_ID": str(job),
            "SLURM_NNODES": "1",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_STEP_NODELIST": "localhost",
        }
        command = [sys.executable, str(REPOSITORY / "pretrain_moe.py")]
        flags = ["--train-iters", "2", "--lr-warmup-iters", "0", "--eval-iters", "0"]
        command += arguments(data, tmp_path / "run", *flags)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=child_environment(**slurm), **streams))
    outputs = [process.communicate(timeout=600)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "using world size: 2, data-parallel size: 2" in outputs[0]
    assert list(losses(tmp_path / "run")) == [1, 2]


def test_finetuning_starts_at_iteration_zero_with_the_loaded_weights(whole_run, data, tmp_path):
    whole, _ = whole_run
    load = ["--load", str(whole / "checkpoints"), "--finetune", "--train-iters", "1", "--lr-warmup-iters", "0"]
    assert main(arguments(data, tmp_path / "run", *load), {}) == ExitCode.OK
    curve = losses(tmp_path / "run")
    assert list(curve) == [1] and curve[1] < losses(whole)[6]


def test_finetuning_in_bf16_trains_the_loaded_weights(whole_run, data, tmp_path):
    whole, _ = whole_run
    load = ["--load", str(whole), "--finetune", "--bf16", "--seed", "77", "--train-iters", "3", "--eval-iters", "0"]
    assert main(arguments(data, tmp_path / "run", *load), {}) == ExitCode.OK
    curve = losses(tmp_path / "run")
    assert list(curve) == [1, 2, 3] and max(curve.values()) < losses(whole)[6], curve


def test_ckpt_step_selects_the_checkpoint(whole_run, data, tmp_path, capsys):
    whole, _ = whole_run
    load = ["--load", str(whole / "checkpoints"), "--ckpt-step", "6", "--exit-interval", "7", "--eval-iters", "0"]
    assert main(arguments(data, tmp_path / "run", *load), {}) == ExitCode.OK
    assert "iter_0000006 at iteration 6" in capsys.readouterr().out
    assert list(losses(tmp_path / "run")) == [7]


@pytest.mark.parametrize(("flags", "saved"), [((), []), (("--save-interval", "2"), ["iter_0000002"])])
def test_a_run_on_mock_data_saves_a_checkpoint_only_on_request(flags, saved, tmp_path):
    line = [*MODEL, *TRAINING, "--mock-data", "--run-dir", str(tmp_path), "--train-iters", "2", "--eval-iters", "0"]
    assert main([*line, "--lr-warmup-iters", "0", *flags], {}) == ExitCode.OK
    assert set(losses(tmp_path)) == {1, 2}
    assert sorted(path.name for path in tmp_path.rglob("iter_*")) == saved


def test_the_page_of_a_run_has_its_charts(whole_run, tmp_path, capsys):
    run, _ = whole_run
    page = tmp_path / "page.html"
    assert plot_run.main([str(run), "--output", str(page)]) == ExitCode.OK
    assert capsys.readouterr().out == f"wrote {page}\n"
    root = ElementTree.fromstring(page.read_text().removeprefix("<!doctype html>\n"))
    figures = {figure.find("figcaption").text: figure for figure in root.iter("figure")}
    titles = (
        "Training loss",
        "Gradient norm",
        "Learning rate",
        "Throughput (tokens/s",
        "Routing entropy",
        "Dead expert",
    )
    for title in titles:
        (found,) = [figures[each] for each in figures if each.startswith(title)]
        (curve,) = found.iter("polyline")
        assert len(curve.get("points").split()) == 12, title
    assert len(list(root.iter("img"))) == 2, "the load of both MoE layers"


def test_tensorboard_has_throughput_and_expert_loads(whole_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, _ = whole_run
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    speeds = events.Scalars("tokens-per-second-per-gpu")
    assert [each.step for each in speeds] == list(range(1, 13)) and all(each.value > 0 for each in speeds)
    loads = [tag for tag in events.Tags()["histograms"] if "tokens_per_expert" in tag]
    assert len(loads) == 2
    for tag in loads:
        last = events.Histograms(tag)[-1]
        values = last.histogram_value
        assert last.step == 12 and values.num == 2 * 8 * 64, "the rows of the step, by expert"
        assert 0 <= values.min < values.max <= 7


def test_transformers_loads_an_export_during_training(data, tmp_path):
    run = tmp_path / "run"
    more = ("--moe-layer-freq", "1", "--train-iters", "2", "--lr-warmup-iters", "0", "--eval-iters", "0")
    assert main(arguments(data, run, *more, "--save-hf-interval", "2"), {}) == ExitCode.OK
    model, report = AutoModelForCausalLM.from_pretrained(
        run / "checkpoints" / "hf" / "iter_0000002", output_loading_info=True
    )
    assert not any(report.values()), report
    saved = load_file(run / "checkpoints" / "iter_0000002" / "model-00000-of-00001.safetensors")
    embedding = model.get_input_embeddings().weight.detach().numpy()
    assert (embedding == saved["embedding.word_embeddings.weight"][: len(embedding)]).all()


def test_the_checkpoint_generates_text(whole_run):
    run, _ = whole_run
    texts = [succeed(generate(run / "checkpoints", "--prompt", "def ", "--max-new-tokens", "8")) for _ in range(2)]
    assert "\ndef " in texts[0].stdout and texts[0].stdout == texts[1].stdout
