"""Muon: Newton-Schulz iterations, scales, split q, k and v, tensor-parallel modes, layouts and resume."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_moe.checkpoint.load import find_checkpoint, load_checkpoint
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
from megatron_moe.optim import muon
from megatron_moe.optim.distributed_optimizer import Optimizer
from megatron_moe.optim.grad_buffers import GradBuffers
from megatron_moe.optim.muon import COEFFICIENTS, newton_schulz, newton_schulz_coefficients, update_scale
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.parameter import local_shard, new_parameter
from megatron_moe.train.checkpointing import saved_tensors
from megatron_moe.train.train_state import TrainState
from tests.helpers.checkpoint_files import stored_tensors
from tests.helpers.optim_parameters import FP32, FP64, set_grads
from tests.helpers.optim_ranks import KINDS, Run, joined, make_parameters, run, run_alone, total_gradient
from tests.helpers.pipelines import make_trainer, run_steps
from tests.helpers.ranks import on_threads
from tests.helpers.tiny_models import attention_config
from tests.helpers.tolerances import EXACT, FP64_LAYOUT
from tests.parity.cells import compare_plan, plan_of
from tests.parity.dimensions import cell_of
from tests.train.test_resharding import resume, train_and_save

KERNELS = reference.bundle()
NAMES = ("dist_muon", "muon")
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
    coefficients = newton_schulz_coefficients(name, 10 if name == "deepseekv4" else 5)
    x = draw(1, *shape).float()
    found = torch.linalg.svdvals(newton_schulz(x, coefficients, KERNELS))
    assert lowest - 6e-3 <= found.min() and found.max() <= highest + 6e-3, f"{found.min():.4f} to {found.max():.4f}"
    in_bf16 = newton_schulz(x.bfloat16(), coefficients, KERNELS).float()
    cosine = torch.nn.functional.cosine_similarity(in_bf16.flatten(), polar(x).flatten(), dim=0)
    assert cosine > 0.985


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_every_set_of_coefficients_brings_singular_values_close_to_one(name: str) -> None:
    steps = len(COEFFICIENTS[name]) if name != "simple" else 5
    found = torch.linalg.svdvals(newton_schulz(draw(2, 32, 200), newton_schulz_coefficients(name, steps), KERNELS))
    assert 0.6 < found.min() and found.max() < 1.31


def test_further_iterations_repeat_the_table_or_its_last_entry() -> None:
    quintic, express = COEFFICIENTS["quintic"], COEFFICIENTS["polar_express"]
    assert newton_schulz_coefficients("quintic", 7) == [*quintic, *quintic[:2]]
    assert newton_schulz_coefficients("polar_express", 10) == [*express, express[-1], express[-1]]


def test_coefficients_are_those_of_megatron() -> None:
    """Values of NVIDIA's emerging-optimizers library."""
    simple = "3.4445 -4.7750 2.0315"
    expected = {
        "simple": simple,
        "quintic": "4.0848 -6.8946 2.9270 3.9505 -6.3029 2.6377 3.7418 -5.5913 2.3037 2.8769 -3.1427 1.2046 "
        "2.8366 -3.0525 1.2012",
        "polar_express": "8.2051 -22.9019 16.4607 4.0664 -2.8612 0.5184 3.9096 -2.8234 0.5250 3.2856 -2.4153 0.4853 "
        "2.2779 -1.6198 0.3985 1.8726 -1.2307 0.3585 1.8564 -1.2132 0.3568 1.8750 -1.2500 0.3750",
        "cans": "8.4703 -25.1081 18.6293 4.1828 -3.1087 0.5806 3.9619 -2.9541 0.5630 3.2866 -2.4647 0.5074 "
        "2.2737 -1.6447 0.4162",
        "aol": "4.0098 -7.0585 2.4635 3.4585 -5.5479 2.5959 2.7573 -3.2939 1.4254 2.7215 -3.0494 1.3169",
        "cubic5": "3.3656576 -3.3420992 0 2.5744352 -1.4957376 0 2.5368962 -1.4312570 0 2.4418906 -1.2764040 0 "
        "2.2230472 -0.9630650 0",
        "deepseekv4": f"{simple} " * 8 + "2 -1.5 0.5 " * 2,
    }
    found = {name: [value for triple in table for value in triple] for name, table in COEFFICIENTS.items()}
    assert found == {name: [float(word) for word in words.split()] for name, words in expected.items()}


@pytest.mark.parametrize(
    ("mode", "scale"), [("spectral", 20.0), ("unit_rms_norm", 2.0), ("shape_scaling", 2.0), ("spectral", 4.0)]
)
def test_scales_depend_on_the_shape_of_the_whole_matrix(mode: str, scale: float) -> None:
    extra = 0.2 if scale == 4.0 else 1.0
    config = MuonConfig(muon_scale_mode=mode, muon_extra_scale_factor=extra)
    assert update_scale(config, 400, 100) == pytest.approx(scale)
    assert update_scale(MuonConfig(muon_scale_mode="shape_scaling"), 100, 400) == 1


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


def by_definition(
    name: str, update: Tensor, *, scaled: bool = True, split: bool = True, splits: tuple[int, ...] = (2, 1, 1)
) -> Tensor:
    """Applies Newton-Schulz to each matrix separately, and the spectral scale if `scaled`. If `split`, the parts of a
    QKV projection are matrices; each query group has `splits` rows of them."""
    if update.dim() == 3:
        return torch.stack([by_definition("", each, scaled=scaled) for each in update])
    if name == QKV and split:
        rows, out = torch.arange(len(update)).view(-1, sum(splits)), torch.empty_like(update)
        for part in rows.split(splits, dim=1):
            out[part.flatten()] = by_definition("", update[part.flatten()], scaled=scaled)
        return out
    tall = len(update) > update.shape[1]
    x = newton_schulz((update.T if tall else update)[None], newton_schulz_coefficients("quintic", 5), KERNELS)[0]
    return (max(update.shape) ** 0.5 if scaled else 1.0) * (x.T if tall else x)


def one_step(
    settings: OptimizerConfig, name: str, shape: tuple[int, ...], meta: ParamMeta, *, num: int = 1
) -> tuple[list[Tensor], list[Tensor]]:
    """Updates `num` zero parameters called `name` with learning rate 1. Returns the gradients and the new values."""
    context = ParallelContext.single(dtype=torch.float64)
    names = [name.replace("layers.0", f"layers.{number}") for number in range(num)]
    parameters = {each: new_parameter(shape, meta, context) for each in names}
    for parameter in parameters.values():
        parameter.data.zero_()
    buffers = GradBuffers(parameters.items(), FP64, context, KERNELS, optimizer=settings)
    grads = {each: draw(*shape, seed=number) for number, each in enumerate(names)}
    set_grads(buffers, grads)
    one = torch.ones((), dtype=torch.float64)
    Optimizer(buffers, FP64).step(lr=1.0, weight_decay=0.0, grad_scale=one, apply_update=one.bool())
    return list(grads.values()), [parameter.detach() for parameter in parameters.values()]


@pytest.mark.parametrize(
    ("split", "splits"),
    [(False, (2, 1, 1)), (True, (2, 1, 1)), (False, (2, 2, 1, 1)), (True, (2, 2, 1, 1))],
    ids=["whole", "q, k, v", "whole with an output gate", "q, gate, k, v"],
)
def test_an_unsplit_projection_is_one_matrix(split: bool, splits: tuple[int, ...]) -> None:
    """`--muon-no-split-qkv` orthogonalises all rows as one matrix. An output gate is a fourth part."""
    rows = 4 * sum(splits)
    meta = ParamMeta(role="matrix", tp_dim=0, splits=splits)
    (grad,), (found,) = one_step(config(muon_split_qkv=split), QKV, (rows, 10), meta)
    torch.testing.assert_close(found, -by_definition(QKV, grad, split=split, splits=splits), rtol=1e-10, atol=1e-12)
    other = by_definition(QKV, grad, split=not split, splits=splits)
    assert (found + other).abs().max() > 0.1, "the test does not distinguish split from unsplit projections"


def test_a_projection_with_an_output_gate_declares_four_parts() -> None:
    layer = attention_config(num_heads=4, num_query_groups=2, output_gate=True)
    (projection,) = (spec for spec in layer.parameters(ParallelConfig()) if spec.name == "linear_qkv.weight")
    per_group = layer.head_dim * 2
    assert projection.meta.splits == (per_group, per_group, layer.head_dim, layer.head_dim)


def test_an_update_has_unit_root_mean_square_norm() -> None:
    """unit_rms_norm multiplies by sqrt(outputs / inputs); with split parts, by that of each part."""
    settings = config(muon_scale_mode="unit_rms_norm", muon_extra_scale_factor=0.5)
    (grad,), (found,) = one_step(settings, "decoder.layers.0.mlp.latent.weight", (40, 10), ParamMeta(role="matrix"))
    expected = -0.5 * 2.0 * by_definition("", grad, scaled=False)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    meta = ParamMeta(role="matrix", tp_dim=0, splits=(2, 1, 1))
    (grad,), (found,) = one_step(settings, QKV, (80, 10), meta)
    scales = torch.tensor([2.0, 2.0, 2**0.5, 2**0.5], dtype=torch.float64).repeat(20)[:, None]
    expected = -0.5 * scales * by_definition(QKV, grad, scaled=False)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("most", "sizes"), [(1 << 26, [6]), (3 * 48, [3, 3]), (1, [1] * 6)])
def test_large_stacks_are_orthogonalised_in_chunks(
    most: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stacks of three experts of 48 elements; the number of elements per call is limited, the result is not."""
    seen: list[int] = []

    def counted(x: Tensor, *args: object, **options: object) -> Tensor:
        seen.append(len(x))
        return newton_schulz(x, *args, **options)

    monkeypatch.setattr(muon, "MOST_BATCHED_ELEMENTS", most)
    monkeypatch.setattr(muon, "newton_schulz", counted)
    meta = ParamMeta(role="matrix", grid="expert", num_experts=3)
    grads, found = one_step(config(), FC1.replace("layers.1", "layers.0"), (3, 8, 6), meta, num=2)
    assert seen == sizes
    for grad, weights in zip(grads, found, strict=True):
        torch.testing.assert_close(weights, -by_definition("", grad), rtol=1e-10, atol=1e-12)


def test_the_old_name_of_muon_has_its_results() -> None:
    """`--optimizer dist_muon`."""
    meta = ParamMeta(role="matrix", tp_dim=0, splits=(2, 1, 1))
    (_, old), (_, new) = (one_step(replace(config(), optimizer=name), QKV, (16, 6), meta) for name in NAMES)
    EXACT.check(old[0], new[0])
    assert {rule_of(QKV, meta, replace(config(), optimizer=name)) for name in NAMES} == set(NAMES)


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


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_blockwise_orthogonalises_each_shard(split: bool) -> None:
    """With blockwise, every shard is a matrix with the scale of its own shape, so the weights depend on the layout."""
    parallel = ParallelConfig(world_size=4, tp=2, etp=2)
    zero = DataParallelConfig(use_distributed_optimizer=True, ddp_bucket_size=100)
    settings = config(muon_tp_mode="blockwise", muon_split_qkv=split)
    names = [name for name, (_, meta) in KINDS.items() if rule_of(name, meta, settings) == "muon"]
    assert len(names) == 12

    def rank_main(context: ParallelContext) -> tuple[Run, dict[str, Tensor]]:
        expected = {}
        for name, parameter in make_parameters(context).items():
            grad = local_shard(total_gradient(name, 0, parallel), parameter.boxes, parameter.meta)
            if name in names:
                part = QKV if name.endswith("linear_qkv.weight") else name
                expected[name] = (1 - 3e-2 * 0.1) * parameter.detach() - 3e-2 * by_definition(part, grad, split=split)
        return run(context, zero, optimizer=settings, num_steps=1), expected

    results = on_threads(parallel, rank_main, dtype=torch.float64)
    for made, expected in results:
        for name in names:
            FP64_LAYOUT.check(made.weights[name].part, expected[name], name)
    found, alone = joined([made for made, _ in results]), joined([run_alone(parallel, optimizer=settings, num_steps=1)])
    for name in names:
        differs = KINDS[name][1].tp_dim is not None
        assert ((found[name] - alone[name]).abs().max() > 1e-3) == differs, name


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
    assert comparison.all_equal, comparison.text()


def test_the_update_overlaps_with_the_next_forward() -> None:
    base = plan("dp=2 zero=on overlap=params")
    comparison = compare_plan(replace(base, optimizer=replace(base.optimizer, overlap_optimizer_step=True)))
    assert comparison.all_equal, comparison.text()


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
        found = find_checkpoint(CheckpointConfig(load=str(tmp_path / "a"), ckpt_step=1), context, say=notes.append)
        load_checkpoint(found, saved_tensors(trainer, optimizer=True), context, say=notes.append)
        trainer.after_restore(with_optimizer=True)
        run_steps(before, trainer, TrainState(iteration=1, consumed_samples=8), 1)
        assert trainer.optimizer.step_count == 2, "AdamW's loaded moments need the step count of the checkpoint"
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
