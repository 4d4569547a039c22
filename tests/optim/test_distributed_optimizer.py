"""AdamW over flat buffers: against torch and against the paper's formula, masters, refused steps, saved state."""

import numpy as np
import torch
from torch import Tensor

from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.optim.clip_grads import clip_coefficient, gradient_norms
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.optim_parameters import (
    BF16,
    FP32,
    FP64,
    UNDECAYED,
    make_buffers,
    make_gradients,
    make_parameters,
    set_grads,
)
from tests.helpers.tolerances import EXACT, FP64_REF

SPEC = OptimizerConfig(adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-6, clip_grad=1.0)
LR, DECAY = 3e-2, 0.1


class Rig:
    """Parameters with their buffers and optimizer."""

    def __init__(self, precision: PrecisionConfig = FP64, config: OptimizerConfig = SPEC) -> None:
        dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[precision.params]
        self.parameters = make_parameters(dtype)
        self.buffers = make_buffers(self.parameters, precision, optimizer=config)
        self.optimizer = Optimizer(self.buffers, precision)

    def step(self, gradients: dict[str, Tensor], *, proceed: bool = True, lr: float = LR, clip: float = 1.0) -> None:
        set_grads(self.buffers, gradients)
        norm = gradient_norms(self.buffers, ParallelContext.single())["all"]
        self.optimizer.step(
            lr=lr,
            weight_decay=DECAY,
            grad_scale=clip_coefficient(norm, clip),
            proceed=torch.tensor(proceed),
            decoupled_lr=None if self.buffers.optimizer.decoupled_lr is None else 10 * lr,
        )

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def bits(self) -> dict[str, Tensor]:
        """Everything that a step may change."""
        state = {f"{each.kind}.{each.name}": each.whole.clone() for each in self.optimizer.named_state()}
        return {**self.weights(), **state, "step": self.optimizer.step_count.clone()}


def test_ten_steps_match_torch_with_decay_groups_and_clipping() -> None:
    rig = Rig()
    theirs = {name: value.requires_grad_() for name, value in rig.weights().items()}
    groups = [
        {"params": [p for name, p in theirs.items() if name not in UNDECAYED], "weight_decay": DECAY},
        {"params": [p for name, p in theirs.items() if name in UNDECAYED], "weight_decay": 0.0},
    ]
    oracle = torch.optim.AdamW(groups, lr=LR, betas=(SPEC.adam_beta1, SPEC.adam_beta2), eps=SPEC.adam_eps)
    for step in range(10):
        # norms from 2 to 34: clipped in some steps, not in others
        gradients = make_gradients(step, scale=0.002 * 3**step)
        rig.step(gradients)
        for name, parameter in theirs.items():
            parameter.grad = gradients[name].clone()
        torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
        oracle.step()
    FP64_REF.check_all(rig.weights(), {name: p.detach() for name, p in theirs.items()}, "weights after ten steps")
    EXACT.check(rig.optimizer.step_count, torch.tensor(10), "step count")


def test_ten_steps_match_the_formula_of_the_paper() -> None:
    rig = Rig()
    weights = {name: value.numpy().copy() for name, value in rig.weights().items()}
    first = {name: np.zeros_like(value) for name, value in weights.items()}
    second = {name: np.zeros_like(value) for name, value in weights.items()}
    for step in range(1, 11):
        gradients = make_gradients(step)
        rig.step(gradients, clip=0.0)
        for name, weight in weights.items():
            gradient = gradients[name].numpy()
            first[name] = SPEC.adam_beta1 * first[name] + (1 - SPEC.adam_beta1) * gradient
            second[name] = SPEC.adam_beta2 * second[name] + (1 - SPEC.adam_beta2) * gradient**2
            direction = first[name] / (1 - SPEC.adam_beta1**step)
            size = np.sqrt(second[name] / (1 - SPEC.adam_beta2**step)) + SPEC.adam_eps
            decay = 0.0 if name in UNDECAYED else DECAY
            weights[name] = weight - LR * decay * weight - LR * direction / size
    FP64_REF.check_all(rig.weights(), weights, "weights after ten steps")


def test_bf16_weights_are_the_rounded_weights_of_an_fp32_run() -> None:
    low, full = Rig(BF16), Rig(FP32)
    for step in range(5):
        gradients = make_gradients(step)
        low.step(gradients)
        full.step(gradients)
    masters = {each.name: each.whole for each in low.optimizer.named_state() if each.kind == "master"}
    EXACT.check_all(masters, full.weights(), "masters")
    EXACT.check_all(low.weights(), {name: w.bfloat16() for name, w in full.weights().items()}, "bf16 weights")


def test_updates_too_small_for_bf16_add_up_in_the_masters() -> None:
    rig = Rig(BF16)
    before = rig.weights()
    ones = {name: torch.ones_like(g) for name, g in make_gradients(0).items()}
    large = {name: weight.abs() > 0.5 for name, weight in before.items()}

    def num_moved() -> int:
        return sum(int((weight != before[name])[large[name]].sum()) for name, weight in rig.weights().items())

    rig.step(ones, lr=1e-4)
    assert num_moved() == 0, f"{num_moved()} weights moved by less than half a unit in the last place"
    for _ in range(100):
        rig.step(ones, lr=1e-4)
    assert num_moved() > 200, f"only {num_moved()} weights moved in 101 small steps"


def test_a_refused_step_keeps_every_bit_whatever_the_gradients_hold() -> None:
    for precision in (FP64, BF16):
        rig = Rig(precision)
        for refused_at in (0, 2):
            for step in range(refused_at):
                rig.step(make_gradients(step))
            before = rig.bits()
            gradients = make_gradients(9)
            gradients["output_layer.weight"][0, 0] = float("nan")
            gradients["decoder.layers.0.mlp.experts.linear_fc1.weight"].fill_(float("inf"))
            rig.step(gradients, proceed=False)
            EXACT.check_all(rig.bits(), before, f"state after a step refused after {refused_at}")


def test_a_run_goes_on_after_a_refused_step_as_if_it_had_not_been() -> None:
    disturbed, calm = Rig(), Rig()
    bad = {name: g * float("nan") for name, g in make_gradients(5).items()}
    disturbed.step(bad, proceed=False)
    for step in range(3):
        disturbed.step(make_gradients(step))
        disturbed.step(bad, proceed=False)
        calm.step(make_gradients(step))
    EXACT.check_all(disturbed.bits(), calm.bits(), "state")


def test_masters_are_copied_only_where_they_are_wider_than_the_weights() -> None:
    kinds = {
        precision.params: {each.kind for each in Rig(precision).optimizer.named_state()} for precision in (FP64, BF16)
    }
    assert kinds == {"fp64": {"exp_avg", "exp_avg_sq"}, "bf16": {"master", "exp_avg", "exp_avg_sq"}}
    assert all(state.kept.master is None for state in Rig(FP64).optimizer.states)


def test_embedding_and_head_follow_their_own_learning_rate() -> None:
    plain, decoupled = Rig(), Rig(config=OptimizerConfig(adam_beta2=0.95, adam_eps=1e-6, decoupled_lr=1.0))
    start = plain.weights()
    plain.step(make_gradients(0))
    decoupled.step(make_gradients(0))
    for name, weight in decoupled.weights().items():
        factor = 10.0 if name in ("embedding.word_embeddings.weight", "output_layer.weight") else 1.0
        FP64_REF.check(weight - start[name], factor * (plain.weights()[name] - start[name]), name)


def test_saved_state_continues_bitwise_in_another_optimizer() -> None:
    for precision in (FP64, BF16):
        first, second = Rig(precision), Rig(precision)
        for step in range(3):
            first.step(make_gradients(step))
        saved = {(each.name, each.kind): each.whole.clone() for each in first.optimizer.named_state()}
        for each in second.optimizer.named_state():
            each.whole.copy_(saved[each.name, each.kind])
        if precision is FP64:
            for name, parameter in second.parameters.items():
                parameter.data.copy_(first.parameters[name].data)
        second.optimizer.step_count.copy_(first.optimizer.step_count)
        second.optimizer.weights_from_masters()
        EXACT.check_all(second.bits(), first.bits(), "state after loading")
        first.step(make_gradients(3))
        second.step(make_gradients(3))
        EXACT.check_all(second.bits(), first.bits(), "state one step later")


def test_masters_take_over_weights_that_were_loaded_later() -> None:
    rig = Rig(BF16)
    loaded = {name: parameter.detach() * 2 for name, parameter in rig.parameters.items()}
    for name, parameter in rig.parameters.items():
        parameter.data.copy_(loaded[name])
    rig.optimizer.masters_from_weights()
    rig.step(make_gradients(0), lr=0.0)
    EXACT.check_all(rig.weights(), loaded, "weights")


def test_norm_of_the_weights_counts_every_element_once() -> None:
    rig = Rig()
    flat = torch.cat([weight.reshape(-1) for weight in rig.weights().values()])
    FP64_REF.check(rig.optimizer.params_norm(), torch.linalg.vector_norm(flat), "weight norm")
