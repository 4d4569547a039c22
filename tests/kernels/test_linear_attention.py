"""Linear attention with decay and the delta rule, short convolution and gated norm.

Chunks are compared with the recurrence over tokens, and kernels with the reference.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.kernels.backends.triton.gated_norm import gated_rms_norm
from megatron_moe.kernels.backends.triton.linear_attention import op as triton
from megatron_moe.kernels.backends.triton.short_conv import short_conv
from megatron_moe.kernels.reference import linear_attention as reference
from megatron_moe.kernels.reference.linear_attention import linear_attention
from tests.helpers.kernel_comparison import draw
from tests.helpers.tolerances import FP32_REF, FP64_LAYOUT, FP64_REF, LINEAR_ATTENTION_BF16

SEGMENTS = {"one document": None, "documents": [5, 1, 1, 58, 64, 1, 3, 7], "a document per token": [1] * 140}
"""Lengths of the first documents of a sequence."""


def inputs(
    length: int,
    batch: int,
    groups: int,
    heads: int,
    width: int,
    value_width: int,
    *,
    delta: bool,
    channels: bool = False,
):
    q, k = draw(length, batch, groups, width), draw(length, batch, groups, width, seed=1)
    k = k / k.norm(dim=-1, keepdim=True) if delta else k / width**0.5
    decay = -0.2 * draw(length, batch, heads, *([width] if channels else []), seed=3).exp()
    beta = draw(length, batch, heads, seed=4).sigmoid() if delta else None
    return [q, k, draw(length, batch, heads, value_width, seed=2), decay, beta]


def segments_of(lengths: list[int] | None, batch: int, length: int) -> Tensor | None:
    if lengths is None:
        return None
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[:length]
    ids = torch.cat([ids, ids.new_full((length - len(ids),), len(lengths))])
    return torch.stack([ids.roll(3 * row).sort().values for row in range(batch)])


def recurrence(q, k, v, decay, beta, segments_BS, scale):
    """Computes the recurrence of each head token by token."""
    length, batch, heads, _ = v.shape
    q, k = (x.repeat_interleave(heads // q.shape[2], dim=2) for x in (q, k))
    state, outs = v.new_zeros(batch, heads, q.shape[-1], v.shape[-1]), []
    for token in range(length):
        if segments_BS is not None and token:
            starts = segments_BS[:, token] != segments_BS[:, token - 1]
            state = torch.where(starts[:, None, None, None], 0, state)
        rate = decay[token] if decay.dim() == 4 else decay[token, :, :, None]
        state = state * rate[..., None].exp()
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
@pytest.mark.parametrize("channels", [True, False], ids=["decay per channel", "decay per head"])
@pytest.mark.parametrize("shape", [(130, 2, 1, 2, 8, 6), (64, 1, 2, 2, 4, 5), (3, 1, 1, 1, 2, 3)], ids=str)
def test_chunks_equal_the_recurrence(shape, channels, delta, lengths):
    values = inputs(*shape, delta=delta, channels=channels)
    rest = segments_of(lengths, shape[1], shape[0]), 0.3
    FP64_LAYOUT.check_all(results(linear_attention, values, *rest), results(recurrence, values, *rest))


@pytest.mark.parametrize("lengths", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "plain"])
@pytest.mark.parametrize("shape", [(70, 1, 1, 2, 24, 70), (64, 2, 2, 2, 16, 16), (3, 1, 1, 1, 2, 3)], ids=str)
def test_triton_kernels_equal_the_reference(shape, delta, lengths):
    values = [None if x is None else x.float() for x in inputs(*shape, delta=delta)]
    rest = segments_of(lengths, shape[1], shape[0]), 0.3, 0.1 if lengths is None else None
    FP32_REF.check_all(results(triton.linear_attention, values, *rest), results(linear_attention, values, *rest))


def check_channels(shape, lengths, eps, *, delta: bool, strength: float):
    """Compares kernels for a decay per channel with fp64. Decays are multiples of 2^-8, so that their sums are exact in
    fp32."""
    values = [None if x is None else x.float() for x in inputs(*shape, delta=delta, channels=True)]
    values[3] = (strength * values[3] * 256).round() / 256
    rest = segments_of(lengths, shape[1], shape[0]), 0.3, eps
    expected = results(linear_attention, [None if x is None else x.double() for x in values], *rest)
    FP32_REF.check_all(results(triton.linear_attention, values, *rest), expected)


@pytest.mark.parametrize("lengths", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "plain"])
@pytest.mark.parametrize("shape", [(70, 1, 1, 2, 24, 18), (20, 2, 1, 1, 40, 70), (3, 1, 1, 1, 2, 3)], ids=str)
def test_triton_kernels_with_a_decay_per_channel_match_fp64(shape, delta, lengths):
    check_channels(shape, lengths, 0.1 if lengths is None else None, delta=delta, strength=1.0)


@pytest.mark.parametrize("strength", [300.0, 0.05])
@pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "plain"])
def test_fast_and_slow_decays_of_channels_in_triton_kernels_match_fp64(delta, strength):
    """The fast ones decay by more than e^-1000 within a block of 16 tokens: quotients would overflow."""
    check_channels((67, 1, 1, 1, 16, 8), [30, 34], 1e-6, delta=delta, strength=strength)


def test_equal_decays_of_channels_are_the_decay_of_a_head():
    values = inputs(130, 2, 1, 2, 8, 6, delta=True)
    whole, rest = values[3][..., None].expand(-1, -1, -1, 8), (segments_of(SEGMENTS["documents"], 2, 130), 0.3, 1e-6)
    FP64_LAYOUT.check(linear_attention(*values[:3], whole, values[4], *rest), linear_attention(*values, *rest))


def test_fast_decays_of_channels_do_not_overflow():
    """Decays by e^-2000 within a chunk: quotients of products of decays would be infinite."""
    q, k, v, decay, beta = inputs(70, 1, 1, 1, 8, 6, delta=True, channels=True)
    values = [q, k, v, torch.cat([150 * decay[..., :4], decay[..., 4:] / 100], dim=-1), beta]
    FP64_LAYOUT.check_all(
        results(linear_attention, values, None, 0.3), results(recurrence, values, None, 0.3), "results"
    )


def test_a_decay_of_channels_saves_only_the_inputs():
    values = [x.requires_grad_() for x in inputs(70, 2, 1, 2, 8, 6, delta=True, channels=True)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        linear_attention(*values, None, 0.3, 1e-6)
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in values]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("delta, channels", [(True, False), (False, False), (True, True)])
def test_triton_kernels_read_and_save_parts_of_one_tensor(delta, channels, batch):
    length = 20 if channels else 70
    drawn = inputs(length, batch, 2, 4, 8, 6, delta=delta, channels=channels)
    *_, decay, beta = (None if x is None else x.float() for x in drawn)
    packed = draw(length, batch, 2 * 8 * 2 + 4 * 6 + 3, seed=5).float() / 4
    copies = []

    def function(op):
        def run(packed, decay, beta):
            q, k, v, _ = packed.split((16, 16, 24, 3), dim=-1)

            def saved(x):
                own = (packed_storage, decay.untyped_storage()._cdata)
                if x.dim() == 4 and x.shape[-1] in (8, 6) and x.untyped_storage()._cdata not in own:
                    copies.append(x.shape)
                return x

            packed_storage = packed.untyped_storage()._cdata
            with torch.autograd.graph.saved_tensors_hooks(saved, lambda x: x):
                return op(
                    q.unflatten(-1, (2, 8)), k.unflatten(-1, (2, 8)), v.unflatten(-1, (4, 6)), decay, beta, None, 0.3
                )

        return results(run, [packed, decay, beta])

    found = function(triton.linear_attention)
    assert not copies, "q, k, v and decays per channel are saved where they are"
    FP32_REF.check_all(found, function(linear_attention))


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


@pytest.mark.parametrize("channels", [False, True], ids=["decay per head", "decay per channel"])
def test_triton_kernels_in_bf16_are_close_to_the_reference(channels):
    shape = (67, 1, 1, 1, 16, 32) if channels else (130, 1, 1, 2, 32, 32)
    values = inputs(*shape, delta=True, channels=channels)
    values = [3 * values[0], 3 * values[1], *values[2:]]
    values = [x.bfloat16() for x in values[:3]] + [x.float() for x in values[3:]]
    expected = results(linear_attention, [x.double() for x in values], None, 32**-0.5, 1e-6)
    actual = results(triton.linear_attention, values, None, 32**-0.5, 1e-6)
    dtypes = [x.dtype for x in (values[2], *values)]
    for (name, value), dtype in zip(expected.items(), dtypes, strict=True):
        LINEAR_ATTENTION_BF16.check(actual[name].double(), value, name)
        assert actual[name].dtype is dtype, name


def filters(length: int, batch: int, channels: int, width: int, *, bias: bool) -> list[Tensor | None]:
    weight, offset = draw(channels, width, seed=1), draw(channels, seed=2) if bias else None
    return [draw(length, batch, channels), weight, offset]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_short_convolution_is_that_of_torch(bias):
    x, weight, offset = filters(9, 2, 5, 4, bias=bias)
    padded = F.conv1d(x.permute(1, 2, 0), weight[:, None], offset, padding=3, groups=5)[..., :9]
    FP64_REF.check(reference.short_conv(x, weight, offset, None), F.silu(padded.permute(2, 0, 1)))


def test_short_convolution_does_not_cross_documents():
    x, weight, offset = filters(9, 1, 5, 4, bias=True)
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 2, 3]])
    parts = [reference.short_conv(part, weight, offset, None) for part in x.split((2, 5, 1, 1))]
    FP64_REF.check(reference.short_conv(x, weight, offset, segments), torch.cat(parts))


@pytest.mark.parametrize("lengths", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("shape", [(9, 2, 300, 4), (2, 1, 3, 4), (140, 1, 5, 3)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_triton_short_convolution_equals_the_reference(bias, shape, lengths):
    values = [None if x is None else x.float() for x in filters(*shape, bias=bias)]
    segments = segments_of(lengths, shape[1], shape[0])
    FP32_REF.check_all(results(short_conv, values, segments), results(reference.short_conv, values, segments))


def test_short_convolution_of_a_part_of_the_channels():
    whole, weight, _ = (None if x is None else x.float() for x in filters(20, 2, 12, 4, bias=False))
    expected = results(lambda x: reference.short_conv(x[..., 3:10], weight[3:10], None, None), [whole])
    FP32_REF.check_all(results(lambda x: short_conv(x[..., 3:10], weight[3:10], None, None), [whole]), expected)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("per_group", [True, False])
@pytest.mark.parametrize("shape", [(7, 2, 3, 20), (1, 1, 1, 1), (90, 1, 2, 64)], ids=str)
def test_triton_gated_norm_equals_the_reference(shape, per_group, norm_first, activation):
    *outer, groups, width = shape
    x, packed = draw(*shape).float(), draw(*outer, groups * width + 5, seed=1).float()
    weight = draw(*(shape[-2:] if per_group else shape[-1:]), seed=2).float()

    def run(op):  # the gate is a part of a wider tensor
        def function(x, packed, weight):
            return op(x, packed[..., 5:].unflatten(-1, (groups, width)), weight, 1e-5, norm_first, activation)

        return results(function, [x, packed, weight])

    FP32_REF.check_all(run(gated_rms_norm), run(reference.gated_rms_norm))
