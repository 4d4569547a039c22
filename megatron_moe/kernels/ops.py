"""Interface of the kernels: every op with shapes, dtypes and semantics.

`kernels/reference/` defines each op in plain torch; every backend is tested against it. Shape letters are those of
docs/shapes.md. Ops compute in the internal dtype promote(fp32, input dtype) and return the input's dtype unless stated
otherwise. Differentiable ops include their backward; `autograd.py` adds the backward of linear and embedding ops.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.moe import RouterConfig
from megatron_moe.config.param_meta import Part
from megatron_moe.config.precision import OperandFormat
from megatron_moe.kernels.pages import Pages
from megatron_moe.kernels.update_ops import AdamWState as AdamWState
from megatron_moe.kernels.update_ops import AdamWStep, MatrixStep, UpdateOps
from megatron_moe.parallel.push_channel import PushChannel
from megatron_moe.precision.linear_quantizer import Quantizers
from megatron_moe.precision.quantized_tensor import QuantizedTensor

MatrixOperand = Tensor | QuantizedTensor
"""Operand of a matrix multiplication, plain or quantised."""
Matrix = TypeVar("Matrix", Tensor, QuantizedTensor, MatrixOperand)


class GroupedPart(NamedTuple, Generic[Matrix]):
    """Operands of one microbatch for the weight gradient of stacked experts."""

    grad: Matrix
    """Gradient of the grouped GEMM's output, [R, O]."""
    rows: Matrix
    """Input of the grouped GEMM, [R, I], sorted by expert."""
    offsets_e: Tensor
    """End of each local expert's rows, int32 [e]; rows from `offsets_e[-1]` on are padding."""


@dataclass(frozen=True, kw_only=True)
class RowIndex:
    """Mapping between tokens and expert-sorted rows. Tensors are on the device; their shapes are known on the host."""

    token_R: Tensor
    """Token index of each row, int64; -1 for padding rows."""
    choice_R: Tensor
    """Index of each row's probability in flattened probs_TK (t * K + k) or probs_TE (t * E + e), int64; -1 for
    padding."""
    offsets_E: Tensor
    """End of each expert's rows, int32; rows from `offsets_E[-1]` on are padding."""
    rows_TK: Tensor | None
    """Row of each choice, int64; -1 if the choice has no row. None if the index was created by `sort_rows_dense`."""


@dataclass(frozen=True, kw_only=True)
class PositionSpan:
    """Sequence positions and document ids of a set of query or key rows. The attention mask is computed from both."""

    chunks: tuple[range, ...]
    """Ranges of consecutive sequence positions, in the order of the rows."""
    segments_BS: Tensor | None = None
    """Document id of each row, int64; attention does not cross documents. None means that all rows belong to one
    document."""

    def positions(self, device: torch.device) -> Tensor:
        """Sequence position of every row, int64."""
        return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in self.chunks])

    def rows(self, start: int, stop: int) -> "PositionSpan":
        """Positions and document ids of the rows from `start` to `stop` (exclusive)."""
        kept, first = [], 0
        for chunk in self.chunks:
            inside = chunk[max(start - first, 0) : max(stop - first, 0)]
            kept += [inside] if inside else []
            first += len(chunk)
        segments_BS = None if self.segments_BS is None else self.segments_BS[:, start:stop]
        return PositionSpan(chunks=tuple(kept), segments_BS=segments_BS)


DropoutKey = tuple[int | str, ...]
"""Key of a random number stream (`parallel/rng.py`)."""


class AttentionInputs(NamedTuple):
    """Inputs of attention over a whole sequence. Values may have another head dim (E) than queries and keys (D)."""

    q_SBND: Tensor
    k_SBGD: Tensor
    """Keys of G query groups; query head n uses group n // (N / G)."""
    v_SBGE: Tensor
    config: CoreAttentionConfig
    sinks_N: Tensor | None = None
    """Learned attention sinks: one additional softmax logit per head. None means no sinks."""
    segments_BS: Tensor | None = None
    """Document id of each position, int64; attention does not cross documents. None means one document per sequence."""
    dropout_key: DropoutKey | None = None
    """Key of the random numbers of the dropout mask; None means no dropout."""
    head_part: Part = (0, 1)
    """(index, count) of this rank's shard of the heads, by which its dropout mask is sliced from the mask of all
    heads."""

    @property
    def has_sinks(self) -> bool:
        return self.sinks_N is not None or self.config.off_by_one

    @property
    def has_dropout(self) -> bool:
        return self.config.dropout > 0.0 and self.dropout_key is not None


class AttentionBlock(NamedTuple):
    """Queries from one part of a sequence, and keys and values from another, as used by context parallelism."""

    q_SBND: Tensor
    k_SBGD: Tensor
    v_SBGE: Tensor
    config: CoreAttentionConfig
    query: PositionSpan
    key: PositionSpan
    dropout_key: DropoutKey | None = None

    @property
    def has_dropout(self) -> bool:
        return self.config.dropout > 0.0 and self.dropout_key is not None


class AttentionResult(NamedTuple):
    """Results of attention forward over all keys, including sinks, and the gradient of the attention output."""

    grad_SBNE: Tensor
    out_SBNE: Tensor
    """Attention output, in the dtype of q."""
    lse_SBN: Tensor
    """Log-sum-exp of each query's logits, in the internal dtype."""


class QueryKeyTransform(NamedTuple):
    """Parameters of `Kernels.query_key_value`: head layout, norm and RoPE of queries and keys."""

    eps: float
    zero_centered: bool
    """Multiplies by 1 + weight if True, by weight if False."""
    cos_SBD: Tensor
    sin_SBD: Tensor
    interleaved: bool
    """RoPE rotates the pairs of dims (0, 1), (2, 3) … if True, the pairs (i, i + D' / 2) of D' rotated dims if
    False."""
    heads_per_group: int
    """Query heads per query group."""


class BalanceSums(NamedTuple):
    """Sums for load-balancing losses over G sets of tokens. They ignore expert groups, expert bias and token drops."""

    scores_GE: Tensor
    """For each set and expert, sum of scores that are normalised to 1 per token: internal dtype, differentiable."""
    counts_GE: Tensor
    """For each set and expert, number of tokens that have the expert among their K highest scores, int64."""


class RoutedTokens(NamedTuple):
    """Result of `Kernels.route` for the tokens of a microbatch."""

    ids_TK: Tensor
    """Expert ids, int64, by descending selection score or as in `forced_ids_TK`; -1 if a token has fewer choices."""
    probs_TK: Tensor
    """Router probabilities of the choices, in the dtype of the logits; 0 where the id is -1. Differentiable."""
    counts_E: Tensor
    """Number of choices per expert, int64."""
    balance: BalanceSums | None
    z_sum: Tensor | None
    """Sum of logsumexp(logits)^2 over valid tokens: scalar, internal dtype, differentiable. None if not requested."""


class WeightPart(NamedTuple):
    """Consecutive elements of a flattened weight [O, I] or stack of weights [e, O, I]."""

    values: Tensor
    """Master weights [n] in fp32, or in fp64 in fp64 runs."""
    start: int
    """Index of the first element in the flattened weight."""
    shape: tuple[int, ...]
    """Shape of the whole weight."""
    dtype: torch.dtype
    """Parameter dtype, to which `round_weights` rounds the values before they are quantised."""


class QuantizedActivationGrads(NamedTuple):
    """Gradients of an activation, and operands of the GEMMs next to it in backward."""

    grad_x_q: QuantizedTensor
    """Rowwise copy of the gradient of the activation's input; if `columns` is given, also the columnwise copy."""
    grad_x_RF: Tensor | None
    """Unquantised gradient of the activation's input; None if `columns` is given."""
    grad_probs_R: Tensor | None
    out_RF: "MatrixOperand"
    """Recomputed result of the activation; if `columns` is given, a tensor with only its columnwise copy."""


class VocabShard(NamedTuple):
    """Part of the vocabulary on one tensor-parallel rank, for `Kernels.cross_entropy`."""

    first: int
    """Id of the first entry."""
    gather: Callable[[Tensor], Tensor]
    """All-gathers the statistics of n ranks, [3, T] -> [n, 3, T]; not recorded by autograd."""


class Kernels(UpdateOps, Quantizers, Protocol):
    """Interface of the kernel set that modules receive: one method per op, including those of `Quantizers`."""

    fuses_norms: bool
    """Whether `rms_norm_quantized` uses the same backend as `rms_norm` and `add_rms_norm`, so that results are bitwise
    equal."""

    # matrix multiplications: forward, input gradient and weight gradient are three ops, so that quantised operands and
    # delayed weight gradients need no other interface
    def linear_forward(
        self, x: MatrixOperand, weight: MatrixOperand, bias: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        """Linear layer: x [..., I], weight [O, I], bias [O] -> [..., O]. `out`: contiguous tensor for the result, only
        for operands that are not quantised."""

    def linear_input_grad(self, grad: MatrixOperand, weight: MatrixOperand, *, out: Tensor | None = None) -> Tensor:
        """Input gradient of a linear layer: grad [..., O], weight [O, I] -> [..., I]. `out`: as in `linear_forward`."""

    def linear_weight_grad(self, grad: MatrixOperand, x: MatrixOperand, out: Tensor, accumulate: bool) -> None:
        """Writes the weight gradient of a linear layer, grad^T x, to `out` [O, I], or adds it if `accumulate`. grad is
        [..., O] and x is [..., I]. Computed in the dtype of `out`, which may be wider than that of the inputs."""

    def grouped_forward(self, rows: MatrixOperand, weight: MatrixOperand, offsets_e: Tensor) -> Tensor:
        """Grouped GEMM: rows [R, I] sorted by expert, weight [e, O, I] -> [R, O], undefined beyond `offsets_e[-1]`."""

    def grouped_input_grad(self, grad: MatrixOperand, weight: MatrixOperand, offsets_e: Tensor) -> Tensor:
        """Grouped GEMM input gradient: grad [R, O], weight [e, O, I] -> [R, I], undefined beyond `offsets_e[-1]`."""

    def grouped_weight_grad(self, parts: Sequence[GroupedPart[MatrixOperand]], out: Tensor, accumulate: bool) -> None:
        """Writes the weight gradient of the grouped GEMM to `out` [e, O, I], or adds it if `accumulate`. An expert's
        gradient is the sum of grad^T @ rows over `parts` (not empty), in the dtype of `out`; 0 if it has no rows."""

    # quantisation of weights that are stored in FP8 or FP4
    def weight_amax_(self, amax: Tensor, part: WeightPart, block: tuple[int, int]) -> None:
        """Raises `amax` (fp32 [e, blocks along O, blocks along I], any strides) to the largest magnitudes of the blocks
        that contain elements of `part`. `block`: (rows, columns) of a block."""

    def quantize_weight_part(self, part: WeightPart, factors: Tensor, block: tuple[int, int], out: Tensor) -> None:
        """Writes the FP8 elements of a part of a weight to `out` [n], or its packed E2M1 elements to `out` (uint8
        [n / 2]). `factors`: factor of each block, in the layout of `weight_amax_`, by which elements are multiplied."""

    # quantisation fused into the ops whose results are quantised; formats with one scale per block of a row
    def quantize_permuted(
        self, tokens_TH: Tensor, index: RowIndex, fmt: OperandFormat, *, rowwise: bool = True, columnwise: bool = False
    ) -> QuantizedTensor:
        """Quantised copies of `permute(tokens_TH, index)`. In the columnwise copy, each expert has its own scale
        blocks."""

    def permute_quantized(self, tokens: QuantizedTensor, index: RowIndex) -> tuple[Tensor, QuantizedTensor]:
        """Gathers the token of each row from a rowwise copy [T, H] with one scale per block of a row -> (values [R, H]
        in `tokens.dtype`, rowwise copy [R, H]). Padding rows are quantised zeros. Values are exact in bf16 if scales
        are powers of two."""

    def dequantize_rows(self, rows: QuantizedTensor) -> Tensor:
        """Values [R, C] of a rowwise FP8 copy with one scale per block of a row, in `rows.dtype`. Exact in bf16 if
        scales are powers of two."""

    def quantize_activation(
        self, x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig, fmt: OperandFormat
    ) -> QuantizedTensor:
        """Rowwise copy of `activation(x_RF, probs_R, config)`."""

    def quantize_activation_grad(
        self,
        grad_RF: Tensor,
        x_RF: Tensor,
        probs_R: Tensor | None,
        config: ActivationConfig,
        fmt: OperandFormat,
        *,
        columns: OperandFormat | None = None,
        offsets_e: Tensor | None = None,
    ) -> QuantizedActivationGrads:
        """Gradients of `activation(x_RF, probs_R, config)` for its output's gradient `grad_RF`, with a rowwise copy of
        the gradient of x. For gated activations, F must be a multiple of the block length.

        With `columns`, the format of GEMM inputs, also makes the operands of the weight gradients next to the
        activation: columnwise copies of the gradient of x and of the activation's result, in blocks of each expert with
        `offsets_e`. Gradients of rows beyond `offsets_e[-1]` are then undefined."""

    def rms_norm_quantized(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool, fmt: OperandFormat
    ) -> tuple[Tensor, Tensor, QuantizedTensor]:
        """Fused `add_rms_norm` and quantisation. Returns (sum, norm, rowwise copy [R, H] of the norm); the sum is x
        without `residual`. Sum and norm are differentiable."""

    def embedding_grad(self, grad_TH: Tensor, ids_T: Tensor, out: Tensor, accumulate: bool) -> None:
        """Writes the gradient of an embedding table to `out` [V, H], or adds it if `accumulate`. Row v is the sum of
        the gradients of all tokens with id v, in the dtype of `out`; 0 if there are none."""

    # norms, RoPE and attention; these ops are differentiable
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        """RMSNorm over the last dim: x / sqrt(mean(x^2) + eps) * w; w is weight [H], plus 1 if `zero_centered`."""

    def add_rms_norm(
        self, residual: Tensor | None, x: Tensor, weight: Tensor, eps: float, zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns the sum residual + x, rounded to the dtype of x, or x if `residual` is None, and `rms_norm` of the
        rounded sum."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
        """LayerNorm over the last dim: (x - mean(x)) / sqrt(var(x) + eps) * w + bias; w as in `rms_norm`."""

    def rope(self, x_SBND: Tensor, cos_SBD: Tensor, sin_SBD: Tensor, interleaved: bool, start: int = 0) -> Tensor:
        """RoPE: rotates D' = cos.shape[-1] dims of each head, starting at dim `start`, and copies the other dims. The
        second dim of cos and sin is B or 1; both halves of their last dim contain the same angles. Rotated pairs are
        (0, 1), (2, 3) … if `interleaved`, otherwise (i, i + D' / 2)."""

    def query_key_value(
        self, qkv_SBGC: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, transform: QueryKeyTransform
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Splits each group's C = (heads_per_group + 2) D channels into its query heads, one key and one value. If the
        weights [D] are given, queries and keys are normalised by `rms_norm`; both are then rotated by `rope`. Returns
        query [S, B, N, D], key and value [S, B, G, D]; the value may be a view of qkv."""

    def latent_key_value(self, kv_SBNC: Tensor, shared_SBR: Tensor, key_width: int) -> tuple[Tensor, Tensor]:
        """Keys and values of multi-head latent attention. Each head of kv contains the first `key_width` dims of the
        key, followed by the value. The last R dims of the key are `shared_SBR`, the same for all heads. Returns key [S,
        B, N, key_width + R] and value [S, B, N, C - key_width]; the value may be a view of kv."""

    def attention(self, inputs: AttentionInputs) -> Tensor:
        """Computes attention over a whole sequence -> [S, B, N, E]."""

    def sparse_attention(
        self, q_UBND: Tensor, kv_SBD: Tensor, ids_UBK: Tensor, sinks_N: Tensor | None, value_width: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of each query to the rows of `kv_SBD` with the given ids (int32 or int64, distinct; -1 for none),
        which all heads share. A row is a key; its first E = `value_width` channels are also the value. `sinks_N`: see
        `AttentionInputs`. Returns the output [U, B, N, E], differentiable, and the log-sum-exp of the logits and the
        sink [U, B, N] in the internal dtype. They are 0 and -inf for a query without keys and sinks. Ids of -1 at the
        end cost nothing."""

    # Attention between two parts of a sequence. Its backward needs the output and log-sum-exp over all parts.
    def attention_block(
        self, block: AttentionBlock, out_SBNE: Tensor | None = None, lse_SBN: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes attention of the block's queries over its keys: output [Sq, B, N, E] and log-sum-exp [Sq, B, N].

        With `out_SBNE` (contiguous; internal dtype or that of q) and `lse_SBN` (internal dtype), merges it into them,
        in place, and returns them. Where a row has seen no key, they are 0 and -inf. A backend may round the block's
        output to the dtype of q, and return it so."""

    def attention_block_grad(
        self, block: AttentionBlock, found: AttentionResult, into: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the block's q, k and v, in the internal dtype or rounded to that of q. With `into` (contiguous,
        internal dtype), adds them to these tensors and returns these. `found`: results of forward over all keys."""

    def max_logits_(self, block: AttentionBlock, lse_SBN: Tensor, maxima_N: Tensor, least: float) -> None:
        """Raises `maxima_N` to each head's largest logit if it exceeds `least`. `lse_SBN`: log-sum-exp over these keys
        or more."""

    # linear attention and gates; these ops are differentiable
    def linear_attention(
        self,
        q_SBND: Tensor,
        k_SBND: Tensor,
        v_SBME: Tensor,
        log_decay_SBM: Tensor,
        beta_SBM: Tensor | None,
        segments_BS: Tensor | None,
        scale: float,
        eps: float | None = None,
    ) -> Tensor:
        """Causal linear attention with one decay per value head, or per channel of its keys if `log_decay` has the
        shape [S, B, M, D] -> [S, B, M, E] in the dtype of v.

        A head has a state [D, E], 0 before each document. For every token, the state is multiplied by exp(log_decay),
        which is at most 1, k v^T is added to it, and the output is scale q^T state (state-space duality, arXiv
        2405.21060). With `beta`, the token adds beta k (v - state^T k)^T instead (gated delta rule, arXiv 2412.06464,
        2510.26692). M is a multiple of N: consecutive M / N value heads share a head of q and k. `segments_BS`: ids of
        the documents, ascending; None means one document per row. `eps`: each row x of q and k is first divided by
        sqrt(sum x^2 + eps); None means that rows are not normalised. States and decays have the internal dtype."""

    def short_conv(self, x_SBC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, segments_BS: Tensor | None) -> Tensor:
        """SiLU of a causal depthwise convolution of x over the last K tokens of the same document -> [S, B, C]. The
        last column of the weight multiplies the token itself. `segments_BS`: see `linear_attention`."""

    def gated_rms_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        norm_first: bool,
        activation: Literal["silu", "sigmoid"] = "silu",
    ) -> Tensor:
        """RMSNorm of x over its last dim W with a gate; x and gate are [..., G, W], the weight is [W] or [G, W].

        Returns norm(x) * weight * activation(gate) if `norm_first`, else norm(x * activation(gate)) * weight."""

    # hyper-connections; `hyper_connection_sum` is not differentiable
    def hyper_connection_read(
        self, stream_SBW: Tensor, matrix_MW: Tensor, scale: Tensor, bias: Tensor, config: HyperConnectionsConfig
    ) -> tuple[Tensor, ...]:
        """Returns the unchanged streams [S, B, n H], the sublayer's input [S, B, H], and the coefficients pre [T, n],
        post [T, n] and mix [T, n, n] of `HyperConnectionsConfig`, in the internal dtype. With the parameters of the
        head (M = n, one scale), post and mix are omitted. Backward adds the gradient of the returned streams to the
        gradient of the input streams."""

    def hyper_connection_sum(self, stream_SBW: Tensor, pre_TN: Tensor) -> Tensor:
        """Recomputes the sublayer's input of `hyper_connection_read`, sum_j pre[j] X_j: [S, B, H]."""

    def hyper_connection_write(self, stream_SBW: Tensor, out_SBH: Tensor, post_TN: Tensor, mix_TNN: Tensor) -> Tensor:
        """Streams after a sublayer with the output `out_SBH`: stream k is sum_j mix[j, k] X_j + post[k] out."""

    # elementwise ops and losses; these ops are differentiable
    def activation(self, x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig) -> Tensor:
        """Returns the activation [..., F] of x [..., F] (gated: x [..., 2F], gate first), multiplied by probs [...] if
        given. Padding rows have probability 0 and may contain any values, even nan. In these rows, the result and the
        gradient of x are 0; the gradient of probs is 0 if the incoming gradient is finite."""

    def cross_entropy(self, logits_TV: Tensor, labels_T: Tensor, shard: VocabShard | None = None) -> Tensor:
        """Cross-entropy loss of each token, -log softmax(logits)[label]: [T] in the internal dtype.

        With `shard`, the logits are this rank's part of the vocabulary, labels are ids of the whole vocabulary, and all
        ranks get the same loss. Backward needs no communication. It may overwrite the logits with their gradient, so
        nothing may read them afterwards. Backward can run only once."""

    # routing
    def router_logits(self, hidden_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
        """Router GEMM: hidden [T, H] times weight [E, H] transposed -> logits [T, E] in `dtype`, which may be wider
        than that of the inputs. Forward and backward compute in `dtype`. Differentiable; saves only the inputs."""

    def route(
        self,
        logits_TE: Tensor,
        bias_E: Tensor | None,
        config: RouterConfig,
        *,
        forced_ids_TK: Tensor | None = None,
        valid_T: Tensor | None = None,
        balance_sets: int = 0,
        z: bool = False,
    ) -> RoutedTokens:
        """Routes tokens: scores, group-limited top-k, normalisation, scaling, counts, and sums for auxiliary losses.

        `bias_E` affects the selection, not the probabilities. Ties: the lowest id wins. `forced_ids_TK` replaces the
        selected ids (for example in recomputation or quantile balancing); probabilities and sums are still computed
        from the logits. The probability is 0 where the id is -1. Tokens with `valid_T` False have no choices, are not
        counted and get no gradient. `balance_sets` = G > 0 requests sums for balancing losses: token t belongs to set t
        % G, and G must divide T. `z` requests `z_sum`. Sums are bitwise reproducible. Probabilities and sums are
        differentiable with respect to the logits; only the logits, the ids and `valid_T` are saved.
        """

    def count_tokens(self, ids_TK: Tensor, num_experts: int) -> Tensor:
        """Number of choices per expert, int64 [E]; ids of -1 are not counted."""

    # rows
    def sort_rows(
        self, ids_TK: Tensor, num_experts: int, capacity: int | None, align: int = 1, first: int = 0
    ) -> RowIndex:
        """Sorts choices (int64 or int32) by expert, then by token; there are `num_experts` experts from id `first` on,
        and choices of others get no row. Each expert's rows are padded to a multiple of `align`. Without a capacity,
        the number of rows R is `most_rows(T * K, E, align)`. With a capacity, each expert keeps its first `capacity`
        choices and has C rows: `capacity` rounded up to a multiple of `align`. Then R = E * C."""

    def sort_rows_dense(self, map_TE: Tensor, rows: int, capacity: int | None) -> RowIndex:
        """Variant of `sort_rows` for a bool routing map [T, E]. Without a capacity, the number of rows R is `rows`."""

    def permute(self, tokens_TH: Tensor, index: RowIndex) -> Tensor:
        """Gathers the token of each row: [T, H] -> [R, H]; padding rows are 0. Differentiable: backward sums each
        token's rows in the internal dtype and ignores padding rows."""

    def unpermute(self, rows_RH: Tensor, index: RowIndex, num_tokens: int) -> Tensor:
        """Sums each token's rows in the internal dtype: [R, H] -> [T, H]. Ignores padding rows, even if they contain
        nan. Differentiable: backward gathers each row's gradient from its token; padding rows get 0."""

    def gather_probs(self, probs: Tensor, index: RowIndex) -> Tensor:
        """Gathers each row's probability from probs [T, K] or [T, E] -> [R]; 0 for padding rows. Differentiable."""

    # Ops of exchanges through symmetric memory; see `parallel/push_channel.py`.
    def mark_ranks(self, ids_TK: Tensor, owner_EP: Tensor) -> Tensor:
        """int32 [T]: bit p is set if `owner_EP` (bool) is True for one of the token's experts and rank p. P <= 31."""

    def push_tokens(
        self, tokens_TH: MatrixOperand, ranks_T: Tensor, choices: tuple[Tensor, Tensor] | None, channel: PushChannel
    ) -> None:
        """Copies token t to slot [this rank, t] of every rank in `ranks_T` (see `mark_ranks`), and `choices`, ids and
        values [T, K] in promote(fp32, dtype), to all ranks. If `channel.shape.fmt` is set, tokens are the rowwise copy
        of a `QuantizedTensor` in this format."""

    def push_sums(
        self, rows: Tensor, index: RowIndex, values_GK: Tensor | None, channel: PushChannel, *, is_summed: bool = False
    ) -> None:
        """Sums the rows [R, H] of each token in promote(fp32, dtype) and sends the sums to the tokens' ranks.

        `index` refers to the G = P * T tokens of all ranks. The sum of token t of rank p is stored in slot [this rank,
        t] of rank p if the token has rows here; the values of choices with rows are sent in the same way. If
        `is_summed`, `rows` contains the sums [G, H]."""

    def sum_partials(
        self, ids_TK: Tensor, owner_EP: Tensor, channel: PushChannel, *, with_values: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Sums the slots [p, t] of the ranks p that hold experts of token t, in the order of the ranks and in
        promote(fp32, dtype) -> ([T, H], and the values [T, K] of the choices)."""

    def wait_for_peers(self, channel: PushChannel) -> None:
        """Waits until all ranks have pushed the current epoch; sets `channel.late_rank_flag` after the timeout."""

    def acknowledge(self, channel: PushChannel) -> None:
        """Sets the acknowledgement flag of this rank to the current epoch, on all ranks."""

    # paged row storage
    def pack_rows(self, rows_RW: Tensor, valid: Tensor, pages: Pages) -> Tensor:
        """Copies the first `valid` rows (int32 device scalar) to free pages. Returns the page table, int32: for each
        page-sized block of the R rows, the index of its page, or `NONE` if no row is valid. If too few pages are free,
        none is allocated, blocks with valid rows get `NO_ROOM`, and `pages.overflowed` becomes 1."""

    def unpack_rows(self, table: Tensor, num_rows: int, pages: Pages) -> Tensor:
        """Copies packed rows back -> [num_rows, W]. Rows of `NO_ROOM` entries are nan; invalid rows are undefined."""

    def free_pages(self, table: Tensor, pages: Pages) -> None:
        """Frees the pages of a page table."""


def internal_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which ops compute: promote(fp32, dtype)."""
    return torch.promote_types(torch.float32, dtype)


def all_finite(tensor: Tensor) -> Tensor:
    """Whether every element is finite: bool scalar on the device. Reads the tensor once; allocates only scalars."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.stack(torch.aminmax(tensor)).isfinite().all()


def mark_nonfinite(move: AdamWStep | MatrixStep, *stored: Tensor) -> None:
    """Sets `move.nonfinite` if the step was applied and one of the updated tensors `stored` is not finite."""
    for tensor in stored:
        move.nonfinite.logical_or_(move.apply_update & ~all_finite(tensor))
