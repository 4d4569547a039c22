"""Transport of the flex dispatcher over NCCL or gloo, for expert-parallel groups on several hosts.

Dispatch has two stages. A rank sends each token once to every host that has one of its experts, to the rank with the
same index there. That rank forwards the token to the ranks of its host that hold its experts. Combine has the same
stages in reverse. The expert ranks sum the rows of a token, the forwarding rank sums the partial sums of its host, and
the token's rank sums those of all hosts in the order of the hosts. Sums are computed in promote(fp32, dtype) and sent
in the dtype of the rows. Within one host only the second stage remains.

Sizes are exchanged once per dispatch, before the tokens are sorted, and read on the host. Gradients need no sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_moe.config.precision import OperandFormat
from megatron_moe.kernels.ops import Kernels, RowIndex, internal_dtype
from megatron_moe.moe.token_dispatcher.base import ExpertComm, Routing, first_rows
from megatron_moe.moe.token_dispatcher.flex import ExchangeState, ReceivedTokens, TokenTransport
from megatron_moe.parallel.exchange import AllGather, AllToAll, Wait
from megatron_moe.parallel.grid import expert_grid, split_by_host
from megatron_moe.parallel.streams import Event, make_host_copies, make_streams
from megatron_moe.parallel.symmetric_memory import is_emulated

_SIZES, _EXCHANGE = "expert sizes", "expert exchange"


class ExchangeSizes(NamedTuple):
    """Numbers of tokens that this rank sends to and receives from each rank of a group, and its number of rows."""

    to_hosts: tuple[int, ...]
    from_hosts: tuple[int, ...]
    to_ranks: tuple[int, ...]
    """Number of tokens that this rank forwards to each rank of its host."""
    from_ranks: tuple[int, ...]
    num_rows: int
    """Number of rows of this rank's experts."""


@dataclass(frozen=True)
class _ExchangeStage:
    """Exchange in which each token is sent once to every rank of a group that needs it."""

    kernels: Kernels
    over: AllToAll
    index: RowIndex
    """Index of the tokens in the order in which they are sent: by rank, then by token."""

    def send(self, tokens_TH: Tensor) -> Wait:
        """Starts to send tokens, or the gradients of their sums."""
        return self.over.launch(self.kernels.permute(tokens_TH, self.index))

    def send_back(self, sums_GH: Tensor) -> Callable[[], Tensor]:
        """Sends partial sums to the ranks from which their tokens came. The returned function waits for the partial
        sums of this rank's tokens and adds them in rank order."""
        wait = self.over.transposed.launch(sums_GH)
        assert self.index.rows_TK is not None
        num_tokens = len(self.index.rows_TK)
        return lambda: self.kernels.unpermute(wait(), self.index, num_tokens)


class _StagedState:
    """The two exchange stages (between hosts, then within the host) of one routing."""

    stages: tuple[_ExchangeStage, ...] = ()
    sizes: ExchangeSizes

    def __init__(self, index: RowIndex | None, buffer: Tensor, copied: Event, keep: tuple[Tensor, ...]) -> None:
        self.index = index
        """Index of the tokens by destination host, including unused entries after those that are sent; None within one
        host."""
        self.buffer, self.copied, self.keep = buffer, copied, keep
        """Pinned buffer with the exchange sizes, valid once `copied` has completed, and the device tensors from which
        they are copied."""


@dataclass
class _StagedWork:
    """An exchange in progress on the exchange stream."""

    results: Any
    done: Event
    keep: tuple[Any, ...]
    """Tensors that the exchange reads, kept alive until their stream has waited for the exchange."""


class HierarchicalTransport(TokenTransport):
    """Exchanges tokens in an all-to-all between hosts and one within each host. Ranks may have different numbers of
    tokens. The host reads the sizes of the exchange once per dispatch, so buffers have the exact number of received
    rows. A missing rank is detected by the timeout of the process group's collectives."""

    def __init__(self, comm: ExpertComm) -> None:
        super().__init__(comm)
        ctx = comm.ctx
        self._inter, self._intra = ctx.group("etp_ep_inter"), ctx.group("etp_ep_intra")
        self._num_ep, self._ep_rank = comm.ep.size, comm.ep.rank
        self._streams = make_streams(ctx.device, _SIZES, _EXCHANGE)
        self._copies = make_host_copies(ctx.device)
        self._is_emulated = is_emulated(comm.etp_ep, ctx)
        grid, by_host = expert_grid(ctx.config), split_by_host(self._group.ranks, ctx.config.ranks_per_host)
        order = [rank for ranks in by_host for rank in ranks]
        self._order_P = torch.tensor([self._group.ranks.index(rank) for rank in order], device=ctx.device)
        """Group indices of all ranks, by host, then by rank within the host."""
        places = [grid.coordinates(rank)["ep"] for rank in order]
        holders = [[at for at, place in enumerate(places) if place == ep] for ep in range(self._num_ep)]
        self._holders_EP = torch.tensor(holders, device=ctx.device).repeat_interleave(self._num_local, dim=0)
        """int64 [E, etp]: ranks that hold a part of an expert, in the order of `_order_P`."""

    def new_exchange(self, routing: Routing) -> ExchangeState:
        assert routing.ids_TK is not None
        ids_TK = self._defined(routing.ids_TK)
        needed_TP = self._needed(ids_TK)
        needed_TN = needed_TP.unflatten(1, (self._inter.size, self._intra.size)).any(dim=2)
        with self._streams.fork(_SIZES):
            rows_e = self._kernels.count_tokens(ids_TK, self._comm.num_experts).view(self._num_ep, -1).sum(dim=1)
            counts = torch.cat([needed_TN.sum(dim=0), needed_TP.sum(dim=0), rows_e])
            # collective over etp x ep: 8 (hosts + etp * ep + ep) bytes per rank; no gradient flows through sizes
            sizes = self._own_sizes(AllGather(self._group).launch(counts)())
            buffer = self._copies.host_buffer(len(sizes), sizes.dtype, exact=False)
            copied = self._copies.to_host(buffer, sizes)
        index = None if self._inter.size == 1 else self._by_rank(needed_TN)
        state = _StagedState(index, buffer, copied, (ids_TK, needed_TP, needed_TN, sizes))
        return ExchangeState.of(routing, state, ids_TK)

    def start_send_tokens(
        self, tokens_TH: Tensor, exchange: ExchangeState, probs_TK: Tensor | None, fmt: OperandFormat | None
    ) -> _StagedWork:
        assert fmt is None, "tokens are sent between hosts in their dtype"
        state: _StagedState = exchange.transport_state
        choices = None if probs_TK is None else _packed(exchange.ids_TK, probs_TK.to(internal_dtype(tokens_TH.dtype)))
        if choices is not None:
            state.sizes, state.keep = self.read_sizes(exchange), ()
        with self._streams.fork(_EXCHANGE):
            if choices is None:
                rows_GH = tokens_TH
                # collective over inter, then intra: H elements per token and host, and per token and rank
                for stage in state.stages:
                    rows_GH = stage.send(rows_GH)()
                received = ReceivedTokens(rows_GH, None, None)
            else:
                received = self._send_all(tokens_TH, choices, exchange)
            return _StagedWork(received, self._streams.record(), (tokens_TH, choices, exchange))

    def receive_tokens(self, work: _StagedWork) -> ReceivedTokens:
        return self._finished(work)

    def start_send_sums(self, rows_RH: Tensor, exchange: ExchangeState, grad_probs: Tensor | None) -> _StagedWork:
        stages: tuple[_ExchangeStage, ...] = exchange.transport_state.stages
        index, grad_GK = exchange.index, grad_probs
        assert index is not None and index.rows_TK is not None
        sums_TH = self._kernels.unpermute(rows_RH, index, len(index.rows_TK))
        values_TK = None if grad_GK is None else grad_GK.to(internal_dtype(rows_RH.dtype))
        keep = (sums_TH, values_TK, exchange)
        with self._streams.fork(_EXCHANGE):
            # collective over intra, then inter: H elements, and with gradients of probabilities (4 or 8) K bytes, per
            # received token
            for stage in reversed(stages):
                finish_send = stage.send_back(sums_TH)
                values_TK = None if values_TK is None else stage.send_back(values_TK)()
                sums_TH = finish_send()
            return _StagedWork((sums_TH, values_TK), self._streams.record(), keep)

    def finish_receive_sums(self, work: _StagedWork, exchange: ExchangeState) -> tuple[Tensor, Tensor | None]:
        sums_TH, values_TK = self._finished(work)
        return sums_TH, values_TK

    def _send_all(self, tokens_TH: Tensor, choices_TC: Tensor, exchange: ExchangeState) -> ReceivedTokens:
        """Sends tokens with ids and probabilities, and sets the stages of the exchange. A stage sends choices first, so
        that the next stage can sort them while the tokens are being sent."""
        state, ids_TK, sizes = exchange.transport_state, exchange.ids_TK, exchange.transport_state.sizes
        between_hosts = AllToAll(self._inter, sizes.to_hosts, sizes.from_hosts)
        within_host = AllToAll(self._intra, sizes.to_ranks, sizes.from_ranks)
        wait: Wait | None = None
        for over in (between_hosts, within_host):
            if over.group.size == 1:
                continue
            index = state.index if over is between_hosts else self._by_rank(self._needed_on_host(ids_TK))
            assert over.send is not None
            stage = _ExchangeStage(self._kernels, over, first_rows(index, sum(over.send)))
            # collective over inter or intra, backward the same: 4 K + (4 or 8) K bytes and then H elements per token
            wait_choices = over.launch(choices_TC[stage.index.token_R])
            wait = stage.send(wait() if wait else tokens_TH)
            choices_TC = wait_choices()
            ids_TK = self._defined(choices_TC[:, : ids_TK.shape[1]].long())
            state.stages = (*state.stages, stage)
        local_GK = ids_TK - self._ep_rank * self._num_local
        local_GK = local_GK.masked_fill((local_GK < 0) | (local_GK >= self._num_local), -1)
        probs_GK = choices_TC[:, ids_TK.shape[1] :].contiguous().view(internal_dtype(tokens_TH.dtype))
        assert wait is not None, "one rank holds all experts"
        return ReceivedTokens(wait(), local_GK, probs_GK, sizes.num_rows)

    def _defined(self, ids_TK: Tensor) -> Tensor:
        """Returns `ids_TK`, or -1 for every choice in emulation, where received values are undefined."""
        return torch.full_like(ids_TK, -1) if self._is_emulated else ids_TK

    def _needed_on_host(self, ids_TK: Tensor) -> Tensor:
        """Returns bool [T, ranks of this host]: True if the rank holds a part of one of the token's experts."""
        return self._needed(ids_TK).unflatten(1, (self._inter.size, self._intra.size))[:, self._inter.rank]

    def _needed(self, ids_TK: Tensor) -> Tensor:
        """Returns bool [T, P]: True if the rank (in the order of `_order_P`) holds a part of one of the token's
        experts."""
        num_ranks = self._group.size
        holders_TKP = self._holders_EP[ids_TK.clamp_min(0)].masked_fill(ids_TK[..., None] < 0, num_ranks)
        needed_TP = torch.zeros(len(ids_TK), num_ranks + 1, dtype=torch.bool, device=ids_TK.device)
        return needed_TP.scatter_(1, holders_TKP.flatten(1), True)[:, :num_ranks]

    def _by_rank(self, needed_TP: Tensor) -> RowIndex:
        """Token indices, sorted by the rank that needs the token, then by token."""
        num_ranks = needed_TP.shape[1]
        ranks_P = torch.arange(num_ranks, device=needed_TP.device)
        return self._kernels.sort_rows(torch.where(needed_TP, ranks_P, -1), num_ranks, None)

    def _own_sizes(self, counts: Tensor) -> Tensor:
        """Computes this rank's sizes, in the order of `ExchangeSizes`, from the counts of all ranks, int64 [P, ...]."""
        hosts, ranks = self._inter, self._intra
        by_host, by_rank, rows = counts.view(self._group.size, -1)[self._order_P].split(
            [hosts.size, self._group.size, self._num_ep], dim=1
        )
        shape = (hosts.size, ranks.size)
        to_host_NL = by_host.unflatten(0, shape)
        here_NLL = by_rank.unflatten(0, shape)[:, :, hosts.rank * ranks.size :][:, :, : ranks.size]
        return torch.cat(
            [
                to_host_NL[hosts.rank, ranks.rank],
                to_host_NL[:, ranks.rank, hosts.rank],
                here_NLL[:, ranks.rank].sum(dim=0),
                here_NLL[:, :, ranks.rank].sum(dim=0),
                rows[:, self._ep_rank].sum(dim=0, keepdim=True),
            ]
        )

    def read_sizes(self, exchange: ExchangeState) -> ExchangeSizes:
        """Reads the sizes of a routing on the host. An emulation without other ranks estimates them."""
        self._copies.synchronize(exchange.transport_state.copied)
        left = iter(exchange.transport_state.buffer.tolist())
        hosts, ranks = self._inter.size, self._intra.size
        to_hosts, from_hosts, to_ranks, from_ranks = (tuple(islice(left, n)) for n in (hosts, hosts, ranks, ranks))
        return ExchangeSizes(to_hosts, from_hosts, to_ranks, from_ranks, next(left))

    def _finished(self, work: _StagedWork) -> Any:
        """Makes the current stream wait for an exchange and returns its results."""
        self._streams.wait(work.done)
        for result in work.results:
            if isinstance(result, Tensor):
                self._streams.record_use(result)
        work.keep = ()
        return work.results


def _packed(ids_TK: Tensor, probs_TK: Tensor) -> Tensor:
    """Packs ids and the bits of probabilities into one int32 tensor."""
    return torch.cat([ids_TK.int(), probs_TK.contiguous().view(torch.int32)], dim=1)
