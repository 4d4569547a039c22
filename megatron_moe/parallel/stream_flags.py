"""Flags in symmetric memory that one rank sets and another waits for, in the order of a CUDA stream.

On GPUs, stream memory operations set flags and wait for them without a kernel. A waiting kernel would occupy an SM, so
that a concurrent persistent GEMM, which launches one thread block per SM, would take twice as long: its last block
could start only after another one had finished.
"""

import ctypes
import time
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.tp_overlap import FLAG_BYTES as FLAG_BYTES
from megatron_moe.parallel.context import ParallelContext, ProcessGroup
from megatron_moe.parallel.symmetric_memory import is_emulated

_POLL_S = 20e-6


class StreamFlags:
    """Sets and waits for flags, which are int32 [1]. This base class, for emulated ranks, does nothing."""

    def set(self, flag: Tensor, value: int) -> None:
        """Sets a flag when all earlier work of the current stream has completed and is visible to all ranks."""

    def wait(self, flag: Tensor, value: int, rank: int) -> None:
        """Makes the current stream wait until a flag is at least `value`. `rank`: the rank that sets the flag, for the
        message of a timeout."""

    def take(self, flag: Tensor, rank: int) -> None:
        """Makes the current stream wait until `rank` has set a flag to 1, and then sets it to 0. Unlike a value that
        grows, this sequence can be replayed by a CUDA graph."""
        self.wait(flag, 1, rank)
        self.set(flag, 0)


class _HostFlags(StreamFlags):
    """Flags of CPU ranks, for which the host waits."""

    def __init__(self, timeout_s: float, what: str) -> None:
        self._timeout_s = timeout_s
        self._what = what

    def set(self, flag: Tensor, value: int) -> None:
        flag.fill_(value)

    def wait(self, flag: Tensor, value: int, rank: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while int(flag) < value:
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {rank} did not exchange its {self._what} within {self._timeout_s:g} s")
            time.sleep(_POLL_S)


class _CudaFlags(StreamFlags):
    """Flags in the memory of GPUs of one host."""

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        driver = ctypes.CDLL("libcuda.so.1")
        # the second version of these functions needs no kernel module option
        self._set, self._wait = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
        for function in (self._set, self._wait):
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]

    def set(self, flag: Tensor, value: int) -> None:
        # the default option, 0: a memory barrier at system scope precedes the write
        self._call(self._set, flag, value)

    def wait(self, flag: Tensor, value: int, rank: int) -> None:
        # the default option, 0: waits until the flag is greater or equal
        self._call(self._wait, flag, value)

    def _call(self, function: Any, flag: Tensor, value: int) -> None:
        status = function(torch.cuda.current_stream(self._index).cuda_stream, flag.data_ptr(), value, 0)
        if status:
            raise RuntimeError(f"{function.__name__} failed with CUDA driver error {status}")


def make_stream_flags(group: ProcessGroup, context: ParallelContext, what: str) -> StreamFlags:
    """Creates the flag operations for the ranks of a group on the context's device. `what`: what the ranks exchange,
    for the message of a timeout."""
    if is_emulated(group, context):
        return StreamFlags()
    return _CudaFlags(context.device) if context.device.type == "cuda" else _HostFlags(context.timeout_s, what)
