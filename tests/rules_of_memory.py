"""Rules about recompute and activations on the host, each with a command line that breaks it and one that barely does
not."""

from tests.rules_of_ranks import CHOSEN, WHOLE, Case

MLA = "--multi-latent-attention --rope-type rope"
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
        "--recompute-method without --recompute-granularity full",
        "--recompute-activations",
    ),
    Case(
        "modules_belong_to_a_choice",
        f"{WHOLE} --recompute-modules core_attn",
        "--recompute-modules without --recompute-granularity selective",
        f"{CHOSEN} core_attn",
    ),
    Case("modules_can_be_recomputed", f"{CHOSEN} router", "router is no module", f"{CHOSEN} mlp moe"),
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
    Case("modules_can_be_offloaded", f"{MOVED} {MODULES} router", "router is no module", f"{MOVED} {MODULES} mlp_norm"),
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
        "fractions_are_shares",
        "--activation-offload-fraction 1.5",
        "is more than all",
        "--activation-offload-fraction 1.0",
    ),
    Case("saved_inputs_can_be_spread", f"--distribute-saved-activations {WHOLE}", "has no ranks", WHOLE),
)
