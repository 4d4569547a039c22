"""Capture and replay of CUDA graphs. Several graphs can share one memory pool."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.memory import CudaGraphConfig
from megatron_moe.kernels.kernel_set import KernelSet
from megatron_moe.kernels.reference import backend as reference

Work = Callable[..., Sequence[Tensor]]
"""Function to capture: receives the static inputs of the graph, reads and writes tensors at fixed addresses, and
returns output tensors."""
_MIB = 2**20
_ON_DEVICE = ("hopper", "torch_native", "triton")
"""Kernel backends whose grouped GEMMs read the row offsets of the experts on the device, as capture requires. Plain
torch does so for quantised operands only."""


def check_capturable(config: CudaGraphConfig, kernels: KernelSet) -> None:
    """Raises EnvironmentProblem if the run captures experts but a grouped GEMM reads row offsets on the host."""
    if not config.full_iteration and "moe" not in config.cuda_graph_modules:
        return
    for choice in kernels.choices:
        on_device = (*_ON_DEVICE, reference.NAME) if choice.op.startswith("quantized_") else _ON_DEVICE
        if "grouped_" in choice.op and choice.backend not in on_device:
            request = "--cuda-graph-impl full_iteration" if config.full_iteration else "--cuda-graph-modules moe"
            raise EnvironmentProblem(
                f"{request} cannot capture {choice.op} of the backend {choice.backend}, which reads the number of rows "
                f"of every expert on the host ({choice.reason}). Capture other modules, for instance "
                f"--cuda-graph-modules attn moe_router moe_preprocess, or compute in --bf16 with --kernel-per-op "
                f"{choice.op}=auto."
            )


class CapturedGraph:
    """CUDA graph with its static inputs and its outputs, which have values after the first `replay`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._graph = graph
        self.inputs = inputs
        """Aliases of the static inputs, in memory of the pool that graphs captured later may reuse."""
        self.outputs = outputs
        self.has_aliases = False
        """Whether `outputs` are aliases that do not own their memory."""

    def replay(self) -> None:
        self._graph.replay()

    def destroy(self) -> None:
        """Destroys the graph. It cannot be replayed afterwards."""
        self._graph.reset()


class CudaGraphRecorder:
    """Captures CUDA graphs. Captured work must not synchronise, and its kernels must already be compiled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graphs: WeakSet[CapturedGraph] = WeakSet()

    def pool(self) -> Any:
        """Creates a memory pool. Graphs that share it must never run concurrently."""
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Work, pool: Any, inputs: Sequence[Tensor] = ()) -> CapturedGraph:
        """Captures `work` without running it. Later graphs of the pool may reuse memory that `work` frees, so graphs of
        a pool must be replayed in the order of their capture. The graph allocates static inputs with the layouts of
        `inputs`, without values."""
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), garbage_collection_disabled():
            # thread_local: other threads, such as the data loader's, may allocate during the capture
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                buffers = list(map(_empty_like, inputs))
                outputs = work(*buffers)
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        captured = CapturedGraph(graph, list(map(self.alias, buffers)), outputs)
        self._graphs.add(captured)
        return captured

    def alias(self, tensor: Tensor) -> Tensor:
        """Returns a tensor that aliases the memory without keeping it allocated. Memory of a pool stays reserved for
        its graphs."""
        storage = tensor.untyped_storage()
        same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())

    def destroy(self) -> None:
        """Destroys all graphs. Call it before communicators are destroyed, because NCCL hangs if a graph still uses
        one."""
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.destroy()

    def empty_cache(self) -> None:
        """Frees the memory that the allocator has cached in eager steps, because graph pools cannot use it."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def pool_bytes(self, pools: Sequence[Any]) -> int:
        """Device memory reserved by the pools, in bytes."""
        pool_ids = set(map(tuple, pools))
        segments = torch.cuda.memory_snapshot()
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) in pool_ids)

    def memory_summary(self, pools: Sequence[Any], static_bytes: int) -> str:
        return f"pools {self.pool_bytes(pools) / _MIB:,.0f} MiB, static inputs {static_bytes / _MIB:,.0f} MiB"


def _empty_like(tensor: Tensor) -> Tensor:
    """Allocates a buffer with the layout of a tensor. Unlike `torch.empty_like`, it does not make a tensor subclass
    compute its values."""
    strides, expected = tensor.stride(), 1
    for stride, size in sorted(pair for pair in zip(strides, tensor.shape, strict=True) if pair[1] != 1):
        if stride != expected:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        expected *= size
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


@contextmanager
def garbage_collection_disabled() -> Iterator[None]:
    """Disables garbage collection: a finaliser that synchronises or destroys a graph would invalidate the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CaptureReport:
    """Logs a summary of the captured graphs once. Its method `enter` is an observer of `train.events.RunEvents`.

    `summary`: function that returns the text, or None until the first step with graphs has ended.
    """

    def __init__(self, summary: Callable[[], str | None], note: Callable[[str], None]) -> None:
        self._summary = summary
        self._note = note
        self._reported = False

    def enter(self, phase: str, iteration: int) -> None:
        """Logs the summary as soon as it is available. Called at the beginning of every phase of the run."""
        summary = None if self._reported else self._summary()
        if summary is not None:
            self._reported = True
            self._note(summary)
