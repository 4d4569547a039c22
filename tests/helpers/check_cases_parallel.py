"""Command lines that break a rule about ranks, and ones that barely do not."""

from typing import NamedTuple

EIGHT_RANKS = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
DYNAMIC = "--dynamic-context-parallel --max-seqlen-per-dp-cp-rank 64"
CP = "--global-batch-size 32 --context-parallel-size"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
TP4 = "--tensor-model-parallel-size 4 --sequence-parallel"
TP8 = "--tensor-model-parallel-size 8 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUT = "--pipeline-model-parallel-layout"
STAGES_INSIDE = "--use-tp-pp-dp-mapping"
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --global-batch-size 32"
SHARED = "--moe-shared-expert-intermediate-size 64"
WHOLE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CHOSEN = "--recompute-granularity selective --recompute-modules"


class Case(NamedTuple):
    rule: str
    bad: str
    sentence: str
    good: str
    without: str = ""
    environ: dict[str, str] | None = None


RANK_CASES = (
    Case(
        "weights_travel_when_shards_are_stepped",
        "--overlap-param-gather --overlap-grad-reduce",
        "without --use-distributed-optimizer has nothing",
        "--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer",
    ),
    Case(
        "weights_travel_when_shards_are_stepped",
        "--overlap-param-gather --use-distributed-optimizer",
        "without --overlap-grad-reduce has nothing",
        "--overlap-grad-reduce --use-distributed-optimizer",
    ),
    Case(
        "updates_hide_on_the_device",
        "--overlap-optimizer-step --chunked-optimizer-state-offload --optimizer-state-offload-fraction 0.5",
        "--overlap-optimizer-step with --chunked-optimizer-state-offload",
        "--overlap-optimizer-step",
    ),
    Case(
        "updates_hide_where_weights_are_waited_for",
        "--overlap-optimizer-step --use-distributed-optimizer",
        "all weights gathered before the forward",
        "--overlap-optimizer-step --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    Case(
        "buckets_have_one_size",
        "--ddp-bucket-size 1000 --ddp-num-buckets 2",
        "buckets of 1000 elements and 2 of them",
        "--ddp-num-buckets 2",
    ),
    Case(
        "token_sums_are_not_averaged",
        "--ddp-average-in-collective --calculate-per-token-loss",
        "is not a mean over tokens",
        "--ddp-average-in-collective",
    ),
    Case(
        "fp32_sums_are_sharded",
        "--ddp-reduce-scatter-with-fp32-accumulation",
        "only a sharded optimizer",
        "--ddp-reduce-scatter-with-fp32-accumulation --use-distributed-optimizer",
    ),
    Case(
        "bf16_gradients_are_of_bf16_weights",
        "--no-bf16 --grad-reduce-in-bf16",
        "weights in a wider format",
        "--bf16 --grad-reduce-in-bf16",
    ),
    Case(
        "attention_grid_covers_the_world",
        "--tensor-model-parallel-size 3",
        "the model cannot be split: 3 x 1 x 1 = 3 does not divide 8 ranks",
        TP2,
        environ=EIGHT_RANKS,
    ),
    Case(
        "heads_divide_among_tensor_ranks",
        f"{TP2} --num-attention-heads 3 --kv-channels 64",
        "3 heads cannot be divided among 2 tensor-parallel ranks",
        TP2,
        environ=EIGHT_RANKS,
    ),
    Case(
        "groups_divide_among_tensor_ranks",
        f"{TP4} --num-attention-heads 12 --kv-channels 64 --num-query-groups 3",
        "3 query groups and 4 tensor-parallel ranks: neither number divides the other",
        f"{TP4} --num-attention-heads 12 --kv-channels 64 --num-query-groups 2",
        environ=EIGHT_RANKS,
    ),
    Case(
        "shared_groups_have_equal_rows",
        f"{TP8} --num-attention-heads 8 --num-query-groups 1 --kv-channels 2",
        "4 channels of keys and values do not divide among 8 tensor-parallel ranks",
        f"{TP8} --num-attention-heads 8 --num-query-groups 1 --kv-channels 4",
        environ=EIGHT_RANKS,
    ),
    Case(
        "dense_width_divides_among_tensor_ranks",
        f"{TP2} --ffn-hidden-size 511",
        "511 feed-forward channels cannot be divided among 2",
        f"{TP2} --ffn-hidden-size 510",
        environ=EIGHT_RANKS,
    ),
    Case(
        "shared_expert_divides_among_tensor_ranks",
        f"{TP2} --moe-shared-expert-intermediate-size 63",
        "shared experts of width 63 cannot be divided among 2",
        f"{TP2} --moe-shared-expert-intermediate-size 62",
        environ=EIGHT_RANKS,
    ),
    Case(
        "vocabulary_divides_among_tensor_ranks",
        f"{TP2} --padded-vocab-size 1001",
        "--padded-vocab-size 1001 cannot be divided among 2",
        f"{TP2} --padded-vocab-size 1002",
        environ=EIGHT_RANKS,
    ),
    Case(
        "unpadded_vocabulary_is_on_one_rank",
        f"{TP2} --disable-pad-vocab-size",
        "a vocabulary without padding may not be divisible among 2",
        f"{TP2} --disable-pad-vocab-size --padded-vocab-size 1002",
        environ=EIGHT_RANKS,
    ),
    Case(
        "experts_need_sequence_parallel",
        "--tensor-model-parallel-size 2",
        "experts and 2 tensor-parallel ranks without sequence parallelism",
        TP2,
        environ=EIGHT_RANKS,
    ),
    Case(
        "sequence_divides_among_tensor_ranks",
        f"{TP2} --seq-length 127",
        "--seq-length 127 cannot be divided among 2",
        f"{TP2} --seq-length 126",
        environ=EIGHT_RANKS,
    ),
    Case(
        "dynamic_splits_have_a_limit",
        f"{CP} 2 --hybrid-context-parallel",
        "does not know how much a rank may hold",
        f"{CP} 2 --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 64",
        environ=EIGHT_RANKS,
    ),
    Case(
        "dynamic_splits_halve_the_ranks",
        f"--context-parallel-size 3 --seq-length 126 {DYNAMIC}",
        "3 context-parallel ranks are not a power of two",
        f"--context-parallel-size 4 --seq-length 128 {DYNAMIC} --global-batch-size 24",
        environ={**EIGHT_RANKS, "WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "12"},
    ),
    Case(
        "dynamic_splits_have_one_level",
        f"{CP} 4 {DYNAMIC} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        "not over a changing number of them",
        f"{CP} 4 {DYNAMIC} --cp-comm-type a2a --hierarchical-context-parallel-sizes 2 2",
        environ=EIGHT_RANKS,
    ),
    Case(
        "dynamic_splits_balance_over_tokens",
        f"{CP} 4 {DYNAMIC} --moe-router-load-balancing-type seq_aux_loss",
        "counts every sequence over all context-parallel ranks",
        f"{CP} 4 {DYNAMIC} --moe-router-load-balancing-type aux_loss",
        environ=EIGHT_RANKS,
    ),
    Case(
        "chunks_share_the_sequence",
        f"{CP} 4 --seq-length 124",
        "--seq-length 124 is not a multiple of 8, which 4 context-parallel ranks need",
        f"{CP} 4 --seq-length 120",
        environ=EIGHT_RANKS,
    ),
    Case(
        "layers_exchange_in_one_way",
        f"{CP} 2 --cp-comm-type p2p a2a",
        "2 ways to exchange keys and values for 4 layers",
        f"{CP} 2 --cp-comm-type p2p a2a all_gather allgather",
        environ=EIGHT_RANKS,
    ),
    Case(
        "two_levels_make_the_ranks",
        f"{CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
        "the two levels of 4 context-parallel ranks are 2 x 4",
        f"{CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        environ=EIGHT_RANKS,
    ),
    Case(
        "two_levels_make_the_ranks",
        f"{CP} 4 --cp-comm-type a2a+p2p",
        "the two levels of 4 context-parallel ranks are not given",
        f"{CP} 4 --cp-comm-type p2p",
        environ=EIGHT_RANKS,
    ),
    Case(
        "heads_divide_among_the_ranks",
        f"{CP} 8 --cp-comm-type a2a",
        "4 heads cannot be divided among 8 ranks",
        f"{CP} 4 --cp-comm-type a2a",
        environ=EIGHT_RANKS,
    ),
    Case(
        "heads_divide_among_the_ranks",
        f"{CP} 2 --cp-comm-type a2a --num-attention-heads 6 --num-query-groups 3 --kv-channels 32",
        "3 query groups and 2 ranks that exchange heads: neither divides the other",
        f"{CP} 2 --cp-comm-type a2a --num-attention-heads 6 --num-query-groups 2 --kv-channels 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "layers_are_placed_once",
        f"{LAYOUT} Et*4L --account-for-loss-in-pipeline-split",
        "the layout Et*4L places the layers, and so do other flags",
        f"{LAYOUT} Et*4L",
    ),
    Case(
        "layers_are_placed_once",
        f"{LAYOUT} Et*4L --num-virtual-stages-per-pipeline-rank 1",
        "the layout Et*4L places the layers",
        f"{LAYOUT} auto --num-virtual-stages-per-pipeline-rank 1",
    ),
    Case(
        "layers_are_placed_once",
        "--num-layers-per-virtual-pipeline-stage 4 --num-virtual-stages-per-pipeline-rank 1",
        "by their number and by their layers",
        "--num-layers-per-virtual-pipeline-stage 4",
    ),
    Case(
        "layers_are_placed_once",
        "--decoder-first-pipeline-num-layers 4 --account-for-embedding-in-pipeline-split",
        "layers of the first or last rank are given, and other flags share them out too",
        "--decoder-first-pipeline-num-layers 4 --num-virtual-stages-per-pipeline-rank 1",
    ),
    Case(
        "layers_fit_the_stages",
        f"{LAYOUT} Et*3L",
        "Et*3L has 3 decoder layers (t); the model has 4",
        f"{LAYOUT} 'E(tt)*2L'",
    ),
    Case(
        "layers_fit_the_stages",
        "--num-layers-per-virtual-pipeline-stage 3",
        "4 layers over 1 pipeline rank: 4 per rank, which cannot be divided into virtual stages of 3 layers",
        "--num-layers-per-virtual-pipeline-stage 4",
    ),
    Case(
        "microbatches_fill_the_stages",
        "--num-virtual-stages-per-pipeline-rank 2",
        "2 virtual stages per rank need at least 2 pipeline ranks, not 1",
        "--num-virtual-stages-per-pipeline-rank 1",
    ),
    Case(
        "ranks_share_the_experts",
        "--expert-model-parallel-size 8 --num-experts 12",
        "8 ranks do not divide 12 experts",
        "--expert-model-parallel-size 4 --num-experts 12 --global-batch-size 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "ranks_share_the_experts",
        "--expert-model-parallel-size 4 --num-experts 0 --global-batch-size 32",
        "4 ranks have no experts to share",
        "--expert-model-parallel-size 1 --num-experts 0 --global-batch-size 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "expert_width_divides_among_tensor_ranks",
        f"{TP2} --moe-ffn-hidden-size 127",
        "--moe-ffn-hidden-size 127 cannot be divided among 2",
        f"{TP2} --moe-ffn-hidden-size 127 --expert-tensor-parallel-size 1",
        environ=EIGHT_RANKS,
    ),
    Case(
        "flex_stays_on_one_rank",
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type flex --global-batch-size 32",
        "flex over 2 expert-parallel x 1 expert-tensor-parallel rank is not available yet",
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --global-batch-size 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "shared_experts_overlap_with_nothing_else",
        f"{SHARED} --moe-shared-expert-overlap --moe-latent-size 64",
        "with experts in a latent space of 64",
        f"{SHARED} --moe-latent-size 64",
    ),
    Case(
        "shared_experts_overlap_with_nothing_else",
        f"{SHARED} --moe-shared-expert-overlap --overlap-moe-expert-parallel-comm",
        "both fill the time in which rows travel",
        f"{SHARED} --moe-shared-expert-overlap",
    ),
    Case(
        "something_travels_while_another_computes",
        f"{EP2} --overlap-moe-expert-parallel-comm --moe-token-dispatcher-type allgather",
        "hides an all-to-all, and the dispatcher is allgather",
        f"{EP2} --moe-token-dispatcher-type allgather",
        environ=EIGHT_RANKS,
    ),
    Case(
        "something_travels_while_another_computes",
        f"{EP2} {PP2} --overlap-moe-expert-parallel-comm",
        "over 2 pipeline ranks needs virtual stages",
        f"{EP2} {PP2} --overlap-moe-expert-parallel-comm --num-virtual-stages-per-pipeline-rank 2",
        environ=EIGHT_RANKS,
    ),
    Case(
        "nothing_else_cuts_the_layers_of_a_pair",
        f"{EP2} --overlap-moe-expert-parallel-comm --mtp-num-layers 2",
        "with 2 layers of multi-token prediction",
        f"{EP2} --overlap-moe-expert-parallel-comm --mtp-num-layers 1",
        environ=EIGHT_RANKS,
    ),
    Case(
        "nothing_else_cuts_the_layers_of_a_pair",
        f"{EP2} --overlap-moe-expert-parallel-comm --recompute-granularity full --recompute-method uniform "
        f"--recompute-num-layers 1",
        "runs layers node by node, and whole layers are to be recomputed",
        f"{EP2} --overlap-moe-expert-parallel-comm",
        environ=EIGHT_RANKS,
    ),
    Case(
        "overlapped_shared_experts_are_kept",
        f"{EP2} {SHARED} --moe-shared-expert-overlap {CHOSEN} shared_experts",
        "shared_experts with --moe-shared-expert-overlap",
        f"{EP2} {SHARED} {CHOSEN} shared_experts",
        environ=EIGHT_RANKS,
    ),
    Case(
        "saved_inputs_can_be_spread",
        f"{TP2} --distribute-saved-activations {WHOLE}",
        "with --sequence-parallel, whose ranks keep different parts already",
        f"{TP2} {WHOLE}",
        environ=EIGHT_RANKS,
    ),
    Case(
        "early_release_belongs_to_pairs",
        "--ep-overlap-early-attn-memory-release",
        "changes the order of a schedule that is not asked for",
        f"{EP2} --ep-overlap-early-attn-memory-release --overlap-moe-expert-parallel-comm",
        environ=EIGHT_RANKS,
    ),
)

FOLD_CASES = (
    Case(
        "expert_grid_covers_the_world",
        "--expert-model-parallel-size 16 --num-experts 16 --pipeline-model-parallel-size 2",
        "experts cannot be folded: 1 x 16 x 2 = 32 does not divide 8 ranks",
        "--expert-model-parallel-size 4 --num-experts 16 --pipeline-model-parallel-size 2",
        environ=EIGHT_RANKS,
    ),
    Case(
        "pipelines_are_those_of_both_grids",
        f"{PP2} --num-experts 16 --expert-model-parallel-size 4 {STAGES_INSIDE}",
        "stages of 1 x 1 = 1 rank (tensor x context) are not stages of 1 x 4 = 4 ranks (expert-tensor x expert)",
        f"{PP2} --num-experts 16 {TP2} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2 {STAGES_INSIDE}",
        environ=EIGHT_RANKS,
    ),
    Case(
        "layers_fit_the_stages",
        f"{PP2} --account-for-loss-in-pipeline-split",
        "4 layers and 1 for embedding and loss cannot be divided among 2 pipeline ranks",
        f"{PP2} --decoder-last-pipeline-num-layers 1",
        environ=EIGHT_RANKS,
    ),
    Case(
        "microbatches_fill_the_stages",
        f"{PP2} --num-layers-per-virtual-pipeline-stage 1",
        "groups of 2 microbatches must be at least as large as the pipeline (2 ranks) and at most the 1 microbatches",
        f"{PP2} --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "microbatches_fill_the_stages",
        f"{PP2} {LAYOUT} Et|t|t|tL --global-batch-size 80",
        "5 microbatches leave 1 after groups of 2",
        f"{PP2} {LAYOUT} Et|t|t|tL --global-batch-size 80 --microbatch-group-size-per-virtual-pipeline-stage 3",
        environ=EIGHT_RANKS,
    ),
)
"""Rules about sizes that are not available yet: the near miss is refused as well, but not by the rule."""
