"""Interface of the kernels: every op with shapes, dtypes and semantics.

`reference.py` defines each op in plain torch; every backend is tested against it. Shape letters are those of
docs/shapes.md. Ops compute in the internal dtype promote(fp32, input dtype) and return the input's dtype unless stated
otherwise. "Differentiable" ops have their own backward; `autograd.py` wraps the others in autograd Functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.moe import ActivationConfig, RouterConfig
from megatron_moe.kernels.low_precision_state import PackedState
from megatron_moe.kernels.pages import Pages
from megatron_moe.kernels.push_channel import PushChannel
from megatron_moe.parallel.param_meta import Part


@dataclass(frozen=True, kw_only=True)
class QuantizedTensor:
    """Low-precision matrix, or stack of matrices, as an operand of matrix multiplications.

    A GEMM reads the copy whose blocks lie along the reduction dimension: the forward GEMM the rowwise copy, the weight
    gradient the columnwise copy. No backend implements these operands yet; `KernelSet.of` rejects them.
    """

    rowwise: Tensor | None
    """Values quantised along the last dim; None if no GEMM reads this copy."""
    rowwise_scales: Tensor | None
    """Scale of every block of `rowwise`."""
    columnwise: Tensor | None
    """Values quantised along the second-to-last dim; None if no GEMM reads this copy."""
    columnwise_scales: Tensor | None
    """Scale of every block of `columnwise`."""
    block: tuple[int, int]
    """Shape of the blocks that share a scale, for example (1, 128), (128, 128) or (1, 32)."""


MatrixOperand = Tensor | QuantizedTensor
"""Operand of a matrix multiplication."""
Matrix = TypeVar("Matrix", Tensor, MatrixOperand)


class GroupedPart(NamedTuple, Generic[Matrix]):
    """Operands of one microbatch for the weight gradient of stacked experts."""

    grad: Matrix
    """Gradient of the grouped GEMM's output, [R, O]."""
    rows: Matrix
    """Input of the grouped GEMM, [R, I], sorted by expert."""
    offsets_e: Tensor
    """int32 end of each expert's rows; rows beyond the last end are padding."""


@dataclass(frozen=True, kw_only=True)
class RowIndex:
    """Source token of every row in expert-sorted order, on the device. All sizes are known on the host."""

    token_R: Tensor
    """int64 token of each row; -1 for padding rows."""
    choice_R: Tensor
    """int64 index of the probability in flattened probs_TK (t * K + k) or probs_TE (t * E + e); -1: padding."""
    offsets_E: Tensor
    """int32 end of each expert's rows; rows beyond the last end are padding."""
    rows_TK: Tensor | None
    """int64 row of each choice, -1 if the choice has no row. None for indices of `sort_rows_dense`."""


@dataclass(frozen=True, kw_only=True)
class PositionSpan:
    """Sequence positions and document ids of some query or key rows; both define the attention mask."""

    chunks: tuple[range, ...]
    """Ranges of consecutive positions, in the order of the rows; on the host."""
    segments_BS: Tensor | None = None
    """int64 document id of each row; attention does not cross documents. None: one document."""

    def places(self, device: torch.device) -> Tensor:
        """int64 sequence position of every row."""
        return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in self.chunks])

    def rows(self, start: int, stop: int) -> "PositionSpan":
        """Positions and document ids of rows `start` to `stop`."""
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
    """Inputs of attention over a whole sequence. The head dim E of the values may differ from D."""

    q_SBND: Tensor
    k_SBGD: Tensor
    """Keys of G query groups; query head n uses group n // (N / G)."""
    v_SBGE: Tensor
    config: CoreAttentionConfig
    sinks_N: Tensor | None = None
    """Learned attention sinks: one additional softmax logit per head."""
    segments_BS: Tensor | None = None
    """int64 document id of each position; attention does not cross documents. None: one document."""
    dropout_key: DropoutKey | None = None
    """Key of the random numbers of the dropout mask; None: no dropout."""
    head_part: Part = (0, 1)
    """(index, count) of this rank's part of all heads; the dropout mask is that part of the mask for all heads."""

    @property
    def has_sinks(self) -> bool:
        return self.sinks_N is not None or self.config.off_by_one

    @property
    def drops(self) -> bool:
        return self.config.dropout > 0.0 and self.dropout_key is not None


class AttentionBlock(NamedTuple):
    """Queries and keys of two parts of a sequence, as used by context parallelism."""

    q_SBND: Tensor
    k_SBGD: Tensor
    v_SBGE: Tensor
    config: CoreAttentionConfig
    query: PositionSpan
    key: PositionSpan
    dropout_key: DropoutKey | None = None

    @property
    def drops(self) -> bool:
        return self.config.dropout > 0.0 and self.dropout_key is not None


class AttentionResult(NamedTuple):
    """Result of attention forward over all keys, including sinks, and the gradient of the output."""

    grad_SBNE: Tensor
    out_SBNE: Tensor
    """Attention output, in the dtype of q."""
    lse_SBN: Tensor
    """Log-sum-exp of the logits, in the internal dtype."""
    delta_SBN: Tensor
    """Row sums of grad times out over the value dim, in the internal dtype. A backend reads either `out` or `delta`."""


class QueryKeyTransform(NamedTuple):
    """Parameters of the split of a QKV projection into heads, with norm and RoPE of queries and keys."""

    eps: float
    zero_centered: bool
    """Whether the scale of the norm is 1 + weight."""
    cos_SBD: Tensor
    sin_SBD: Tensor
    interleaved: bool
    """Rotated pairs of dims: (0, 1), (2, 3) … if True, otherwise (i, i + D' / 2) for D' rotated dims."""
    heads_per_group: int
    """Query heads per query group."""


class AdamWState(NamedTuple):
    """Flat optimizer state of AdamW in the formats of `kernels/low_precision_state.py`."""

    master: PackedState
    exp_avg: PackedState
    exp_avg_sq: PackedState


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """Hyperparameters and device scalars of one AdamW step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: Tensor
    """int64 scalar on the device: number of this update, starting at 1, for the bias corrections."""
    grad_scale: Tensor
    """Scalar on the device by which the gradient is multiplied (gradient clipping)."""
    proceed: Tensor
    """bool scalar on the device: False skips the update; then nothing changes, even if the gradient is not finite."""
    nonfinite: Tensor
    """bool scalar on the device, set to True if a stored weight or moment is not finite. Ops never reset it."""


class BalanceSums(NamedTuple):
    """Sums for load-balancing losses per set of tokens, from scores without groups, expert bias or token dropping."""

    scores_GE: Tensor
    """Sums over tokens of the scores normalised to 1 per token, in the internal dtype. Differentiable."""
    counts_GE: Tensor
    """int64: how often each expert is among the plain top-k (no groups) of the router scores without expert bias."""


class RoutedTokens(NamedTuple):
    """Result of `Kernels.route` for the tokens of a microbatch."""

    ids_TK: Tensor
    """int64 expert ids in descending order of score; -1 if the token has no such choice."""
    probs_TK: Tensor
    """Router probabilities of the choices, in the dtype of the logits; 0 where the id is -1. Differentiable."""
    counts_E: Tensor
    """int64 number of choices per expert."""
    balance: BalanceSums | None
    z_sum: Tensor | None
    """Sum over tokens of logsumexp(logits)^2, scalar in the internal dtype. Differentiable."""


class Kernels(Protocol):
    """Interface of the kernel set that modules receive: one method per op."""

    # matrix multiplications: forward, input gradient and weight gradient are three ops, so that quantised operands and
    # delayed weight gradients need no other interface
    def linear_forward(self, x: MatrixOperand, weight: MatrixOperand, bias: Tensor | None) -> Tensor:
        """Linear layer: x [..., I], weight [O, I], bias [O] -> [..., O]."""
        ...

    def linear_input_grad(self, grad: MatrixOperand, weight: MatrixOperand) -> Tensor:
        """Input gradient of a linear layer: grad [..., O], weight [O, I] -> [..., I]."""
        ...

    def linear_weight_grad(self, grad: MatrixOperand, x: MatrixOperand, out: Tensor, accumulate: bool) -> None:
        """Weight gradient of a linear layer: grad [..., O], x [..., I]; writes grad^T x to `out` [O, I] or adds it,
        accumulated in the dtype of `out`, which may be wider than the input's."""
        ...

    def grouped_forward(self, rows: MatrixOperand, weight: MatrixOperand, offsets_e: Tensor) -> Tensor:
        """Grouped GEMM: rows [R, I] sorted by expert, weight [e, O, I] -> [R, O], undefined beyond `offsets_e[-1]`."""
        ...

    def grouped_input_grad(self, grad: MatrixOperand, weight: MatrixOperand, offsets_e: Tensor) -> Tensor:
        """Input gradient of the grouped GEMM: grad [R, O], weight [e, O, I] -> [R, I]; padding rows are undefined."""
        ...

    def grouped_weight_grad(self, parts: Sequence[GroupedPart[MatrixOperand]], out: Tensor, accumulate: bool) -> None:
        """Weight gradient of the grouped GEMM: writes or adds the sum of grad_e^T rows_e over all parts (at least one)
        to `out` [e, O, I], accumulated in the dtype of `out`. The gradient of an expert without rows is 0."""
        ...

    def embedding_grad(self, grad_TH: Tensor, ids_T: Tensor, out: Tensor, accumulate: bool) -> None:
        """Gradient of an embedding table: sums the gradients of the tokens with id v in the dtype of `out`, and writes
        or adds the sum to row v of `out` [V, H]. The sum is 0 for an id without tokens."""
        ...

    # norms, RoPE, attention: differentiable
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        """x [..., H], weight [H]: x / sqrt(mean(x^2) + eps) * weight (or * (1 + weight))"""
        ...

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns residual + x, rounded to the dtype of x, and `rms_norm` of that sum."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
        """x [..., H], weight and bias [H]: (x - mean(x)) / sqrt(var(x) + eps) * weight (or * (1 + weight)) + bias"""
        ...

    def rope(self, x_SBND: Tensor, cos_SBD: Tensor, sin_SBD: Tensor, interleaved: bool, start: int = 0) -> Tensor:
        """RoPE: rotates D' = cos.shape[-1] dims of each head, starting at dim `start`, and copies the rest. Cos and sin
        have B or 1 as their second dim and hold each angle twice, once per half. `interleaved`: rotates the pairs (0,
        1), (2, 3) … instead of (i, i + D' / 2)."""
        ...

    def query_key_value(
        self, qkv_SBGC: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, transform: QueryKeyTransform
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Splits each group's C = (heads_per_group + 2) D channels into its query heads, one key and one value. If the
        weights [D] are given, queries and keys are normalised by `rms_norm`; both are then rotated by `rope`. Returns
        query [S, B, N, D], key and value [S, B, G, D]; the value may be a view of qkv."""
        ...

    def latent_key_value(self, kv_SBNC: Tensor, shared_SBR: Tensor, key_width: int) -> tuple[Tensor, Tensor]:
        """Keys and values of multi-head latent attention: kv holds the first `key_width` dims of each head's key, then
        its value; all heads share the last R dims of the key. Returns key [S, B, N, key_width + R] and value [S, B, N,
        C - key_width]; the value may be a view of kv."""
        ...

    def attention(self, inputs: AttentionInputs) -> Tensor:
        """Attention over a whole sequence -> [S, B, N, E]."""
        ...

    # attention between two parts of a sequence, for context parallelism: two ops, because the backward of one part
    # needs the forward's output and log-sum-exp over all parts
    def attention_block(self, block: AttentionBlock, out_SBNE: Tensor, lse_SBN: Tensor) -> None:
        """Merges attention of the block's queries to its keys into `out_SBNE` [Sq, B, N, E] (contiguous) and the
        log-sum-exp `lse_SBN` [Sq, B, N], in place. Both have the internal dtype and are initially 0 and -inf. A backend
        may round the block's output to the dtype of q before merging."""
        ...

    def attention_block_grad(
        self, block: AttentionBlock, found: AttentionResult, into: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Adds this block's gradients of q, k and v to the contiguous tensors `into`, which have the internal dtype. A
        backend may round its gradients to the dtype of q before adding them."""
        ...

    # elementwise and loss: differentiable
    def activation(self, x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig) -> Tensor:
        """Applies the activation to x [..., F] (gated: [..., 2F], gate first); multiplies by probs [...] if not None ->
        [..., F]. Padding rows have probability 0 and may contain any values, nan included: their results and gradients
        of x are 0, and so are their gradients of probs for any finite incoming gradient."""
        ...

    def cross_entropy(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        """-log softmax(logits)[label] in the internal dtype -> [T]."""
        ...

    # routing
    def gate_product(self, hidden_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
        """Router GEMM: hidden [T, H] times weight [E, H] transposed -> logits [T, E] in `dtype`, which may be wider
        than the inputs; forward and backward multiply and add in `dtype`. Differentiable; saves only the inputs."""
        ...

    def route(
        self,
        logits_TE: Tensor,
        bias_E: Tensor | None,
        config: RouterConfig,
        *,
        given_ids_TK: Tensor | None = None,
        valid_T: Tensor | None = None,
        balance_sets: int = 0,
        z: bool = False,
    ) -> RoutedTokens:
        """Routes tokens: scores, group-limited top-k, normalisation, scaling, counts, and sums for auxiliary losses.

        `bias_E` affects the selection, not the probabilities. Ties: the lowest id wins. `given_ids_TK` replaces the
        top-k (recomputation, Sinkhorn, quantile balancing, expert choice); probabilities and sums still follow from the
        logits, and the probability is 0 where the id is -1. Tokens with `valid_T` False have no choices, are not
        counted and get no gradient. `balance_sets` = G > 0 requests sums for balancing losses: token t belongs to set t
        % G, and G must divide T. Sums are bitwise reproducible. Probabilities and sums are differentiable with respect
        to the logits; only the logits, the ids and `valid_T` are saved.
        """
        ...

    def count_tokens(self, ids_TK: Tensor, num_experts: int) -> Tensor:
        """Number of choices per expert, int64 [E]; ids of -1 are not counted."""
        ...

    # rows
    def sort_rows(self, ids_TK: Tensor, num_experts: int, capacity: int | None, align: int = 1) -> RowIndex:
        """Sorts choices by expert; choices of one expert keep token order. Each expert's rows are padded to a multiple
        of `align`. Without a capacity, the number of rows R is `most_rows(T * K, E, align)`. `capacity` is rounded up
        to a multiple of `align`; then R = E * capacity, and expert e has rows [e * capacity, (e + 1) * capacity)."""
        ...

    def sort_rows_dense(self, map_TE: Tensor, rows: int, capacity: int | None) -> RowIndex:
        """`sort_rows` for a dense bool routing map [T, E]; without a capacity, R = `rows`."""
        ...

    def permute(self, tokens_TH: Tensor, index: RowIndex) -> Tensor:
        """Gathers tokens [T, H] -> [R, H]; padding rows are 0. Differentiable (backward: sums each token's rows in the
        internal dtype and ignores padding rows)."""
        ...

    def unpermute(self, rows_RH: Tensor, index: RowIndex, num_tokens: int) -> Tensor:
        """Sums each token's rows in the internal dtype, [R, H] -> [T, H]; ignores padding rows, even if nan.
        Differentiable (backward: gathers; padding rows are 0)."""
        ...

    def gather_probs(self, probs: Tensor, index: RowIndex) -> Tensor:
        """Gathers probs [T, K] or [T, E] -> [R]; 0 for padding rows. Differentiable."""
        ...

    # exchanges between the ranks of one host through symmetric memory; see `push_channel.py`
    def mark_ranks(self, ids_TK: Tensor, owner_EP: Tensor) -> Tensor:
        """int32 [T]: bit p is set if `owner_EP` (bool) is True for one of the token's experts and rank p. P <= 31."""
        ...

    def push_tokens(
        self, tokens_TH: Tensor, ranks_T: Tensor, choices: tuple[Tensor, Tensor] | None, channel: PushChannel
    ) -> None:
        """Copies token t to slot [this rank, t] of every rank in `ranks_T` (see `mark_ranks`), and `choices`, ids and
        values [T, K] in promote(fp32, dtype), to all ranks."""
        ...

    def push_sums(self, rows_RH: Tensor, index: RowIndex, values_GK: Tensor | None, channel: PushChannel) -> None:
        """Sums the rows of each of the G = P * T tokens of `index` in promote(fp32, dtype) and stores the sum in slot
        [this rank, t] of the token's rank, if it has rows; likewise the values of the choices that have rows."""
        ...

    def sum_partials(
        self, ids_TK: Tensor, owner_EP: Tensor, channel: PushChannel, *, with_values: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Sums the slots [p, t] of the ranks p that hold experts of token t, in the order of the ranks and in
        promote(fp32, dtype) -> ([T, H], and the values [T, K] of the choices)."""
        ...

    def wait_for_peers(self, channel: PushChannel) -> None:
        """Waits until all ranks have pushed the current epoch; sets `channel.missing` after the timeout."""
        ...

    def acknowledge(self, channel: PushChannel) -> None:
        """Sets the acknowledgement flag of this rank to the current epoch, on all ranks."""
        ...

    # paged row storage
    def pack_rows(self, rows_RW: Tensor, valid: Tensor, pages: Pages) -> Tensor:
        """Allocates free pages and copies the first `valid` rows (int32 scalar on the device) to them. Returns the page
        table, int32 with one entry per page of R rows: a page, or `NONE` if it has no valid row. If too few pages are
        free, none is allocated, all entries with valid rows are `NO_ROOM`, and `pages.overflowed` becomes 1."""
        ...

    def unpack_rows(self, table: Tensor, num_rows: int, pages: Pages) -> Tensor:
        """Copies packed rows back -> [R, W]: nan where the entry is `NO_ROOM`, undefined beyond the valid rows."""
        ...

    def free_pages(self, table: Tensor, pages: Pages) -> None:
        """Frees the pages of a page table."""
        ...

    # optimizer, over flat buffers
    def sum_of_squares(self, flat: Tensor) -> Tensor:
        """Sum of squared elements, scalar in the internal dtype."""
        ...

    def adamw_(
        self,
        master: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        move: AdamWStep,
        weights: Tensor | None = None,
    ) -> None:
        """One AdamW step in place on flat tensors. `weights`, if given, is set to the updated masters in its own dtype
        (rounded as in `kernels/low_precision_state.py`). Afterwards `grad` is undefined."""
        ...

    def adamw_packed_(
        self, state: AdamWState, grad: Tensor, move: AdamWStep, weights: Tensor | None = None, first: int = 0
    ) -> None:
        """`adamw_` on low-precision state, computed in fp32. `first`: index of the first element, from which the random
        numbers of the stochastic rounding are derived."""
        ...


def most_rows(num_choices: int, num_experts: int, align: int) -> int:
    """Maximum number of rows for any routing: each expert with a choice has at most `align - 1` padding rows."""
    return (num_choices + min(num_choices, num_experts) * (align - 1)) // align * align


def internal_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which ops compute: promote(fp32, dtype)."""
    return torch.promote_types(torch.float32, dtype)


def all_finite(tensor: Tensor) -> Tensor:
    """bool scalar on the tensor's device: True if every element is finite. Reads once, allocates little."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.stack(torch.aminmax(tensor)).isfinite().all()


def mark_nonfinite(move: AdamWStep, *stored: Tensor) -> None:
    """Sets `move.nonfinite` if the step was applied and one of the updated tensors `stored` is not finite."""
    for tensor in stored:
        move.nonfinite.logical_or_(move.proceed & ~all_finite(tensor))
