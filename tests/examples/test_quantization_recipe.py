"""A quantisation recipe registered by an imported file."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_moe.config.exit_codes import EnvironmentProblem, ExitCode
from megatron_moe.config.imports import import_file
from megatron_moe.config.precision import LowPrecisionConfig, low_precision_config
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels import autograd
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.precision.linear_quantizer import LinearQuantizer
from pretrain_moe import main
from tests.end_to_end.tiny_run import arguments, losses, succeed
from tests.helpers.command_lines import calls_of, plan_of
from tests.helpers.example_proofs import check_layout, check_memory, check_replay, covering
from tests.helpers.programs import run_ranks
from tests.helpers.tolerances import EXACT, FP64_REF
from tests.parity import cells
from tests.parity.dimensions import cell_of
from tests.train.test_low_precision import POLICIES, trained
from tests.train.test_low_precision import plan_of as tiny_plan

FILE = str(Path(__file__).parent / "quantization_recipe.py")
USE = f"--import {FILE} --fp8-format e4m3 --fp8-recipe int8_blocks --emulate-low-precision"


def recipe(**options) -> LowPrecisionConfig:
    import_file(FILE)
    return low_precision_config("int8_blocks", blocks=4, **options)


def rounded(x, height, width):
    """Quantises and dequantises a matrix, one block at a time."""
    out = torch.empty_like(x)
    for i in range(0, x.shape[0], height):
        for j in range(0, x.shape[1], width):
            part = x[i : i + height, j : j + width]
            scale = torch.tensor(127.0) / part.abs().max().float()
            integers = (part.float() * scale).round()
            assert integers.abs().max() <= 127
            out[i : i + height, j : j + width] = integers.double() * (1 / scale).double()
    return out


def test_linear_layers_multiply_dequantised_integers():
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*shape, generator=generator).double() for shape in ((6, 10), (7, 10), (6, 7)))
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    kernels, config = reference.bundle(), recipe()
    out = autograd.linear(kernels, *leaves, quantizer=LinearQuantizer(config, kernels))
    out.backward(grad)
    weight_q = rounded(weight, 4, 4)
    FP64_REF.check(out.detach(), rounded(x, 1, 4) @ weight_q.T, "output")
    FP64_REF.check(leaves[0].grad, rounded(grad, 1, 4) @ weight_q, "input gradient")
    FP64_REF.check(leaves[1].grad, rounded(grad, 4, 1).T @ rounded(x, 4, 1), "weight gradient")


@pytest.mark.parametrize(
    "cell", [*covering("dispatcher=alltoall"), "tp=2 sp=on shared=on", "cp=2 pp=2 accumulation=2 recompute=small"]
)
def test_layouts_equal_one_rank(cell):
    plan = cells.plan_of(cell_of(cell))
    check_layout(replace(plan, precision=replace(plan.precision, low_precision=recipe(weight_grad=False))))


def test_replayed_graphs_equal_eager_steps():
    plan = cells.plan_of(cell_of("balance=none"))
    plan = replace(plan, precision=replace(plan.precision, low_precision=recipe()))
    check_replay(plan, ("attn", "moe_router"))


@pytest.mark.parametrize("policy", ["full recompute", "offload"])
def test_recomputed_and_offloaded_copies_give_the_same_bits(policy):
    EXACT.check_all(trained(tiny_plan(recipe(), memory=POLICIES[policy])), trained(tiny_plan(recipe())), policy)


def test_emulated_memory_agrees_with_the_cost_model():
    sizes = "--bf16 --seq-length 1024 --max-position-embeddings 1024 --hidden-size 1024 --ffn-hidden-size 4096"
    check_memory(plan_of(f"{USE} {sizes} --moe-ffn-hidden-size 1024 --transformer-impl local --micro-batch-size 1"))


def test_the_recipe_requires_emulation():
    config = recipe()
    with pytest.raises(EnvironmentProblem, match="No GPU has tensor cores for the recipe int8_blocks"):
        select_kernels(KernelConfig(), torch.device("cpu"), torch.bfloat16, config)
    words = ["--recipe", "m8", "--dry-run", *USE.removesuffix(" --emulate-low-precision").split()]
    text, _ = calls_of(words)
    assert "no GPU has tensor cores for the recipe int8_blocks" in text


@pytest.mark.slow
def test_a_run_resumes_bitwise_and_in_another_layout(data, tmp_path):
    """Nightly, because runs of `test_components.py` resume with imported files, and those of tests/train in FP8."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(arguments(data, whole, *USE.split(), "--train-iters", "6"), {}) == ExitCode.OK
    command = arguments(data, parts, *USE.split(), "--train-iters", "6", "--exit-interval", "3", "--save-interval", "3")
    assert main(command, {}) == ExitCode.OK
    assert main(["--config", str(parts / "run.yaml"), "--exit-interval", "6"], {}) == ExitCode.OK
    assert losses(parts) == losses(whole)
    assert losses(whole)[6] < losses(whole)[1]
    ranks = ["--config", parts / "run.yaml", "--run-dir", tmp_path / "ranks", "--load", parts / "checkpoints"]
    ranks += ["--ckpt-step", "3", "--exit-interval", "6", "--pipeline-model-parallel-size", "2"]
    ranks += ["--pipeline-model-parallel-layout", "auto"]
    succeed(run_ranks(2, ranks, cwd=tmp_path))
    assert losses(tmp_path / "ranks") == pytest.approx({i: losses(whole)[i] for i in (4, 5, 6)}, rel=1e-3)
