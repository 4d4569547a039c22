"""Reservation of multiprocessors for an exchange in progress, which the next matrix product leaves free.

Persistent kernels occupy every multiprocessor until they end. Thread blocks of an exchange would start after a product,
or, if the exchange starts first, some thread blocks of the product would start after the exchange. An exchange takes
about as long as one product, so the reservation ends with the next one. The number is torch's setting for cuBLASLt.
"""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def reserve_multiprocessors(number: int, device: torch.device) -> None:
    """Makes the next matrix product of a kernel set leave `number` multiprocessors free. No effect on the CPU."""
    if device.type == "cuda":
        _set(number)


def end_reservation() -> None:
    """Makes later matrix products use all multiprocessors."""
    if num_reserved():
        _set(None)


def num_reserved() -> int:
    """Number of multiprocessors that the next matrix product leaves free."""
    return torch._C._get_sm_carveout_experimental() or 0


def ends_reservation(product: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a matrix product, with which a reservation ends."""

    @wraps(product)
    def call(*args: Any, **named: Any) -> Any:
        result = product(*args, **named)
        end_reservation()
        return result

    return call


def _set(number: int | None) -> None:
    torch._C._set_sm_carveout_experimental(number)
    # cuBLAS ignores the number; without it, both libraries choose the same kernels
    torch.backends.cuda.preferred_blas_library("default" if number is None else "cublaslt")


def ignore_warnings() -> None:
    """Ignores torch's warnings, one per process, that both settings are experimental. In a backward they are issued
    later than the settings, so the filters are permanent; to be called once per run."""
    for start in ("Setting the SM carveout", "torch.backends.cuda.preferred_blas_library is an experimental"):
        warnings.filterwarnings("ignore", message=start)
