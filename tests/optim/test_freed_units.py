"""Units whose weights and gradients are absent between uses: a ZeRO-3 of the tests equals ZeRO-1."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_moe.build import (
    build_data,
    build_model,
    build_train_loader,
    build_train_state_config,
    build_trainer,
    record_steps,
)
from megatron_moe.config.memory import CudaGraphConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.evaluation import evaluate
from megatron_moe.train.train_state import TrainState
from tests.helpers.eager_graphs import EagerRecorder
from tests.helpers.pipelines import KERNELS
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import FP64_LAYOUT
from tests.helpers.zero3 import ZERO_3, Zero3Store
from tests.parity.cells import plan_of
from tests.parity.dimensions import cell_of

ZERO = "dp=2 zero=on overlap=grads balance=none shared=on"
CASES = {
    "plain": ZERO,
    "microbatches": f"{ZERO} accumulation=4",
    "expert parallel": f"{ZERO} ep=2 dispatcher=alltoall accumulation=2",
    "recomputed layers": f"{ZERO} recompute=full accumulation=2",
    "recomputed small modules": f"{ZERO} recompute=small attention=mla",
    "recomputed experts": f"{ZERO} ep=2 dispatcher=alltoall recompute=moe",
    "tied head and mtp": f"{ZERO} head=tied mtp=on",
    "overlapped microbatches": f"{ZERO} ep=2 dispatcher=alltoall overlap=experts accumulation=4",
    "pipeline": "dp=2 pp=2 zero=on overlap=grads balance=none accumulation=4",
}


def plan(case: str) -> RunPlan:
    plan = plan_of(cell_of(CASES.get(case, ZERO)))
    if case == "captured modules":
        modules = ("attn", "moe_router", "mlp")
        plan = replace(plan, cuda_graphs=CudaGraphConfig(cuda_graph_modules=modules, cuda_graph_warmup_steps=1))
    return replace(plan, data_parallel=replace(plan.data_parallel, overlap_grad_reduce=True))


def train(plan: RunPlan, context: ParallelContext, **sharding) -> tuple[dict[str, Tensor], object]:
    """Losses, norms and weights of three steps and an evaluation, and the store of the weights."""
    trainer = build_trainer(plan, context, build_model(plan, context, KERNELS), KERNELS, **sharding)
    record_steps(trainer, EagerRecorder(), plan.cuda_graphs)
    loader, state = build_train_loader(plan, context, build_data(plan, context)), TrainState()
    figures: dict[str, Tensor] = {}
    for step in range(3):
        batches = loader.next_step()
        outcome = trainer.step(batches, state)
        state.advance(outcome.num_samples, build_train_state_config(plan))
        figures |= {f"loss {step}": outcome.loss} | {f"norm {step} {part}": n for part, n in outcome.norms.items()}
    figures["evaluation"] = torch.tensor(evaluate(trainer.pipeline, batches, len(batches)))
    with trainer.optimizer.plain_weights():
        figures |= {slot.name: slot.parameter.detach().clone() for slot in trainer.buffers.slots}
    return figures, trainer.optimizer.store


@pytest.mark.parametrize("case", [*CASES, "captured modules"])
def test_units_that_are_freed_between_uses_give_the_results_of_zero_1(case: str) -> None:
    run = plan(case)
    expected = on_threads(run.parallel, lambda context: train(run, context))
    found = on_threads(run.parallel, lambda context: train(run, context, **ZERO_3))
    for rank, ((figures, store), (others, _)) in enumerate(zip(found, expected, strict=True)):
        FP64_LAYOUT.check_all(figures, others, f"rank {rank}")
        assert isinstance(store, Zero3Store)
        sizes = sorted(store.unit_bytes.values())
        assert len(sizes) > 2 and sizes[-1] <= store.most_bytes <= sum(sizes[-2:])
