"""Lion as the update rule of all parameters, and as the fallback of Muon."""

import pytest
import torch

from megatron_moe.config.optimizer import MuonConfig, OptimizerConfig
from tests.helpers.optim_parameters import FP64, UNDECAYED, make_gradients
from tests.helpers.tolerances import EXACT, FP64_LAYOUT
from tests.optim.test_state_formats import AWAY, EVERY_FORMAT, NARROW, RESIDENT, Rig

LION = OptimizerConfig(optimizer="lion", lion_beta1=0.9, lion_beta2=0.7, clip_grad=0.0)


def test_steps_follow_the_definition() -> None:
    rig = Rig(config=LION)
    expected, momentum = rig.weights(), {}
    for number in range(3):
        grads = make_gradients(number)
        rig.apply(grads, clip=0.0)
        for name, grad in grads.items():
            before, decay = momentum.get(name, 0.0 * grad), 0.0 if name in UNDECAYED else 0.1
            sign = (0.9 * before + 0.1 * grad).sign()
            expected[name] = expected[name] * (1 - 3e-2 * decay) - 3e-2 * sign
            momentum[name] = 0.7 * before + 0.3 * grad
    FP64_LAYOUT.check_all(rig.weights(), expected, "weights")
    found = {each.name: each.whole for each in rig.optimizer.named_state() if each.kind == "exp_avg"}
    FP64_LAYOUT.check_all(found, momentum, "momentum")
    assert {each.kind for each in rig.optimizer.named_state()} == {"exp_avg"}


@pytest.mark.parametrize("precision", EVERY_FORMAT.values(), ids=EVERY_FORMAT)
@pytest.mark.parametrize("away", [None, "half on the host", "half streamed, in chunks"])
def test_a_rejected_step_keeps_every_bit_in_all_formats(precision, away: str | None) -> None:
    rig = Rig(precision, AWAY[away] if away else RESIDENT, config=LION).steps(1, 2)
    before = rig.bits()
    rig.step(3, apply_update=False)
    EXACT.check_all(rig.bits(), before, "state after a rejected step")
    undisturbed = Rig(precision, config=LION).steps(1, 3)
    EXACT.check_all(rig.steps(3, 3).saved(), undisturbed.saved(), "state one step later, resident or not")
    assert not rig.optimizer.nonfinite


@pytest.mark.parametrize("name", NARROW)
def test_narrow_state_follows_the_run_in_fp64(name: str) -> None:
    """Weights stay close to those of fp64, except a few elements whose update has the other sign due to rounding."""
    wide, narrow = (Rig(precision, config=LION).steps(1, 4).weights() for precision in (FP64, NARROW[name]))
    for key, weights in wide.items():
        assert ((narrow[key].double() - weights).abs() < 0.03).double().mean() > 0.9, key


def test_muon_leaves_other_parameters_to_lion() -> None:
    rig = Rig(config=OptimizerConfig(optimizer="muon", muon=MuonConfig(muon_scalar_optimizer="lion"))).steps(1, 1)
    kinds = {(each.kind, each.name) for each in rig.optimizer.named_state()}
    assert {kind for kind, name in kinds if name == "output_layer.weight"} == {"exp_avg"}
    assert {kind for kind, name in kinds if name.endswith("linear_qkv.weight")} == {"momentum"}
    moved = torch.cat([w.flatten() for n, w in rig.weights().items() if n == "output_layer.weight"])
    before = torch.cat([w.flatten() for n, w in Rig().weights().items() if n == "output_layer.weight"])
    assert torch.allclose((moved - before * (1 - 3e-3)).abs(), torch.full_like(moved, 3e-2))
