"""tools/verify_layout.py: correct layouts pass, injected faults are detected and explained."""

import pytest

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.layout_check.injected_errors import InjectedError, UnknownInjectedError
from megatron_moe.layout_check.table import Comparison, ComparisonRow, summary
from tests.helpers.command_lines import SMALL, words
from tests.helpers.thinned import thinned
from tools.verify_layout import main

LAYOUT = """
    --expert-model-parallel-size 8 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel
    --moe-token-dispatcher-type alltoall --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --moe-router-load-balancing-type seq_aux_loss --bf16
"""


def verify(more: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code, and standard output followed by errors."""
    code = main([*words(SMALL), *words(LAYOUT), *words(more)], {})
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize(
    "more",
    thinned(
        [
            "",
            # dropout has Megatron's default, 0.1
            "--moe-router-load-balancing-type global_aux_loss --moe-input-jitter-eps 0.01",
            "--num-query-groups 1",
        ],
        3,
    ),
    ids=["balancing per sequence", "global balancing with dropout", "ranks that share a query group"],
)
def test_correct_layout_equals_one_rank(more, capsys):
    code, text = verify(f"--steps 2 {more}", capsys)
    assert "folded to 4 ranks: tp 2 ep 2 dp 2 edp 2; stages Et*3L" in text
    assert "equal to one rank:" in text and "NOT" not in text
    assert code == ExitCode.OK
    for quantity in ("loss", "norm", "metric", "gradient", "weight", "tokens"):
        assert f"\n{quantity} " in text


def test_blockwise_muon_is_replaced_because_its_results_depend_on_the_ranks(capsys):
    code, text = verify("--optimizer muon --muon-tp-mode blockwise --nproc 2 --steps 1", capsys)
    assert "folded to 2 ranks: tp 2 ep 2" in text
    assert "NOT verified, because its results depend on tp: --muon-tp-mode blockwise" in text
    assert code == ExitCode.OK and "equal to one rank:" in text


PIPELINE = """
    --no-sequence-parallel --tensor-model-parallel-size 1 --context-parallel-size 2 --pipeline-model-parallel-size 4
    --pipeline-model-parallel-layout Et|t|t|t|||m|L --mtp-num-layers 1 --expert-model-parallel-size 2
"""


def test_correct_pipeline_equals_one_rank_and_lost_axes_are_named(capsys):
    code, text = verify(f"{PIPELINE} --moe-router-force-biased 0.5 --nproc 4 --steps 1", capsys)
    assert "folded to 4 ranks: cp 2 pp 2 ep 2; stages Et|t||mL" in text
    assert "NOT verified, because 4 ranks are too few: dp, edp" in text
    assert "equal to one rank:" in text and "NOT equal" not in text
    assert code == ExitCode.OK


@pytest.mark.slow
def test_the_layout_of_deepseek_v3_on_1024_ranks_is_equal_to_one_rank(capsys):
    assert main(["--recipe", "deepseek-v3-h100-1024"], {}) == ExitCode.OK
    text = capsys.readouterr().out
    assert "folded to 8 ranks: tp 2 pp 2 ep 2 dp 2 edp 2; stages Et|(t|)*2mL" in text


def test_doubled_gradients_of_experts_are_found_and_explained(capsys):
    code, text = verify("--nproc 2 --steps 1 --inject scale-expert-grads:2", capsys)
    assert code == ExitCode.DRIFT == 12
    wrong = text.partition("gradients of the first step are wrong in 4 parameters")[2].splitlines()[1:3]
    for line, matrix in zip(wrong, ("linear_fc2", "linear_fc1"), strict=True):
        assert f"decoder.layers.*.mlp.experts.{matrix}.weight  looks like a doubled reduction over a group of 2" in line
    assert "NOT equal to one rank" in text


def test_skipped_reductions_are_detected_in_norms_and_routers(capsys):
    code, text = verify("--nproc 2 --steps 1 --inject skip-partial-sums --proxy --expert-model-parallel-size 1", capsys)
    assert code == ExitCode.DRIFT
    assert "decoder.layers.*.mlp.router.weight  copies on ranks [0, 1] differ" in text
    assert "decoder.final_layernorm.weight  copies on ranks [0, 1] differ" in text
    assert "mlp.experts.linear_fc1.weight  " not in text.partition("gradients of the first step are wrong")[2]


@pytest.mark.parametrize(
    ("more", "code", "text"),
    [
        ("--num-experts 7", ExitCode.CONFIG, "8 ranks (--expert-model-parallel-size) do not divide 7 experts"),
        ("--num-layer 7", ExitCode.CONFIG, "--num-layer is not a flag"),
        ("--inject nonsense:2", ExitCode.CONFIG, "--inject nonsense:2 is not a known error"),
    ],
)
def test_invalid_requests_are_rejected(more, code, text, capsys):
    found, printed = verify(more, capsys)
    assert found == code and text in printed


@pytest.mark.parametrize(
    ("text", "injected_error"),
    [
        ("scale-expert-grads:2", InjectedError("scale-expert-grads", 2.0)),
        ("scale-attention-grads:0.5", InjectedError("scale-attention-grads", 0.5)),
        ("skip-partial-sums", InjectedError("skip-partial-sums")),
    ],
)
def test_injected_errors_are_parsed(text, injected_error):
    assert InjectedError.parse(text) == injected_error


@pytest.mark.parametrize("text", ["scale-expert-grads", "scale-expert-grads:x", "skip-partial-sums:2", "", "nan:nan"])
def test_unknown_injected_errors_are_rejected(text):
    with pytest.raises(UnknownInjectedError, match="choose one of: scale-expert-grads:FACTOR"):
        InjectedError.parse(text)


def test_summary_shows_the_worst_row_over_layers_and_steps():
    def row(name: str, error: float, bad: bool = False, what: str = "gradient") -> ComparisonRow:
        return ComparisonRow(what, name, "attention", error, 2.0 if bad else None, "doubled" if bad else "", bad)

    rows = (row("a.0.w", 1e-16), row("a.1.w", 1.0, bad=True), row("b", 2e-16), row("loss, step 2", 0.5, True, "metric"))
    lines = summary(Comparison(rows)).splitlines()
    assert lines[1].split() == ["gradient", "a.*.w", "attention", "1", "of", "2", "WRONG", "1.0e+00", "2", "doubled"]
    assert lines[2].split() == ["gradient", "b", "attention", "1", "2.0e-16"]
    assert lines[3].split()[:3] == ["metric", "loss", "attention"]
    assert lines[5:7] == [
        "gradients of the first step are wrong in 1 parameters, which affects all later results:",
        "  a.*.w (in some layers)  doubled",
    ]


@pytest.mark.parametrize("number", ["--nproc 0", "--steps x", "--timeout -1"])
def test_invalid_numbers_are_rejected(number, capsys):
    with pytest.raises(SystemExit):
        main([*words(SMALL), *number.split()], {})
    assert f"{number.split()[0]}: {number.split()[1]!r} is not an integer of at least 1" in capsys.readouterr().err
