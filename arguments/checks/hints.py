"""Things that are legal but perhaps not meant. They are noted, not refused."""

from arguments import derive
from arguments.checks.memory import whole_layer_flags


def groups_without_their_switch(group_query_attention: bool, num_query_groups: int) -> str | None:
    """Megatron ignores the number without the switch."""
    if group_query_attention or num_query_groups == 1:
        return None
    return f"--num-query-groups {num_query_groups} has no effect without --group-query-attention"


def experts_as_wide_as_dense_blocks(num_experts: int | None, moe_ffn_hidden_size: int | None) -> str | None:
    """Usually experts are narrower."""
    if not num_experts or moe_ffn_hidden_size is not None:
        return None
    return "experts are as wide as dense feed-forward blocks, since --moe-ffn-hidden-size is not set"


def many_experts_in_low_precision(num_experts: int | None, moe_router_dtype: str | None, bf16: bool) -> str | None:
    """Close scores of many experts round to the same bf16 number."""
    if not bf16 or moe_router_dtype is not None or (num_experts or 0) < 32:
        return None
    return f"--moe-router-dtype fp32 is better for {num_experts} experts: in bf16 many of their scores are equal"


def nothing_balances(
    num_experts: int | None,
    moe_router_load_balancing_type: tuple[str, ...],
    moe_aux_loss_coeff: tuple[float, ...],
    moe_router_enable_expert_bias: bool,
) -> str | None:
    """A loss with weight 0 is no loss."""
    kinds = moe_router_load_balancing_type
    losses = all(kind == "none" or kind.endswith("aux_loss") for kind in kinds)
    weighed = any(coeff for kind, coeff in zip(kinds, moe_aux_loss_coeff, strict=False) if kind != "none")
    if not num_experts or not losses or weighed or moe_router_enable_expert_bias:
        return None
    return "nothing keeps the experts equally busy: no balancing loss has a coefficient and there is no expert bias"


def groups_without_a_limit(moe_router_num_groups: int | None, moe_router_group_topk: int | None) -> str | None:
    """Groups matter only when a token may not use all of them."""
    if not moe_router_num_groups or moe_router_group_topk:
        return None
    return f"--moe-router-num-groups {moe_router_num_groups} has no effect without --moe-router-group-topk"


def rotations_that_nothing_stretches(
    position_embedding_type: str,
    multi_latent_attention: bool,
    rope_type: str | None,
    rotary_scaling_factor: float,
    use_rope_scaling: bool,
    rotary_seq_len_interpolation_factor: int | None,
) -> str | None:
    """A factor belongs to a kind of rotation, and where there is no rotation no factor does anything."""
    yarn = rope_type != "rope" if multi_latent_attention else position_embedding_type == "yarn"
    idle = []
    if rotary_scaling_factor != 1 and not yarn:
        idle.append(f"--rotary-scaling-factor {rotary_scaling_factor:g}")
    if not multi_latent_attention and position_embedding_type not in ("rope", "yarn"):
        idle += ["--use-rope-scaling"] if use_rope_scaling else []
        if rotary_seq_len_interpolation_factor not in (None, 1):
            idle.append(f"--rotary-seq-len-interpolation-factor {rotary_seq_len_interpolation_factor}")
    if not idle:
        return None
    return f"{' and '.join(idle)} without effect: no rotation of this model is stretched that way"


def pages_without_unused_rows(
    moe_paged_stash: bool,
    moe_expert_capacity_factor: float | None,
    expert_model_parallel_size: int,
    expert_tensor_parallel_size: int | None,
    tensor_model_parallel_size: int,
) -> str | None:
    """Where all experts are on one rank every choice of every token has its row."""
    ranks = derive.expert_ranks(expert_model_parallel_size, expert_tensor_parallel_size, tensor_model_parallel_size)
    if not moe_paged_stash or ranks > 1 or (moe_expert_capacity_factor or 0) > 0:
        return None
    return "--moe-paged-stash saves nothing where all experts are on one rank: every row is used"


def sorting_for_an_exchange(
    cuda_graph_impl: str,
    cuda_graph_modules: tuple[str, ...],
    expert_model_parallel_size: int,
    expert_tensor_parallel_size: int | None,
    tensor_model_parallel_size: int,
) -> str | None:
    """Where rows travel to other ranks, they are sorted for that."""
    ranks = derive.expert_ranks(expert_model_parallel_size, expert_tensor_parallel_size, tensor_model_parallel_size)
    if cuda_graph_impl == "none" or "moe_preprocess" not in cuda_graph_modules or ranks == 1:
        return None
    return f"--cuda-graph-modules moe_preprocess records nothing: experts are on {ranks} ranks, and rows are exchanged"


def layers_without_recompute(
    recompute_granularity: str | None, recompute_method: str | None, recompute_num_layers: int | None
) -> str | None:
    """Megatron ignores which layers to recompute without a granularity."""
    names = whole_layer_flags(recompute_method, recompute_num_layers)
    if recompute_granularity is not None or not names:
        return None
    return f"{' and '.join(names)} without effect: nothing is recomputed without --recompute-granularity full"


def saving_to_nowhere(save: str | None, run_dir: str | None, save_interval: int | None) -> str | None:
    """Checkpoints need a folder."""
    if save or run_dir or save_interval is None:
        return None
    return "no checkpoint is saved: neither --save nor --run-dir is given"


def nothing_is_saved(
    mock_data: bool,
    save: str | None,
    run_dir: str | None,
    save_interval: int | None,
    save_hf_interval: int | None,
    moe_use_upcycling: bool,
    ckpt_step: int | None,
) -> str | None:
    """A run on mock data has no checkpoint at its end unless a flag asks for one."""
    args = (save, run_dir, mock_data, save_interval, save_hf_interval, moe_use_upcycling, ckpt_step)
    if not run_dir or derive.save_folder(*args):
        return None
    return "mock data: no checkpoint is saved without --save or --save-interval"


def mock_data_wins(mock_data: bool, data_path: tuple[str, ...], train_data_path: tuple[str, ...]) -> str | None:
    """Random documents replace all files."""
    if mock_data and (data_path or train_data_path):
        return "--mock-data is given, so the data files are not read"
    return None


HINTS = (
    groups_without_their_switch,
    experts_as_wide_as_dense_blocks,
    many_experts_in_low_precision,
    nothing_balances,
    groups_without_a_limit,
    rotations_that_nothing_stretches,
    pages_without_unused_rows,
    sorting_for_an_exchange,
    layers_without_recompute,
    saving_to_nowhere,
    nothing_is_saved,
    mock_data_wins,
)
