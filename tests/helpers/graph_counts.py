"""Number of captured CUDA graphs, compared with the formula of the cost model."""

from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.graph_memory import num_graphs
from megatron_moe.pipeline.schedule import build_schedule
from megatron_moe.train.trainer import Trainer


def expected_graphs(plan: RunPlan, stage: int) -> int:
    """Number of CUDA graphs of a pipeline rank. Steps of equal shapes have one graph of a full iteration."""
    if plan.cuda_graphs.full_iteration:
        return 1
    layers = [[plan.model.layers[index] for index in part.layers] for part in plan.layout.chunks(stage)]
    return num_graphs(plan, layers, build_schedule(plan.pipeline_schedule(plan.num_microbatches))[stage])


def check_number_of_graphs(trainer: Trainer, plan: RunPlan) -> str:
    """Asserts that a run captured as many graphs as its plan implies. Returns their summary."""
    graphs = trainer.full_iteration or trainer.pipeline.graph_instances
    assert graphs is not None, "the run captures no graphs"
    summary, expected = graphs.summary(), expected_graphs(plan, trainer.context.group("pp").rank)
    assert summary and summary.startswith(f"CUDA graphs: {expected} "), f"{expected} graphs expected: {summary}"
    return summary
