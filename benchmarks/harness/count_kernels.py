"""Counts the kernel launches of a rank per MoE layer and microbatch, forward and backward, by call site, on the CPU.

    python benchmarks/harness/count_kernels.py [--sites 40] -- --recipe m27 --world-size 2 --context-parallel-size 2

Arguments after `--` go to pretrain_moe.py. One rank is emulated without its peers (`memory_emulation/`) and without a
GPU: a launch is a call of a Triton kernel, a collective, or an operation of torch that runs a kernel on a GPU. A
library function counts as one launch, although the backward of cuDNN's attention has three. Counts are differences
between steps with one more layer and one more microbatch.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from benchmarks.harness.timed_run import plan_to_run  # noqa: E402
from megatron_moe.config.emulation import EmulationConfig  # noqa: E402
from megatron_moe.config.run import RunPlan  # noqa: E402
from megatron_moe.kernels.fakes import backend as fakes  # noqa: E402
from megatron_moe.memory_emulation.rank import emulate_rank  # noqa: E402
from tools._common import split_at_dashes  # noqa: E402

_WITHOUT_KERNEL = frozenset(
    ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "record_stream")
)
_LIBRARY_CALLS = ("_gemm_into", "_wide_gemm", "_grouped_mm", "_attend", "_differentiate")
"""Functions of backends that call a library; each is replaced by a fake."""
LAYERS, MICROBATCHES = (2, 3), (2, 3)
"""Numbers of layers and of microbatches in the compared steps."""


@dataclass(frozen=True)
class LaunchSite:
    """Kind of a launch and its call site."""

    operation: str
    """Operation of torch, collective, library function, or "kernel" for a Triton kernel."""
    place: str

    @property
    def is_collective(self) -> bool:
        return self.operation.startswith("c10d.")


class LaunchCounter(TorchDispatchMode):
    """Counts launches on `meta` tensors by site, while active and within `with_fakes`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[LaunchSite] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see `megatron_moe/memory_emulation/tracker.py`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _launches(func, result):
            self.add(func.name().removeprefix("aten::").replace("::", "."))
        return result

    def add(self, operation: str) -> None:
        """Counts one launch at the current call site."""
        self.counts[LaunchSite(operation, _place())] += 1

    @contextmanager
    def with_fakes(self) -> Iterator[None]:
        """Counts operations of torch, kernels and library functions in the body."""

        def kernel_with_grid(triton: Any, grid: Any) -> Callable[..., None]:
            return lambda *args, **options: self.add("kernel")

        with ExitStack() as undo:
            undo.enter_context(patch.object(fakes._Triton, "__getitem__", kernel_with_grid))
            for module in (fakes, *map(fakes._loader().load, fakes._REPLACED)):
                for name in _LIBRARY_CALLS:
                    if hasattr(module, name):
                        undo.enter_context(patch.object(module, name, self._counted(name, getattr(module, name))))
            yield undo.enter_context(self)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self.add(name.strip("_"))
            return function(*args, **options)

        return run


def _launches(func: Any, result: Any) -> bool:
    """Whether an operation of torch launches a kernel. Allocations, views and operations on host tensors do not."""
    namespace, _, name = func.name().partition("::")
    if namespace == "c10d":
        return True
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
    if is_view or name.partition(".")[0] in _WITHOUT_KERNEL:
        return False
    results = result if isinstance(result, tuple | list) else (result,)
    return any(isinstance(each, torch.Tensor) and each.is_meta and each.numel() for each in results)


def _place() -> str:
    """Returns the call site: the innermost function of megatron_moe on the stack, and the innermost one outside kernels
    and collectives or the autograd node whose backward runs."""
    inner, outer = "", ""
    frame: Any = sys._getframe(2)
    while frame is not None and not outer:
        _, _, path = frame.f_code.co_filename.rpartition("/megatron_moe/")
        if path != frame.f_code.co_filename and not path.startswith(("memory_emulation/", "kernels/fakes/")):
            here = f"{path}:{frame.f_code.co_qualname.partition('.<locals>')[0]}"
            inner = inner or f"{here}:{frame.f_lineno}"
            outer = "" if path.startswith(("kernels/", "parallel/")) else here
        frame = frame.f_back
    node: Any = torch._C._current_autograd_node()
    if node is not None:
        return f"{inner} in {node.name()}"
    return inner if inner.startswith(outer) else f"{inner} from {outer}"


def count(plan: RunPlan, num_microbatches: int) -> Counter[LaunchSite]:
    """Counts rank 0's launches in a warm-up step followed by a step of `num_microbatches` microbatches."""
    counter = LaunchCounter()
    with counter.with_fakes():
        plan = replace(plan, emulation=plan.emulation or EmulationConfig())
        emulate_rank(plan, 0, torch.device("meta"), num_microbatches=num_microbatches)
    return counter.counts


def per_layer(words: Sequence[str]) -> dict[LaunchSite, int]:
    """Launches that one more MoE layer adds to one more microbatch."""
    total: Counter[LaunchSite] = Counter()
    for layer_sign, num_layers in zip((-1, 1), LAYERS, strict=True):
        layers = f"--num-layers {num_layers} --moe-layer-freq ([0]*1+[1]*{num_layers - 1})"
        plan = plan_to_run([*words, *layers.split(), "--fake-init-process-group", "--device", "cpu"])
        for sign, num_microbatches in zip((-1, 1), MICROBATCHES, strict=True):
            for site, number in count(plan, num_microbatches).items():
                total[site] += sign * layer_sign * number
    return {site: number for site, number in total.items() if number}


def report(counts: Mapping[LaunchSite, int], num_sites: int) -> str:
    """Formats a table of the `num_sites` call sites with the most launches."""
    collectives = sum(number for site, number in counts.items() if site.is_collective)
    rows = sorted(counts.items(), key=lambda each: -each[1])[:num_sites]
    return "\n".join(
        (
            f"{sum(counts.values())} launches per layer and microbatch, of which {collectives} collectives",
            "",
            "| launches | operation | place |",
            "|---|---|---|",
            *(f"| {number} | {site.operation} | {site.place} |" for site, number in rows),
        )
    )


def main(argv: list[str]) -> int:
    own, theirs = split_at_dashes(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=200, help="rows of the table")
    options = parser.parse_args(own)
    print(report(per_layer(theirs), options.sites))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
