"""Paged stash: identical results for any order of microbatches, less memory, and detection of too few pages."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_moe.build import build_model, build_trainer
from megatron_moe.config.emulation import EmulationConfig
from megatron_moe.config.memory import MemoryConfig, PagedStashConfig, RecomputeConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.run import KernelConfig, RunPlan
from megatron_moe.config.training import BatchConfig
from megatron_moe.cost_model.memory import RankMemory, pages_of_rank
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.memory.paged_stash import PagedStash
from megatron_moe.memory_emulation.rank import emulate_rank, make_batches
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.step_results import StepOutcome
from megatron_moe.train.train_state import TrainState
from megatron_moe.train.trainer import Trainer
from tests.helpers import tiny
from tests.helpers.modules import module_of
from tests.helpers.pipelines import laid_out, run_steps
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT

PAGES = PagedStashConfig(moe_paged_stash_page_size=4, moe_paged_stash_buffer_size_factor_cuda=4.0)
ACT = RecomputeConfig(recompute_modules=("moe_act",))
ALL_GATHER = tiny.moe(dispatcher="allgather")
KERNELS = reference.bundle()


def over_experts(stash: PagedStashConfig | None, *, num_ranks: int = 2, **changes) -> RunPlan:
    """Builds a plan of expert-parallel ranks with an optional paged stash."""
    parallel = ParallelConfig(world_size=num_ranks, ep=num_ranks)
    model, memory = tiny.model(moe_config=ALL_GATHER), MemoryConfig(paged_stash=stash)
    config = tiny.plan(model=model, memory=memory, parallel=parallel)
    return replace(config, batch=BatchConfig(micro_batch_size=1, global_batch_size=2 * num_ranks), **changes)


def trainer_of(plan: RunPlan, context: ParallelContext) -> Trainer:
    return build_trainer(plan, context, build_model(plan, context, KERNELS), KERNELS)


def stash_of(trainer: Trainer) -> PagedStash:
    stash = trainer.model.saved_tensors.stash
    assert stash is not None
    return stash


def figures_and_free_pages(plan: RunPlan, context: ParallelContext) -> dict[str, Tensor]:
    trainer = trainer_of(plan, context)
    figures = run_steps(plan, trainer, TrainState(), 1)
    if plan.memory.paged_stash is not None:
        stash = stash_of(trainer)
        assert stash._pages and not stash.overflowed
        for pages in stash._pages.values():
            assert (pages.ends[2] > 0) == (pages.num_host > 0) and pages.ends[3] - pages.ends[2] == pages.num_host
            assert pages.ends[1] - pages.ends[0] == pages.num and pages.ends[0] > 0, "every page is free again"
            assert sorted(pages.free_P[: pages.num].tolist()) == list(range(pages.num))
    return figures


def check_identical(plain: RunPlan, paged: RunPlan) -> None:
    expected = on_threads(plain.parallel, lambda context: figures_and_free_pages(plain, context))
    got = on_threads(paged.parallel, lambda context: figures_and_free_pages(paged, context))
    for rank, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        EXACT.check_all(mine, theirs, f"rank {rank}")


def test_steps_with_expert_parallelism_are_identical_to_the_bit() -> None:
    """With recompute, the activation is recomputed from the output of fc1, which is unpacked from pages."""
    check_identical(over_experts(None), over_experts(None, memory=MemoryConfig(paged_stash=PAGES, recompute=ACT)))


def test_rows_that_do_not_fit_on_the_device_are_saved_on_the_host() -> None:
    """The device buffer has pages for a quarter of the rows of a balanced load, plus one page per tensor."""
    config = PagedStashConfig(
        moe_paged_stash_page_size=4,
        moe_paged_stash_buffer_size_factor_cuda=0.25,
        moe_paged_stash_buffer_size_factor_cpu=4.0,
    )
    spilled = over_experts(config)
    check_identical(over_experts(None), spilled)
    host = pages_of_rank(spilled, 0, host=True)
    assert host == pages_of_rank(over_experts(PAGES), 0) and pages_of_rank(over_experts(PAGES), 0, host=True) == {}
    size = sum(width * (num + 1) for width, num in host.items()) * config.moe_paged_stash_page_size
    number = RankMemory(spilled).sizes.activation_itemsize
    assert RankMemory(spilled).of_rank(0).on_host == size * number
    emulated = {"emulation": EmulationConfig(), "kernels": KernelConfig()}
    on_device = over_experts(replace(config, moe_paged_stash_buffer_size_factor_cpu=0.0))
    found = [
        emulate_rank(replace(each, **emulated), 1, torch.device("meta"), num_microbatches=2).timeline.peak()
        for each in (spilled, on_device)
    ]
    assert found[0].total <= found[1].total, "host pages are not device memory"


def test_biases_of_experts_save_no_rows() -> None:
    """The backward of fc2's bias saves only probabilities, so the pages are sufficient for all rows of the step."""
    moe = replace(ALL_GATHER, experts=replace(ALL_GATHER.experts, bias=True))
    saved: list[tuple[int, ...]] = []

    def kept(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    stack = module_of(moe, ParallelContext.single(dtype=torch.float64), KERNELS).experts.linear_fc2
    rows, probs = torch.randn(6, stack.weight.shape[2]).double(), torch.rand(6).double().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
        stack(rows, torch.tensor([1, 2, 3, 4, 4, 5, 6, 6], dtype=torch.int32), probs_R=probs)
    assert saved.count((6, stack.weight.shape[1])) == 0, "an expanded bias"
    model = tiny.model(moe_config=moe)
    check_identical(
        over_experts(None, model=model), over_experts(None, model=model, memory=MemoryConfig(paged_stash=PAGES))
    )


def test_pages_of_interleaved_stages_are_freed_in_the_order_of_their_backwards() -> None:
    """Two ranks with two stages each have exactly as many pages as the schedule needs."""
    config = tiny.plan(model=tiny.model(num_layers=4), batch=BatchConfig(micro_batch_size=1, global_batch_size=4))
    plain = laid_out(config, "Et|t|t|tL", 2)
    check_identical(
        plain,
        replace(
            plain,
            memory=MemoryConfig(
                paged_stash=PagedStashConfig(moe_paged_stash_page_size=4, moe_paged_stash_buffer_size_factor_cuda=1.0)
            ),
        ),
    )


def one_step(plan: RunPlan, context: ParallelContext) -> tuple[StepOutcome, bool, bool]:
    """Runs a step; returns its outcome, whether weights are unchanged, and whether this rank ran out of pages."""
    trainer = trainer_of(plan, context)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    outcome = trainer.step(make_batches(plan, context, 2), TrainState())
    same = all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())
    return outcome, same, bool(stash_of(trainer).overflowed)


def test_a_step_that_runs_out_of_pages_changes_no_weight_on_any_rank() -> None:
    """All tokens are equal and select the same two experts, whose ranks have pages for a quarter of all rows.

    `tests/train/test_overflow.py` tests the repetition of such steps.
    """
    plan = over_experts(
        PagedStashConfig(moe_paged_stash_page_size=4, moe_paged_stash_buffer_size_factor_cuda=1.0), num_ranks=4
    )
    found = on_threads(plan.parallel, lambda context: one_step(plan, context))
    assert any(overflowed for *_, overflowed in found) and not all(overflowed for *_, overflowed in found)
    for outcome, same, _ in found:
        assert not outcome.apply_update and not outcome.norms["all"].isfinite() and same
        assert outcome.extra_scalars["stash_overflow"] == 1


def test_pages_are_sized_for_the_peak_of_the_schedule() -> None:
    """A microbatch has 2 sequences of 32 tokens with two experts each; saved tensors have widths 32, 48 and 24."""
    config = PagedStashConfig(moe_paged_stash_page_size=64, moe_paged_stash_buffer_size_factor_cuda=1.5)
    one_rank = replace(tiny.plan(), memory=MemoryConfig(paged_stash=config))
    assert pages_of_rank(one_rank, 0) == {width: 2 * (3 + 1) for width in (32, 48, 24)}
    with_recompute = replace(one_rank, memory=MemoryConfig(paged_stash=config, recompute=ACT))
    assert pages_of_rank(with_recompute, 0) == {width: 2 * (3 + 1) for width in (32, 48)}
    padded = replace(one_rank, model=tiny.model(moe_config=tiny.moe(row_alignment=32)))
    num_experts = tiny.moe().experts.num_experts  # each expert has up to 31 rows of padding
    assert pages_of_rank(padded, 0)[32] == 2 * (math.ceil((1.5 * 128 + num_experts * 31) / 64) + 1)
    stages = laid_out(replace(one_rank, model=tiny.model(num_layers=4)), "Et|t|t|tL", 2)
    # The schedule is interleaved 1F1B with two chunks of one layer each. The layer of the first stage is dense.
    in_flight = [counts.in_flight for counts in RankMemory(stages).microbatch_counts(1)]
    assert pages_of_rank(stages, 1)[32] == 4 * max(sum(counts) for counts in in_flight)
    counts = RankMemory(stages).microbatch_counts(0)
    assert pages_of_rank(stages, 0)[32] == 4 * max(each.in_flight[1] for each in counts)


def test_memory_emulation_shows_the_memory_saved_by_pages() -> None:
    """On four ranks, the worst-case number of rows is four times the balanced one."""
    base = over_experts(
        None,
        num_ranks=4,
        model=tiny.model(num_layers=6, moe_config=ALL_GATHER),
        precision=PrecisionConfig(params="bf16"),
        kernels=KernelConfig(),
        emulation=EmulationConfig(),
    )
    paged = replace(
        base,
        memory=MemoryConfig(
            paged_stash=PagedStashConfig(moe_paged_stash_page_size=4, moe_paged_stash_buffer_size_factor_cuda=1.1)
        ),
    )
    whole, saved = (
        emulate_rank(each, 1, torch.device("meta"), num_microbatches=2).timeline.peak() for each in (base, paged)
    )
    closed = [RankMemory(each).of_rank(0).activation_bytes for each in (base, paged)]
    assert saved.total < whole.total and closed[1] < closed[0]
    assert saved.categories["activations"] < whole.categories["activations"]
    assert saved.categories["other"] == whole.categories["other"], "pages are activations"
    # Each of 5 MoE layers saves rows of 104 bf16 elements: the worst-case number of rows without pages, and 1.1 times
    # the balanced number in pages.
    rows, num_layers = 4 * 32 * 2, 5
    assert closed[0] - closed[1] == pytest.approx(num_layers * 2 * 104 * (rows - 1.1 * rows / 4), rel=1e-3)
