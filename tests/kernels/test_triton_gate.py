"""Router GEMM under the interpreter against fp64, and compiled for a Hopper GPU on a machine without one."""

import re

import pytest
import torch
from torch import Tensor

from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.backends.triton import gate
from tests.helpers.kernel_comparison import REFERENCE, draw
from tests.helpers.tolerances import BF16_KERNEL, EXACT, FP32_REF
from tests.kernels.compiled import SHARED_MEMORY, compiled

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # numpy, of the interpreter
BF16, FP32 = torch.bfloat16, torch.float32


def product_and_gradients(hidden_TH: Tensor, weight_EH: Tensor, grad_TE: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (hidden_TH, weight_EH)]
    logits = triton_kernels.router_logits(*leaves, FP32)
    return [logits.detach(), *torch.autograd.grad(logits, leaves, grad_TE)]


def check(hidden_TH: Tensor, weight_EH: Tensor, grad_TE: Tensor) -> None:
    """Compares with fp64 results of the same inputs, with tolerances for fp32 sums and one rounding; two runs must be
    bitwise equal."""
    logits, grad_hidden, grad_weight = found = product_and_gradients(hidden_TH, weight_EH, grad_TE)
    hidden, weight, grad = hidden_TH.double(), weight_EH.double(), grad_TE.double()
    assert logits.dtype is FP32 and grad_hidden.dtype is grad_weight.dtype is BF16
    FP32_REF.check(logits, hidden @ weight.T, "logits")
    BF16_KERNEL.check(grad_hidden, grad @ weight, "gradient of the hidden states")
    BF16_KERNEL.check(grad_weight, grad.T @ hidden, "gradient of the weight")
    for first, second in zip(found, product_and_gradients(hidden_TH, weight_EH, grad_TE), strict=True):
        EXACT.check(second, first)


@pytest.mark.parametrize(
    ("tokens", "width", "experts"), [(1, 1, 1), (0, 32, 4), (300, 40, 8), (64, 256, 64), (70, 300, 128), (67, 130, 100)]
)
def test_logits_and_gradients_match_fp64(tokens: int, width: int, experts: int) -> None:
    """In the third case several programs share the tokens; the last three cases have several column tiles."""
    grad = draw(tokens, experts, seed=2).float()
    check(draw(tokens, width).to(BF16), draw(experts, width, seed=1).to(BF16), grad)


def test_strided_rows() -> None:
    hidden, weight, grad = draw(140, 50), draw(6, 80, seed=1), draw(70, 9, seed=2)
    for wide, first, end in ((hidden, 3, 43), (weight, 8, 48), (grad, 2, 8)):
        wide[:, :first], wide[:, end:] = torch.nan, torch.nan
    hidden_TH, weight_EH = hidden.to(BF16)[::2, 3:43], weight.to(BF16)[:, 8:48]
    check(hidden_TH, weight_EH, grad.float()[:, 2:8])
    check(hidden_TH, weight_EH, torch.tensor(0.3).expand(70, 6))


def test_gradients_are_accurate_to_fp32() -> None:
    """The gradients of two experts with the same weight cancel up to bits below the 16 bits of two bf16 numbers, so a
    third bf16 part is needed."""
    grad = 2.0**14 * draw(70, 1, seed=2).float()
    grad_TE = torch.cat([grad, -grad * (1 + 2.0**-14)], dim=1)
    weight = draw(1, 40, seed=1).to(BF16).expand(2, 40).contiguous()
    hidden = draw(70, 40).to(BF16)
    _, grad_hidden, _ = product_and_gradients(hidden, weight, grad_TE)
    BF16_KERNEL.check(grad_hidden, grad_TE.double() @ weight.double(), "gradient of the hidden states")
    # two tokens have the same hidden state
    hidden = hidden[:1].expand(2, 40).contiguous()
    _, _, grad_weight = product_and_gradients(hidden, draw(70, 40, seed=3).to(BF16), grad_TE.T.contiguous())
    BF16_KERNEL.check(grad_weight, grad_TE.double() @ hidden.double(), "gradient of the weight")


@pytest.mark.parametrize(("hidden", "weight", "dtype"), [(BF16, FP32, FP32), (FP32, FP32, FP32), (BF16, BF16, BF16)])
def test_other_dtypes_use_torch(hidden: torch.dtype, weight: torch.dtype, dtype: torch.dtype) -> None:
    inputs = draw(7, 24).to(hidden), draw(5, 24, seed=1).to(weight)
    EXACT.check(triton_kernels.router_logits(*inputs, dtype), REFERENCE.router_logits(*inputs, dtype))


@pytest.mark.parametrize(("experts", "is_theirs"), [(128, False), (129, True)])
def test_many_experts_use_torch(experts: int, is_theirs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    theirs = gate.torch_native.router_logits
    monkeypatch.setattr(gate.torch_native, "router_logits", lambda *given: calls.append(given) or theirs(*given))
    hidden, weight = draw(3, 8).to(BF16), draw(experts, 8, seed=1).to(BF16)
    FP32_REF.check(triton_kernels.router_logits(hidden, weight, FP32), hidden.double() @ weight.double().T, "logits")
    assert bool(calls) is is_theirs


A_FEW = 40
"""Bytes per thread that the backward with three pipeline stages spills with 128 experts. It is faster nevertheless."""
LAUNCHES = """
from megatron_moe.kernels.backends.triton import gate

gate._gate_forward, gate._gate_backward = Compiled(gate._gate_forward), Compiled(gate._gate_backward)
gate.weight_grad = lambda shares, weight: shares[0].to(weight.dtype)
for width, experts in ((2048, 128), (7168, 64), (72, 3)):
    hidden, weight = (torch.zeros(rows, width).bfloat16() for rows in (64, experts))
    gate._logits(hidden, weight), gate._gradients(torch.zeros(64, experts), hidden, weight)
"""


@pytest.mark.slow
def test_kernels_use_tensor_cores_with_almost_no_spills() -> None:
    found = compiled(LAUNCHES)
    assert len(found) == 6
    for code in found:
        assert code["shared"] <= SHARED_MEMORY
        (spilled,) = re.findall(r"(\d+) bytes spill stores", code["ptxas"])
        assert int(spilled) <= A_FEW, code["ptxas"]
        assert "serialized" not in code["ptxas"], "products that wait for one another"
    assert all("wgmma.mma" in code["ptx"] for code in found[:4]), "tiles of 64 and more are for wgmma"
