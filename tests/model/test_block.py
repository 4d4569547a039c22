"""One layer: two residual connections around normed sub-layers, with dropout on what is added."""

import pytest
import torch
from torch import Tensor

from megatron_moe.data.batch import TokenMeta
from megatron_moe.kernels import reference
from megatron_moe.model.block import Block, make_block
from megatron_moe.model.init import init_parameters
from megatron_moe.model.rope import Rotations
from megatron_moe.parallel import rng
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.attention import NormSpec
from megatron_moe.specs.model import LayerSpec
from tests.tiny_models import HIDDEN, UNIT_GAIN, layer_spec, mla_spec, moe_spec, randn, token_meta
from tests.tolerances import EXACT

SPECS = {
    "dense": layer_spec(),
    "LayerNorm": layer_spec(norm=NormSpec(kind="LayerNorm")),
    "MLA": layer_spec(mla_spec()),
    "MoE": layer_spec(feed_forward=moe_spec()),
    "residual from norm": layer_spec(residual_from_norm=True),
    "MoE, residual from norm": layer_spec(feed_forward=moe_spec(), residual_from_norm=True),
}


def make(spec: LayerSpec) -> Block:
    block = make_block(spec, 0, "decoder.layers.0", ParallelContext.single(), reference.bundle())
    init_parameters(block, 5, UNIT_GAIN)
    return block


def meta_of(block: Block, **changes) -> TokenMeta:
    return Rotations([block.spec.mixer], ParallelContext.single()).attach(token_meta(2, 5, **changes))


def by_hand(block: Block, x: Tensor, meta: TokenMeta, dropout: float = 0.0) -> Tensor:
    normed = block.input_layernorm(x)
    attended = block.self_attention(normed, meta)
    x = (normed if block.spec.residual_from_norm else x) + rng.dropout(
        attended, dropout, meta.key("decoder.layers.0.attention_residual")
    )
    normed = block.pre_mlp_layernorm(x)
    fed = block.mlp(normed, meta) if block.spec.is_moe else block.mlp(normed)
    return (normed if block.spec.residual_from_norm else x) + rng.dropout(
        fed, dropout, meta.key("decoder.layers.0.mlp_residual")
    )


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_a_layer_adds_its_normed_sub_layers_to_the_residual_stream(spec):
    block, x = make(spec), randn(5, 2, HIDDEN)
    EXACT.check(block(x, meta_of(block)), by_hand(block, x, meta_of(block)), "output")


def test_both_residual_connections_have_dropout_with_keys_of_their_own():
    block, x = make(layer_spec(hidden_dropout=0.3)), randn(5, 2, HIDDEN)
    meta = meta_of(block, random_key=(1, 2, 3))
    out = block(x, meta)
    EXACT.check(out, by_hand(block, x, meta, 0.3), "output")
    EXACT.check(block(x, meta), out, "the same key again")
    assert not torch.equal(block(x, meta_of(block, random_key=(1, 2, 4))), out)
    plain = by_hand(block, x, meta_of(block))
    EXACT.check(block(x, meta_of(block)), plain, "without a key")
    EXACT.check(block(x, meta_of(block, random_key=(1, 2, 3), training=False)), plain, "in evaluation")


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (SPECS["dense"], ["attention", "experts"]),
        (SPECS["MoE"], ["attention", "dispatch", "dispatch", "experts", "combine", "combine", "post"]),
    ],
    ids=["dense", "moe"],
)
def test_a_layer_is_a_chain_of_nodes_that_can_be_run_apart(spec, names):
    block, x = make(spec), randn(5, 2, HIDDEN)
    assert [name for name, _ in block.nodes] == names
    state, meta = x, meta_of(block)
    for _, run in block.nodes:
        state = run(state, meta)
    EXACT.check(state, block(x, meta), "output")
