"""When Python collects garbage: by itself, or at the same steps on all ranks, so that none waits for another's."""

import gc

from megatron_moe.specs.train import LoopSpec


class Garbage:
    """With `--manual-gc` collection is off from `__enter__` to `__exit__`, but for the given steps and evaluations.

    Told of every phase of the run (`watch.hang.Deadlines.then`).
    """

    def __init__(self, spec: LoopSpec) -> None:
        self._spec = spec
        self._evaluating = False

    def __enter__(self) -> "Garbage":
        if self._spec.manual_gc:
            gc.disable()
            gc.collect()
        return self

    def __exit__(self, *error: object) -> None:
        if self._spec.manual_gc:
            gc.enable()

    def enter(self, phase: str, iteration: int) -> None:
        """A phase of the run begins; with "step" the iteration of that number."""
        spec = self._spec
        if not spec.manual_gc:
            return
        if self._evaluating and spec.manual_gc_eval:
            gc.collect(generation=0)  # what the evaluation has left is young
        self._evaluating = phase == "evaluation"
        done = iteration - 1
        at_interval = bool(spec.manual_gc_interval and done > 0 and done % spec.manual_gc_interval == 0)
        if (phase == "step" and at_interval) or (self._evaluating and spec.manual_gc_eval):
            gc.collect()
