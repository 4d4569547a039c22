"""Expert capacity: its size, and the choices that are dropped beyond it."""

import random

import pytest
import torch

from megatron_moe.config.moe import CapacityConfig, RouterConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.moe.routing_methods import within_capacity
from tests.helpers.tolerances import EXACT
from tests.moe.routers import logits_as_hidden, make_mb, sees_logits

KERNELS = reference.bundle()


@pytest.mark.parametrize(
    ("num_tokens", "topk", "num_experts", "factor", "expected"),
    [
        (6, 2, 4, 1.0, 3),
        (6, 2, 8, 1.0, 2),
        (6, 2, 4, 0.1, 1),
        (10, 1, 4, 1.25, 4),
        (4, 2, 2, 5.0, 4),
        (7, 2, 8, 1.0, 2),
    ],
)
def test_capacity_is_the_rounded_up_share_and_at_most_all_tokens(num_tokens, topk, num_experts, factor, expected):
    config = RouterConfig(hidden_size=8, num_experts=num_experts, topk=topk)
    assert config.expert_capacity(num_tokens, factor) == expected


# Six tokens select two of three experts by explicit logits. Softmax over two selected logits a > b has the values
# 1 / (1 + exp(b - a)) and 1 / (1 + exp(a - b)), so weights depend only on the gap a - b.
#   token  logits      first choice (weight above 1/2), second choice (weight below 1/2)
#   0      3 2 0       0 (gap 1), 1
#   1      4 2 0       0 (gap 2), 1
#   2      3 0 2       0 (gap 1), 2
#   3      0 3 1       1 (gap 2), 2
#   4      5 2 0       0 (gap 3), 1
#   5      1 0 2       2 (gap 1), 0
# Choices of expert 0: tokens 4 (gap 3), 1 (gap 2), 0 and 2 (gap 1), 5 (gap -1)
# Choices of expert 1: tokens 3 (gap 2), 0 (gap -1), 1 (gap -2), 4 (gap -3)
# Choices of expert 2: tokens 5 (gap 1), 2 (gap -1), 3 (gap -2)
SIX_TOKENS = [[3, 2, 0], [4, 2, 0], [3, 0, 2], [0, 3, 1], [5, 2, 0], [1, 0, 2]]


def _six_tokens(**capacity):
    # The fair share is 6 tokens * 2 choices / 3 experts = 4, so the capacity is 0.75 * 4 = 3.
    router = sees_logits(num_experts=3, capacity=CapacityConfig(factor=0.75, **capacity))
    hidden = logits_as_hidden([[float(x) for x in row] for row in SIX_TOKENS])
    return router(hidden, make_mb(hidden))


def test_drops_keep_the_choices_of_highest_weight_or_the_first_ones():
    routing = _six_tokens()
    # By weight, expert 0 keeps tokens 4, 1 and the earlier of 0 and 2; expert 1 keeps 3, 0, 1; expert 2 keeps all.
    assert routing.ids_TK.tolist() == [[0, 1], [0, 1], [-1, 2], [1, 2], [0, -1], [2, -1]]
    assert routing.counts_E.tolist() == [3, 3, 3] and routing.capacity is None
    assert routing.chosen_TK.tolist() == [[0, 1], [0, 1], [0, 2], [1, 2], [0, 1], [2, 0]]
    # By position, expert 0 keeps tokens 0, 1, 2; expert 1 keeps 0, 1, 3; expert 2 keeps all.
    ids = _six_tokens(policy="position").ids_TK
    assert ids.tolist() == [[0, 1], [0, 1], [0, 2], [1, 2], [-1, -1], [2, -1]]


def test_padding_to_capacity_gives_every_expert_the_same_number_of_rows():
    routing = _six_tokens(pad=True)
    assert routing.capacity == 3
    EXACT.check(routing.ids_TK, _six_tokens().ids_TK, "ids")


def test_padding_tokens_do_not_count_towards_capacity():
    """The valid tokens come last, so padding tokens would take the capacity if they counted."""
    router = sees_logits(
        num_experts=3, topk=1, pre_softmax=True, capacity=CapacityConfig(factor=1.0, policy="position")
    )
    hidden = logits_as_hidden([[9.0, 0, 0]] * 4 + [[1.0, 0, 0]] * 2)
    valid = torch.tensor([[False] * 4 + [True] * 2])
    assert router(hidden, make_mb(hidden, valid_BS=valid)).ids_TK.flatten().tolist() == [-1] * 4 + [0, 0]


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_random_choices_are_dropped_as_by_sorting_each_expert(policy):
    draw = random.Random(4)
    for _ in range(50):
        tokens, experts, topk, capacity = (
            draw.randint(1, 12),
            draw.randint(2, 6),
            draw.randint(1, 2),
            draw.randint(1, 4),
        )
        ids = [[e if draw.random() < 0.8 else -1 for e in draw.sample(range(experts), topk)] for _ in range(tokens)]
        probs = [[draw.choice([0.1, 0.2, 0.3]) for _ in range(topk)] for _ in range(tokens)]
        expected = [[False] * topk for _ in range(tokens)]
        for expert in range(experts):
            askers = [(t, k) for t in range(tokens) for k in range(topk) if ids[t][k] == expert]
            if policy == "probs":
                askers.sort(key=lambda asker: -probs[asker[0]][asker[1]])
            for t, k in askers[:capacity]:
                expected[t][k] = True
        ids_TK = torch.tensor(ids)
        counts = KERNELS.count_tokens(ids_TK, experts)
        stays = within_capacity(ids_TK, torch.tensor(probs), counts, capacity, policy)
        assert stays.tolist() == expected
