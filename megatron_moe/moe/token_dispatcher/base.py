"""Routing, rows, and the contract of a dispatcher.

dispatch(tokens, routing) -> (rows, ticket); combine(rows, ticket) -> tokens. Each is split into start and finish, so
that a schedule can put work between them.
"""

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from megatron_moe.kernels.ops import RowIndex


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Which experts every token visits, and with what weight."""

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
    """Rows that every expert gets exactly, padded, when the capacity is padded to; None: as many as were routed."""
    chosen_TK: Tensor | None = None
    """int64 ids as they were before capacity dropped any: what a recorder keeps, and what replays this routing."""


@dataclass(frozen=True, kw_only=True)
class DispatchedTokens:
    """Token copies grouped by expert slot, as the experts take and return them."""

    data: Tensor
    """[R, H] sorted by local expert; rows past offsets_e[-1] hold nothing."""
    probs_R: Tensor
    """Weight of each row; 0 for rows that hold nothing. Applied before the second expert matrix."""
    offsets_e: Tensor
    """int32 end of every local expert's rows, on the device."""
    index: RowIndex | None = None
    """Token-major storage: the first expert matrix gathers its rows through this. None: data is already sorted."""
    bound: int
    """Largest number of rows that can occur, known to the host."""
    overflow: Tensor | None = None
    """bool scalar on the device: the bound was exceeded and the step must be redone. None: cannot happen."""


Handle = TypeVar("Handle")


class Dispatcher(Protocol, Generic[Handle]):
    """Takes tokens to their experts and back."""

    host_reads: int
    """Host-device synchronisations of one dispatch at most: 0 local and all-gather, 1 for all-to-all, which needs
    splits."""

    def start_dispatch(self, tokens_TH: Tensor, routing: Routing) -> Any: ...
    def finish_dispatch(self, pending: Any) -> tuple[DispatchedTokens, Handle]: ...
    def start_combine(self, rows: DispatchedTokens, handle: Handle) -> Any: ...
    def finish_combine(self, pending: Any) -> Tensor:
        """[T, H]: the plain sum of every token's rows, accumulated in promote(fp32, dtype)."""
        ...
