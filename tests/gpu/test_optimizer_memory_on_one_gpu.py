"""Low-precision optimizer state on one GPU: the compiled kernel against the CPU, and state in host memory."""

import pytest
import torch
from torch import Tensor

from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.ops import AdamWState
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.precision.optimizer_state import PackedState, unpack
from tests.gpu.host_sync import no_host_sync
from tests.helpers.kernel_comparison import adamw_step
from tests.helpers.optim_parameters import BF16, FP32, make_gradients, set_grads
from tests.helpers.tolerances import EXACT, FP32_REF
from tests.kernels.test_triton_packed import FORMATS, make
from tests.optim.test_state_formats import AWAY, NARROW, REMAINDERS, Rig

pytestmark = pytest.mark.gpu1
SIZE = 100_003
State = dict[str, PackedState | Tensor]


def on_gpu(state: State) -> State:
    def moved(each: PackedState | Tensor) -> PackedState | Tensor:
        if isinstance(each, Tensor):
            return each.cuda()
        exponents = None if each.exponents is None else each.exponents.cuda()
        return PackedState(each.format, each.data.cuda(), exponents, each.root)

    return {name: moved(each) for name, each in state.items()}


def step(ops, state: State, number: int, *, apply_update: bool = True) -> None:
    device = state["weights"].device
    grad = torch.randn(SIZE, generator=torch.Generator().manual_seed(number)).to(device)
    move = adamw_step(number, apply_update=apply_update, device=device, beta2=0.99)
    *states, weights = state.values()
    ops.adamw_packed_(AdamWState(*states), grad, move, weights, first=300)


def numbers(state: State) -> dict[str, Tensor]:
    weights = state["weights"]
    found = {name: unpack(each, weights) if isinstance(each, PackedState) else each for name, each in state.items()}
    return {name: each.cpu() for name, each in found.items()}


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
def test_compiled_steps_match_the_cpu_reference(formats: tuple[str, str, str]) -> None:
    theirs = make(formats, SIZE)
    mine = on_gpu(theirs)
    step(triton_kernels, mine, 7)
    step(reference, theirs, 7)
    got, expected = numbers(mine), numbers(theirs)
    for name, kind in zip(("master", "exp_avg", "exp_avg_sq"), formats, strict=True):
        if kind in ("fp16", "fp8"):  # an error in the last bit may change the direction of rounding
            differ = float((got[name] != expected[name]).float().mean())
            assert differ < 0.01, f"{name}: {differ} of all differ"
            assert bool(((got[name] - expected[name]).abs() <= 0.13 * expected[name].abs() + 1e-6).all()), name
        else:
            FP32_REF.check(got[name], expected[name], name)


def test_compiled_remainder_and_fp32_masters_stay_bitwise_equal() -> None:
    packed = on_gpu(make(("remainder", "plain", "plain"), SIZE))
    plain = on_gpu(make(("plain", "plain", "plain"), SIZE))
    plain["master"].data.copy_(unpack(packed["master"], packed["weights"]))
    for number in range(1, 21):
        step(triton_kernels, packed, number)
        step(triton_kernels, plain, number)
    EXACT.check_all(numbers(packed), numbers(plain), "state")
    before = {
        name: [part.clone() for part in each.parts] for name, each in packed.items() if isinstance(each, PackedState)
    }
    step(triton_kernels, packed, 21, apply_update=False)
    for name, parts in before.items():
        for part, old in zip(packed[name].parts, parts, strict=True):
            EXACT.check(part.cpu(), old.cpu(), name)


def cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.parametrize("away", AWAY)
@pytest.mark.parametrize("precision", [FP32, BF16, REMAINDERS, *NARROW.values()], ids=["fp32", "bf16", "rest", *NARROW])
def test_host_state_matches_device_state(precision, away: str) -> None:
    resident = Rig(precision, backend="triton", device="cuda").steps(1, 5)
    other = Rig(precision, AWAY[away], backend="triton", device="cuda").steps(1, 5)
    here, there = cpu(resident.saved()), cpu(other.saved())
    if not AWAY[away].cpu_step:
        EXACT.check_all(there, here, "weights and state")
        return
    for name, value in here.items():
        off = float((there[name].float() - value.float()).abs().max() / value.float().abs().max())
        # a bf16 weight, or state of few bits, may be rounded in the other direction
        bound = 2e-6 if value.dtype is torch.float32 and precision in (FP32, BF16, REMAINDERS) else 0.13
        assert off <= bound, f"{name}: {off}"


def test_offloaded_state_is_updated_without_host_sync() -> None:
    rig = Rig(REMAINDERS, AWAY["half streamed, in chunks"], backend="triton", device="cuda").steps(1, 2)
    set_grads(rig.buffers, make_gradients(3))
    one, verdict = torch.ones((), device="cuda"), torch.ones((), dtype=torch.bool, device="cuda")
    with no_host_sync():
        rig.optimizer.step(lr=3e-2, weight_decay=0.1, grad_scale=one, apply_update=verdict)


@pytest.mark.parametrize("away", AWAY)
def test_skipped_steps_leave_the_state_unchanged(away: str) -> None:
    rig = Rig(NARROW["fp8 moments"], AWAY[away], backend="triton", device="cuda").steps(1, 2)
    torch.cuda.synchronize()
    before = cpu(rig.bits())
    rig.step(3, apply_update=False)
    torch.cuda.synchronize()
    EXACT.check_all(cpu(rig.bits()), before, "bits")
