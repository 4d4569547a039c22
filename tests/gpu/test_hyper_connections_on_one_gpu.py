"""Hyper-connections on one GPU: bf16 against fp64 on the CPU."""

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import NormConfig
from megatron_moe.config.hyper_connections import HyperConnectionsConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.layers.norm import Norm
from megatron_moe.model.hyper_connections import HyperConnection, StreamsHead
from megatron_moe.model.init import init_parameters
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.modules import standalone_resources
from tests.helpers.tiny_models import UNIT_GAIN, randn
from tests.helpers.tolerances import BF16_BLOCKS

pytestmark = pytest.mark.gpu1

BATCH = 2
SHAPES = [(77, 4, 512), (1031, 4, 512), (9, 1, 200), (50, 3, 504), (50, 4, 130)]
"""Numbers of sequence positions, streams and channels."""


def results(device: str, dtype: torch.dtype, seq: int, num_streams: int, hidden: int) -> dict[str, Tensor]:
    """Streams after two connections and the head, and all gradients; bf16 represents weights and inputs."""
    config = HyperConnectionsConfig(num_streams=num_streams)
    context = ParallelContext.single(dtype=dtype, device=device)
    kernels = reference.bundle() if device == "cpu" else select_kernels(KernelConfig(), context.device, dtype)
    resources = standalone_resources(context, kernels)
    first, second = (HyperConnection(config, hidden, resources) for _ in range(2))
    head, norm = StreamsHead(config, hidden, resources), Norm(NormConfig(), hidden, context, kernels)
    modules = torch.nn.ModuleList([first, second, head, norm])
    init_parameters(modules, 5, UNIT_GAIN)
    with torch.no_grad():
        for parameter in modules.parameters():
            parameter.copy_(parameter.bfloat16())
    stream = randn(seq, BATCH, num_streams * hidden).bfloat16().to(device, dtype).requires_grad_()
    read = first.sublayer_input(stream, norm)
    read = first.add_output_and_read(read.stream, read.stream_weights, read.normed_SBH.tanh(), norm)
    out = head(second.add_output(read.stream, read.stream_weights, read.normed_SBH.sin()))
    probe = randn(*out.shape, seed=3).bfloat16().to(device, dtype)
    (out * probe + out.square()).sum().backward()  # the square, so that gradients of biases are no small differences
    found = {"output": out, "stream": stream.grad, **{name: p.grad for name, p in modules.named_parameters()}}
    return {name: value.detach().double().cpu() for name, value in found.items() if value is not None}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_and_gradients_match_fp64(shape: tuple[int, int, int]) -> None:
    BF16_BLOCKS.check_all(results("cuda", torch.bfloat16, *shape), results("cpu", torch.float64, *shape))
