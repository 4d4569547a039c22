"""Run-phase events, and garbage collection as one of their observers."""

import gc
from collections.abc import Callable

from megatron_moe.config.training import LoopConfig

Observer = Callable[[str, int], None]
"""Called with the phase ("step", "evaluation", "save", "exit") and its iteration."""


class RunEvents:
    """Announces the phases of a run to its observers: watchdog, garbage collection, profiler, fault injection, ...

    Observers are called in the given order, on the main thread, before the phase begins.
    """

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def enter(self, phase: str, iteration: int) -> None:
        """Announces a phase. `iteration`: for "step" the iteration about to run, otherwise the last completed
        iteration."""
        for observer in self._observers:
            observer(phase, iteration)


class GarbageCollection:
    """Manual garbage collection (`--manual-gc`), at the same steps on all ranks, because a rank that collects alone
    would delay the others.

    This context manager disables automatic collection. Register the method `enter` as an observer of `RunEvents`.
    """

    def __init__(self, config: LoopConfig) -> None:
        self._config = config
        self._evaluating = False

    def __enter__(self) -> "GarbageCollection":
        if self._config.manual_gc:
            gc.disable()
            gc.collect()
        return self

    def __exit__(self, *error: object) -> None:
        if self._config.manual_gc:
            gc.enable()

    def enter(self, phase: str, iteration: int) -> None:
        """Collects garbage every `--manual-gc-interval` steps, and before and after evaluations."""
        config = self._config
        if not config.manual_gc:
            return
        ended, self._evaluating = self._evaluating, phase == "evaluation"
        if ended and config.manual_gc_eval:
            gc.collect(generation=0)  # the objects of an evaluation are in the youngest generation
        done, interval = iteration - 1, config.manual_gc_interval
        is_due = phase == "step" and interval and done > 0 and done % interval == 0
        if is_due or (self._evaluating and config.manual_gc_eval):
            gc.collect()
