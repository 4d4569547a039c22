"""Losses and weight gradients of a model with context parallelism equal those of one rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.linear_attention import CPMode
from megatron_moe.config.model import ModelConfig, MTPConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.data.batch import MicroBatch, split_sequence, to_device
from megatron_moe.kernels.ops import Kernels
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.model.gpt import GPT, training_objective
from megatron_moe.model.init import init_parameters
from megatron_moe.parallel.collectives import all_reduce_
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import named_parameters
from tests.helpers import tiny, tiny_models
from tests.helpers.example_proofs import check_copies
from tests.helpers.ranks import on_threads
from tests.helpers.sharded import Held, held, whole
from tests.helpers.tiny_models import gradients, layer_config, microbatch, model_config, moe_config
from tests.helpers.tolerances import EXACT, FP64_LAYOUT
from tests.parity import cells
from tests.parity.dimensions import cell_of

KERNELS = reference.bundle()
SEQ = 16
CP2 = ParallelConfig(world_size=2, cp=2)
CP4 = ParallelConfig(world_size=4, cp=4)
LEVELS = ParallelConfig(world_size=4, cp=4, cp_sub_axes=(2, 2))
LAYOUTS = (("p2p", CP2), ("p2p", CP4), ("allgather", CP4), ("a2a", CP2), ("a2a", CP4), ("a2a+p2p", LEVELS))
"""a2a over four ranks gives each one of four heads, and repeats the two groups of keys."""


def exchanging(mixer: Any, exchange: str) -> Any:
    return replace(mixer, core=replace(mixer.core, context_exchange=exchange))


def model(mixer: Any, exchange: str, **changes: Any) -> ModelConfig:
    """A dense layer and an MoE layer."""
    mixer = exchanging(mixer, exchange)
    return model_config(layer_config(mixer), layer_config(mixer, moe_config()), **changes)


@dataclass(frozen=True)
class Run:
    scalar: Tensor
    sums: Tensor
    gradients: dict[str, Tensor]


def run(
    config: ModelConfig, batch: MicroBatch, ctx: ParallelContext, *, per_token: bool = False, kernels: Kernels = KERNELS
) -> Run:
    """Loss and metrics of one rank, and the gradients, reduced over the context-parallel ranks."""
    gpt = GPT(config, ctx, kernels)
    init_parameters(gpt, 7, config.init)
    batch, cp = split_sequence(to_device(batch, ctx.device), ctx), ctx.group("cp")
    scalar, sums = training_objective(gpt(batch), batch, mtp=config.mtp, per_token=per_token)
    scalar.backward()
    share = 1.0 if per_token else 1.0 / cp.size
    means = {name: all_reduce_(grad.clone(), cp) * share for name, grad in gradients(gpt).items()}
    both = all_reduce_(torch.stack([value.double() for value in sums["lm loss"]]), cp)
    return Run(all_reduce_(scalar.detach().clone(), cp) * share, both, means)


def check(config: ModelConfig, batch: MicroBatch, parallel: ParallelConfig, **options: Any) -> None:
    one = run(config, batch, ParallelContext.single(), **options)
    for result in on_threads(parallel, lambda ctx: run(config, batch, ctx, **options)):
        FP64_LAYOUT.check(result.scalar, one.scalar, "objective")
        FP64_LAYOUT.check(result.sums, one.sums, "sum of losses, tokens")
        FP64_LAYOUT.check_all(result.gradients, one.gradients, "gradients")


def documents(batch: int = 2, seq: int = SEQ) -> dict[str, Tensor]:
    """Segments and positions of sequences packed from documents of 1, 6 and 9 tokens, and of 13 and 3."""
    lengths = ((1, 6, 9), (13, 3))[:batch]
    segments = [torch.repeat_interleave(torch.arange(len(of)), torch.tensor(of)) for of in lengths]
    positions = [torch.cat([torch.arange(length) for length in of]) for of in lengths]
    return {"segments_BS": torch.stack(segments), "positions_BS": torch.stack(positions)}


def with_accumulate(packed: MicroBatch, spans: Sequence[tuple[int, int]]) -> list[MicroBatch]:
    """Microbatch of each document of a packed sequence. `spans`: (first position, end) of the documents."""
    return [
        MicroBatch(
            tokens_BS=packed.tokens_BS[:, start:end],
            labels_BS=packed.labels_BS[:, start:end],
            loss_mask_BS=packed.loss_mask_BS[:, start:end],
            context=tiny_models.make_mb(1, end - start),
        )
        for start, end in spans
    ]


MIXERS = {
    "gqa": tiny.attention(qk_norm="per_head"),
    "mla": tiny_models.mla_config(num_heads=4),
    "window and sinks": tiny.attention(
        core=replace(tiny.attention().core, window=(5, 0), sinks=True), output_gate=True, qkv_bias=True
    ),
    "mla off by one": tiny_models.mla_config(num_heads=4, core={"off_by_one": True}),
}


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize(("exchange", "parallel"), LAYOUTS)
def test_weight_gradients_equal_those_of_one_rank(exchange: str, parallel: ParallelConfig, mixer: str) -> None:
    check(model(MIXERS[mixer], exchange), microbatch(2, SEQ), parallel)


@pytest.mark.parametrize("mixer", ["gqa", "mla"])
@pytest.mark.parametrize(("exchange", "parallel"), LAYOUTS)
def test_packed_documents_equal_those_of_one_rank(exchange: str, parallel: ParallelConfig, mixer: str) -> None:
    check(model(MIXERS[mixer], exchange), microbatch(2, SEQ, **documents()), parallel, per_token=True)


@pytest.mark.parametrize(("exchange", "parallel"), LAYOUTS)
@pytest.mark.parametrize("per_token", [False, True])
def test_multi_token_prediction_across_chunk_boundaries(
    per_token: bool, exchange: str, parallel: ParallelConfig
) -> None:
    """Later tokens are often on other ranks, documents end inside chunks, and some tokens are padding."""
    config = model(MIXERS["gqa"], exchange, mtp=MTPConfig(num_layers=3), position_embedding="learned_absolute")
    valid = torch.rand(2, SEQ, generator=torch.Generator().manual_seed(1)) > 0.2
    check(config, microbatch(2, SEQ, valid_BS=valid, **documents()), parallel, per_token=per_token)


@pytest.mark.parametrize(
    "cell",
    [
        "attention=mla cp=2 pp=2 vpp=2 accumulation=2 balance=none recompute=full cpcomm=p2p",
        "attention=gqa cp=2 pp=2 accumulation=2 balance=none recompute=small cpcomm=allgather",
    ],
)
def test_copies_with_several_microbatches_in_flight_equal_one_rank(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_copies(cells.plan_of(cell_of(cell)), monkeypatch)


def hybrid(cp_mode: CPMode) -> ModelConfig:
    """Layers with a gated delta net, Mamba and softmax attention."""
    linear = [replace(tiny_models.LINEAR_ATTENTION[name], cp_mode=cp_mode) for name in ("delta", "mamba")]
    layers = [(linear[0], moe_config()), (linear[1], None), (MIXERS["gqa"], moe_config())]
    return model_config(*(layer_config(mixer, feed_forward) for mixer, feed_forward in layers))


@pytest.mark.parametrize(
    ("config", "parallel"),
    [
        (model(MIXERS["gqa"], "p2p"), CP4),
        (hybrid("headwise"), CP2),
        (hybrid("chunkwise"), CP2),
        (hybrid("chunkwise"), replace(CP4, cp_split="contiguous")),
    ],
    ids=["attention", "hybrid by heads", "hybrid by chunks", "hybrid by contiguous chunks"],
)
def test_packed_documents_are_separate_sequences(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Ranks with three documents in one sequence, against one rank that is given the documents one by one."""
    packed = microbatch(1, SEQ, **documents(1))
    over_ranks = on_threads(parallel, lambda ctx: run(config, packed, ctx, per_token=True))
    apart = [
        run(config, alone, ParallelContext.single(), per_token=True)
        for alone in with_accumulate(packed, ((0, 1), (1, 7), (7, 16)))
    ]
    for result in over_ranks:
        FP64_LAYOUT.check(result.sums, sum(each.sums for each in apart), "sum of losses, tokens")
        for name, grad in result.gradients.items():
            FP64_LAYOUT.check(grad, sum(each.gradients[name] for each in apart), name)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(("exchange", "parallel"), LAYOUTS)
def test_rank_with_only_masked_tokens_has_no_nan(exchange: str, parallel: ParallelConfig, per_token: bool) -> None:
    """Zigzag: the last rank holds the middle of the sequence."""
    batch = microbatch(2, SEQ)
    middle = SEQ // (2 * parallel.cp)
    mask = batch.loss_mask_BS.clone()
    mask[:, SEQ // 2 - middle : SEQ // 2 + middle] = 0
    check(model(MIXERS["gqa"], exchange), replace(batch, loss_mask_BS=mask), parallel, per_token=per_token)


def test_batch_without_tokens_has_zero_gradients() -> None:
    batch = microbatch(2, SEQ)
    batch = replace(batch, loss_mask_BS=torch.zeros_like(batch.loss_mask_BS))
    for result in on_threads(CP2, lambda ctx: run(model(MIXERS["gqa"], "p2p"), batch, ctx)):
        EXACT.check_all(result.gradients, {name: torch.zeros_like(g) for name, g in result.gradients.items()})


def test_layers_with_different_exchanges() -> None:
    kinds = ("p2p", "allgather", "a2a", "a2a+p2p")
    config = model_config(*(layer_config(exchanging(MIXERS["gqa"], kind)) for kind in kinds))
    check(config, microbatch(2, SEQ), LEVELS)


@pytest.mark.parametrize(("limit", "degree"), [(SEQ, 1), (7, 2), (4, 4)])
@pytest.mark.parametrize("exchange", ["p2p", "allgather", "a2a"])
def test_context_degree_per_microbatch_equals_one_rank(exchange: str, limit: int, degree: int) -> None:
    """Groups of `degree` of the four ranks split the sequences of up to 13 tokens that stay together."""
    parallel = replace(CP4, max_seqlen_per_dp_cp_rank=limit)
    half, other = documents(), documents()
    packed = {name: torch.cat([half[name], other[name].flip(0)]) for name in half}
    batch = microbatch(4, SEQ, max_seqlen=13, **packed)
    degrees = on_threads(parallel, lambda ctx: len(split_sequence(batch, ctx).context.tokens.part.of_ranks))
    assert degrees == [degree] * 4
    config = model(MIXERS["gqa"], exchange, mtp=MTPConfig(num_layers=2))
    check(config, batch, parallel)
    check(config, batch, parallel, per_token=True)


@pytest.mark.parametrize("exchange", ["p2p", "allgather", "a2a"])
def test_context_parallelism_with_sequence_parallelism(exchange: str) -> None:
    """Every matrix and sink that is sharded over tp has the gradient of one rank."""
    layer = layer_config(exchanging(MIXERS["window and sinks"], exchange))
    config, parallel = model_config(layer, layer), ParallelConfig(world_size=4, tp=2, cp=2, sequence_parallel=True)

    def on_rank(ctx: ParallelContext) -> tuple[Run, dict[str, Held]]:
        result, layout = run(config, microbatch(2, SEQ), ctx), GPT(config, ctx, KERNELS)
        cut = {name for name, parameter in named_parameters(layout) if parameter.meta.tp_dim is not None}
        return result, held(((name, result.gradients[name]) for name in cut), layout)

    one, results = run(config, microbatch(2, SEQ), ParallelContext.single()), on_threads(parallel, on_rank)
    for result, _ in results:
        FP64_LAYOUT.check(result.scalar, one.scalar, "objective")
        FP64_LAYOUT.check(result.sums, one.sums, "sum of losses, tokens")
    joined = whole([mine for _, mine in results])
    assert any(name.endswith("sinks") for name in joined), sorted(joined)
    FP64_LAYOUT.check_all(joined, {name: one.gradients[name] for name in joined}, "gradients")
