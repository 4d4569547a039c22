"""Creates training runs in the process group of pooled GPU processes, which outlives the runs."""

import os
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness.timed_run import TimedRun, plan_to_run
from megatron_moe.config.memory import CudaGraphConfig
from megatron_moe.parallel.context import ParallelContext, torch_dtype
from tests.helpers.contexts import context_of_rank


def run_within(context: ParallelContext, words: Sequence[str], graphs: CudaGraphConfig | None = None) -> TimedRun:
    """Creates a run of a command line on the ranks of `context`, with weights initialised on the device.

    `graphs` replaces the CUDA graph settings of the command line.
    """
    rank, size = f"{context.rank}", f"{context.config.world_size}"
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    plan = plan_to_run(words)
    if graphs is not None:
        plan = replace(plan, cuda_graphs=graphs)
    holders = plan.layout.embedding_ranks(tied=plan.model.tied_embeddings)
    own = context_of_rank(
        replace(plan.parallel, embedding_ranks=holders),
        context.rank,
        dtype=torch_dtype(plan.precision.params),
        device=context.device,
        seed=plan.loop.seed,
        handles=context.handles,
    )
    return TimedRun(plan, quick=True, context=own)
