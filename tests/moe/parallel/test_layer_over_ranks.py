"""In every legal parallel layout of up to eight ranks, the MoE layer has the results of one rank.

Output, gradients of input and weights, metrics and token counts are compared.
"""

import pytest
import torch

from megatron_moe.config.moe import CapacityConfig
from megatron_moe.config.parallel import ParallelConfig
from tests.helpers.thinned import thinned
from tests.helpers.tolerances import EXACT, FP64_LAYOUT
from tests.moe.parallel.folded import (
    EXPERTS,
    Data,
    Result,
    folds,
    moe_config,
    name_of,
    on_one_rank,
    over_ranks,
    parallel,
)

SIGMOID = {"score_function": "sigmoid", "expert_bias": True}
BALANCED = {**SIGMOID, "balancing": ("aux_loss", "seq_aux_loss"), "aux_loss_coeffs": (0.3, 0.2), "z_loss_coeff": 0.1}
CAPACITIES = (
    CapacityConfig(factor=0.75),
    CapacityConfig(factor=0.75, policy="position"),
    CapacityConfig(factor=1.0, pad=True),
)
FOLDS = [fold for world_size in (2, 4, 8) for fold in folds(world_size)]
WITH_CP = [
    parallel(2, cp=2, ep=2),
    parallel(4, cp=2, tp=2, ep=4),
    parallel(4, cp=4, etp=2, ep=2),
    parallel(8, cp=2, tp=2, ep=4, etp=2),
    parallel(8, cp=8, ep=8),
    parallel(8, cp=2, ep=2),
]
OTHER_ORDERS = [
    parallel(8, tp=2, etp=2, ep=2, order="tp-dp-cp-ep-pp"),
    parallel(8, tp=2, etp=2, ep=4, order="ep-tp-dp-cp-pp"),
    parallel(8, tp=4, etp=2, ep=2, order="dp-ep-tp-cp-pp"),
]
EVERY_FOLD = pytest.mark.parametrize("fold", thinned(FOLDS, 3) + WITH_CP + OTHER_ORDERS, ids=name_of)
SOME_FOLDS = pytest.mark.parametrize(
    "fold", [parallel(4, ep=4), parallel(4, tp=2, etp=2, ep=2), parallel(4, cp=2, etp=2)], ids=name_of
)
BOTH = pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])


def check(actual: Result, expected: Result) -> None:
    FP64_LAYOUT.check_all(actual.tensors, expected.tensors)
    FP64_LAYOUT.check_all(actual.metrics, expected.metrics)
    EXACT.check_all(actual.state, expected.state)


@EVERY_FOLD
@BOTH
def test_balanced_layers_with_biases_padding_and_shared_experts(fold: ParallelConfig, dispatcher: str) -> None:
    data = Data.random(fold.dp, padded=True)
    config = moe_config(dispatcher=dispatcher, router=BALANCED, bias=True, shared=True)
    check(over_ranks(config, fold, data), on_one_rank(config, data))


@EVERY_FOLD
@BOTH
def test_latent_layers_with_a_capacity(fold: ParallelConfig, dispatcher: str) -> None:
    """Capacity is computed per rank, so the oracle processes the tokens of each rank as a separate microbatch.

    Of its metrics, only the numbers of dropped and assigned tokens are then comparable.
    """
    data = Data.random(fold.dp)
    kind = (fold.ep + fold.tp + (dispatcher == "alltoall")) % len(CAPACITIES)
    config = moe_config(dispatcher=dispatcher, router=SIGMOID, latent=True, capacity=CAPACITIES[kind])
    actual, expected = over_ranks(config, fold, data), on_one_rank(config, data, fold)
    assert actual.metrics["moe/dropped_tokens"] > 0, "nothing was dropped"
    for name in ("moe/dropped_tokens", "moe/tokens_per_expert"):
        FP64_LAYOUT.check(actual.metrics.pop(name), expected.metrics.pop(name), name)
    FP64_LAYOUT.check_all(actual.tensors, expected.tensors)
    EXACT.check_all(actual.state, expected.state)


@SOME_FOLDS
@BOTH
@pytest.mark.parametrize("capacity", CAPACITIES, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_every_capacity_with_shared_experts(fold: ParallelConfig, dispatcher: str, capacity, padded: bool) -> None:
    data = Data.random(fold.dp, padded=padded)
    config = moe_config(dispatcher=dispatcher, capacity=capacity, shared=True)
    actual, expected = over_ranks(config, fold, data), on_one_rank(config, data, fold)
    FP64_LAYOUT.check_all(actual.tensors, expected.tensors)


@SOME_FOLDS
@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {"router": {"balancing": ("expert_choice",)}},
        {"router": {"balancing": ("expert_choice",)}, "capacity": CapacityConfig(factor=0.5)},
        {"router": {"topk": 1, "score_function": "sigmoid"}, "probs_on_input": True, "bias": True},
        {"probs_on_output": True, "bias": True},
        {"router": {"topk": EXPERTS}},
        {"router": {"num_groups": 4, "group_topk": 2, "score_function": "sigmoid", "scaling_factor": 2.5}},
        {"grouped": False, "bias": True},
        {"router": {"linear_bias": True, "dtype": "fp64"}},
    ],
    ids=lambda fields: " ".join(str(value) for value in fields.values()),
)
def test_every_kind_of_routing(fold: ParallelConfig, dispatcher: str, fields) -> None:
    data = Data.random(fold.dp, padded=True)
    config = moe_config(dispatcher=dispatcher, **fields)
    actual, expected = over_ranks(config, fold, data), on_one_rank(config, data, fold)
    FP64_LAYOUT.check_all(actual.tensors, expected.tensors)


@BOTH
@pytest.mark.parametrize("fold", [parallel(8, ep=8), parallel(4, etp=2, ep=2), parallel(2, etp=2)], ids=name_of)
@pytest.mark.parametrize("favourite", [0, 3, 7])
def test_all_tokens_to_one_expert(fold: ParallelConfig, dispatcher: str, favourite: int) -> None:
    """Ranks without the favourite expert receive no rows."""
    data = Data.random(fold.dp)
    for hidden in data.hidden:
        hidden[..., 0] = 1.0
    config = moe_config(dispatcher=dispatcher, router={"topk": 1, "pre_softmax": True}, bias=True)

    def favour(layer) -> None:
        with torch.no_grad():
            layer.router.weight.zero_()
            layer.router.weight[favourite, 0] = 5.0

    actual, expected = over_ranks(config, fold, data, favour), on_one_rank(config, data, change=favour)
    loads = actual.metrics["moe/tokens_per_expert"]
    assert loads[favourite] == sum(loads) > 0
    check(actual, expected)


@BOTH
@pytest.mark.parametrize("num_experts", [8, 16])
def test_one_and_two_experts_per_rank(dispatcher: str, num_experts: int) -> None:
    fold, data = parallel(8, tp=2, ep=8), Data.random(4)
    config = moe_config(dispatcher=dispatcher, router={**BALANCED, "num_experts": num_experts}, bias=True)
    check(over_ranks(config, fold, data), on_one_rank(config, data))


@BOTH
@pytest.mark.parametrize("fold", [parallel(4, ep=4), parallel(4, tp=2, etp=2, ep=2)], ids=name_of)
def test_two_runs_give_the_same_bits(fold: ParallelConfig, dispatcher: str) -> None:
    data, config = Data.random(fold.dp), moe_config(dispatcher=dispatcher, router=BALANCED, bias=True, shared=True)
    first, second = over_ranks(config, fold, data), over_ranks(config, fold, data)
    EXACT.check_all(first.tensors, second.tensors)
    EXACT.check_all(first.metrics, second.metrics)


@BOTH
@pytest.mark.parametrize(
    "fold",
    [parallel(2, ep=2), parallel(4, tp=2, etp=2, ep=2), parallel(4, tp=4, ep=4), parallel(2, tp=2, etp=2)],
    ids=name_of,
)
@pytest.mark.parametrize("capacity", [None, CapacityConfig(factor=1.0, pad=True)], ids=["dropless", "padded"])
def test_overlapped_shared_experts_give_the_same_bits(fold, dispatcher, capacity) -> None:
    data = Data.random(fold.dp)
    runs = []
    for overlap in (False, True):
        config = moe_config(dispatcher=dispatcher, router=SIGMOID, shared=True, capacity=capacity, overlap=overlap)
        runs.append(over_ranks(config, fold, data))
    EXACT.check_all(runs[1].tensors, runs[0].tensors)


def test_overlapped_shared_experts_run_between_start_and_finish_of_both_exchanges() -> None:
    done: list[str] = []

    def note_calls(layer) -> None:
        for owner, names in (
            (layer.dispatcher, ("start_dispatch", "finish_dispatch", "start_combine", "finish_combine")),
            (layer.shared_experts, ("run_fc1", "run_fc2")),
            (layer.experts, ("forward",)),
        ):
            for name in names:
                call = getattr(owner, name)
                setattr(owner, name, lambda *args, call=call, name=name: done.append(name) or call(*args))

    on_one_rank(moe_config(shared=True, overlap=True), Data.random(1), change=note_calls)
    assert done == [
        *("start_dispatch", "run_fc1", "finish_dispatch", "forward"),
        *("start_combine", "run_fc2", "finish_combine"),
    ]


def test_several_ranks_have_a_dispatcher_that_sends() -> None:
    with pytest.raises(AssertionError, match="unknown dispatcher 'local' for 2 ranks"):
        over_ranks(moe_config(dispatcher="local"), parallel(2, tp=2, ep=2), Data.random(1))
