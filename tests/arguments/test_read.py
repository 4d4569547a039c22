"""Reading of command lines: help, exports, imports without torch, and error reports instead of tracebacks."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arguments.errors import Finished, FlagErrors
from arguments.explain import flags_document
from arguments.flags import GROUPS, Registry
from arguments.read import read_plan
from megatron_moe.config.run import RunPlan
from tests.helpers.check_cases import CASES
from tests.helpers.command_lines import SMALL, calls_of, plan_of, words

ROOT = Path(__file__).resolve().parent.parent.parent
REGISTRY = Registry.declared()
UPDATE = "run python tools/docs_gen.py flags, and review the difference"


def answer_to(*argv: str) -> str:
    with pytest.raises(Finished) as caught:
        read_plan(list(argv), {})
    return caught.value.text


def specs_of(plan: RunPlan) -> RunPlan:
    """Removes the record of where a plan's values came from, for comparisons."""
    return replace(plan, resolved_yaml="", command_line="", notes=())


REREAD = [case for case in CASES if not case.environ and "--moe-router-force" not in case.good]
"""Cases on one rank, except those with a forced router, which a file cannot request for real data."""


@pytest.mark.parametrize("case", REREAD, ids=lambda case: case.rule)
def test_a_plan_is_the_same_when_its_run_yaml_is_read_back(tmp_path, case):
    plan = plan_of(case.good, case.without)
    path = tmp_path / "run.yaml"
    path.write_text(plan.resolved_yaml, encoding="utf-8")
    reread = read_plan(["--config", str(path)], {}, vocab_size_of=lambda config: plan.data.vocab_size)
    assert specs_of(reread) == specs_of(plan)


def test_run_yaml_has_the_derived_values():
    lines = plan_of(environ={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}).resolved_yaml
    assert "# derived: 2 ranks = 2 data-parallel x 1 model-parallel" in lines
    assert "# derived: a step is 16 sequences = 2 microbatches of 4 per rank" in lines
    assert "# derived: 1 dense and 3 MoE layers" in lines
    assert "# derived: vocabulary of 1000 tokens, padded to 1024" in lines


def test_the_plan_contains_its_command_line():
    assert plan_of("--wandb-project 'a b' --wandb-exp-name c").command_line.endswith("'a b' --wandb-exp-name c")


def test_help_fits_on_a_screen_and_names_the_essentials():
    lines = answer_to("--help").splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 120
    text = "\n".join(lines)
    for part in ("--num-experts", "--config", "--find WORD", "--recipe quickstart", *GROUPS):
        assert part in text
    assert answer_to("-h") == answer_to("--lr", "1", "--help") == text


def test_the_first_example_of_the_help_trains_a_finished_quickstart_longer():
    example = next(line.split() for line in answer_to("--help").splitlines() if "--train-iters" in line)
    longer = read_plan(example[2:], {}, vocab_size_of=lambda config: 1000)
    finished = read_plan(["--recipe", "quickstart"], {}, vocab_size_of=lambda config: 1000)
    assert longer.loop.train_iters > finished.loop.train_iters
    assert (
        longer.lr_schedule.decay_samples != finished.lr_schedule.decay_samples
        and longer.lr_schedule.override_opt_param_scheduler
    )


def test_help_on_a_group_shows_all_its_flags():
    text = answer_to("--help", "moe")
    for flag in REGISTRY.flags.values():
        assert (f"  {flag.option} " in text) == (flag.group == "moe"), flag.option


def test_help_on_everything_shows_every_flag():
    text = answer_to("--help", "all")
    assert all(f"  {flag.option} " in text for flag in REGISTRY.flags.values())


def test_help_on_a_flag_is_a_page():
    page = answer_to("--help", "--moe-router-dtype")
    for part in ("Dtype of the router GEMM", "fp32 | fp64", "not set", "as in Megatron-LM", "quickstart"):
        assert part in page
    assert "--disable-bias-linear" in answer_to("--help", "--add-bias-linear")
    assert "Use: --micro-batch-size" in answer_to("--help", "--batch-size")
    assert answer_to("--help", "moe-router-dtype") == page


@pytest.mark.parametrize(
    ("topic", "sentence", "remedy"),
    [
        ("modle", "there is no group and no flag 'modle'", "did you mean model"),
        ("num-layer", "there is no group and no flag 'num-layer'", "did you mean --num-layers"),
        ("nosuch", "there is no group and no flag 'nosuch'", "groups: start, model, "),
        ("--num-layer", "--num-layer is not a flag", "did you mean --num-layers"),
    ],
)
def test_help_on_an_unknown_name_suggests_similar_names(topic, sentence, remedy):
    with pytest.raises(FlagErrors) as caught:
        read_plan(["--help", topic], {})
    (problem,) = caught.value.problems
    assert problem.what == sentence and problem.remedy.startswith(remedy)


def test_find_searches_names_texts_choices_defaults_and_old_names():
    text = answer_to("--find", "aux")
    assert "--moe-aux-loss-coeff" in text and "--moe-router-load-balancing-type" in text
    assert "--lr-decay-style" in answer_to("--find", "inverse-square-root")
    assert "--adam-beta2" in answer_to("--find", "0.999")
    assert "--bf16" not in answer_to("--find", "not set")
    assert "--moe-router-padding-for-fp8" in answer_to("--find", "padding-for-fp8")
    assert "--untie-embeddings-and-output-weights" in answer_to("--find", "output layer")
    with pytest.raises(FlagErrors, match="no flag has 'zzz'"):
        answer_to("--find", "zzz")


def test_the_help_page_equals_the_golden_file():
    assert (ROOT / "tests" / "goldens" / "help.txt").read_text(encoding="utf-8") == f"{answer_to('--help')}\n", UPDATE


def test_the_document_of_flags_is_up_to_date():
    assert (ROOT / "docs" / "flags.md").read_text(encoding="utf-8") == flags_document(REGISTRY), UPDATE


def test_reading_a_plan_imports_no_torch_and_no_numpy():
    program = (
        "import sys; from arguments.read import read_plan; from tests.helpers.command_lines import plan_of; plan_of(); "
        "print(sorted({'torch', 'numpy', 'megatron_moe.parallel.context'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_is_fast():
    """`--help` makes 233,000 Python calls, mostly for imports and declarations, in a third of a second
    (benchmarks/harness/bench_startup.py)."""
    text, calls = calls_of(["--help"])
    assert "--help all" in text and calls < 250_000


@pytest.mark.parametrize("question", [["--help", "all"], ["--find", "moe"]])
def test_a_closed_output_pipe_gives_no_traceback(question):
    command = [sys.executable, str(ROOT / "pretrain_moe.py"), *question]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        errors = [line for line in process.stderr if not line.startswith(b"first start")]  # in a new checkout
        assert (errors, process.wait(timeout=300)) == ([], 0)


def test_no_module_names_mean_auto():
    assert plan_of("--mixer --feed-forward").model == plan_of().model


def test_a_tokenizer_without_files_ignores_the_model_of_a_recipe():
    more = "--tokenizer-type NullTokenizer --vocab-size 77 --tokenizer-model missing.model"
    assert plan_of(more).data.tokenizer.tokenizer_model is None


@settings(max_examples=300)
@given(st.data())
def test_no_command_line_gives_a_traceback(data):
    options = st.sampled_from(sorted(REGISTRY.spellings))
    texts = st.sampled_from(["0", "1", "-1", "7", "0.5", "x", "", "1e99", "[0]*3", "true", "none", "fp32", "a b", "'"])
    mutations = data.draw(st.lists(st.tuples(options, st.lists(texts, max_size=3)), max_size=6))
    left_out = data.draw(st.lists(st.sampled_from(words(SMALL)), max_size=2))
    argv = words(SMALL, " ".join(left_out)) + [word for option, values in mutations for word in (option, *values)]
    try:
        plan = read_plan([word for word in argv if word not in ("--help", "-h")], {}, vocab_size_of=lambda config: 1000)
    except (FlagErrors, Finished) as ending:
        assert str(ending)
    else:
        assert plan.model.layers
