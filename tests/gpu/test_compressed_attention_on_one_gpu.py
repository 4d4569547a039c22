"""Compressed attention on one GPU, with DeepSeek-V4's head size: bf16 against fp64 on the CPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_moe.config.compressed_attention import CompressedAttentionConfig
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.model.init import init_parameters
from megatron_moe.model.rope import Rotations
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.modules import module_of
from tests.helpers.tiny_models import UNIT_GAIN, compressed_config, make_mb, randn
from tests.helpers.tolerances import BF16_BLOCKS

pytestmark = pytest.mark.gpu1

SEQ, BATCH, HIDDEN = 300, 2, 256


def results(config: CompressedAttentionConfig, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and all gradients, with weights and inputs that bf16 represents."""
    context = ParallelContext.single(dtype=dtype, device=device)
    module = module_of(config, context, select_kernels(KernelConfig(), context.device, dtype))
    source = module_of(config, ParallelContext.single())
    init_parameters(source, 5, UNIT_GAIN)
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), source.parameters(), strict=True):
            parameter.copy_(value.bfloat16())
    positions = torch.arange(SEQ, device=device).repeat(BATCH, 1)
    mb = Rotations([config], context).attach(make_mb(BATCH, SEQ, positions_BS=positions))
    x, probe = (randn(SEQ, BATCH, HIDDEN, seed=seed).bfloat16().to(device, dtype) for seed in (1, 2))
    out = module(x.requires_grad_(), mb)
    (out * probe).sum().backward()
    found = {"output": out, "input": x.grad, **{name: p.grad for name, p in module.named_parameters()}}
    return {name: value.detach().double().cpu() for name, value in found.items() if value is not None}


@pytest.mark.parametrize("ratio", [0, 4, 16])
def test_output_and_gradients_match_fp64(ratio: int) -> None:
    """The indexer selects all entries, because rounding may change the order of its scores."""
    sizes = {"hidden_size": HIDDEN, "num_heads": 16, "head_dim": 512, "q_lora_rank": 64, "csa_window_size": 128}
    config = compressed_config(ratio, indexer={"topk": SEQ, "indexer_loss_coeff": 0.0}, o_lora_rank=32, **sizes)
    config = replace(config, rope=replace(config.rope, dim=64))
    if config.indexer is not None:
        config = replace(config, indexer=replace(config.indexer, head_dim=128))
    BF16_BLOCKS.check_all(results(config, "cuda", torch.bfloat16), results(config, "cpu", torch.float64))
