"""A rank that does not take part in an exchange of the flex dispatcher is named after the timeout."""

from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.transport import SYMMETRIC
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.moe.token_dispatcher.base import ExpertComm
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.ranks import on_threads
from tests.moe.parallel.folded import parallel
from tests.moe.routings import draw, sparse

EXPERTS = 8


def test_late_rank_is_named_with_its_exchange_and_timeout() -> None:
    """Rank 1 leaves after one exchange, and rank 0 times out in the next one while it waits for tokens.

    The channels of rank 1 still exist, so nothing else can end that exchange.
    """

    def rank(ctx: ParallelContext) -> list[str]:
        comm = ExpertComm(ctx, reference.bundle(), SYMMETRIC, EXPERTS)
        dispatcher, found = comm.new_dispatcher(), []
        routing = sparse([[0, 7]] * 4, num_experts=EXPERTS)
        for timeout_s in (60.0, 0.5):
            ctx.timeout_s = timeout_s
            tokens = draw(4, 8).requires_grad_()
            rows, handle = dispatcher.finish_dispatch(dispatcher.start_dispatch(tokens, routing))
            problem = comm.peer_problem()
            if problem is not None:
                assert problem.rank == 1 and problem.code == ExitCode.OTHER_RANK
                return [*found, str(problem)]
            dispatcher.finish_combine(dispatcher.start_combine(rows, handle)).sum().backward()
            found.append("arrived")
            if ctx.rank == 1:
                return found
        return found

    first, second = on_threads(parallel(2, ep=2), rank)
    assert second == ["arrived"] and first[0] == "arrived"
    assert first[1] == (
        "rank 1 did not take part in the exchange of expert tokens within 0.45 s, which is 90% of the timeout of "
        "collectives (--distributed-timeout-minutes, --distributed-timeout-seconds-after-init); see the "
        "output of that rank"
    )
