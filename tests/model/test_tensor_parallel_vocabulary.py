"""Vocabulary-parallel embedding, head and loss equal those of one rank, also at shard boundaries."""

import pytest
import torch

from megatron_moe.model.embedding import Embedding
from megatron_moe.model.gpt import GPT
from megatron_moe.model.init import init_parameters
from megatron_moe.model.output_head import Head, cross_entropy
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import local_shard, named_parameters
from megatron_moe.parallel.rng import RNGKey
from megatron_moe.parallel.tensor_parallel import sequence_part
from tests.helpers.ranks import on_threads
from tests.helpers.sharded import KERNELS, LAYOUTS, run_module, whole
from tests.helpers.tiny_models import (
    HIDDEN,
    VOCAB,
    attention_config,
    build,
    layer_config,
    make_mb,
    microbatch,
    model_config,
    randn,
)
from tests.helpers.tolerances import EXACT, FP64_LAYOUT, FP64_REF

EDGES = torch.tensor([0, VOCAB // 4 - 1, VOCAB // 4, VOCAB // 2 - 1, VOCAB // 2, VOCAB - 1])
"""First and last ids of the parts of two and of four ranks."""


@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["", "large"])
@pytest.mark.parametrize("num_tokens", [6, 1, 0])
@pytest.mark.parametrize("layout", [LAYOUTS["tp2"], LAYOUTS["tp4"]], ids=["tp2", "tp4"])
def test_vocabulary_parallel_loss_equals_the_loss(layout, num_tokens, scale):
    logits, labels, probe = scale * randn(num_tokens, VOCAB), EDGES[:num_tokens], randn(num_tokens, seed=2)

    def on_rank(ctx):
        group = ctx.group("tp")
        part = logits.chunk(group.size, dim=-1)[group.rank].clone().requires_grad_()
        loss = cross_entropy(KERNELS, part, labels, group)
        (loss * probe).sum().backward()
        return loss.detach(), part.grad

    expected = logits.clone().requires_grad_()
    loss = KERNELS.cross_entropy(expected, labels)
    (loss * probe).sum().backward()
    ranks = on_threads(layout, on_rank)
    for of_rank in ranks:
        FP64_LAYOUT.check(of_rank[0], loss, "loss")
    FP64_LAYOUT.check(torch.cat([of_rank[1] for of_rank in ranks], dim=-1), expected.grad, "gradient")


def test_vocabulary_parallel_loss_of_bf16_logits_is_fp32():
    logits, labels = randn(6, VOCAB).bfloat16(), EDGES

    def on_rank(ctx):
        group = ctx.group("tp")
        part = logits.chunk(2, dim=-1)[group.rank].clone().requires_grad_()
        loss = cross_entropy(KERNELS, part, labels, group)
        loss.sum().backward()
        assert part.grad.dtype == torch.bfloat16
        return loss.detach()

    loss = on_threads(LAYOUTS["tp2"], on_rank)[0]
    assert loss.dtype == torch.float32
    expected = KERNELS.cross_entropy(logits.double(), labels)
    assert (loss.double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("learned", [False, True], ids=["", "learned positions"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_vocabulary_parallel_embedding_equals_one_rank(layout, learned):
    kind = "learned_absolute" if learned else "none"
    config = model_config(position_embedding=kind, max_positions=9, embedding_dropout=0.3)
    tokens_BS = torch.cat([EDGES, EDGES.flip(0)[:2]]).expand(2, 8)
    mb = make_mb(2, 8, rng=RNGKey(1, 2, 0))
    probe = randn(8, 2, HIDDEN)

    def on_rank(ctx):
        index, num_parts = sequence_part(ctx)
        nothing = torch.zeros(())
        return run_module(
            lambda ctx: Embedding(config, ctx, KERNELS),
            nothing,
            probe.chunk(num_parts)[index],
            ctx,
            lambda embedding, x: embedding(tokens_BS, mb.tokens.positions_BS, mb) + x,
        )

    alone, ranks = on_rank(ParallelContext.single()), on_threads(layout, on_rank)
    outs = [rank.out for rank in ranks]
    EXACT.check(torch.cat(outs) if layout.sequence_parallel else outs[0], alone.out, "embedded")
    FP64_LAYOUT.check_all(whole([r.gradients for r in ranks]), whole([alone.gradients]), "gradients")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_rank_gathers_the_logits_of_the_whole_vocabulary(layout, tied):
    config = model_config(
        layer_config(attention_config(num_heads=8, num_query_groups=4)), tied_embeddings=tied, head_bias=True
    )
    batch = microbatch(2, 8)

    def logits(ctx):
        model = GPT(config, ctx, KERNELS)
        init_parameters(model, 7, config.init)
        return model.logits(batch.tokens_BS, batch.context).detach()

    expected = build(config).logits(batch.tokens_BS, batch.context)
    for actual in on_threads(layout, logits):
        FP64_REF.check(actual, expected, "logits")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_initial_values_are_shards_of_those_of_one_rank(layout):
    config = model_config(
        layer_config(attention_config(num_heads=8, num_query_groups=4, qkv_bias=True)), tied_embeddings=False
    )
    expected = dict(build(config).named_parameters())

    def on_rank(ctx):
        model = GPT(config, ctx, KERNELS)
        init_parameters(model, 7, config.init)
        for name, p in named_parameters(model):
            EXACT.check(p, local_shard(expected[name].detach(), p.boxes, p.meta), name)
        return sum(p.numel() for p in model.parameters())

    assert max(on_threads(layout, on_rank)) < sum(p.numel() for p in expected.values()) / layout.tp * 1.1


@pytest.mark.parametrize("layout", [LAYOUTS["tp2"], LAYOUTS["tp4"]], ids=["tp2", "tp4"])
def test_chunked_vocabulary_parallel_loss_equals_the_loss(layout):
    config, labels_BS = model_config(loss_chunk=3), microbatch(2, 4).labels_BS

    def losses(ctx, hidden_SBH):
        head = Head(config, ctx, KERNELS)
        init_parameters(head, 5, config.init)
        loss_BS = head(hidden_SBH, labels_BS=labels_BS)
        loss_BS.sum().backward()
        return loss_BS.detach(), hidden_SBH.grad, head.weight.grad

    def on_rank(ctx):
        return losses(ctx, randn(4, 2, HIDDEN).requires_grad_())

    expected = losses(ParallelContext.single(dtype=torch.float64), randn(4, 2, HIDDEN).requires_grad_())
    ranks = on_threads(layout, on_rank)
    for of_rank in ranks:
        FP64_LAYOUT.check(of_rank[0], expected[0], "loss")
        FP64_LAYOUT.check(of_rank[1], expected[1], "hidden")
    FP64_LAYOUT.check(torch.cat([of_rank[2] for of_rank in ranks]), expected[2], "matrix")
