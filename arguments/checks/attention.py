"""Rules about heads, latent attention and windows."""

from arguments import derive
from arguments.checks.violation import (
    Violation,
    divisors,
    unfit_pattern,
)
from arguments.values import LayerPattern
from megatron_moe.config.exit_codes import counted

_ROTARY = ("rope", "yarn")


def heads_share_the_hidden_size(
    hidden_size: int, num_attention_heads: int, kv_channels: int | None, multi_latent_attention: bool
) -> Violation:
    """Without a width of their own, heads are equal shares of the hidden size."""
    if kv_channels is not None or multi_latent_attention or hidden_size % num_attention_heads == 0:
        return None
    return (
        f"{num_attention_heads} heads do not divide the hidden size {hidden_size}",
        f"give --kv-channels, or --num-attention-heads {divisors(hidden_size)}",
    )


def groups_share_the_heads(group_query_attention: bool, num_attention_heads: int, num_query_groups: int) -> Violation:
    """Every key and value head serves the same number of query heads."""
    if not group_query_attention or num_attention_heads % num_query_groups == 0:
        return None
    return (
        f"{num_query_groups} query groups do not divide {counted(num_attention_heads, 'head')}",
        f"use --num-query-groups {divisors(num_attention_heads)}",
    )


def rotated_width_is_even(
    position_embedding_type: str,
    rotary_percent: float,
    kv_channels: int | None,
    hidden_size: int,
    num_attention_heads: int,
    multi_latent_attention: bool,
) -> Violation:
    """A rotation turns pairs of dims, all of them inside of a head."""
    if multi_latent_attention or position_embedding_type not in _ROTARY:
        return None
    head_dim = derive.head_dim(kv_channels, hidden_size, num_attention_heads)
    rotated = int(head_dim * rotary_percent)
    if 0 < rotated <= head_dim and rotated % 2 == 0:
        return None
    return (
        f"--rotary-percent {rotary_percent:g} rotates {rotated} of {counted(head_dim, 'dim')} of a head, "
        "but dims rotate in pairs",
        "--rotary-percent that gives an even number of dims, at most the whole head",
    )


def latent_rotated_width_is_even(multi_latent_attention: bool, qk_pos_emb_head_dim: int) -> Violation:
    """A rotation turns pairs of dims."""
    if not multi_latent_attention or qk_pos_emb_head_dim % 2 == 0:
        return None
    return (
        f"--qk-pos-emb-head-dim {qk_pos_emb_head_dim} is odd, but dims rotate in pairs",
        "use an even number",
    )


def latent_attention_has_no_groups(multi_latent_attention: bool, group_query_attention: bool) -> Violation:
    """Multi-latent attention gives every query head a key and value head of its own."""
    if multi_latent_attention and group_query_attention:
        return "multi-latent attention has no query groups", "leave out --group-query-attention"
    return None


def latent_attention_rotates_its_own_way(
    multi_latent_attention: bool,
    rotary_interleaved: bool,
    rotary_percent: float,
    use_rope_scaling: bool,
    rotary_seq_len_interpolation_factor: int | None,
    no_rope_freq: LayerPattern | None,
) -> Violation:
    """Multi-latent attention rotates its own part of a head, in all layers, by rope or YaRN."""
    if not multi_latent_attention:
        return None
    evenly = rotary_seq_len_interpolation_factor not in (None, 1)
    if rotary_interleaved or rotary_percent != 1.0 or use_rope_scaling or evenly or no_rope_freq is not None:
        return (
            "these options of rotation do not exist in multi-latent attention",
            "leave them out; --qk-pos-emb-head-dim says how much of a head is rotated, --rope-type how",
        )
    return None


def rotation_has_one_kind(
    multi_latent_attention: bool, rope_type: str | None, position_embedding_type: str
) -> Violation:
    """--rope-type chooses the rotation of multi-latent attention; other attention has that of its positions."""
    if multi_latent_attention or rope_type is None or "yarn" not in (rope_type, position_embedding_type):
        return None
    if rope_type == position_embedding_type:
        return None
    return (
        f"--rope-type {rope_type} does not go with {position_embedding_type} positions",
        f"leave out --rope-type, or give --position-embedding-type {rope_type}",
    )


def yarn_starts_from_one_length(
    multi_latent_attention: bool,
    rope_type: str | None,
    position_embedding_type: str,
    yarn_original_max_position_embeddings: int | None,
    original_max_position_embeddings: int,
) -> Violation:
    """The length that YaRN extends has one name in multi-latent attention and another in all other."""
    latent, other = original_max_position_embeddings, yarn_original_max_position_embeddings
    if multi_latent_attention:
        if rope_type == "rope" or other in (None, latent):
            return None
        return (
            f"--yarn-original-max-position-embeddings {other} is not of multi-latent attention",
            f"--original-max-position-embeddings {other}",
        )
    if position_embedding_type != "yarn" or latent in (derive.YARN_LENGTH, other):
        return None
    return (
        f"--original-max-position-embeddings {latent} is of multi-latent attention alone",
        f"--yarn-original-max-position-embeddings {latent}",
    )


def latent_attention_is_plain(
    multi_latent_attention: bool,
    attention_output_gate: bool,
    add_qkv_bias: bool,
    qk_l2_norm: bool,
    qk_layernorm_over: str,
) -> Violation:
    """Multi-latent attention has no output gate, no biases, and norms of compressed vectors rather than of heads."""
    unlike = attention_output_gate or add_qkv_bias or qk_l2_norm or qk_layernorm_over != "head"
    if multi_latent_attention and unlike:
        return "these options do not exist in multi-latent attention", "leave them out"
    return None


def windowed_layers_fit(
    num_layers: int, window_size: tuple[int, int] | None, window_attn_skip_freq: LayerPattern | None
) -> Violation:
    """The pattern says which layers have the window, one entry per layer."""
    if window_attn_skip_freq is None:
        return None
    if window_size is None:
        return "--window-attn-skip-freq chooses among windowed layers, but there is no window", "give --window-size"
    return unfit_pattern("--window-attn-skip-freq", window_attn_skip_freq, num_layers)


RULES = (
    heads_share_the_hidden_size,
    groups_share_the_heads,
    rotated_width_is_even,
    latent_rotated_width_is_even,
    latent_attention_has_no_groups,
    latent_attention_rotates_its_own_way,
    rotation_has_one_kind,
    yarn_starts_from_one_length,
    latent_attention_is_plain,
    windowed_layers_fit,
)
