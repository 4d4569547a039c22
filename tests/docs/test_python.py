"""docs/python.md and the notebook run as printed; the library loads what training runs and transformers save."""

import json
import re
from dataclasses import replace

import matplotlib
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_moe.api import LanguageModel
from megatron_moe.checkpoint.directory import find_checkpoints
from megatron_moe.config.exit_codes import CheckpointProblem, EnvironmentProblem, ExitCode
from pretrain_moe import main
from tests.checkpoint.hf_models import VOCAB, configs, hf_model, saved
from tests.end_to_end.tiny_run import MODEL, TRAINING
from tests.helpers.ranks import REPOSITORY
from tests.helpers.tolerances import EXACT

PAGE, NOTEBOOK = (REPOSITORY / "docs" / name for name in ("python.md", "notebooks/inspect_routing.ipynb"))
FLAGS = [*MODEL, *TRAINING, "--mock-data", "--no-progress-bar"]


def test_the_code_of_the_page_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})
    assert "tensor(" in capsys.readouterr().out


def run_notebook() -> dict:
    """Executes the code cells and returns their variables."""
    names: dict = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, "stored outputs would become stale"
            exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), names)
    return names


def test_the_notebook_loads_the_model_of_a_run_and_plots_its_routing(tmp_path, monkeypatch, capsys):
    matplotlib.use("Agg")
    run = tmp_path / "runs" / "quickstart"
    assert main([*FLAGS, "--run-dir", str(run), "--train-iters", "3", "--save-interval", "3"], {}) == ExitCode.OK
    (tmp_path / "docs" / "notebooks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "docs" / "notebooks")
    names = run_notebook()
    routing = names["routing"]
    trained = LanguageModel.load(run / "checkpoints", device="cpu")
    EXACT.check(names["model"].logits(names["text"]), trained.logits(names["text"]), "weights of the run")
    shown = [image.get_array() for axis in names["axes"][:, 0] for image in axis.get_images()]
    assert len(shown) == len(routing.layers) == 2
    for image, routed in zip(shown, routing.layers.values(), strict=True):
        assert image.shape == (8, len(routing.tokens))
        for token, experts in enumerate(routed.ids_TK.tolist()):
            assert set(image[:, token].nonzero()[0].tolist()) == set(experts)
    assert {expert: len(taken) for expert, taken in names["tokens_of"].items()} == dict(enumerate(routing.loads()[2]))


def test_the_notebook_names_the_command_that_makes_its_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"bash scripts/quickstart\.sh"):
        run_notebook()


def test_a_loaded_checkpoint_has_the_weights_of_the_run(tmp_path):
    run = tmp_path / "run"
    command = [*FLAGS, "--run-dir", str(run), "--train-iters", "3", "--save-interval", "3"]
    assert main(command, {}) == ExitCode.OK
    loaded, random = LanguageModel.load(run / "checkpoints", device="cpu"), LanguageModel.build(FLAGS, device="cpu")
    stored = load_file(find_checkpoints(run / "checkpoints")[0].path / "model-00000-of-00001.safetensors")
    state = loaded.model.state_dict()
    assert stored.keys() == state.keys()
    for name, value in stored.items():
        EXACT.check(state[name], value, name)
    assert (random.logits("text") - loaded.logits("text")).abs().max() > 1e-3
    with pytest.raises(CheckpointProblem):
        LanguageModel.load(tmp_path / "nothing")


def test_a_hugging_face_folder_gives_the_logits_of_transformers(tmp_path):
    oracle = hf_model(configs()["olmoe"])
    model = LanguageModel.load(saved(oracle, tmp_path / "hf"), "--seq-length 64", device="cpu")
    ids = list(range(3, 20))
    same = LanguageModel.load(f"hf:{tmp_path}/hf", "--seq-length 64", device="cpu")
    EXACT.check(same.logits(ids), model.logits(ids), "with the prefix of flags")
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(model.logits(ids)[:, :VOCAB], expected, rtol=1e-4, atol=1e-4)


def test_a_saved_model_is_loaded_by_this_library_by_runs_and_by_transformers(tmp_path):
    words = [*FLAGS, "--train-iters", "4"]
    model = LanguageModel.build(words, device="cpu")
    text = list(range(3, 20))
    first = model.save(tmp_path / "first")
    assert first.name == "iter_0000000"
    for _ in range(2):
        model.train_step([text] * model.plan.batch.micro_batch_size)
    before = model.logits(text)
    assert model.save(tmp_path / "ours").name == "iter_0000002"
    EXACT.check(LanguageModel.load(tmp_path / "ours", device="cpu").logits(text), before, "checkpoint")
    assert (LanguageModel.load(tmp_path / "first", device="cpu").logits(text) - before).abs().max() > 0
    run = tmp_path / "run"
    command = [*words, "--device", "cpu", "--load", str(tmp_path / "ours"), "--run-dir", str(run)]
    assert main(command, {}) == ExitCode.OK
    iterations = [json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert min(iterations) == 3 and max(iterations) == 4

    oracle = saved(hf_model(configs()["olmoe"]), tmp_path / "hf")
    ours = LanguageModel.load(oracle, "--seq-length 64", device="cpu")
    ours.train_step([text])
    assert ours.save(f"hf:{tmp_path}/back") == tmp_path / "back"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor([text])).logits[0]
    torch.testing.assert_close(ours.logits(text)[:, :VOCAB], expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(EnvironmentProblem, match="exists"):
        ours.save(f"hf:{tmp_path}/back")


def test_loads_count_the_choices_and_inputs_are_checked():
    model = LanguageModel.build(FLAGS, device="cpu")
    routing = model.routing("some text")
    assert list(routing.layers) == [1, 2] and len(routing.tokens) == 9
    for layer, routed in routing.layers.items():
        assert routing.loads()[layer] == torch.bincount(routed.ids_TK.flatten(), minlength=8).tolist()
    with pytest.raises(ValueError, match="65 tokens; the model takes 1 to 64"):
        model.logits("x" * 65)
    with pytest.raises(ValueError, match="3 texts are not a multiple of --micro-batch-size 2"):
        model.train_step(["abc"] * 3)


def test_choices_beyond_the_capacity_of_an_expert_are_replayed():
    """They affect the weights of the other choices: the softmax is over all selected experts."""
    model, text = LanguageModel.build([*FLAGS, "--moe-expert-capacity-factor", "0.5"], device="cpu"), "one two three"
    routing = model.routing(text)
    assert any((routed.probs_TK == 0).any() for routed in routing.layers.values())
    EXACT.check(model.logits(text, routing), model.logits(text), "its own choices")


def test_a_model_without_experts_takes_an_empty_routing():
    flags = "--recipe quickstart --tokenizer-type ByteTokenizer --vocab-size 257 --moe-layer-freq [0]*3"
    model = LanguageModel.build(flags, device="cpu")
    routing = model.routing("abc")
    assert routing.layers == {} and model.loss("abc", routing) == model.loss("abc")


def test_tokens_take_given_experts():
    flags = [*FLAGS, "--hidden-dropout", "0", "--attention-dropout", "0"]
    model, text = LanguageModel.build(flags, device="cpu"), "one two three four"
    routing = model.routing(text)
    EXACT.check(model.logits(text, routing), model.logits(text), "its own choices")
    layers = {
        layer: replace(each, ids_TK=(each.ids_TK + 1) % len(each.loads_E)) for layer, each in routing.layers.items()
    }
    other = replace(routing, layers=layers)
    assert abs(model.loss(text, other) - model.loss(text)) > 1e-4

    def first_loss(*routings):
        return LanguageModel.build(flags, device="cpu").train_step([text, text], *routings)

    assert first_loss([routing, routing]) == first_loss()
    assert first_loss([routing, other]) != first_loss()
    with pytest.raises(ValueError, match="1 routings for 2 texts"):
        model.train_step([text, text], [other])
