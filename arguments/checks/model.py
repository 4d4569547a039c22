"""Rules about positions, activations, multi-token prediction and the vocabulary."""

from arguments import derive
from arguments.checks.violation import Violation, functions_returning, unfit_pattern
from arguments.values import LayerPattern
from megatron_moe.config.exit_codes import counted

_ROTARY = ("rope", "yarn")


def sequence_fits_positions(seq_length: int, max_position_embeddings: int) -> Violation:
    """Every token of a sequence needs a position."""
    if seq_length <= max_position_embeddings:
        return None
    return (
        f"--seq-length {seq_length} exceeds --max-position-embeddings {max_position_embeddings}",
        f"--max-position-embeddings {seq_length}, or a shorter --seq-length",
    )


def one_activation(swiglu: bool, quick_geglu: bool, geglu: bool, squared_relu: bool, openai_gelu: bool) -> Violation:
    """A feed-forward block has one activation."""
    if swiglu + quick_geglu + geglu + squared_relu + openai_gelu <= 1:
        return None
    return "several activations are requested", "use one of them; the default is GELU"


def glu_offset_needs_gate(glu_linear_offset: float, swiglu: bool, quick_geglu: bool, geglu: bool) -> Violation:
    """The offset is added to the linear half of a gated block."""
    if not glu_linear_offset or swiglu or quick_geglu or geglu:
        return None
    return (f"--glu-linear-offset {glu_linear_offset:g} needs a gated activation", "add --swiglu or --quick-geglu")


def clamp_needs_gate(
    activation_func_clamp_value: float | None, swiglu: bool, quick_geglu: bool, geglu: bool
) -> Violation:
    """Only gated activations clamp their inputs."""
    if activation_func_clamp_value is None or swiglu or quick_geglu or geglu:
        return None
    return (
        f"--activation-func-clamp-value {activation_func_clamp_value:g} needs a gated activation",
        "add --swiglu or --quick-geglu",
    )


def position_embedding_flags_agree(add_position_embedding: bool, position_embedding_type: str) -> Violation:
    """The deprecated --no-position-embedding cannot disable an explicitly requested position embedding."""
    if add_position_embedding or position_embedding_type != "learned_absolute":
        return None
    return (
        "--no-position-embedding contradicts --position-embedding-type learned_absolute",
        "--position-embedding-type none, or rope",
    )


def one_rope_scaling(
    position_embedding_type: str, use_rope_scaling: bool, rotary_seq_len_interpolation_factor: int | None
) -> Violation:
    """RoPE is scaled in one way: YaRN, Llama 3 scaling, or linear interpolation."""
    evenly = rotary_seq_len_interpolation_factor not in (None, 1)
    if (position_embedding_type == "yarn") + use_rope_scaling + evenly <= 1:
        return None
    return "several kinds of RoPE scaling are requested", "use one of them"


def yarn_ramp_is_valid(
    position_embedding_type: str,
    multi_latent_attention: bool,
    rope_type: str | None,
    rotary_base: float,
    yarn_beta_fast: float | None,
    yarn_beta_slow: float | None,
) -> Violation:
    """YaRN interpolates dims with few rotations, keeps dims with many, and ramps linearly between the two limits."""
    yarn = rope_type != "rope" if multi_latent_attention else position_embedding_type == "yarn"
    fast, slow = derive.yarn_turns(yarn_beta_fast, yarn_beta_slow)
    if not yarn or (rotary_base > 1 and 0 < slow <= fast):
        return None
    return (
        f"YaRN cannot ramp from {fast:g} to {slow:g} rotations with --rotary-base {rotary_base:g}",
        "use --rotary-base above 1, --yarn-beta-slow above 0 and --yarn-beta-fast at least as large",
    )


def no_rope_pattern_matches_layers(
    num_layers: int, no_rope_freq: LayerPattern | None, position_embedding_type: str
) -> Violation:
    """The pattern selects the layers without RoPE."""
    if no_rope_freq is None:
        return None
    if position_embedding_type not in _ROTARY:
        return "--no-rope-freq needs a model with RoPE", "use --position-embedding-type rope"
    if isinstance(no_rope_freq, int) and no_rope_freq > 0 and num_layers % no_rope_freq:
        return (
            f"--no-rope-freq {no_rope_freq} does not divide {counted(num_layers, 'layer')}",
            "use a divisor of --num-layers, or a list",
        )
    return unfit_pattern("--no-rope-freq", no_rope_freq, num_layers)


def mtp_has_no_learned_positions(mtp_num_layers: int | None, position_embedding_type: str) -> Violation:
    """Multi-token prediction shifts the tokens, but not the rows of a learned position table."""
    if not mtp_num_layers or position_embedding_type in (*_ROTARY, "none"):
        return None
    return (
        f"--mtp-num-layers does not support --position-embedding-type {position_embedding_type}",
        "--position-embedding-type rope or none",
    )


def padded_vocab_holds_vocabulary(
    padded_vocab_size: int | None, vocab_size: int | None, tensor_model_parallel_size: int
) -> Violation:
    """Every token needs a row of the embedding, and every tensor-parallel rank the same number of rows."""
    if padded_vocab_size is None:
        return None
    if vocab_size is not None and padded_vocab_size < vocab_size:
        return (
            f"--padded-vocab-size {padded_vocab_size} is smaller than the vocabulary of {vocab_size} tokens",
            f"--padded-vocab-size {vocab_size} or more",
        )
    if padded_vocab_size % tensor_model_parallel_size:
        return (
            f"--padded-vocab-size {padded_vocab_size} is not a multiple of {tensor_model_parallel_size} ranks",
            "use a multiple of --tensor-model-parallel-size",
        )
    return None


def dense_width_is_positive(ffn_hidden_size: int | None, hidden_size: int, swiglu: bool) -> Violation:
    """The default width of a gated block is rounded down to a multiple of 64."""
    if derive.ffn_hidden_size(ffn_hidden_size, hidden_size, swiglu) > 0:
        return None
    return f"--hidden-size {hidden_size} is too small for a default feed-forward width", "set --ffn-hidden-size"


RULES = functions_returning(Violation, globals())
