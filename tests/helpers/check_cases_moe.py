"""Cases of the MoE layer rules (arguments/checks/moe.py)."""

from tests.helpers.check_cases import BALANCING, EIGHT_RANKS, SHARED, TP2, Case

UPCYCLING = "--moe-use-upcycling --load dense --moe-upcycling-granularity"

CASES = (
    Case(
        "moe_layer_pattern_matches_layers",
        "--moe-layer-freq [1]*3",
        "describes 3 layers, but the model has 4",
        "--moe-layer-freq [1]*4",
    ),
    Case(
        "shared_experts_have_no_bias",
        "--moe-shared-expert-intermediate-size 64 --add-bias-linear",
        "shared experts do not support biases",
        "--moe-shared-expert-intermediate-size 64",
    ),
    Case(
        "gate_needs_shared_experts",
        "--moe-shared-expert-gate",
        "without shared experts",
        "--moe-shared-expert-gate --moe-shared-expert-intermediate-size 64",
    ),
    Case(
        "capacity_is_positive", "--moe-expert-capacity-factor 0", "drops every token", "--moe-expert-capacity-factor -1"
    ),
    Case(
        "padding_needs_capacity",
        "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor -1",
        "without a capacity",
        "--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1",
    ),
    Case(
        "capacity_supports_balancing",
        f"{BALANCING} sinkhorn --moe-aux-loss-coeff 0 --moe-expert-capacity-factor 1",
        "sinkhorn does not support a capacity",
        f"{BALANCING} seq_aux_loss --moe-expert-capacity-factor 1",
    ),
    Case(
        "probs_on_input_need_top1",
        "--moe-apply-probs-on-input",
        "with top-2",
        "--moe-apply-probs-on-input --moe-router-topk 1 --moe-router-pre-softmax",
    ),
    Case(
        "probs_are_applied_once",
        "--moe-apply-probs-on-input --moe-router-topk 1 --no-moe-memory-efficient-permutation",
        "one applies the probabilities before the experts, the other after them",
        "--moe-apply-probs-on-input --moe-router-topk 1 --moe-router-pre-softmax",
    ),
    Case(
        "upcycling_needs_dense_checkpoint",
        f"{UPCYCLING} 4",
        "without a directory",
        f"{UPCYCLING} 4 --run-dir x",
        "--run-dir",
    ),
    Case(
        "upcycling_needs_dense_checkpoint",
        "--moe-use-upcycling --moe-upcycling-granularity 4",
        "without a dense checkpoint",
        f"{UPCYCLING} 4",
    ),
    Case(
        "upcycling_needs_dense_checkpoint",
        f"{UPCYCLING} 4 --num-experts 0",
        "--moe-use-upcycling without experts",
        f"{UPCYCLING} 4",
    ),
    Case(
        "upcycled_slices_make_dense_width",
        f"{UPCYCLING} 2",
        "2 slices of width 128, but the dense width is 512",
        f"{UPCYCLING} 4",
    ),
    Case(
        "upcycled_slices_make_dense_width",
        f"{UPCYCLING} 4 --moe-latent-size 64",
        "no latent projections",
        f"{UPCYCLING} 4",
    ),
    Case(
        "upcycled_slices_make_whole_groups",
        f"{UPCYCLING} 4 --num-experts 6",
        "--num-experts 6 cannot be divided into groups of 4 slices",
        f"{UPCYCLING} 4 --num-experts 12",
    ),
    Case(
        "etp_divides_expert_width",
        f"{TP2} --moe-ffn-hidden-size 127",
        "--moe-ffn-hidden-size 127 cannot be divided among 2",
        f"{TP2} --moe-ffn-hidden-size 127 --expert-tensor-parallel-size 1",
        environ=EIGHT_RANKS,
    ),
    Case(
        "flex_needs_one_expert_rank",
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type flex --global-batch-size 32",
        "flex over 2 expert-parallel x 1 expert-tensor-parallel rank is not available yet",
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --global-batch-size 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "shared_expert_overlap_is_supported",
        f"{SHARED} --moe-shared-expert-overlap --moe-latent-size 64",
        "with experts in a latent space of 64",
        f"{SHARED} --moe-latent-size 64",
    ),
    Case(
        "shared_expert_overlap_is_supported",
        f"{SHARED} --moe-shared-expert-overlap --overlap-moe-expert-parallel-comm",
        "both overlap with the exchange of rows",
        f"{SHARED} --moe-shared-expert-overlap",
    ),
)
