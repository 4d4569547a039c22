"""Every rule with a command line that violates it and a similar one that does not."""

import re
import shlex
from pathlib import Path

import pytest

from arguments.checks.run import HINTS, RULES
from arguments.flags import Registry, with_dashes
from arguments.parser import split
from tests.helpers.check_cases import BALANCING, CASES, EIGHT_RANKS, EP2, GRAPH_MODULES, on_ranks
from tests.helpers.command_lines import plan_of, problems_of, texts_of

REGISTRY = Registry.declared()


def options_of(flags):
    """Lists (main name, name as written, values) of every flag in a command line."""
    return {(name_of(each.option), each.option, each.words) for each in split(shlex.split(flags))[0]}


def name_of(option):
    found = REGISTRY.find(with_dashes(option))
    return found[0].option if found else option


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_violated_rule_is_reported_with_its_flags(case):
    (rule,) = [rule for rule in RULES if rule.__name__ == case.rule]
    (problem,) = [problem for problem in case.problems if problem.rule == case.rule]
    assert problem.reason == " ".join(rule.__doc__.split())
    assert problem.remedy
    differing = {option for option, *_ in options_of(case.bad) ^ options_of(case.good)}
    named = {name_of(option) for option in re.findall(r"--[\w-]+", " ".join(problem.lines()))}
    assert differing & named, "the report names no flag that makes the difference"
    unset = [row for row in problem.given if row[1:] in (("not set", "default"), ("off", "default"))]
    assert unset == []


def test_problems_with_a_layout_list_only_the_flags_that_were_given():
    (problem,) = problems_of("--decoder-first-pipeline-num-layers 1")
    assert [option for option, _, _ in problem.given] == ["--num-layers", "--decoder-first-pipeline-num-layers"]


def test_messages_use_the_singular_for_one():
    texts = [problem.what for case in CASES for problem in case.problems]
    texts += texts_of("--context-parallel-size 3 --micro-batch-size 1 --global-batch-size 1")
    texts += texts_of("--num-attention-heads 1 --no-group-query-attention --tensor-model-parallel-size 2")
    texts += texts_of("--num-layers 1 --moe-layer-freq [0,1]") + texts_of("--moe-layer-freq [1]")
    nouns = "coefficient dim expert group head id layer rank row sample sequence slice stage token type".split()
    plural = re.compile(rf"(?<![\d.,/-])1 (?!after)([a-z-]+ )?({'|'.join(nouns)})s\b")
    assert [text for text in texts if plural.search(text)] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_similar_command_line_is_legal(case):
    assert problems_of(case.good, case.without, case.environ) == ()


def test_a_remedy_does_not_repeat_the_rejected_transport():
    case = next(case for case in CASES if case.rule == "captured_exchange_stays_on_device" and "hybridep" in case.bad)
    (problem,) = case.problems
    assert problem.remedy == "capture attn and moe_router"


INTERLEAVED = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 2"
GROUPS_OF_4 = f"{INTERLEAVED} --microbatch-group-size-per-virtual-pipeline-stage 4"


@pytest.mark.parametrize(
    ("bad", "remedy", "good"),
    [
        (
            f"{INTERLEAVED} --global-batch-size 8 --rampup-batch-size 2 2 12",
            "use multiples of 4 for the start and increment of --rampup-batch-size",
            f"{INTERLEAVED} --global-batch-size 8 --rampup-batch-size 4 4 12",
        ),
        (
            f'{INTERLEAVED} --step-batch-size-schedule "0:2 1K:8"',
            "use multiples of 4 for the sizes of --step-batch-size-schedule",
            f'{INTERLEAVED} --step-batch-size-schedule "0:4 1K:8"',
        ),
        (
            f"{GROUPS_OF_4} --global-batch-size 4",
            "4 microbatches fit groups of 4: --global-batch-size 8",
            f"{GROUPS_OF_4} --global-batch-size 8",
        ),
        (
            f"{INTERLEAVED} --global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 1",
            "--microbatch-group-size-per-virtual-pipeline-stage 2",
            f"{INTERLEAVED} --global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 2",
        ),
    ],
)
def test_the_remedy_for_microbatches_of_virtual_stages_applies(bad, remedy, good):
    without = "--global-batch-size" if "schedule" in bad else ""
    (problem,) = problems_of(bad, without, on_ranks(2))
    assert (problem.rule, problem.remedy) == ("microbatches_fill_stages", remedy)
    assert problems_of(good, without, on_ranks(2)) == ()


TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
TP4, TP8 = TP2.replace("2", "4"), TP2.replace("2", "8")
A2A = "--cp-comm-type a2a --context-parallel-size"
SIX_HEADS = "--num-attention-heads 6 --kv-channels 32 --num-query-groups"
DELTA_NET = "--experimental-attention-variant gdn --linear-attention-freq 2 --linear-num-key-heads"
LAYOUTS = (
    (
        f"{TP2} --num-attention-heads 3 --kv-channels 64 --num-query-groups 1",
        "2 ranks (--tensor-model-parallel-size) do not divide 3 attention heads; divisors: 1, 3",
        TP2,
    ),
    (
        f"{TP4} --num-attention-heads 12 --kv-channels 64 --num-query-groups 3",
        "4 ranks (--tensor-model-parallel-size) are neither a divisor nor a multiple of 3 query groups",
        f"{TP4} --num-attention-heads 12 --kv-channels 64 --num-query-groups 2",
    ),
    (
        f"{TP8} --num-attention-heads 8 --num-query-groups 1 --kv-channels 2",
        "do not divide 4 key and value channels",
        f"{TP8} --num-attention-heads 8 --num-query-groups 1 --kv-channels 4",
    ),
    (f"{TP2} --ffn-hidden-size 511", "do not divide 511 feed-forward channels", f"{TP2} --ffn-hidden-size 510"),
    (
        f"{TP2} --moe-shared-expert-intermediate-size 63",
        "do not divide 63 feed-forward channels",
        f"{TP2} --moe-shared-expert-intermediate-size 62",
    ),
    (
        f"{TP2} --moe-ffn-hidden-size 127",
        "2 ranks (--expert-tensor-parallel-size) do not divide 127 expert channels",
        f"{TP2} --moe-ffn-hidden-size 127 --expert-tensor-parallel-size 1",
    ),
    (
        "--expert-model-parallel-size 8 --num-experts 12 --global-batch-size 32",
        "do not divide 12 experts; divisors: 1, 2, 3, 4, 6, 12",
        "--expert-model-parallel-size 4 --num-experts 12 --global-batch-size 32",
    ),
    (
        f"{A2A} 8 --global-batch-size 32",
        "8 ranks (--cp-comm-type a2a) do not divide 4 local attention heads",
        f"{A2A} 4 --global-batch-size 32",
    ),
    (
        f"{A2A} 2 --global-batch-size 32 {SIX_HEADS} 3",
        "2 ranks (--cp-comm-type a2a) are neither a divisor nor a multiple of 3 query groups",
        f"{A2A} 2 --global-batch-size 32 {SIX_HEADS} 2",
    ),
    (f"{TP2} {DELTA_NET} 1", "do not divide 1 key head;", f"{TP2} {DELTA_NET} 2"),
)
"""Layouts that cannot shard the modules, and similar ones that can."""


@pytest.mark.parametrize(("bad", "text", "good"), LAYOUTS)
def test_modules_that_cannot_be_sharded_are_rejected(bad, text, good):
    assert any(text in problem for problem in texts_of(bad, environ=EIGHT_RANKS))
    assert problems_of(good, environ=EIGHT_RANKS) == ()


def test_the_full_size_layout_of_a_proxy_is_checked():
    assert "do not divide 511 feed-forward channels" in texts_of(f"{TP2} --ffn-hidden-size 511 --proxy")[0]


def test_an_impossible_fold_is_rejected_with_the_nearest_sizes():
    """The layout is Kimi-K2 with PP 4 and EP 64 on 128 ranks."""
    ranks = EIGHT_RANKS | {"WORLD_SIZE": "128", "LOCAL_WORLD_SIZE": "128"}
    more = "--pipeline-model-parallel-size 4 --expert-model-parallel-size 64 --num-experts 384 --global-batch-size 128"
    (fold,) = [problem for problem in problems_of(more, environ=ranks) if "folded" in problem.what]
    assert fold.what == "experts cannot be folded: 1 x 64 x 4 = 256 does not divide 128 ranks"
    assert fold.remedy == (
        "nearest: --expert-model-parallel-size 32 (4 x 32 = 128), or --pipeline-model-parallel-size 2 (64 x 2 = 128), "
        "or 256 ranks"
    )
    document = (Path(__file__).parents[2] / "docs" / "folding.md").read_text(encoding="utf-8")
    assert fold.what in document and f"Try: {fold.remedy}" in document


def test_a_very_large_size_is_rejected_quickly():
    (fold,) = [text for text in texts_of(f"--expert-model-parallel-size {10**18}") if "folded" in text]
    assert fold == f"experts cannot be folded: 1 x {10**18} x 1 = {10**18} does not divide 1 rank"


def test_every_rule_has_a_case():
    assert {rule.__name__ for rule in RULES} == {case.rule for case in CASES}


def test_rules_have_a_reason():
    assert [rule.__name__ for rule in (*RULES, *HINTS) if not (rule.__doc__ or "").endswith(".")] == []


COPIES = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend copies"
HINT_CASES = (
    ("--num-query-groups 2", "--group-query-attention", "no effect without --group-query-attention"),
    ("", "--moe-ffn-hidden-size", "as wide as dense"),
    ("--bf16 --num-experts 32", "", "--moe-router-dtype fp32 is better for 32 experts"),
    ("--moe-aux-loss-coeff 0", "", "the experts are not balanced"),
    (f"{BALANCING} none --moe-aux-loss-coeff 0.01", "", "the experts are not balanced"),
    (
        "--import tests/examples/score_function.py --moe-router-score-function softsign",
        "",
        "score function softsign: computed by plain torch, because no kernel fuses it",
    ),
    ("--moe-router-num-groups 2", "", "no effect without --moe-router-group-topk"),
    ("--suggested-communication-unit-size 1000", "", "--suggested-communication-unit-size 1000 has no effect"),
    ("--rotary-scaling-factor 4", "", "--rotary-scaling-factor 4 without effect"),
    ("--position-embedding-type none --use-rope-scaling", "", "--use-rope-scaling without effect"),
    ("--moe-paged-stash", "", "saves no memory if all experts are on one rank"),
    (
        "--overlap-dispatch-backward-with-experts-wgrad",
        "",
        "--overlap-dispatch-backward-with-experts-wgrad without effect: one expert-parallel rank",
    ),
    (
        f"{EP2} --moe-token-dispatcher-type flex --moe-flex-dispatcher-num-sms 16",
        "",
        "num-sms 16 is unlikely to increase",
    ),
    (f"{EP2} --overlap-moe-expert-parallel-comm", "", "flex never waits for the host"),
    (f"{EP2} {COPIES}", "", "copies is slower than symmetric"),
    (
        f"{EP2} {COPIES} --overlap-moe-expert-parallel-comm --moe-flex-dispatcher-num-sms 16",
        "",
        "num-sms 16 without effect: copies need no SMs",
    ),
    (
        f"{GRAPH_MODULES} moe_router moe_preprocess {EP2}",
        "",
        "moe_preprocess captures nothing: with experts on 2 ranks",
    ),
    ("--recompute-num-layers 1", "", "--recompute-num-layers without effect: nothing is recomputed"),
    ("--recompute-modules moe_act", "", "--recompute-modules without effect: nothing is recomputed"),
    ("--rope-type yarn", "", "--rope-type yarn without effect: --position-embedding-type rope applies"),
    ("", "--run-dir", "no checkpoint is saved"),
    ("--mock-data", "--save-interval", "mock data: no checkpoint is saved without --save or --save-interval"),
    ("--mock-data", "", "the data files are not read"),
)


def notes_of(more, without):
    """Parses a command line, on eight ranks if it uses expert parallelism, and returns its notes."""
    return plan_of(more, without, EIGHT_RANKS if EP2 in more else None).notes


@pytest.mark.parametrize(("more", "without", "hint"), HINT_CASES)
def test_an_unintended_setting_is_noted(more, without, hint):
    assert any(hint in note for note in notes_of(more, without))


def test_flags_that_megatron_accepts_are_accepted():
    for more in (
        "--cuda-graph-impl none --cuda-graph-modules moe moe_router moe_preprocess",
        "--position-embedding-type yarn --rope-type rope",
        "--trust-remote-code",
        "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --reuse-grad-buf-for-mxfp8-param-ag",
        "--bf16 --fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-start-in-bf16 99",
    ):
        assert problems_of(more) == (), more


def test_a_forced_router_is_announced():
    forced = plan_of("--moe-router-force-skew 2")
    sentence = "benchmark: --moe-router-force-skew replaces the router by random logits, so the model learns no routing"
    assert forced.notes[0] == forced.warning == sentence and sentence in forced.resolved_yaml
    assert plan_of().warning == ""


def test_an_ordinary_command_line_has_no_notes():
    assert plan_of().notes == ()
