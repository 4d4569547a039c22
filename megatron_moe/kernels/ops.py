"""Interface of the kernels: every op with shapes, dtypes and semantics.

`reference.py` defines each op in plain torch; every backend is tested against it. Letters are those of docs/shapes.md.
Internals run in promote(fp32, input dtype); outputs have the input's dtype unless an op says otherwise. Ops marked
"differentiable" bring their own backward; the others are called inside autograd Functions (`autograd.py`).
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
    """A matrix, or a stack of matrices, in low precision, as an operand of matrix products.

    A product reads the copy whose blocks lie along the dimension that it sums over: the forward product the rowwise
    copy, the weight gradient the columnwise one. No backend implements these operands yet; `KernelSet.of` rejects them.
    """

    rowwise: Tensor | None
    """Values quantised along the last dim; None: no product reads them."""
    rowwise_scales: Tensor | None
    """Scale of every block of `rowwise`."""
    columnwise: Tensor | None
    """Values quantised along the dim before the last; None: no product reads them."""
    columnwise_scales: Tensor | None
    """Scale of every block of `columnwise`."""
    block: tuple[int, int]
    """Elements that share a scale: along the dim that is summed over, and across it (1 x 128, 128 x 128, 1 x 32)."""


MatrixOperand = Tensor | QuantizedTensor
"""Operand of a matrix product."""
Matrix = TypeVar("Matrix", Tensor, MatrixOperand)


class GroupedPart(NamedTuple, Generic[Matrix]):
    """Operands of one microbatch for the weight gradient of an expert stack."""

    grad: Matrix
    """Gradient of the output, [R, O]."""
    rows: Matrix
    """Input, [R, I], sorted by expert."""
    offsets_e: Tensor
    """int32 end of every expert's rows; rows past the last offset hold nothing."""


@dataclass(frozen=True, kw_only=True)
class RowIndex:
    """Source of every row of the expert-sorted order. All on the device, sizes known to the host."""

    token_R: Tensor
    """int64 token of each row, -1: the row holds nothing."""
    choice_R: Tensor
    """int64 position of the row's probability in probs_TK (t * K + k) or probs_TE (t * E + e), -1: none."""
    offsets_E: Tensor
    """int32 end of every expert's rows; rows past the last offset hold nothing."""
    rows_TK: Tensor | None
    """int64 inverse: row of each choice, -1: none. None in the dense form."""


@dataclass(frozen=True, kw_only=True)
class PositionSpan:
    """Positions of some rows in the whole sequence; positions and segments define the mask."""

    chunks: tuple[range, ...]
    """Ranges of consecutive positions, known to the host, in the order of the rows."""
    segments_BS: Tensor | None = None
    """int64 number of the document of every row; attention stays inside it. None: one document."""

    def places(self, device: torch.device) -> Tensor:
        """int64 position of every row."""
        return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in self.chunks])

    def rows(self, start: int, stop: int) -> "PositionSpan":
        """Rows `start` to `stop` of these."""
        kept, first = [], 0
        for chunk in self.chunks:
            inside = chunk[max(start - first, 0) : max(stop - first, 0)]
            kept += [inside] if inside else []
            first += len(chunk)
        segments_BS = None if self.segments_BS is None else self.segments_BS[:, start:stop]
        return PositionSpan(chunks=tuple(kept), segments_BS=segments_BS)


DropoutKey = tuple[int | str, ...]
"""Key of a random draw (`parallel/rng.py`)."""


class AttentionInputs(NamedTuple):
    """Inputs of attention over a whole sequence. Value width E may differ from D."""

    q_SBND: Tensor
    k_SBGD: Tensor
    """Query head n reads group n // (N / G)."""
    v_SBGE: Tensor
    config: CoreAttentionConfig
    sinks_N: Tensor | None = None
    """Learned logit per head that the softmax also counts."""
    segments_BS: Tensor | None = None
    """int64 number of the document of every row; attention stays inside it. None: one document."""
    dropout_key: DropoutKey | None = None
    """None: no dropout."""
    head_part: Part = (0, 1)
    """(index, number): which part of all heads these are; the dropout mask is that part of the mask of all heads."""

    @property
    def has_sinks(self) -> bool:
        return self.sinks_N is not None or self.config.off_by_one

    @property
    def drops(self) -> bool:
        return self.config.dropout > 0.0 and self.dropout_key is not None


class AttentionBlock(NamedTuple):
    """Some queries and some keys of a sequence."""

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
    """Result of the forward over all keys, sinks included, with its gradient."""

    grad_SBNE: Tensor
    out_SBNE: Tensor
    """In the dtype of q."""
    lse_SBN: Tensor
    """Log-sum-exp of the logits, in promote(fp32, dtype)."""
    delta_SBN: Tensor
    """Sum of grad times out over the value width. Some backends read `out`, some `delta`."""


class QueryKeyTransform(NamedTuple):
    """Split of a QKV product into heads, with the norm and the rotation of queries and keys."""

    eps: float
    zero_centered: bool
    """Whether the norm's scale is 1 + weight."""
    cos_SBD: Tensor
    sin_SBD: Tensor
    interleaved: bool
    """Pairs of rotated dims: (0, 1), (2, 3) …; otherwise the two halves."""
    heads_per_group: int
    """Query heads of a query group."""


class AdamWState(NamedTuple):
    """Flat state of AdamW in the formats of `kernels/low_precision_state.py`."""

    master: PackedState
    exp_avg: PackedState
    exp_avg_sq: PackedState


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """Parameters of one AdamW step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: Tensor
    """int64 scalar on the device: number of the update, from 1, for the bias corrections."""
    grad_scale: Tensor
    """Scalar on the device; the gradient is multiplied by it (clipping)."""
    proceed: Tensor
    """bool scalar on the device. False: nothing changes, even if the gradient is not finite."""
    nonfinite: Tensor
    """bool scalar on the device, set to True when a stored weight or moment is not finite. Never reset."""


class BalanceSums(NamedTuple):
    """Sums for balancing losses, per set of tokens: plain scores, without groups, bias or dropping."""

    scores_GE: Tensor
    """Sums over tokens of the scores scaled to add up to 1 per token, in promote(fp32, dtype). Differentiable."""
    counts_GE: Tensor
    """int64: choices of a plain top-k, ordered by the scores that the router chooses by without its bias."""


class RoutedTokens(NamedTuple):
    """Result of the op `route` for the tokens of a microbatch."""

    ids_TK: Tensor
    """int64, in descending score; -1: none."""
    probs_TK: Tensor
    """Weights, in the dtype of the logits; 0 where the id is -1. Differentiable."""
    counts_E: Tensor
    """int64: choices per expert."""
    balance: BalanceSums | None
    z_sum: Tensor | None
    """Sum over tokens of logsumexp(logits)^2, scalar in promote(fp32, dtype). Differentiable."""


class Kernels(Protocol):
    """Kernel set that modules receive. One attribute per op."""

    # matrix products: forward, input gradient and weight gradient are three ops, so that quantised storage and delayed
    # weight gradients need no new interface
    def linear_forward(self, x: MatrixOperand, weight: MatrixOperand, bias: Tensor | None) -> Tensor:
        """x [..., I], weight [O, I], bias [O] -> [..., O]"""
        ...

    def linear_input_grad(self, grad: MatrixOperand, weight: MatrixOperand) -> Tensor:
        """grad [..., O], weight [O, I] -> [..., I]"""
        ...

    def linear_weight_grad(self, grad: MatrixOperand, x: MatrixOperand, out: Tensor, accumulate: bool) -> None:
        """grad [..., O], x [..., I]; writes or adds grad^T x to `out` [O, I], accumulated in the dtype of `out`, which
        may be wider than the input's."""
        ...

    def grouped_forward(self, rows: MatrixOperand, weight: MatrixOperand, offsets_e: Tensor) -> Tensor:
        """rows [R, I] sorted by expert, weight [e, O, I] -> [R, O]; rows past the last offset are undefined."""
        ...

    def grouped_input_grad(self, grad: MatrixOperand, weight: MatrixOperand, offsets_e: Tensor) -> Tensor:
        """grad [R, O], weight [e, O, I] -> [R, I]; rows past the last offset are undefined."""
        ...

    def grouped_weight_grad(self, parts: Sequence[GroupedPart[MatrixOperand]], out: Tensor, accumulate: bool) -> None:
        """Writes or adds the sum over parts, at least one, of grad_e^T rows_e of every expert e to `out` [e, O, I]; 0
        for an empty expert; accumulated in the dtype of `out`."""
        ...

    def embedding_grad(self, grad_TH: Tensor, ids_T: Tensor, out: Tensor, accumulate: bool) -> None:
        """Gradient of a table: writes or adds to row v of `out` [V, H] the sum of the gradients of the tokens with id
        v, in the dtype of `out`; 0 for an id without tokens."""
        ...

    # norms, positions, attention: differentiable
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        """x [..., H], weight [H]: x / sqrt(mean(x^2) + eps) * weight (or * (1 + weight))"""
        ...

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        """(residual + x, rounded to the dtype of x; `rms_norm` of that sum)"""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
        """x [..., H], weight and bias [H]: (x - mean(x)) / sqrt(var(x) + eps) * weight (or * (1 + weight)) + bias"""
        ...

    def rope(self, x_SBND: Tensor, cos_SBD: Tensor, sin_SBD: Tensor, interleaved: bool, start: int = 0) -> Tensor:
        """Rotates D' = cos.shape[-1] dims of each head from dim `start` on and leaves the rest. B of cos and sin may be
        1. Cos and sin hold each angle twice: as two halves. `interleaved`: the input pairs (0,1), (2,3) …, and so does
        the output."""
        ...

    def query_key_value(
        self, qkv_SBGC: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, transform: QueryKeyTransform
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Every group of C = (heads_per_group + 2) D channels holds its queries, a key and a value of D channels. With
        weights [D] queries and keys go through `rms_norm`, then both through `rope` -> query [S, B, N, D], key and
        value [S, B, G, D]; the value may be a view of qkv."""
        ...

    def latent_key_value(self, kv_SBNC: Tensor, shared_SBR: Tensor, key_width: int) -> tuple[Tensor, Tensor]:
        """Multi-head latent attention: kv holds the first `key_width` dims of every head's key and then its value; the
        other R dims of the key are shared by all heads -> key [S, B, N, key_width + R], value [S, B, N, C - key_width],
        which may be a view of kv."""
        ...

    def attention(self, inputs: AttentionInputs) -> Tensor:
        """-> [S, B, N, E]"""
        ...

    # attention between two parts of a sequence, for context parallelism: two ops, because the backward of one part
    # needs the forward's output and log-sum-exp over all parts
    def attention_block(self, block: AttentionBlock, out_SBNE: Tensor, lse_SBN: Tensor) -> None:
        """Merges attention of the block's queries to its keys into `out_SBNE` [Sq, B, N, E] and the log-sum-exp of the
        logits `lse_SBN` [Sq, B, N], in place, both in promote(fp32, dtype) and `out` contiguous. Both start at 0 and
        minus infinity. A backend may round its part of `out` to the dtype of q before it is added."""
        ...

    def attention_block_grad(
        self, block: AttentionBlock, found: AttentionResult, into: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Adds this block's share of the gradients of q, k and v to those of `into`, contiguous and in
        promote(fp32, dtype). A backend may round its share to the dtype of q before it is added."""
        ...

    # elementwise and loss: differentiable
    def activation(self, x_RF: Tensor, probs_R: Tensor | None, config: ActivationConfig) -> Tensor:
        """x [..., F], or [..., 2F] with the gate first when gated; times probs [...] if given -> [..., F]. Rows that
        hold nothing may be anything, nan included: where the probability is 0, the result and the gradient of x are 0,
        and the gradient of the probability is 0 for any finite incoming gradient."""
        ...

    def cross_entropy(self, logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        """-log softmax(logits)[label], in promote(fp32, dtype) -> [T]"""
        ...

    # routing
    def gate_product(self, hidden_TH: Tensor, weight_EH: Tensor, dtype: torch.dtype) -> Tensor:
        """hidden [T, H] times weight [E, H] transposed -> logits [T, E] in `dtype`; products and sums of forward and
        backward are those of `dtype`, which may be wider than the inputs. Differentiable; only the inputs are kept."""
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
        """Score, limit to groups, choose, normalise, scale, count, and sum what losses are made of.

        `bias_E` moves the choice, not the weights. Ties: the lowest id wins. `given_ids_TK` replays a choice; weights
        and sums are of today's logits, and where the id is -1 the weight is 0. Balancing 'sinkhorn',
        'quantile_balancing' and 'expert_choice' are the router's own business and come in through given ids. Tokens
        where `valid_T` is False choose nothing, count nowhere and have no gradient. With `balance_sets` = G there are
        sums for balancing losses: token t belongs to set t % G, and T is a multiple of G. Sums repeat bit for bit.
        Differentiable from weights and sums to logits; only the logits, the ids and `valid_T` are kept."""
        ...

    def count_tokens(self, ids_TK: Tensor, num_experts: int) -> Tensor:
        """int64 [E], ids of -1 not counted."""
        ...

    # rows
    def sort_rows(self, ids_TK: Tensor, num_experts: int, capacity: int | None, align: int = 1) -> RowIndex:
        """Rows sorted by expert, stable by token. Every expert's rows start and end at multiples of `align`: rows after
        its last token hold nothing. R = `most_rows(T * K, E, align)`. With `capacity`, rounded up to `align`,
        R = E * capacity and expert e owns rows [e * capacity, (e + 1) * capacity)."""
        ...

    def sort_rows_dense(self, map_TE: Tensor, rows: int, capacity: int | None) -> RowIndex:
        """`sort_rows` for a dense map [T, E]; without a capacity, R = `rows`."""
        ...

    def permute(self, tokens_TH: Tensor, index: RowIndex) -> Tensor:
        """[T, H] -> [R, H]; zeros in rows that hold nothing. Differentiable (backward: sum per token in promote(fp32,
        dtype), ignoring rows that hold nothing)."""
        ...

    def unpermute(self, rows_RH: Tensor, index: RowIndex, num_tokens: int) -> Tensor:
        """[R, H] -> [T, H]: sum of every token's rows in promote(fp32, dtype). Rows that hold nothing are ignored even
        if nan. Differentiable (backward: gather; zeros in rows that hold nothing)."""
        ...

    def gather_probs(self, probs: Tensor, index: RowIndex) -> Tensor:
        """probs [T, K] or [T, E] -> [R], 0 for rows that hold nothing. Differentiable."""
        ...

    # exchanges between the ranks of one host, through symmetric memory; see `push_channel.py`
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
        """Sums the rows of each of the G = P * T tokens of `index` in promote(fp32, dtype), and stores the sum in slot
        [this rank, t] of the token's rank, where it has rows; and so the values of the choices that have rows."""
        ...

    def sum_partials(
        self, ids_TK: Tensor, owner_EP: Tensor, channel: PushChannel, *, with_values: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Adds the slots [p, t] of the ranks that hold experts of token t, in the order of the ranks and in
        promote(fp32, dtype) -> ([T, H], and the values [T, K] of the choices)."""
        ...

    def wait_for_peers(self, channel: PushChannel) -> None:
        """Waits until all ranks have pushed the current epoch; sets `channel.missing` after the timeout."""
        ...

    def acknowledge(self, channel: PushChannel) -> None:
        """Sets the acknowledgement flag of this rank to the current epoch, on all ranks."""
        ...

    # rows in pages
    def pack_rows(self, rows_RW: Tensor, valid: Tensor, pages: Pages) -> Tensor:
        """Copies the first `valid` (int32 scalar on the device) rows to free pages and allocates these -> table int32
        [stretches of R rows]: the page of every stretch with a valid row, then `NONE`. If there are too few free pages,
        none is allocated, every entry is `NO_ROOM`, and `pages.overflowed` becomes 1."""
        ...

    def unpack_rows(self, table: Tensor, num_rows: int, pages: Pages) -> Tensor:
        """[R, W] as they were packed; nan where there was no room; rows past the valid ones are undefined."""
        ...

    def free_pages(self, table: Tensor, pages: Pages) -> None:
        """Frees the pages of a table."""
        ...

    # optimizer, over flat buffers
    def sum_of_squares(self, flat: Tensor) -> Tensor:
        """Scalar in promote(fp32, dtype)."""
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
        """One AdamW step in place on flat tensors. `weights`, the masters in another dtype, follow them if given
        (rounded as in `kernels/low_precision_state.py`). Afterwards `grad` is undefined."""
        ...

    def adamw_packed_(
        self, state: AdamWState, grad: Tensor, move: AdamWStep, weights: Tensor | None = None, first: int = 0
    ) -> None:
        """`adamw_` on low-precision state, with arithmetic in fp32. `first`: index of the first element, which keys the
        stochastic rounding."""
        ...


def most_rows(num_choices: int, num_experts: int, align: int) -> int:
    """Rows that no routing exceeds: each expert that has a choice adds at most `align - 1` rows of padding."""
    return (num_choices + min(num_choices, num_experts) * (align - 1)) // align * align


def internal_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of internals: promote(fp32, dtype)."""
    return torch.promote_types(torch.float32, dtype)


def all_finite(tensor: Tensor) -> Tensor:
    """bool scalar on the tensor's device: True if every element is finite. Reads once and allocates nothing large."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.stack(torch.aminmax(tensor)).isfinite().all()


def mark_nonfinite(move: AdamWStep, *stored: Tensor) -> None:
    """Sets `move.nonfinite` if the step was applied and one of the tensors that it stored is not finite."""
    for tensor in stored:
        move.nonfinite.logical_or_(move.proceed & ~all_finite(tensor))
