"""Sparse attention: the reference against dense attention with a mask, and the Triton kernels against the reference."""

import pytest
import torch
from torch import Tensor

from megatron_moe.kernels.backends.triton.sparse_attention import op as triton
from megatron_moe.kernels.reference import sparse_attention as reference
from tests.helpers.kernel_comparison import draw
from tests.helpers.tolerances import FP32_REF, FP64_REF


def chosen_ids(queries: int, batch: int, keys: int, num: int, seed: int = 5) -> Tensor:
    """Distinct random ids, int32 [queries, batch, num]; -1 in some places, and everywhere in the last rows of ids."""
    order = draw(queries, batch, max(keys, num), seed=seed).argsort(dim=-1)[..., :num]
    some = draw(queries, batch, num, seed=seed + 1) > -1.0
    some &= torch.arange(num) < torch.arange(queries)[:, None, None] + 1
    return torch.where(some & (order < keys), order, -1).int()


def case(queries, batch, heads, keys, num, value_width, rest, *, sinks=False):
    q, kv = draw(queries, batch, heads, value_width + rest), draw(keys, batch, value_width + rest, seed=1)
    logits = draw(heads, seed=2) if sinks else None
    return [q, kv, logits], chosen_ids(queries, batch, keys, num)


def results(function, values, ids, value_width) -> dict[str, Tensor]:
    """Output, log-sum-exp and gradients of all given inputs."""
    leaves = [None if x is None else x.clone().requires_grad_() for x in values]
    q, kv, sinks = leaves
    out, lse = function(q, kv, ids, sinks, value_width, q.shape[-1] ** -0.5)
    probe = draw(*out.shape, seed=9).to(out)
    grads = torch.autograd.grad((out * probe).sum(), [x for x in leaves if x is not None])
    return {"out": out.detach(), "lse": lse, **dict(zip(("q", "kv", "sinks"), grads, strict=False))}


def masked(q, kv, ids, sinks, value_width, scale):
    """Dense attention with the mask of the ids."""
    chosen = torch.zeros(len(q), q.shape[1], len(kv) + 1, dtype=torch.bool).scatter_(
        2, ids.long() % (len(kv) + 1), True
    )
    logits = torch.einsum("ubnd,sbd->ubns", q, kv) * scale
    logits = logits.masked_fill(~chosen[:, :, None, :-1], -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None].expand(*logits.shape[:3], 1)], dim=-1)
    probs = torch.where(logits.isinf().all(dim=-1, keepdim=True), 0, logits.softmax(dim=-1))
    return torch.einsum("ubns,sbe->ubne", probs[..., : len(kv)], kv[..., :value_width]), logits.logsumexp(-1).detach()


SHAPES = {
    "odd": (5, 2, 3, 9, 7, 12, 4),
    "more ids than keys": (4, 1, 2, 3, 8, 8, 2),
    "no further channels": (3, 2, 2, 6, 4, 8, 0),
}


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_reference_is_dense_attention_with_a_mask(shape, sinks, monkeypatch):
    monkeypatch.setattr(reference, "BLOCK_BYTES", 1)
    values, ids = case(*shape, sinks=sinks)
    ids[0, 0] = torch.where(torch.arange(ids.shape[-1]) == 0, 1, -1).int()
    found = results(reference.sparse_attention, values, ids, shape[5])
    FP64_REF.check_all(found, results(masked, values, ids, shape[5]))


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("shape", [(3, 2, 70, 90, 70, 40, 8), (2, 1, 3, 20, 300, 16, 0)], ids=str)
def test_triton_equals_the_reference(shape, sinks):
    values, ids = case(*shape, sinks=sinks)
    ids[0] = -1  # a query without a row
    values = [None if x is None else x.float() for x in values]
    found = results(triton.sparse_attention, values, ids, shape[5])
    FP32_REF.check_all(found, results(reference.sparse_attention, values, ids, shape[5]))
