"""Ops of update rules for whole matrices: Triton kernels, interpreted, against plain torch."""

import pytest
import torch
from torch import Tensor

from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.backends.triton import matrices
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.update_ops import MatrixStep
from megatron_moe.precision.optimizer_state import PackedState, pack, round_weights
from tests.helpers.kernel_comparison import draw
from tests.helpers.tolerances import EXACT, FP32_REF
from tests.kernels.compiled import NO_SPILLS, SHARED_MEMORY, compiled

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # numpy, of the interpreter


def move(*, apply_update: bool = True) -> MatrixStep:
    return MatrixStep(
        lr=0.1,
        weight_decay=0.5,
        grad_scale=torch.tensor(0.25),
        apply_update=torch.tensor(apply_update),
        nonfinite=torch.tensor(False),
    )


@pytest.mark.parametrize("apply_update", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_matches_the_reference(nesterov: bool, apply_update: bool) -> None:
    found = []
    for ops in (triton_kernels, reference):
        momentum, flags = draw(2500, seed=1).float(), move(apply_update=apply_update)
        update = ops.momentum_(draw(2500).float(), momentum, 0.8, flags, torch.float32, nesterov=nesterov)
        assert not flags.nonfinite
        found.append({"momentum": momentum, "update": update})
    FP32_REF.check_all(*found, "momentum and update")
    assert (found[0]["momentum"] == draw(2500, seed=1).float()).all() != apply_update


@pytest.mark.parametrize("name", ["plain", "remainder", "no weights"])
@pytest.mark.parametrize("apply_update", [True, False])
def test_descent_matches_the_reference(name: str, apply_update: bool) -> None:
    found = []
    for ops in (triton_kernels, reference):
        start = draw(1300, seed=1).float()
        weights = None if name == "no weights" else round_weights(start, torch.bfloat16)
        form = "remainder" if name == "remainder" else "plain"
        master = pack(start, PackedState.zeros(1300, form, torch.float32, start.device, root=False), weights)
        before = master.data.clone()
        ops.apply_direction_(master, draw(1300, seed=2).bfloat16(), 0.3, move(apply_update=apply_update), weights)
        assert torch.equal(before, master.data) != apply_update
        found.append({"master": master.data.double(), "weights": (start if weights is None else weights).double()})
    if name == "remainder":  # its values differ by rounding of the sum's last digit
        assert (found[0]["master"] - found[1]["master"]).abs().max() <= 2
        found = [{"weights": each["weights"]} for each in found]
    FP32_REF.check_all(*found, "master weights and weights")


@pytest.mark.parametrize("ops", [triton_kernels, reference], ids=["triton", "reference"])
def test_overflows_are_marked(ops) -> None:
    flags, huge = move(), torch.full((3,), 3e38)
    ops.momentum_(torch.full((3,), torch.inf), huge.clone(), 0.5, flags, torch.float32)
    assert flags.nonfinite
    flags = move()
    ops.apply_direction_(PackedState("plain", huge), -torch.full((3,), 3e38), 10.0, flags)
    assert flags.nonfinite


@pytest.mark.parametrize("tile", [matrices.TILE, (64, 128, 64, 4, 3)])
@pytest.mark.parametrize("shape", [(2, 256, 128), (1, 150, 70), (3, 20, 300)])
@pytest.mark.parametrize("transposed", [False, True])
def test_syrk_match_the_reference(shape, transposed: bool, tile, monkeypatch) -> None:
    """Wide and tall inputs, with and without a base, of sizes that tiles divide or not."""
    monkeypatch.setattr(matrices, "TILE", tile)
    number, size, depth = shape
    x = draw(number, depth, size).bfloat16().mT if transposed else draw(number, size, depth).bfloat16()
    gram = triton_kernels.syrk(x)
    close_in_bf16(gram, x.float() @ x.float().mT)
    EXACT.check(gram, gram.mT.contiguous(), "symmetry")
    polynomial = triton_kernels.syrk(gram, gram, -4.0, 2.0)
    close_in_bf16(polynomial, 2 * gram.float() @ gram.float() - 4 * gram.float())
    EXACT.check(polynomial, polynomial.mT.contiguous(), "symmetry")


def close_in_bf16(found: Tensor, expected: Tensor) -> None:
    """One rounding to bf16; the interpreter truncates."""
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.slow
def test_the_compiled_gemm_uses_tensor_cores_in_both_directions_without_spills() -> None:
    found = compiled("""
from megatron_moe.kernels.backends.triton import matrices
matrices._symmetric = Compiled(matrices._symmetric)
wide = torch.empty(2, 1408, 2048, dtype=torch.bfloat16, device="meta")
tall = torch.empty(2, 2048, 1408, dtype=torch.bfloat16, device="meta").mT
gram = torch.empty(2, 1408, 1408, dtype=torch.bfloat16, device="meta")
for x, base in ((wide, None), (tall, None), (gram, gram)):
    matrices.multiply_tiles(x, base, 2.0, 1.0, gram, matrices.TILE)
""")
    assert len(found) == 3
    for each in found:
        assert "wgmma.mma_async" in each["ptx"] and NO_SPILLS in each["ptxas"]
        assert each["shared"] <= SHARED_MEMORY
