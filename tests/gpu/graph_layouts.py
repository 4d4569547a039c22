"""Training runs with CUDA graphs on two GPUs, one per class of published recipe, for the tests of graphs by layout."""

from types import MappingProxyType

import torch

from megatron_moe.parallel.context import ParallelContext
from tests.gpu.shared_group import run_within

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


ENVIRONMENT = {"NCCL_GRAPH_REGISTER": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Variables that a process needs before it uses a GPU."""


def trained(context: ParallelContext, words: str) -> dict[str, torch.Tensor]:
    """Trains and returns the loss of each step and the final weights. An evaluation runs between two replays."""
    run, figures = run_within(context, [*SHAPES.split(), *words.split()]), {}
    for step in range(WARMUP + REPLAYS):
        figures[f"loss {step}"] = run.step().loss.cpu()
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
