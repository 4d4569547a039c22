"""Rules about attention heads, multi-latent attention and sliding windows."""

from arguments import derive
from arguments.checks.violation import Violation, divisors, functions_returning, unfit_pattern
from arguments.values import LayerPattern
from megatron_moe.config.exit_codes import counted

_ROTARY = ("rope", "yarn")


def heads_divide_hidden_size(
    hidden_size: int, num_attention_heads: int, kv_channels: int | None, multi_latent_attention: bool
) -> Violation:
    """The head dim defaults to the hidden size divided by the number of heads."""
    if kv_channels is not None or multi_latent_attention or hidden_size % num_attention_heads == 0:
        return None
    return (
        f"{num_attention_heads} heads do not divide the hidden size {hidden_size}",
        f"set --kv-channels, or use --num-attention-heads {divisors(hidden_size)}",
    )


def query_groups_divide_heads(
    group_query_attention: bool, num_attention_heads: int, num_query_groups: int
) -> Violation:
    """Every key/value head serves the same number of query heads."""
    if not group_query_attention or num_attention_heads % num_query_groups == 0:
        return None
    return (
        f"{num_query_groups} query groups do not divide {counted(num_attention_heads, 'head')}",
        f"use --num-query-groups {divisors(num_attention_heads)}",
    )


def rotary_dim_is_even(
    position_embedding_type: str,
    rotary_percent: float,
    kv_channels: int | None,
    hidden_size: int,
    num_attention_heads: int,
    multi_latent_attention: bool,
) -> Violation:
    """RoPE rotates pairs of dims within a head."""
    if multi_latent_attention or position_embedding_type not in _ROTARY:
        return None
    head_dim = derive.head_dim(kv_channels, hidden_size, num_attention_heads)
    rotated = int(head_dim * rotary_percent)
    if 0 < rotated <= head_dim and rotated % 2 == 0:
        return None
    return (
        f"--rotary-percent {rotary_percent:g} rotates {rotated} of {counted(head_dim, 'dim')} of a head, "
        "but dims rotate in pairs",
        "choose --rotary-percent so that it selects an even number of dims, at most the head dim",
    )


def mla_rope_dim_is_even(multi_latent_attention: bool, qk_pos_emb_head_dim: int) -> Violation:
    """RoPE rotates pairs of dims."""
    if not multi_latent_attention or qk_pos_emb_head_dim % 2 == 0:
        return None
    return (f"--qk-pos-emb-head-dim {qk_pos_emb_head_dim} is odd, but dims rotate in pairs", "use an even number")


def mla_has_no_query_groups(multi_latent_attention: bool, group_query_attention: bool) -> Violation:
    """In multi-latent attention every query head has its own key and value head."""
    if multi_latent_attention and group_query_attention:
        return "multi-latent attention has no query groups", "leave out --group-query-attention"
    return None


def mla_supports_rope_options(
    multi_latent_attention: bool,
    rotary_interleaved: bool,
    rotary_percent: float,
    use_rope_scaling: bool,
    rotary_seq_len_interpolation_factor: int | None,
    no_rope_freq: LayerPattern | None,
) -> Violation:
    """Multi-latent attention rotates a separate part of each head, in all layers, with RoPE or YaRN."""
    if not multi_latent_attention:
        return None
    evenly = rotary_seq_len_interpolation_factor not in (None, 1)
    if rotary_interleaved or rotary_percent != 1.0 or use_rope_scaling or evenly or no_rope_freq is not None:
        return (
            "these RoPE options are not supported by multi-latent attention",
            "remove them; --qk-pos-emb-head-dim sets the rotated dims of a head and --rope-type the kind of rotation",
        )
    return None


def rope_type_matches_position_embedding(
    multi_latent_attention: bool, rope_type: str | None, position_embedding_type: str
) -> Violation:
    """--rope-type selects the rotation of multi-latent attention; other attention uses --position-embedding-type."""
    if multi_latent_attention or rope_type is None or "yarn" not in (rope_type, position_embedding_type):
        return None
    if rope_type == position_embedding_type:
        return None
    return (
        f"--rope-type {rope_type} contradicts --position-embedding-type {position_embedding_type}",
        f"remove --rope-type, or use --position-embedding-type {rope_type}",
    )


def yarn_original_length_matches_attention(
    multi_latent_attention: bool,
    rope_type: str | None,
    position_embedding_type: str,
    yarn_original_max_position_embeddings: int | None,
    original_max_position_embeddings: int,
) -> Violation:
    """The length that YaRN extends has different flags in multi-latent and other attention."""
    latent, other = original_max_position_embeddings, yarn_original_max_position_embeddings
    if multi_latent_attention:
        if rope_type == "rope" or other in (None, latent):
            return None
        return (
            f"--yarn-original-max-position-embeddings {other} does not apply to multi-latent attention",
            f"--original-max-position-embeddings {other}",
        )
    if position_embedding_type != "yarn" or latent in (derive.YARN_LENGTH, other):
        return None
    return (
        f"--original-max-position-embeddings {latent} applies only to multi-latent attention",
        f"--yarn-original-max-position-embeddings {latent}",
    )


def mla_supports_attention_options(
    multi_latent_attention: bool,
    attention_output_gate: bool,
    add_qkv_bias: bool,
    qk_l2_norm: bool,
    qk_layernorm_over: str,
) -> Violation:
    """Multi-latent attention has no output gate, no biases, and normalizes latents rather than heads."""
    unlike = attention_output_gate or add_qkv_bias or qk_l2_norm or qk_layernorm_over != "head"
    if multi_latent_attention and unlike:
        return "these attention options are not supported by multi-latent attention", "remove them"
    return None


def window_pattern_matches_layers(
    num_layers: int, window_size: tuple[int, int] | None, window_attn_skip_freq: LayerPattern | None
) -> Violation:
    """The pattern has one entry per layer and selects the layers with a sliding window."""
    if window_attn_skip_freq is None:
        return None
    if window_size is None:
        return "--window-attn-skip-freq selects layers with a window, but no window is set", "set --window-size"
    return unfit_pattern("--window-attn-skip-freq", window_attn_skip_freq, num_layers)


RULES = functions_returning(Violation, globals())
