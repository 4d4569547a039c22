"""CUDA graphs with FP8 and FP4 GEMMs: replays equal eager steps bit for bit, and module graphs quantise no weights."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.build import build_model, build_trainer, record_steps
from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.config.memory import CudaGraphConfig
from megatron_moe.config.model import ModelConfig
from megatron_moe.config.moe import SharedExpertsConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.precision import low_precision_config
from megatron_moe.config.run import KernelConfig, RunPlan
from megatron_moe.config.training import BatchConfig
from megatron_moe.kernels.ops import GroupedPart
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.memory.cuda_graphs.capture import CapturedGraph, Work, check_capturable
from megatron_moe.optim import param_store
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.precision.linear_quantizer import DelayedScaling, LinearQuantizer
from megatron_moe.train.train_state import TrainState
from tests.helpers import tiny, tiny_models
from tests.helpers.eager_graphs import EagerRecorder, TapeRecorder
from tests.helpers.pipelines import KERNELS, laid_out, run_steps
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT
from tests.optim.test_gather_in_forward import gather_when_waited_for

RECIPES = {
    "blockwise": low_precision_config("blockwise", blocks=8),
    "blockwise, bf16 weight gradients": low_precision_config("blockwise", blocks=8, weight_grad=False),
    "blockwise, activation inputs": low_precision_config("blockwise", blocks=8, activation_inputs=True),
    "delayed": low_precision_config("delayed", hybrid=True, amax_history_len=2),
    "tensorwise": low_precision_config("tensorwise"),
    "mxfp8": low_precision_config("mxfp8"),
    "nvfp4": low_precision_config("nvfp4"),
}
ATTENTION = CudaGraphConfig(cuda_graph_modules=("attn", "mlp", "moe_router"), cuda_graph_warmup_steps=1)
LAYERS = CudaGraphConfig(cuda_graph_modules=("attn", "mlp", "moe"), cuda_graph_warmup_steps=1)
WHOLE = CudaGraphConfig(full_iteration=True, cuda_graph_warmup_steps=1)
SHARED = SharedExpertsConfig(mlp=tiny_models.mlp_config(ffn_hidden_size=16), gate=True)
MODEL = tiny.model(num_layers=2, moe_config=tiny.moe(shared=SHARED))
LATENT = tiny.model(
    layers=(
        tiny_models.layer_config(tiny_models.mla_config()),
        tiny_models.layer_config(tiny_models.mla_config(), feed_forward=tiny_models.moe_config()),
    )
)
DENSE = replace(MODEL, layers=MODEL.layers[:1])


def plan_of(recipe: str, model: ModelConfig = MODEL, **changes: Any) -> RunPlan:
    """Builds a plan with the recipe and two microbatches per step."""
    changes.setdefault("batch", BatchConfig(micro_batch_size=2, global_batch_size=4))
    plan = tiny.plan(model=model, **changes)
    return replace(plan, precision=replace(plan.precision, low_precision=RECIPES[recipe]))


class WeightCounter(EagerRecorder):
    """Recorder that counts the weights quantised inside captures."""

    def __init__(self) -> None:
        self.kernels = reference.bundle()
        self.num_weights = 0
        self._captures = False
        quantize_weight = self.kernels.quantize_weight

        def count(*arguments: Any, **options: Any) -> Any:
            self.num_weights += self._captures
            return quantize_weight(*arguments, **options)

        self.kernels.quantize_weight = count  # type: ignore[method-assign]

    def capture(self, work: Work, pool: Any, inputs: Sequence[Tensor] = ()) -> CapturedGraph:
        def run(*buffers: Tensor) -> Sequence[Tensor]:
            self._captures = True
            try:
                return work(*buffers)
            finally:
                self._captures = False

        return super().capture(run, pool, inputs)


def train(
    plan: RunPlan, recorder: EagerRecorder | None = None, context: ParallelContext | None = None
) -> dict[str, Tensor]:
    context, kernels = context or ParallelContext.single(), getattr(recorder, "kernels", KERNELS)
    trainer = build_trainer(plan, context, build_model(plan, context, kernels), kernels)
    record_steps(trainer, recorder or EagerRecorder(), plan.cuda_graphs)
    return run_steps(plan, trainer, TrainState(), 3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_replayed_steps_equal_eager_steps(recipe: str) -> None:
    plan = plan_of(recipe)
    expected = train(plan)
    for config, num_weights in ((LAYERS, 0), (WHOLE, 2 * 10)):
        counter = WeightCounter()
        EXACT.check_all(train(replace(plan, cuda_graphs=config), counter), expected, f"{recipe}, {config}")
        assert counter.num_weights == num_weights, "whole steps quantise 10 weights per replay, graphs of modules none"


@pytest.mark.parametrize(("model", "config"), [(LATENT, ATTENTION), (DENSE, WHOLE)], ids=["modules", "whole steps"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_replays_read_weights_scales_and_seeds_from_fixed_addresses(
    recipe: str, model: ModelConfig, config: CudaGraphConfig
) -> None:
    """A replay runs no Python code, so everything that changes must be in the memory that the graph reads.

    Weights and scales change in every step, random seeds in every microbatch.
    """
    plan = plan_of(recipe, model)
    expected = train(plan)
    EXACT.check_all(train(replace(plan, cuda_graphs=config), TapeRecorder()), expected, recipe)


@pytest.mark.parametrize(("model", "config"), [(LATENT, ATTENTION), (DENSE, WHOLE)], ids=["modules", "whole steps"])
@pytest.mark.parametrize("recipe", ["blockwise", "delayed", "mxfp8", "nvfp4"])
def test_replays_read_stored_weights(recipe: str, model: ModelConfig, config: CudaGraphConfig) -> None:
    """Weights stored in FP8 or FP4 (`--fp8-param-gather`, `--fp4-param-gather`) have fixed addresses."""
    sharded = DataParallelConfig(use_distributed_optimizer=True)
    plan = plan_of(recipe, model, data_parallel=sharded)
    plan = replace(plan, precision=replace(plan.precision, low_precision_params=True))
    expected = train(plan)
    EXACT.check_all(train(replace(plan, cuda_graphs=config), TapeRecorder()), expected, recipe)


def test_weights_are_quantised_after_they_were_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = ParallelConfig(world_size=2)
    early = DataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, ddp_bucket_size=500)
    plan = plan_of("blockwise", data_parallel=early, parallel=parallel)
    expected = on_threads(parallel, lambda context: train(plan, None, context))
    monkeypatch.setattr(param_store, "start_all_gather_", gather_when_waited_for)
    late = replace(plan, data_parallel=replace(early, overlap_param_gather=True), cuda_graphs=ATTENTION)
    for found, eager in zip(
        on_threads(parallel, lambda context: train(late, TapeRecorder(), context)), expected, strict=True
    ):
        EXACT.check_all(found, eager, "weights gathered in the forward")


def test_microbatches_in_flight_share_the_quantised_weights() -> None:
    """Two pipeline ranks with two stages each have several graph instances, which read the same quantised weights."""
    model, batch = tiny.model(num_layers=4), BatchConfig(micro_batch_size=1, global_batch_size=4)
    plan = laid_out(plan_of("delayed", model, batch=batch), "Et*1|t*1|t*1|t*1L", 2)
    captured = replace(plan, cuda_graphs=ATTENTION)
    expected = on_threads(plan.parallel, lambda context: train(plan, None, context))
    found = on_threads(plan.parallel, lambda context: train(captured, TapeRecorder(), context))
    for rank, (figures, eager) in enumerate(zip(found, expected, strict=True)):
        EXACT.check_all(figures, eager, f"rank {rank}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_captured_experts_read_their_numbers_of_rows_on_the_device(recipe: str) -> None:
    """A replay computes correct GEMMs for other numbers of rows per expert than the capture."""
    config, stack = RECIPES[recipe], (3, 16, 32)
    delayed = DelayedScaling(config, torch.device("cpu"), 3, 0) if config.recipe == "delayed" else None
    precision = LinearQuantizer(config, KERNELS, delayed=delayed)
    rows_RI, grad_RO, weight_eOI = torch.randn(50, 32), torch.randn(50, 16), torch.randn(stack)
    ends_e, weight_grad_eOI = torch.tensor([20, 20, 41], dtype=torch.int32), torch.empty(stack)

    def products() -> list[Tensor]:
        rows, weight = (
            precision.quantize_input(rows_RI, columnwise=True, offsets_e=ends_e),
            precision.quantize_weight(weight_eOI),
        )
        grad = precision.quantize_grad(grad_RO, rowwise=True, columnwise=True, offsets_e=ends_e)
        KERNELS.quantized_grouped_weight_grad([GroupedPart(grad, rows, ends_e)] * 2, weight_grad_eOI, False)
        out_RO = KERNELS.quantized_grouped_forward(rows, weight, ends_e)
        return [out_RO, KERNELS.quantized_grouped_input_grad(grad, weight, ends_e), weight_grad_eOI]

    graph = TapeRecorder().capture(products, None)
    for ends in ([3, 18, 50], [0, 0, 7], [20, 20, 41], [0, 0, 0]):
        ends_e.copy_(torch.tensor(ends))
        graph.replay()
        found = [tensor.clone() for tensor in graph.outputs]
        for tensor, expected in zip(found, products(), strict=True):
            EXACT.check(tensor, expected, f"{ends}")


def test_emulated_experts_can_be_captured() -> None:
    emulated = replace(RECIPES["mxfp8"], emulate=True)
    kernels = select_kernels(KernelConfig(), torch.device("cpu"), torch.float32, emulated)
    with pytest.raises(EnvironmentProblem, match="cannot capture grouped_forward of the backend reference"):
        check_capturable(LAYERS, kernels)
    kernels.choices = tuple(each for each in kernels.choices if each.op.startswith("quantized_"))
    assert any("grouped" in each.op for each in kernels.choices)
    check_capturable(LAYERS, kernels)
