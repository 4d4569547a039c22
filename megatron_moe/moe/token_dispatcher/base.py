"""Interface of the token dispatchers, and the types that they exchange with router and experts.

dispatch(tokens, routing) -> (rows, handle); combine(rows, handle) -> tokens. Each is split into start and finish, so
that a schedule can put work between them.
"""

from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_moe.kernels.ops import Kernels, RowIndex
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Experts of every token, with their weights."""

    num_experts: int
    ids_TK: Tensor | None = None
    """int64 expert ids; -1: none (padding, dropped, fewer than K)."""
    probs_TK: Tensor | None = None
    """Weight of each choice, 0 where the id is -1."""
    map_TE: Tensor | None = None
    """bool; dense form, for expert choice where a token may visit any number of experts. Excludes ids_TK."""
    probs_TE: Tensor | None = None
    counts_E: Tensor
    """int64 tokens per expert on this rank, on the device."""
    capacity: int | None = None
    """Rows of every expert, padded, with `--moe-pad-expert-input-to-capacity`; None: as many as were routed."""
    chosen_TK: Tensor | None = None
    """int64 ids before drops by capacity; recorded to replay this routing."""

    @property
    def probs(self) -> Tensor:
        """`probs_TK`, or `probs_TE` in the dense form."""
        probs = self.probs_TE if self.probs_TK is None else self.probs_TK
        assert probs is not None, "a routing is sparse or dense"
        return probs


@dataclass(frozen=True, kw_only=True)
class DispatchedTokens:
    """Rows of this rank's experts, as the experts receive and return them."""

    data: Tensor
    """[R, H] sorted by local expert, rows after offsets_e[-1] hold nothing; with `index` [tokens, H]."""
    probs_R: Tensor
    """Weight of each row; 0 for rows that hold nothing. Applied before the second expert matrix."""
    offsets_e: Tensor
    """int32 end of every local expert's rows, on the device."""
    index: RowIndex | None = None
    """Token-major storage: the token in `data` of every row; the first expert matrix gathers its rows through it. None:
    `data` is sorted by expert. The experts return sorted rows."""
    bound: int
    """Largest number of rows that can occur, known to the host."""
    overflow: Tensor | None = None
    """bool scalar on the device: the routing needs more rows than `bound`, and the step must not be applied. None: no
    routing exceeds `bound`."""

    @classmethod
    def sorted(cls, tokens_TH: Tensor, index: RowIndex, probs_R: Tensor, kernels: Kernels) -> "DispatchedTokens":
        """Copies tokens to the rows of `index`; the bound is the number of its rows."""
        data_RH = kernels.permute(tokens_TH, index)
        return cls(data=data_RH, probs_R=probs_R, offsets_e=index.offsets_E, bound=len(probs_R))


@dataclass(frozen=True)
class CombineHandle:
    """State of a dispatch for combine."""

    index: RowIndex
    num_tokens: int
    """Tokens that were permuted: those of this rank, or of all ranks after an all-gather."""


Handle = TypeVar("Handle")


class Dispatcher(Protocol, Generic[Handle]):
    """Sends the tokens of one layer to the ranks of their experts, and the results back."""

    host_reads: int
    """Maximum host-device synchronisations of one dispatch: 1 for all-to-all, whose split sizes the host needs; else
    0."""
    can_overflow: bool
    """Whether `DispatchedTokens.overflow` is set."""

    def __init__(self, num_experts: int, comm: "ExpertComm") -> None:
        """`num_experts`: over all ranks."""
        ...

    def start_dispatch(self, tokens_TH: Tensor, routing: Routing) -> Any: ...
    def finish_dispatch(self, pending: Any) -> tuple[DispatchedTokens, Handle]: ...
    def start_combine(self, rows: DispatchedTokens, handle: Handle) -> Any: ...
    def finish_combine(self, pending: Any) -> Tensor:
        """[T, H]: the plain sum of every token's rows, accumulated in promote(fp32, dtype)."""
        ...


class ExpertComm:
    """Resources that the dispatchers of all layers of a run share."""

    overflow: Tensor | None
    """bool scalar on the device: a dispatch of this step on this rank exceeded its bound. None: that cannot happen.
    The same on all ranks, whether or not they hold an MoE layer, because they reduce it together."""

    transport: Any = None
    """Transport of the flex dispatcher; set by the first one."""

    def __init__(
        self,
        ctx: ParallelContext,
        kernels: Kernels,
        dispatcher: type[Dispatcher[Any]],
        *,
        row_capacity_factor: float | None = None,
        num_sms: int | None = None,
    ) -> None:
        """Creates the resources.

        Args:
            dispatcher: class of the dispatcher of every layer.
            row_capacity_factor: bound on the rows of a rank, relative to T * K; None: what no routing exceeds. Only for
                dispatchers that can overflow.
            num_sms: multiprocessors of a push; None: all.
        """
        self.ctx = ctx
        self.kernels = kernels
        self.ep, self.etp, self.etp_ep = ctx.group("ep"), ctx.group("etp"), ctx.group("etp_ep")
        self.dispatcher = dispatcher
        self.row_capacity_factor, self.num_sms = row_capacity_factor, num_sms
        self.overflow = None
        if dispatcher.can_overflow and row_capacity_factor is not None:
            self.overflow = torch.zeros((), dtype=torch.bool, device=ctx.device)

    def new_dispatcher(self, num_experts: int) -> Dispatcher[Any]:
        """The dispatcher of one layer."""
        return self.dispatcher(num_experts, self)

    def begin_step(self) -> None:
        """Clears `overflow`."""
        if self.overflow is not None:
            self.overflow.zero_()

    def record(self, rows: DispatchedTokens) -> None:
        """Sets `overflow` if these rows exceeded their bound."""
        if rows.overflow is not None:
            assert self.overflow is not None, f"{self.dispatcher.__name__} declares that it cannot overflow"
            self.overflow.logical_or_(rows.overflow)

    def any_overflow(self) -> Tensor | None:
        """`overflow` of any rank, bool scalar on the device. All ranks call it once per step."""
        if self.overflow is None:
            return None
        # world: 4 bytes
        return all_reduce_(self.overflow.float(), self.ctx.group("world"), "max") > 0


def index_rows(routing: Routing, kernels: Kernels, max_rows: int | None = None) -> tuple[RowIndex, Tensor]:
    """Rows of a routing, sorted by expert and then by token, and the probability of each [R].

    R is known to the host: T * K (T * E in the dense form), or E * capacity when experts are padded to their capacity.
    """
    if routing.map_TE is not None:
        index = kernels.sort_rows_dense(routing.map_TE, routing.map_TE.numel(), routing.capacity)
    else:
        assert routing.ids_TK is not None, "a routing is sparse or dense"
        index = kernels.sort_rows(routing.ids_TK, routing.num_experts, routing.capacity)
    probs_R = kernels.gather_probs(routing.probs, index)
    return (index, probs_R) if max_rows is None else (first_rows(index, max_rows), probs_R[:max_rows])


def first_rows(index: RowIndex, num_rows: int) -> RowIndex:
    """Index of the first `num_rows` rows; the others must hold nothing."""
    return replace(index, token_R=index.token_R[:num_rows], choice_R=index.choice_R[:num_rows])


def expert_of_rows(offsets_e: Tensor, num_rows: int) -> Tensor:
    """int64 [R]: local expert of each row; e for rows after the last offset."""
    rows = torch.arange(num_rows, device=offsets_e.device, dtype=offsets_e.dtype)
    return torch.searchsorted(offsets_e, rows, right=True)
