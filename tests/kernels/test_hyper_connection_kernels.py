"""Kernels of hyper-connections under the interpreter against the fp64 reference, and compiled for a Hopper GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.kernels.backends.triton import backend as triton_kernels
from megatron_moe.kernels.backends.triton import hyper_connections
from tests.helpers.kernel_comparison import BARS, REFERENCE, draw
from tests.helpers.tolerances import BF16_KERNEL, EXACT, Tolerance
from tests.kernels.compiled import NO_SPILLS, SHARED_MEMORY, compiled

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # numpy, of the interpreter
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

SHAPES = [(1, 5, 2, 24), (2, 3, 1, 150), (3, 37, 1, 40), (4, 9, 1, 70)]
"""Numbers of streams, sequence positions, sequences and channels."""
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])


def config(num_streams: int) -> HyperConnectionsConfig:
    return HyperConnectionsConfig(num_streams=num_streams, sinkhorn_iterations=5, norm_eps=1e-3, eps=1e-3)


def rounded(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Random numbers that bf16 represents."""
    return draw(*shape, seed=seed).to(BF16).to(dtype)


def pulled(outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs, and gradients of the inputs for fixed gradients of the outputs."""
    given = [rounded(*each.shape, seed=50 + seed, dtype=each.dtype) for seed, each in enumerate(outputs.values())]
    grads = torch.autograd.grad(tuple(outputs.values()), tuple(inputs.values()), given)
    found = {name: each.detach() for name, each in outputs.items()}
    return found | {f"gradient of {name}": each for name, each in zip(inputs, grads, strict=True)}


def read(kernels: Any, shape: tuple[int, ...], dtype: torch.dtype, *, head: bool) -> dict[str, Tensor]:
    """Results and gradients of a read. Parameters are so large that the coefficients of tokens differ."""
    n, seq, batch, hidden = shape
    num_weights = n if head else n * (n + 2)
    inputs = {
        "streams": rounded(seq, batch, n * hidden, seed=0, dtype=dtype),
        "matrix": rounded(num_weights, n * hidden, seed=1, dtype=dtype) / 8,
        "scale": (1 + rounded(1 if head else 3, seed=2, dtype=BF16).abs()).to(dtype),
        "bias": rounded(num_weights, seed=3, dtype=dtype),
    }
    inputs = {name: each.requires_grad_() for name, each in inputs.items()}
    found = kernels.hyper_connection_read(*inputs.values(), config(n))
    return pulled(dict(zip(("returned streams", "sum", "pre", "post", "mix"), found, strict=False)), inputs)


def write(kernels: Any, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    n, seq, batch, hidden = shape
    wide = torch.promote_types(dtype, FP32)
    inputs = {
        "streams": rounded(seq, batch, n * hidden, seed=0, dtype=dtype),
        "out": rounded(seq, batch, hidden, seed=1, dtype=dtype),
        "post": draw(seq * batch, n, seed=2).float().to(wide),
        "mix": draw(seq * batch, n, n, seed=3).float().to(wide),
    }
    inputs = {name: each.requires_grad_() for name, each in inputs.items()}
    return pulled({"new streams": kernels.hyper_connection_write(*inputs.values())}, inputs)


def check(run: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Compares with fp64, with the tolerance of the dtype of each result. The error may be twice that of the reference
    in the same dtype."""
    actual, exact, plain = run(triton_kernels, dtype), run(REFERENCE, FP64), run(REFERENCE, dtype)
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        assert value.dtype is plain[name].dtype, name
        bar, slack = BARS[value.dtype], 2 * float((plain[name].double() - exact[name]).abs().max())
        Tolerance(bar.rtol, max(bar.atol, slack), bar.why).check(value, exact[name], name)
    return actual


@DTYPES
@pytest.mark.parametrize("head", [False, True], ids=["connection", "head"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_read_equals_the_reference(shape: tuple[int, ...], head: bool, dtype: torch.dtype) -> None:
    check(lambda kernels, dtype: read(kernels, shape, dtype, head=head), dtype)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_write_equals_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(lambda kernels, dtype: write(kernels, shape, dtype), dtype)


def test_more_than_four_streams_use_torch() -> None:
    shape = (5, 3, 1, 20)
    for run in (lambda kernels: read(kernels, shape, BF16, head=False), lambda kernels: write(kernels, shape, BF16)):
        EXACT.check_all(run(triton_kernels), run(REFERENCE))


def test_partial_sums_over_channels_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The projection is the sum over three parts of the channels, the gradient of its matrix over several tiles and
    programs. A second run gives the same bits."""
    monkeypatch.setattr(hyper_connections, "TOKENS_PER_SHARE", 40)
    sums = hyper_connections._projection
    parts: list[int] = []

    def projection(*given: Tensor) -> Tensor:
        found = sums(*given)
        parts.append(len(found))
        return found

    monkeypatch.setattr(hyper_connections, "_projection", projection)

    def run(kernels: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        return read(kernels, (2, 70, 1, 520), dtype, head=True)

    actual = check(run, FP32)
    assert parts == [3]
    EXACT.check_all(run(triton_kernels, FP32), actual)


def test_sum_equals_that_of_read() -> None:
    shapes = (9, 2, 60), (15, 60), (3,), (15,)
    stream, matrix, scale, bias = (rounded(*shape, seed=7, dtype=BF16) for shape in shapes)
    _, hidden, pre, *_ = triton_kernels.hyper_connection_read(stream, matrix, scale, bias, config(3))
    EXACT.check(triton_kernels.hyper_connection_sum(stream, pre), hidden)


def test_gradients_are_accurate_to_fp32() -> None:
    """The gradients of the two new streams cancel up to bits below the 16 bits of two bf16 numbers, so a third bf16
    part of the coefficients is needed."""
    stream, out = (rounded(5, 1, width, seed=4, dtype=BF16) for width in (32, 16))
    large = 2.0**14 * draw(5, 2, seed=2).float()
    mix = torch.stack([large, -large * (1 + 2.0**-14)], dim=-1)
    inputs = [each.requires_grad_() for each in (stream, out, draw(5, 2, seed=3).float(), mix)]
    grad = rounded(5, 1, 16, seed=5, dtype=BF16).repeat(1, 1, 2)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    actual, expected = (
        torch.autograd.grad(kernels.hyper_connection_write(*given), given, grad.to(given[0].dtype))
        for kernels, given in ((triton_kernels, inputs), (REFERENCE, exact))
    )
    BF16_KERNEL.check(actual[0], expected[0], "gradient of the streams")


class Buffer:
    """Gradient accumulator of a parameter."""

    defers_weight_grads = False

    def __init__(self, weight: Tensor) -> None:
        self.main_grad, self.filled = torch.full_like(weight, torch.nan, dtype=FP32), False

    def add(self, compute: Any) -> None:
        compute(self.main_grad, self.filled)
        self.filled = True


def test_parameter_gradients_are_added_to_gradient_buffers() -> None:
    shapes = ((5, 1, 48), (8, 48), (3,), (8,))
    inputs: Any = [rounded(*shape, seed=9, dtype=BF16).requires_grad_() for shape in shapes]
    parameters = inputs[1:]

    def loss() -> Tensor:
        results = triton_kernels.hyper_connection_read(*inputs, config(2))
        return sum((each.float().square().sum() for each in results), torch.zeros(()))

    grads = torch.autograd.grad(loss(), parameters)
    for parameter in parameters:
        parameter.grad_accumulator = Buffer(parameter)
    for _ in range(2):
        loss().backward()
    for parameter, grad in zip(parameters, grads, strict=True):
        assert parameter.grad is None
        EXACT.check(parameter.grad_accumulator.main_grad, 2 * grad.float())


LAUNCHES = """
from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.kernels.backends.triton import hyper_coefficients, hyper_connections, launch

for module in (hyper_connections, hyper_coefficients, launch):
    for name, kernel in list(vars(module).items()):
        if isinstance(kernel, triton.runtime.jit.JITFunction) and name in KERNELS:
            setattr(module, name, Compiled(kernel))
sizes = (False, 4, 8192, 4096), (True, 4, 8192, 4096), (False, 1, 1, 40), (True, 1, 1, 1)
with torch.device("meta"):
    for head, n, num_tokens, hidden in sizes:
        num_weights = n if head else n * (n + 2)
        shapes = (num_tokens, 1, n * hidden), (num_weights, n * hidden), (1 if head else 3,), (num_weights,)
        inputs = [torch.empty(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
        config = HyperConnectionsConfig(num_streams=n)
        stream, out, _, *others = hyper_connections.hyper_connection_read(*inputs, config)
        if others:
            out = hyper_connections.hyper_connection_write(stream, out, *others)
        torch.autograd.grad(out, inputs, torch.empty_like(out))
"""
KERNELS = (
    *("_project", "_forward", "_sum_forward", "_write_forward"),
    *("_write_backward", "_sum_backward", "_normalise_again", "_backward", "_sum_shares", "_read_backward"),
)


@pytest.mark.slow
def test_kernels_compile_without_spills_for_a_hopper_gpu() -> None:
    """Also with sizes of 1, for which Triton compiles other code."""
    found = compiled(f"KERNELS = {KERNELS}\n{LAUNCHES}")
    # three sums of shares: scale, bias and matrix; the head writes no streams and has no matrix to normalise
    assert len(found) == 4 * (len(KERNELS) + 2) - 2 * 3
    for code in found:
        assert NO_SPILLS in code["ptxas"]
        assert code["shared"] <= SHARED_MEMORY
