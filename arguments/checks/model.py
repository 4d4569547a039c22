"""Rules about layers, positions, activations and multi-token prediction."""

from arguments import derive
from arguments.checks.violation import Violation, unfit_pattern
from arguments.values import LayerPattern
from megatron_moe.config.exit_codes import counted

_ROTARY = ("rope", "yarn")


def sequence_fits_the_positions(seq_length: int, max_position_embeddings: int) -> Violation:
    """Every token of a sequence needs a position."""
    if seq_length <= max_position_embeddings:
        return None
    return (
        f"sequences of {seq_length} tokens have more positions than the {max_position_embeddings} the model knows",
        f"--max-position-embeddings {seq_length}, or a shorter --seq-length",
    )


def one_activation(swiglu: bool, quick_geglu: bool, geglu: bool, squared_relu: bool, openai_gelu: bool) -> Violation:
    """A feed-forward block has one activation."""
    if swiglu + quick_geglu + geglu + squared_relu + openai_gelu <= 1:
        return None
    return "several activations are asked for", "keep one of them; none of them is plain GELU"


def offset_needs_a_gate(glu_linear_offset: float, swiglu: bool, quick_geglu: bool, geglu: bool) -> Violation:
    """The offset is added to the linear half of a gated block."""
    if not glu_linear_offset or swiglu or quick_geglu or geglu:
        return None
    return (
        f"--glu-linear-offset {glu_linear_offset:g} has no gated activation to act on",
        "add --swiglu or --quick-geglu",
    )


def clamp_needs_a_gate(
    activation_func_clamp_value: float | None, swiglu: bool, quick_geglu: bool, geglu: bool
) -> Violation:
    """Only gated activations clamp their inputs."""
    if activation_func_clamp_value is None or swiglu or quick_geglu or geglu:
        return None
    return (
        f"--activation-func-clamp-value {activation_func_clamp_value:g} has no gated activation to act on",
        "add --swiglu or --quick-geglu",
    )


def no_table_where_one_is_asked_for(add_position_embedding: bool, position_embedding_type: str) -> Violation:
    """The old switch cannot take the learned table away again."""
    if add_position_embedding or position_embedding_type != "learned_absolute":
        return None
    return (
        "--no-position-embedding contradicts learned absolute positions",
        "--position-embedding-type none, or rope",
    )


def one_way_to_stretch(
    position_embedding_type: str, use_rope_scaling: bool, rotary_seq_len_interpolation_factor: int | None
) -> Violation:
    """Rotations are stretched for long contexts in one way: YaRN, Llama 3's, or evenly."""
    evenly = rotary_seq_len_interpolation_factor not in (None, 1)
    if (position_embedding_type == "yarn") + use_rope_scaling + evenly <= 1:
        return None
    return "rotations are stretched in several ways at once", "keep one of them"


def yarn_has_a_ramp(
    position_embedding_type: str,
    multi_latent_attention: bool,
    rope_type: str | None,
    rotary_base: float,
    yarn_beta_fast: float | None,
    yarn_beta_slow: float | None,
) -> Violation:
    """YaRN keeps dims that turn often and stretches those that turn seldom; between the two it goes over slowly."""
    yarn = rope_type != "rope" if multi_latent_attention else position_embedding_type == "yarn"
    fast, slow = derive.yarn_turns(yarn_beta_fast, yarn_beta_slow)
    if not yarn or (rotary_base > 1 and 0 < slow <= fast):
        return None
    return (
        f"YaRN cannot go over from {fast:g} turns to {slow:g} with a base of {rotary_base:g}",
        "a --rotary-base above 1, a --yarn-beta-slow above 0 and a --yarn-beta-fast that is not smaller",
    )


def unrotated_layers_fit(num_layers: int, no_rope_freq: LayerPattern | None, position_embedding_type: str) -> Violation:
    """Every layer either rotates or does not."""
    if no_rope_freq is None:
        return None
    if position_embedding_type not in _ROTARY:
        return "--no-rope-freq leaves out rotations, but there are none", "--position-embedding-type rope"
    if isinstance(no_rope_freq, int) and no_rope_freq > 0 and num_layers % no_rope_freq:
        return (
            f"--no-rope-freq {no_rope_freq} does not divide {counted(num_layers, 'layer')}",
            "use a divisor of --num-layers, or a list",
        )
    return unfit_pattern("--no-rope-freq", no_rope_freq, num_layers)


def multi_token_prediction_knows_no_table(mtp_num_layers: int | None, position_embedding_type: str) -> Violation:
    """Multi-token prediction shifts the tokens, which a learned table of positions does not follow."""
    if not mtp_num_layers or position_embedding_type in (*_ROTARY, "none"):
        return None
    return (
        f"multi-token prediction does not work with {position_embedding_type} positions",
        "--position-embedding-type rope or none",
    )


def padding_holds_the_vocabulary(
    padded_vocab_size: int | None, vocab_size: int | None, tensor_model_parallel_size: int
) -> Violation:
    """Every token needs a row of the embedding, and every tensor-parallel rank the same number of rows."""
    if padded_vocab_size is None:
        return None
    if vocab_size is not None and padded_vocab_size < vocab_size:
        return (
            f"--padded-vocab-size {padded_vocab_size} does not hold {vocab_size} tokens",
            f"--padded-vocab-size {vocab_size} or more",
        )
    if padded_vocab_size % tensor_model_parallel_size:
        return (
            f"--padded-vocab-size {padded_vocab_size} is not a multiple of {tensor_model_parallel_size} ranks",
            "use a multiple of --tensor-model-parallel-size",
        )
    return None


def dense_width_is_left(ffn_hidden_size: int | None, hidden_size: int, swiglu: bool) -> Violation:
    """The width that follows from a small hidden size is rounded down to a multiple of 64."""
    if derive.ffn_hidden_size(ffn_hidden_size, hidden_size, swiglu) > 0:
        return None
    return f"hidden size {hidden_size} is too small for a width of its own", "give --ffn-hidden-size"


RULES = (
    sequence_fits_the_positions,
    one_activation,
    offset_needs_a_gate,
    clamp_needs_a_gate,
    no_table_where_one_is_asked_for,
    one_way_to_stretch,
    yarn_has_a_ramp,
    unrotated_layers_fit,
    multi_token_prediction_knows_no_table,
    padding_holds_the_vocabulary,
    dense_width_is_left,
)
