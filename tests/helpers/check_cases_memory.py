"""Rules about recompute and activations on the host, each with a command line that breaks it and one that barely does
not."""

from tests.helpers.check_cases_parallel import (
    CHOSEN,
    EIGHT_RANKS,
    EP2,
    WHOLE,
    Case,
)

MLA = "--multi-latent-attention --rope-type rope"
PAGED = "--moe-paged-stash"
MOVED, MODULES = "--fine-grained-activation-offloading", "--offload-modules"

MEMORY_CASES = (
    Case(
        "whole_layers_are_counted",
        "--recompute-granularity full --recompute-method block",
        "does not say which layers",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    ),
    Case(
        "method_belongs_to_whole_layers",
        "--recompute-activations --recompute-method uniform",
        "--recompute-method with --recompute-granularity selective",
        "--recompute-activations",
    ),
    Case(
        "modules_belong_to_a_choice",
        f"{WHOLE} --recompute-modules core_attn",
        "--recompute-modules without --recompute-granularity selective",
        f"{CHOSEN} core_attn",
    ),
    Case("modules_can_be_recomputed", f"{CHOSEN} mhc", "mhc has nothing to recompute", f"{CHOSEN} mlp moe"),
    Case(
        "modules_can_be_recomputed",
        f"{CHOSEN} mla_up_proj",
        "attention is not multi-latent",
        f"{MLA} --no-group-query-attention {CHOSEN} mla_up_proj layernorm",
    ),
    Case(
        "saved_inputs_can_be_spread",
        "--distribute-saved-activations --recompute-activations",
        "without --recompute-granularity full",
        WHOLE,
    ),
    Case("offloaded_modules_are_named", MOVED, "without modules", f"{MOVED} {MODULES} moe_act"),
    Case(
        "offloaded_modules_are_named", f"{MODULES} moe_act", "--offload-modules without", f"{MOVED} {MODULES} moe_act"
    ),
    Case(
        "modules_can_be_offloaded",
        f"{MOVED} {MODULES} attn_proj",
        "core_attn keeps the same tensor",
        f"{MOVED} {MODULES} attn_proj core_attn",
    ),
    Case(
        "offloaded_modules_are_kept",
        f"{MOVED} {MODULES} moe_act {WHOLE}",
        "inputs of layers alone are kept",
        f"{MOVED} {MODULES} moe_act {CHOSEN} moe_act",
    ),
    Case(
        "offloaded_modules_are_kept",
        f"{MOVED} {MODULES} expert_fc1 {CHOSEN} moe",
        "which keeps nothing inside of it",
        f"{MOVED} {MODULES} attn_norm {CHOSEN} moe",
    ),
    Case(
        "offloading_and_graphs_exclude_each_other",
        f"{MOVED} {MODULES} moe_act --cuda-graph-impl local",
        "with --cuda-graph-impl local",
        f"{MOVED} {MODULES} moe_act",
    ),
    Case(
        "pages_keep_unused_rows_out",
        f"{PAGED} --moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1",
        "all rows of every expert count as used",
        f"{PAGED} --moe-expert-capacity-factor 1",
    ),
    Case(
        "pages_keep_unused_rows_out",
        f"{PAGED} {EP2}",
        "exactly the rows that come",
        f"{PAGED} {EP2} --moe-token-dispatcher-type allgather",
        environ=EIGHT_RANKS,
    ),
    Case("pages_keep_unused_rows_out", PAGED, "no layer has experts", "", without="--num-experts"),
    Case(
        "pages_keep_rows_of_experts_alone", f"{PAGED} --no-moe-memory-efficient-permutation", "keeps other rows", PAGED
    ),
    Case(
        "pages_stand_alone",
        f"{PAGED} {WHOLE}",
        "--moe-paged-stash with --recompute-granularity full",
        f"{PAGED} {CHOSEN} moe_act",
    ),
    Case(
        "rows_wait_for_weight_gradients_of_experts",
        "--moe-expert-wgrad-interval 2",
        "interval 2 has nothing to compute later",
        "--moe-expert-wgrad-interval 1",
        without="--num-experts",
    ),
    Case(
        "rows_wait_for_weight_gradients_of_experts",
        f"{PAGED} --moe-expert-wgrad-interval 2",
        "interval 2 with --moe-paged-stash",
        "--moe-expert-wgrad-interval 2",
    ),
    Case("lost_rows_are_noticed", f"{PAGED} --no-check-for-nan-in-loss-and-grad", "that found no room", PAGED),
    Case(
        "fractions_are_shares",
        "--activation-offload-fraction 1.5",
        "is more than all",
        "--activation-offload-fraction 1.0",
    ),
    Case("saved_inputs_can_be_spread", f"--distribute-saved-activations {WHOLE}", "has no ranks", WHOLE),
)
