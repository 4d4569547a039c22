"""Kernel warm-up on a GPU before the rendezvous: compiles kernels and initialises libraries such as cuDNN.

One layer of every kind, the embedding, the output head and the optimizer run a small step at this rank's sizes in a
fake process group, so that no rank waits in a collective or a timed step while another rank compiles.

Triton compiles a kernel when it is launched, one after the other. If kernels may be missing in the cache, the small
step therefore first runs on the `meta` device: its launches are recorded, and threads compile the kernels. The ranks of
a node share this work and the cache.
"""

import fcntl
import gc
import hashlib
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megatron_moe import build
from megatron_moe.config.memory import CudaGraphConfig
from megatron_moe.config.pipeline import PipelineConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.kernels.backends.triton.precompile import compile_recorded, record_launches
from megatron_moe.kernels.registry import BACKENDS, is_installed
from megatron_moe.memory_emulation.kernels import triton_kernels
from megatron_moe.memory_emulation.rank import assumed_load, make_batches, transport_without_peers, with_assumed_choices
from megatron_moe.parallel.context import ParallelContext, torch_dtype
from megatron_moe.resilience.watchdog import Watchdog
from megatron_moe.train.train_state import TrainState
from megatron_moe.warmup.kernel_cache import prepare_cache_folder, remove_damaged

_MARKER = "warmed-up-"
"""Prefix of marker files, each of which states that all kernels of a plan are in the cache."""
_MAX_THREADS = 16
"""Maximum number of threads per process. More would not help, because a fifth of the compilation is Python code, which
holds the GIL."""


def warm_up_kernels(plan: RunPlan, watchdog: Watchdog) -> str:
    """Compiles kernels and runs the warm-up step on a GPU, without a watchdog timeout, and returns a log line. If this
    fails, the log line contains the error, and the run compiles the remaining kernels when they are first needed.

    Raises EnvironmentProblem if the kernel cache folder cannot be used.
    """
    if not plan.kernels.compile_first or plan.device == "cpu" or not torch.cuda.is_available():
        return "kernels are compiled when they are first needed"
    watchdog.enter("compilation")
    begin = time.monotonic()
    folder = prepare_cache_folder(plan.kernels.kernel_cache_dir)
    before = len(list(folder.glob("*/*.cubin")))
    failure, compile_seconds = try_warm_up(plan, torch.device("cuda", plan.process.local_rank), folder)
    watchdog.enter("start")
    seconds = time.monotonic() - begin
    done = f"kernels: {len(list(folder.glob('*/*.cubin'))) - before} compiled into {folder} in {compile_seconds:.1f} s"
    if failure:
        return f"{done}; the warm-up failed after {seconds:.1f} s, other kernels are compiled when needed: {failure}"
    return f"{done}, libraries initialised in {seconds - compile_seconds:.1f} s, before the rendezvous"


def try_warm_up(plan: RunPlan, device: torch.device, folder: Path) -> tuple[str, float]:
    """Compiles kernels, unless an earlier run did so, runs the warm-up step and frees its memory. Returns the message
    of the first error, or "", and the seconds of parallel compilation."""
    begin, done = time.monotonic(), folder / f"{_MARKER}{_fingerprint(plan)}"
    for marker in folder.glob(f"{_MARKER}*") if remove_damaged(folder) else ():
        marker.unlink(missing_ok=True)
    failure = "" if done.exists() else compile_kernels(plan, device, folder)
    seconds = time.monotonic() - begin
    try:
        with open(folder / "warmup.lock", "w") as lock:
            if failure:  # the step compiles: on the first rank of the node, while the others wait for the cache
                fcntl.flock(lock, fcntl.LOCK_EX)
            take_step(plan, device)
    except Exception as problem:  # Triton errors derive from Exception only
        failure = failure or _message(problem)
    if not failure:
        done.touch()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return failure, seconds


def compile_kernels(plan: RunPlan, device: torch.device, folder: Path) -> str:
    """Compiles the Triton kernels of the warm-up step for `device` in threads. Returns the error message or "".

    All processor cores of the node are divided among its ranks.
    """
    if not is_installed("triton"):
        return ""
    num_threads = max(len(os.sched_getaffinity(0)) // plan.process.local_world_size, 1)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with record_launches() as recorded:
            take_step(plan, torch.device("meta"), kernels_of=device)
        compile_recorded(recorded, folder / "locks", min(num_threads, _MAX_THREADS))
    except Exception as problem:
        return f"parallel compilation: {_message(problem)}"
    return ""


def _message(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0]


def take_step(plan: RunPlan, device: torch.device, *, kernels_of: torch.device | None = None) -> None:
    """Runs one training step of the reduced plan of `warmup_plan`, with random weights in a fake process group.

    `kernels_of`: device for which Triton kernels are recorded while the tensors are on `meta`.
    """
    small = warmup_plan(plan)
    build.set_algorithms(small)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    context = ParallelContext.fake(
        small.parallel,
        plan.process.rank % small.parallel.world_size,
        dtype=torch_dtype(small.precision.params),
        device=device,
    )
    try:
        if kernels_of is None:
            kernels = build.build_kernels(small, context)
        else:
            kernels = triton_kernels(small.kernels, kernels_of, context.dtype, small.precision.low_precision)
        load = assumed_load(context)
        kernels = with_assumed_choices(kernels, load)
        stand_in = partial(transport_without_peers, load)
        model = build.build_model(small, context, kernels, initial=False, stand_in_transport=stand_in)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.02)
        trainer = build.build_trainer(small, context, model, kernels, has_peers=False)
        trainer.step(make_batches(small, context, _num_microbatches(plan)), TrainState())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    finally:
        context.stop()


def warmup_plan(plan: RunPlan) -> RunPlan:
    """Reduced plan: one layer of every kind on one pipeline stage, few microbatches, same tensor shapes per rank."""
    parallel = plan.parallel
    return replace(
        plan,
        model=replace(plan.model, layers=tuple(dict.fromkeys(plan.model.layers))),
        parallel=replace(
            parallel, world_size=parallel.world_size // parallel.pp, pp=1, virtual_stages=1, embedding_ranks=(0,)
        ),
        pipeline=PipelineConfig(),
        batch=replace(
            plan.batch,
            global_batch_size=_num_microbatches(plan) * plan.batch.micro_batch_size * parallel.dp,
            rampup_batch_size=None,
        ),
        cuda_graphs=CudaGraphConfig(),
    )


def _num_microbatches(plan: RunPlan) -> int:
    """Number of microbatches of two full intervals (`--moe-expert-wgrad-interval`) plus those of the plan's incomplete
    last interval."""
    interval = plan.memory.moe_expert_wgrad_interval
    return 2 * interval + plan.num_microbatches % interval


def _fingerprint(plan: RunPlan) -> str:
    """Hash of everything that determines the compiled kernels of a rank: sizes, formats, optimizer, memory options,
    rank, sources, versions."""
    sizes = plan.batch.micro_batch_size, plan.data.seq_length, _num_microbatches(plan)
    segments = plan.data.packing, plan.data.reset_attention_mask
    configs = plan.model, plan.parallel, plan.precision, plan.kernels, plan.optimizer, plan.memory, plan.data_parallel
    made_of = *configs, plan.process.rank, *sizes, *segments
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    digest = hashlib.blake2b(repr((made_of, torch.__version__, device)).encode(), digest_size=8)
    for path in sorted(BACKENDS.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
