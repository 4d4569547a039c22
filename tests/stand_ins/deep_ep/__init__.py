"""Stand-in for deep_ep 1.2.1, intranode: the names, parameters, orders and layout rules of `deep_ep.Buffer`.

`HybridEPBuffer` is that of the branch hybrid-ep. Differences: any floating dtype, on the CPU, by collectives
of the process group, and finished on return.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .hybrid_ep_buffer import HybridEPBuffer as HybridEPBuffer


class EventOverlap:
    """Event of the buffer's stream."""

    def __init__(self, event: Any = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        assert self.event is not None, "an exchange without async_finish has no event"


class Config:
    """Tuning of the kernels."""

    def __init__(self, num_sms: int, *chunks: int) -> None:
        assert num_sms % 2 == 0
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return 1 << 20


class Buffer:
    """Communication buffer of a group."""

    num_sms = 20

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
    ) -> None:
        assert num_nvl_bytes > 0 and num_rdma_bytes == 0 and not low_latency_mode
        self.group, self.rank, self.group_size = group, group.rank(), group.size()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        assert topk_idx.dtype is torch.int64 and num_experts % self.group_size == 0
        rank_TK = torch.where(topk_idx < 0, -1, topk_idx // (num_experts // self.group_size))
        in_rank_TP = torch.stack([(rank_TK == rank).any(dim=1) for rank in range(self.group_size)], dim=1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return in_rank_TP.sum(dim=0).int(), None, per_expert, in_rank_TP, EventOverlap()

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int], tuple[Any, ...] | None, EventOverlap]:
        if isinstance(x, tuple):
            x, scales = x
            assert x.element_size() == 1 and scales.dtype in (torch.float32, torch.int32)
            assert scales.dim() == 2 and len(scales) == len(x)
            sizes, dtype = (handle, num_tokens_per_rank, None, is_token_in_rank), x.dtype
            options = (num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, num_worst_tokens, config)
            tokens, *others, event = self.dispatch(x.view(torch.uint8), *sizes, *options, async_finish=async_finish)
            in_rank_TP, num_rows = handle or others[3]
            return (tokens.view(dtype), self._receive(scales, in_rank_TP, num_rows)), *others, event
        assert x.dim() == 2 and x.is_contiguous()
        event = EventOverlap(async_finish or None)
        if handle is not None:
            assert topk_idx is None and topk_weights is None, "a cached handle takes no choices"
            in_rank_TP, num_rows = handle
            return self._receive(x, in_rank_TP, num_rows), None, None, [], None, event
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None and num_worst_tokens >= self.group_size * len(x)
        num_local = len(num_tokens_per_expert) // self.group_size
        ids = self._receive(topk_idx, is_token_in_rank, num_worst_tokens, fill=-1) - self.rank * num_local
        ids = ids.masked_fill((ids < 0) | (ids >= num_local), -1)
        weights = self._receive(topk_weights, is_token_in_rank, num_worst_tokens).masked_fill(ids < 0, 0)
        tokens = self._receive(x, is_token_in_rank, num_worst_tokens)
        return tokens, ids, weights, [], (is_token_in_rank, num_worst_tokens), event

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        assert x.is_contiguous() and (topk_weights is None or len(topk_weights) == len(x))
        in_rank_TP, _ = handle
        weights = None if topk_weights is None else self._return(topk_weights, in_rank_TP)
        return self._return(x, in_rank_TP), weights, EventOverlap(async_finish or None)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.group_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return parts

    def _receive(self, x: Tensor, in_rank_TP: Tensor, num_rows: int, fill: float | None = None) -> Tensor:
        """Rows for this rank by source and token; rows past the end are undefined unless `fill` is given."""
        marks = [mark[:, self.rank] for mark in self._gather(in_rank_TP)]
        held = torch.cat([part[mark] for part, mark in zip(self._gather(x), marks, strict=True)])
        undefined = torch.nan if x.is_floating_point() else 0x7F if x.dtype == torch.uint8 else -1
        rows = torch.full((num_rows, *x.shape[1:]), undefined if fill is None else fill, dtype=x.dtype)
        rows[: len(held)] = held
        return rows

    def _return(self, x: Tensor, in_rank_TP: Tensor) -> Tensor:
        """Sum over ranks of the rows of every token of this rank."""
        out = torch.zeros(len(in_rank_TP), *x.shape[1:], dtype=x.dtype)
        all_marks = self._gather(in_rank_TP)
        for rank, rows in enumerate(self._gather(x)):
            first = sum(int(marks[:, rank].sum()) for marks in all_marks[: self.rank])
            mine = in_rank_TP[:, rank]
            out[mine] += rows[first : first + int(mine.sum())]
        return out
