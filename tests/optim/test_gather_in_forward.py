"""Weight gather overlapped with the forward: every use of a weight waits for its gather."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.memory import RecomputeConfig
from megatron_moe.config.model import ModelConfig, MTPConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.pipeline_layout import StageLayout, even_layout
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.model.gpt import GPT, training_objective
from megatron_moe.model.init import init_parameters
from megatron_moe.optim import param_store
from megatron_moe.optim.clip_grads import clip_coefficient, gradient_norms
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.grad_buffers import GradBuffers, finish_grads
from megatron_moe.parallel.collectives import PendingCollective, Sizes, shard_of, start_all_gather_
from megatron_moe.parallel.context import ParallelContext, ProcessGroup
from megatron_moe.parallel.parameter import named_parameters
from tests.helpers.optim_parameters import FP64
from tests.helpers.ranks import on_threads
from tests.helpers.tiny_models import layer_config, microbatch, mla_config, model_config, moe_config
from tests.helpers.tolerances import EXACT

DENSE, MOE = layer_config(), layer_config(feed_forward=moe_config())
GATED = replace(moe_config().shared, gate=True)
MODELS = {
    "dense": model_config(DENSE, DENSE),
    "tied": model_config(DENSE, MOE, tied_embeddings=True),
    "mla-moe": model_config(
        layer_config(mla_config()), layer_config(mla_config(), replace(moe_config(), dispatcher="alltoall"))
    ),
    "gated-shared": model_config(DENSE, layer_config(feed_forward=replace(moe_config(), shared=GATED))),
    "recomputed-moe": model_config(DENSE, layer_config(feed_forward=replace(moe_config(), dispatcher="alltoall"))),
    "mtp": model_config(DENSE, MOE, mtp=MTPConfig(num_layers=2), tied_embeddings=True),
}
RECOMPUTE = {"recomputed-moe": RecomputeConfig(recompute_modules=("moe",))}
"""Recompute config by name of the model; models without an entry save all activations."""
ZERO = DataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, ddp_bucket_size=200)
OVERLAPPED = replace(ZERO, overlap_param_gather=True)


def gather_when_waited_for(flat: Tensor, group: ProcessGroup, sizes: Sizes = None) -> PendingCollective:
    """Replaces a gather by one that runs only when it is waited for. Until then the weights are NaN."""
    mine = shard_of(flat, group, sizes).clone()
    flat.fill_(torch.nan)

    def gather() -> None:
        shard_of(flat, group, sizes).copy_(mine)
        start_all_gather_(flat, group, sizes).wait()

    return PendingCollective(None, gather)


def make_optimizer(
    config: ModelConfig,
    context: ParallelContext,
    data_parallel: DataParallelConfig,
    *,
    in_forward: bool = False,
    chunks: Sequence[StageLayout] = (),
    recompute: RecomputeConfig | None = None,
) -> tuple[GPT, Optimizer]:
    model = GPT(config, context, reference.bundle(), chunks=chunks, saved_tensors=SavedTensorPolicy(recompute))
    init_parameters(model, 7, config.init)
    buffers = GradBuffers(named_parameters(model), FP64, context, reference.bundle(), data_parallel=data_parallel)
    optimizer = Optimizer(buffers, FP64)
    if in_forward:
        optimizer.step_in_forward(model)
    elif data_parallel.overlap_param_gather:
        optimizer.enable_overlapped_gather(model)
    return model, optimizer


def null_step(optimizer: Optimizer) -> None:
    """Runs an optimizer step with learning rate 0, which launches the gathers but changes no weight."""
    one, yes = torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.bool)
    optimizer.step(lr=0.0, weight_decay=0.0, grad_scale=one, apply_update=yes)


def train(
    config: ModelConfig, context: ParallelContext, data_parallel: DataParallelConfig, **options: Any
) -> dict[str, Tensor]:
    model, optimizer = make_optimizer(config, context, data_parallel, **options)
    buffers, losses = optimizer.buffers, []
    for step in range(3):
        buffers.begin_step(2)
        for index in range(2):
            batch = microbatch(seed=100 * step + 10 * index + context.rank, training=True)
            scalar, _ = training_objective(model(batch), batch, mtp=config.mtp, per_token=False)
            scalar.backward()
            buffers.collect_autograd_grads()
            losses.append(scalar.detach())
        finish_grads(buffers, context)
        scale = clip_coefficient(gradient_norms(buffers, context)["all"], 1.0)
        optimizer.step(lr=1e-2, weight_decay=0.1, grad_scale=scale, apply_update=torch.ones((), dtype=torch.bool))
    return {**model.state_dict(), "losses": torch.stack(losses)}


@pytest.mark.parametrize("name", MODELS)
def test_every_reader_of_a_weight_waits_for_its_gather(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ParallelConfig(world_size=2, ep=2 if "moe" in name else 1)
    expected = on_threads(ranks, lambda context: train(MODELS[name], context, ZERO))
    recompute = RECOMPUTE.get(name)
    monkeypatch.setattr(param_store, "start_all_gather_", gather_when_waited_for)
    found = on_threads(ranks, lambda context: train(MODELS[name], context, OVERLAPPED, recompute=recompute))
    for rank in range(2):
        EXACT.check_all(found[rank], expected[rank], f"rank {rank}")


def test_a_layer_waits_only_for_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(param_store, "start_all_gather_", gather_when_waited_for)

    def missing(context: ParallelContext) -> list[int]:
        model, optimizer = make_optimizer(MODELS["dense"], context, OVERLAPPED)
        counts: list[int] = []

        def count(*_: object) -> None:
            counts.append(sum(int(p.isnan().any()) for p in model.parameters()))

        model.embedding.register_forward_hook(count)
        for layer in model.decoder.layers.values():
            layer.register_forward_hook(count)
        null_step(optimizer)
        count()
        model(microbatch())
        count()
        optimizer.finish_gather()
        return counts

    for counts in on_threads(ParallelConfig(world_size=2), missing):
        assert counts[0] > counts[1] > counts[2] > counts[3] > counts[4] == 0, f"pending weights: {counts}"


def test_nodes_acquire_only_where_weights_are_gathered() -> None:
    def num_acquiring(context: ParallelContext) -> int:
        model, _ = make_optimizer(MODELS["dense"], context, OVERLAPPED)
        return sum(node.store is not None for layer in model.decoder.by_index.values() for node in layer.nodes)

    assert num_acquiring(ParallelContext.single(dtype=torch.float64)) == 0
    assert all(on_threads(ParallelConfig(world_size=2), num_acquiring))


@pytest.mark.parametrize("name", ["tied", "mtp"])
def test_the_last_stage_acquires_its_copy_of_the_embedding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied head or multi-token prediction reads this copy, although the stage has no embedding node."""
    monkeypatch.setattr(param_store, "start_all_gather_", gather_when_waited_for)
    config = MODELS[name]
    chunk = even_layout(len(config.layers), pp=2, num_mtp=config.mtp.num_layers if config.mtp else 0).stages[1]

    def losses(context: ParallelContext, data_parallel: DataParallelConfig) -> Tensor:
        model, optimizer = make_optimizer(config, context, data_parallel, chunks=[chunk])
        null_step(optimizer)
        batch = microbatch(training=True)
        hidden_SBH = torch.ones(batch.tokens_BS.T.shape + (config.hidden_size,), dtype=torch.float64)
        output = model(batch, hidden_SBH)
        return torch.stack([output.loss_BS, *(loss_BS for loss_BS, *_ in output.mtp_losses)]).detach()

    alone = losses(ParallelContext.single(dtype=torch.float64), ZERO)
    for found in on_threads(ParallelConfig(world_size=2), lambda c: losses(c, replace(OVERLAPPED, ddp_bucket_size=1))):
        EXACT.check(found, alone, "losses of the tied head")
