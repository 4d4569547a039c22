"""Sparse attention and its indexer on one GPU: bf16 against fp64 on the CPU."""

from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import NormConfig, RopeConfig
from megatron_moe.config.dsa import IndexerConfig
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.model.sparse_attention import KeyChoice, QueryRows, choose_keys, pack_bits, sparse_attention
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.tolerances import BF16_BLOCKS, BF16_KERNEL
from tests.kernels.test_linear_attention import draw

pytestmark = pytest.mark.gpu1

SEQ, BATCH, HEADS = 130, 2, 4


def results(function, inputs: list[Tensor], device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of all inputs, in fp64 on the CPU."""
    leaves = [x.bfloat16().to(device, dtype).requires_grad_() for x in inputs]
    out = function(*leaves)
    probe = draw(*out.shape, seed=9).to(out)
    grads = torch.autograd.grad((out * probe).sum(), leaves)
    return {name: x.detach().double().cpu() for name, x in zip(("out", "q", "k", "v"), (out, *grads), strict=True)}


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
def test_attention_to_chosen_keys_matches_fp64(documents: bool) -> None:
    inputs = [draw(SEQ, BATCH, HEADS, width, seed=width) for width in (48, 49, 32)]
    inputs[1] = inputs[1][..., :48]
    segments = (torch.arange(SEQ) * 3 // SEQ).expand(BATCH, SEQ) if documents else None
    chosen = QueryRows((range(SEQ),), segments, torch.device("cpu")).visible(slice(0, SEQ), SEQ)
    chosen = chosen & ((draw(BATCH, SEQ, SEQ, seed=1) > 0) | torch.eye(SEQ, dtype=torch.bool))
    found = {}
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        given = None if segments is None else segments.to(device)
        queries = QueryRows((range(SEQ),), given, torch.device(device))
        bits = pack_bits(chosen, SEQ).to(device)
        attend = partial(sparse_attention, bits_BUK=bits, queries=queries, softmax_scale=48**-0.5)
        found[device] = results(attend, inputs, device, dtype)
    BF16_BLOCKS.check_all(found["cuda"], found["cpu"])


@pytest.mark.parametrize("sparse", [False, True], ids=["dense loss", "sparse loss"])
def test_choice_and_loss_of_the_indexer_match_fp64(sparse: bool) -> None:
    config = IndexerConfig(
        num_heads=3, head_dim=16, topk=SEQ if sparse else 20, rope=RopeConfig(dim=4),
        norm=NormConfig(kind="LayerNorm", eps=1e-6), indexer_loss_coeff=1.0, sparse_indexer_loss=sparse,
    )  # fmt: skip
    (chosen, expected), (on_gpu, actual) = (
        indexed(config, device, dtype) for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16))
    )
    BF16_KERNEL.check_all(actual, expected)
    # products of bf16 values are exact in fp32, so only the order of sums differs
    assert torch.equal(on_gpu, chosen)


def indexed(config: IndexerConfig, device: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Chosen keys, and the loss with its gradients."""
    inputs = [draw(SEQ, BATCH, 3, 16), draw(SEQ, BATCH, 16, seed=1), draw(SEQ, BATCH, 3, seed=2)]
    of_attention = [draw(SEQ, BATCH, HEADS, 48, seed=seed).bfloat16().to(device, dtype) for seed in (3, 4)]
    queries = QueryRows((range(SEQ),), None, torch.device(device))
    weight = torch.full((BATCH, SEQ), 1 / (SEQ * BATCH), device=device, dtype=internal_dtype(dtype))
    group = ParallelContext.single(device=device).group("tp")
    job = KeyChoice(config, queries, (0, 1), group, 48**-0.5, weight)
    chosen = []

    def loss(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        bits, loss = choose_keys(q, k, w, *of_attention, job)
        chosen.append(bits.cpu())
        return loss

    found = results(loss, inputs, device, dtype)
    return chosen[0], found
