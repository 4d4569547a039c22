"""Data-parallel reduction: ranks together get the gradients of one rank that saw all microbatches."""

import torch
from torch import Tensor

from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.optim.clip_grads import clip_coefficient, gradient_norms
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.grad_buffers import finish_grads
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.optim_parameters import FP64, main_grads, make_buffers, make_gradients, make_parameters, set_grads
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT, FP64_LAYOUT

NUM_RANKS = 2


def mean_over(ranks: int) -> dict[str, Tensor]:
    shares = [make_gradients(rank) for rank in range(ranks)]
    return {name: sum(share[name] for share in shares) / ranks for name in shares[0]}


def finished(context: ParallelContext, bucket_size: int | None, tokens: float | None) -> dict[str, Tensor]:
    buffers = make_buffers(
        make_parameters(), context=context, data_parallel=DataParallelConfig(ddp_bucket_size=bucket_size)
    )
    set_grads(buffers, make_gradients(context.rank))
    count = None if tokens is None else torch.tensor(tokens, dtype=torch.float64)
    finish_grads(buffers, context, token_count=count)
    return main_grads(buffers)


def on_ranks(bucket_size: int | None = None, tokens: float | None = None) -> list[dict[str, Tensor]]:
    return on_threads(ParallelConfig(world_size=NUM_RANKS), lambda context: finished(context, bucket_size, tokens))


def test_gradients_of_both_grids_become_the_mean_over_ranks() -> None:
    for rank, found in enumerate(on_ranks()):
        FP64_LAYOUT.check_all(found, mean_over(NUM_RANKS), f"rank {rank}")


def test_small_and_large_buckets_give_the_same_bits() -> None:
    EXACT.check_all(on_ranks(bucket_size=1)[0], on_ranks()[0], "gradients")


def test_per_token_gradients_are_summed_and_divided_once_by_all_tokens() -> None:
    expected = {name: gradient * NUM_RANKS / 37.0 for name, gradient in mean_over(NUM_RANKS).items()}
    for found in on_ranks(tokens=37.0):
        FP64_LAYOUT.check_all(found, expected, "gradients")


def test_a_batch_without_any_token_leaves_finite_gradients() -> None:
    found = finished(ParallelContext.single(), None, 0.0)
    assert all(torch.isfinite(gradient).all() for gradient in found.values())


def test_one_rank_keeps_its_gradients_to_the_bit() -> None:
    EXACT.check_all(finished(ParallelContext.single(), None, None), make_gradients(0), "gradients")


def test_five_steps_on_two_ranks_equal_one_rank_with_the_same_microbatches() -> None:
    def train(context: ParallelContext) -> dict[str, Tensor]:
        parameters = make_parameters()
        buffers = make_buffers(parameters, context=context)
        optimizer = Optimizer(buffers, FP64)
        ranks = range(NUM_RANKS) if context.config.world_size == 1 else [context.rank]
        for step in range(5):
            shares = [make_gradients(10 * step + rank) for rank in ranks]
            set_grads(buffers, {name: sum(share[name] for share in shares) / len(shares) for name in shares[0]})
            finish_grads(buffers, context)
            scale = clip_coefficient(gradient_norms(buffers, context)["all"], 0.5)
            optimizer.step(lr=0.03, weight_decay=0.1, grad_scale=scale, proceed=torch.tensor(True))
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}

    first, second = on_threads(ParallelConfig(world_size=NUM_RANKS), train)
    FP64_LAYOUT.check_all(first, train(ParallelContext.single()), "weights of two ranks and of one")
    EXACT.check_all(second, first, "weights of both ranks")
