"""Command lines that ask for recordings or profiles which cannot be made, and ones that barely can."""

from tests.helpers.check_cases_parallel import (
    EIGHT_RANKS,
    EP2,
    PP2,
    SHARED,
    TP2,
    Case,
)

_STILL = "--attention-dropout 0 --hidden-dropout 0"
GRAPHS = f"{_STILL} --cuda-graph-impl local"
PARTS = f"{GRAPHS} --cuda-graph-modules"
LATE = "--moe-expert-wgrad-interval 2"
OVERLAPPED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
WHOLE = f"{_STILL} --cuda-graph-impl full_iteration"

GRAPH_CASES = (
    Case("whole_steps_have_no_parts", f"{WHOLE} --cuda-graph-modules attn", "full_iteration with", WHOLE),
    Case("parts_are_recorded_once", f"{PARTS} moe moe_router", "moe contains moe_router", f"{PARTS} attn moe"),
    Case(
        "rows_are_sorted_behind_a_router",
        f"{PARTS} moe_preprocess",
        "moe_preprocess without moe_router",
        f"{PARTS} moe_preprocess moe_router",
    ),
    Case(
        "parts_exist",
        f"{PARTS} mlp --moe-layer-freq 1",
        "every layer has experts",
        f"{PARTS} mlp --moe-layer-freq 2",
    ),
    Case("parts_exist", f"{PARTS} attn mamba", "Mamba layers are not available", f"{PARTS} attn"),
    Case("parts_exist", f"{PARTS} moe_router", "no layer has experts", f"{PARTS} attn", without="--num-experts"),
    Case(
        "replays_draw_nothing",
        "--cuda-graph-impl local --attention-dropout 0.1 --hidden-dropout 0",
        "with --attention-dropout 0.1: a replay draws no random numbers",
        "--cuda-graph-impl local --attention-dropout 0 --hidden-dropout 0",
    ),
    Case(
        "recorded_parts_run_once",
        f"{GRAPHS} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "with --recompute-granularity full",
        GRAPHS,
    ),
    Case(
        "recorded_parts_run_once",
        f"{PARTS} attn --recompute-granularity selective --recompute-modules core_attn moe_act",
        "core_attn stands in recorded parts (attn)",
        f"{PARTS} attn --recompute-granularity selective --recompute-modules moe_act",
    ),
    Case(
        "recorded_experts_are_one_product",
        f"{WHOLE} --no-moe-grouped-gemm",
        "full_iteration without --moe-grouped-gemm",
        f"{GRAPHS} --no-moe-grouped-gemm {LATE} --bf16",
    ),
    Case(
        "recorded_experts_are_one_product",
        f"{PARTS} attn moe --no-moe-grouped-gemm",
        "modules moe without --moe-grouped-gemm",
        f"{PARTS} attn moe_router --no-moe-grouped-gemm",
    ),
    Case(
        "recorded_rows_do_not_wait",
        f"{GRAPHS} {LATE} --bf16",
        "with recorded moe (--cuda-graph-impl local)",
        f"{PARTS} attn moe_router {LATE} --bf16",
    ),
    Case(
        "recorded_rows_do_not_wait",
        f"{PARTS} moe_router moe_preprocess {LATE}",
        "with recorded moe_preprocess",
        f"{WHOLE} {LATE}",
    ),
    Case(
        "recorded_parts_exchange_nothing",
        f"{PARTS} attn moe {EP2}",
        "modules moe with experts over 2 ranks",
        f"{PARTS} attn moe_router {EP2}",
        environ=EIGHT_RANKS,
    ),
    Case(
        "recorded_parts_exchange_nothing",
        f"{GRAPHS} {TP2} --global-batch-size 32",
        "with --tensor-model-parallel-size 2: layers exchange tensors",
        f"{TP2} --global-batch-size 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "recorded_steps_are_whole",
        f"{WHOLE} {PP2} --global-batch-size 32",
        "full_iteration with --pipeline-model-parallel-size 2",
        f"{GRAPHS} {PP2} --global-batch-size 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "recorded_steps_are_whole",
        f"{WHOLE} --overlap-grad-reduce --global-batch-size 32",
        "full_iteration with --overlap-grad-reduce",
        f"{WHOLE} --global-batch-size 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "captured_work_waits_for_nothing",
        f"{WHOLE} {OVERLAPPED} --global-batch-size 32",
        "with --overlap-param-gather",
        f"{GRAPHS} {OVERLAPPED} --global-batch-size 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "captured_work_waits_for_nothing",
        f"{WHOLE} --overlap-optimizer-step",
        "with --overlap-optimizer-step",
        f"{GRAPHS} --overlap-optimizer-step",
    ),
    Case(
        "captured_work_waits_for_nothing",
        f"{GRAPHS} --delay-wgrad-compute",
        "with --delay-wgrad-compute",
        "--delay-wgrad-compute",
    ),
    Case(
        "captured_work_waits_for_nothing",
        f"{WHOLE} --overlap-moe-expert-parallel-comm --moe-grouped-gemm",
        "with --overlap-moe-expert-parallel-comm",
        f"{PARTS} attn moe_router {EP2} --overlap-moe-expert-parallel-comm",
        environ=EIGHT_RANKS,
    ),
    Case(
        "captured_work_waits_for_nothing",
        f"{WHOLE} {SHARED} --moe-shared-expert-overlap",
        "with --moe-shared-expert-overlap",
        f"{PARTS} attn moe_router {SHARED} --moe-shared-expert-overlap",
    ),
    Case(
        "timed_attention_is_computed",
        f"{GRAPHS} --log-straggler",
        "it times an attention, which is recorded",
        f"{PARTS} moe_router --log-straggler",
    ),
    Case(
        "timed_attention_is_computed",
        f"{WHOLE} --log-straggler",
        "--log-straggler with --cuda-graph-impl full_iteration",
        WHOLE,
    ),
    Case(
        "profiles_have_an_end",
        "--profile --profile-step-start 12",
        "behind iteration 12 to 12 profiles nothing",
        "--profile --profile-step-start 11",
    ),
    Case(
        "profiles_have_a_folder",
        "--profile --use-pytorch-profiler",
        "without a run folder",
        "--profile",
        without="--run-dir --save-interval",
    ),
)
