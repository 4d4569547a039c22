"""AdamW on flat buffers: agreement with torch, master weights, decoupled learning rate and weight norm."""

import torch

from megatron_moe.config.optimizer import OptimizerConfig
from tests.helpers.optim_parameters import BF16, FP32, FP64, UNDECAYED, make_gradients
from tests.helpers.tolerances import EXACT, FP64_REF
from tests.optim.test_state_formats import SPEC, Rig

LR, DECAY = 3e-2, 0.1


def test_ten_steps_match_torch_with_decay_groups_and_clipping() -> None:
    rig = Rig()
    theirs = {name: value.requires_grad_() for name, value in rig.weights().items()}
    groups = [
        {"params": [p for name, p in theirs.items() if name not in UNDECAYED], "weight_decay": DECAY},
        {"params": [p for name, p in theirs.items() if name in UNDECAYED], "weight_decay": 0.0},
    ]
    oracle = torch.optim.AdamW(groups, lr=LR, betas=(SPEC.adam_beta1, SPEC.adam_beta2), eps=SPEC.adam_eps)
    for step in range(10):
        # The scale grows from step to step, so gradients are clipped in some steps only.
        gradients = make_gradients(step, scale=0.002 * 3**step)
        rig.apply(gradients)
        for name, parameter in theirs.items():
            parameter.grad = gradients[name].clone()
        torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        oracle.step()
    FP64_REF.check_all(rig.weights(), {name: p.detach() for name, p in theirs.items()}, "weights after ten steps")
    EXACT.check(rig.optimizer.step_count, torch.tensor(10), "step count")


def test_bf16_weights_are_the_rounded_weights_of_an_fp32_run() -> None:
    low, full = Rig(BF16), Rig(FP32)
    for step in range(5):
        gradients = make_gradients(step)
        low.apply(gradients)
        full.apply(gradients)
    masters = {each.name: each.whole for each in low.optimizer.named_state() if each.kind == "master"}
    EXACT.check_all(masters, full.weights(), "masters")
    EXACT.check_all(low.weights(), {name: w.bfloat16() for name, w in full.weights().items()}, "bf16 weights")


def test_updates_too_small_for_bf16_accumulate_in_the_masters() -> None:
    rig = Rig(BF16)
    before = rig.weights()
    ones = {name: torch.ones_like(g) for name, g in make_gradients(0).items()}
    large = {name: weight.abs() > 0.5 for name, weight in before.items()}

    def num_moved() -> int:
        return sum(int((weight != before[name])[large[name]].sum()) for name, weight in rig.weights().items())

    rig.apply(ones, lr=1e-4)
    assert num_moved() == 0, f"{num_moved()} weights moved by less than half a unit in the last place"
    for _ in range(100):
        rig.apply(ones, lr=1e-4)
    assert num_moved() > 200, f"only {num_moved()} weights moved in 101 small steps"


def test_masters_exist_only_where_they_are_wider_than_the_weights() -> None:
    kinds = {
        precision.params: {each.kind for each in Rig(precision).optimizer.named_state()} for precision in (FP64, BF16)
    }
    assert kinds == {"fp64": {"exp_avg", "exp_avg_sq"}, "bf16": {"master", "exp_avg", "exp_avg_sq"}}
    assert all(state.stored.master is None for state in Rig(FP64).optimizer.states)


def test_embedding_and_head_use_the_decoupled_learning_rate() -> None:
    plain, decoupled = Rig(), Rig(config=OptimizerConfig(adam_beta2=0.95, adam_eps=1e-6, decoupled_lr=1.0))
    start = plain.weights()
    plain.apply(make_gradients(0))
    decoupled.apply(make_gradients(0))
    for name, weight in decoupled.weights().items():
        factor = 10.0 if name in ("embedding.word_embeddings.weight", "output_layer.weight") else 1.0
        FP64_REF.check(weight - start[name], factor * (plain.weights()[name] - start[name]), name)


def test_masters_are_set_from_weights_that_were_loaded_later() -> None:
    rig = Rig(BF16)
    loaded = {name: parameter.detach() * 2 for name, parameter in rig.parameters.items()}
    for name, parameter in rig.parameters.items():
        parameter.data.copy_(loaded[name])
    rig.optimizer.masters_from_weights()
    rig.apply(make_gradients(0), lr=0.0)
    EXACT.check_all(rig.weights(), loaded, "weights")


def test_norm_of_the_weights_counts_every_element_once() -> None:
    rig = Rig()
    flat = torch.cat([weight.reshape(-1) for weight in rig.weights().values()])
    FP64_REF.check(rig.optimizer.params_norm(), torch.linalg.vector_norm(flat), "weight norm")
