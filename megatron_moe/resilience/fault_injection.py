"""Fault injection (`--inject`), for tests of error handling."""

import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn

from megatron_moe.config.faults import FaultInjectionConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.parallel.parameter import named_parameters

_PAUSE_SECONDS = 0.2
_FILE_BYTES = 1 << 15
"""File size limit in bytes that the fault "disk-full" sets: enough for status files, too small for weights."""
_SLEEP_S = 1_000_000
_FLIPPED_BIT = 0x40
"""Mask of the highest exponent bit in a weight's last byte. Flipping this bit makes small weights huge."""


class InjectedFaultError(RuntimeError):
    """Error that the fault "exception" raises."""


class FaultInjector:
    """Triggers the entries of `faults` that are for this rank, each in its phase and iteration. Register `enter` as an
    observer of `train.events.RunEvents`."""

    def __init__(self, faults: Sequence[FaultInjectionConfig], rank: int, model: nn.Module) -> None:
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._model = model
        self._undo: list[Callable[[], object]] = []
        """Callbacks that end temporary faults; they are called when the next phase begins."""

    def enter(self, phase: str, iteration: int) -> None:
        """Ends the temporary faults of the previous phase and triggers the faults of this phase."""
        while self._undo:
            self._undo.pop()()
        for fault in self._faults:
            if fault.iteration == iteration and fault.phase == phase:
                self._trigger(fault)
            elif fault.iteration == iteration and phase == "step" and fault.phase in ("forward", "backward"):
                self._trigger_in_layer(fault)

    def _trigger(self, fault: FaultInjectionConfig) -> None:
        if fault.kind in ("nan-loss", "nan-once", "nan-grad"):
            self._inject_nan(fault)
        elif fault.kind == "slow":
            attention = _layer(self._model).get_submodule("self_attention")
            attention.register_forward_pre_hook(lambda module, inputs: time.sleep(_PAUSE_SECONDS))
        elif fault.kind == "bit-flip":
            self._flip_bit()
        elif fault.kind == "disk-full":
            self._limit_file_size()
        else:
            _stop_process(fault.kind)

    def _trigger_in_layer(self, fault: FaultInjectionConfig) -> None:
        """Triggers the fault at the first layer's next output ("forward") or at that output's gradient ("backward")."""

        def trigger_once(module: nn.Module, inputs: object, output: object) -> None:
            handle.remove()
            if fault.phase == "forward":
                self._trigger(fault)
            elif isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda gradient: self._trigger(fault))

        handle = _layer(self._model).register_forward_hook(trigger_once)

    def _inject_nan(self, fault: FaultInjectionConfig) -> None:
        """Replaces the first layer's outputs by NaN in the fault's iteration, also when the step is repeated.
        "nan-once" replaces them for one microbatch and never again. "nan-grad" replaces their gradients instead."""

        def set_output_to_nan(module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> Tensor | None:
            keys = [mb.rng for mb in inputs if isinstance(mb, MicrobatchContext)]
            if not keys or keys[0] is None or keys[0].iteration != fault.iteration:
                return None
            if fault.kind == "nan-grad":
                if output.requires_grad:
                    output.register_hook(lambda gradient: gradient * torch.nan)
                return None
            if fault.kind == "nan-once":
                handle.remove()
            return output * torch.nan

        handle = _layer(self._model).register_forward_hook(set_output_to_nan)

    def _flip_bit(self) -> None:
        _, parameter = next(iter(named_parameters(self._model)))
        weight = parameter.detach().view(-1)[:1]
        weight.view(torch.uint8)[-1] ^= _FLIPPED_BIT

    def _limit_file_size(self) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, before[1]))
        self._undo.append(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before))


def _layer(model: nn.Module) -> nn.Module:
    """First transformer layer on this rank."""
    return next(model.get_submodule("decoder.layers").children())


def _stop_process(kind: str) -> None:
    """Ends or blocks the process with a fault of this kind."""
    if kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[kind])
    elif kind == "exception":
        raise InjectedFaultError("exception requested by --inject")
    elif kind == "out-of-memory":
        raise torch.OutOfMemoryError("exception requested by --inject")
    else:
        _ACTIONS[kind]()


_SIGNALS = MappingProxyType({"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP})
_ACTIONS: Mapping[str, Callable[[], object]] = MappingProxyType(
    {
        "exit": lambda: os._exit(1),
        "abort": os.abort,
        "segfault": lambda: ctypes.string_at(0),
        "hang": lambda: threading.Event().wait(),
        "locked": lambda: ctypes.PyDLL(None).sleep(_SLEEP_S),
    }
)
