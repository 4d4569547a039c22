"""Upcycling a whole model from a dense checkpoint."""

import pytest
import torch

from megatron_moe.build import build_data, build_model, build_train_loader
from megatron_moe.checkpoint.load import find_checkpoint
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.checkpoint.tensor_shards import TensorShard, tensor_key
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import local_shard, named_parameters
from megatron_moe.train.evaluation import evaluate
from megatron_moe.train.load_upcycled import load_upcycled
from megatron_moe.train.pipeline_stage import Pipeline
from tests.helpers import tiny
from tests.helpers.ranks import on_threads
from tests.helpers.tiny_models import dense_ancestor
from tests.helpers.tolerances import EXACT, FP64_REF

KERNELS = reference.bundle()
CONTEXT = ParallelContext.single(dtype=torch.float64)


def dense_checkpoint(config, folder):
    """Saves a dense model with random weights and returns it."""
    dense = build_model(tiny.plan(model=config), CONTEXT, KERNELS)
    saver = CheckpointSaver(folder, CONTEXT, say=lambda line: None)
    tensors = {tensor_key("model", name): TensorShard.whole(value) for name, value in dense.state_dict().items()}
    saver.save(1, tensors, {})
    saver.close()
    return dense


@pytest.mark.parametrize("granularity", [1, 2])
def test_upcycled_model_has_the_dense_models_loss(tmp_path, granularity):
    config = tiny.model(moe_config=tiny.moe(tiny.router(topk=2)))
    dense = dense_checkpoint(dense_ancestor(config, granularity), tmp_path)
    sparse, lines = upcycle(config, tmp_path, granularity)
    plan = tiny.plan()
    batches = build_train_loader(plan, CONTEXT, build_data(plan, CONTEXT)).next_step()
    pipelines = [
        Pipeline(PipelineConfig(), tiny.plan(model=model.config).layout, CONTEXT, model) for model in (sparse, dense)
    ]
    losses = [evaluate(pipeline, [[batch] for batch in batches]) for pipeline in pipelines]
    FP64_REF.check(losses[0], losses[1], "loss of the upcycled model")
    assert not any("warning" in line for line in lines), lines


def upcycle(config, folder, granularity=1, context=CONTEXT):
    """Returns a model initialised from the dense checkpoint, and the reported lines."""
    model, lines = build_model(tiny.plan(model=config, parallel=context.config), context, KERNELS), []
    source = find_checkpoint(CheckpointConfig(load=str(folder)), context, say=lambda line: None)
    load_upcycled(source, granularity, model, context, say=lines.append)
    return model, lines


def test_inexact_conversion_is_reported_with_its_reason(tmp_path):
    config = tiny.model(moe_config=tiny.moe(tiny.router(pre_softmax=True)))
    dense_checkpoint(dense_ancestor(config, 1), tmp_path)
    _, lines = upcycle(config, tmp_path)
    assert any("softmax before top-k" in line for line in lines), lines


def test_mismatching_dense_model_is_rejected(tmp_path):
    config = tiny.model()
    dense_checkpoint(dense_ancestor(config, 2), tmp_path)
    with pytest.raises(CheckpointProblem, match="does not fit this run"):
        upcycle(config, tmp_path)


LAYOUTS = {
    "tp2": ParallelConfig(world_size=2, tp=2, etp=2, sequence_parallel=True),
    "ep4": ParallelConfig(world_size=4, ep=4),
    "tp2-ep2-etp1": ParallelConfig(world_size=4, tp=2, ep=2, sequence_parallel=True),
    "pp2": ParallelConfig(world_size=2, pp=2),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("granularity", [1, 2])
def test_every_layout_gets_its_shards_of_the_upcycled_model(tmp_path, granularity, layout):
    config = tiny.model(num_layers=4, moe_config=tiny.moe(tiny.router(topk=2), dispatcher="alltoall"))
    dense_checkpoint(dense_ancestor(config, granularity), tmp_path)

    def upcycled(context):
        return dict(named_parameters(upcycle(config, tmp_path, granularity, context)[0]))

    whole = {name: parameter.detach() for name, parameter in upcycled(CONTEXT).items()}
    for held in on_threads(layout, upcycled):
        for name, parameter in held.items():
            EXACT.check(parameter, local_shard(whole[name], parameter.boxes, parameter.meta), name)
