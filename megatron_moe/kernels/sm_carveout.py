"""SM carve-out: reserves SMs for a dispatch or combine in flight, so that the next GEMM leaves them free.

Persistent kernels occupy every SM until they end. Thread blocks of an exchange would start after a GEMM, or, if the
exchange starts first, some thread blocks of the GEMM would start after the exchange. An exchange takes about as long as
one GEMM, so the reservation ends with the next one. The number of SMs is stored in torch's SM carve-out setting, which
cuBLASLt obeys.
"""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def reserve_sms(number: int, device: torch.device) -> None:
    """Makes the next GEMM of a kernel set leave `number` SMs free. No effect on the CPU."""
    if device.type == "cuda":
        _set(number)


def release_sms() -> None:
    """Ends the reservation, so that later GEMMs use all SMs."""
    if num_reserved_sms():
        _set(None)


def num_reserved_sms() -> int:
    """Number of SMs that the next GEMM leaves free."""
    return torch._C._get_sm_carveout_experimental() or 0


def release_sms_after(gemm: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a GEMM so that the reservation ends after it."""

    @wraps(gemm)
    def gemm_then_release(*args: Any, **named: Any) -> Any:
        result = gemm(*args, **named)
        release_sms()
        return result

    return gemm_then_release


def _set(number: int | None) -> None:
    torch._C._set_sm_carveout_experimental(number)
    # cuBLAS, unlike cuBLASLt, ignores the carve-out; without a carve-out, both choose the same kernels
    torch.backends.cuda.preferred_blas_library("default" if number is None else "cublaslt")


def ignore_warnings() -> None:
    """Ignores torch's warnings, one per process, that both settings are experimental. Backward issues them later, so
    the filters are permanent. Call it once per run."""
    for start in ("Setting the SM carveout", "torch.backends.cuda.preferred_blas_library is an experimental"):
        warnings.filterwarnings("ignore", message=start)
