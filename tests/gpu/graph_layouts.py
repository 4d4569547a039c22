"""Training runs with CUDA graphs on two GPUs, one per class of published recipe, for the tests of graphs by layout."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import MappingProxyType

import torch

from megatron_moe.build import build_train_state_config
from megatron_moe.logs.log_line import StepResult
from megatron_moe.memory.paged_stash import PagedStash
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.step_supervisor import StepSupervisor
from megatron_moe.train.training_log import TrainingLog
from tests.gpu.shared_group import run_within
from tests.helpers.graph_counts import check_number_of_graphs

WARMUP, REPLAYS = 2, 20
SHAPES = (
    "--recipe m8 --num-layers 4 --hidden-size 256 --moe-ffn-hidden-size 128 --num-experts 16 --moe-router-topk 4 "
    "--seq-length 256 --vocab-size 1000 --global-batch-size 16 --micro-batch-size 2 --train-iters 40 "
    "--moe-layer-freq [0,1,1,1] --no-moe-router-force-load-balancing --moe-expert-wgrad-interval 1 --lr 1e-2 "
    "--deterministic-mode --no-overlap-grad-reduce --no-overlap-param-gather"
)
MODULES = f"--cuda-graph-impl transformer_engine --cuda-graph-warmup-steps {WARMUP} --cuda-graph-modules"
WHOLE = f"--cuda-graph-impl full_iteration --cuda-graph-warmup-steps {WARMUP}"
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type flex --moe-expert-rank-capacity-factor 2"
TP2 = f"--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 {EP2}"
CP2 = f"--context-parallel-size 2 {EP2}"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
FSDP = "--use-megatron-fsdp"
PAIRS = "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"
STASH = "--moe-paged-stash --moe-paged-stash-buffer-size-factor-cuda 3"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
MTP = "--mtp-num-layers 1"
FP8 = "--fp8-format e4m3 --fp8-recipe blockwise --no-fp8-wgrad"
OFFLOAD = "--fine-grained-activation-offloading --min-offloaded-tensor-size 1024 --offload-modules"
MAMBA = (
    "--hybrid-layer-pattern M-MEM*ME --moe-layer-freq 1 --position-embedding-type none --mamba-num-heads 8 "
    "--mamba-head-dim 64 --mamba-num-groups 2 --mamba-state-dim 64"
)
SPILL = "--moe-paged-stash --moe-paged-stash-buffer-size-factor-cuda 0.2 --moe-paged-stash-buffer-size-factor-cpu 3"
"""Device pages for a fifth of the rows of a balanced load, so that every step uses host pages."""
CASES = MappingProxyType(
    {
        "tensor and sequence parallel": (TP2, (f"{MODULES} attn moe_router", f"{MODULES} attn mlp moe", WHOLE)),
        "tensor-parallel communication during GEMMs": (
            f"{TP2} --tp-comm-overlap --seq-length 1024",
            (f"{MODULES} attn moe_router", f"{MODULES} attn mlp moe", WHOLE),
        ),
        "context parallel": (CP2, (f"{MODULES} attn moe_router", WHOLE)),
        "1F1B": (PP2, (f"{MODULES} attn mlp moe_router", WHOLE)),
        "interleaved 1F1B": (VPP2, (f"{MODULES} attn moe_router", WHOLE)),
        "overlapped reduction and gather": (OVERLAP, (f"{MODULES} attn mlp moe_router", WHOLE)),
        "sharded weights": (FSDP, (f"{MODULES} attn mlp moe_router", WHOLE)),
        "sharded weights, expert parallel": (f"{FSDP} {EP2}", (WHOLE,)),
        "overlapped exchange": (f"{EP2} {PAIRS} {OVERLAP}", (f"{MODULES} attn moe_router moe_preprocess", WHOLE)),
        "recompute inside": (f"{EP2} {SELECTIVE} core_attn layernorm moe_act", (f"{MODULES} attn mlp moe", WHOLE)),
        "stash": (f"{EP2} {STASH} {OVERLAP}", (f"{MODULES} attn moe_router", WHOLE)),
        "stash, exchange, prediction, recompute": (
            f"{EP2} {STASH} {PAIRS} {OVERLAP} {MTP} {SELECTIVE} layernorm moe_act",
            (WHOLE,),
        ),
        "stash, spill": (f"{EP2} {SPILL} {OVERLAP}", (f"{MODULES} attn moe_router", WHOLE)),
        "stash too small once": (f"{EP2} {STASH}", (f"{MODULES} attn moe_router", WHOLE)),
        "offload of experts": (f"{EP2} {OFFLOAD} expert_fc1 moe_act", (f"{MODULES} attn moe_router",)),
        "offload of experts after the next replay": (
            f"{EP2} {OFFLOAD} expert_fc1 moe_act",
            (f"{MODULES} attn moe_router --delay-offload-until-cuda-graph",),
        ),
        "offload of fused_group_mlp": (
            f"{EP2} {OFFLOAD} fused_group_mlp --fine-grained-offloading-max-inflight-offloads 2",
            (f"{MODULES} attn moe_router", WHOLE),
        ),
        "Mamba hybrid": (
            f"{EP2} {MAMBA}",
            (f"{MODULES} attn mamba moe_router", f"{MODULES} attn mamba mlp moe", WHOLE),
        ),
        "FP8": (f"{EP2} {FP8}", (f"{MODULES} attn mlp moe_router", f"{MODULES} attn mlp moe", WHOLE)),
    }
)
"""Name -> (flags of the layout, flags of its kinds of CUDA graphs)."""
SHORT_OF_PAGES = frozenset({"stash too small once"})
"""Cases with a step in which the first rank has no free page."""


ENVIRONMENT = {"NCCL_GRAPH_REGISTER": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Variables that a process needs before it uses a GPU."""


class Results:
    """Reporter that keeps notes and results of steps."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[StepResult] = []
        self.note, self.observe = self.notes.append, self.steps.append

    def is_due(self, iteration: int) -> bool:
        return False


@contextmanager
def without_free_pages(stash: PagedStash) -> Iterator[None]:
    """Withholds all pages of a stash, which must be free."""
    pools = list(stash._pages.values())
    assert pools, "the stash has no pages before its first use"
    sizes = [torch.tensor((0, pool.num, 0, pool.num_host), device=pool.ends.device) for pool in pools]
    for pool, size in zip(pools, sizes, strict=True):
        pool.ends.sub_(size)
    yield
    for pool, size in zip(pools, sizes, strict=True):
        pool.ends.add_(size)


def trained(context: ParallelContext, words: str, short_of_pages: bool = False) -> dict[str, torch.Tensor]:
    """Trains and returns the loss of each step and the final weights. An evaluation runs between two replays.

    `short_of_pages`: the first rank has no free page in one step, which all ranks repeat without the stash.
    """
    run, results, repeated = run_within(context, [*SHAPES.split(), *words.split()]), Results(), []
    supervisor = StepSupervisor(run.trainer, TrainingLog(run.trainer, results), run.loader)  # type: ignore[arg-type]
    prepare = run.trainer.prepare_repetition
    run.trainer.prepare_repetition = lambda *args: repeated.append(args[0]) or prepare(*args)  # type: ignore
    for step in range(WARMUP + REPLAYS):
        stash = run.trainer.model.saved_tensors.stash
        short = short_of_pages and step == WARMUP + 5 and context.rank == 0
        with without_free_pages(stash) if short and stash else nullcontext():
            outcome = supervisor.step(run.state)
        run.state.advance(outcome.counts, build_train_state_config(run.plan))
        supervisor.after_step(outcome)
        if step == WARMUP + 2:
            batches = run.loader.next_step()
            with torch.no_grad():
                run.trainer.pipeline.run(batches, lambda output, *_: output.loss_BS.sum())
    supervisor.catch_up()
    assert repeated == ([WARMUP + 6] if short_of_pages else []), results.notes
    if "--cuda-graph-impl" in words:
        print(check_number_of_graphs(run.trainer, run.plan), flush=True)
    figures = {f"loss {each.iteration}": torch.tensor(each.loss, dtype=torch.float64) for each in results.steps}
    assert len(figures) == WARMUP + REPLAYS
    with run.trainer.optimizer.unquantized_weights():
        figures |= {name: value.detach().cpu() for name, value in run.trainer.model.named_parameters()}
    run.close()
    return figures
