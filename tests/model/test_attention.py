"""Grouped-query attention against a loop over heads and positions, and its packing and dropout."""

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import NormConfig, RopeConfig
from megatron_moe.model.attention import rotate
from megatron_moe.parallel.rng import RNGKey
from tests.helpers.mixers import check_against_loop, make, run
from tests.helpers.tiny_models import HIDDEN, attention_config, make_mb, mla_config, randn
from tests.helpers.tolerances import EXACT, FP64_REF

CASES = {
    "plain": {},
    "one group": {"num_query_groups": 1},
    "a group per head": {"num_query_groups": 6},
    "no rotation": {"rope": None},
    "interleaved": {"rope": RopeConfig(dim=8, interleaved=True)},
    "partial rotation": {"rope": RopeConfig(dim=4)},
    "biases": {"qkv_bias": True, "out_bias": True},
    "norm per head": {"qk_norm": "per_head"},
    "LayerNorm per head": {"qk_norm": "per_head", "norm": NormConfig(kind="LayerNorm", zero_centered=True)},
    "norm without a weight": {"qk_norm": "l2", "norm": NormConfig(kind="LayerNorm", eps=0.1, zero_centered=True)},
    "output gate": {"output_gate": True, "qkv_bias": True},
    "window": {"core": {"window": (2, 0)}},
    "sinks": {"core": {"sinks": True}},
    "off by one": {"core": {"off_by_one": True}},
    "window, sinks, gate": {"core": {"window": (3, 0), "sinks": True}, "output_gate": True},
    "not causal": {"core": {"causal": False, "window": (1, 2)}},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())
def test_attention_equals_a_loop_over_heads_and_positions(changes):
    check_against_loop(attention_config(**changes), make_mb(2, 6))


def test_attention_equals_the_loop_with_documents_and_reset_positions():
    positions_BS = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 4]])
    segments_BS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    mb = make_mb(2, 6, positions_BS=positions_BS, segments_BS=segments_BS)
    check_against_loop(attention_config(core={"window": (3, 0), "sinks": True}), mb)


def test_full_qk_norm_is_over_all_heads():
    config = attention_config(qk_norm="full")
    module, plain = make(config), make(attention_config())
    plain.linear_qkv.weight.data.copy_(module.linear_qkv.weight)
    plain.linear_proj.weight.data.copy_(module.linear_proj.weight)
    x, mb = randn(5, 2, HIDDEN), make_mb(2, 5)
    q, k, v = module.linear_qkv(x).unflatten(-1, (module.num_groups, -1)).split(config.group_rows, dim=-1)
    q = q.flatten(2).unflatten(-1, (module.num_heads, -1))
    widths = (config.q_width, config.kv_width)
    assert (module.q_layernorm.weight.shape[0], module.k_layernorm.weight.shape[0]) == widths

    # The same model without the norm, whose projections give the normed q and k.
    def normed(x_SBND: Tensor, gamma: Tensor) -> Tensor:
        rows = [v / torch.sqrt((v * v).mean() + config.norm.eps) * gamma for v in x_SBND.flatten(2).flatten(0, 1)]
        return torch.stack(rows).view_as(x_SBND)

    q, k = normed(q, module.q_layernorm.weight), normed(k, module.k_layernorm.weight)
    plain._fused_qkv = lambda qkv, mb: (*(rotate(plain.kernels, x, config.rope, mb) for x in (q, k)), v)
    FP64_REF.check(run(module, x, mb), run(plain, x, mb), "output")


@pytest.mark.parametrize("config", [attention_config(core={"window": (2, 0)}), mla_config()], ids=["gqa", "mla"])
def test_packed_documents_equal_separate_sequences(config):
    module, lengths = make(config), (4, 1, 3)
    documents = [randn(n, 1, HIDDEN, seed=n) for n in lengths]
    apart = torch.cat([run(module, doc, make_mb(1, n)) for doc, n in zip(documents, lengths, strict=True)])
    positions_BS = torch.cat([torch.arange(n) for n in lengths])[None]
    segments_BS = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    mb = make_mb(1, sum(lengths), positions_BS=positions_BS, segments_BS=segments_BS)
    FP64_REF.check(run(module, torch.cat(documents), mb), apart, "output")


def test_attention_without_documents_is_causal_over_the_whole_sequence():
    module, x = make(attention_config()), randn(8, 1, HIDDEN)
    segments_BS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    apart, together = run(module, x, make_mb(1, 8, segments_BS=segments_BS)), run(module, x, make_mb(1, 8))
    EXACT.check(apart[:4], together[:4], "first document")
    assert (apart[4:] - together[4:]).abs().min() > 1e-6


@pytest.mark.parametrize("config", [attention_config(), mla_config()], ids=["gqa", "mla"])
def test_rotary_positions_are_relative(config):
    module, x = make(config), randn(6, 1, HIDDEN)
    usual = run(module, x, make_mb(1, 6))
    moved = run(module, x, make_mb(1, 6, positions_BS=torch.arange(100, 106)[None]))
    reset = run(module, x, make_mb(1, 6, positions_BS=torch.tensor([[0, 1, 2, 0, 1, 2]])))
    assert (moved - usual).abs().max() < 1e-12, "rotary positions are relative"
    EXACT.check(reset[:3], usual[:3], "before the reset")
    assert (reset[3:] - usual[3:]).abs().min() > 1e-6


@pytest.mark.parametrize("make_config", [attention_config, mla_config], ids=["gqa", "mla"])
def test_attention_dropout_follows_its_key(make_config):
    module, x = make(make_config(core={"dropout": 0.3})), randn(6, 2, HIDDEN)

    def out(**changes) -> Tensor:
        return run(module, x, make_mb(2, 6, **changes))

    EXACT.check(out(rng=RNGKey(1, 2, 0)), out(rng=RNGKey(1, 2, 0)), "same key")
    assert not torch.equal(out(rng=RNGKey(1, 2, 0)), out(rng=RNGKey(1, 3, 0)))
    none = run(make(make_config()), x, make_mb(2, 6, rng=RNGKey(1, 2, 0)))
    EXACT.check(out(rng=None), none, "no key")
    EXACT.check(out(rng=RNGKey(1, 2, 0), training=False), none, "evaluation")


def test_qkv_rows_are_ordered_by_query_group():
    module = make(attention_config(output_gate=True))
    assert module.linear_qkv.weight.meta.splits == (24, 24, 8, 8)
    assert module.linear_qkv.weight.shape == (2 * 64, HIDDEN)
    assert (module.linear_qkv.weight.meta.tp_dim, module.linear_proj.weight.meta.tp_dim) == (0, 1)


def test_missing_rotary_tables_raise():
    module = make(attention_config())
    with pytest.raises(AssertionError, match="rotary tables are not attached"):
        module(randn(3, 1, HIDDEN), make_mb(1, 3))
