"""ZeRO-1: every rank updates its shards, and the weights equal those of one rank."""

from dataclasses import replace

import pytest
import torch

from megatron_moe.config.exit_codes import RunError
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.registry import UPDATE_RULES
from megatron_moe.config.update_rules import OwnerAlignment
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.optim.clip_grads import gradient_norms
from megatron_moe.optim.distributed_optimizer import check_coverage
from megatron_moe.optim.grad_buffers import GradBuffers, finish_grads
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import local_shard
from tests.helpers.optim_parameters import BF16, FP64
from tests.helpers.optim_ranks import (
    KINDS,
    SPEC,
    Run,
    joined,
    make_optimizer,
    make_parameters,
    run,
    run_alone,
    step_with,
    total_gradient,
)
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT, FP64_LAYOUT

ZERO = DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=100)
LAYOUTS = {
    "dp2": ParallelConfig(world_size=2),
    "dp3": ParallelConfig(world_size=3),
    "dp4": ParallelConfig(world_size=4),
    "dp2-cp2": ParallelConfig(world_size=4, cp=2),
    "dp4-ep2": ParallelConfig(world_size=4, ep=2),
    "dp4-ep4": ParallelConfig(world_size=4, ep=4),
    "dp2-tp2-ep2": ParallelConfig(world_size=4, tp=2, ep=2),
    "dp2-tp2-etp2": ParallelConfig(world_size=4, tp=2, etp=2),
    "dp2-pp2": ParallelConfig(world_size=4, pp=2),
    "dp2-pp2-tp2-ep4": ParallelConfig(world_size=8, pp=2, tp=2, ep=4),
    "dp2-cp2-tp2-ep2-etp2": ParallelConfig(world_size=8, cp=2, tp=2, ep=2, etp=2),
}
EXACT_LAYOUTS = {name: config for name, config in LAYOUTS.items() if name != "dp3"}


def on_ranks(config: ParallelConfig, data_parallel: DataParallelConfig, **settings: object) -> list[Run]:
    return on_threads(config, lambda context: run(context, data_parallel, **settings))


@pytest.mark.parametrize("config", LAYOUTS.values(), ids=LAYOUTS)
def test_five_sharded_steps_give_the_weights_and_norms_of_one_rank(config: ParallelConfig) -> None:
    alone, runs = run_alone(config), on_ranks(config, ZERO)
    FP64_LAYOUT.check_all(joined(runs), joined([alone]), "weights")
    for rank, each in enumerate(runs):
        for step, norms in enumerate(each.norms):
            FP64_LAYOUT.check_all(norms, alone.norms[step], f"norms of step {step} on rank {rank}")


@pytest.mark.parametrize("config", EXACT_LAYOUTS.values(), ids=EXACT_LAYOUTS)
def test_sharding_changes_no_bit(config: ParallelConfig) -> None:
    plain, sharded = on_ranks(config, DataParallelConfig(ddp_bucket_size=100)), on_ranks(config, ZERO)
    EXACT.check_all(joined(sharded), joined(plain), "weights")
    EXACT.check_all(sharded[-1].norms[-1], plain[-1].norms[-1], "norms of the last step")


@pytest.mark.parametrize("bucket_size", [1, 500, None])
def test_the_size_of_buckets_changes_no_bit(bucket_size: int | None) -> None:
    config = LAYOUTS["dp4-ep2"]
    for pad in (False, True):
        other = DataParallelConfig(
            use_distributed_optimizer=True, ddp_bucket_size=bucket_size, ddp_pad_buckets_for_high_nccl_busbw=pad
        )
        EXACT.check_all(joined(on_ranks(config, other)), joined(on_ranks(config, ZERO)), "weights")


@pytest.mark.parametrize("alignment", ["block_1x32", "block_128x128", "matrix"])
@pytest.mark.parametrize("name", ["dp2", "dp4-ep2", "dp2-tp2-etp2"])
def test_ranges_of_unequal_size_change_no_bit(name: str, alignment: OwnerAlignment) -> None:
    with UPDATE_RULES.restored():
        UPDATE_RULES.register("aligned", replace(UPDATE_RULES.get("adam"), alignment=alignment))
        found = on_ranks(LAYOUTS[name], ZERO, optimizer=replace(SPEC, optimizer="aligned"))
    buffers = [buffer for run in found for buffer in run.optimizer.buffers.buffers]
    sizes = [sum(end - start for start, end in buffer.owned) for buffer in buffers]
    assert len(set(sizes)) > 2, "all ranges have equal size"
    EXACT.check_all(joined(found), joined(on_ranks(LAYOUTS[name], ZERO)), "weights")


def test_collectives_may_compute_the_mean() -> None:
    for name in ("dp3", "dp4-ep2", "dp2-tp2-ep2"):
        for sharded in (False, True):
            config = DataParallelConfig(use_distributed_optimizer=sharded, ddp_average_in_collective=True)
            found = joined(on_ranks(LAYOUTS[name], config))
            FP64_LAYOUT.check_all(found, joined([run_alone(LAYOUTS[name])]), f"weights of {name}")


@pytest.mark.parametrize("sharded", [False, True])
def test_every_token_has_equal_weight_if_ranks_have_different_numbers_of_tokens(sharded: bool) -> None:
    """Expert gradients are also divided by the tokens of all four ranks, although expert data parallelism is 2."""
    config, num_tokens = ParallelConfig(world_size=4, ep=2), (5, 0, 12, 1)

    def summed(name: str, rank: int) -> torch.Tensor:
        return num_tokens[rank] * total_gradient(name, rank, ParallelConfig())

    def steps(context: ParallelContext) -> Run:
        optimizer = make_optimizer(context, DataParallelConfig(use_distributed_optimizer=sharded, ddp_bucket_size=100))
        buffers = optimizer.buffers
        buffers.begin_step(1)
        for each in buffers.main_grads:
            if num_tokens[context.rank]:
                each.parameter.grad = local_shard(
                    summed(each.name, context.rank), each.parameter.boxes, each.parameter.meta
                )
        buffers.collect_autograd_grads()
        finish_grads(buffers, context, token_count=torch.tensor(sum(num_tokens), dtype=torch.float64))
        norms = gradient_norms(buffers, context)
        one, yes = torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.bool)
        optimizer.step(lr=3e-2, weight_decay=0.1, grad_scale=one, apply_update=yes)
        return Run(optimizer, [norms])

    def mean(name: str) -> torch.Tensor:
        # the experts of ep rank 0 receive the rows of ranks 0 and 2, the experts of ep rank 1 the rows of ranks 1 and 3
        total = sum(summed(name, rank) for rank in range(4))
        if KINDS[name][1].grid == "expert":
            halves = [summed(name, 0) + summed(name, 2), summed(name, 1) + summed(name, 3)]
            total = torch.cat([half[4 * ep : 4 * ep + 4] for ep, half in enumerate(halves)])
        return total / sum(num_tokens)

    means = {name: mean(name) for name in KINDS}
    alone = make_optimizer(ParallelContext.single(), DataParallelConfig())
    norms = step_with(alone, means, clip=0.0)
    found = on_threads(config, steps)
    FP64_LAYOUT.check_all(found[0].norms[0], norms, "norms")
    FP64_LAYOUT.check_all(joined(found), joined([Run(alone)]), "weights")


def test_each_rank_has_state_of_its_shards_only() -> None:
    def sizes(context: ParallelContext, data_parallel: DataParallelConfig) -> tuple[int, int]:
        optimizer = make_optimizer(context, data_parallel)
        buffers = optimizer.buffers.buffers
        return sum(state.size for state in optimizer.states), sum(b.layout.size for b in buffers)

    config = ParallelConfig(world_size=4)
    assert all(state * 4 == size for state, size in on_threads(config, lambda context: sizes(context, ZERO)))
    assert all(
        state == size for state, size in on_threads(config, lambda context: sizes(context, DataParallelConfig()))
    )


def test_low_precision_weights_are_the_rounded_weights_of_masters_on_all_ranks() -> None:
    config = ParallelConfig(world_size=4, ep=2)
    sharded = on_threads(config, lambda context: run(context, ZERO, precision=BF16), dtype=torch.bfloat16)
    plain = on_threads(config, lambda c: run(c, DataParallelConfig(), precision=BF16), dtype=torch.bfloat16)
    EXACT.check_all(joined(sharded), joined(plain), "weights")
    owned = {state.name for state in sharded[0].optimizer.named_state() if state.kind == "master"}
    assert owned, "a rank of bf16 weights keeps no master weights"


def test_gradients_in_bf16_may_be_summed_in_fp32() -> None:
    def total(context: ParallelContext, fp32_sums: bool) -> dict[str, torch.Tensor]:
        config = DataParallelConfig(use_distributed_optimizer=True, ddp_reduce_scatter_with_fp32_accumulation=fp32_sums)
        precision = BF16.__class__(params="bf16", grads="bf16", main_params_dtype="fp32")
        optimizer = make_optimizer(context, config, precision)
        # The sum of 256 + 1 + 1 + 1 in bf16 depends on the order, because bf16 cannot represent 257.
        value = 256.0 if context.rank == 0 else 1.0
        step_with(optimizer, {name: torch.full(shape, value) for name, (shape, _) in KINDS.items()})
        state = next(iter(optimizer.states))
        return state.grads[state.grads != 0]

    config = ParallelConfig(world_size=4)
    for fp32_sums, expected in ((True, torch.tensor(259.0 / 4).bfloat16()), (False, torch.tensor(64.0).bfloat16())):
        found = torch.cat(on_threads(config, lambda c, f=fp32_sums: total(c, f), dtype=torch.bfloat16))
        assert len(found) and (found == expected).all(), f"{found.unique()} with fp32 sums {fp32_sums}"


def test_a_rejected_step_keeps_every_bit_on_every_rank() -> None:
    def bits(context: ParallelContext, with_bad_step: bool) -> Run:
        optimizer = make_optimizer(context, ZERO)
        gradients = {name: total_gradient(name, 0, ParallelConfig()) for name in KINDS}
        step_with(optimizer, gradients)
        if with_bad_step:
            wild = {name: torch.full_like(gradient, torch.nan) for name, gradient in gradients.items()}
            assert not torch.isfinite(step_with(optimizer, wild, apply_update=False)["all"])
        step_with(optimizer, gradients)
        EXACT.check(optimizer.step_count, torch.tensor(2), "step count")
        return Run(optimizer)

    config = ParallelConfig(world_size=2)
    calm, shaken = (on_threads(config, lambda context, bad=bad: bits(context, bad)) for bad in (False, True))
    EXACT.check_all(joined(shaken), joined(calm), "weights")


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("config", LAYOUTS.values(), ids=LAYOUTS)
def test_the_ranks_together_own_every_element_once(config: ParallelConfig, sharded: bool) -> None:
    data_parallel = DataParallelConfig(use_distributed_optimizer=sharded, ddp_bucket_size=100)
    on_threads(config, lambda context: check_coverage(make_optimizer(context, data_parallel).buffers))


@pytest.mark.parametrize(
    ("change", "owned"), [({"tp_dim": None}, 24), ({"shared_stages": True}, 48)], ids=["half", "whole"]
)
def test_a_parameter_with_elements_that_no_rank_owns_is_named(change: dict, owned: int) -> None:
    """The parameter's metadata declare the shards of several ranks as copies, although they are different shards."""
    name = "decoder.layers.0.self_attention.linear_proj.weight"

    def check(context: ParallelContext) -> None:
        parameters = make_parameters(context)
        parameters[name].meta = replace(parameters[name].meta, **change)
        parameters[name].global_shape = (6, 8 if owned == 24 else 16)
        check_coverage(GradBuffers(parameters.items(), FP64, context, reference.bundle(), data_parallel=ZERO))

    with pytest.raises(RunError, match=f"own {owned} elements of {name}, which has {48 if owned == 24 else 96},"):
        on_threads(ParallelConfig(world_size=4, tp=2), check)


def test_masters_are_set_from_loaded_weights_and_reach_all_ranks() -> None:
    def loaded(context: ParallelContext) -> Run:
        optimizer = make_optimizer(context, ZERO, BF16)
        for each in optimizer.buffers.main_grads:
            each.parameter.data.fill_(3.0)
        optimizer.masters_from_weights()
        for state in optimizer.named_state():
            if state.kind == "master":
                assert (state.data == 3.0).all()
                state.data.fill_(5.0)
        optimizer.weights_from_masters()
        return Run(optimizer)

    weights = joined(on_threads(ParallelConfig(world_size=4, ep=2), loaded, dtype=torch.bfloat16))
    assert all((weight == 5.0).all() for weight in weights.values())
