"""Low-precision optimizer state: exact values and error bounds of each format, and AdamW against fp32 state."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_moe.kernels.backends.torch_native import backend as torch_native
from megatron_moe.kernels.backends.triton import backend as triton
from megatron_moe.kernels.ops import AdamWState
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.precision.dither import dither
from megatron_moe.precision.optimizer_state import PackedState, pack, round_weights, unpack
from tests.helpers.kernel_comparison import adamw_step
from tests.helpers.tolerances import EXACT

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # numpy, of the interpreter
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CPU = torch.device("cpu")
BACKENDS = pytest.mark.parametrize("ops", [reference, torch_native], ids=["reference", "torch_native"])
ALL_BACKENDS = pytest.mark.parametrize(
    "ops", [reference, torch_native, triton], ids=["reference", "torch_native", "triton"]
)
HALF_UNIT = {"fp16": 2.0**-11, "fp8": 2.0**-4}
"""Largest relative error of a number that is rounded to the nearest, near the largest one of its block."""


def draw(size: int, seed: int = 0) -> Tensor:
    """Draws numbers of very different magnitudes, and some zeros."""
    source = torch.Generator().manual_seed(seed)
    numbers = torch.randn(size, generator=source) * torch.exp2(torch.randint(-12, 3, (size,), generator=source))
    return torch.where(torch.rand(size, generator=source) < 0.05, 0.0, numbers)


def empty(name: str, size: int, *, root: bool = False) -> PackedState:
    return PackedState.zeros(size, name, torch.float32, CPU, root=root)


def ties(size: int) -> Tensor:
    """fp32 numbers halfway between two bf16 numbers, of both signs."""
    bits = torch.randint(0x3000, 0x4F00, (size,), generator=torch.Generator().manual_seed(3))
    wide = ((bits.to(torch.int32) << 16) + 0x8000).view(torch.float32)
    return torch.where(torch.arange(size) % 2 == 0, wide, -wide)


def test_weight_and_remainder_restore_fp32_bitwise() -> None:
    specials = torch.tensor([0.0, -0.0, 1.0, 3.4028234e38, -3.4028234e38, 1e-45, torch.inf, -torch.inf])
    any_bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(1))
    any_bits = any_bits.to(torch.int32).view(torch.float32)
    numbers = torch.cat([draw(10_000), ties(10_000), specials, any_bits[~any_bits.isnan()]])
    weights = round_weights(numbers, torch.bfloat16)
    rest = pack(numbers, empty("remainder", len(numbers)), weights)
    assert rest.data.dtype is torch.int16
    EXACT.check(unpack(rest, weights).view(torch.int32), numbers.view(torch.int32), "bits")


def test_weights_are_rounded_to_the_nearest_and_ties_away_from_zero() -> None:
    numbers = draw(100_000)
    between = (numbers.view(torch.int32) & 0xFFFF) == 0x8000
    EXACT.check(round_weights(numbers, torch.bfloat16)[~between], numbers.bfloat16()[~between], "nearest")
    rounded = round_weights(ties(1000), torch.bfloat16).float()
    assert bool((rounded.abs() > ties(1000).abs()).all())
    EXACT.check(round_weights(numbers, torch.float64), numbers.double(), "other formats")
    endless = round_weights(torch.tensor([torch.inf, -torch.inf, torch.nan]), torch.bfloat16).tolist()
    assert endless[:2] == [torch.inf, -torch.inf] and endless[2] != endless[2]


@pytest.mark.parametrize("name", ["fp16", "fp8"])
@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("size", [1, 127, 128, 1000])
def test_repacking_is_lossless(name: str, root: bool, size: int) -> None:
    numbers = draw(size).abs() if root else draw(size)
    once = unpack(pack(numbers, empty(name, size, root=root)))
    repacked = unpack(pack(once, empty(name, size, root=root)))
    EXACT.check(repacked, once, "packed twice")


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_rounding_error_is_at_most_half_a_unit(name: str) -> None:
    numbers = draw(100_000)
    error = (unpack(pack(numbers, empty(name, len(numbers)))) - numbers).abs()
    largest = torch.nn.functional.pad(numbers.abs(), (0, -len(numbers) % 128)).view(-1, 128).amax(1)
    largest = largest.repeat_interleave(128)[: len(numbers)]
    smallest = largest * {"fp16": 2.0**-39, "fp8": 2.0**-17}[name]
    bound = torch.maximum(numbers.abs() * HALF_UNIT[name], smallest)
    assert bool((error <= bound).all()), f"{float((error / bound).max())} of the bound"


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_positive_second_moments_stay_positive(name: str) -> None:
    numbers = torch.tensor([1.0, 1e-30, 1e-12, 0.0])
    kept = unpack(pack(numbers, empty(name, 4, root=True)))
    assert (kept > 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_packing_copies_nothing_from_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, such a copy would block the host."""
    state = PackedState.zeros(300, name, torch.float32, torch.device("cpu"), root=True)
    monkeypatch.setattr(torch, "tensor", None)
    packed = pack(torch.ones(300), state)
    assert packed.data.dtype is state.data.dtype and torch.equal(unpack(packed), torch.ones(300))


def test_stochastic_rounding_to_fp8_keeps_the_mean() -> None:
    number, size = 1.1, 100_000
    numbers = torch.full((size,), number)
    noise = dither(size, torch.tensor(3), 0, 0, CPU)
    kept = unpack(pack(numbers, empty("fp8", size), dither=noise))
    assert set(kept.tolist()) == {1.0, 1.125}
    assert abs(float(kept.double().mean()) - number) < 5e-4  # 3 standard errors
    EXACT.check(dither(50, torch.tensor(3), 0, 70, CPU), noise[70:120], "a part of it")
    for other in (dither(size, torch.tensor(4), 0, 0, CPU), dither(size, torch.tensor(3), 1, 0, CPU)):
        assert abs(float(torch.corrcoef(torch.stack([noise, other]))[0, 1])) < 0.01


class State:
    """AdamW's state of 1,000 bf16 weights in chosen formats."""

    SIZE = 1000

    def __init__(self, master: str, first: str, second: str, dtype: torch.dtype = torch.float32) -> None:
        self.weights = draw(self.SIZE).bfloat16()
        self.master = empty(master, self.SIZE)
        if master != "remainder":
            self.master = pack(self.weights.float(), self.master)
        self.first = PackedState.zeros(self.SIZE, first, dtype, CPU, root=False)
        self.second = PackedState.zeros(self.SIZE, second, dtype, CPU, root=second != "plain")

    def step(self, ops, number: int, *, apply_update: bool = True, bad: float | None = None, split: int = 0) -> None:
        """Applies one step; `split` applies it in two parts."""
        grad = draw(self.SIZE, seed=number)
        if bad is not None:
            grad[::7] = bad
        ends = [0, split, self.SIZE] if split else [0, self.SIZE]
        for start, end in zip(ends, ends[1:], strict=False):
            state = AdamWState(*(each.part(start, end) for each in (self.master, self.first, self.second)))
            move = adamw_step(number, apply_update=apply_update)
            ops.adamw_packed_(state, grad[start:end].clone(), move, self.weights[start:end], 5 + start)

    def parts(self) -> dict[str, Tensor]:
        states = {"master": self.master, "first": self.first, "second": self.second}
        found = {f"{name} {i}": part for name, state in states.items() for i, part in enumerate(state.parts)}
        return {"weights": self.weights, **found}

    def bits(self) -> dict[str, Tensor]:
        return {name: part.clone() for name, part in self.parts().items()}


@ALL_BACKENDS
def test_steps_on_remainders_and_fp32_masters_are_bitwise_equal(ops) -> None:
    packed, plain = State("remainder", "plain", "plain"), State("plain", "plain", "plain")
    tied = ties(State.SIZE)
    for number in range(1, 51):
        packed.step(ops, number)
        plain.step(ops, number)
        if number == 20:  # and from masters that are half way between two weights
            plain.master.data.copy_(tied)
            plain.weights.copy_(round_weights(tied, torch.bfloat16))
            packed.weights.copy_(plain.weights)
            packed.master.data.copy_(pack(tied, packed.master, packed.weights).data)
        EXACT.check(unpack(packed.master, packed.weights), plain.master.data, f"masters after {number} steps")
        EXACT.check(packed.weights, plain.weights, f"weights after {number} steps")


@ALL_BACKENDS
@pytest.mark.parametrize(
    "formats", [("plain", "plain", "plain"), ("remainder", "fp8", "fp16"), ("fp16", "fp16", "fp8")]
)
def test_plain_formats_match_adamw_and_skipped_steps_change_nothing(ops, formats) -> None:
    state = State(*formats)
    state.step(ops, 1)
    before = state.bits()
    state.step(ops, 2, apply_update=False, bad=torch.nan)
    EXACT.check_all(state.bits(), before, "refused")
    if formats[0] == "plain":
        mine = [before["master 0"], before["first 0"], before["second 0"], before["weights"]]
        fresh = State(*formats)
        ops.adamw_(
            fresh.master.data, draw(State.SIZE, seed=1), fresh.first.data, fresh.second.data, adamw_step(1),
            fresh.weights,
        )  # fmt: skip
        EXACT.check(torch.cat(mine[:3]), torch.cat([fresh.master.data, fresh.first.data, fresh.second.data]), "state")
        EXACT.check(mine[3], fresh.weights, "weights")


@ALL_BACKENDS
def test_steps_on_slices_equal_the_whole_step(ops) -> None:
    for formats in product(("plain", "remainder", "fp16"), ("plain", "fp8"), ("plain", "fp8", "fp16")):
        whole, parts = State(*formats), State(*formats)
        for number in range(1, 4):
            whole.step(ops, number)
            parts.step(ops, number, split=384)
        EXACT.check_all(parts.bits(), whole.bits(), str(formats))


@BACKENDS
@pytest.mark.parametrize(
    ("formats", "dtype", "bound"),
    [
        (("plain", "plain", "plain"), torch.bfloat16, 0.02),
        (("remainder", "fp16", "fp16"), torch.float32, 0.002),
        (("fp16", "plain", "plain"), torch.float32, 0.05),
        (("remainder", "fp8", "plain"), torch.float32, 0.1),
        (("remainder", "fp8", "fp8"), torch.float32, 0.2),
    ],
)
def test_low_precision_training_stays_close_to_fp32(ops, formats, dtype, bound: float) -> None:
    narrow, wide = State(*formats, dtype=dtype), State("plain", "plain", "plain")
    start = wide.master.data.clone()
    for number in range(1, 101):
        narrow.step(ops, number)
        wide.step(ops, number)
    way, expected = unpack(narrow.master, narrow.weights) - start, wide.master.data - start
    off = float((way - expected).norm() / expected.norm())
    assert bound / 20 < off < bound, f"{off} of the way"


def test_fp8_moments_follow_changes_below_their_resolution() -> None:
    """With beta2 = 0.999, an average changes by a thousandth per step, while the spacing of fp8 is about a tenth."""
    state = State("plain", "plain", "fp8")
    state.weights.zero_()
    ones = torch.ones(State.SIZE)
    for number in range(1, 1001):
        packed = AdamWState(state.master, state.first, state.second)
        reference.adamw_packed_(packed, ones, adamw_step(number, scale=1.0, beta2=0.999), state.weights)
    mean = float(unpack(state.second).sqrt().mean())
    assert abs(mean - (1 - 0.999**1000) ** 0.5) < 0.05, mean


def test_state_bytes_by_format() -> None:
    sizes = {name: empty(name, 1280).num_bytes for name in ("plain", "fp16", "fp8", "remainder")}
    assert sizes == {"plain": 5120, "fp16": 2560 + 10, "fp8": 1280 + 10, "remainder": 2560}
    assert replace(empty("fp8", 1280), root=True).part(128, 1280).num_bytes == 1152 + 9
