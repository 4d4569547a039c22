"""The shape of the model, apart from attention and experts."""

from dataclasses import dataclass
from typing import Literal

from arguments.flag import REQUIRED, flag
from arguments.values import LayerPattern

_GATED = "of every gated block, dense ones too"


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Layers, widths, positions, norms, activations, vocabulary, initial values and multi-token prediction."""

    num_layers: int = flag(REQUIRED, least=1, below=100_000, essential=True)
    """Transformer layers, without those of multi-token prediction."""
    hidden_size: int = flag(REQUIRED, least=1, essential=True)
    """Width of the residual stream."""
    ffn_hidden_size: int | None = flag(None, least=1, essential=True)
    """Width of a dense feed-forward block. Not set: 4 x hidden size, or with `--swiglu` 8/3 x hidden size rounded
    down to a multiple of 64."""
    seq_length: int = flag(REQUIRED, least=1, essential=True)
    """Tokens in one training sequence."""
    max_position_embeddings: int = flag(REQUIRED, least=1)
    """Longest position the model knows; at least the sequence length."""

    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "mrope", "relative", "none"] = flag(
        "learned_absolute", status="not yet", works=("rope", "yarn", "none"), note="use rope, yarn or none"
    )
    """How positions enter: a learned table added to the embedding, rotation of queries and keys, or not at all."""
    add_position_embedding: bool = flag(True, off=("--no-position-embedding",))
    """Old switch for the learned table; `--no-position-embedding` is legal only where no table is asked for."""
    rotary_base: float = flag(10000.0, least=1)
    """Base of the rotation frequencies (theta)."""
    rotary_percent: float = flag(1.0, least=0)
    """Share of every head that is rotated, from the front."""
    rotary_interleaved: bool = flag(False)
    """Rotate pairs of neighbours instead of pairs from the two halves of a head."""
    rotary_seq_len_interpolation_factor: int | None = flag(None, least=1)
    """Divide positions by this before rotating."""
    use_rope_scaling: bool = flag(False)
    """Stretch low rotation frequencies as Llama 3 does."""
    rope_scaling_factor: float = flag(8.0, least=1)
    """Factor of `--use-rope-scaling`."""
    no_rope_freq: LayerPattern | None = flag(None)
    """Layers without rotation: every n-th, or a list with 1 for no rotation."""
    yarn_original_max_position_embeddings: int | None = flag(None, least=1)
    """YaRN, but not in multi-latent attention: context length before extension. Not set: 4096."""
    yarn_beta_fast: float | None = flag(None, least=0)
    """YaRN: dims that turn more often than this over the original length keep their frequency. Not set: 32."""
    yarn_beta_slow: float | None = flag(None, least=0)
    """YaRN: dims that turn less often than this are fully stretched. Not set: 1."""
    yarn_correction_range_round_to_int: bool = flag(True)
    """YaRN: round the border between kept and stretched dims to whole dims (GPT-OSS does not)."""

    normalization: Literal["LayerNorm", "RMSNorm"] = flag("LayerNorm")
    """Kind of every norm."""
    norm_epsilon: float = flag(1e-5, least=0)
    """Added to the variance in every norm."""
    apply_layernorm_1p: bool = flag(False)
    """Store the weight of a norm minus one, so that weight decay pulls it towards one."""
    apply_residual_connection_post_layernorm: bool = flag(False)
    """Take the residual connection from behind the norm."""
    fp32_residual_connection: bool = flag(
        False, status="not yet", note="the residual stream has the parameters' format"
    )
    """Keep the residual stream in fp32."""

    swiglu: bool = flag(False, essential=True)
    """Gated feed-forward blocks with SiLU."""
    quick_geglu: bool = flag(False)
    """Gated feed-forward blocks with x * sigmoid(1.702 x) (GPT-OSS)."""
    geglu: bool = flag(False, status="ours")
    """Gated feed-forward blocks with GELU."""
    squared_relu: bool = flag(False)
    """Feed-forward blocks with the square of ReLU, without a gate."""
    openai_gelu: bool = flag(False)
    """The tanh form of GELU."""
    glu_linear_offset: float = flag(0.0, status="close", note=_GATED)
    """Added to the linear half of a gated block (GPT-OSS: 1)."""
    activation_func_clamp_value: float | None = flag(None, least=0, status="close", note=_GATED)
    """Limit of the inputs of a gated activation: the gate from above, the linear half on both sides."""
    add_bias_linear: bool = flag(True, off=("--disable-bias-linear",))
    """Biases in linear layers, experts and router."""
    hidden_dropout: float = flag(0.1, least=0, below=1)
    """Dropout behind the embedding and on both branches of every layer."""

    untie_embeddings_and_output_weights: bool = flag(False)
    """A matrix of its own for the output head."""
    make_vocab_size_divisible_by: int = flag(128, least=1)
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""
    padded_vocab_size: int | None = flag(None, least=1)
    """Rows of the embedding, instead of padding the vocabulary."""
    pad_vocab_size: bool = flag(True, off=("--disable-pad-vocab-size",))
    """Pad the vocabulary."""

    init_method_std: float = flag(0.02, least=0)
    """Standard deviation of initial weights; matrices that write to the residual stream get it divided by
    sqrt(2 x layers)."""
    embedding_init_method_std: float | None = flag(None, least=0)
    """The embedding's own; it also takes weight decay off the embedding."""
    init_method: Literal["normal", "unit_gain"] = flag("normal", status="ours")
    """unit_gain: standard deviation 1/sqrt(inputs) and random norm weights and biases, so that every part matters when
    layouts are compared."""
    init_method_xavier_uniform: bool = flag(False)
    """Matrices start uniform within sqrt(6 / (inputs + outputs)), whatever `--init-method-std` says; not the embedding
    where `--embedding-init-method-std` is given."""

    mtp_num_layers: int | None = flag(None, least=0, below=100_000)
    """Depths of multi-token prediction."""
    mtp_loss_scaling_factor: float = flag(0.1, least=0)
    """Weight of the mean loss of multi-token prediction."""
    mtp_use_repeated_layer: bool = flag(False)
    """One layer serves all depths."""
    mtp_detach_heads: bool = flag(False, status="close", note="one norm clips all gradients")
    """Multi-token prediction does not train the trunk, the embedding or the head."""
    calculate_per_token_loss: bool = flag(False)
    """Divide the loss once by the tokens of the global batch, instead of averaging microbatches."""

    hybrid_layer_pattern: str | None = flag(
        None, names=("--hybrid-override-pattern",), status="not yet", note="only attention layers exist"
    )
    """Kinds of layers, one letter each."""
    is_hybrid_model: bool = flag(False, status="not yet", note="only attention layers exist")
    """The model mixes attention with other mixers."""
    enable_hyper_connections: bool = flag(
        False, names=("--enable-mhc-connections",), status="not yet", note="one residual stream exists"
    )
    """Several residual streams with learned connections."""
    spec: tuple[str, ...] | None = flag(None, status="refused", note="layers are chosen by flags, not by import paths")
    """Import path of a layer specification."""
    hybrid_attention_ratio: float = flag(0.0, status="not yet", note="only attention layers exist")
    """Share of layers with attention."""
    hybrid_mlp_ratio: float = flag(0.0, status="not yet", note="only attention layers exist")
    """Share of layers with a feed-forward block alone."""
    mamba_state_dim: int = flag(128, status="not yet", note="only attention layers exist")
    """Width of a Mamba state."""
    mamba_head_dim: int = flag(64, status="not yet", note="only attention layers exist")
    """Width of a Mamba head."""
    mamba_num_groups: int = flag(8, status="not yet", note="only attention layers exist")
    """Groups of Mamba heads."""
    mamba_num_heads: int | None = flag(None, status="not yet", note="only attention layers exist")
    """Mamba heads."""
    num_residual_streams: int = flag(
        4, names=("--mhc-num-residual-streams",), status="not yet", note="one residual stream exists"
    )
    """Residual streams of hyper-connections."""
    mhc_sinkhorn_iterations: int = flag(20, status="not yet", note="one residual stream exists")
    """Iterations that normalise the connections between residual streams."""
