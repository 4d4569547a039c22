"""Cases of the pipeline rules (arguments/checks/pipeline.py)."""

from tests.helpers.check_cases import EIGHT_RANKS, EP2, PP2, Case

LAYOUT = "--pipeline-model-parallel-layout"

CASES = (
    Case(
        "layer_placement_given_once",
        f"{LAYOUT} Et*4L --account-for-loss-in-pipeline-split",
        "layout Et*4L with other flags that place layers",
        f"{LAYOUT} Et*4L",
    ),
    Case(
        "layer_placement_given_once",
        f"{LAYOUT} Et*4L --num-virtual-stages-per-pipeline-rank 1",
        "layout Et*4L with other flags",
        f"{LAYOUT} auto --num-virtual-stages-per-pipeline-rank 1",
    ),
    Case(
        "layer_placement_given_once",
        "--num-layers-per-virtual-pipeline-stage 4 --num-virtual-stages-per-pipeline-rank 1",
        "both the number of virtual stages and their number of layers",
        "--num-layers-per-virtual-pipeline-stage 4",
    ),
    Case(
        "layer_placement_given_once",
        "--decoder-first-pipeline-num-layers 4 --account-for-embedding-in-pipeline-split",
        "the layers of the first or last stage are given, and other flags place them too",
        "--decoder-first-pipeline-num-layers 4 --num-virtual-stages-per-pipeline-rank 1",
    ),
    Case(
        "layers_fit_stages",
        f"{LAYOUT} Et*3L",
        "Et*3L has 3 decoder layers (t); the model has 4",
        f"{LAYOUT} 'E(tt)*2L'",
    ),
    Case(
        "layers_fit_stages",
        "--num-layers-per-virtual-pipeline-stage 3",
        "4 layers over 1 pipeline rank: 4 per rank, which cannot be divided into virtual stages of 3 layers",
        "--num-layers-per-virtual-pipeline-stage 4",
    ),
    Case(
        "layers_fit_stages",
        f"{PP2} --account-for-loss-in-pipeline-split",
        "4 layers and 1 for embedding and loss cannot be divided among 2 pipeline ranks",
        f"{PP2} --decoder-last-pipeline-num-layers 1",
        environ=EIGHT_RANKS,
    ),
    Case(
        "microbatches_fill_stages",
        "--num-virtual-stages-per-pipeline-rank 2",
        "2 virtual stages per rank need at least 2 pipeline ranks, not 1",
        "--num-virtual-stages-per-pipeline-rank 1",
    ),
    Case(
        "microbatches_fill_stages",
        f"{PP2} --num-layers-per-virtual-pipeline-stage 1",
        "groups of 2 microbatches must be at least as large as the pipeline (2 ranks) and at most the 1 microbatches",
        f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "microbatches_fill_stages",
        f"{PP2} {LAYOUT} Et|t|t|tL --global-batch-size 80",
        "5 microbatches leave 1 after groups of 2",
        f"{PP2} {LAYOUT} Et|t|t|tL --global-batch-size 80 --microbatch-group-size-per-virtual-pipeline-stage 3",
        environ=EIGHT_RANKS,
    ),
    Case(
        "ep_overlap_has_exchange",
        f"{EP2} --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type allgather",
        "with --moe-token-dispatcher-type allgather",
        f"{EP2} --moe-token-dispatcher-type allgather",
        environ=EIGHT_RANKS,
    ),
    Case(
        "ep_overlap_has_exchange",
        f"{EP2} {PP2} --overlap-moe-expert-parallel-comm",
        "over 2 pipeline ranks needs virtual stages",
        f"{EP2} {PP2} --overlap-moe-expert-parallel-comm --num-virtual-stages-per-pipeline-rank 2",
        environ=EIGHT_RANKS,
    ),
    Case(
        "ep_overlap_supports_recompute_and_mtp",
        f"{EP2} --overlap-moe-expert-parallel-comm --mtp-num-layers 2",
        "with 2 layers of multi-token prediction",
        f"{EP2} --overlap-moe-expert-parallel-comm --mtp-num-layers 1",
        environ=EIGHT_RANKS,
    ),
    Case(
        "ep_overlap_supports_recompute_and_mtp",
        f"{EP2} --overlap-moe-expert-parallel-comm --recompute-granularity full --recompute-method uniform "
        f"--recompute-num-layers 1",
        "with recompute of whole layers",
        f"{EP2} --overlap-moe-expert-parallel-comm",
        environ=EIGHT_RANKS,
    ),
    Case(
        "early_release_needs_ep_overlap",
        "--ep-overlap-early-attn-memory-release",
        "without --overlap-moe-expert-parallel-comm",
        f"{EP2} --ep-overlap-early-attn-memory-release --overlap-moe-expert-parallel-comm",
        environ=EIGHT_RANKS,
    ),
)
