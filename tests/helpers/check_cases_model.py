"""Cases of the model rules (arguments/checks/model.py)."""

from tests.helpers.check_cases import EIGHT_RANKS, MLA, TP2, Case

CASES = (
    Case(
        "sequence_fits_positions",
        "--seq-length 129",
        "--seq-length 129 exceeds --max-position-embeddings 128",
        "--seq-length 128",
    ),
    Case("one_activation", "--squared-relu", "several activations", "--no-swiglu --squared-relu"),
    Case(
        "glu_offset_needs_gate", "--no-swiglu --glu-linear-offset 1", "offset 1 needs a gated", "--glu-linear-offset 1"
    ),
    Case(
        "clamp_needs_gate",
        "--no-swiglu --activation-func-clamp-value 7",
        "clamp-value 7 needs a gated",
        "--activation-func-clamp-value 7",
    ),
    Case(
        "position_embedding_flags_agree",
        "--no-position-embedding --position-embedding-type learned_absolute",
        "contradicts --position-embedding-type learned_absolute",
        "--no-position-embedding",
    ),
    Case(
        "one_rope_scaling",
        "--use-rope-scaling --rotary-seq-len-interpolation-factor 2",
        "several kinds of RoPE scaling",
        "--use-rope-scaling --rotary-seq-len-interpolation-factor 1",
    ),
    Case(
        "yarn_ramp_is_valid",
        "--position-embedding-type yarn --yarn-beta-slow 0",
        "cannot ramp from 32 to 0 rotations with --rotary-base 10000",
        "--position-embedding-type rope --yarn-beta-slow 0",
    ),
    Case(
        "yarn_ramp_is_valid",
        f"{MLA} --no-group-query-attention --rotary-base 1 --rope-type yarn",
        "from 32 to 1 rotations with --rotary-base 1",
        f"{MLA} --no-group-query-attention --rotary-base 1",
    ),
    Case(
        "yarn_ramp_is_valid",
        "--position-embedding-type yarn --yarn-beta-fast 1 --yarn-beta-slow 2",
        "from 1 to 2 rotations",
        "--position-embedding-type yarn --yarn-beta-fast 2 --yarn-beta-slow 2",
    ),
    Case(
        "no_rope_pattern_matches_layers",
        "--no-rope-freq 3",
        "--no-rope-freq 3 does not divide 4 layers",
        "--no-rope-freq 2",
    ),
    Case(
        "no_rope_pattern_matches_layers",
        "--no-rope-freq [0,1]",
        "describes 2 layers, but the model has 4",
        "--no-rope-freq [0,1]*2",
    ),
    Case(
        "no_rope_pattern_matches_layers",
        "--no-rope-freq 2 --position-embedding-type none",
        "needs a model with RoPE",
        "--no-rope-freq 2",
    ),
    Case(
        "mtp_has_no_learned_positions",
        "--mtp-num-layers 1 --position-embedding-type learned_absolute",
        "does not support --position-embedding-type learned_absolute",
        "--mtp-num-layers 1 --position-embedding-type none",
    ),
    Case(
        "padded_vocab_holds_vocabulary",
        "--vocab-size 1000 --padded-vocab-size 999",
        "--padded-vocab-size 999 is smaller than the vocabulary of 1000 tokens",
        "--vocab-size 1000 --padded-vocab-size 1000",
    ),
    Case(
        "padded_vocab_holds_vocabulary",
        f"{TP2} --padded-vocab-size 1001",
        "--padded-vocab-size 1001 is not a multiple of 2 ranks",
        f"{TP2} --padded-vocab-size 1002",
        environ=EIGHT_RANKS,
    ),
    Case(
        "dense_width_is_positive",
        "--hidden-size 16 --kv-channels 8",
        "--hidden-size 16 is too small",
        "--hidden-size 24 --kv-channels 8",
        "--ffn-hidden-size",
    ),
)
