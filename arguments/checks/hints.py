"""Hints: notes on legal settings that are likely unintended."""

from arguments import derive
from arguments.checks.memory import given_recompute_layer_flags
from arguments.checks.violation import functions_returning
from arguments.flags import Flags


def query_groups_without_gqa(flags: Flags) -> str | None:
    """Megatron ignores --num-query-groups without --group-query-attention."""
    if flags.group_query_attention or flags.num_query_groups == 1:
        return None
    return f"--num-query-groups {flags.num_query_groups} has no effect without --group-query-attention"


def experts_as_wide_as_dense(flags: Flags) -> str | None:
    """Experts usually are narrower than dense feed-forward blocks."""
    if not flags.num_experts or flags.moe_ffn_hidden_size is not None:
        return None
    return "experts are as wide as dense feed-forward blocks, since --moe-ffn-hidden-size is not set"


def bf16_router_with_many_experts(flags: Flags) -> str | None:
    """Close scores of many experts round to the same bf16 value."""
    if not flags.bf16 or flags.moe_router_dtype is not None or (flags.num_experts or 0) < 32:
        return None
    return f"--moe-router-dtype fp32 is better for {flags.num_experts} experts: in bf16 many of their scores are equal"


def no_load_balancing(flags: Flags) -> str | None:
    """An auxiliary loss with coefficient 0 has no effect."""
    kinds = flags.moe_router_load_balancing_type
    losses = all(kind == "none" or kind.endswith("aux_loss") for kind in kinds)
    weighted = any(coeff for kind, coeff in zip(kinds, flags.moe_aux_loss_coeff, strict=False) if kind != "none")
    if not flags.num_experts or not losses or weighted or flags.moe_router_enable_expert_bias:
        return None
    return "the experts are not balanced: no balancing loss has a coefficient, and there is no expert bias"


def router_groups_without_limit(flags: Flags) -> str | None:
    """Expert groups matter only with a limit on the groups per token."""
    if not flags.moe_router_num_groups or flags.moe_router_group_topk:
        return None
    return f"--moe-router-num-groups {flags.moe_router_num_groups} has no effect without --moe-router-group-topk"


def unused_rope_scaling(flags: Flags) -> str | None:
    """A scaling factor applies to one kind of RoPE scaling only, and to none without RoPE."""
    yarn = flags.rope_type != "rope" if flags.multi_latent_attention else flags.position_embedding_type == "yarn"
    unused = []
    if flags.rotary_scaling_factor != 1 and not yarn:
        unused.append(f"--rotary-scaling-factor {flags.rotary_scaling_factor:g}")
    if not flags.multi_latent_attention and flags.position_embedding_type not in ("rope", "yarn"):
        unused += ["--use-rope-scaling"] if flags.use_rope_scaling else []
        if flags.rotary_seq_len_interpolation_factor not in (None, 1):
            unused.append(f"--rotary-seq-len-interpolation-factor {flags.rotary_seq_len_interpolation_factor}")
    if not unused:
        return None
    return f"{' and '.join(unused)} without effect: this model does not use that RoPE scaling"


def paged_stash_without_unused_rows(flags: Flags) -> str | None:
    """With all experts on one rank, every row of the buffers is used."""
    ranks = derive.expert_ranks(flags)
    if not flags.moe_paged_stash or ranks > 1 or (flags.moe_expert_capacity_factor or 0) > 0:
        return None
    return "--moe-paged-stash saves no memory if all experts are on one rank: every row is used"


def preprocess_capture_without_effect(flags: Flags) -> str | None:
    """Rows that are exchanged between ranks are sorted by the dispatcher, outside captured modules."""
    ranks = derive.expert_ranks(flags)
    if flags.cuda_graph_impl == "none" or "moe_preprocess" not in flags.cuda_graph_modules or ranks == 1:
        return None
    return f"--cuda-graph-modules moe_preprocess captures nothing: experts are on {ranks} ranks, and rows are exchanged"


def recompute_layers_without_granularity(flags: Flags) -> str | None:
    """Megatron ignores the recompute layers without a granularity."""
    names = given_recompute_layer_flags(flags)
    if flags.recompute_granularity is not None or not names:
        return None
    return f"{' and '.join(names)} without effect: nothing is recomputed without --recompute-granularity full"


def save_interval_without_folder(flags: Flags) -> str | None:
    """Checkpoints need a directory."""
    if flags.save or flags.run_dir or flags.save_interval is None:
        return None
    return "no checkpoint is saved: neither --save nor --run-dir is given"


def mock_run_without_checkpoint(flags: Flags) -> str | None:
    """A run on mock data writes a final checkpoint only on request."""
    if not flags.run_dir or derive.save_folder(flags):
        return None
    return "mock data: no checkpoint is saved without --save or --save-interval"


def mock_data_overrides_files(flags: Flags) -> str | None:
    """Mock data replaces all data files."""
    if flags.mock_data and (flags.data_path or flags.train_data_path):
        return "--mock-data is given, so the data files are not read"
    return None


HINTS = functions_returning(str | None, globals())
