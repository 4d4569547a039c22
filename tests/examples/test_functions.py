"""Score function, activation, balancing loss, metric and flag, each registered by one imported file.

docs/development.md shows these files.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.functions import Balancing, RouterMetric
from megatron_moe.config.imports import ImportProblem, import_file
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.moe import RouterConfig
from megatron_moe.config.registry import BALANCING, SCORE_FUNCTIONS, RegistrationProblem
from megatron_moe.config.run import RunPlan
from megatron_moe.kernels.backends.triton.activation import activation as fused_activation
from megatron_moe.kernels.backends.triton.routing.op import route as fused_route
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.moe.upcycling import expected_weight_sum
from pretrain_moe import main
from tests.end_to_end.tiny_run import arguments, generate, losses, records, succeed
from tests.helpers.check_cases import on_ranks
from tests.helpers.command_lines import calls_of, plan_of, problems_of, texts_of
from tests.helpers.example_proofs import check_layout, check_memory, check_replay, covering, with_fp8
from tests.helpers.programs import run_ranks
from tests.helpers.tolerances import FP64_REF
from tests.parity import cells
from tests.parity.dimensions import cell_of
from tools.launch import main as launch
from tools.plan import main as plan
from tools.verify_layout import main as verify_layout

FOLDER = Path(__file__).parent
FILES = tuple(
    str(FOLDER / f"{name}.py") for name in ("score_function", "activation", "balancing_loss", "metric", "flag")
)
USE = """
    --moe-router-score-function warm_sigmoid --no-swiglu --activation-func mish --gated-linear-unit
    --moe-router-load-balancing-type aux_loss kl_loss --moe-aux-loss-coeff 0.01 0.02
""".split()
USE += ["--router-temperature", "2"]
"""Flags that use every example."""


def imported() -> None:
    for file in FILES:
        import_file(file)


def with_examples(plan: RunPlan) -> RunPlan:
    """Makes all layers of a parity plan use every example."""
    imported()

    def changed(block):
        if hasattr(block, "activation"):
            return replace(block, activation=ActivationConfig(kind="mish", gated=True))
        router = replace(
            block.router,
            score_function="warm_sigmoid",
            options=(("router_temperature", 2.0),),
            balancing=("aux_loss", "kl_loss"),
            aux_loss_coeffs=(0.02, 0.05),
        )
        return replace(block, router=router, experts=changed(block.experts))

    layers = tuple(replace(layer, feed_forward=changed(layer.feed_forward)) for layer in plan.model.layers)
    return replace(plan, model=replace(plan.model, layers=layers))


def test_the_documentation_shows_the_tested_files():
    page = (FOLDER.parents[1] / "docs" / "development.md").read_text(encoding="utf-8")
    for file in FOLDER.glob("*.py"):
        if not file.name.startswith(("test_", "__")):
            code = file.read_text(encoding="utf-8").partition('"""\n\n')[2]
            assert f"```python\n{code}```" in page, f"copy {file} to docs/development.md"


@pytest.mark.parametrize(
    "cell",
    [
        *covering("dispatcher=alltoall"),
        "tp=2 sp=on dp=2 ep=4 dispatcher=alltoall balance=none",
        "tp=2 sp=on cp=2 documents=packed balance=none recompute=moe",
        "pp=2 vpp=2 dp=2 ep=2 dispatcher=alltoall accumulation=2 balance=none recompute=small",
    ],
)
def test_layouts_equal_one_rank(cell):
    plan = with_examples(cells.plan_of(cell_of(cell)))
    check_layout(plan)
    assert {"kl_loss", "moe/margin"} <= {name for name, _ in cells.record_one_rank(plan).metrics[0]}


def test_layouts_with_fp8_gemms_equal_one_rank():
    check_layout(with_fp8(with_examples(cells.plan_of(cell_of("tp=2 sp=on balance=none")))))


def test_replayed_graphs_equal_eager_steps():
    check_replay(with_examples(cells.plan_of(cell_of("balance=none"))))


def test_fused_kernels_leave_registered_functions_to_plain_torch():
    imported()
    torch.manual_seed(0)
    config = RouterConfig(hidden_size=8, num_experts=8, topk=2, score_function="softsign")
    logits_TE = torch.randn(6, 8, dtype=torch.float64)
    options = {"balance_sets": 2, "z": True, "valid_T": torch.tensor([True] * 5 + [False])}
    x_RF, probs_R = torch.randn(5, 16, dtype=torch.float64), torch.tensor([0.5, 1, 0, 2, 0.1], dtype=torch.float64)

    def results(route, activation):
        leaves = [each.clone().requires_grad_() for each in (logits_TE, x_RF, probs_R)]
        routed = route(leaves[0], None, config, **options)
        out_RF = activation(leaves[1], leaves[2], ActivationConfig(kind="mish", gated=True))
        values = [routed.probs_TK, routed.balance.scores_GE, routed.z_sum, out_RF]
        sum((value * torch.linspace(0.5, 2, value.numel()).view(value.shape)).sum() for value in values).backward()
        return [*values, routed.ids_TK, routed.counts_E, routed.balance.counts_GE, *(leaf.grad for leaf in leaves)]

    plain = results(reference.route, reference.activation)
    for got, expected in zip(results(fused_route, fused_activation), plain, strict=True):
        FP64_REF.check(got, expected, "fallback")


def test_emulated_memory_agrees_with_the_cost_model():
    words = ["--import", *FILES, *USE, "--bf16", "--seq-length 1024 --max-position-embeddings 1024 --hidden-size 1024"]
    sizes = "--ffn-hidden-size 4096 --moe-ffn-hidden-size 1024 --transformer-impl local --micro-batch-size 1"
    check_memory(plan_of(f"{' '.join(words)} {sizes}", "--swiglu --moe-aux-loss-coeff"))


def test_a_dry_run_needs_no_torch():
    """`calls_of` asserts that torch is not imported."""
    text, _ = calls_of(["--recipe", "m8", "--dry-run", "--import", *FILES, "--moe-router-score-function", "softsign"])
    assert "score function softsign: computed by plain torch, because no kernel fuses it" in text


def test_a_run_trains_resumes_on_two_ranks_and_generates(data, tmp_path):
    run = tmp_path / "run"
    command = arguments(data, run, "--import", *FILES, *USE, "--train-iters", "9")
    command.remove("--swiglu")
    assert main([*command, "--exit-interval", "6", "--save-interval", "6"], {}) == ExitCode.OK
    first = losses(run)
    assert first[6] < first[1] - 0.5
    last = [row for row in records(run) if "lm loss" in row][-1]
    assert last["kl_loss"] > 0 and last["moe/margin"] > 0
    note = "score function warm_sigmoid and activation mish: computed by plain torch, because no kernel fuses it\n"
    assert note in (run / "log.txt").read_text()
    text = (run / "run.yaml").read_text()
    assert "router-temperature: 2.0" in text and f"# imported {FILES[0]}: sha256 " in text
    again = ["--config", run / "run.yaml", "--exit-interval", "9", "--expert-model-parallel-size", "2"]
    again += ["--moe-token-dispatcher-type", "alltoall"]
    succeed(run_ranks(2, again, cwd=tmp_path))
    whole = tmp_path / "whole"
    assert main([*command, "--run-dir", str(whole)], {}) == ExitCode.OK
    for iteration in (7, 8, 9):
        assert losses(run)[iteration] == pytest.approx(losses(whole)[iteration], rel=1e-4)
    answer = succeed(generate(run / "checkpoints", "--prompt", "import", "--max-new-tokens", "4"))
    assert "import" in answer.stdout


def test_job_scripts_and_plans_import_the_files(capsys):
    flags = ["--recipe", "m8", "--import", FILES[0], "--moe-router-score-function", "softsign"]
    slurm = "--gpus 1 --run-dir runs/x --slurm partition=a time=1:00:00 --dry-run".split()
    assert launch([*flags, *slurm]) == ExitCode.OK
    assert f"--import {FILES[0]}" in " ".join(capsys.readouterr().out.replace("\\\n", " ").split())
    assert plan([*flags, "--gpus", "1", "--fit"]) == ExitCode.OK, capsys.readouterr()


def test_verify_layout_imports_the_files_on_every_rank(capsys):
    flags = "--recipe m8 --steps 1 --nproc 2 --moe-router-score-function softsign".split()
    assert verify_layout([*flags, "--import", FILES[0]], {}) == ExitCode.OK, capsys.readouterr().out


def test_upcycling_uses_the_score_of_a_zero_logit():
    imported()
    router = RouterConfig(hidden_size=8, num_experts=4, topk=1, score_function="softsign")
    assert expected_weight_sum(router) == 0.5
    with SCORE_FUNCTIONS.restored():
        SCORE_FUNCTIONS.register("quarter", replace(SCORE_FUNCTIONS.get("softsign"), function=lambda x: x * 0 + 0.25))
        assert expected_weight_sum(replace(router, score_function="quarter", scaling_factor=2.0)) == 0.5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--moe-router-score-function tangent", "is not one of softmax, sigmoid, renormalized_softmax, sqrtsoftplus"),
        ("--moe-router-load-balancing-type kl_loss", "is not one of aux_loss, seq_aux_loss"),
        ("--activation-func mish", "is not one of silu, gelu"),
        ("--import no_such.py", "--import no_such.py: the Python file does not exist"),
        (f"--import {FOLDER / 'failing.txt'}", "the Python file does not exist"),
        ("--router-temperature 2", "--router-temperature is not a flag"),
    ],
)
def test_an_unknown_name_is_one_sentence(flags, message):
    (text,) = texts_of(flags)
    assert message in text and "\n" not in text


def test_an_activation_beside_swiglu_is_rejected_with_the_flags_that_replace_it():
    (problem,) = problems_of("--swiglu --activation-func relu")
    assert problem.remedy == "--no-swiglu --gated-linear-unit for a gated activation, or --no-swiglu"


def test_errors_of_an_imported_file_name_its_line(tmp_path):
    file = tmp_path / "mistake.py"
    file.write_text('"""Two lines."""\nvalue = undefined\n')
    (text,) = texts_of(f"--import {file}")
    assert text.startswith(f"--import {file}:2 raised NameError: name 'undefined' is not defined")
    clash = tmp_path / "clash.py"
    clash.write_text((FOLDER / "score_function.py").read_text().replace('"softsign"', '"sigmoid"'))
    with pytest.raises(ImportProblem, match="the score function 'sigmoid' is registered twice"):
        import_file(str(clash))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "ACTIVATIONS.register('mine', ScoreFunction(function=abs))",
            "the activation 'mine' must be an instance of Activation, but is of the type ScoreFunction; register it "
            "as a score function",
        ),
        ("MIXERS.register('mine', 3)", "the mixer 'mine' must be a function of the flags, but is of the type int"),
        ("FLAGS.register('mine', int)", "the flag group 'mine' must be a dataclass of fields declared by flag()"),
        ("SCORE_FUNCTIONS.register('mine', abs)", "the score function 'mine' must be an instance of ScoreFunction"),
    ],
)
def test_an_entry_of_another_kind_is_rejected_when_it_is_registered(tmp_path, code, message):
    names = "ACTIVATIONS, FLAGS, MIXERS, SCORE_FUNCTIONS"
    file = tmp_path / "mistake.py"
    file.write_text(
        "from megatron_moe.config.functions import ScoreFunction\n"
        f"from megatron_moe.config.registry import {names}\n{code}\n"
    )
    (text,) = texts_of(f"--import {file}")
    assert message in text and f"{file}:3" in text and "\n" not in text


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("lambda logits: logits.sum(-1)", "returns the shape (3,) for logits of the shape (3, 8)"),
        ("lambda logits: 1.0", "returns float for logits"),
        ("lambda logits: logits", "returns scores below 0, down to -20 for logits from -20 to 20"),
        ("lambda logits: logits.log()", "returns NaN or infinite scores"),
        ("lambda logits: undefined", "raised NameError: name 'undefined' is not defined"),
    ],
)
def test_a_wrong_score_function_ends_a_run_in_one_sentence(data, tmp_path, capfd, function, message):
    file = tmp_path / "wrong.py"
    file.write_text(
        "from megatron_moe.config.functions import ScoreFunction\n"
        "from megatron_moe.config.registry import SCORE_FUNCTIONS\n"
        f"SCORE_FUNCTIONS.register('wrong_{abs(hash(function))}', ScoreFunction(function={function}))\n"
    )
    with SCORE_FUNCTIONS.restored():
        command = ["--import", str(file), "--moe-router-score-function", f"wrong_{abs(hash(function))}"]
        assert main([*arguments(data, tmp_path / "run", *command)], {}) == ExitCode.CONFIG
    error = capfd.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("code", "flags", "message"),
    [
        (
            "BALANCING.register('wrong', Balancing(function=lambda load: load.fractions().var(), metric='my_loss'))",
            "--moe-router-load-balancing-type wrong --moe-aux-loss-coeff 0.01",
            "the balancing loss my_loss has no gradient and would balance nothing; use load.mean_scores()",
        ),
        (
            "BALANCING.register('wrong', Balancing(function=lambda load: load.mean_scores(), metric='my_loss'))",
            "--moe-router-load-balancing-type wrong --moe-aux-loss-coeff 0.01",
            "the balancing loss my_loss must be one number, but has the shape [1, ",
        ),
        (
            "METRICS.register('wrong', RouterMetric(function=lambda shares: shares.max(), of='loads'))",
            "",
            "the metric moe/wrong must return one value per row of shares [n, E], shape [",
        ),
        (
            "METRICS.register('wrong', RouterMetric(function=lambda logits, ids, probs: probs))",
            "",
            "the metric moe/wrong must return one value per token, shape [",
        ),
    ],
)
def test_a_wrong_loss_or_metric_ends_a_run_in_one_sentence(data, tmp_path, capfd, code, flags, message):
    file = tmp_path / "wrong.py"
    file.write_text(
        "from megatron_moe.config.functions import Balancing, RouterMetric\n"
        f"from megatron_moe.config.registry import BALANCING, METRICS\n{code}\n"
    )
    assert main(arguments(data, tmp_path / "run", "--import", str(file), *flags.split()), {}) == ExitCode.CONFIG
    error = capfd.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_metric_of_unknown_values_is_rejected():
    with pytest.raises(RegistrationProblem, match="of='load'; it must be 'tokens' or 'loads'"):
        RouterMetric(function=lambda shares: shares[:, 0], of="load")


def test_a_name_that_no_file_registers_is_reported_when_the_model_is_built():
    config = RouterConfig(hidden_size=8, num_experts=4, topk=1, score_function="tangent")
    with pytest.raises(RegistrationProblem, match="'tangent' is not a registered score function"):
        reference.route(torch.zeros(2, 4), None, config)


def test_losses_per_sequence_are_rejected_with_dynamic_context_parallelism() -> None:
    flags = "--context-parallel-size 4 --dynamic-context-parallel --moe-router-load-balancing-type spread"
    with BALANCING.restored():
        BALANCING.register("spread", Balancing(function="math:fsum", metric="spread", per_sequence=True))
        (text,) = texts_of(f"{flags} --global-batch-size 32", environ=on_ranks(8))
    assert text == "spread counts the tokens of a sequence over all context-parallel ranks"
