"""Work that is recorded once and repeated without Python: a CUDA graph, or a stand-in for it on a CPU."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.memory import CudaGraphConfig
from megatron_moe.kernels.kernel_set import KernelSet

Work = Callable[[], Sequence[Tensor]]
"""Reads and writes tensors at fixed addresses, and gives what it made."""


_OFFSETS_STAY_ON_THE_DEVICE = ("hopper", "torch_native", "triton")
"""Backends of the grouped products that CUDA graphs can capture."""


def check_recordable(config: CudaGraphConfig, kernels: KernelSet) -> None:
    """Raises EnvironmentProblem if experts are to be captured and their kernels read offsets on the host."""
    if not config.full_iteration and "moe" not in config.cuda_graph_modules:
        return
    for choice in kernels.choices:
        if choice.op.startswith("grouped_") and choice.backend not in _OFFSETS_STAY_ON_THE_DEVICE:
            request = "--cuda-graph-impl full_iteration" if config.full_iteration else "--cuda-graph-modules moe"
            raise EnvironmentProblem(
                f"{request} cannot capture {choice.op} of the backend {choice.backend}, which reads the number of rows "
                f"of every expert on the host ({choice.reason}). Capture other modules, for instance "
                f"--cuda-graph-modules attn moe_router moe_preprocess, or compute in --bf16 with --kernel-per-op "
                f"{choice.op}=auto."
            )


class Capture(Protocol):
    """Recorded work."""

    @property
    def made(self) -> Sequence[Tensor]:
        """What the work made; valid from the first `replay` on, always in the same memory."""
        ...

    def replay(self) -> None:
        """Does the work on what now stands at the addresses that it reads."""
        ...


class Recorder(Protocol):
    """Makes recordings."""

    def pool(self) -> Any:
        """New memory for recordings that never run at the same time as others of this pool."""
        ...

    def record(self, work: Work, pool: Any) -> Capture:
        """Records without doing. Memory that the work frees may be used by later recordings of the pool, so these must
        always be replayed in the order in which they were made, between one first recording and the next."""
        ...

    def make_room(self) -> None:
        """Gives back memory that computed steps have left free: pools cannot use it."""
        ...

    def bytes_in(self, pools: Sequence[Any]) -> int:
        """Device memory that pools have taken."""
        ...


class CudaGraphRecorder:
    """CUDA graphs. Work must not wait for the device, and everything it launches must have been compiled before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def record(self, work: Work, pool: Any) -> Capture:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), no_garbage_collected():
            # thread_local: other threads, such as that of the data, may allocate meanwhile
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                made = work()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return _CudaRecording(graph, made)

    def make_room(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def bytes_in(self, pools: Sequence[Any]) -> int:
        wanted = set(map(tuple, pools))
        segments = torch.cuda.memory_snapshot()
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) in wanted)


@contextmanager
def no_garbage_collected() -> Iterator[None]:
    """What garbage holds may wait for the device, or end another recording, when it dies: CUDA then gives up the
    recording that is being made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, made: Sequence[Tensor]) -> None:
        self._graph = graph
        self.made = made

    def replay(self) -> None:
        self._graph.replay()


class EagerRecorder:
    """The stand-in: does the work again, and leaves what it made in the memory of the first time."""

    def pool(self) -> Any:
        return object()

    def record(self, work: Work, pool: Any) -> Capture:
        return _Repetition(work)

    def make_room(self) -> None:
        pass

    def bytes_in(self, pools: Sequence[Any]) -> int:
        return 0


class _Repetition:
    def __init__(self, work: Work) -> None:
        self._work = work
        self.made: Sequence[Tensor] = ()
        self._ran = False

    def replay(self) -> None:
        made = self._work()
        if not self._ran:
            self.made, self._ran = [tensor.clone() for tensor in made], True
            return
        with torch.no_grad():
            for kept, tensor in zip(self.made, made, strict=True):
                kept.copy_(tensor)


class CapturedSteps(Protocol):
    """Parts of steps, or whole ones, that are recorded when the time comes."""

    @property
    def has_recorded(self) -> bool:
        """The first step that records is over."""
        ...

    def summary(self) -> str:
        """How many recordings there are, and what they cost."""
        ...


class CaptureReport:
    """Says once what was recorded. `enter` observes `train.events.RunEvents`."""

    def __init__(self, recorded: CapturedSteps, say: Callable[[str], None]) -> None:
        self._recorded = recorded
        self._say = say
        self._told = False

    def enter(self, phase: str, iteration: int) -> None:
        """A phase of the run begins."""
        if not self._told and self._recorded.has_recorded:
            self._told = True
            self._say(self._recorded.summary())
