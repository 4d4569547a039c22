"""Rules about attention heads, multi-latent attention and sliding windows."""

from arguments import derive
from arguments.checks.violation import RuleFlags, Violations, conflict, enabled_options, unfit_pattern
from megatron_moe.config.dsa import has_hadamard_matrix
from megatron_moe.config.text import counted, divisors

_ROTARY = ("rope", "yarn")


def heads_divide_hidden_size(flags: RuleFlags) -> Violations:
    """If --kv-channels is not set, the head dimension is the hidden size divided by the number of heads."""
    if flags.kv_channels is None and not flags.multi_latent_attention and flags.hidden_size % flags.num_attention_heads:
        remedy = (
            f"set --kv-channels, or use --num-attention-heads {divisors(flags.hidden_size, flags.num_attention_heads)}"
        )
        yield f"{flags.num_attention_heads} heads do not divide the hidden size {flags.hidden_size}", remedy


def query_groups_divide_heads(flags: RuleFlags) -> Violations:
    """Every key/value head is shared by the same number of query heads."""
    if flags.group_query_attention and flags.num_attention_heads % flags.num_query_groups:
        yield (
            f"{flags.num_query_groups} query groups do not divide {counted(flags.num_attention_heads, 'head')}",
            f"use --num-query-groups {divisors(flags.num_attention_heads, flags.num_query_groups)}",
        )


def linear_attention_has_layers(flags: RuleFlags) -> Violations:
    """A linear attention needs both its variant and the layers in which it replaces softmax attention."""
    if flags.experimental_attention_variant in derive.DELTA_NETS and flags.linear_attention_freq is None:
        variant = f"--experimental-attention-variant {flags.experimental_attention_variant}"
        yield f"{variant} requires --linear-attention-freq, which selects its layers", "add --linear-attention-freq"
    if flags.linear_attention_freq is not None:
        if flags.experimental_attention_variant is None:
            yield (
                "--linear-attention-freq requires --experimental-attention-variant, which selects the kind of linear "
                "attention",
                "add --experimental-attention-variant gated_delta_net",
            )
        if flags.experimental_attention_variant in ("dsa", "dsv4_hybrid"):
            variant = flags.experimental_attention_variant
            remedy = "leave it out"
            yield f"--linear-attention-freq does not apply to sparse and compressed attention ({variant})", remedy
        yield from unfit_pattern("--linear-attention-freq", flags.linear_attention_freq, flags.num_layers)


def linear_attention_shares_keys_equally(flags: RuleFlags) -> Violations:
    """Every key head of linear attention is shared by the same number of value heads."""
    keys, values = flags.linear_num_key_heads, flags.linear_num_value_heads
    if flags.experimental_attention_variant in derive.DELTA_NETS and values % keys:
        remedy = f"use --linear-num-key-heads {divisors(values, keys)}"
        yield f"{keys} key heads do not divide {counted(values, 'value head')} of linear attention", remedy


def sparse_attention_has_an_indexer(flags: RuleFlags) -> Violations:
    """Sparse attention needs multi-latent attention with a q latent and rotary embedding, and the sizes of its
    indexer."""
    if not derive.has_sparse_attention(flags):
        return
    if flags.experimental_attention_variant == "dsa" and not flags.multi_latent_attention:
        yield "sparse attention (dsa) extends multi-latent attention", "add --multi-latent-attention"
    if flags.rope_type == "none":
        yield "sparse attention (dsa) rotates q and keys of its indexer", "use --rope-type rope or yarn"
    if flags.q_lora_rank is None:
        yield "the indexer of sparse attention (dsa) reads the query latent, which is not set", "add --q-lora-rank"
    missing = [option for option, size in derive.indexer_sizes(flags).items() if size is None]
    if missing:
        yield "sparse attention (dsa) needs the sizes of its indexer", f"add {' and '.join(missing)}"


def only_sparse_attention_shares_keys(flags: RuleFlags) -> Violations:
    """Layers of sparse attention can use the keys that an earlier layer selects; compressed attention cannot."""
    if flags.dsa_indexer_topk_freq > 1 and flags.experimental_attention_variant != "dsa":
        yield "--dsa-indexer-topk-freq requires sparse attention", "add --experimental-attention-variant dsa"


def indexer_heads_can_be_rotated(flags: RuleFlags) -> Violations:
    """An indexer head must contain the rotary channels, and its size must be a power of two if a Hadamard matrix is
    applied."""
    width = flags.dsa_indexer_head_dim
    if width is None or not (derive.has_sparse_attention(flags) or derive.has_compressed_attention(flags)):
        return
    if width < flags.qk_pos_emb_head_dim:
        yield (
            f"--dsa-indexer-head-dim {width} is smaller than the {flags.qk_pos_emb_head_dim} rotary channels "
            "(--qk-pos-emb-head-dim)",
            f"use --dsa-indexer-head-dim {flags.qk_pos_emb_head_dim} or more",
        )
    if flags.dsa_indexer_rotate_activation and not has_hadamard_matrix(width):
        remedy = "use a power of two, or add --no-dsa-indexer-rotate-activation"
        yield f"a Hadamard matrix has 2^n rows, but --dsa-indexer-head-dim is {width}", remedy


def sparse_attention_supports_attention_options(flags: RuleFlags) -> Violations:
    """Sparse attention supports neither dropout nor sinks nor windows."""
    if not derive.has_sparse_attention(flags):
        return
    if flags.attention_dropout:
        remedy = "add --attention-dropout 0"
        yield f"sparse attention (dsa) has no dropout, but --attention-dropout is {flags.attention_dropout:g}", remedy
    if flags.softmax_type != "vanilla" or flags.window_size is not None:
        yield "sparse attention (dsa) has neither sinks nor windows", "leave out --softmax-type and --window-size"


def rotary_dim_is_even(flags: RuleFlags) -> Violations:
    """RoPE rotates pairs of dimensions, so the number of rotated dimensions per head must be even."""
    if flags.multi_latent_attention or flags.position_embedding_type not in _ROTARY:
        return
    head_dim = derive.head_dim(flags)
    rotated = head_dim if flags.rotary_percent == 1 else int(head_dim * flags.rotary_percent)
    if not head_dim:  # reported by heads_divide_hidden_size
        return
    if not 0 < rotated <= head_dim or rotated % 2:
        yield (
            f"--rotary-percent {flags.rotary_percent:g} rotates {rotated} of {counted(head_dim, 'dim')} per head, "
            "but RoPE rotates pairs of dims",
            "choose --rotary-percent so that it selects an even number of dims, at most the head dim",
        )


def mla_rope_dim_is_even(flags: RuleFlags) -> Violations:
    """RoPE rotates pairs of dimensions, so --qk-pos-emb-head-dim must be even."""
    if flags.multi_latent_attention and flags.qk_pos_emb_head_dim % 2:
        remedy = "use an even number"
        yield f"--qk-pos-emb-head-dim {flags.qk_pos_emb_head_dim} is odd, but RoPE rotates pairs of dims", remedy


def mla_has_no_query_groups(flags: RuleFlags) -> Violations:
    """In multi-latent attention every query head has its own key and value head."""
    if flags.multi_latent_attention and flags.group_query_attention:
        yield conflict("--group-query-attention", "--multi-latent-attention", "leave out --group-query-attention")


def mla_supports_rope_options(flags: RuleFlags) -> Violations:
    """Multi-latent attention applies RoPE or YaRN to --qk-pos-emb-head-dim dimensions per head, in all layers."""
    if not flags.multi_latent_attention:
        return
    interpolation = flags.rotary_seq_len_interpolation_factor
    others = {
        "--rotary-interleaved": flags.rotary_interleaved,
        "--rotary-percent": flags.rotary_percent != 1.0,
        "--use-rope-scaling": flags.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": interpolation not in (None, 1),
        "--no-rope-freq": flags.no_rope_freq is not None,
    }
    if any(others.values()):
        yield (
            f"--multi-latent-attention cannot be combined with {enabled_options(others)}",
            "remove them; --qk-pos-emb-head-dim sets the rotated dims of a head and --rope-type the kind of rotation",
        )


def yarn_original_length_matches_attention(flags: RuleFlags) -> Violations:
    """YaRN's original context length has a different flag in multi-latent attention than in other attention."""
    latent, other = flags.original_max_position_embeddings, flags.yarn_original_max_position_embeddings
    if flags.multi_latent_attention:
        if not derive.mla_has_yarn(flags) or other in (None, latent):
            return
        remedy = f"--original-max-position-embeddings {other}"
        yield f"--yarn-original-max-position-embeddings {other} does not apply to multi-latent attention", remedy
    elif flags.position_embedding_type == "yarn" and latent not in (derive.YARN_LENGTH, other):
        remedy = f"--yarn-original-max-position-embeddings {latent}"
        yield f"--original-max-position-embeddings {latent} applies only to multi-latent attention", remedy


def mla_supports_attention_options(flags: RuleFlags) -> Violations:
    """Multi-latent attention has no output gate and no biases, and normalises latents instead of heads."""
    others = {
        "--attention-output-gate": flags.attention_output_gate,
        "--add-qkv-bias": flags.add_qkv_bias,
        "--qk-l2-norm": flags.qk_l2_norm,
        f"--qk-layernorm-over {flags.qk_layernorm_over}": flags.qk_layernorm_over != "head",
    }
    if flags.multi_latent_attention and any(others.values()):
        yield conflict("--multi-latent-attention", enabled_options(others), "remove one of them")


def window_pattern_matches_layers(flags: RuleFlags) -> Violations:
    """--window-attn-skip-freq is an interval, or a list with one entry per layer; it needs a sliding window."""
    if flags.window_attn_skip_freq is None:
        return
    if flags.window_size is None:
        yield "--window-attn-skip-freq selects layers with a window, but no window is set", "set --window-size"
    yield from unfit_pattern("--window-attn-skip-freq", flags.window_attn_skip_freq, flags.num_layers)
