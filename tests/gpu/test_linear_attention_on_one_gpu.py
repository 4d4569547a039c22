"""Outputs and gradients of linear attention, its convolution and its gated norm on one GPU match fp64.

On Hopper, Triton 3.4 to 3.7.0 miscompiles matmuls whose operand is the transposed result of another matmul, for tiles
of 64. Therefore every gradient is compared with the reference, in addition to tests of whole models.
"""

import pytest

from megatron_moe.kernels.backends.triton.gated_norm import gated_rms_norm
from megatron_moe.kernels.backends.triton.linear_attention.op import linear_attention
from megatron_moe.kernels.backends.triton.short_conv import short_conv
from megatron_moe.kernels.reference.linear_attention import gated_rms_norm as reference_norm
from megatron_moe.kernels.reference.linear_attention import linear_attention as reference
from megatron_moe.kernels.reference.linear_attention import short_conv as reference_conv
from tests.helpers.tolerances import BF16_KERNEL, FP32_REF, LINEAR_ATTENTION_BF16
from tests.kernels.test_linear_attention import draw, filters, inputs, results, segments_of

pytestmark = pytest.mark.gpu1

SHAPES = [
    (256, 2, 2, 4, 128, 128),
    (1000, 1, 1, 2, 128, 64),
    (64, 1, 1, 1, 64, 64),
    (65, 3, 1, 1, 64, 128),
    (777, 1, 2, 2, 96, 80),
    (130, 2, 4, 4, 16, 16),
    (513, 1, 1, 8, 32, 128),
]


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "plain"])
@pytest.mark.parametrize(
    "strength", [None, 1.0, 100.0, 0.05], ids=lambda x: "per head" if x is None else f"channels {x}"
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_match_fp64(shape, strength, delta, documents):
    """`strength`: factor of log decays per channel; None for one decay per head."""
    values = inputs(*shape, delta=delta, channels=strength is not None)
    values[3] = values[3] * (strength or 1.0)
    values = [x.bfloat16() for x in values[:3]] + [None if x is None else x.float() for x in values[3:]]
    segments = segments_of([5, 1, 1, 58, 64, 1, 3, 7], shape[1], shape[0]) if documents else None
    eps = 1e-6 if delta else None
    expected = results(reference, [None if x is None else x.double() for x in values], segments, shape[4] ** -0.5, eps)
    on_gpu = [None if x is None else x.cuda() for x in values]
    segments = None if segments is None else segments.cuda()
    for _ in range(3):  # repeated, because race conditions do not occur in every run
        actual = results(linear_attention, on_gpu, segments, shape[4] ** -0.5, eps)
        LINEAR_ATTENTION_BF16.check_all({name: x.double().cpu() for name, x in actual.items()}, expected)


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("shape", [(1000, 2, 700, 4), (129, 3, 256, 3), (127, 1, 33, 2), (40, 1, 8, 1)], ids=str)
def test_short_convolution_matches_fp64(shape, documents):
    """Some inputs have more tokens and channels than one program of the backward processes."""
    values = filters(*shape, bias=True)
    segments = segments_of([5, 1, 1, 58, 64, 1, 3, 7], shape[1], shape[0]) if documents else None
    expected = results(reference_conv, values, segments)
    on_gpu = [x.float().cuda() for x in values]
    actual = results(short_conv, on_gpu, None if segments is None else segments.cuda())
    FP32_REF.check_all({name: x.double().cpu() for name, x in actual.items()}, expected)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("per_group", [True, False])
@pytest.mark.parametrize("shape", [(1000, 2, 32, 128), (257, 1, 8, 512), (33, 1, 3, 80)], ids=str)
def test_gated_norm_matches_fp64(shape, per_group, norm_first, activation):
    *outer, groups, width = shape
    x, packed = draw(*shape).bfloat16(), draw(*outer, groups * width + 8, seed=1).bfloat16()
    weight = draw(*(shape[-2:] if per_group else shape[-1:]), seed=2).bfloat16()

    def run(op, values):  # the gate is a part of a wider tensor
        def function(x, packed, weight):
            return op(x, packed[..., 8:].unflatten(-1, (groups, width)), weight, 1e-5, norm_first, activation)

        return results(function, values)

    expected = run(reference_norm, [x.double(), packed.double(), weight.double()])
    actual = run(gated_rms_norm, [x.cuda(), packed.cuda(), weight.cuda()])
    BF16_KERNEL.check_all({name: value.double().cpu() for name, value in actual.items()}, expected)
