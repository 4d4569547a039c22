"""SM reservation, with which the next GEMM leaves SMs free for an exchange."""

import warnings
from collections.abc import Iterator

import pytest
import torch

from megatron_moe.kernels import sm_carveout
from megatron_moe.kernels.backends.triton.launch import HOPPER_SMS, num_free_sms
from megatron_moe.kernels.kernel_set import OPS, KernelSet
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.sm_carveout import ignore_warnings, release_sms, reserve_sms

GPU, META = torch.device("cuda"), torch.device("meta")


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """BLAS libraries in the order in which they were selected."""
    found: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", found.append)
    yield found
    release_sms()


def test_a_reservation_ends_with_the_next_gemm(libraries: list[str]) -> None:
    seen: list[int] = []

    def linear_forward(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        seen.append(num_free_sms(META))
        return x

    functions = {op: getattr(reference, op) for op in OPS} | {"linear_forward": linear_forward}
    kernels = KernelSet.of(functions, ())
    reserve_sms(8, GPU)
    assert sm_carveout.num_reserved_sms() == 8
    x = torch.zeros(1, 1)
    kernels.linear_forward(x, x, None)
    kernels.linear_forward(x, x, None)
    assert seen == [HOPPER_SMS - 8, HOPPER_SMS]
    assert libraries == ["cublaslt", "default"], "cuBLAS ignores the reservation"


def test_a_reservation_ends_with_the_exchange(libraries: list[str]) -> None:
    reserve_sms(8, GPU)
    release_sms()
    release_sms()
    assert num_free_sms(META) == HOPPER_SMS
    assert libraries == ["cublaslt", "default"]


def test_nothing_is_reserved_on_the_cpu(libraries: list[str]) -> None:
    reserve_sms(8, torch.device("cpu"))
    assert sm_carveout.num_reserved_sms() == 0 and not libraries


def test_warnings_of_the_experimental_settings_are_ignored() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ignore_warnings()
        warnings.warn("Setting the SM carveout for matmuls is a temporary experimental mitigation", stacklevel=1)
        warnings.warn("torch.backends.cuda.preferred_blas_library is an experimental feature.", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    assert [str(each.message) for each in found] == ["another"]
