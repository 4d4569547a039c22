"""Order of nodes in an overlapped pair of a forward and a backward."""

import pytest

from megatron_moe.config.pipeline_layout import StageLayout
from megatron_moe.pipeline.overlap import EXCHANGES, OverlapNode, pair_nodes

MIDDLE = StageLayout(layers=(4, 5))
ORDER = {
    "forward": ["attention", "dispatch", "experts", "combine", "post"],
    "backward": ["post", "combine", "experts", "dispatch", "attention"],
}


def own_order(nodes: tuple[OverlapNode, ...], direction: str, layer: int) -> list[str]:
    return [entry.node for entry in nodes if entry.direction == direction and entry.layer == layer]


def test_order_of_two_layers_is_megatrons():
    one = StageLayout(layers=(7,))
    assert " ".join(map(str, pair_nodes(one, one, split_backward=True))) == (
        "B0.post B0.combine F0.attention B0.experts F0.dispatch W0.experts B0.dispatch F0.experts F0.combine "
        "B0.attention F0.post W0.attention"
    )


def test_exchanges_without_steps_are_left_out():
    one = StageLayout(layers=(7,))
    assert " ".join(map(str, pair_nodes(one, one, split_backward=True, exchange_steps=False))) == (
        "B0.post F0.attention B0.experts W0.experts F0.experts B0.attention F0.post W0.attention"
    )


def test_early_release_moves_the_backward_of_attention_before_the_experts():
    one = StageLayout(layers=(7,))
    nodes = pair_nodes(one, one, early_attention_backward=True)
    assert " ".join(map(str, nodes)) == (
        "B0.post B0.combine F0.attention B0.experts F0.dispatch B0.dispatch B0.attention F0.experts F0.combine F0.post"
    )


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("ahead", "behind"), [(2, 2), (1, 3), (3, 1), (0, 2), (2, 0), (4, 4)])
def test_every_direction_keeps_its_own_order(ahead, behind, split, steps, early):
    forward = StageLayout(layers=tuple(range(ahead)), embedding=True)
    backward = StageLayout(layers=tuple(range(behind)), loss=True)
    nodes = pair_nodes(forward, backward, split_backward=split, exchange_steps=steps, early_attention_backward=early)
    order = {kind: [node for node in names if steps or node not in EXCHANGES] for kind, names in ORDER.items()}
    assert len(nodes) == len(set(nodes))
    for layer in range(ahead):
        assert own_order(nodes, "forward", layer) == order["forward"]
    for layer in range(behind):
        assert own_order(nodes, "backward", layer) == order["backward"]
    layers = [entry.layer for entry in nodes if entry.direction == "forward" and entry.layer is not None]
    assert layers == sorted(layers), "layers forward in order"
    layers = [entry.layer for entry in nodes if entry.direction == "backward" and entry.layer is not None]
    assert layers == sorted(layers, reverse=True), "layers backward in reverse"


def test_weight_gradients_follow_the_input_gradients_of_their_node():
    nodes = pair_nodes(MIDDLE, MIDDLE, split_backward=True)
    for node in ("experts", "attention"):
        for layer in (0, 1):
            assert nodes.index(OverlapNode("weight", node, layer)) > nodes.index(OverlapNode("backward", node, layer))
    assert not any(entry.direction == "weight" for entry in pair_nodes(MIDDLE, MIDDLE))


def test_first_forward_layer_is_paired_with_the_last_backward_layer():
    nodes = pair_nodes(MIDDLE, MIDDLE)
    assert nodes.index(OverlapNode("backward", "post", 1)) < nodes.index(OverlapNode("forward", "attention", 0))
    assert nodes.index(OverlapNode("forward", "post", 0)) < nodes.index(OverlapNode("backward", "post", 0))


def test_embedding_and_head_are_first_and_last():
    last, first = StageLayout(layers=(3,), num_mtp=1, loss=True), StageLayout(layers=(0,), embedding=True)
    nodes = pair_nodes(first, last, split_backward=True)
    assert [str(entry) for entry in nodes[:3]] == ["F.embedding", "B.head", "W.head"]
    nodes = pair_nodes(last, first)
    assert [str(entry) for entry in nodes[-2:]] == ["F.head", "B.embedding"]
    assert [entry.layer for entry in nodes if entry.direction == "forward"][-2] == 1, (
        "multi-token prediction is a layer"
    )


def test_single_direction_is_the_plain_chain():
    assert " ".join(map(str, pair_nodes(StageLayout(layers=(1,)), None))) == (
        "F0.attention F0.dispatch F0.experts F0.combine F0.post"
    )
    assert " ".join(map(str, pair_nodes(None, StageLayout(layers=(1,)), split_backward=True))) == (
        "B0.post B0.combine B0.experts W0.experts B0.dispatch B0.attention W0.attention"
    )


def test_exchanges_are_followed_by_computation_of_the_other_direction():
    """One of the two nodes after each exchange is a computation of the other direction, which hides the exchange."""
    nodes = pair_nodes(MIDDLE, MIDDLE, split_backward=True)
    for at, entry in enumerate(nodes[:-1]):
        if entry.node in EXCHANGES:
            others = [s for s in nodes[at + 1 : at + 3] if s.direction[0] != entry.direction[0]]
            assert any(other.node not in EXCHANGES for other in others), str(entry)
