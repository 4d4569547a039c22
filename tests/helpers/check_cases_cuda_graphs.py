"""Cases of the CUDA graph rules (arguments/checks/cuda_graphs.py)."""

from tests.helpers.check_cases import EIGHT_RANKS, EP2, GRAPH_MODULES, GRAPHS, NO_DROPOUT, PP2, SHARED, TP2, Case

DEFERRED = "--moe-expert-wgrad-interval 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FULL_ITERATION = f"{NO_DROPOUT} --cuda-graph-impl full_iteration"

CASES = (
    Case(
        "full_iteration_has_no_modules",
        f"{FULL_ITERATION} --cuda-graph-modules attn",
        "full_iteration with",
        FULL_ITERATION,
    ),
    Case(
        "captured_modules_do_not_overlap",
        f"{GRAPH_MODULES} moe moe_router",
        "moe contains moe_router",
        f"{GRAPH_MODULES} attn moe",
    ),
    Case(
        "preprocess_capture_needs_router",
        f"{GRAPH_MODULES} moe_preprocess",
        "moe_preprocess without moe_router",
        f"{GRAPH_MODULES} moe_preprocess moe_router",
    ),
    Case(
        "captured_modules_exist",
        f"{GRAPH_MODULES} mlp --moe-layer-freq 1",
        "every layer has experts",
        f"{GRAPH_MODULES} mlp --moe-layer-freq 2",
    ),
    Case(
        "captured_modules_exist",
        f"{GRAPH_MODULES} attn mamba",
        "Mamba layers are not available",
        f"{GRAPH_MODULES} attn",
    ),
    Case(
        "captured_modules_exist",
        f"{GRAPH_MODULES} moe_router",
        "no layer has experts",
        f"{GRAPH_MODULES} attn",
        without="--num-experts",
    ),
    Case(
        "captured_modules_are_deterministic",
        "--cuda-graph-impl local --attention-dropout 0.1 --hidden-dropout 0",
        "with --attention-dropout 0.1: a replay draws no random numbers",
        "--cuda-graph-impl local --attention-dropout 0 --hidden-dropout 0",
    ),
    Case(
        "captured_modules_are_not_recomputed",
        f"{GRAPHS} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "with --recompute-granularity full",
        GRAPHS,
    ),
    Case(
        "captured_modules_are_not_recomputed",
        f"{GRAPH_MODULES} attn --recompute-granularity selective --recompute-modules core_attn moe_act",
        "core_attn is inside captured modules (attn)",
        f"{GRAPH_MODULES} attn --recompute-granularity selective --recompute-modules moe_act",
    ),
    Case(
        "captured_experts_use_grouped_gemm",
        f"{FULL_ITERATION} --no-moe-grouped-gemm",
        "full_iteration without --moe-grouped-gemm",
        f"{GRAPHS} --no-moe-grouped-gemm {DEFERRED} --bf16",
    ),
    Case(
        "captured_experts_use_grouped_gemm",
        f"{GRAPH_MODULES} attn moe --no-moe-grouped-gemm",
        "modules moe without --moe-grouped-gemm",
        f"{GRAPH_MODULES} attn moe_router --no-moe-grouped-gemm",
    ),
    Case(
        "captured_expert_rows_are_not_deferred",
        f"{GRAPHS} {DEFERRED} --bf16",
        "with captured moe (--cuda-graph-impl local)",
        f"{GRAPH_MODULES} attn moe_router {DEFERRED} --bf16",
    ),
    Case(
        "captured_expert_rows_are_not_deferred",
        f"{GRAPH_MODULES} moe_router moe_preprocess {DEFERRED}",
        "with captured moe_preprocess",
        f"{FULL_ITERATION} {DEFERRED}",
    ),
    Case(
        "captured_modules_have_no_collectives",
        f"{GRAPH_MODULES} attn moe {EP2}",
        "modules moe with experts over 2 ranks",
        f"{GRAPH_MODULES} attn moe_router {EP2}",
        environ=EIGHT_RANKS,
    ),
    Case(
        "captured_modules_have_no_collectives",
        f"{GRAPHS} {TP2} --global-batch-size 32",
        "with --tensor-model-parallel-size 2: layers communicate",
        f"{TP2} --global-batch-size 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "full_iteration_supports_schedule",
        f"{FULL_ITERATION} {PP2} --global-batch-size 32",
        "full_iteration with --pipeline-model-parallel-size 2",
        f"{GRAPHS} {PP2} --global-batch-size 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "full_iteration_supports_schedule",
        f"{FULL_ITERATION} --overlap-grad-reduce --global-batch-size 32",
        "full_iteration with --overlap-grad-reduce",
        f"{FULL_ITERATION} --global-batch-size 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "captured_work_has_no_overlap",
        f"{FULL_ITERATION} {OVERLAP} --global-batch-size 32",
        "with --overlap-param-gather",
        f"{GRAPHS} {OVERLAP} --global-batch-size 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "captured_work_has_no_overlap",
        f"{FULL_ITERATION} --overlap-optimizer-step",
        "with --overlap-optimizer-step",
        f"{GRAPHS} --overlap-optimizer-step",
    ),
    Case(
        "captured_work_has_no_overlap",
        f"{GRAPHS} --delay-wgrad-compute",
        "with --delay-wgrad-compute",
        "--delay-wgrad-compute",
    ),
    Case(
        "captured_work_has_no_overlap",
        f"{FULL_ITERATION} --overlap-moe-expert-parallel-comm --moe-grouped-gemm",
        "with --overlap-moe-expert-parallel-comm",
        f"{GRAPH_MODULES} attn moe_router {EP2} --overlap-moe-expert-parallel-comm",
        environ=EIGHT_RANKS,
    ),
    Case(
        "captured_work_has_no_overlap",
        f"{FULL_ITERATION} {SHARED} --moe-shared-expert-overlap",
        "with --moe-shared-expert-overlap",
        f"{GRAPH_MODULES} attn moe_router {SHARED} --moe-shared-expert-overlap",
    ),
    Case(
        "straggler_log_needs_uncaptured_attention",
        f"{GRAPHS} --log-straggler",
        "it times attention, which is captured",
        f"{GRAPH_MODULES} moe_router --log-straggler",
    ),
    Case(
        "straggler_log_needs_uncaptured_attention",
        f"{FULL_ITERATION} --log-straggler",
        "--log-straggler with --cuda-graph-impl full_iteration",
        FULL_ITERATION,
    ),
)
