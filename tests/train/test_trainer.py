"""Training steps on one and several ranks."""

from dataclasses import replace

import pytest
import torch

from megatron_moe import build
from megatron_moe.build import build_data, build_model, build_train_loader, build_trainer
from megatron_moe.config.exit_codes import MemoryProblem
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.training import BatchConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.layout_check.record import record_run
from megatron_moe.layout_check.samples import random_datasets
from megatron_moe.logs.timers import Timers
from megatron_moe.moe.moe_layer import MoELayer
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.train_state import TrainState
from tests.helpers import tiny
from tests.helpers.bounded_dispatcher import bounded_comm
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT, FP64_LAYOUT

STEPS = 3


KERNELS = reference.bundle()


def train(plan, context, steps=STEPS, spoil=None):
    """Losses, gradient norms, metrics and weights after a few steps. `spoil(trainer, step)` runs before each step."""
    model = build_model(plan, context, KERNELS)
    trainer = build_trainer(plan, context, model, KERNELS)
    loader = build_train_loader(plan, context, build_data(plan, context))
    state, figures = TrainState(), {}
    for step in range(steps):
        if spoil:
            spoil(trainer, step)
        outcome = trainer.step(loader.next_step(), state)
        state.advance(outcome.counts, build.build_train_state_config(plan))
        figures[f"loss {step}"] = outcome.loss
        figures |= {f"norm {name} {step}": norm for name, norm in outcome.norms.items()}
    figures |= {name: torch.tensor(metric.value) for name, metric in trainer.metrics.reduce(context).items()}
    figures |= {name: value.detach().clone() for name, value in model.state_dict().items()}
    return figures


BIASED = tiny.router(score_function="sigmoid", expert_bias=True, balancing=("seq_aux_loss",), aux_loss_coeffs=(0.02,))
CASES = {
    "aux_loss": {},
    "per_token_loss": {"loop": replace(tiny.plan().loop, calculate_per_token_loss=True)},
    "expert_bias_and_sequence_aux_loss": {"model": tiny.model(moe_config=tiny.moe(BIASED))},
    "dropout_and_jitter": {
        "model": tiny.model(moe_config=tiny.moe(tiny.router(input_jitter_eps=0.1)), embedding_dropout=0.1)
    },
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(case):
    # one rank trains on the microbatches of both ranks
    plan = tiny.plan(**CASES[case])
    single = train(plan, ParallelContext.single(dtype=torch.float64))
    results = on_threads(ParallelConfig(world_size=2), lambda context: train(plan, context))
    for result in results:
        FP64_LAYOUT.check_all(result, single, case)


BALANCING_LOSSES = {
    "aux_loss": {"balancing": ("aux_loss",), "aux_loss_coeffs": (1.0,)},
    "seq_aux_loss": {"balancing": ("seq_aux_loss",), "aux_loss_coeffs": (1.0,)},
    "z_loss": {"z_loss_coeff": 1.0},
}


@pytest.mark.parametrize("loss", BALANCING_LOSSES)
def test_balancing_losses_of_per_token_loss_count_routed_tokens(loss):
    """Megatron-Core semantics: tokens masked by `--eod-mask-loss` are routed and count, padding does not."""
    batch, context = BatchConfig(micro_batch_size=8, global_batch_size=8), ParallelContext.single(dtype=torch.float64)
    datasets = random_datasets(tiny.plan(batch=batch), num_steps=1)
    (microbatch,) = build_train_loader(tiny.plan(batch=batch), context, datasets).next_step()
    num_routed, num_in_loss = int(microbatch.context.tokens.valid_BS.sum()), int(microbatch.loss_mask_BS.sum())
    assert num_in_loss < num_routed < microbatch.tokens_BS.numel()

    def router_gradients(per_token, **router):
        model = tiny.model(
            moe_config=tiny.moe(tiny.router(**{"balancing": ("none",), "aux_loss_coeffs": (0.0,)} | router))
        )
        plan = tiny.plan(model=model, batch=batch, loop=replace(tiny.plan().loop, calculate_per_token_loss=per_token))
        gradients = record_run(plan, context, KERNELS, datasets, num_steps=1).gradients
        return torch.stack([held.value for name, held in gradients.items() if name.endswith("router.weight")])

    def of_loss(per_token):
        return router_gradients(per_token, **BALANCING_LOSSES[loss]) - router_gradients(per_token)

    FP64_LAYOUT.check(of_loss(per_token=True), of_loss(per_token=False) * num_routed / num_in_loss, loss)


def test_expert_bias_range_is_recorded_every_step():
    plan, ranges = tiny.plan(**CASES["expert_bias_and_sequence_aux_loss"]), []

    def look(trainer, step):
        ranges.extend(router.expert_bias.max() - router.expert_bias.min() for router in trainer.routers)

    figures = train(plan, ParallelContext.single(dtype=torch.float64), spoil=look)
    assert max(ranges) > 0
    FP64_LAYOUT.check(figures["moe/expert_bias_range"], torch.stack(ranges).mean(), "range, before every step")


@pytest.mark.parametrize("overlap", [False, True])
def test_timers_of_level_2_have_the_parts_of_a_step(overlap):
    plan = tiny.plan()
    plan = replace(plan, pipeline=replace(plan.pipeline, overlap=overlap))
    context, kernels = ParallelContext.single(), reference.bundle()
    names = "embedding attention router dispatch experts combine residual head".split()
    parts = [f"{name}-{direction}" for name in names for direction in ("forward", "backward")]
    whole = ["forward-backward", "all-grads-sync", "optimizer"]
    for level, expected in ((0, []), (1, whole), (2, [*parts, *whole])):
        timers = Timers(level, context.device)
        trainer = build_trainer(plan, context, build_model(plan, context, kernels), kernels, timers)
        loader = build_train_loader(plan, context, build_data(plan, context))
        trainer.step(loader.next_step(), TrainState())
        found = timers.gather_seconds(context)
        assert set(expected) <= set(found) if expected else not found, found
        assert all(found[part][0] > 0 for part in expected)
        spent = sum(found[part][0] for part in parts if level == 2)
        assert spent < found["forward-backward"][0] if level else spent == 0


def test_step_lowers_the_loss_on_its_batch():
    plan = tiny.plan()
    context = ParallelContext.single(dtype=torch.float64)
    trainer = build_trainer(plan, context, build_model(plan, context, KERNELS), KERNELS)
    batch = build_train_loader(plan, context, build_data(plan, context)).next_step()
    losses = [float(trainer.step(batch, TrainState(iteration=i)).loss) for i in range(4)]
    assert losses == sorted(losses, reverse=True), losses


def test_microbatches_equal_the_whole_batch():
    # balancing losses are disabled, because they are defined per microbatch
    model = tiny.model(moe_config=tiny.moe(tiny.router(balancing=("none",), aux_loss_coeffs=(0.0,))))
    context = ParallelContext.single(dtype=torch.float64)
    whole = train(tiny.plan(model=model, batch=BatchConfig(micro_batch_size=8, global_batch_size=8)), context)
    parts = train(tiny.plan(model=model, batch=BatchConfig(micro_batch_size=1, global_batch_size=8)), context)
    names = [name for name in whole if not name.startswith("moe/")]
    FP64_LAYOUT.check_all({n: parts[n] for n in names}, {n: whole[n] for n in names}, "1 x 8 against 8 x 1")


def test_gradients_are_clipped_by_the_global_norm():
    plan, context = tiny.plan(), ParallelContext.single(dtype=torch.float64)
    trainer = build_trainer(plan, context, build_model(plan, context, KERNELS), KERNELS)
    batches = build_train_loader(plan, context, build_data(plan, context)).next_step()
    norm, clip = trainer.step(batches, TrainState()).norms["all"], plan.optimizer.clip_grad
    assert norm > clip
    # compares the first moment after one step with the unclipped gradient
    share = (1 - plan.optimizer.adam_beta1) * clip / (norm + 1e-6)
    for state in trainer.optimizer.states:
        FP64_LAYOUT.check(
            state.stored.states["exp_avg"].data, share * state.grads, f"first moments of {state.buffer.key}"
        )


def test_infinite_gradient_of_a_finite_loss_is_not_applied():
    plan, context = tiny.plan(), ParallelContext.single(dtype=torch.float64)
    good = train(plan, context, steps=1)

    def spoil(trainer, step):
        if step == 1:
            trainer.model.decoder.final_layernorm.weight.register_hook(lambda grad: grad * float("inf"))

    bad = train(plan, context, steps=2, spoil=spoil)
    assert torch.isfinite(bad["loss 1"]) and not torch.isfinite(bad["norm all 1"])
    weights = [name for name in good if name.endswith(".weight")]
    EXACT.check_all({n: bad[n] for n in weights}, {n: good[n] for n in weights}, "weights after an infinite gradient")


def test_nonfinite_step_stops_all_later_updates():
    plan, context = tiny.plan(), ParallelContext.single(dtype=torch.float64)
    good = train(plan, context, steps=1)

    def spoil(trainer, step):
        if step == 1:
            trainer.model.decoder.final_layernorm.register_forward_hook(lambda module, args, out: out * float("nan"))
        if step == 2:
            trainer.model.decoder.final_layernorm._forward_hooks.clear()

    bad = train(plan, context, steps=3, spoil=spoil)
    assert torch.isnan(bad["loss 1"]) and torch.isfinite(bad["loss 2"])
    weights = [name for name in good if name.endswith((".weight", ".bias"))]
    assert len(weights) > 10
    EXACT.check_all({n: bad[n] for n in weights}, {n: good[n] for n in weights}, "weights after a bad step")


def test_out_of_memory_step_raises_with_a_report():
    plan, context = tiny.plan(), ParallelContext.single(dtype=torch.float64)
    trainer = build_trainer(plan, context, build_model(plan, context, KERNELS), KERNELS)

    def fail(module, args):
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")

    trainer.model.register_forward_pre_hook(fail)
    batches = build_train_loader(plan, context, build_data(plan, context)).next_step()
    with pytest.raises(MemoryProblem, match="iteration 1: tried to allocate 20.00 GiB"):
        trainer.step(batches, TrainState())


@pytest.mark.parametrize("overflows", [False, True])
def test_expert_row_overflow_on_one_rank_stops_updates_of_all_ranks(monkeypatch, overflows):
    def new_expert_comm(config, ctx, kernels, **options):
        return bounded_comm(ctx, kernels, config.router.num_experts)

    def spoil(trainer, step):
        first = next(layer for layer in trainer.model.modules() if isinstance(layer, MoELayer))
        is_full = overflows and step == 1 and trainer.context.rank == 0
        first.dispatcher.max_rows = 0 if is_full else 1 << 30

    monkeypatch.setattr(build, "new_expert_comm", new_expert_comm)
    plan = tiny.plan()
    expected = train(plan, ParallelContext.single(dtype=torch.float64), steps=1 if overflows else STEPS)
    expected = {name: value for name, value in expected.items() if "weight" in name}
    for found in on_threads(ParallelConfig(world_size=2), lambda context: train(plan, context, spoil=spoil)):
        FP64_LAYOUT.check_all({name: found[name] for name in expected}, expected, "weights")
