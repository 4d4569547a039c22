"""Evaluation without dropout, jitter and token counts."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import torch

from megatron_moe.build import build_data, build_eval_loaders, build_model, build_train_loader
from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.rng import RNGKey
from megatron_moe.train.evaluation import Evaluation, evaluate
from megatron_moe.train.pipeline_stage import Pipeline
from megatron_moe.train.train_state import TrainState
from tests.helpers import tiny
from tests.helpers.tolerances import FP64_REF

CONTEXT = ParallelContext.single(dtype=torch.float64)
KERNELS = reference.bundle()


def noisy_model():
    """Model with dropout in all places and router jitter."""
    config = tiny.model(moe_config=tiny.moe(tiny.router(input_jitter_eps=0.3)), embedding_dropout=0.5)
    core = CoreAttentionConfig(softmax_scale=8**-0.5, dropout=0.5)
    layers = tuple(replace(layer, hidden_dropout=0.5, mixer=replace(layer.mixer, core=core)) for layer in config.layers)
    return replace(config, layers=layers)


def evaluated(model, batches):
    plan = tiny.plan(model=model.config)
    return evaluate(
        Pipeline(plan.pipeline, plan.layout, CONTEXT, model),
        [batches[start : start + 3] for start in range(0, len(batches), 3)],
    )


def test_evaluation_disables_dropout_and_jitter():
    noisy, calm = (build_model(tiny.plan(model=config), CONTEXT, KERNELS) for config in (noisy_model(), tiny.model()))
    plan = tiny.plan()
    batches = build_train_loader(plan, CONTEXT, build_data(plan, CONTEXT)).next_step()
    # these batches have the RNG keys of training
    keyed = [replace(batch, context=replace(batch.context, rng=RNGKey(1, 2, 3))) for batch in batches]
    FP64_REF.check(evaluated(noisy, keyed), evaluated(calm, batches), "validation loss")


def test_evaluation_counts_no_tokens_and_restores_training_mode():
    config = tiny.router(score_function="sigmoid", expert_bias=True)
    model = build_model(tiny.plan(model=tiny.model(moe_config=tiny.moe(config))), CONTEXT, KERNELS)
    plan = tiny.plan()
    evaluated(model, build_train_loader(plan, CONTEXT, build_data(plan, CONTEXT)).next_step())
    counted = [buffer.sum() for name, buffer in model.named_buffers() if name.endswith("tokens_since_update")]
    assert counted and not any(counted)
    assert model.training


def test_loss_is_the_mean_over_tokens_of_all_batches():
    model = build_model(tiny.plan(), CONTEXT, KERNELS)
    plan = tiny.plan()
    first, second = build_train_loader(plan, CONTEXT, build_data(plan, CONTEXT)).next_step()[:2]
    mask = torch.zeros_like(second.loss_mask_BS)
    mask[:, :5] = 1.0
    second = replace(second, loss_mask_BS=mask)
    one, two = evaluated(model, [first]), evaluated(model, [second])
    weights = (first.loss_mask_BS.sum(), mask.sum())
    expected = (one * weights[0] + two * weights[1]) / sum(weights)
    FP64_REF.check(evaluated(model, [first, second]), expected, "mean over tokens")


def test_each_split_has_its_own_loader():
    plan = tiny.plan(data=replace(tiny.plan().data, split="80,10,10"))
    valid, test = build_eval_loaders(plan, CONTEXT, build_data(plan, CONTEXT))
    first, second = (next(iter(loader.steps()))[0].tokens_BS for loader in (valid["validation"], test))
    assert not torch.equal(first, second)


def test_a_validation_set_may_be_named_test():
    plan = tiny.plan(data=replace(tiny.plan().data, split="80,10,10"))
    data = build_data(plan, CONTEXT)
    named = {"a": data.valid["validation"], "test": data.train}
    valid, test = build_eval_loaders(plan, CONTEXT, replace(data, valid=named))
    assert {name: loader.samples for name, loader in valid.items()} == named
    assert test.samples is data.test
    valid, test = build_eval_loaders(plan, CONTEXT, replace(data, valid=named, test=None))
    assert list(valid) == ["a", "test"] and test is None


class NumberedLoader:
    """Loader that records the numbers of the evaluations."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def steps(self, number: int = 0) -> Iterator[Any]:
        self.read.append(number)
        return iter(())


def test_evaluations_read_consecutive_data_across_restarts():
    """The first evaluation reads the beginning of the data. The final evaluation is omitted if one was due after the
    last iteration."""
    plan = tiny.plan(loop=replace(tiny.plan().loop, eval_interval=2, eval_iters=1))
    pipeline, data = (
        Pipeline(plan.pipeline, plan.layout, CONTEXT, build_model(plan, CONTEXT, KERNELS)),
        NumberedLoader(),
    )
    reporter = Mock(has_validation=Mock(return_value=False))
    for iterations in (range(1, 4), range(4, 7)):  # two starts
        validation = Evaluation(plan.loop, pipeline, {"validation": data}, None, reporter)
        for iteration in iterations:
            validation.run_if_due(TrainState(iteration=iteration))
    validation.run_last(TrainState(iteration=6))
    assert data.read == [0, 1, 2]
    validation.run_last(TrainState(iteration=7))
    assert data.read == [0, 1, 2, 3]
    Evaluation(plan.loop, pipeline, {"validation": data}, None, reporter).run_last(TrainState(iteration=6))
    assert data.read[4:] == [2], "an evaluation without training repeats that of the run"


def test_evaluations_have_their_own_batches() -> None:
    """The same samples in smaller microbatches give the same loss; a larger batch reads more samples."""
    base = tiny.plan()
    model = build_model(base, CONTEXT, KERNELS)
    losses = []
    for changes in ({}, {"eval_micro_batch_size": 1}, {"eval_global_batch_size": 12, "eval_micro_batch_size": 2}):
        plan = replace(base, batch=replace(base.batch, **changes), loop=replace(base.loop, eval_iters=1))
        valid, _ = build_eval_loaders(plan, CONTEXT, build_data(plan, CONTEXT))
        (batches,) = valid["validation"].steps()
        sizes = plan.batch.evaluation
        assert len(batches) * sizes.micro_batch_size == sizes.global_batch_size
        assert all(batch.labels_BS.shape[0] == sizes.micro_batch_size for batch in batches)
        losses.append(evaluate(Pipeline(plan.pipeline, plan.layout, CONTEXT, model), [batches]))
    FP64_REF.check(losses[1], losses[0], "loss of smaller microbatches")
    assert abs(losses[2] - losses[0]) > 1e-9
