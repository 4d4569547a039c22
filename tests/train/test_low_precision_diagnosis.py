"""Diagnosis of non-finite gradients and anomaly detection in FP8 and FP4 steps, in which some gradients exist only in
FP8."""

import pytest
import torch

from megatron_moe.build import build_data, build_train_loader
from megatron_moe.config.precision import low_precision_config
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.resilience.numerics_guard import FirstNonfiniteModule
from megatron_moe.train.train_state import TrainState
from tests.helpers.pipelines import KERNELS, make_trainer
from tests.train.test_low_precision import CONFIGS, plan_of

EVERY_RECIPE = {
    "blockwise": CONFIGS["blockwise"],
    "tensorwise": low_precision_config("tensorwise"),
    "delayed": CONFIGS["delayed"],
    "mxfp8": low_precision_config("mxfp8", blocks=8),
    "nvfp4": CONFIGS["nvfp4"],
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("recipe", EVERY_RECIPE)
def test_diagnosis_and_anomaly_detection_find_nothing_in_a_healthy_step(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that exist in FP8 only, between the layers of experts, count as their values."""
    plan, context, read = plan_of(EVERY_RECIPE[recipe]), ParallelContext.single(), []
    dequantize = reference.dequantize_rows
    monkeypatch.setattr(KERNELS, "dequantize_rows", lambda rows: read.append(rows) or dequantize(rows))
    trainer, loader = make_trainer(plan, context), build_train_loader(plan, context, build_data(plan, context))
    batches = loader.next_step()
    trainer.step(batches, TrainState())
    assert not read, "no layer dequantises its gradient"
    with FirstNonfiniteModule(trainer.model) as found:
        trainer.repeat(batches, 1)
    assert (found.forward, found.backward) == (None, None)
    with torch.autograd.detect_anomaly(check_nan=True):
        trainer.repeat(batches, 1)
    assert bool(read) == (EVERY_RECIPE[recipe].fused_block is not None), "checked by their values"


@pytest.mark.parametrize("recipe", EVERY_RECIPE)
def test_diagnosis_names_the_layer_with_an_infinite_gradient(recipe: str) -> None:
    plan, context = plan_of(EVERY_RECIPE[recipe]), ParallelContext.single()
    trainer, loader = make_trainer(plan, context), build_train_loader(plan, context, build_data(plan, context))
    experts = trainer.model.decoder.by_index[1].mlp.experts

    def make_infinite(module: torch.nn.Module, inputs: object, out: torch.Tensor) -> None:
        out.register_hook(lambda grad: grad * torch.inf)

    experts.linear_fc1.register_forward_hook(make_infinite)
    with FirstNonfiniteModule(trainer.model) as found:
        trainer.repeat(loader.next_step(), 1)
    assert found.backward is not None and found.backward.name == "decoder.layers.1.mlp.experts.linear_fc1"
