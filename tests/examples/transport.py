"""A transport: every rank gathers all tokens, and a reduce-scatter returns the sums of the rows of each token.

pretrain_moe.py --import tests/examples/transport.py --moe-token-dispatcher-type flex
    --moe-flex-dispatcher-backend gather ...
"""

from megatron_moe.config.registry import TRANSPORTS
from megatron_moe.config.transport import ExpertTransport, RowBound, SentCopies


def gather_transport(comm):
    """Creates the transport of a run. A dry run does not call this function, so it does not import torch."""
    from megatron_moe.moe.token_dispatcher.flex import ExchangeState, ReceivedTokens, TokenTransport
    from megatron_moe.parallel.exchange import AllGather, ReduceScatter

    class GatherTransport(TokenTransport):
        def new_exchange(self, routing):
            return ExchangeState.of(routing, transport_state=None)

        def start_send_tokens(self, tokens_TH, exchange, probs_TK, fmt):
            choices = () if probs_TK is None else (exchange.ids_TK, probs_TK)
            return [AllGather(self._group).launch(each.contiguous()) for each in (tokens_TH, *choices)]

        def receive_tokens(self, work):
            tokens_GH, *choices = (wait() for wait in work)
            if not choices:  # gradients are exchanged without ids and probabilities
                return ReceivedTokens(tokens_GH, None, None)
            ids_GK = choices[0] - comm.ep.rank * self._num_local
            elsewhere = (ids_GK < 0) | (ids_GK >= self._num_local)
            return ReceivedTokens(tokens_GH, ids_GK.masked_fill(elsewhere, -1), choices[1])

        def start_send_sums(self, rows_RH, exchange, grad_probs):
            sums_GH = self._kernels.unpermute(rows_RH, exchange.index, self._group.size * len(exchange.ids_TK))
            sent = [sums_GH] if grad_probs is None else [sums_GH, grad_probs.contiguous()]
            return [ReduceScatter(self._group).launch(each) for each in sent]

        def finish_receive_sums(self, work, exchange):
            sums_TH, *grads = (wait() for wait in work)
            return sums_TH, grads[0] if grads else None

    return GatherTransport(comm)


TRANSPORTS.register(
    "gather",
    ExpertTransport(
        name="gather", transport=gather_transport, copies=SentCopies.ALL_RANKS, rows=RowBound.BOUNDED, spans_hosts=True
    ),
)
