"""Cases of the memory rules (arguments/checks/memory.py)."""

from tests.helpers.check_cases import EIGHT_RANKS, EP2, MLA, SHARED, TP2, Case

PAGED_STASH = "--moe-paged-stash"
OFFLOAD = "--fine-grained-activation-offloading"
OFFLOAD_MODULES = "--offload-modules"
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules"

CASES = (
    Case(
        "full_recompute_selects_layers",
        "--recompute-granularity full --recompute-method block",
        "does not select layers",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    ),
    Case(
        "recompute_method_needs_full",
        "--recompute-activations --recompute-method uniform",
        "--recompute-method with --recompute-granularity selective",
        "--recompute-activations",
    ),
    Case(
        "recompute_modules_need_selective",
        f"{FULL_RECOMPUTE} --recompute-modules core_attn",
        "--recompute-modules without --recompute-granularity selective",
        f"{SELECTIVE} core_attn",
    ),
    Case("recompute_modules_exist", f"{SELECTIVE} mhc", "mhc has nothing to recompute", f"{SELECTIVE} mlp moe"),
    Case(
        "recompute_modules_exist",
        f"{SELECTIVE} mla_up_proj",
        "attention is not multi-latent",
        f"{MLA} --no-group-query-attention {SELECTIVE} mla_up_proj layernorm",
    ),
    Case(
        "overlapped_shared_experts_are_not_recomputed",
        f"{EP2} {SHARED} --moe-shared-expert-overlap {SELECTIVE} shared_experts",
        "shared_experts with --moe-shared-expert-overlap",
        f"{EP2} {SHARED} {SELECTIVE} shared_experts",
        environ=EIGHT_RANKS,
    ),
    Case(
        "saved_activations_can_be_distributed",
        "--distribute-saved-activations --recompute-activations",
        "without --recompute-granularity full",
        FULL_RECOMPUTE,
    ),
    Case(
        "saved_activations_can_be_distributed",
        f"--distribute-saved-activations {FULL_RECOMPUTE}",
        "needs several tensor-parallel ranks",
        FULL_RECOMPUTE,
    ),
    Case(
        "saved_activations_can_be_distributed",
        f"{TP2} --distribute-saved-activations {FULL_RECOMPUTE}",
        "with --sequence-parallel, which already distributes them",
        f"{TP2} {FULL_RECOMPUTE}",
        environ=EIGHT_RANKS,
    ),
    Case("offload_modules_match_switch", OFFLOAD, "without modules", f"{OFFLOAD} {OFFLOAD_MODULES} moe_act"),
    Case(
        "offload_modules_match_switch",
        f"{OFFLOAD_MODULES} moe_act",
        "--offload-modules without",
        f"{OFFLOAD} {OFFLOAD_MODULES} moe_act",
    ),
    Case(
        "offloaded_modules_free_memory",
        f"{OFFLOAD} {OFFLOAD_MODULES} attn_proj",
        "core_attn saves the same tensor",
        f"{OFFLOAD} {OFFLOAD_MODULES} attn_proj core_attn",
    ),
    Case(
        "offloaded_modules_are_not_recomputed",
        f"{OFFLOAD} {OFFLOAD_MODULES} moe_act {FULL_RECOMPUTE}",
        "which saves layer inputs only",
        f"{OFFLOAD} {OFFLOAD_MODULES} moe_act {SELECTIVE} moe_act",
    ),
    Case(
        "offloaded_modules_are_not_recomputed",
        f"{OFFLOAD} {OFFLOAD_MODULES} expert_fc1 {SELECTIVE} moe",
        "which saves no inner activations",
        f"{OFFLOAD} {OFFLOAD_MODULES} attn_norm {SELECTIVE} moe",
    ),
    Case(
        "offloading_excludes_cuda_graphs",
        f"{OFFLOAD} {OFFLOAD_MODULES} moe_act --cuda-graph-impl local",
        "with --cuda-graph-impl local",
        f"{OFFLOAD} {OFFLOAD_MODULES} moe_act",
    ),
    Case(
        "paged_stash_has_unused_rows",
        f"{PAGED_STASH} --moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1",
        "all rows of every expert count as used",
        f"{PAGED_STASH} --moe-expert-capacity-factor 1",
    ),
    Case(
        "paged_stash_has_unused_rows",
        f"{PAGED_STASH} {EP2}",
        "exactly the received rows",
        f"{PAGED_STASH} {EP2} --moe-token-dispatcher-type allgather",
        environ=EIGHT_RANKS,
    ),
    Case("paged_stash_has_unused_rows", PAGED_STASH, "no layer has experts", "", without="--num-experts"),
    Case(
        "paged_stash_supports_saved_tensors",
        f"{PAGED_STASH} --no-moe-memory-efficient-permutation",
        "saves other rows",
        PAGED_STASH,
    ),
    Case(
        "paged_stash_excludes_other_policies",
        f"{PAGED_STASH} {FULL_RECOMPUTE}",
        "--moe-paged-stash with --recompute-granularity full",
        f"{PAGED_STASH} {SELECTIVE} moe_act",
    ),
    Case(
        "expert_wgrad_interval_is_supported",
        "--moe-expert-wgrad-interval 2",
        "interval 2 without effect",
        "--moe-expert-wgrad-interval 1",
        without="--num-experts",
    ),
    Case(
        "expert_wgrad_interval_is_supported",
        f"{PAGED_STASH} --moe-expert-wgrad-interval 2",
        "interval 2 with --moe-paged-stash",
        "--moe-expert-wgrad-interval 2",
    ),
    Case(
        "paged_stash_needs_nan_check",
        f"{PAGED_STASH} --no-check-for-nan-in-loss-and-grad",
        "that overflowed the pages",
        PAGED_STASH,
    ),
)
