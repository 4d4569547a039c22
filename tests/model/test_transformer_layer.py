"""Transformer layer: residual connections, dropout, nodes and schedule steps."""

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import NormConfig
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.residual import AddedResidual
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.layers.node_chain import BoundNodes, LayerState, run_nodes, schedule_steps
from megatron_moe.layers.resources import ModelResources
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.model.init import init_parameters
from megatron_moe.model.rope import Rotations
from megatron_moe.model.transformer_layer import TransformerLayer
from megatron_moe.parallel import rng
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.rng import RNGKey
from tests.helpers.tiny_models import HIDDEN, UNIT_GAIN, layer_config, make_mb, mla_config, moe_config, randn
from tests.helpers.tolerances import EXACT

RESOURCES = ModelResources(ParallelContext.single(), reference.bundle(), SavedTensorPolicy())
SPECS = {
    "dense": layer_config(),
    "LayerNorm": layer_config(norm=NormConfig(kind="LayerNorm")),
    "MLA": layer_config(mla_config()),
    "MoE": layer_config(feed_forward=moe_config()),
    "residual from norm": layer_config(residual=AddedResidual(from_norm=True)),
    "MoE, residual from norm": layer_config(feed_forward=moe_config(), residual=AddedResidual(from_norm=True)),
}


def make(config: LayerConfig) -> TransformerLayer:
    layer = TransformerLayer(config, 0, "decoder.layers.0", RESOURCES)
    init_parameters(layer, 5, UNIT_GAIN)
    return layer


def mb_of(layer: TransformerLayer, **changes) -> MicrobatchContext:
    return Rotations([layer.config.mixer], ParallelContext.single()).attach(make_mb(2, 5, **changes))


def by_hand(layer: TransformerLayer, x: Tensor, mb: MicrobatchContext, dropout: float = 0.0) -> Tensor:
    normed = layer.input_layernorm(x)
    attention_out = layer.self_attention(normed, mb)
    x = (normed if layer.config.residual.from_norm else x) + rng.dropout(
        attention_out, dropout, mb.key("decoder.layers.0.attention_residual")
    )
    normed = layer.pre_mlp_layernorm(x)
    fed = layer.mlp(normed, mb) if layer.config.is_moe else layer.mlp(normed)
    return (normed if layer.config.residual.from_norm else x) + rng.dropout(
        fed, dropout, mb.key("decoder.layers.0.mlp_residual")
    )


@pytest.mark.parametrize("config", SPECS.values(), ids=SPECS.keys())
def test_layer_equals_the_residual_formula(config):
    layer, x = make(config), randn(5, 2, HIDDEN)
    EXACT.check(layer(x, mb_of(layer)), by_hand(layer, x, mb_of(layer)), "output")


def test_residual_connections_have_separate_dropout_keys():
    layer, x = make(layer_config(hidden_dropout=0.3)), randn(5, 2, HIDDEN)
    mb = mb_of(layer, rng=RNGKey(1, 2, 3))
    out = layer(x, mb)
    EXACT.check(out, by_hand(layer, x, mb, 0.3), "output")
    EXACT.check(layer(x, mb), out, "the same key again")
    assert not torch.equal(layer(x, mb_of(layer, rng=RNGKey(1, 2, 4))), out)
    plain = by_hand(layer, x, mb_of(layer))
    EXACT.check(layer(x, mb_of(layer)), plain, "without a key")
    EXACT.check(layer(x, mb_of(layer, rng=RNGKey(1, 2, 3), training=False)), plain, "in evaluation")


MOE_NODES = [
    *("attention", "router", "dispatch_start", "dispatch_finish", "experts", "combine_start", "combine_finish"),
    *("post", "residual"),
]


@pytest.mark.parametrize(
    ("config", "names", "slots"),
    [
        (SPECS["dense"], ["attention", "mlp", "residual"], ["attention", "experts"]),
        (SPECS["MoE"], MOE_NODES, ["attention", "dispatch", "dispatch", "experts", "combine", "combine", "post"]),
    ],
    ids=["dense", "moe"],
)
def test_nodes_and_the_steps_of_a_schedule_compute_the_layer(config, names, slots):
    layer, x = make(config), randn(5, 2, HIDDEN)
    mb = mb_of(layer)
    assert [node.name for node in layer.nodes] == names
    EXACT.check(run_nodes(layer.nodes, LayerState(hidden_SBH=x), mb).hidden_SBH, layer(x, mb), "nodes")
    steps = schedule_steps([BoundNodes(layer.nodes, mb, 3)])
    assert [(step.node, step.layer) for step in steps] == [(slot, 3) for slot in slots]
    state = LayerState(hidden_SBH=x)
    for step in steps:
        state = step.run(state)
    EXACT.check(state.hidden_SBH, layer(x, mb), "steps")


def test_steps_without_those_of_exchanges_send_at_the_end_and_receive_at_the_beginning():
    layer, x = make(SPECS["MoE"]), randn(5, 2, HIDDEN)
    mb = mb_of(layer)
    steps = schedule_steps([BoundNodes(layer.nodes, mb, each) for each in (3, 4)], exchange_steps=False)
    assert [(step.node, step.layer, step.appended) for step in steps] == [
        ("attention", 3, None), ("experts", 3, None), ("post", 3, ("attention", 4)), ("experts", 4, None),
        ("post", 4, None),
    ]  # fmt: skip
    state, pending = LayerState(hidden_SBH=x), []
    for step in steps:
        state = step.run(state)
        pending.append(state.pending is not None)
    EXACT.check(state.hidden_SBH, layer(layer(x, mb), mb), "steps")
    assert pending == [True, True, True, True, False], "exchanges between steps"


@pytest.mark.parametrize("config", SPECS.values(), ids=SPECS.keys())
def test_nodes_list_every_parameter_once(config):
    layer = make(config)
    named = [parameter for node in layer.nodes for parameter in node.parameters]
    assert len(named) == len(set(named)) and set(named) == set(layer.parameters())


@pytest.mark.parametrize("config", [SPECS["dense"], SPECS["MoE"]], ids=["dense", "moe"])
def test_a_state_holds_no_tensor_after_its_last_consumer(config):
    layer, state = make(config), LayerState(hidden_SBH=randn(5, 2, HIDDEN))
    held = {"attention": {"hidden_SBH", "normed_SBH"}, "residual": {"hidden_SBH"}}
    held |= {"mlp": {"hidden_SBH", "out_SBH"}, "post": {"hidden_SBH", "out_SBH"}}
    inside = held["attention"]
    held |= {"router": inside | {"routing", "tokens_SBH"}, "dispatch_start": inside | {"pending"}}
    held |= {"dispatch_finish": inside | {"rows", "dispatch_handle"}, "experts": inside | {"rows", "dispatch_handle"}}
    held |= {"combine_start": inside | {"pending"}, "combine_finish": inside | {"routed_TH"}}
    for node in layer.nodes:
        state = node.run(state, mb_of(layer))
        found = {name for name in vars(state) if getattr(state, name) is not None} - {"discard", "earlier"}
        assert found == held[node.name], node.name
