"""Linear attention with decay and the delta rule: chunks against the recurrence over tokens, kernels against chunks."""

import pytest
import torch
from torch import Tensor

from megatron_moe.kernels.backends.triton.linear_attention import op as triton
from megatron_moe.kernels.reference.linear_attention import linear_attention
from tests.helpers.kernel_comparison import draw
from tests.helpers.tolerances import FP32_REF, FP64_LAYOUT, LINEAR_ATTENTION_BF16

SEGMENTS = {"one document": None, "documents": [5, 1, 1, 58, 64, 1, 3, 7], "a document per token": [1] * 140}
"""Lengths of the first documents of a sequence."""


def inputs(length: int, batch: int, groups: int, heads: int, width: int, value_width: int, *, delta: bool):
    q, k = draw(length, batch, groups, width), draw(length, batch, groups, width, seed=1)
    k = k / k.norm(dim=-1, keepdim=True) if delta else k / width**0.5
    decay = -0.2 * draw(length, batch, heads, seed=3).exp()
    beta = draw(length, batch, heads, seed=4).sigmoid() if delta else None
    return [q, k, draw(length, batch, heads, value_width, seed=2), decay, beta]


def segments_of(lengths: list[int] | None, batch: int, length: int) -> Tensor | None:
    if lengths is None:
        return None
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[:length]
    ids = torch.cat([ids, ids.new_full((length - len(ids),), len(lengths))])
    return torch.stack([ids.roll(3 * row).sort().values for row in range(batch)])


def recurrence(q, k, v, decay, beta, segments_BS, scale):
    """The state of a head after each token, one token after the other."""
    length, batch, heads, _ = v.shape
    q, k = (x.repeat_interleave(heads // q.shape[2], dim=2) for x in (q, k))
    state, outs = v.new_zeros(batch, heads, q.shape[-1], v.shape[-1]), []
    for token in range(length):
        if segments_BS is not None and token:
            starts = segments_BS[:, token] != segments_BS[:, token - 1]
            state = torch.where(starts[:, None, None, None], 0, state)
        state = state * decay[token, :, :, None, None].exp()
        value, key = v[token], k[token]
        if beta is not None:
            value = beta[token, :, :, None] * (value - torch.einsum("bmde,bmd->bme", state, key))
        state = state + torch.einsum("bmd,bme->bmde", key, value)
        outs.append(scale * torch.einsum("bmde,bmd->bme", state, q[token]))
    return torch.stack(outs)


def results(function, values, *rest):
    """Output and gradients of all given inputs."""
    values = [None if x is None else x.clone().requires_grad_() for x in values]
    out = function(*values, *rest)
    probe = draw(*out.shape, seed=9).to(out)
    grads = torch.autograd.grad((out * probe).sum(), [x for x in values if x is not None])
    return {"out": out.detach(), **{f"gradient {i}": grad for i, grad in enumerate(grads)}}


@pytest.mark.parametrize("lengths", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "plain"])
@pytest.mark.parametrize("shape", [(130, 2, 1, 2, 8, 6), (64, 1, 2, 2, 4, 5), (3, 1, 1, 1, 2, 3)], ids=str)
def test_chunks_equal_the_recurrence(shape, delta, lengths):
    values = inputs(*shape, delta=delta)
    rest = segments_of(lengths, shape[1], shape[0]), 0.3
    FP64_LAYOUT.check_all(results(linear_attention, values, *rest), results(recurrence, values, *rest))


@pytest.mark.parametrize("lengths", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "plain"])
@pytest.mark.parametrize("shape", [(130, 2, 1, 2, 24, 70), (64, 1, 2, 2, 16, 16), (3, 1, 1, 1, 2, 3)], ids=str)
def test_triton_kernels_equal_the_reference(shape, delta, lengths):
    values = [None if x is None else x.float() for x in inputs(*shape, delta=delta)]
    rest = segments_of(lengths, shape[1], shape[0]), 0.3
    FP32_REF.check_all(results(triton.linear_attention, values, *rest), results(linear_attention, values, *rest))


def test_systems_of_equal_keys_are_solved_accurately():
    """All tokens of a chunk have the same key: the powers of such a matrix grow to 1e18."""
    q, k, v, decay, beta = inputs(128, 1, 1, 1, 16, 16, delta=True)
    decay = 0.01 * decay.float()  # without gradient: its terms cancel to 1e-3 of their size
    values = [x.float() for x in (q, k[:1].expand_as(k), v, torch.ones_like(beta) - 0.01)]
    ours, theirs = (
        results(lambda q, k, v, beta, op=op: op(q, k, v, decay, beta, None, 1.0), values)
        for op in (triton.linear_attention, linear_attention)
    )
    FP32_REF.check_all(ours, theirs)


def test_triton_kernels_in_bf16_are_close_to_the_reference():
    values = inputs(200, 1, 1, 2, 32, 32, delta=True)
    values = [x.bfloat16() for x in values[:3]] + [x.float() for x in values[3:]]
    expected = results(linear_attention, [x.double() for x in values], None, 32**-0.5)
    actual = results(triton.linear_attention, values, None, 32**-0.5)
    dtypes = [x.dtype for x in (values[2], *values)]
    for (name, value), dtype in zip(expected.items(), dtypes, strict=True):
        LINEAR_ATTENTION_BF16.check(actual[name].double(), value, name)
        assert actual[name].dtype is dtype, name
