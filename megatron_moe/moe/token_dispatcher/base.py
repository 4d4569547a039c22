"""Interface of the token dispatchers, and the types that they exchange with router and experts.

dispatch(tokens, routing) -> (rows, handle); combine(rows, handle) -> tokens. Both are split into a start and a finish
function, so that a schedule can launch other work in between.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_moe.config.exit_codes import OtherRankProblem
from megatron_moe.config.precision import OperandFormat
from megatron_moe.config.registry import resolve
from megatron_moe.config.transport import ExpertTransport, RowBound
from megatron_moe.kernels.ops import Kernels, RowIndex
from megatron_moe.moe.expert_clones import ExpertClones
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.grid import expert_grid
from megatron_moe.parallel.parameter import Parameter, WeightGradQueue
from megatron_moe.precision.quantized_tensor import QuantizedTensor


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Experts selected for each token, with their probabilities."""

    num_experts: int
    ids_TK: Tensor | None = None
    """int64 expert ids; -1 for choices without an expert (padding token, dropped choice, token with fewer than K
    experts). None for expert choice."""
    probs_TK: Tensor | None = None
    """Probability of each choice, 0 where the id is -1; None for expert choice."""
    map_TE: Tensor | None = None
    """bool, True where the expert selected the token. Only for expert choice (dense form); `ids_TK` is then None."""
    probs_TE: Tensor | None = None
    counts_E: Tensor
    """int64 number of this rank's tokens per expert after drops, on the device."""
    capacity: int | None = None
    """Rows per expert after padding (expert choice, `--moe-pad-expert-input-to-capacity`); None means no padding."""
    chosen_TK: Tensor | None = None
    """int64 expert ids before capacity drops, for replaying this routing; None for expert choice."""

    @property
    def probs(self) -> Tensor:
        """`probs_TE` for expert choice (dense form), otherwise `probs_TK`."""
        probs = self.probs_TE if self.probs_TK is None else self.probs_TK
        assert probs is not None, "a Routing needs either ids_TK or map_TE"
        return probs


class RowFormats(NamedTuple):
    """Formats in which a layer's experts read their input rows and output gradients. FP8 formats have power-of-two
    scales, so that values are exact in the dtype of the activations."""

    gathers_in_fc1: bool = False
    """True if fc1 gathers its rows from the tokens (`DispatchedTokens.index`), which are quantised once per token;
    False if the dispatcher delivers rows."""
    tokens: OperandFormat | None = None
    """FP8 format in which tokens are sent, that of the inputs of fc1; None means the dtype of the activations."""
    grads: OperandFormat | None = None
    """FP8 format in which the gradient of combine is sent, that of the output gradients of fc2; None means the dtype of
    these gradients."""


PLAIN_ROWS = RowFormats()


@dataclass(frozen=True, kw_only=True)
class DispatchedTokens:
    """Input rows or output rows of this rank's experts."""

    data: Tensor
    """Rows [R, H] sorted by local expert, with padding from offsets_e[-1] on; or tokens [T, H] if `index` is set."""
    probs_R: Tensor
    """Routing probability of each row; 0 for padding rows."""
    offsets_e: Tensor
    """int32 end of each local expert's rows (exclusive), on the device."""
    index: RowIndex | None = None
    """Token of each row. If set, `data` contains tokens, and fc1 of the experts gathers its input rows from them. None
    if `data` already contains the sorted rows, as in the output of the experts."""
    quantized: QuantizedTensor | None = None
    """Rowwise FP8 copy from which `data` was computed; None unless tokens were sent in FP8."""
    sums_tokens: bool = False
    """Whether the experts may sum the rows of each token themselves. They then return the sums [T, H] in `data` and
    keep `index`."""
    bound: int
    """Upper bound of the number of rows, known to the host."""
    overflow: Tensor | None = None
    """int32 scalar on the device: number of rows that the routing needs in addition to `bound`. If it is not 0, rows
    are missing, and the step must be repeated with a larger bound. None if the dispatcher cannot overflow."""
    clones: ExpertClones | None = None
    """Clones of other ranks' experts, whose rows follow those of this rank's experts and for which `offsets_e` has
    further entries; None without clones."""


@dataclass(frozen=True)
class CombineHandle:
    """State that a dispatch passes to its combine."""

    index: RowIndex
    num_tokens: int
    """Number of tokens to which `index` refers: those of this rank, or those of all ranks after an all-gather."""


Handle = TypeVar("Handle")


class Dispatcher(ABC, Generic[Handle]):
    """Sends the tokens of one layer to the ranks of their experts, and the results back."""

    def __init__(self, comm: "ExpertComm", formats: RowFormats = PLAIN_ROWS) -> None:
        """`formats` may name FP8 formats and a gather in fc1 only if the transport of `comm` supports them."""
        self.comm, self.kernels, self.formats = comm, comm.kernels, formats
        self.num_local = comm.num_experts // comm.ep.size

    def register_weights(self, weights: Sequence[Parameter]) -> tuple[Parameter, ...]:
        """Called before the first dispatch with the stacked weights of the layer's experts. A dispatcher that sends
        weights to other ranks keeps them and returns the weights that `start_dispatch` reads; others return ()."""
        return ()

    def sorted_rows(self, tokens_TH: Tensor, index: RowIndex, probs_R: Tensor) -> DispatchedTokens:
        """Copies tokens to expert-sorted rows according to `index`, unless fc1 gathers its rows itself. The result's
        `bound` counts padding rows too."""
        in_fc1 = self.formats.gathers_in_fc1
        data, kept = (tokens_TH, index) if in_fc1 else (self.kernels.permute(tokens_TH, index), None)
        return DispatchedTokens(data=data, probs_R=probs_R, offsets_e=index.offsets_E, index=kept, bound=len(probs_R))

    @abstractmethod
    def start_dispatch(self, tokens_TH: Tensor, routing: Routing) -> Any: ...
    @abstractmethod
    def finish_dispatch(self, pending: Any) -> tuple[DispatchedTokens, Handle]: ...
    @abstractmethod
    def start_combine(self, rows: DispatchedTokens, handle: Handle) -> Any: ...
    @abstractmethod
    def finish_combine(self, pending: Any) -> Tensor:
        """Returns the unweighted sum of each token's expert outputs [T, H], accumulated in promote(fp32, dtype)."""


class LateRank(NamedTuple):
    """Rank that did not take part in an exchange within the timeout."""

    rank: int
    """Global rank."""
    content: str
    """Content of the slots that did not arrive: "tokens" (dispatch and the gradient of combine) or "sums" (combine and
    the gradient of dispatch)."""
    timeout_s: float


class ExpertComm:
    """Transport, process groups, kernels and overflow flag that the token dispatchers of all layers share."""

    overflow: Tensor | None
    """fp32 scalar on the device: largest overflow of a dispatch of this step on this rank, relative to its bound. None
    if rows have no bound. Ranks without MoE layers have it too, because all ranks reduce it together."""

    transport: Any
    """`Transport` of the flex dispatcher; None for other dispatchers."""
    weight_grads: WeightGradQueue | None = None
    """Queue of delayed weight gradients that run while gradients are exchanged; None if they are not delayed."""
    note: str | None = None
    """Log line about the transport; None if it is the one that a flag names."""

    def __init__(
        self,
        ctx: ParallelContext,
        kernels: Kernels,
        kind: ExpertTransport,
        num_experts: int,
        *,
        row_capacity_factor: float | None = None,
        row_alignment: int = 1,
        overlaps_microbatches: bool = False,
        options: Any = None,
    ) -> None:
        """Creates the resources.

        Args:
            kind: transport of the run.
            num_experts: number of experts of an MoE layer on all ranks together.
            row_capacity_factor: bound on the rows of a rank, relative to T * K, for transports with bounded rows; None
            means a bound that no routing exceeds.
            row_alignment: multiple to which the rows of an expert are padded.
            overlaps_microbatches: whether exchanges of a forward and of a backward may be in progress together.
            options: options of the transport (`ExpertTransport.options`); None means its defaults.
        """
        self.ctx, self.kernels, self.kind, self.num_experts = ctx, kernels, kind, num_experts
        self.ep, self.etp, self.etp_ep = ctx.group("ep"), ctx.group("etp"), ctx.group("etp_ep")
        self.row_capacity_factor, self.row_alignment = row_capacity_factor, row_alignment
        self.overlaps_microbatches, self.options = overlaps_microbatches, options
        self.overflow = None
        if kind.rows is RowBound.BOUNDED and row_capacity_factor is not None:
            self.overflow = torch.zeros((), device=ctx.device)
        self.transport = None if kind.transport is None else resolve(kind.transport)(self)

    def new_dispatcher(self, formats: RowFormats = PLAIN_ROWS) -> Dispatcher[Any]:
        """Creates the dispatcher of one layer."""
        return resolve(self.kind.dispatcher)(self, formats)

    def begin_step(self) -> None:
        """Clears `overflow` before a step."""
        if self.overflow is not None:
            self.overflow.zero_()

    def record_overflow(self, rows: DispatchedTokens) -> None:
        """Updates `overflow` with the dispatch of `rows`."""
        if rows.overflow is not None:
            assert self.overflow is not None, f"the transport {self.kind.name} declares that it cannot overflow"
            torch.maximum(self.overflow, rows.overflow / max(rows.bound, 1), out=self.overflow)

    def raise_row_bound(self, overflow: float) -> None:
        """Raises the row bound so that a step with this overflow fits, with 5 % to spare."""
        assert self.row_capacity_factor is not None, "rows without a bound cannot overflow"
        self.row_capacity_factor *= 1.05 * (1 + overflow)

    @contextmanager
    def without_row_bound(self) -> Iterator[None]:
        """Removes the row bound, for forward passes that keep no activations."""
        factor, self.row_capacity_factor = self.row_capacity_factor, None
        yield
        self.row_capacity_factor = factor

    def overlap_weight_grads(self) -> None:
        """Computes the delayed weight gradients; called in the backward between start and finish of an exchange."""
        if self.weight_grads is not None:
            self.weight_grads.run()

    def peer_problem(self) -> OtherRankProblem | None:
        """Returns an error that names a rank whose tokens did not arrive in time, or None if there is none so far. Does
        not synchronise with the device."""
        late = None if self.transport is None else self.transport.late_rank()
        if late is None:
            return None
        return OtherRankProblem(
            f"rank {late.rank} did not take part in the exchange of expert {late.content} within {late.timeout_s:g} "
            f"s, which is {late.timeout_s / self.ctx.timeout_s:.0%} of the timeout of collectives "
            "(--distributed-timeout-minutes, --distributed-timeout-seconds-after-init); see the output of that rank",
            late.rank,
        )


def slots_of_choices(ids_TK: Tensor, holders: Tensor, num_local: int, none: int) -> Tensor:
    """Converts expert ids [T, K] to the numbers rank * `num_local` + local expert, [T, K * etp], one for each rank that
    holds a part of the expert. `holders`: see `group_ranks_by_ep_rank`. `none`: number of choices without an expert."""
    ranks_TKP = holders[ids_TK.clamp_min(0) // num_local]
    slots_TKP = ranks_TKP * num_local + (ids_TK % num_local)[..., None]
    return slots_TKP.masked_fill((ids_TK < 0)[..., None], none).flatten(1)


def group_ranks_by_ep_rank(comm: ExpertComm) -> Tensor:
    """Indices, in the etp x ep group, of the ranks that hold the experts of each ep rank: int64 [ep, etp]."""
    grid = expert_grid(comm.ctx.config)
    places = [grid.coordinates(rank)["ep"] for rank in comm.etp_ep.ranks]
    holders = [[rank for rank, place in enumerate(places) if place == ep] for ep in range(comm.ep.size)]
    return torch.tensor(holders, device=comm.ctx.device)


def index_rows(
    routing: Routing, kernels: Kernels, max_rows: int | None = None, *, align: int = 1
) -> tuple[RowIndex, Tensor]:
    """Returns the `RowIndex` and the probabilities of a routing's R rows, which are sorted by expert, then by token.

    R is known on the host: E * capacity if experts are padded, otherwise T * K (T * E if `map_TE` is set). `max_rows`:
    the result is shortened to this number of rows; all further rows must be padding. `align`: multiple to which each
    expert's rows are padded, only if `map_TE` is None; R then includes the largest number of padding rows."""
    if routing.map_TE is not None:
        index = kernels.sort_rows_dense(routing.map_TE, routing.map_TE.numel(), routing.capacity)
    else:
        assert routing.ids_TK is not None, "a Routing needs either ids_TK or map_TE"
        index = kernels.sort_rows(routing.ids_TK, routing.num_experts, routing.capacity, align)
    probs_R = kernels.gather_probs(routing.probs, index)
    return (index, probs_R) if max_rows is None else (first_rows(index, max_rows), probs_R[:max_rows])


def first_rows(index: RowIndex, num_rows: int) -> RowIndex:
    """Shortens `index` to its first `num_rows` rows; all further rows must be padding."""
    return replace(index, token_R=index.token_R[:num_rows], choice_R=index.choice_R[:num_rows])


def expert_of_each_row(offsets_e: Tensor, num_rows: int) -> Tensor:
    """Local expert of each row, int64 [R]. Padding rows have the index len(offsets_e), one past the last expert."""
    rows = torch.arange(num_rows, device=offsets_e.device, dtype=offsets_e.dtype)
    return torch.searchsorted(offsets_e, rows, right=True)
