"""Expert parallelism with NCCL: equality with one rank, and no host-device synchronisation except where declared."""

from functools import cache

import pytest
import torch

from megatron_moe.config.parallel import ParallelConfig
from tests.gpu.experts_over_gpus import (
    LIMIT_S,
    MODULES,
    bf16_cases,
    bf16_layers,
    cases,
    every_case,
    flex_bounds,
    flex_cases,
    flex_exchanges,
    flex_fp8_exchanges,
    flex_fp8_layers,
    flex_layers,
    flex_replays,
    hierarchical_layers,
    on_gpus,
    trained,
    without_waiting,
)
from tests.helpers import ranks
from tests.helpers.tolerances import BF16_KERNEL, BF16_LAYOUT, EXACT, FP32_LAYOUT, FP32_REF, FP64_LAYOUT
from tests.moe.parallel.folded import gathered, name_of, on_one_rank

NUM_GPUS = pytest.mark.parametrize(
    "num_gpus", [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
)


@NUM_GPUS
def test_every_fold_and_dispatcher_matches_one_rank(num_gpus: int) -> None:
    by_rank = on_gpus(num_gpus, every_case)
    for place, (fold, config, data) in enumerate(cases(num_gpus)):
        actual = gathered([results[place] for results in by_rank], fold)
        partition = None if config.capacity is None else fold
        expected = on_one_rank(config, data, partition)
        FP64_LAYOUT.check_all(actual.tensors, expected.tensors, f"{name_of(fold)} {config.dispatcher}")


@NUM_GPUS
def test_dispatchers_without_a_host_read_run_without_host_sync(num_gpus: int) -> None:
    for done in on_gpus(num_gpus, without_waiting):
        assert done == [("allgather", True), ("alltoall", True), ("flex", True), ("flex", True)]


@NUM_GPUS
def test_flex_layers_match_one_rank(num_gpus: int) -> None:
    by_rank = on_gpus(num_gpus, flex_layers)
    for place, (fold, config, data) in enumerate(flex_cases(num_gpus)):
        actual = gathered([results[place] for results in by_rank], fold)
        FP32_LAYOUT.check_all(actual.tensors, on_one_rank(config, data).tensors, name_of(fold))


@NUM_GPUS
def test_layers_on_two_hosts_match_one_rank(num_gpus: int) -> None:
    by_rank = on_gpus(num_gpus, hierarchical_layers)
    for place, (fold, config, data) in enumerate(flex_cases(num_gpus, num_gpus // 2)):
        actual = gathered([results[place] for results in by_rank], fold)
        FP32_LAYOUT.check_all(actual.tensors, on_one_rank(config, data).tensors, name_of(fold))


@NUM_GPUS
def test_bf16_layers_match_the_local_dispatcher(num_gpus: int) -> None:
    by_rank = on_gpus(num_gpus, bf16_layers)
    for place, (fold, _, _) in enumerate(bf16_cases(num_gpus)):
        actual = gathered([results[place][0] for results in by_rank], fold)
        BF16_LAYOUT.check_all(actual.tensors, by_rank[0][place][1], name_of(fold))


@NUM_GPUS
def test_flex_exchanges_match_the_formula(num_gpus: int) -> None:
    for results in on_gpus(num_gpus, flex_exchanges):
        for name, actual, expected in results:
            (FP32_REF if "float32" in name else BF16_KERNEL).check_all(actual, expected, name)


@NUM_GPUS
def test_fp8_exchanges_deliver_the_bytes_of_quantised_rows(num_gpus: int) -> None:
    for results in on_gpus(num_gpus, flex_fp8_exchanges):
        assert [name for name, same in results if same != [True] * 3] == [], results


@NUM_GPUS
def test_fp8_exchanges_change_only_weight_gradients_of_experts(num_gpus: int) -> None:
    for changed, replayed in on_gpus(num_gpus, flex_fp8_layers):
        assert changed == ["experts.linear_fc1.weight", "experts.linear_fc2.weight"]
        assert replayed == [True] * 4


@NUM_GPUS
def test_flex_overflow_counts_the_rows_beyond_the_bound(num_gpus: int) -> None:
    assert on_gpus(num_gpus, flex_bounds) == [[0, 1]] * num_gpus


@NUM_GPUS
def test_replayed_flex_layers_equal_eager_ones(num_gpus: int) -> None:
    assert on_gpus(num_gpus, flex_replays) == [[True] * 40] * num_gpus


@NUM_GPUS
@pytest.mark.parametrize("name", [name for name in MODULES if name != "eager"])
@pytest.mark.parametrize("recipe", ["q6", "m8"])
def test_replayed_training_steps_equal_eager_ones(recipe: str, name: str, num_gpus: int) -> None:
    """Compares 20 replays of graphs that contain the token exchange, with learned routing. Steps whose rows exceed the
    bound are repeated with a larger bound, in graphs that are captured again."""
    for rank, found in enumerate(steps_of(recipe, name, num_gpus)):
        figures, num_repeated = found
        EXACT.check_all(figures, steps_of(recipe, "eager", num_gpus)[rank][0], f"rank {rank}, {name}")
        assert (num_repeated > 0) == name.endswith("bounded rows"), f"{name}: {num_repeated} repeated steps"


@cache
def steps_of(recipe: str, name: str, num_gpus: int) -> list[tuple[dict[str, torch.Tensor], int]]:
    """Results of `trained` on every rank."""
    return ranks.on_gpus(ParallelConfig(world_size=num_gpus), trained, recipe, name, 22, timeout=LIMIT_S)
