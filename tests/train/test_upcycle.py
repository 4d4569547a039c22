"""Upcycling a whole model from a dense checkpoint."""

import pytest
import torch

from megatron_moe.build import build_data, build_model, build_train_loader
from megatron_moe.checkpoint.load import find
from megatron_moe.checkpoint.save import Saver
from megatron_moe.checkpoint.shards import SavedTensor, tensor_key
from megatron_moe.kernels import reference
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.specs.exitcodes import CheckpointProblem
from megatron_moe.specs.train import CheckpointSpec
from megatron_moe.train.evaluate import evaluate
from megatron_moe.train.stage import Pipeline
from megatron_moe.train.upcycle import dense_ancestor, load_upcycled
from tests import tiny
from tests.tolerances import FP64_REF

KERNELS = reference.bundle()
CONTEXT = ParallelContext.single(dtype=torch.float64)


def dense_checkpoint(spec, folder):
    """Saves the dense ancestor of `spec` with random weights; returns it."""
    dense = build_model(tiny.plan(model=spec), CONTEXT, KERNELS)
    saver = Saver(folder, CONTEXT, say=lambda line: None)
    tensors = {tensor_key("model", name): SavedTensor.whole(value) for name, value in dense.state_dict().items()}
    saver.save(1, tensors, {})
    saver.close()
    return dense


@pytest.mark.parametrize("granularity", [1, 2])
def test_the_upcycled_model_has_the_dense_models_loss(tmp_path, granularity):
    spec = tiny.model(moe_spec=tiny.moe(tiny.router(topk=2)))
    dense = dense_checkpoint(dense_ancestor(spec, granularity), tmp_path)
    sparse = build_model(tiny.plan(model=spec), CONTEXT, KERNELS)
    source = find(CheckpointSpec(load=str(tmp_path)), CONTEXT)
    lines = []
    load_upcycled(source, granularity, sparse, CONTEXT, KERNELS, say=lines.append)
    plan = tiny.plan()
    batches = build_train_loader(plan, CONTEXT, build_data(plan, CONTEXT)).next_step()
    pipelines = [Pipeline(tiny.plan(model=model.spec), CONTEXT, model) for model in (sparse, dense)]
    losses = [evaluate(pipeline, batches, num_microbatches=1) for pipeline in pipelines]
    FP64_REF.check(losses[0], losses[1], "loss of the upcycled model")
    assert not any("warning" in line for line in lines), lines


def test_an_inexact_conversion_says_why(tmp_path):
    spec = tiny.model(moe_spec=tiny.moe(tiny.router(pre_softmax=True)))
    dense_checkpoint(dense_ancestor(spec, 1), tmp_path)
    lines = []
    source = find(CheckpointSpec(load=str(tmp_path)), CONTEXT)
    load_upcycled(source, 1, build_model(tiny.plan(model=spec), CONTEXT, KERNELS), CONTEXT, KERNELS, say=lines.append)
    assert any("softmax before top-k" in line for line in lines), lines


def test_another_dense_model_is_refused(tmp_path):
    spec = tiny.model()
    dense_checkpoint(dense_ancestor(spec, 2), tmp_path)
    source = find(CheckpointSpec(load=str(tmp_path)), CONTEXT)
    with pytest.raises(CheckpointProblem, match="does not fit this run"):
        load_upcycled(source, 1, build_model(tiny.plan(model=spec), CONTEXT, KERNELS), CONTEXT, KERNELS)
