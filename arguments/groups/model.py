"""Model flags other than attention and experts."""

from dataclasses import dataclass
from typing import Annotated, Literal

from arguments.flag import REQUIRED, differs, flag, new_flag, refused, unsupported
from arguments.values import FilePath, LayerPattern
from megatron_moe.config.registry import ACTIVATIONS, FEED_FORWARDS, MIXERS, RESIDUALS

_GATED = "applies to all gated MLPs, dense ones included"


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Layers, widths, positions, norms, activations, vocabulary, initial values and multi-token prediction."""

    import_: tuple[FilePath, ...] = new_flag((), repeats=True)
    """Python files that register components or flags (docs/development.md). They are imported before the other flags
    are read, on every rank, in dry runs, and by tools that read the run.yaml of a run."""

    mixer: tuple[Annotated[str, MIXERS], ...] = new_flag(("auto",))
    """Mixers of the layers; several names repeat over the layers in this order. auto: attention, or multi-latent
    attention with `--multi-latent-attention`; none: layers without a mixer. Imported files may add mixers (see
    `--import`)."""
    feed_forward: tuple[Annotated[str, FEED_FORWARDS], ...] = new_flag(("auto",))
    """Feed-forward modules of the layers; several names repeat over the layers in this order. auto: MLP, or experts as
    `--num-experts` and `--moe-layer-freq` say; none: layers without a feed-forward module. Imported files may add
    modules (see `--import`)."""

    num_layers: int = flag(REQUIRED, least=1, below=100_000, essential=True)
    """Number of transformer layers, without multi-token prediction layers."""
    hidden_size: int = flag(REQUIRED, least=1, essential=True)
    """Hidden size: width of the residual stream."""
    ffn_hidden_size: int | None = flag(None, least=1, essential=True)
    """Hidden size of dense MLPs. Default: 4 x hidden size; with `--swiglu` 8/3 x hidden size rounded down to a multiple
    of 64."""
    seq_length: int = flag(REQUIRED, least=1, essential=True)
    """Sequence length in tokens."""
    max_position_embeddings: int = flag(REQUIRED, least=1)
    """Maximum sequence length that the model supports; at least `--seq-length`."""

    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "mrope", "relative", "none"] = unsupported(
        "learned_absolute", "use rope, yarn or none", works=("rope", "yarn", "none")
    )
    """Position embedding: learned vectors added to token embeddings, rotary embeddings of queries and keys, or none."""
    add_position_embedding: bool = flag(True, off=("--no-position-embedding",))
    """Deprecated. The only effect of `--no-position-embedding` is to reject learned_absolute position embeddings."""
    rotary_base: float = flag(10000.0, least=1)
    """Base (theta) of the rotary frequencies."""
    rotary_percent: float = flag(1.0, least=0)
    """Fraction of the dimensions of each head to which rotary embeddings apply, starting with the first dimension."""
    rotary_interleaved: bool = flag(False)
    """Rotate dimensions 2i and 2i + 1 as a pair, instead of i and i + D/2 (D: number of rotated dimensions)."""
    rotary_seq_len_interpolation_factor: int | None = flag(None, least=1)
    """Linear position interpolation: divide positions by this factor."""
    use_rope_scaling: bool = flag(False)
    """Rescale low rotary frequencies for a longer context, as in Llama 3."""
    rope_scaling_factor: float = flag(8.0, least=1)
    """Factor by which `--use-rope-scaling` extends the context."""
    no_rope_freq: LayerPattern | None = flag(None)
    """Layers without RoPE: every n-th layer, or a list with 1 (without RoPE) or 0 (with RoPE) per layer."""
    yarn_original_max_position_embeddings: int | None = flag(None, least=1)
    """YaRN without multi-latent attention: context length before extension. Default: 4096."""
    yarn_beta_fast: float | None = flag(None, least=0)
    """YaRN: dimensions with more rotations than this over the original context keep their frequency. Default: 32."""
    yarn_beta_slow: float | None = flag(None, least=0)
    """YaRN: frequencies of dimensions with fewer rotations than this are divided by the scaling factor. Default: 1."""
    yarn_correction_range_round_to_int: bool = flag(True)
    """YaRN: round the bounds of the interpolated range of dimensions to integers (GPT-OSS does not round)."""

    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm")
    """Type of all normalisation layers."""
    norm_epsilon: float = flag(1e-5, least=0)
    """Number that all normalisation layers add to the variance or mean square."""
    apply_layernorm_1p: bool = flag(False)
    """Store w - 1 for the weight w of each norm, so that weight decay pulls w towards 1 instead of 0."""
    apply_residual_connection_post_layernorm: bool = flag(False)
    """Take the residual from the output of the norm instead of its input."""
    fp32_residual_connection: bool = unsupported(False, "the residual stream has the dtype of the parameters")
    """Keep the residual stream in fp32."""

    swiglu: bool = flag(False, essential=True)
    """Use gated MLPs with SiLU (SwiGLU)."""
    quick_geglu: bool = flag(False)
    """Use gated MLPs with x * sigmoid(1.702 x) (GPT-OSS)."""
    geglu: bool = new_flag(False)
    """Use gated MLPs with GELU."""
    squared_relu: bool = flag(False)
    """Use MLPs with squared ReLU and without a gate."""
    openai_gelu: bool = flag(False)
    """Use the tanh approximation of GELU."""
    activation_func: Annotated[str, ACTIVATIONS] | None = new_flag(None)
    """Activation function of MLPs and experts; replaces switches such as `--swiglu`. Imported files may add functions
    (see `--import`). Default: the function of the switch, or GELU without a switch."""
    gated_linear_unit: bool = new_flag(False)
    """With `--activation-func`: use gated MLPs, which multiply a second projection by the activated gate."""
    glu_linear_offset: float = differs(0.0, _GATED)
    """Offset added to the linear half of a gated MLP, e.g. 1 for GPT-OSS."""
    activation_func_clamp_value: float | None = differs(None, _GATED, least=0)
    """Clamp the inputs of gated activations: the gate to at most this value, the linear half to [-value, value]."""
    add_bias_linear: bool = flag(True, off=("--disable-bias-linear",))
    """Add biases to linear layers, experts and router."""
    hidden_dropout: float = flag(0.1, least=0, below=1)
    """Dropout probability after the embedding and on both residual branches of every layer."""

    untie_embeddings_and_output_weights: bool = flag(False)
    """Use separate weights for the embedding and the output layer."""
    make_vocab_size_divisible_by: int = flag(128, least=1)
    """Pad the vocabulary size to a multiple of this number times the tensor-parallel size."""
    padded_vocab_size: int | None = flag(None, least=1)
    """Padded vocabulary size (number of embedding rows); overrides `--make-vocab-size-divisible-by`."""
    pad_vocab_size: bool = flag(True, off=("--disable-pad-vocab-size",))
    """Pad the vocabulary size (see `--make-vocab-size-divisible-by`)."""

    init_method_std: float = flag(0.02, least=0)
    """Standard deviation of initial weights. For the output projections of attention and MLPs it is divided by sqrt(2 x
    layers), or by sqrt(layers) if every layer consists of one module."""
    embedding_init_method_std: float | None = flag(None, least=0)
    """Standard deviation of initial embedding weights. Setting it also excludes the embedding from weight decay."""
    init_method: Literal["normal", "unit_gain"] = new_flag("normal")
    """Initialisation of weights. unit_gain uses a standard deviation of 1/sqrt(fan-in) and random norm weights and
    biases, so that comparisons of parallel layouts detect an error in any parameter."""
    init_method_xavier_uniform: bool = flag(False)
    """Initialise weight matrices uniformly within +-sqrt(6 / (fan-in + fan-out)) instead of with `--init-method-std`.
    The embedding uses `--embedding-init-method-std` if that is set."""

    mtp_num_layers: int | None = flag(None, least=0, below=100_000)
    """Number of multi-token prediction layers, each of which predicts one token further ahead. Default: none, as with
    0."""
    mtp_mixer: Annotated[str, MIXERS] | None = new_flag(None)
    """Mixer of the multi-token prediction layers. Default: the mixer of the last layer."""
    mtp_feed_forward: Annotated[str, FEED_FORWARDS] | None = new_flag(None)
    """Feed-forward module of the multi-token prediction layers. Default: the module of the last layer."""
    mtp_loss_scaling_factor: float = flag(0.1, least=0)
    """Weight of the multi-token prediction loss in the total loss. The losses of the prediction layers are averaged."""
    mtp_use_repeated_layer: bool = flag(False)
    """Share the weights of one layer among all multi-token prediction layers."""
    mtp_detach_heads: bool = differs(False, "gradient clipping still uses one norm over all parameters")
    """Stop gradients of the multi-token prediction loss before the main layers, the embedding and the output layer."""
    calculate_per_token_loss: bool = flag(False)
    """Divide the summed loss by the number of tokens of the global batch instead of averaging over microbatches."""

    residual_connection: Annotated[str, RESIDUALS] = new_flag("auto")
    """Residual connection of all layers. auto: hyper_connections with `--enable-hyper-connections`, otherwise added.
    Imported files may add connections (see `--import`)."""
    enable_hyper_connections: bool = flag(False, names=("--enable-mhc-connections",))
    """Use several residual streams with learned connections (hyper-connections)."""
    spec: tuple[str, ...] | None = refused(
        None,
        "layers are selected by flags, not by import paths",
        works=(
            ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
            ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack"),
            ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"),
        ),
    )
    """Import path of a Python object that specifies the layers."""
    mamba_state_dim: int = flag(128, least=1)
    """State dimension of Mamba layers."""
    mamba_head_dim: int = flag(64, least=1)
    """Head dimension of Mamba layers."""
    mamba_num_groups: int = flag(8, least=1)
    """Number of groups of Mamba layers. The heads of a group share B and C."""
    mamba_num_heads: int | None = flag(None, least=1)
    """Number of heads of Mamba layers. Default: 2 x hidden size / `--mamba-head-dim`."""
    num_residual_streams: int = flag(4, names=("--mhc-num-residual-streams",), least=1)
    """Number of residual streams of hyper-connections."""
    mhc_sinkhorn_iterations: int = flag(20, least=1)
    """Number of Sinkhorn iterations that normalise the connections between residual streams."""
    mhc_init_gating_factor: float = flag(0.01)
    """Initial value of the factors of the learned part of hyper-connections."""
