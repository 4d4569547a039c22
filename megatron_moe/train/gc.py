"""When Python collects garbage: by itself, or at the same steps on all ranks, so that none waits for another's."""

import gc

from megatron_moe.config.training import LoopConfig


class GarbageCollection:
    """With `--manual-gc` collection is off from `__enter__` to `__exit__`, but for the given steps and evaluations.

    Told of every phase of the run (`resilience.watchdog.Watchdog.then`).
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
        """A phase of the run begins; with "step" the iteration of that number."""
        config = self._config
        if not config.manual_gc:
            return
        if self._evaluating and config.manual_gc_eval:
            gc.collect(generation=0)  # what the evaluation has left is young
        self._evaluating = phase == "evaluation"
        done = iteration - 1
        at_interval = bool(config.manual_gc_interval and done > 0 and done % config.manual_gc_interval == 0)
        if (phase == "step" and at_interval) or (self._evaluating and config.manual_gc_eval):
            gc.collect()
