"""Cases of the attention rules (arguments/checks/attention.py)."""

from tests.helpers.check_cases import MLA, Case

MLA_WITHOUT_GQA = "--multi-latent-attention --no-group-query-attention"
YARN = "--position-embedding-type yarn"
GQA = "--group-query-attention --num-query-groups"

CASES = (
    Case(
        "heads_divide_hidden_size",
        "--num-attention-heads 6",
        "6 heads do not divide the hidden size 256",
        "--num-attention-heads 6 --kv-channels 64",
    ),
    Case("query_groups_divide_heads", f"{GQA} 3", "3 query groups do not divide 4 heads", f"{GQA} 4"),
    Case("rotary_dim_is_even", "--rotary-percent 0.05", "rotates 3 of 64 dims", "--rotary-percent 0.07"),
    Case("rotary_dim_is_even", "--rotary-percent 1.5", "rotates 96 of 64 dims", "--rotary-percent 0.5"),
    Case(
        "mla_rope_dim_is_even",
        f"{MLA} --qk-pos-emb-head-dim 33",
        "33 is odd",
        f"{MLA} --qk-pos-emb-head-dim 32",
        "--group-query-attention --num-query-groups",
    ),
    Case("mla_has_no_query_groups", MLA, "has no query groups", f"{MLA} --no-group-query-attention"),
    Case(
        "mla_supports_rope_options",
        f"{MLA_WITHOUT_GQA} --rotary-seq-len-interpolation-factor 2",
        "are not supported by multi-latent attention",
        f"{MLA_WITHOUT_GQA} --rotary-seq-len-interpolation-factor 1",
    ),
    Case(
        "mla_supports_rope_options",
        f"{MLA} --no-group-query-attention --rotary-interleaved",
        "are not supported by multi-latent attention",
        f"{MLA} --no-group-query-attention --rotary-percent 1.0",
    ),
    Case(
        "rope_type_matches_position_embedding",
        "--rope-type yarn",
        "contradicts --position-embedding-type rope",
        f"{YARN} --rope-type yarn",
    ),
    Case(
        "rope_type_matches_position_embedding",
        f"{YARN} --rope-type rope",
        "contradicts --position-embedding-type yarn",
        "--rope-type rope",
    ),
    Case(
        "yarn_original_length_matches_attention",
        f"{MLA_WITHOUT_GQA} --yarn-original-max-position-embeddings 8192",
        "8192 does not apply to multi-latent attention",
        f"{MLA_WITHOUT_GQA} --original-max-position-embeddings 8192",
    ),
    Case(
        "yarn_original_length_matches_attention",
        f"{YARN} --original-max-position-embeddings 8192",
        "8192 applies only to multi-latent attention",
        f"{YARN} --yarn-original-max-position-embeddings 8192",
    ),
    Case(
        "mla_supports_attention_options",
        f"{MLA} --no-group-query-attention --attention-output-gate",
        "are not supported by multi-latent attention",
        f"{MLA} --no-group-query-attention --qk-layernorm",
    ),
    Case(
        "window_pattern_matches_layers",
        "--window-attn-skip-freq 2",
        "no window",
        "--window-attn-skip-freq 2 --window-size 15,0",
    ),
    Case(
        "window_pattern_matches_layers",
        "--window-size 15,0 --window-attn-skip-freq [0,1,2,1]",
        "holds 2, but a layer is 0 or 1",
        "--window-size 15,0 --window-attn-skip-freq [0,1,0,1]",
    ),
    Case(
        "window_pattern_matches_layers",
        "--window-size 9,0 --window-attn-skip-freq 0",
        "0 is not a distance",
        "--window-size 9,0",
    ),
)
