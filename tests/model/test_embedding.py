"""Word embeddings, learned position embeddings and dropout."""

import torch

from megatron_moe.config.model import InitConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.model.embedding import Embedding
from megatron_moe.model.init import init_parameters
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.rng import RNGKey
from tests.helpers.tiny_models import UNIT_GAIN, make_mb, microbatch, model_config
from tests.helpers.tolerances import EXACT


def make(**changes) -> Embedding:
    module = Embedding(model_config(**changes), ParallelContext.single(), reference.bundle())
    init_parameters(module, 5, UNIT_GAIN)
    return module


def test_hidden_is_word_plus_position():
    module = make(position_embedding="learned_absolute")
    batch, positions_BS = microbatch(2, 5), torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]])
    hidden_SBH = module(batch.tokens_BS, positions_BS, batch.context)
    words, places = module.word_embeddings.weight, module.position_embeddings.weight
    for b in range(2):
        for s in range(5):
            expected = words[batch.tokens_BS[b, s]] + places[positions_BS[b, s]]
            EXACT.check(hidden_SBH[s, b], expected, f"sequence {b}, position {s}")


def test_rotary_models_have_no_learned_positions():
    assert [name for name, _ in make().named_parameters()] == ["word_embeddings.weight"]


def test_embedding_dropout_follows_its_key():
    module, batch = make(embedding_dropout=0.4), microbatch(2, 5)

    def out(**fields) -> torch.Tensor:
        return module(batch.tokens_BS, batch.context.tokens.positions_BS, make_mb(2, 5, **fields))

    first = out(rng=RNGKey(1, 2, 0))
    EXACT.check(out(rng=RNGKey(1, 2, 0)), first, "same key")
    assert not torch.equal(out(rng=RNGKey(1, 3, 0)), first)
    plain = make()(batch.tokens_BS, batch.context.tokens.positions_BS, batch.context)
    EXACT.check(out(), plain, "no key")
    EXACT.check(out(rng=RNGKey(1, 2, 0), training=False), plain, "evaluation")
    kept = first != 0
    assert 0.4 < kept.double().mean() < 0.8
    EXACT.check(first[kept], (plain / 0.6)[kept], "kept values are scaled up")


def test_embedding_std_disables_weight_decay_of_embeddings():
    for std, decay in ((None, True), (1.0, False)):
        module = make(position_embedding="learned_absolute", init=InitConfig(embedding_std=std))
        assert {p.meta.decay for p in module.parameters()} == {decay}
