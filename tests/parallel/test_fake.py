"""Fake parallel contexts: one process emulates any rank of any world size, up to thousands of ranks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_moe.config.model import ModelConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline_layout import StageLayout
from megatron_moe.cost_model.parameters import count_parameters
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.model.gpt import GPT
from megatron_moe.parallel.collectives import all_gather_flat, all_reduce_
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import Parameter
from tests.helpers import zoo
from tests.helpers.tolerances import EXACT

KERNELS = reference.bundle()
FOLDS = {
    "wide experts": ParallelConfig(world_size=1024, pp=16, tp=2, ep=64, sequence_parallel=True),
    "experts beyond data parallelism": ParallelConfig(
        world_size=1024, tp=4, cp=2, pp=4, ep=64, etp=2, sequence_parallel=True
    ),
    "experts over eight times data parallelism": ParallelConfig(
        world_size=256, tp=4, cp=2, pp=4, ep=64, sequence_parallel=True
    ),
    "pipeline before data": ParallelConfig(
        world_size=1024, tp=8, pp=8, ep=8, sequence_parallel=True, order="tp-cp-ep-pp-dp"
    ),
}


@contextmanager
def fake_context(config: ParallelConfig, rank: int, **changes) -> Iterator[ParallelContext]:
    context = ParallelContext.fake(config, rank, **changes)
    try:
        yield context
    finally:
        context.stop()


def groups_of(config: ParallelConfig, rank: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Returns (ranks, index of this rank) of every group by name."""
    names = ("tp", "cp", "dp", "pp", "dp_cp", "tp_cp", "tp_dp_cp", "etp", "ep", "edp", "etp_ep", "world")
    with fake_context(config, rank) as context:
        return {name: (context.group(name).ranks, context.group(name).rank) for name in names}


@pytest.mark.parametrize("fold", FOLDS)
def test_members_of_a_group_agree_on_it(fold):
    config = FOLDS[fold]
    for rank in (0, config.world_size // 2 + 5, config.world_size - 1):
        for name, (ranks, index) in groups_of(config, rank).items():
            assert ranks[index] == rank
            for mate in {ranks[0], ranks[len(ranks) // 2], ranks[-1]} - {rank}:
                theirs, place = groups_of(config, mate)[name]
                assert theirs == ranks and theirs[place] == mate, f"{name} of rank {rank} and of rank {mate}"


def test_collectives_leave_local_tensors_as_they_are():
    with fake_context(ParallelConfig(world_size=64, tp=8), 5, device="cpu") as context:
        group = context.group("tp")
        assert (group.size, group.rank) == (8, 5)
        EXACT.check(all_reduce_(torch.arange(3.0), group), [0.0, 1.0, 2.0])
        assert all_gather_flat(torch.empty(24), torch.arange(3.0), group).shape == (24,)


def test_a_process_emulates_one_rank_at_a_time():
    config = ParallelConfig(world_size=4, tp=2)
    with fake_context(config, 1):
        with pytest.raises(AssertionError, match="already belongs to a process group"):
            ParallelContext.fake(config, 2)
    with fake_context(config, 3) as context:
        assert context.rank == 3
    assert not dist.is_initialized()


def stage_of(config: ModelConfig, context: ParallelContext) -> GPT:
    """Stage of this rank in an even layout; the first stages have one more layer."""
    stage = context.group("pp")
    share, surplus = divmod(len(config.layers), stage.size)
    start = stage.rank * share + min(stage.rank, surplus)
    layers = range(start, start + share + (stage.rank < surplus))
    last = stage.rank == stage.size - 1
    chunk = StageLayout(
        layers=tuple(layers),
        embedding=stage.rank == 0,
        final_norm=last,
        num_mtp=config.mtp.num_layers if config.mtp and last else 0,
        loss=last,
    )
    return GPT(config, context, KERNELS, chunks=[chunk])


def over_ranks(config: ModelConfig) -> ModelConfig:
    layers = [
        replace(layer, feed_forward=replace(layer.feed_forward, dispatcher="alltoall")) if layer.is_moe else layer
        for layer in config.layers
    ]
    return replace(config, layers=tuple(layers))


def deepseek_v3() -> ModelConfig:
    return over_ranks(zoo.model_config(next(row for row in zoo.zoo_rows() if str(row) == "DeepSeek-V3")))


def test_any_rank_of_deepseek_v3_on_1024_ranks_is_built_in_seconds():
    config, fold = deepseek_v3(), FOLDS["wide experts"]
    of_every_stage = range(0, 1024, 64)
    for rank in (*of_every_stage, 517, 1023):
        start = time.process_time()  # CPU time of the process, which does not depend on the load of the machine
        with fake_context(fold, rank) as context:
            parameters = list(stage_of(config, context).parameters())
        seconds = time.process_time() - start
        assert seconds < 10, f"rank {rank} took {seconds:.1f} s"
        assert all(parameter.is_meta for parameter in parameters)
        held = sum(parameter.numel() for parameter in parameters)
        assert 0.9e9 < held < 2.6e9, f"rank {rank} holds {held:,} parameters"


def test_a_model_is_built_where_expert_parallelism_exceeds_data_parallelism():
    """Kimi-K2 has 384 experts on the 64 ranks of each of 4 stages; attention uses these ranks as TP 4, CP 2, DP 8."""
    config = over_ranks(zoo.model_config(next(row for row in zoo.zoo_rows() if str(row) == "Kimi-K2")))
    fold = FOLDS["experts over eight times data parallelism"]
    for rank in (0, 133, 255):
        with fake_context(fold, rank) as context:
            held = dict(stage_of(config, context).named_parameters())
        (experts, *_) = [each for name, each in held.items() if name.endswith("experts.linear_fc1.weight")]
        assert experts.shape[0] == 384 // 64, f"experts of rank {rank}"


def owned(parameter: Parameter, context: ParallelContext) -> bool:
    """Returns True on the first of the ranks that have a copy of the parameter, so that copies count once."""
    experts = parameter.meta.grid == "expert"
    copies = ["edp"] if experts else ["dp_cp"]
    if parameter.meta.tp_dim is None:
        copies.append("etp" if experts else "tp")
    if parameter.meta.shared_stages:
        copies.append("pp")
    return all(context.group(name).rank == 0 for name in copies)


def test_the_ranks_own_the_published_number_of_parameters_of_deepseek_v3():
    model = replace(deepseek_v3(), mtp=None)
    config = ParallelConfig(world_size=16, pp=4, tp=2, ep=2, sequence_parallel=True)
    total = 0
    for rank in range(config.world_size):
        with fake_context(config, rank) as context:
            total += sum(p.numel() for p in stage_of(model, context).parameters() if owned(p, context))
    assert total == count_parameters(model).total
    assert round(total / 1e9) == 671
