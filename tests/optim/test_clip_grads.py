"""Gradient norms, the clip factor, and the number of zero elements."""

import torch

from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.optim.clip_grads import clip_coefficient, count_zeros, gradient_norms
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.optim_parameters import FP32, make_buffers, make_gradients, make_parameters, set_grads
from tests.helpers.tolerances import EXACT, FP64_REF


def test_the_norm_and_its_parts_equal_those_of_torch() -> None:
    buffers, gradients = make_buffers(make_parameters()), make_gradients(0)
    set_grads(buffers, gradients)
    norms = gradient_norms(buffers, ParallelContext.single())
    parts: dict[str, list[torch.Tensor]] = {"all": [], "experts": [], "router": [], "dense": []}
    for name, gradient in gradients.items():
        part = "experts" if ".experts." in name else "router" if ".router." in name else "dense"
        parts[part].append(gradient.reshape(-1))
        parts["all"].append(gradient.reshape(-1))
    expected = {part: torch.linalg.vector_norm(torch.cat(pieces)) for part, pieces in parts.items()}
    FP64_REF.check_all(norms, expected, "norms")


def test_a_non_finite_element_in_any_parameter_makes_the_norm_non_finite() -> None:
    for wild in (float("nan"), float("inf"), -float("inf")):
        for name in make_gradients(0):
            buffers, gradients = make_buffers(make_parameters()), make_gradients(0)
            gradients[name].view(-1)[-1] = wild
            set_grads(buffers, gradients)
            norm = gradient_norms(buffers, ParallelContext.single())["all"]
            assert not torch.isfinite(norm), f"{wild} in {name} gave norm {norm}"


def test_the_clip_factor_is_one_up_to_the_limit_and_scales_to_it_beyond() -> None:
    for norm, clip, expected in ((0.0, 1.0, 1.0), (0.5, 1.0, 1.0), (4.0, 1.0, 1.0 / (4.0 + 1e-6)), (4.0, 0.0, 1.0)):
        factor = clip_coefficient(torch.tensor(norm, dtype=torch.float64), clip)
        assert factor.shape == (), f"shape {factor.shape}"
        FP64_REF.check(factor, expected, f"factor for norm {norm} at limit {clip}")


def test_zeros_of_the_gradient_are_counted_and_padding_is_not() -> None:
    for bucket_size in (1, None):
        buffers = make_buffers(
            make_parameters(torch.float32), FP32, data_parallel=DataParallelConfig(ddp_bucket_size=bucket_size)
        )
        gradients = make_gradients(0)
        gradients["output_layer.weight"][:2] = 0.0
        gradients["decoder.layers.0.mlp.router.weight"][0, 0] = 0.0
        set_grads(buffers, gradients)
        EXACT.check(count_zeros(buffers), torch.tensor(13), f"zeros with buckets of {bucket_size}")


def test_fp32_gradients_give_an_fp32_norm() -> None:
    buffers = make_buffers(make_parameters(torch.float32), FP32)
    set_grads(buffers, make_gradients(0))
    assert {norm.dtype for norm in gradient_norms(buffers, ParallelContext.single()).values()} == {torch.float32}
