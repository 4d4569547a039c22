"""Builds and runs attention modules, and compares them with the loop implementation."""

import torch
from torch import Tensor

from megatron_moe.config.attention import AttentionConfig
from megatron_moe.config.mla import MLAConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.model.attention import Attention
from megatron_moe.model.init import init_parameters
from megatron_moe.model.mla import MLA
from megatron_moe.model.rope import Rotations
from megatron_moe.parallel.context import ParallelContext
from tests.helpers import naive_layers
from tests.helpers.modules import module_of
from tests.helpers.tiny_models import HIDDEN, UNIT_GAIN, randn
from tests.helpers.tolerances import FP64_REF


def make(config: AttentionConfig | MLAConfig) -> Attention | MLA:
    module = module_of(config, ParallelContext.single())
    init_parameters(module, 5, UNIT_GAIN)
    return module


def run(module: Attention | MLA, hidden_SBH: Tensor, mb: MicrobatchContext) -> Tensor:
    return module(hidden_SBH, Rotations([module.config], ParallelContext.single()).attach(mb))


def check_against_loop(config: AttentionConfig | MLAConfig, mb: MicrobatchContext) -> None:
    """Compares output, input gradient and weight gradients with the loop implementation."""
    module, oracle = make(config), naive_layers.mla if isinstance(config, MLAConfig) else naive_layers.gqa
    weights = {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
    batch, seq = mb.tokens.positions_BS.shape
    segments_BS = (
        mb.tokens.segments_BS if mb.tokens.segments_BS is not None else torch.zeros(batch, seq, dtype=torch.int64)
    )
    x, oracle_x = randn(seq, batch, HIDDEN).requires_grad_(), randn(seq, batch, HIDDEN).requires_grad_()
    probe = randn(seq, batch, HIDDEN, seed=2)

    out = run(module, x, mb)
    expected = oracle(oracle_x, config, weights, mb.tokens.positions_BS, segments_BS)
    (out * probe).sum().backward()
    (expected * probe).sum().backward()

    FP64_REF.check(out, expected, "output")
    FP64_REF.check(x.grad, oracle_x.grad, "input gradient")
    actual = {name: p.grad for name, p in module.named_parameters()}
    FP64_REF.check_all(actual, {name: w.grad for name, w in weights.items()}, "gradients")
