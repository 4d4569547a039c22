"""Reference implementation of the ops on a `PushChannel`, in plain torch. The host waits for the other ranks."""

import time

import torch
from torch import Tensor

from megatron_moe.kernels.ops import MatrixOperand, RowIndex, internal_dtype
from megatron_moe.parallel.push_channel import PushChannel
from megatron_moe.precision.quantized_tensor import QuantizedTensor

_POLL_S = 20e-6


def mark_ranks(ids_TK: Tensor, owner_EP: Tensor) -> Tensor:
    needed_TP = _owned_by(ids_TK, owner_EP).any(dim=1)
    bits_P = torch.arange(needed_TP.shape[1], dtype=torch.int32, device=ids_TK.device)
    return (needed_TP.int() << bits_P).sum(dim=1, dtype=torch.int32)


def push_tokens(
    tokens_TH: MatrixOperand, ranks_T: Tensor, choices: tuple[Tensor, Tensor] | None, channel: PushChannel
) -> None:
    _wait(channel, channel.acknowledged[channel.rank])
    scales = None
    if isinstance(tokens_TH, QuantizedTensor):
        tokens_TH, scales, _ = tokens_TH.row_copy
    for peer in range(channel.shape.num_ranks):
        needed_T = (ranks_T >> peer & 1).bool()
        channel.tokens[peer][channel.rank, needed_T] = tokens_TH[needed_T]
        if scales is not None:
            channel.scales[peer][channel.rank, needed_T] = scales.T[needed_T]
        if choices is not None:
            channel.ids[peer][channel.rank], channel.probs[peer][channel.rank] = choices
    _signal(channel)


def push_sums(
    rows: Tensor, index: RowIndex, values_GK: Tensor | None, channel: PushChannel, *, is_summed: bool = False
) -> None:
    _wait(channel, channel.acknowledged[channel.rank])
    assert index.rows_TK is not None, "a dense layout has no rows per choice"
    shape = channel.shape
    rows_PTK = index.rows_TK.view(shape.num_ranks, shape.num_tokens, shape.topk)
    held_PTK = rows_PTK >= 0
    for peer, (rows_TK, held_TK) in enumerate(zip(rows_PTK, held_PTK, strict=True)):
        needed_T = held_TK.any(dim=1)
        sums_TH = rows.view(-1, shape.num_tokens, shape.width)[peer] if is_summed else _sums(rows, rows_TK)
        channel.tokens[peer][channel.rank, needed_T] = sums_TH[needed_T].to(shape.dtype)
        if values_GK is not None:
            given_TK, values_TK = values_GK.view(rows_PTK.shape)[peer], channel.probs[peer][channel.rank]
            values_TK[held_TK] = given_TK[held_TK].to(values_TK.dtype)
    _signal(channel)


def _sums(rows_RH: Tensor, rows_TK: Tensor) -> Tensor:
    sums_TH = torch.zeros(len(rows_TK), rows_RH.shape[1], dtype=internal_dtype(rows_RH.dtype), device=rows_RH.device)
    for rows_T in rows_TK.unbind(dim=1):
        held_T = rows_T >= 0
        sums_TH[held_T] += rows_RH[rows_T[held_T]].to(sums_TH.dtype)
    return sums_TH


def sum_partials(
    ids_TK: Tensor, owner_EP: Tensor, channel: PushChannel, *, with_values: bool
) -> tuple[Tensor, Tensor | None]:
    shape, owned_TKP = channel.shape, _owned_by(ids_TK, owner_EP)
    sums_TH = torch.zeros(shape.num_tokens, shape.width, dtype=internal_dtype(shape.dtype), device=ids_TK.device)
    values_TK = channel.probs[channel.rank].new_zeros(ids_TK.shape) if with_values else None
    for peer in range(shape.num_ranks):
        owned_TK = owned_TKP[..., peer]
        sums_TH += torch.where(owned_TK.any(dim=1, keepdim=True), channel.tokens[channel.rank][peer], 0)
        if values_TK is not None:
            values_TK += torch.where(owned_TK, channel.probs[channel.rank][peer], 0)
    return sums_TH.to(shape.dtype), values_TK


def wait_for_peers(channel: PushChannel) -> None:
    _wait(channel, channel.arrived[channel.rank])


def acknowledge(channel: PushChannel) -> None:
    for acknowledged in channel.acknowledged:
        acknowledged[channel.rank, 0] = channel.epoch[0]


def _owned_by(ids_TK: Tensor, owner_EP: Tensor) -> Tensor:
    """bool [T, K, P]: rank p holds the expert of the choice, or a part of it."""
    owners_TKP = owner_EP[ids_TK.clamp_min(0).long()]
    return owners_TKP & (ids_TK >= 0)[..., None]


def _signal(channel: PushChannel) -> None:
    channel.epoch[0] += 1
    for arrived in channel.arrived:
        arrived[channel.rank, 0] = channel.epoch[0]


def _wait(channel: PushChannel, flags: Tensor) -> None:
    """Blocks until every flag has reached the current epoch."""
    if channel.epoch.device.type == "meta":
        return
    deadline = time.monotonic() + channel.timeout_s
    while bool(((flags[:, 0] - channel.epoch[0]) < 0).any()):
        if channel.late_rank_flag or time.monotonic() > deadline:
            late = int(((flags[:, 0] - channel.epoch[0]) < 0).int().argmax())
            channel.late_rank_flag.fill_(late + 1)
            return
        time.sleep(_POLL_S)
