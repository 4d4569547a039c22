"""Host time of a training step without a GPU: Python functions called and CPU time per microbatch, by layout.

    python benchmarks/harness/bench_host.py [--cases layout-ep2 layout-ep2-pairs] [--functions 40] [-- FLAGS]

Runs rank 0 of a case of `step_cases.py` without its peers, at sizes so small that the CPU computes almost nothing, with
the kernels that an H100 or H200 selects. Launches of Triton kernels take the host time of a launch, but run nothing;
calls of cuBLAS and cuDNN are replaced by allocations of their results. Times of CUDA streams and of the driver are not
included. Values are those of one more microbatch in a step. The number of calls does not depend on the machine's load.
"""

import argparse
import cProfile
import gc
import pstats
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder

from benchmarks.harness.step_cases import CASES  # noqa: E402
from benchmarks.harness.timed_run import context_without_peers, plan_to_run  # noqa: E402
from megatron_moe import build  # noqa: E402
from megatron_moe.kernels.backends.torch_native import backend as torch_native  # noqa: E402
from megatron_moe.kernels.backends.torch_native import cudnn  # noqa: E402
from megatron_moe.kernels.backends.triton.launcher import shorten_launches  # noqa: E402
from megatron_moe.kernels.fakes import backend as fakes  # noqa: E402
from megatron_moe.kernels.kernel_set import KernelSet  # noqa: E402
from megatron_moe.kernels.reference import backend as reference  # noqa: E402
from megatron_moe.kernels.registry import select_kernels  # noqa: E402
from megatron_moe.memory_emulation.rank import (  # noqa: E402
    assumed_ids,
    assumed_load,
    make_batches,
    transport_without_peers,
    with_assumed_choices,
)
from megatron_moe.train.train_state import TrainState  # noqa: E402
from tools._common import split_at_dashes  # noqa: E402

SMALL = (
    "--hidden-size 64 --num-attention-heads 2 --qk-head-dim 32 --qk-pos-emb-head-dim 32 --v-head-dim 32 "
    "--kv-lora-rank 64 --ffn-hidden-size 64 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 "
    "--seq-length 16 --max-position-embeddings 16 --vocab-size 256"
)
"""Flags of the smallest sizes that all kernels support."""
LAYERS = "--num-layers 6 --moe-layer-freq ([0]*1+[1]*5)"
MICROBATCHES = (4, 8)
"""Numbers of microbatches of the compared steps."""
DEFAULT = ("layout-ep2", "layout-ep2-pairs", "layout-tp2", "layout-cp2", "layout-ep2-mb1")
_TIMED = 8
"""Timed pairs of steps; the smallest time counts, because other processes only add to it."""
Functions = Mapping[str, tuple[float, float]]
"""Function -> (calls, milliseconds inside it) per microbatch, under a profiler."""


@dataclass(frozen=True)
class HostCost:
    """Host cost of one more microbatch of forward and backward."""

    milliseconds: float
    """CPU time; NaN if it was not measured."""
    calls: float
    """Calls of Python functions and of functions of extension modules."""
    functions: Functions

    def row(self, name: str, base: "HostCost") -> str:
        return (
            f"| {name} | {self.milliseconds:.2f} | {self.milliseconds / base.milliseconds:.3f} "
            f"| {self.calls:,.0f} | {self.calls / base.calls:.3f} |"
        )


class _StandInDriver:
    """Driver of Triton for a Hopper GPU that does not exist."""

    utils = SimpleNamespace(fill_tma_descriptor=lambda *fields: fields)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def _compiled(jit: Any, key: Any, signature: Any, device: int, *others: Any) -> Any:
    """Replaces the compilation of a Triton kernel: returns a kernel whose launch checks the hooks and does nothing."""
    from triton import knobs
    from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc
    from triton.compiler.compiler import LazyDict

    def launch(*args: Any) -> None:
        for hook in args[11:13]:
            if hook is not None:
                hook(args[10])

    launcher = CudaLauncher.__new__(CudaLauncher)
    options = {"num_ctas": 1, "global_scratch_size": 0, "profile_scratch_size": 0, "launch_pdl": False}
    vars(launcher).update(options, global_scratch_align=1, profile_scratch_align=1, launch_cooperative_grid=False)
    launcher.launch = wrap_handle_tensordesc(launch, signature, None)

    def metadata(grid: Any, stream: int, *args: Any) -> Any:
        hook = knobs.runtime.launch_enter_hook
        return None if hook is None else LazyDict({"name": key, "function": 1, "stream": stream})

    kernel = SimpleNamespace(function=1, packed_metadata=(), run=launcher, launch_metadata=metadata)
    jit.device_caches[device][0][key] = kernel
    return kernel


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], weight.shape[1])


def _scaled_gemm(x: Tensor, weight: Tensor, *scaling: Any, output_dtype: torch.dtype) -> Tensor:
    return x.new_empty(len(x), weight.shape[1], dtype=output_dtype)


@contextmanager
def _without_gpu() -> Iterator[None]:
    """Replaces launches of kernels and calls of libraries in the body, on tensors of the CPU."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    with ExitStack() as undo:
        undo.enter_context(patch.object(JITFunction, "_do_compile", _compiled))
        undo.enter_context(patch.object(JITFunction, "run", JITFunction.run))  # restored after `shorten_launches`
        for module, names in (
            (torch_native, ("_gemm_into", "_wide_gemm", "_dot_product_attention")),
            (cudnn, ("_attend", "_differentiate")),
        ):
            for name in names:
                undo.enter_context(patch.object(module, name, getattr(fakes, name)))
        undo.enter_context(patch.object(cudnn, "cudnn_supports", fakes._cudnn_supports))
        undo.enter_context(patch.object(torch.nn.functional, "scaled_mm", _scaled_gemm))
        undo.enter_context(patch.object(reference, "linear_forward", _multiplied))
        undo.enter_context(patch.object(reference, "linear_input_grad", _input_grad))
        undo.enter_context(patch.object(driver, "_active", _StandInDriver()))
        yield


def _hopper_kernels(plan: Any, dtype: torch.dtype) -> KernelSet:
    """Kernels that a Hopper GPU selects."""
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "get_device_capability", lambda *device: (9, 0)),
    ):
        return select_kernels(plan.kernels, torch.device("cuda", 0), dtype, plan.precision.low_precision)


def host_cost(words: Sequence[str], *, num_timed: int = _TIMED) -> HostCost:
    """Measures rank 0 of a run with these flags. `num_timed`: timed pairs of steps; 0 to count calls only."""
    with _without_gpu():
        shorten_launches()
        plan = plan_to_run([*words, "--fake-init-process-group", "--device", "cpu"])
        context = context_without_peers(plan, device="cpu")
        try:
            load = assumed_load(context)
            kernels = with_assumed_choices(_hopper_kernels(plan, context.dtype), load, cache(assumed_ids))
            stand_in = partial(transport_without_peers, load)
            model = build.build_model(plan, context, kernels, initial=False, stand_in_transport=stand_in)
            trainer = build.build_trainer(plan, context, model, kernels, has_peers=False)
            batches, state = make_batches(plan, context, max(MICROBATCHES)), TrainState()

            def step(number: int) -> None:
                trainer.step(batches[:number], replace(state))

            return _measured(step, num_timed)
        finally:
            context.stop()


def _measured(step: Any, num_timed: int) -> HostCost:
    few, many = MICROBATCHES
    for number in (few, many, few):  # kernels are compiled, buffers allocated, schedules built
        step(number)
    seconds: dict[int, list[float]] = {few: [], many: []}
    for _ in range(num_timed):
        for number in MICROBATCHES:
            gc.collect()
            gc.disable()
            begin = time.process_time()
            step(number)
            seconds[number].append(time.process_time() - begin)
            gc.enable()
    milliseconds = float("nan")
    if num_timed:
        milliseconds = 1e3 * (min(seconds[many]) - min(seconds[few])) / (many - few)
    profiles = {number: _profiled(partial(step, number)) for number in MICROBATCHES}
    functions = {}
    for name, (calls, time_ms) in profiles[many].items():
        calls_before, time_before = profiles[few].get(name, (0.0, 0.0))
        functions[name] = (calls - calls_before) / (many - few), (time_ms - time_before) / (many - few)
    return HostCost(milliseconds, sum(calls for calls, _ in functions.values()), functions)


def _profiled(step: Any) -> Functions:
    profiler = cProfile.Profile()
    profiler.runcall(step)
    found: dict[str, tuple[float, float]] = {}
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (path, line, name), (_, calls, seconds, *_) in stats.items():
        place = path.rpartition("site-packages/")[2].rpartition("/megatron_moe/")[2]
        found[f"{place}:{line}({name})"] = calls, 1e3 * seconds
    return found


def words_of(name: str, more: Sequence[str] = ()) -> list[str]:
    """Flags of a case of `step_cases.py` at small sizes."""
    (case,) = (case for case in CASES if case.name == name)
    ranks = () if case.num_gpus == 1 else ("--world-size", str(case.num_gpus))
    return [*case.flags.split(), *ranks, *LAYERS.split(), *SMALL.split(), *more]


def main(argv: list[str]) -> int:
    own, more = split_at_dashes(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=DEFAULT, help="names of cases; ratios are to the first")
    parser.add_argument("--timed", type=int, default=_TIMED, help="timed pairs of steps per case; 0 counts calls only")
    parser.add_argument("--functions", type=int, default=0, help="functions to list per case, longest first")
    options = parser.parse_args(own)
    print("| case | ms per microbatch | ratio | calls per microbatch | ratio |\n|---|---|---|---|---|")
    costs = {name: host_cost(words_of(name, more), num_timed=options.timed) for name in options.cases}
    for name, cost in costs.items():
        print(cost.row(name, next(iter(costs.values()))))
    for name, cost in costs.items() if options.functions else ():
        print(f"\n{name}: calls and milliseconds inside a function per microbatch, under a profiler\n")
        for function, (calls, time_ms) in sorted(cost.functions.items(), key=lambda each: -each[1][1])[
            : options.functions
        ]:
            print(f"{calls:8.1f} {time_ms:8.3f}  {function}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
