"""Rules about positions, activations, multi-token prediction and the vocabulary."""

from arguments import derive
from arguments.checks.violation import RuleFlags, Violations, conflict, unfit_pattern
from megatron_moe.config.text import counted

_ROTARY = ("rope", "yarn")


def sequence_fits_positions(flags: RuleFlags) -> Violations:
    """--max-position-embeddings limits the sequence length."""
    if flags.seq_length > flags.max_position_embeddings:
        yield (
            f"--seq-length {flags.seq_length} exceeds --max-position-embeddings {flags.max_position_embeddings}",
            f"--max-position-embeddings {flags.seq_length}, or a shorter --seq-length",
        )


def one_activation(flags: RuleFlags) -> Violations:
    """A feed-forward block has one activation, so only one activation flag may be set."""
    switches = flags.swiglu + flags.quick_geglu + flags.geglu + flags.squared_relu + flags.openai_gelu
    if switches + (flags.activation_func is not None) > 1:
        remedy = "use one of them; the default is GELU"
        if flags.swiglu and flags.activation_func is not None:
            remedy = "--no-swiglu --gated-linear-unit for a gated activation, or --no-swiglu"
        yield "several activations are requested", remedy


def is_gated(flags: RuleFlags) -> bool:
    """Whether the flags request a gated activation."""
    return bool(flags.swiglu or flags.quick_geglu or flags.geglu or (flags.activation_func and flags.gated_linear_unit))


def gate_needs_activation(flags: RuleFlags) -> Violations:
    """--gated-linear-unit adds a gate to the function of --activation-func. SwiGLU and GEGLU have one already."""
    if flags.gated_linear_unit and flags.activation_func is None and not is_gated(flags):
        yield "--gated-linear-unit needs --activation-func", "use --swiglu or --geglu, or add --activation-func"


def glu_offset_needs_gate(flags: RuleFlags) -> Violations:
    """--glu-linear-offset is added to the linear half of a gated activation."""
    if flags.glu_linear_offset and not is_gated(flags):
        remedy = "add --swiglu, --geglu or --quick-geglu"
        yield f"--glu-linear-offset {flags.glu_linear_offset:g} needs a gated activation", remedy


def clamp_needs_gate(flags: RuleFlags) -> Violations:
    """Only the inputs of gated activations can be clamped."""
    if flags.activation_func_clamp_value is not None and not is_gated(flags):
        remedy = "add --swiglu, --geglu or --quick-geglu"
        yield f"--activation-func-clamp-value {flags.activation_func_clamp_value:g} needs a gated activation", remedy


def hyper_connections_read_before_the_norm(flags: RuleFlags) -> Violations:
    """Hyper-connections define how residual streams and sublayer outputs are added, so this sum cannot be replaced."""
    name = derive.residual_connection(flags)
    if name == "hyper_connections" and flags.apply_residual_connection_post_layernorm:
        remedy = "leave out one of them"
        yield conflict(f"the residual connection {name}", "--apply-residual-connection-post-layernorm", remedy)


def position_embedding_flags_agree(flags: RuleFlags) -> Violations:
    """The deprecated --no-position-embedding cannot disable an explicitly requested position embedding."""
    if not flags.add_position_embedding and flags.position_embedding_type == "learned_absolute":
        remedy = "--position-embedding-type none, or rope"
        yield "--no-position-embedding contradicts --position-embedding-type learned_absolute", remedy


def one_rope_scaling(flags: RuleFlags) -> Violations:
    """RoPE supports one kind of scaling at a time: YaRN, Llama 3 scaling or linear interpolation."""
    interpolated = flags.rotary_seq_len_interpolation_factor not in (None, 1)
    if (flags.position_embedding_type == "yarn") + flags.use_rope_scaling + interpolated > 1:
        yield "several kinds of RoPE scaling are requested", "use one of them"


def yarn_ramp_is_valid(flags: RuleFlags) -> Violations:
    """YaRN interpolates dims with few rotations (< --yarn-beta-slow), but not dims with many (> --yarn-beta-fast)."""
    yarn = derive.mla_has_yarn(flags) if flags.multi_latent_attention else flags.position_embedding_type == "yarn"
    fast, slow = derive.yarn_betas(flags)
    if yarn and (flags.rotary_base <= 1 or not 0 < slow <= fast):
        remedy = "use --rotary-base above 1, --yarn-beta-slow above 0 and --yarn-beta-fast at least as large"
        yield f"YaRN cannot ramp from {fast:g} to {slow:g} rotations with --rotary-base {flags.rotary_base:g}", remedy


def no_rope_pattern_matches_layers(flags: RuleFlags) -> Violations:
    """--no-rope-freq is an interval or a list with one entry per layer; it selects the layers without RoPE."""
    if flags.no_rope_freq is None:
        return
    if flags.position_embedding_type not in _ROTARY:
        yield "--no-rope-freq needs a model with RoPE", "use --position-embedding-type rope"
    elif isinstance(flags.no_rope_freq, int) and flags.no_rope_freq > 0 and flags.num_layers % flags.no_rope_freq:
        remedy = "use a divisor of --num-layers, or a list"
        yield f"--no-rope-freq {flags.no_rope_freq} does not divide {counted(flags.num_layers, 'layer')}", remedy
    yield from unfit_pattern("--no-rope-freq", flags.no_rope_freq, flags.num_layers)


def mtp_has_no_learned_positions(flags: RuleFlags) -> Violations:
    """Multi-token prediction shifts the tokens, but not the rows of a learned position table."""
    if flags.mtp_num_layers and flags.position_embedding_type not in (*_ROTARY, "none"):
        remedy = "--position-embedding-type rope or none"
        yield f"--mtp-num-layers does not support --position-embedding-type {flags.position_embedding_type}", remedy


def padded_vocab_holds_vocabulary(flags: RuleFlags) -> Violations:
    """Every token needs an embedding row, and every tensor-parallel rank needs the same number of rows."""
    if flags.padded_vocab_size is None:
        return
    if flags.vocab_size is not None and flags.padded_vocab_size < flags.vocab_size:
        yield (
            f"--padded-vocab-size {flags.padded_vocab_size} is smaller than the vocabulary of "
            f"{flags.vocab_size} tokens",
            f"--padded-vocab-size {flags.vocab_size} or more",
        )
    elif flags.padded_vocab_size % flags.tensor_model_parallel_size:
        yield (
            f"--padded-vocab-size {flags.padded_vocab_size} is not a multiple of "
            f"{flags.tensor_model_parallel_size} tensor-parallel ranks",
            "use a multiple of --tensor-model-parallel-size",
        )


def dense_width_is_positive(flags: RuleFlags) -> Violations:
    """The default feed-forward width with SwiGLU is rounded down to a multiple of 64, and may become 0."""
    if derive.ffn_hidden_size(flags) <= 0:
        remedy = "set --ffn-hidden-size"
        yield f"--hidden-size {flags.hidden_size} is too small for a default feed-forward width", remedy
