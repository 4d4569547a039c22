"""Faults on purpose: what `--inject` asks for happens to this rank. Never without it.

A test says which fault strikes where, and sees what a run makes of it. Nothing here knows how a fault is answered.
"""

import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megatron_moe.config.faults import FaultConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.parallel.parameter import named_parameters

_PAUSE_SECONDS = 0.2
_FILE_BYTES = 1 << 15
"""No file grows beyond it while the disk is full: it has room for what a run says, and none for weights."""
_FOR_EVER = 1_000_000
_FLIPPED_BIT = 0x40
"""Of the last byte of a weight: a large change, and never one to infinity."""


class InjectedFault(RuntimeError):
    """Stands for a mistake in the program."""


class FaultInjector:
    """The faults of one rank, which strike as the run enters the phases of its iterations.

    Args:
        faults: of all ranks.
        model: is spoilt by some of them.
    """

    def __init__(self, faults: Sequence[FaultConfig], rank: int, model: nn.Module) -> None:
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._model = model
        self._undo: list[Callable[[], object]] = []
        """What ends with the phase that a fault struck in."""

    def strike(self, phase: str, iteration: int) -> None:
        """The run enters a phase of an iteration."""
        while self._undo:
            self._undo.pop()()
        for fault in self._faults:
            if fault.iteration == iteration and fault.phase == phase:
                self._strike_now(fault)
            elif fault.iteration == iteration and phase == "step" and fault.phase in ("forward", "backward"):
                self._strike_within(fault)

    def _strike_now(self, fault: FaultConfig) -> None:
        if fault.kind in ("nan-loss", "nan-once", "nan-grad"):
            self._spoil(fault)
        elif fault.kind == "slow":
            _layer(self._model).get_submodule("self_attention").register_forward_pre_hook(_pause)
        elif fault.kind == "bit-flip":
            self._flip_a_bit()
        elif fault.kind == "disk-full":
            self._fill_the_disk()
        else:
            _end(fault.kind)

    def _strike_within(self, fault: FaultConfig) -> None:
        """At the first output of the model's first module, or at the gradient of it."""

        def hook(module: nn.Module, inputs: object, output: object) -> None:
            handle.remove()
            if fault.phase == "forward":
                self._strike_now(fault)
            elif isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda gradient: self._strike_now(fault))

        handle = _layer(self._model).register_forward_hook(hook)

    def _spoil(self, fault: FaultConfig) -> None:
        """Outputs of a layer in this iteration, or their gradients; also when it is computed again, but for "once"."""

        def hook(module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> Tensor | None:
            if _iteration_of(inputs) != fault.iteration:
                return None
            if fault.kind == "nan-grad":
                if output.requires_grad:
                    output.register_hook(lambda gradient: gradient * torch.nan)
                return None
            if fault.kind == "nan-once":
                handle.remove()
            return output * torch.nan

        handle = _layer(self._model).register_forward_hook(hook)

    def _flip_a_bit(self) -> None:
        _, parameter = next(iter(named_parameters(self._model)))
        weight = parameter.detach().view(-1)[:1]
        weight.view(torch.uint8)[-1] ^= _FLIPPED_BIT

    def _fill_the_disk(self) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, before[1]))
        self._undo.append(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before))


def _layer(model: nn.Module) -> nn.Module:
    """A module whose output every microbatch makes."""
    layers = model.get_submodule("decoder.layers")
    return next(layers.children())


def _pause(module: nn.Module, inputs: object) -> None:
    time.sleep(_PAUSE_SECONDS)


def _iteration_of(inputs: Sequence[object]) -> object:
    """Of the microbatch that a layer was given."""
    keys = [mb.rng for mb in inputs if isinstance(mb, MicrobatchContext)]
    return keys[0].iteration if keys and keys[0] else None


def _end(kind: str) -> None:
    """What ends the process, or holds it up for ever."""
    signals = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "stop": signal.SIGSTOP}
    if kind in signals:
        os.kill(os.getpid(), signals[kind])
    elif kind == "exit":
        os._exit(1)
    elif kind == "abort":
        os.abort()
    elif kind == "segfault":
        ctypes.string_at(0)
    elif kind == "exception":
        raise InjectedFault("--inject asked for this exception")
    elif kind == "out-of-memory":
        raise torch.OutOfMemoryError("--inject asked for this exception")
    elif kind == "hang":
        threading.Event().wait()
    else:
        assert kind == "locked", f"fault {kind}"
        ctypes.PyDLL(None).sleep(_FOR_EVER)
