"""Training runs with CUDA graphs on two GPUs, one per class of published recipe, for the tests of graphs by layout."""

import faulthandler
import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from arguments.read import read_plan
from benchmarks.harness.timed_run import TimedRun
from megatron_moe.data.tokenizer import vocab_size_of

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
PAIRS = "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"
STASH = "--moe-paged-stash --moe-paged-stash-buffer-size-factor-cuda 3"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
MTP = "--mtp-num-layers 1"
CASES = MappingProxyType(
    {
        "tensor and sequence parallel": (TP2, (f"{MODULES} attn moe_router", f"{MODULES} attn mlp moe", WHOLE)),
        "context parallel": (CP2, (f"{MODULES} attn moe_router", WHOLE)),
        "1F1B": (PP2, (f"{MODULES} attn mlp moe_router", WHOLE)),
        "interleaved 1F1B": (VPP2, (f"{MODULES} attn moe_router", WHOLE)),
        "overlapped reduction and gather": (OVERLAP, (f"{MODULES} attn mlp moe_router", WHOLE)),
        "overlapped exchange": (f"{EP2} {PAIRS} {OVERLAP}", (f"{MODULES} attn moe_router moe_preprocess", WHOLE)),
        "recompute inside": (f"{EP2} {SELECTIVE} core_attn layernorm moe_act", (f"{MODULES} attn mlp moe", WHOLE)),
        "stash": (f"{EP2} {STASH} {OVERLAP}", (f"{MODULES} attn moe_router", WHOLE)),
        "stash, exchange, prediction, recompute": (
            f"{EP2} {STASH} {PAIRS} {OVERLAP} {MTP} {SELECTIVE} layernorm moe_act",
            (WHOLE,),
        ),
        "offload of experts": (
            f"{EP2} --fine-grained-activation-offloading --offload-modules expert_fc1 moe_act "
            "--min-offloaded-tensor-size 1024",
            (f"{MODULES} attn moe_router",),
        ),
    }
)
"""Name -> (flags of the layout, flags of its kinds of CUDA graphs)."""


LIMIT_S = 120
"""A run that takes longer hangs: the process prints its stack and exits."""


def trained(words: str) -> dict[str, torch.Tensor]:
    """Losses of each step and weights after the last one. An evaluation runs between two replays."""
    start = time.monotonic()
    plan = read_plan([*SHAPES.split(), *words.split()], os.environ, vocab_size_of=vocab_size_of)
    os.environ.update(plan.environment, NCCL_GRAPH_REGISTER="0")
    run, figures = TimedRun(plan, quick=True), {}
    for step in range(WARMUP + REPLAYS):
        figures[f"loss {step}"] = run.step().loss.cpu()
        if step in (0, WARMUP, WARMUP + REPLAYS - 1):
            print(f"rank {plan.process.rank}, {time.monotonic() - start:.0f} s, step {step}: {words}", flush=True)
        if step == WARMUP + 2:
            batches = run.loader.next_step()
            with torch.no_grad():
                run.trainer.pipeline.run(batches, lambda output, *_: output.loss_BS.sum())
    captured = run.trainer.full_iteration or run.trainer.pipeline.graph_instances
    assert (captured is None) == ("--cuda-graph-impl" not in words)
    if captured is not None:
        print(captured.summary(), flush=True)
    with run.trainer.optimizer.plain_weights():
        figures |= {name: value.detach().cpu() for name, value in run.trainer.model.named_parameters()}
    run.close()
    return figures


def run_cases(rank: int, names: Sequence[str], ports: Sequence[int], folder: str) -> None:
    """Trains the cases in order, without graphs and with every kind of graphs. Writes what `trained` returns, or the
    trace of an error, per case."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    torch.cuda.set_device(rank)
    remaining = iter(ports)
    for name in names:
        layout, graphs = CASES[name]
        found = []
        for words in ("", *graphs):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(next(remaining)))
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            found.append(trained(f"{layout} {words}"))
            faulthandler.cancel_dump_traceback_later()
        Path(folder, f"{name}.{rank}.pickle").write_bytes(pickle.dumps(found))
