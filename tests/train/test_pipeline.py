"""Pipeline parallelism gives the losses, metrics, gradients, norms and weights of one rank."""

from dataclasses import replace

import pytest
import torch

from megatron_moe.build import build_data, build_eval_loaders, build_model, build_train_loader, run_summary
from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.config.model import MTPConfig
from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.config.training import BatchConfig
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.evaluation import evaluate
from megatron_moe.train.train_state import TrainState
from tests.helpers import tiny
from tests.helpers.pipelines import KERNELS, laid_out, make_trainer, train, train_on_ranks
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import FP64_LAYOUT


def model(num_layers=4, *, noisy=False, **changes):
    """Model with one dense layer followed by MoE layers with expert bias; with dropout in all places if `noisy`."""
    biased = tiny.router(num_experts=4, score_function="sigmoid", expert_bias=True, bias_update_rate=0.01)
    config = tiny.model(num_layers=num_layers, moe_config=tiny.moe(biased), **changes)
    if not noisy:
        return config
    core = CoreAttentionConfig(softmax_scale=8**-0.5, dropout=0.1)
    layers = tuple(replace(layer, hidden_dropout=0.1, mixer=replace(layer.mixer, core=core)) for layer in config.layers)
    return replace(config, layers=layers, embedding_dropout=0.1)


def plan(config=None, *, num_microbatches=4, **changes):
    short = replace(tiny.plan().data, seq_length=12)
    return tiny.plan(
        model=config or model(),
        data=short,
        batch=BatchConfig(micro_batch_size=1, global_batch_size=num_microbatches),
        **changes,
    )


PER_TOKEN = replace(tiny.plan().loop, calculate_per_token_loss=True)
MTP = MTPConfig(num_layers=2, loss_scaling_factor=0.3)
GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
CASES = {
    "two stages": (plan(), "Ett|ttL", 2, {}),
    "four uneven stages, one empty, loss alone": (plan(), "Et|ttt||L", 4, {}),
    "four ranks with two chunks each, dropout": (plan(model(7, noisy=True)), "E|t|t|t|t|t|t|tL", 4, {}),
    "tied embeddings": (plan(model(tied_embeddings=True)), "Ett|ttL", 2, {}),
    "tied embeddings, chunks": (plan(model(tied_embeddings=True)), "Et|t|t|tL", 2, {}),
    "learned positions, multi-token prediction": (
        plan(model(mtp=MTP, position_embedding="learned_absolute")), "Et|tttmmL", 2, {},
    ),
    "prediction before the loss stage, tied": (plan(model(mtp=MTP, tied_embeddings=True)), "Et|tt|tmm|L", 4, {}),
    "prediction alone, loss alone": (plan(model(mtp=MTP)), "Et|ttt|mm|L", 4, {}),
    "loss per token, prediction in a chunk": (plan(model(mtp=MTP), loop=PER_TOKEN), "Et|t|t|tmmL", 2, {}),
    "one microbatch": (plan(num_microbatches=1), "Et|t|t|tL", 4, {}),
    "eight microbatches, groups of four": (plan(num_microbatches=8), "Et|t|t|tL", 2, {GROUP: 4}),
    "split backward": (plan(model(noisy=True)), "Et|t|t|tL", 2, {"delay_wgrad_compute": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_pipeline_equals_one_rank(case):
    single_plan, layout, pp, pipeline = CASES[case]
    steps = 3 if pp == 2 else 2
    single = train(single_plan, ParallelContext.single(dtype=torch.float64), steps)
    ranks = train_on_ranks(laid_out(single_plan, layout, pp, **pipeline), steps=steps)
    assert len(single) > 100
    FP64_LAYOUT.check_all(ranks, single, case)


def test_pipeline_over_processes_equals_one_rank():
    single_plan = plan(model(3, mtp=MTP, tied_embeddings=True, noisy=True))
    single = train(single_plan, ParallelContext.single(dtype=torch.float64), steps=1)
    ranks = train_on_ranks(laid_out(single_plan, "Et|t|t|mmL", 2), processes=True, steps=1)
    FP64_LAYOUT.check_all(ranks, single, "two processes")


EARLY = DataParallelConfig(overlap_grad_reduce=True, ddp_bucket_size=500)


@pytest.mark.parametrize("data_parallel", [DataParallelConfig(), EARLY], ids=["reduce at the end", "reduce early"])
def test_data_parallel_pipelines_equal_one_rank(data_parallel):
    single_plan = plan(model(tied_embeddings=True, mtp=MTP))
    single = train(single_plan, ParallelContext.single(dtype=torch.float64), steps=2)
    two = laid_out(replace(single_plan, data_parallel=data_parallel), "Et|t|t|tmmL", 2)
    ranks = train_on_ranks(replace(two, parallel=replace(two.parallel, world_size=4)), steps=2)
    FP64_LAYOUT.check_all(ranks, single, "dp 2 x pp 2")


@pytest.mark.parametrize("layout, pp, size", [("Ett|tt|mm|L", 4, 4), ("Et|t|t|tmmL", 2, 1), ("Et|t|t|tmmL", 2, 3)])
def test_pipeline_evaluation_equals_one_rank(layout, pp, size):
    """Also if the microbatches of an evaluation do not fill the groups of virtual stages."""
    single_plan = plan(model(mtp=MTP, noisy=True), num_microbatches=4)
    single_plan = replace(single_plan, batch=replace(single_plan.batch, eval_global_batch_size=size))
    single_plan = replace(single_plan, loop=replace(single_plan.loop, eval_iters=2))

    def validation_loss(each, context):
        valid, _ = build_eval_loaders(each, context, build_data(each, context))
        return evaluate(make_trainer(each, context).pipeline, valid["validation"].steps())

    expected = validation_loss(single_plan, ParallelContext.single(dtype=torch.float64))
    ranks_plan = laid_out(single_plan, layout, pp)
    losses = on_threads(ranks_plan.parallel, lambda context: validation_loss(ranks_plan, context))
    FP64_LAYOUT.check(torch.tensor(losses), torch.full((pp,), expected), "validation loss")


def test_nonfinite_value_on_one_stage_skips_the_update_on_all():
    ranks_plan = laid_out(plan(), "Ett|ttL", 2)

    def main(context):
        trainer = make_trainer(ranks_plan, context)
        before = {name: value.clone() for name, value in trainer.model.named_parameters()}
        if context.rank == 0:
            block = trainer.model.decoder.layers["1"]
            block.self_attention.register_forward_hook(lambda module, args, out: out * float("inf"))
        loader = build_train_loader(ranks_plan, context, build_data(ranks_plan, context))
        outcome = trainer.step(loader.next_step(), TrainState())
        return bool(outcome.apply_update), all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())

    assert on_threads(ranks_plan.parallel, main) == [(False, True), (False, True)]


def test_log_starts_with_the_pipeline_layout():
    ranks_plan = laid_out(tiny.plan(), "Ett|tL", 2)

    def notes(context: ParallelContext) -> str:
        model = build_model(ranks_plan, context, KERNELS)
        return "\n".join(run_summary(ranks_plan, context, model, build_data(ranks_plan, context)))

    for text in on_threads(ranks_plan.parallel, notes):
        assert "pipeline layout Ett|tL, cost in operations:" in text
        assert "    1    1     0  layer 2, final norm, loss" in text
