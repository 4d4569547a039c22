"""Every rule with a command line that breaks it and one that barely does not."""

import re
from pathlib import Path

import pytest

from arguments.checks.hints import HINTS
from arguments.checks.run import FACTS, RULES, parameters
from arguments.flags import Registry
from tests.helpers.check_cases_cuda_graphs import GRAPH_CASES, PARTS
from tests.helpers.check_cases_memory import MEMORY_CASES
from tests.helpers.check_cases_optimizer_state import STATE_CASES
from tests.helpers.check_cases_parallel import (
    EIGHT_RANKS,
    EP2,
    FOLD_CASES,
    RANK_CASES,
    Case,
)
from tests.helpers.check_cases_rope import ROTATION_CASES
from tests.helpers.command_lines import (
    plan_of,
    problems_of,
    texts_of,
)

MLA = "--multi-latent-attention --rope-type rope"
GQA = "--group-query-attention --num-query-groups"
ITERS = "--train-iters --lr-warmup-iters"
UPCYCLE = "--moe-use-upcycling --load dense --moe-upcycling-granularity"
KINDS = "--moe-router-load-balancing-type"
"""Names of flags; behind them a value, or, as `without`, what is left out."""
FAULTS_ALLOWED = {"MEGATRON_MOE_ALLOW_FAULTS": "1"}


CASES = (
    Case(
        "sequence_fits_the_positions",
        "--seq-length 129",
        "sequences of 129 tokens have more positions than the 128 the model knows",
        "--seq-length 128",
    ),
    Case("one_activation", "--squared-relu", "several activations", "--no-swiglu --squared-relu"),
    Case("offset_needs_a_gate", "--no-swiglu --glu-linear-offset 1", "offset 1 has no gated", "--glu-linear-offset 1"),
    Case(
        "clamp_needs_a_gate",
        "--no-swiglu --activation-func-clamp-value 7",
        "clamp-value 7 has no gated",
        "--activation-func-clamp-value 7",
    ),
    Case(
        "no_table_where_one_is_asked_for",
        "--no-position-embedding --position-embedding-type learned_absolute",
        "contradicts learned absolute",
        "--no-position-embedding",
    ),
    Case(
        "one_way_to_stretch",
        "--use-rope-scaling --rotary-seq-len-interpolation-factor 2",
        "in several ways",
        "--use-rope-scaling --rotary-seq-len-interpolation-factor 1",
    ),
    Case(
        "yarn_has_a_ramp",
        "--position-embedding-type yarn --yarn-beta-slow 0",
        "cannot go over from 32 turns to 0 with a base of 10000",
        "--position-embedding-type rope --yarn-beta-slow 0",
    ),
    Case(
        "yarn_has_a_ramp",
        f"{MLA} --no-group-query-attention --rotary-base 1 --rope-type yarn",
        "from 32 turns to 1 with a base of 1",
        f"{MLA} --no-group-query-attention --rotary-base 1",
    ),
    Case(
        "yarn_has_a_ramp",
        "--position-embedding-type yarn --yarn-beta-fast 1 --yarn-beta-slow 2",
        "from 1 turns to 2",
        "--position-embedding-type yarn --yarn-beta-fast 2 --yarn-beta-slow 2",
    ),
    Case("unrotated_layers_fit", "--no-rope-freq 3", "--no-rope-freq 3 does not divide 4 layers", "--no-rope-freq 2"),
    Case(
        "unrotated_layers_fit",
        "--no-rope-freq [0,1]",
        "describes 2 layers, but the model has 4",
        "--no-rope-freq [0,1]*2",
    ),
    Case(
        "unrotated_layers_fit",
        "--no-rope-freq 2 --position-embedding-type none",
        "there are none",
        "--no-rope-freq 2",
    ),
    Case(
        "multi_token_prediction_knows_no_table",
        "--mtp-num-layers 1 --position-embedding-type learned_absolute",
        "does not work with learned_absolute",
        "--mtp-num-layers 1 --position-embedding-type none",
    ),
    Case(
        "padding_holds_the_vocabulary",
        "--vocab-size 1000 --padded-vocab-size 999",
        "--padded-vocab-size 999 does not hold 1000 tokens",
        "--vocab-size 1000 --padded-vocab-size 1000",
    ),
    Case(
        "dense_width_is_left",
        "--hidden-size 16 --kv-channels 8",
        "hidden size 16 is too small",
        "--hidden-size 24 --kv-channels 8",
        "--ffn-hidden-size",
    ),
    Case(
        "heads_share_the_hidden_size",
        "--num-attention-heads 6",
        "6 heads do not divide the hidden size 256",
        "--num-attention-heads 6 --kv-channels 64",
    ),
    Case("groups_share_the_heads", f"{GQA} 3", "3 query groups do not divide 4 heads", f"{GQA} 4"),
    Case("rotated_width_is_even", "--rotary-percent 0.05", "rotates 3 of 64 dims", "--rotary-percent 0.07"),
    Case("rotated_width_is_even", "--rotary-percent 1.5", "rotates 96 of 64 dims", "--rotary-percent 0.5"),
    Case(
        "latent_rotated_width_is_even",
        f"{MLA} --qk-pos-emb-head-dim 33",
        "33 is odd",
        f"{MLA} --qk-pos-emb-head-dim 32",
        "--group-query-attention --num-query-groups",
    ),
    Case("latent_attention_has_no_groups", MLA, "has no query groups", f"{MLA} --no-group-query-attention"),
    Case(
        "latent_attention_rotates_its_own_way",
        f"{MLA} --no-group-query-attention --rotary-interleaved",
        "do not exist in multi-latent attention",
        f"{MLA} --no-group-query-attention --rotary-percent 1.0",
    ),
    Case(
        "latent_attention_is_plain",
        f"{MLA} --no-group-query-attention --attention-output-gate",
        "do not exist in multi-latent attention",
        f"{MLA} --no-group-query-attention --qk-layernorm",
    ),
    Case(
        "windowed_layers_fit", "--window-attn-skip-freq 2", "no window", "--window-attn-skip-freq 2 --window-size 15,0"
    ),
    Case(
        "windowed_layers_fit",
        "--window-size 15,0 --window-attn-skip-freq [0,1,2,1]",
        "holds 2, but a layer is 0 or 1",
        "--window-size 15,0 --window-attn-skip-freq [0,1,0,1]",
    ),
    Case(
        "windowed_layers_fit", "--window-size 9,0 --window-attn-skip-freq 0", "0 is not a distance", "--window-size 9,0"
    ),
    Case(
        "expert_layers_fit",
        "--moe-layer-freq [1]*3",
        "describes 3 layers, but the model has 4",
        "--moe-layer-freq [1]*4",
    ),
    Case(
        "shared_experts_have_no_bias",
        "--moe-shared-expert-intermediate-size 64 --add-bias-linear",
        "shared experts cannot have biases",
        "--moe-shared-expert-intermediate-size 64",
    ),
    Case(
        "gate_needs_shared_experts",
        "--moe-shared-expert-gate",
        "no shared experts to gate",
        "--moe-shared-expert-gate --moe-shared-expert-intermediate-size 64",
    ),
    Case(
        "capacity_is_positive",
        "--moe-expert-capacity-factor 0",
        "drops every token",
        "--moe-expert-capacity-factor -1",
    ),
    Case(
        "padding_needs_a_capacity",
        "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor -1",
        "a capacity that is not given",
        "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1",
    ),
    Case(
        "capacity_fits_the_balancing",
        f"{KINDS} sinkhorn --moe-aux-loss-coeff 0 --moe-expert-capacity-factor 1",
        "sinkhorn goes with no capacity",
        f"{KINDS} seq_aux_loss --moe-expert-capacity-factor 1",
    ),
    Case(
        "weights_on_input_need_one_choice",
        "--moe-apply-probs-on-input",
        "top-2 has several weights",
        "--moe-apply-probs-on-input --moe-router-topk 1 --moe-router-pre-softmax",
    ),
    Case(
        "weights_have_one_place",
        "--moe-apply-probs-on-input --moe-router-topk 1 --no-moe-memory-efficient-permutation",
        "one weighs the rows before an expert, the other behind it",
        "--moe-apply-probs-on-input --moe-router-topk 1 --moe-router-pre-softmax",
    ),
    Case(
        "upcycling_needs_a_dense_checkpoint",
        f"{UPCYCLE} 4",
        "there is no folder",
        f"{UPCYCLE} 4 --run-dir x",
        "--run-dir",
    ),
    Case(
        "upcycling_needs_a_dense_checkpoint",
        "--moe-use-upcycling --moe-upcycling-granularity 4",
        "needs a dense checkpoint",
        f"{UPCYCLE} 4",
    ),
    Case("upcycling_needs_a_dense_checkpoint", f"{UPCYCLE} 4 --num-experts 0", "the model has none", f"{UPCYCLE} 4"),
    Case(
        "slices_make_the_dense_width",
        f"{UPCYCLE} 2",
        "2 slices of width 128, but the dense width is 512",
        f"{UPCYCLE} 4",
    ),
    Case("slices_make_the_dense_width", f"{UPCYCLE} 4 --moe-latent-size 64", "no latent space", f"{UPCYCLE} 4"),
    Case(
        "slices_make_whole_groups",
        f"{UPCYCLE} 4 --num-experts 6",
        "--num-experts 6 cannot be divided into groups of 4 slices",
        f"{UPCYCLE} 4 --num-experts 12",
    ),
    Case("enough_experts_to_choose", "--moe-router-topk 9", "cannot visit 9 of 8 experts", "--moe-router-topk 8"),
    Case(
        "groups_share_the_experts",
        "--moe-router-num-groups 3 --moe-router-group-topk 2",
        "3 groups do not divide 8 experts",
        "--moe-router-num-groups 4 --moe-router-group-topk 2",
    ),
    Case(
        "group_limit_is_complete",
        "--moe-router-group-topk 2",
        "but there are none",
        "--moe-router-group-topk 2 --moe-router-num-groups 2",
    ),
    Case(
        "group_limit_is_complete",
        "--moe-router-topk 3 --moe-router-group-topk 3 --moe-router-num-groups 2",
        "cannot use 3 of 2 groups",
        "--moe-router-topk 3 --moe-router-group-topk 2 --moe-router-num-groups 2",
    ),
    Case(
        "group_limit_leaves_enough_experts",
        "--moe-router-num-groups 8 --moe-router-group-topk 1",
        "1 of 8 groups: 1 expert, fewer than top-2 needs",
        "--moe-router-num-groups 8 --moe-router-group-topk 2",
    ),
    Case(
        "group_limit_leaves_enough_experts",
        "--moe-router-num-groups 4 --moe-router-group-topk 3",
        "top-2 cannot be spread over 3 groups",
        "--moe-router-num-groups 4 --moe-router-group-topk 2",
    ),
    Case(
        "bias_needs_independent_scores",
        "--moe-router-enable-expert-bias",
        "does not go with softmax",
        "--moe-router-enable-expert-bias --moe-router-score-function sqrtsoftplus",
    ),
    Case(
        "one_choice_needs_pre_softmax",
        "--moe-router-topk 1",
        "gives the router no gradient",
        f"--moe-router-topk 1 {KINDS} sinkhorn --moe-aux-loss-coeff 0",
    ),
    Case(
        "one_coefficient_per_loss",
        f"{KINDS} aux_loss seq_aux_loss",
        "2 kinds of balancing, but 1 coefficient",
        f"{KINDS} aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-3",
    ),
    Case("balancing_kinds_go_together", f"{KINDS}", "no kind of balancing", f"{KINDS} none"),
    Case(
        "balancing_kinds_go_together",
        f"{KINDS} aux_loss aux_loss --moe-aux-loss-coeff 0.1 0.1",
        "given twice: aux_loss aux_loss",
        f"{KINDS} aux_loss global_aux_loss --moe-aux-loss-coeff 0.1 0.1",
    ),
    Case(
        "balancing_kinds_go_together",
        f"{KINDS} aux_loss none --moe-aux-loss-coeff 0.1 0.1",
        "none goes with no other",
        f"{KINDS} none",
    ),
    Case(
        "own_choices_have_no_loss",
        f"{KINDS} expert_choice",
        "expert_choice goes with no balancing loss",
        f"{KINDS} expert_choice --moe-aux-loss-coeff 0",
    ),
    Case(
        "own_choices_have_no_loss",
        f"{KINDS} sinkhorn --moe-aux-loss-coeff 0 --moe-router-topk-scaling-factor 2",
        "no scaling factor",
        f"{KINDS} sinkhorn --moe-aux-loss-coeff 0",
    ),
    Case(
        "quantiles_need_a_rest",
        f"{KINDS} quantile_balancing --moe-aux-loss-coeff 0 --moe-router-topk 8",
        "--moe-router-topk 8 of 8 chooses every expert",
        f"{KINDS} quantile_balancing --moe-aux-loss-coeff 0 --moe-router-topk 7",
    ),
    Case(
        "microbatches_make_the_batch",
        "--global-batch-size 48",
        "48 is not a multiple of 32 = 4 sequences x 8 data-parallel ranks",
        "--global-batch-size 64",
        environ=EIGHT_RANKS,
    ),
    Case(
        "batch_grows_in_whole_steps",
        "--train-samples 3200 --rampup-batch-size 32 4 100",
        "starts with 32 sequences",
        "--train-samples 3200 --rampup-batch-size 16 4 100",
        ITERS,
    ),
    Case(
        "batch_grows_in_whole_steps",
        "--train-samples 3200 --rampup-batch-size 4 8 100",
        "from 4 to 16 in steps of 8",
        "--train-samples 3200 --rampup-batch-size 8 8 100",
        ITERS,
    ),
    Case(
        "batch_grows_in_whole_steps",
        "--train-samples 3200 --rampup-batch-size 4 2 100",
        "are not multiples of 4",
        "--train-samples 3200 --rampup-batch-size 4 4 100",
        ITERS,
    ),
    Case("length_is_given_once", "", "is not given", "--train-iters 30", "--train-iters"),
    Case("length_is_given_once", "--train-iters 9 --train-samples 160", "given twice", "--train-samples 160", ITERS),
    Case(
        "samples_fill_a_batch",
        "--train-samples 15",
        "--train-samples 15 does not fill one batch of 16",
        "--train-samples 16",
        ITERS,
    ),
    Case("schedule_counts_like_the_run", "--lr-decay-samples 9", "its learning rate in samples", "--lr-decay-iters 99"),
    Case(
        "schedule_counts_like_the_run",
        "--train-samples 3200 --lr-warmup-iters 2",
        "its learning rate in iterations",
        "--train-samples 3200 --lr-warmup-samples 2",
        ITERS,
    ),
    Case(
        "warm_up_is_given_once",
        "--lr-warmup-fraction 0.1",
        "warm-up is given twice",
        "--lr-warmup-fraction 0.1 --lr-warmup-iters 0",
    ),
    Case(
        "warm_up_ends_before_decay",
        "--lr-warmup-iters 200",
        "warm-up of 200 iterations does not end before decay does at 200",
        "--lr-warmup-iters 199",
    ),
    Case(
        "warm_up_ends_before_decay",
        "--train-samples 3200 --lr-decay-samples 16 --lr-warmup-samples 16",
        "warm-up of 16 samples",
        "--train-samples 3200 --lr-decay-samples 17 --lr-warmup-samples 16",
        ITERS,
    ),
    Case("learning_rates_are_in_order", "--min-lr 2e-3", "0.002 is above the largest 0.001", "--min-lr 1e-3"),
    Case("learning_rates_are_in_order", "--lr-warmup-init 2e-3", "warm-up starts at 0.002", "--lr-warmup-init 1e-3"),
    Case("decoupled_rates_are_in_order", "--decoupled-min-lr 1", "no largest", "--decoupled-lr 1 --decoupled-min-lr 1"),
    Case(
        "decoupled_rates_are_in_order",
        "--decoupled-lr 0.1 --decoupled-min-lr 0.2",
        "0.2 is above the largest 0.1",
        "--decoupled-lr 0.2 --decoupled-min-lr 0.1",
    ),
    Case("decoupled_rates_are_in_order", "--decoupled-lr 5e-5", "0.0001 is above", "--decoupled-lr 1e-4"),
    Case(
        "annealing_has_a_length",
        "--lr-decay-style WSD",
        "does not know how long",
        "--lr-decay-style WSD --lr-wsd-decay-iters 20",
    ),
    Case(
        "annealing_fits_behind_warm_up",
        "--lr-decay-style WSD --lr-wsd-decay-iters 181",
        "181 iterations of annealing and 20 of warm-up are more than the 200",
        "--lr-decay-style WSD --lr-wsd-decay-iters 180",
    ),
    Case("weight_decay_ramp_is_complete", "--start-weight-decay 0.1", "no start and end", "--weight-decay 0.1"),
    Case(
        "weight_decay_ramp_is_complete",
        "--weight-decay-incr-style linear --end-weight-decay 1",
        "needs a start and an end",
        "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
    ),
    Case(
        "weight_decay_ramp_is_complete",
        "--weight-decay-incr-style cosine --start-weight-decay 1 --end-weight-decay 0",
        "cannot grow from 1 to 0",
        "--weight-decay-incr-style cosine --start-weight-decay 1 --end-weight-decay 1",
    ),
    Case(
        "one_schedule_wins",
        "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
        "shall win",
        "--override-opt_param-scheduler",
    ),
    Case("one_format", "--bf16 --fp64", "several formats", "--fp64"),
    Case("data_comes_from_somewhere", "", "no training data", "--mock-data", "--data-path"),
    Case("data_is_split_once", "--train-data-path a", "both to be split and by split", "", "--split"),
    Case(
        "splits_of_their_own_are_not_shared",
        "--train-data-path a --split 9,1,0",
        "--split 9,1,0 has nothing to divide",
        "--train-data-path a",
        "--data-path --split",
    ),
    Case("shares_are_numbers", "--split 99,1,0,0", "not up to three shares", "--split '969, 30, 1'"),
    Case("shares_are_numbers", "--split 99,x", "not up to three shares", "--split 99,.5"),
    Case("shares_are_numbers", "--split 0,0,0", "gives nothing", "--split 0,0,1"),
    Case("weights_have_prefixes", "--data-path 0.3 a b", "mixes weights", "--data-path 0.3 a 0.7 b"),
    Case("tokenizer_is_complete", "", "is not given", "--tokenizer-type ByteTokenizer", "--tokenizer-type"),
    Case("tokenizer_is_complete", "", "has no file", "--tokenizer-model y", "--tokenizer-model"),
    Case(
        "tokenizer_is_complete",
        "--tokenizer-type GPT2BPETokenizer --vocab-file v",
        "lacks its vocabulary or its merges",
        "--tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m",
    ),
    Case(
        "tokenizer_is_complete",
        "--merge-file m",
        "GPT2BPETokenizer lacks its vocabulary or its merges",
        "--vocab-file v --merge-file m",
        "--tokenizer-type --tokenizer-model",
    ),
    Case(
        "null_ids_are_in_the_vocabulary",
        "--tokenizer-type NullTokenizer --vocab-size 99 --null-tokenizer-eod-id 99",
        "id 99 is not below the 99 ids",
        "--tokenizer-type NullTokenizer --vocab-size 99 --null-tokenizer-eod-id 98 --null-tokenizer-pad-id 0",
    ),
    Case(
        "whole_sets_are_not_weighted",
        "--full-validation --train-data-path a --valid-data-path 1 b 2 c",
        "has weights of data sets to follow",
        "--full-validation --train-data-path 1 a 2 d --valid-data-path b c",
        "--data-path --split",
    ),
    Case(
        "tokenizer_is_complete",
        "--tokenizer-type NullTokenizer",
        "does not know its vocabulary",
        "--tokenizer-type NullTokenizer --vocab-size 99",
    ),
    Case(
        "sets_to_tell_apart",
        "--multiple-validation-sets",
        "no sets to tell apart",
        "--multiple-validation-sets --train-data-path a --valid-data-path b c",
        "--data-path --split",
    ),
    Case("saving_has_a_rhythm", "--save x", "does not say how often", "--save x --save-interval 1", "--save-interval"),
    Case(
        "retained_checkpoints_are_saved",
        "--save-retain-interval 150",
        "--save-retain-interval 150 is not a multiple of --save-interval 100",
        "--save-retain-interval 200",
    ),
    Case("step_belongs_to_a_folder", "--ckpt-step 3", "no folder", "--ckpt-step 3 --load x", "--run-dir"),
    Case(
        "exports_have_a_place",
        "--save-hf-interval 5",
        "no folder to write to",
        "--save-hf-interval 5 --run-dir x --load hf:y",
        "--save or --run-dir",
    ),
    Case(
        "exports_have_a_place",
        "--save-hf-interval 5 --run-dir x --load y",
        "without a config.json",
        "--save-hf-interval 5 --run-dir x --save-hf-config y",
        "--save-hf-config",
    ),
    Case(
        "missing_means_a_folder",
        "--exit-on-missing-checkpoint",
        "no folder is given",
        "--exit-on-missing-checkpoint --load x",
    ),
    Case("wandb_run_has_a_name", "--wandb-project p", "a run without a name", "--wandb-project p --wandb-exp-name n"),
    Case(
        "kernel_wishes_are_pairs",
        "--kernel-per-op rms_norm=reference rope=",
        "rope= is not a pair",
        "--kernel-per-op rms_norm=reference",
    ),
    Case("faults_are_known", "--inject a@0:3", "unknown fault 'a'", "--inject kill@0:3", environ=FAULTS_ALLOWED),
    Case("faults_are_known", "--inject kill@1:3", "for rank 1 of 1", "--inject kill@0:3", environ=FAULTS_ALLOWED),
)


ALL_CASES = (*MEMORY_CASES, *CASES, *RANK_CASES, *FOLD_CASES, *GRAPH_CASES, *STATE_CASES, *ROTATION_CASES)


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.rule)
def test_a_rule_that_is_broken_says_so_with_its_reason(case):
    (rule,) = [rule for rule in RULES if rule.__name__ == case.rule]
    problems = [
        problem for problem in problems_of(case.bad, case.without, case.environ) if case.sentence in problem.what
    ]
    assert len(problems) == 1, problems_of(case.bad, case.without, case.environ)
    assert problems[0].reason == " ".join(rule.__doc__.split())
    assert problems[0].remedy
    unset = [row for row in problems[0].given if row[1:] in (("not set", "default"), ("off", "default"))]
    assert unset == []
    assert len(problems[0].given) <= len(parameters(rule))


def test_problems_with_a_layout_list_only_the_flags_that_were_given():
    (problem,) = problems_of("--decoder-first-pipeline-num-layers 1")
    assert [option for option, _, _ in problem.given] == ["--num-layers", "--decoder-first-pipeline-num-layers"]


def test_numbers_of_one_are_singular():
    texts = [text for case in ALL_CASES for text in texts_of(case.bad, case.without, case.environ)]
    texts += texts_of("--context-parallel-size 3 --micro-batch-size 1 --global-batch-size 1")
    texts += texts_of("--num-attention-heads 1 --no-group-query-attention --tensor-model-parallel-size 2")
    texts += texts_of("--num-layers 1 --moe-layer-freq [0,1]") + texts_of("--moe-layer-freq [1]")
    nouns = "coefficient dim expert group head id kind layer rank row sample sequence slice stage token".split()
    plural = re.compile(rf"(?<![\d.,/-])1 (?!after)([a-z-]+ )?({'|'.join(nouns)})s\b")
    assert [text for text in texts if plural.search(text)] == []


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.rule)
def test_a_near_miss_is_legal(case):
    assert problems_of(case.good, case.without, case.environ) == ()


def test_an_impossible_fold_is_refused_with_what_is_near():
    """Kimi-K2 with PP 4 and EP 64 on 128 ranks."""
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


def test_a_size_with_too_many_digits_is_answered_at_once():
    (fold,) = [text for text in texts_of(f"--expert-model-parallel-size {10**18}") if "folded" in text]
    assert fold == f"experts cannot be folded: 1 x {10**18} x 1 = {10**18} does not divide 1 rank"


def test_every_rule_has_a_case():
    assert {rule.__name__ for rule in RULES} == {case.rule for case in ALL_CASES}


def test_rules_ask_only_for_flags_and_facts_and_give_a_reason():
    known = {*Registry.declared().flags, *FACTS}
    for rule in (*RULES, *HINTS):
        assert set(parameters(rule)) <= known, rule.__name__
        assert (rule.__doc__ or "").endswith("."), rule.__name__


HINT_CASES = (
    ("--num-query-groups 2", "--group-query-attention", "no effect without --group-query-attention"),
    ("", "--moe-ffn-hidden-size", "as wide as dense"),
    ("--bf16 --num-experts 32", "", "--moe-router-dtype fp32 is better for 32 experts"),
    ("--moe-aux-loss-coeff 0", "", "nothing keeps the experts equally busy"),
    (f"{KINDS} none --moe-aux-loss-coeff 0.01", "", "nothing keeps the experts equally busy"),
    ("--moe-router-num-groups 2", "", "no effect without --moe-router-group-topk"),
    ("--rotary-scaling-factor 4", "", "--rotary-scaling-factor 4 without effect"),
    ("--position-embedding-type none --use-rope-scaling", "", "--use-rope-scaling without effect"),
    ("--moe-paged-stash", "", "saves nothing where all experts are on one rank"),
    (f"{PARTS} moe_router moe_preprocess {EP2}", "", "moe_preprocess records nothing: experts are on 2 ranks"),
    ("--recompute-num-layers 1", "", "--recompute-num-layers without effect: nothing is recomputed"),
    ("", "--run-dir", "no checkpoint is saved"),
    ("--mock-data", "--save-interval", "mock data: no checkpoint is saved without --save or --save-interval"),
    ("--mock-data", "", "the data files are not read"),
)


def notes_of(more, without):
    """Of a command line, on several ranks where its experts are."""
    return plan_of(more, without, EIGHT_RANKS if EP2 in more else None).notes


@pytest.mark.parametrize(("more", "without", "hint"), HINT_CASES)
def test_what_may_not_be_meant_is_noted(more, without, hint):
    assert any(hint in note for note in notes_of(more, without))


def test_an_ordinary_command_line_has_no_notes():
    assert plan_of().notes == ()
