"""fp16 training: rules of the loss scale, skipped steps, checkpoints, and the losses of fp32."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_moe.config.optimizer import LossScaleConfig
from megatron_moe.config.precision import PrecisionConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.optim.loss_scale import LossScaler
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.checkpointing import saved_tensors
from megatron_moe.train.train_state import TrainState
from tests.helpers.command_lines import plan_of as plan_of_flags
from tests.helpers.pipelines import make_trainer, run_steps, train
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT
from tests.parity.cells import plan_of
from tests.parity.dimensions import cell_of

CPU = torch.device("cpu")


def followed(config: LossScaleConfig, overflows: str) -> list[float]:
    """Scales after steps with (x) and without (.) overflow, and after void steps (v)."""
    scaler, found = LossScaler(config, CPU), []
    for step in overflows:
        scaler.update(torch.tensor(step in "xv"), torch.tensor(step != "v"))
        found.append(float(scaler.scale))
    return found


def test_the_scale_follows_overflows_as_in_megatron() -> None:
    """One overflow is tolerated, each further one halves the scale; after the scale doubles, one is tolerated again."""
    config = LossScaleConfig(initial_loss_scale=16, min_loss_scale=2, loss_scale_window=3, hysteresis=2)
    assert followed(config, "x") == [16]
    assert followed(config, "xxxxxx") == [16, 8, 4, 2, 2, 2]
    assert followed(config, "xx.x...x") == [16, 8, 8, 4, 4, 4, 8, 8]
    assert followed(config, "...x") == [16, 16, 32, 32]
    assert followed(config, "v..v.vxvx") == [16, 16, 16, 16, 32, 32, 32, 32, 16]
    assert followed(replace(config, loss_scale=128.0), "xx....") == [128] * 6
    assert config.most_overflows == 5
    default = LossScaleConfig()
    assert followed(default, "x" * (default.most_overflows - 1))[-1] == 1, "the smallest scale"


def plan(precision: str, scaling: LossScaleConfig | None, layout: str = "", **changes: object) -> RunPlan:
    plan = plan_of(cell_of(f"capacity=none {layout}"))
    optimizer = replace(plan.optimizer, loss_scaling=scaling, clip_grad=0.1)
    numbers = PrecisionConfig(params=precision)
    resilience = replace(plan.resilience, on_nonfinite="skip")
    return replace(plan, optimizer=optimizer, precision=numbers, resilience=resilience, **changes)


@pytest.mark.parametrize("layout", ["", "tp=2 sp=on dp=2 zero=on", "pp=2 accumulation=2 loss=token"])
def test_losses_and_norms_equal_those_of_unscaled_fp32(layout: str) -> None:
    """Scaling by a power of two is exact, so a scaled fp32 run is bitwise equal to an unscaled one, including auxiliary
    losses."""
    scaled = plan("fp32", LossScaleConfig(initial_loss_scale=2.0**10), layout)
    plain = plan("fp32", None, layout)
    of_scaled, of_plain = (
        on_threads(each.parallel, lambda context, each=each: train(each, context)) for each in (scaled, plain)
    )
    for found, expected in zip(of_scaled, of_plain, strict=True):
        for name, value in expected.items():
            EXACT.check(found[name], value * 2.0**10 if name.startswith("grad ") else value, name)


def test_fp16_trains_like_fp32_after_it_has_found_its_scale() -> None:
    half = plan("fp16", LossScaleConfig(initial_loss_scale=2.0**32))
    trainer = make_trainer(half, ParallelContext.single(dtype=torch.float16))
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float16}
    assert all(buffer.grads.dtype == torch.float32 for buffer in trainer.buffers.buffers)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for _ in range(40):
        figures = run_steps(half, trainer, TrainState(), 1)
        if math.isfinite(figures["all norm 1"]):
            break
        for name, p in trainer.model.named_parameters():
            assert torch.equal(p, before[name]), "a step with an overflow changes no weight"
    assert 1 < float(trainer.loss_scaler.scale) < 2.0**31
    full = plan("fp32", None)
    other = make_trainer(full, ParallelContext.single(dtype=torch.float32))
    expected = run_steps(full, other, TrainState(), 1)
    assert float(figures["loss 1"]) == pytest.approx(float(expected["loss 1"]), rel=2e-3)
    assert float(figures["all norm 1"]) == pytest.approx(float(expected["all norm 1"]), rel=2e-2)
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_checkpoints_contain_the_state_of_the_scale(tmp_path: Path) -> None:
    trainer = make_trainer(plan("fp16", LossScaleConfig()), ParallelContext.single(dtype=torch.float16))
    trainer.loss_scaler.update(torch.tensor(True), torch.tensor(True))
    saved = saved_tensors(trainer, optimizer=True)["optimizer.loss_scale"]
    assert saved.boxes[0].data.tolist() == [2.0**32, 0.0, 1.0]
    assert "optimizer.loss_scale" not in saved_tensors(trainer, optimizer=False)


def test_flags_of_loss_scaling() -> None:
    plan = plan_of_flags("--fp16 --hysteresis 3 --initial-loss-scale 65536 --loss-scale-window 50")
    assert plan.precision.params == "fp16" and plan.precision.main_params_dtype == "fp32"
    assert plan.optimizer.loss_scaling == LossScaleConfig(
        hysteresis=3, initial_loss_scale=65536.0, loss_scale_window=50.0
    )
    assert (plan.resilience.on_nonfinite, plan.resilience.max_skipped_iterations) == ("skip", 3 + 3 + 16)
    constant = plan_of_flags("--fp16 --loss-scale 128")
    assert constant.optimizer.loss_scaling.loss_scale == 128 and constant.resilience.on_nonfinite == "stop"
    assert plan_of_flags("--bf16").optimizer.loss_scaling is None
