"""Muon: Newton-Schulz iterations, scales, split q, k and v, tensor-parallel modes, layouts and resume."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_moe.checkpoint.load import find, load
from megatron_moe.config.attention import NormConfig
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.gated_delta_net import GatedDeltaNetConfig
from megatron_moe.config.mamba import MambaConfig
from megatron_moe.config.optimizer import MuonConfig, OptimizerConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.config.run import RunPlan
from megatron_moe.config.update_rules import rule_of
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.grad_buffers import GradBuffers
from megatron_moe.optim.muon import COEFFICIENTS, coefficients_of, newton_schulz, scale_of
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import new_parameter
from megatron_moe.train.checkpointing import saved_tensors
from megatron_moe.train.train_state import TrainState
from tests.helpers.checkpoint_files import stored_tensors
from tests.helpers.optim_parameters import FP32, FP64, set_grads
from tests.helpers.optim_ranks import KINDS, joined, make_parameters, run, run_alone, total_gradient
from tests.helpers.pipelines import make_trainer, run_steps
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import EXACT, FP64_LAYOUT
from tests.parity.cells import compare_plan, plan_of
from tests.parity.dimensions import cell_of
from tests.train.test_resharding import resume, train_and_save

KERNELS = reference.bundle()
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.1.mlp.experts.linear_fc1.weight"


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def polar(x: Tensor) -> Tensor:
    """Returns the polar factor U V^T, where x = U S V^T is the singular value decomposition."""
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return u @ v


@pytest.mark.parametrize(
    ("name", "shape", "lowest", "highest"),
    [
        ("simple", (256, 704), 0.68, 1.13),
        ("quintic", (256, 704), 0.978, 1.032),
        pytest.param("quintic", (512, 2048), 0.978, 1.032, marks=pytest.mark.slow),
        ("deepseekv4", (256, 704), 1.0, 1.001),
        ("deepseekv4", (256, 256), 1.0, 1.001),
    ],
)
def test_singular_values_after_the_iterations(name: str, shape: tuple[int, int], lowest: float, highest: float) -> None:
    """With Megatron's coefficients, singular values of Gaussian matrices end in the given ranges."""
    coefficients = coefficients_of(name, 10 if name == "deepseekv4" else 5)
    x = draw(1, *shape).float()
    found = torch.linalg.svdvals(newton_schulz(x, coefficients, KERNELS))
    assert lowest - 6e-3 <= found.min() and found.max() <= highest + 6e-3, f"{found.min():.4f} to {found.max():.4f}"
    in_bf16 = newton_schulz(x.bfloat16(), coefficients, KERNELS).float()
    cosine = torch.nn.functional.cosine_similarity(in_bf16.flatten(), polar(x).flatten(), dim=0)
    assert cosine > 0.985


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_every_set_of_coefficients_brings_singular_values_close_to_one(name: str) -> None:
    steps = len(COEFFICIENTS[name]) if name != "simple" else 5
    found = torch.linalg.svdvals(newton_schulz(draw(2, 32, 200), coefficients_of(name, steps), KERNELS))
    assert 0.6 < found.min() and found.max() < 1.31


def test_further_iterations_repeat_the_table_or_its_last_entry() -> None:
    quintic, express = COEFFICIENTS["quintic"], COEFFICIENTS["polar_express"]
    assert coefficients_of("quintic", 7) == [*quintic, *quintic[:2]]
    assert coefficients_of("polar_express", 10) == [*express, express[-1], express[-1]]


@pytest.mark.parametrize(
    ("mode", "scale"), [("spectral", 20.0), ("unit_rms_norm", 2.0), ("shape_scaling", 2.0), ("spectral", 4.0)]
)
def test_scales_depend_on_the_shape_of_the_whole_matrix(mode: str, scale: float) -> None:
    extra = 0.2 if scale == 4.0 else 1.0
    config = MuonConfig(muon_scale_mode=mode, muon_extra_scale_factor=extra)
    assert scale_of(config, 400, 100) == pytest.approx(scale)
    assert scale_of(MuonConfig(muon_scale_mode="shape_scaling"), 100, 400) == 1


def config(**muon: object) -> OptimizerConfig:
    return OptimizerConfig(optimizer="muon", clip_grad=0.0, muon=MuonConfig(**muon))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("precision", [FP64, FP32], ids=["fp64", "fp32"])
def test_steps_follow_the_definition(precision, nesterov: bool) -> None:
    """Two steps equal the definition for a matrix, a stack of experts, and a QKV projection.

    The query, key and value rows of the projection are orthogonalised separately.
    """
    settings = config(muon_nesterov=nesterov, muon_fp32_matmul_prec="high", muon_momentum=0.8)
    dtype = torch.float64 if precision is FP64 else torch.float32
    context = ParallelContext.single(dtype=dtype)
    parameters = make_parameters(context)
    expected = {name: parameter.detach().double() for name, parameter in parameters.items()}
    buffers = GradBuffers(parameters.items(), precision, context, reference.bundle(), optimizer=settings)
    optimizer, momentum = Optimizer(buffers, precision), {}
    one, yes = torch.ones((), dtype=dtype), torch.ones((), dtype=torch.bool)
    for step in range(2):
        grads = {name: total_gradient(name, step, ParallelConfig()) for name in KINDS}
        set_grads(buffers, grads)
        optimizer.step(lr=0.1, weight_decay=0.5, grad_scale=0.5 * one, apply_update=yes)
        for name in (QKV, FC1, "decoder.layers.0.mlp.latent.weight"):
            grad = 0.5 * grads[name]
            momentum[name] = 0.8 * momentum.get(name, 0.0) + 0.2 * grad
            update = 0.2 * grad + 0.8 * momentum[name] if nesterov else momentum[name]
            expected[name] = expected[name] * (1 - 0.1 * 0.5) - 0.1 * by_definition(name, update)
    for name in momentum:
        found = parameters[name].detach().double()
        torch.testing.assert_close(found, expected[name], rtol=1e-12 if dtype == torch.float64 else 1e-4, atol=1e-6)
    kinds = {(each.kind, each.name) for each in optimizer.named_state()}
    assert ("momentum", QKV) in kinds and ("exp_avg", QKV) not in kinds
    assert ("exp_avg", "embedding.word_embeddings.weight") in kinds


def by_definition(name: str, update: Tensor, *, scaled: bool = True) -> Tensor:
    """Applies Newton-Schulz to each matrix separately, and the spectral scale if `scaled`."""
    if update.dim() == 3:
        return torch.stack([by_definition("", each, scaled=scaled) for each in update])
    if name == QKV:
        rows = torch.arange(16).view(4, 4)  # each query group has two rows of q, one of k and one of v
        out = torch.empty_like(update)
        for part in (rows[:, :2].flatten(), rows[:, 2], rows[:, 3]):
            out[part] = by_definition("", update[part], scaled=scaled)
        return out
    tall = len(update) > update.shape[1]
    x = newton_schulz((update.T if tall else update)[None], coefficients_of("quintic", 5), KERNELS)[0]
    return (max(update.shape) ** 0.5 if scaled else 1.0) * (x.T if tall else x)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_steps_follow_torch(adjust: str) -> None:
    """Steps equal those of `torch.optim.Muon` with its two scales and its set of coefficients.

    torch normalises in bf16 and this implementation in fp32, which makes a relative difference of 0.015.
    """
    scale = {"original": ("shape_scaling", 1.0), "match_rms_adamw": ("spectral", 0.2)}[adjust]
    settings = MuonConfig(
        muon_momentum=0.9,
        muon_nesterov=True,
        muon_scale_mode=scale[0],
        muon_extra_scale_factor=scale[1],
        muon_coefficient_type="simple",
    )
    name = "decoder.layers.0.mlp.latent.weight"
    parameter = new_parameter((96, 40), ParamMeta(role="matrix"), ParallelContext.single(dtype=torch.float32))
    parameter.data.copy_(draw(96, 40))
    weight = torch.nn.Parameter(parameter.detach().clone())
    buffers = GradBuffers(
        [(name, parameter)],
        FP32,
        ParallelContext.single(),
        reference.bundle(),
        optimizer=OptimizerConfig(optimizer="muon", muon=settings),
    )
    optimizer = Optimizer(buffers, FP32)
    torch_muon = torch.optim.Muon([weight], lr=0.1, weight_decay=0.5, momentum=0.9, nesterov=True, adjust_lr_fn=adjust)
    for step in range(3):
        grad = draw(96, 40, seed=step + 1).float()
        set_grads(buffers, {name: grad})
        one = torch.ones(())
        optimizer.step(lr=0.1, weight_decay=0.5, grad_scale=one, apply_update=one.bool())
        weight.grad = grad
        torch_muon.step()
    update = weight.detach() - draw(96, 40).float() * 0.95**3
    error = (parameter.detach() - weight.detach()).norm() / update.norm()
    assert error < 0.03, f"{error:.4f}"


def test_adaptive_muon_divides_by_the_root_of_a_second_moment() -> None:
    settings = replace(config(muon_fp32_matmul_prec="high", muon_momentum=0.8), optimizer="adaptive_muon")
    context = ParallelContext.single(dtype=torch.float64)
    parameters = make_parameters(context)
    buffers = GradBuffers(parameters.items(), FP64, context, reference.bundle(), optimizer=settings)
    optimizer, momentum, moment2 = Optimizer(buffers, FP64), {}, {}
    expected = {name: parameters[name].detach().clone() for name in (QKV, FC1)}
    one = torch.ones((), dtype=torch.float64)
    for step in range(2):
        grads = {name: total_gradient(name, step, ParallelConfig()) for name in KINDS}
        set_grads(buffers, grads)
        optimizer.step(lr=0.1, weight_decay=0.5, grad_scale=one, apply_update=one.bool())
        for name, weight in expected.items():
            momentum[name] = 0.8 * momentum.get(name, 0.0) + 0.2 * grads[name]
            orthogonal = by_definition(name, momentum[name], scaled=False)
            moment2[name] = 0.95 * moment2.get(name, 0.0) + 0.05 * orthogonal.square()
            update = by_definition(name, momentum[name]) / (moment2[name].sqrt() + 1e-8)
            expected[name] = weight * (1 - 0.1 * 0.5) - 0.1 * update
    for name, weight in expected.items():
        torch.testing.assert_close(parameters[name].detach(), weight, rtol=1e-6, atol=1e-9)
    kinds = {each.kind for each in optimizer.named_state() if each.name == FC1}
    assert kinds == {"momentum", "moment2"}


def test_the_input_projection_of_mamba_is_left_to_the_fallback() -> None:
    """Muon excludes Mamba's input projection, as Megatron-LM does, because its rows are gates, states and time steps.

    The input projection of a gated delta net is updated by Muon.
    """
    size = {"hidden_size": 64, "conv_width": 4, "key_head_dim": 16, "value_head_dim": 16}
    for mixer, expected in ((MambaConfig, "adam"), (GatedDeltaNetConfig, "muon")):
        layer = mixer(**size, num_key_heads=2, num_value_heads=4, norm=NormConfig())
        rules = {spec.name: rule_of(spec.name, spec.meta, config()) for spec in layer.parameters(ParallelConfig())}
        assert rules["in_proj.weight"] == expected and rules["out_proj.weight"] == "muon", rules
        assert rules["conv1d.weight"] == "adam"


@pytest.mark.parametrize("mode", ["duplicated", "distributed"])
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(world_size=4, tp=2),
        ParallelConfig(world_size=4, tp=2, etp=2),
        ParallelConfig(world_size=8, pp=2, tp=2, ep=2),
    ],
    ids=["dp2-tp2", "dp2-tp2-etp2", "dp2-pp2-tp2-ep2"],
)
def test_sharded_matrices_give_the_weights_of_one_rank(parallel: ParallelConfig, mode: str) -> None:
    zero = DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=100)
    settings = replace(config(muon_tp_mode=mode, muon_split_qkv=mode == "duplicated"), clip_grad=1.0)
    found = joined(on_threads(parallel, lambda context: run(context, zero, optimizer=settings, num_steps=2)))
    alone = run_alone(parallel, optimizer=settings, num_steps=2)
    FP64_LAYOUT.check_all(found, joined([alone]), "weights")


def test_sharded_matrices_have_their_part_of_the_second_moment() -> None:
    parallel = ParallelConfig(world_size=4, tp=2, etp=2)
    zero = DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=100)
    settings = replace(config(), optimizer="adaptive_muon")
    found = joined(on_threads(parallel, lambda context: run(context, zero, optimizer=settings, num_steps=2)))
    alone = run_alone(parallel, optimizer=settings, num_steps=2)
    FP64_LAYOUT.check_all(found, joined([alone]), "weights")


def plan(layout: str, **muon: object) -> RunPlan:
    plan = plan_of(cell_of(f"balance=none {layout}"))
    settings = MuonConfig(muon_nesterov=True, **muon)
    return replace(plan, optimizer=replace(plan.optimizer, optimizer="muon", muon=settings))


def test_a_model_with_every_axis_equals_one_rank() -> None:
    layout = "tp=2 sp=on dp=2 ep=2 zero=on overlap=params dispatcher=alltoall shared=on attention=mla"
    comparison = compare_plan(plan(layout))
    assert comparison.equal, comparison.text()


def test_the_update_overlaps_with_the_next_forward() -> None:
    base = plan("dp=2 zero=on overlap=params")
    comparison = compare_plan(replace(base, optimizer=replace(base.optimizer, overlap_optimizer_step=True)))
    assert comparison.equal, comparison.text()


def test_a_checkpoint_resumes_on_another_layout(tmp_path: Path) -> None:
    train_and_save(plan("dp=2 zero=on"), tmp_path / "a")
    resume(plan("tp=2 sp=on ep=2 dispatcher=alltoall"), tmp_path / "a", tmp_path / "b")
    saved = stored_tensors(tmp_path / "a" / "iter_0000001")
    assert {key.partition(".")[0] for key in saved} == {"model", "optimizer", "momentum", "exp_avg", "exp_avg_sq"}
    EXACT.check_all(stored_tensors(tmp_path / "b" / "iter_0000001"), saved, "loaded and saved again")
    straight = stored_tensors(tmp_path / "a" / "iter_0000002")
    FP64_LAYOUT.check_all(stored_tensors(tmp_path / "b" / "iter_0000002"), straight, "one step further")


def test_a_run_of_adam_continues_with_muon_and_new_momentum(tmp_path: Path) -> None:
    """Parameters that AdamW still updates keep their state; Muon's momentum starts at zero."""
    before = plan("dp=2 zero=on")
    train_and_save(replace(before, optimizer=replace(before.optimizer, optimizer="adam")), tmp_path / "a")
    notes: list[str] = []

    def resumed(context: ParallelContext) -> dict[str, Tensor]:
        trainer = make_trainer(before, context)
        found = find(CheckpointConfig(load=str(tmp_path / "a"), ckpt_step=1), context, say=notes.append)
        load(found, saved_tensors(trainer, optimizer=True), context, say=notes.append)
        trainer.after_restore(with_optimizer=True)
        run_steps(before, trainer, TrainState(iteration=1, consumed_samples=8), 1)
        state = trainer.optimizer.named_state()
        return {f"{each.kind}.{each.name}.{each.start}": each.data.clone() for each in state}

    saved = stored_tensors(tmp_path / "a" / "iter_0000001")
    for found in on_threads(before.parallel, resumed):
        assert any(name.startswith("momentum.") for name in found)
        assert all(value.isfinite().all() for value in found.values())
    assert notes == [
        "the checkpoint contains optimizer state of another update rule for some parameters; "
        "their state is initialised anew"
    ]
    assert any(name.startswith("exp_avg.decoder") for name in saved)
