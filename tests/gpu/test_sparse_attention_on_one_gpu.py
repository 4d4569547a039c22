"""Sparse attention and its indexer on one GPU: bf16 against fp64 on the CPU."""

import pytest
import torch
from torch import Tensor

from megatron_moe.config.attention import NormConfig, RopeConfig
from megatron_moe.config.dsa import IndexerConfig
from megatron_moe.kernels.backends.triton.sparse_attention.op import sparse_attention as attend_to_rows
from megatron_moe.kernels.ops import internal_dtype
from megatron_moe.kernels.reference.sparse_attention import sparse_attention as reference
from megatron_moe.model.sparse_attention import KeySelection, QueryRows, select_keys
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
    # a product of two bf16 values is exact in fp32, so only the order of sums differs
    assert torch.equal(on_gpu, chosen)


def indexed(config: IndexerConfig, device: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the selected keys, and the indexer loss with its gradients."""
    inputs = [draw(SEQ, BATCH, 3, 16), draw(SEQ, BATCH, 16, seed=1), draw(SEQ, BATCH, 3, seed=2)]
    shapes = (SEQ, BATCH, HEADS, 48), (SEQ, BATCH, 48)
    of_attention = [draw(*shape, seed=len(shape)).bfloat16().to(device, dtype) for shape in shapes]
    queries = QueryRows((range(SEQ),), None, torch.device(device))
    weight = torch.full((BATCH, SEQ), 1 / (SEQ * BATCH), device=device, dtype=internal_dtype(dtype))
    group = ParallelContext.single(device=device).group("tp")
    job = KeySelection(config, queries, (0, 1), group, 48**-0.5, weight)
    chosen = []

    def loss(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        ids, loss = select_keys(q, k, w, *of_attention, job)
        chosen.append(ids.cpu())
        return loss

    found = results(loss, inputs, device, dtype)
    return chosen[0], found


def causal_ids(seq: int, topk: int) -> Tensor:
    """Selects for every query up to `topk` random keys that the causal mask allows: int32 [seq, 1, topk].

    Ids are ascending and padded with -1.
    """
    ids = torch.full((seq, topk), -1, device="cuda", dtype=torch.int32)
    for first in range(0, seq, 1024):
        last = min(first + 1024, seq)
        scores = torch.rand(last - first, last, device="cuda")
        hidden = torch.arange(last, device="cuda") > torch.arange(first, last, device="cuda")[:, None]
        best = scores.masked_fill_(hidden, -1.0).topk(min(topk, last))
        chosen = torch.where(best.values < 0, seq, best.indices).sort().values
        ids[first:last, : chosen.shape[1]] = torch.where(chosen == seq, -1, chosen).int()
    return ids[:, None]


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(
    ("seq", "heads", "rest"),
    [(4096, 128, 64), (4096, 64, 64), (8192, 64, 64), (32768, 128, 64), (4097, 20, 64), (4096, 64, 0)],
)
def test_attention_to_chosen_rows_matches_fp64(seq: int, heads: int, rest: int, sinks: bool) -> None:
    """Output gradients are zero except for a sample of the queries, because fp64 computes only that sample."""
    torch.manual_seed(1)
    ids, topk = causal_ids(seq, 2048), 2048
    q = torch.randn(seq, 1, heads, 512 + rest, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(seq, 1, 512 + rest, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(heads, device="cuda") if sinks else None
    sample = torch.cat([torch.arange(3, device="cuda"), torch.randperm(seq, device="cuda")[:93]]).unique()
    grad = torch.randn(len(sample), 1, heads, 512, device="cuda", dtype=torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    leaves = [None if x is None else x.detach().requires_grad_() for x in (q, kv, logits)]
    out, lse = attend_to_rows(leaves[0], leaves[1], ids, leaves[2], 512, 0.1)
    whole = torch.zeros_like(out).index_copy_(0, sample, grad)
    grads = torch.autograd.grad(out, [x for x in leaves if x is not None], whole)
    torch.cuda.set_sync_debug_mode("default")
    wide = [None if x is None else x.detach().double().requires_grad_() for x in (q[sample], kv, logits)]
    expected, expected_lse = reference(wide[0], wide[1], ids[sample], wide[2], 512, 0.1)
    expected_grads = torch.autograd.grad(expected, [x for x in wide if x is not None], grad.double())
    assert ids.shape[-1] == topk and not grads[0].any(dim=-1).all()
    names = ("q", "kv", "sinks")[: len(grads)]
    actual = {"out": out[sample], "lse": lse[sample], **dict(zip(names, (grads[0][sample], *grads[1:]), strict=True))}
    wanted = {"out": expected, "lse": expected_lse, **dict(zip(names, expected_grads, strict=True))}
    BF16_BLOCKS.check_all(
        {name: x.detach().double().cpu() for name, x in actual.items()},
        {name: x.detach().cpu() for name, x in wanted.items()},
    )
