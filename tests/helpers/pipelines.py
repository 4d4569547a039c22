"""Short pipelined training runs whose results, tensors by name, can be compared between layouts."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron_moe.build import build_data, build_model, build_train_loader, build_train_state_config, build_trainer
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.pipeline_layout import parse_layout
from megatron_moe.config.run import RunPlan
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.train_state import TrainState
from megatron_moe.train.trainer import Trainer
from tests.helpers.ranks import on_processes, on_threads

KERNELS = reference.bundle()


def laid_out(plan: RunPlan, layout: str, pp: int, **pipeline) -> RunPlan:
    """Copies a plan for `pp` pipeline ranks. The layout is in Megatron's syntax; "" divides the layers evenly."""
    num_mtp = plan.model.mtp.num_layers if plan.model.mtp else 0
    placed = parse_layout(layout, pp=pp, num_layers=len(plan.model.layers), num_mtp=num_mtp)
    holders = placed.embedding_ranks(tied=plan.model.tied_embeddings)
    config = ParallelConfig(world_size=pp, pp=pp, virtual_stages=placed.vpp, embedding_ranks=holders)
    return replace(plan, parallel=config, pipeline=replace(plan.pipeline, layout=placed, **pipeline))


def make_trainer(plan: RunPlan, context: ParallelContext) -> Trainer:
    return build_trainer(plan, context, build_model(plan, context, KERNELS), KERNELS)


def train(plan: RunPlan, context: ParallelContext, steps: int = 3) -> dict[str, Tensor]:
    """Losses, norms, metrics, gradients of the first step and weights after the last, as held by this rank."""
    trainer = make_trainer(plan, context)
    return run_steps(plan, trainer, TrainState(), steps)


def run_steps(plan: RunPlan, trainer: Trainer, state: TrainState, steps: int) -> dict[str, Tensor]:
    loader = build_train_loader(plan, trainer.context, build_data(plan, trainer.context))
    assert loader is not None
    loader.restore(state.consumed_samples)
    figures: dict[str, Tensor] = {}
    for step in range(steps):
        outcome = trainer.step(loader.next_step(), state)
        if step == 0:
            figures |= {f"grad {each.name}": each.main_grad.clone() for each in trainer.buffers.main_grads}
        state.advance(outcome.counts, build_train_state_config(plan))
        figures[f"loss {state.iteration}"] = outcome.loss
        figures |= {f"{name} norm {state.iteration}": norm for name, norm in outcome.norms.items()}
    for name, metric in trainer.metrics.reduce(trainer.context).items():
        figures[f"metric {name}"] = torch.tensor(metric.value)
        figures |= {f"metric {name} {layer}": torch.tensor(value) for layer, value in metric.layers.items()}
    with trainer.optimizer.unquantized_weights():
        return figures | {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def train_on_ranks(plan: RunPlan, *, processes: bool = False, steps: int = 3) -> dict[str, Tensor]:
    """Joined results of all ranks; values held by several ranks must be equal."""
    if processes:
        results = on_processes(plan.parallel, _train_rank, plan, steps)
    else:
        results = on_threads(plan.parallel, lambda context: train(plan, context, steps))
    return together(results)


def _train_rank(context: ParallelContext, plan: RunPlan, steps: int) -> dict[str, Tensor]:
    return train(plan, context, steps)


def together(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    figures: dict[str, Tensor] = {}
    for rank, result in enumerate(results):
        for name, value in result.items():
            known = figures.setdefault(name, value)
            assert torch.equal(known, value), f"{name} of rank {rank} is {value}, of an earlier rank {known}"
    return figures
