"""Hints: notes on legal settings that are likely unintended."""

from arguments import derive
from arguments.checks.memory import given_recompute_layer_flags
from arguments.checks.violation import functions_returning


def query_groups_without_gqa(group_query_attention: bool, num_query_groups: int) -> str | None:
    """Megatron ignores --num-query-groups without --group-query-attention."""
    if group_query_attention or num_query_groups == 1:
        return None
    return f"--num-query-groups {num_query_groups} has no effect without --group-query-attention"


def experts_as_wide_as_dense(num_experts: int | None, moe_ffn_hidden_size: int | None) -> str | None:
    """Experts usually are narrower than dense feed-forward blocks."""
    if not num_experts or moe_ffn_hidden_size is not None:
        return None
    return "experts are as wide as dense feed-forward blocks, since --moe-ffn-hidden-size is not set"


def bf16_router_with_many_experts(num_experts: int | None, moe_router_dtype: str | None, bf16: bool) -> str | None:
    """Close scores of many experts round to the same bf16 value."""
    if not bf16 or moe_router_dtype is not None or (num_experts or 0) < 32:
        return None
    return f"--moe-router-dtype fp32 is better for {num_experts} experts: in bf16 many of their scores are equal"


def no_load_balancing(
    num_experts: int | None,
    moe_router_load_balancing_type: tuple[str, ...],
    moe_aux_loss_coeff: tuple[float, ...],
    moe_router_enable_expert_bias: bool,
) -> str | None:
    """An auxiliary loss with coefficient 0 has no effect."""
    kinds = moe_router_load_balancing_type
    losses = all(kind == "none" or kind.endswith("aux_loss") for kind in kinds)
    weighted = any(coeff for kind, coeff in zip(kinds, moe_aux_loss_coeff, strict=False) if kind != "none")
    if not num_experts or not losses or weighted or moe_router_enable_expert_bias:
        return None
    return "the experts are not balanced: no balancing loss has a coefficient, and there is no expert bias"


def router_groups_without_limit(moe_router_num_groups: int | None, moe_router_group_topk: int | None) -> str | None:
    """Expert groups matter only with a limit on the groups per token."""
    if not moe_router_num_groups or moe_router_group_topk:
        return None
    return f"--moe-router-num-groups {moe_router_num_groups} has no effect without --moe-router-group-topk"


def unused_rope_scaling(
    position_embedding_type: str,
    multi_latent_attention: bool,
    rope_type: str | None,
    rotary_scaling_factor: float,
    use_rope_scaling: bool,
    rotary_seq_len_interpolation_factor: int | None,
) -> str | None:
    """A scaling factor applies to one kind of RoPE scaling only, and to none without RoPE."""
    yarn = rope_type != "rope" if multi_latent_attention else position_embedding_type == "yarn"
    unused = []
    if rotary_scaling_factor != 1 and not yarn:
        unused.append(f"--rotary-scaling-factor {rotary_scaling_factor:g}")
    if not multi_latent_attention and position_embedding_type not in ("rope", "yarn"):
        unused += ["--use-rope-scaling"] if use_rope_scaling else []
        if rotary_seq_len_interpolation_factor not in (None, 1):
            unused.append(f"--rotary-seq-len-interpolation-factor {rotary_seq_len_interpolation_factor}")
    if not unused:
        return None
    return f"{' and '.join(unused)} without effect: this model does not use that RoPE scaling"


def paged_stash_without_unused_rows(
    moe_paged_stash: bool,
    moe_expert_capacity_factor: float | None,
    expert_model_parallel_size: int,
    expert_tensor_parallel_size: int | None,
    tensor_model_parallel_size: int,
) -> str | None:
    """With all experts on one rank, every row of the buffers is used."""
    ranks = derive.expert_ranks(expert_model_parallel_size, expert_tensor_parallel_size, tensor_model_parallel_size)
    if not moe_paged_stash or ranks > 1 or (moe_expert_capacity_factor or 0) > 0:
        return None
    return "--moe-paged-stash saves no memory if all experts are on one rank: every row is used"


def preprocess_capture_without_effect(
    cuda_graph_impl: str,
    cuda_graph_modules: tuple[str, ...],
    expert_model_parallel_size: int,
    expert_tensor_parallel_size: int | None,
    tensor_model_parallel_size: int,
) -> str | None:
    """Rows that are exchanged between ranks are sorted by the dispatcher, outside captured modules."""
    ranks = derive.expert_ranks(expert_model_parallel_size, expert_tensor_parallel_size, tensor_model_parallel_size)
    if cuda_graph_impl == "none" or "moe_preprocess" not in cuda_graph_modules or ranks == 1:
        return None
    return f"--cuda-graph-modules moe_preprocess captures nothing: experts are on {ranks} ranks, and rows are exchanged"


def recompute_layers_without_granularity(
    recompute_granularity: str | None, recompute_method: str | None, recompute_num_layers: int | None
) -> str | None:
    """Megatron ignores the recompute layers without a granularity."""
    names = given_recompute_layer_flags(recompute_method, recompute_num_layers)
    if recompute_granularity is not None or not names:
        return None
    return f"{' and '.join(names)} without effect: nothing is recomputed without --recompute-granularity full"


def save_interval_without_folder(save: str | None, run_dir: str | None, save_interval: int | None) -> str | None:
    """Checkpoints need a directory."""
    if save or run_dir or save_interval is None:
        return None
    return "no checkpoint is saved: neither --save nor --run-dir is given"


def mock_run_without_checkpoint(
    mock_data: bool,
    save: str | None,
    run_dir: str | None,
    save_interval: int | None,
    save_hf_interval: int | None,
    moe_use_upcycling: bool,
    ckpt_step: int | None,
) -> str | None:
    """A run on mock data writes a final checkpoint only on request."""
    args = (save, run_dir, mock_data, save_interval, save_hf_interval, moe_use_upcycling, ckpt_step)
    if not run_dir or derive.save_folder(*args):
        return None
    return "mock data: no checkpoint is saved without --save or --save-interval"


def mock_data_overrides_files(
    mock_data: bool, data_path: tuple[str, ...], train_data_path: tuple[str, ...]
) -> str | None:
    """Mock data replaces all data files."""
    if mock_data and (data_path or train_data_path):
        return "--mock-data is given, so the data files are not read"
    return None


HINTS = functions_returning(str | None, globals())
