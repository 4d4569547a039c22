"""Experts equal their formula row by row, grouped GEMMs equal sequential ones; experts may have no rows."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_moe.config.mlp import ActivationConfig
from megatron_moe.config.moe import ExpertsConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.moe.experts import Experts
from megatron_moe.moe.token_dispatcher.base import DispatchedTokens
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.modules import standalone_resources
from tests.helpers.tolerances import EXACT, FP32_REF, FP64_REF
from tests.moe.oracle import loop_mlp
from tests.moe.routings import draw, fill

HIDDEN, FFN, EXPERTS, ROWS = 3, 5, 4, 7
ENDS = ([2, 2, 5, 6], [0, 0, 0, 7], [7, 7, 7, 7], [1, 2, 3, 4], [0, 0, 0, 0])
"""End offsets of the experts: one expert without rows and one unused row; all rows on the last expert; all rows on the
first expert; one row per expert; no rows."""
STANDARD = {"bias": True, "probs_on_output": True}
"""Fields of experts that apply probabilities to their output, after fc2 and its bias."""
KINDS = {
    "swiglu": ActivationConfig(kind="silu", gated=True),
    "geglu": ActivationConfig(kind="gelu", gated=True),
    "quick_geglu, clamped, with offset": ActivationConfig(kind="quick_gelu", gated=True, clamp=0.8, linear_offset=1.0),
    "squared_relu": ActivationConfig(kind="squared_relu"),
    "gelu": ActivationConfig(kind="gelu"),
}


def make(activation: ActivationConfig = KINDS["swiglu"], *, dtype=torch.float64, kernels=None, **fields) -> Experts:
    config = ExpertsConfig(
        num_experts=EXPERTS, hidden_size=HIDDEN, ffn_hidden_size=FFN, activation=activation, **fields
    )
    resources = standalone_resources(ParallelContext.single(dtype=dtype), kernels or reference.bundle())
    experts = Experts(config, resources)
    fill(experts)
    return experts


def rows_of(ends: list[int], seed: int = 0) -> DispatchedTokens:
    """Dispatched rows of experts; unused rows, after the last offset, have large values and probability 0."""
    data, probs = draw(ROWS, HIDDEN, seed=seed), draw(ROWS, seed=seed + 1).abs()
    data[ends[-1] :], probs[ends[-1] :] = 1e3, 0
    return DispatchedTokens(
        data=data.requires_grad_(),
        probs_R=probs.requires_grad_(),
        offsets_e=torch.tensor(ends, dtype=torch.int32),
        bound=ROWS,
    )


def expected_row(experts: Experts, row: Tensor, expert: int, prob: Tensor, *, on_input: bool = False) -> Tensor:
    """Output of one row by definition: fc2(p * act(fc1(x))), or fc2(act(fc1(p * x))) if `on_input`."""
    stacks = (experts.linear_fc1, experts.linear_fc2)
    matrices = [stack.weight[expert] for stack in stacks]
    biases = [None if stack.bias is None else stack.bias[expert] for stack in stacks]
    if on_input:
        return loop_mlp(prob * row, matrices, biases, experts.config.activation)
    return prob * loop_mlp(row, matrices, biases, experts.config.activation)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_output_equals_the_formula_row_by_row(kind, grouped, bias, ends) -> None:
    experts, rows = make(KINDS[kind], grouped=grouped, bias=bias), rows_of(ends)
    out, start = experts(rows).data, 0
    for expert, end in enumerate(ends):
        for r in range(start, end):
            expected = expected_row(experts, rows.data[r], expert, rows.probs_R[r])
            FP64_REF.check(out[r], expected, f"row {r} at expert {expert}")
        start = end


@pytest.mark.parametrize("bias", [False, True])
def test_probabilities_on_the_input_multiply_only_the_row(bias: bool) -> None:
    experts, rows = make(bias=bias, probs_on_input=True), rows_of([2, 2, 5, 6])
    out = experts(rows).data
    for r, expert in enumerate([0, 0, 2, 2, 2, 3]):
        expected = expected_row(experts, rows.data[r], expert, rows.probs_R[r], on_input=True)
        FP64_REF.check(out[r], expected, f"row {r}")


def gradients(experts: Experts, rows: DispatchedTokens) -> dict[str, Tensor]:
    """Output and gradients of used rows, their probabilities and all parameters."""
    held = slice(0, int(rows.offsets_e[-1]))
    experts.zero_grad(set_to_none=True)
    rows = replace(rows, data=rows.data.detach().requires_grad_())
    rows = replace(rows, probs_R=rows.probs_R.detach().requires_grad_())
    out = experts(rows).data[held]
    out.backward(draw(ROWS, HIDDEN, seed=9)[held].to(out.dtype))
    grads = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"out": out.detach(), "rows": rows.data.grad[held], "probs": rows.probs_R.grad[held], **grads}


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("fields", [{}, {"bias": True}, {"probs_on_input": True}, STANDARD])
def test_sequential_gemms_equal_grouped_gemms(fields, ends) -> None:
    results = [gradients(make(grouped=grouped, **fields), rows_of(ends)) for grouped in (False, True)]
    FP64_REF.check_all(results[0], results[1], "looped against grouped")


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ends", ENDS)
def test_standard_permutation_equals_memory_efficient_permutation(ends, bias, grouped) -> None:
    forms = (make(bias=bias, grouped=grouped, probs_on_output=standard) for standard in (True, False))
    standard, efficient = (gradients(experts, rows_of(ends)) for experts in forms)
    FP64_REF.check_all(standard, efficient, f"ends {ends}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields", [{}, {"bias": True}, {"probs_on_input": True}, STANDARD])
def test_gradients_equal_finite_differences(kind, fields) -> None:
    ends = [2, 2, 5, 6]
    experts, rows = make(KINDS[kind], **fields), rows_of(ends)
    names, parameters = zip(*experts.named_parameters(), strict=True)

    def run(data: Tensor, probs: Tensor, *values: Tensor) -> Tensor:
        data = torch.cat([data, data.new_full((1, HIDDEN), 1e3)])
        probs = torch.cat([probs, probs.new_zeros(1)])
        given = replace(rows, data=data, probs_R=probs)
        return torch.func.functional_call(experts, dict(zip(names, values, strict=True)), given).data[:6]

    inputs = (rows.data[:6].detach().requires_grad_(), rows.probs_R[:6].detach().requires_grad_(), *parameters)
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("grouped", [False, True])
def test_expert_without_rows_has_zero_gradients(grouped: bool) -> None:
    experts = make(grouped=grouped, bias=True)
    for ends, empty in (([2, 2, 5, 6], [1]), ([0, 0, 0, 0], [0, 1, 2, 3])):
        for name, grad in gradients(experts, rows_of(ends)).items():
            if name.startswith("linear"):
                assert grad is not None, name
                EXACT.check(grad[empty], torch.zeros_like(grad[empty]), name)
                others = [e for e in range(EXPERTS) if e not in empty]
                assert grad[others].abs().sum(dim=tuple(range(1, grad.dim()))).gt(0).all(), f"{name} of the others"


@pytest.mark.parametrize("fields", [{}, {"bias": True}, {"probs_on_input": True}, STANDARD])
@pytest.mark.parametrize("grouped", [False, True])
def test_nan_in_unused_rows_reaches_no_gradient(grouped: bool, fields: dict) -> None:
    experts, ends = make(grouped=grouped, **fields), [2, 2, 5, 6]
    clean = gradients(experts, rows_of(ends))
    dirty_rows = rows_of(ends)
    with torch.no_grad():
        dirty_rows.data[6:] = torch.nan
    FP64_REF.check_all(gradients(experts, dirty_rows), clean, "nan past the last offset")


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_native_kernels_equal_the_reference(bias: bool, grouped: bool) -> None:
    native = select_kernels(KernelConfig(), torch.device("cpu"), torch.float32)
    for ends in ENDS:
        rows = rows_of(ends)
        narrow = replace(rows, data=rows.data.float(), probs_R=rows.probs_R.float())
        fast = gradients(make(dtype=torch.float32, kernels=native, bias=bias, grouped=grouped), narrow)
        FP32_REF.check_all(fast, gradients(make(bias=bias), rows), f"ends {ends}")


def test_parameters_are_sharded_expert_stacks() -> None:
    described = {name: (tuple(p.shape), p.meta) for name, p in make(bias=True).named_parameters()}
    shapes = {name: shape for name, (shape, _) in described.items()}
    assert shapes == {
        "linear_fc1.weight": (EXPERTS, 2 * FFN, HIDDEN),
        "linear_fc1.bias": (EXPERTS, 2 * FFN),
        "linear_fc2.weight": (EXPERTS, HIDDEN, FFN),
        "linear_fc2.bias": (EXPERTS, HIDDEN),
    }
    metas = {name: meta for name, (_, meta) in described.items()}
    assert all(meta.grid == "expert" and meta.num_experts == EXPERTS for meta in metas.values())
    assert metas["linear_fc1.weight"].splits == (FFN, FFN) == metas["linear_fc1.bias"].splits
    assert (metas["linear_fc1.weight"].fan_in, metas["linear_fc2.weight"].fan_in) == (HIDDEN, FFN)
    assert (metas["linear_fc1.weight"].init, metas["linear_fc2.weight"].init) == ("normal", "output")
    assert (metas["linear_fc1.weight"].tp_dim, metas["linear_fc2.weight"].tp_dim) == (0, 1)
    assert (metas["linear_fc1.bias"].tp_dim, metas["linear_fc2.bias"].tp_dim) == (0, None)


def test_bias_gradients_in_bf16_are_summed_in_fp32() -> None:
    experts = make(dtype=torch.bfloat16, bias=True)
    num_rows = 300  # a bf16 sum of ones never exceeds 256
    rows = DispatchedTokens(
        data=torch.zeros(num_rows, HIDDEN, dtype=torch.bfloat16),
        probs_R=torch.ones(num_rows, dtype=torch.bfloat16),
        offsets_e=torch.tensor([num_rows] * EXPERTS, dtype=torch.int32),
        bound=num_rows,
    )
    experts(rows).data.sum().backward()
    expected = torch.zeros(EXPERTS, HIDDEN)
    expected[0] = num_rows
    EXACT.check(experts.linear_fc2.bias.grad, expected)
