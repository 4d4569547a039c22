"""Pushes over NVLink: each token goes once to every rank that needs it, by 16-byte stores to the peers' memory.

A push is one kernel: it waits for the acknowledgements of the previous epoch, copies rows, and its last program sets
the arrival flags, with release semantics at system scope. Waiting for peers is a kernel of one program, so that it
takes no SMs from other work.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.backends.triton.launch import INTERPRETED, cdiv, num_sms, power_of_two, rows_of
from megatron_moe.kernels.ops import MatrixOperand, RowIndex
from megatron_moe.kernels.reference import push as reference_push
from megatron_moe.parallel.push_channel import FLAG_STRIDE, PushChannel
from megatron_moe.precision.quantized_tensor import QuantizedTensor

ROWS, ROWS_OF_FEW = 4, 16
"""Number of rows for which a program has loads in flight, for kernels on all SMs and for kernels on few SMs. Two H200
exchange 8192 rows of 4 KB, 4 in flight, in 98 us on 132 SMs and 120 us on 16, but in 240 us on 8, where the latency of
loads decides."""
COLUMNS = 2048
TOKENS = 64
"""Tokens of a program of `mark_ranks`."""


def mark_ranks(ids_TK: Tensor, owner_EP: Tensor) -> Tensor:
    num_tokens, topk = ids_TK.shape
    ranks_T = torch.empty(num_tokens, dtype=torch.int32, device=ids_TK.device)
    if num_tokens:
        _mark_ranks[(cdiv(num_tokens, TOKENS),)](
            ids_TK.contiguous(), owner_EP, ranks_T, num_tokens,
            NUM_RANKS=owner_EP.shape[1], TOPK=topk, CHOICES=power_of_two(topk), BLOCK=TOKENS,
        )  # fmt: skip
    return ranks_T


def push_tokens(
    tokens_TH: MatrixOperand, ranks_T: Tensor, choices: tuple[Tensor, Tensor] | None, channel: PushChannel
) -> None:
    shape, slots, num_scales = channel.shape, channel.tokens[channel.rank], channel.shape.scales[0]
    scales, in_flight = None, _in_flight(channel)
    if isinstance(tokens_TH, QuantizedTensor):
        tokens_TH, scales, _ = tokens_TH.row_copy
        scales = scales.contiguous()
        # quantised rows are copied as words, so the width is the number of words per row
        word = next(each for each in (torch.int32, torch.int16, torch.uint8) if shape.width % each.itemsize == 0)
        tokens_TH, slots = tokens_TH.contiguous().view(word), slots.view(word)
        in_flight["ROWS"] *= 2  # doubled, so that as many bytes are in flight as for bf16 rows
    tokens_TH, width = rows_of(tokens_TH), slots.shape[-1]
    ids_TK, values_TK = (ranks_T, ranks_T) if choices is None else (each.contiguous() for each in choices)
    columns = min(power_of_two(width), COLUMNS)
    _push_tokens[(_num_programs(channel),)](
        tokens_TH, ranks_T, ids_TK, values_TK, scales,
        channel.addresses, channel.acknowledged[channel.rank], channel.epoch, channel.late_rank_flag,
        shape.num_tokens, width, tokens_TH.stride(0), num_scales, _timeout_ns(channel),
        slots, channel.probs[channel.rank],
        RANK=channel.rank, NUM_RANKS=shape.num_ranks, TOPK=shape.topk, COLUMNS=columns, BLOCK=1024,
        SCALES=power_of_two(max(num_scales, 1)), WITH_CHOICES=choices is not None, STRIDE=FLAG_STRIDE,
        INTERPRETED=INTERPRETED, **in_flight,
    )  # fmt: skip


def push_sums(
    rows: Tensor, index: RowIndex, values_GK: Tensor | None, channel: PushChannel, *, is_summed: bool = False
) -> None:
    assert index.rows_TK is not None, "a dense layout has no rows per choice"
    shape, rows = channel.shape, rows_of(rows)
    columns = min(power_of_two(shape.width), COLUMNS)
    _push_sums[(_num_programs(channel),)](
        rows, index.rows_TK.contiguous(), rows if values_GK is None else values_GK.contiguous(),
        channel.addresses, channel.acknowledged[channel.rank], channel.epoch, channel.late_rank_flag,
        shape.num_tokens, shape.width, rows.stride(0), _timeout_ns(channel),
        channel.tokens[channel.rank], channel.probs[channel.rank],
        RANK=channel.rank, NUM_RANKS=shape.num_ranks, TOPK=shape.topk, CHOICES=power_of_two(shape.topk),
        COLUMNS=columns, IS_SUMMED=is_summed, WITH_VALUES=values_GK is not None, STRIDE=FLAG_STRIDE,
        INTERPRETED=INTERPRETED, **_in_flight(channel),
    )  # fmt: skip


def sum_partials(
    ids_TK: Tensor, owner_EP: Tensor, channel: PushChannel, *, with_values: bool
) -> tuple[Tensor, Tensor | None]:
    shape, own = channel.shape, channel.rank
    sums_TH = torch.empty(shape.num_tokens, shape.width, device=ids_TK.device, dtype=shape.dtype)
    values_TK = torch.empty(ids_TK.shape, device=ids_TK.device, dtype=channel.probs[own].dtype)
    if shape.num_tokens:
        columns = min(power_of_two(shape.width), COLUMNS)
        _sum_partials[(shape.num_tokens, cdiv(shape.width, columns))](
            ids_TK.contiguous(), owner_EP, channel.tokens[own], channel.probs[own], sums_TH, values_TK,
            shape.num_tokens, shape.width, NUM_RANKS=shape.num_ranks, TOPK=shape.topk,
            CHOICES=power_of_two(shape.topk), COLUMNS=columns, WITH_VALUES=with_values, num_warps=8,
        )  # fmt: skip
    return sums_TH, values_TK if with_values else None


def wait_for_peers(channel: PushChannel) -> None:
    if INTERPRETED:
        return reference_push.wait_for_peers(channel)
    _wait_for_arrival[(1,)](
        channel.arrived[channel.rank], channel.epoch, channel.late_rank_flag, _timeout_ns(channel),
        NUM_RANKS=channel.shape.num_ranks, STRIDE=FLAG_STRIDE, INTERPRETED=INTERPRETED, num_warps=1,
    )  # fmt: skip


def acknowledge(channel: PushChannel) -> None:
    _acknowledge[(1,)](
        channel.addresses, channel.epoch,
        RANK=channel.rank, NUM_RANKS=channel.shape.num_ranks, STRIDE=FLAG_STRIDE, num_warps=1,
    )  # fmt: skip


def _num_programs(channel: PushChannel) -> int:
    return channel.num_programs or num_sms(channel.epoch.device)


def _in_flight(channel: PushChannel) -> dict[str, int]:
    """Launch options: rows per step and number of warps of a program."""
    few = channel.num_programs is not None
    return {"ROWS": ROWS_OF_FEW if few else ROWS, "num_warps": 16 if few else 8}


def _timeout_ns(channel: PushChannel) -> int:
    return int(channel.timeout_s * 1e9)


@triton.jit
def _is_late(flags_ptr, epoch, rank, STRIDE: tl.constexpr):
    """Whether the flag of a rank has not reached the epoch. Acquire semantics: what the rank wrote before its flag is
    visible."""
    return tl.atomic_add(flags_ptr + rank * STRIDE, 0, sem="acquire", scope="sys") - epoch < 0


@triton.jit
def _wait(
    flags_ptr, epoch, missing_ptr, timeout_ns, NUM_RANKS: tl.constexpr, STRIDE: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Waits until the flags of all ranks have reached the epoch. After the timeout, stores the id of a late rank and
    returns."""
    if not INTERPRETED:
        start = tl.extra.cuda.globaltimer()
        for rank in tl.static_range(NUM_RANKS):
            late = _is_late(flags_ptr, epoch, rank, STRIDE)
            if late:
                waits = tl.load(missing_ptr, volatile=True) == 0
                while waits:
                    late = _is_late(flags_ptr, epoch, rank, STRIDE)
                    waits = late & (tl.extra.cuda.globaltimer() - start < timeout_ns)
                if late:
                    tl.store(missing_ptr, rank + 1)


@triton.jit
def _signal_after_last_program(
    addresses_ptr, epoch_ptr, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    """Sets this rank's arrival flag on all ranks to the next epoch, in the program that finishes last."""
    tl.debug_barrier()
    finished = tl.atomic_add(epoch_ptr + 1, 1, sem="acq_rel", scope="sys")
    if finished == tl.num_programs(0) - 1:
        epoch = tl.load(epoch_ptr) + 1
        tl.store(epoch_ptr, epoch)
        tl.store(epoch_ptr + 1, 0)
        for peer in tl.static_range(NUM_RANKS):
            flags_ptr = tl.load(addresses_ptr + 3 * NUM_RANKS + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags_ptr + RANK * STRIDE, epoch, sem="release", scope="sys")


@triton.jit
def _push_tokens(
    tokens_ptr, ranks_ptr, ids_ptr, values_ptr, scales_ptr, addresses_ptr, acknowledged_ptr, epoch_ptr, missing_ptr,
    num_tokens, width, stride, num_scales, timeout_ns, token_like_ptr, value_like_ptr,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, TOPK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, SCALES: tl.constexpr, WITH_CHOICES: tl.constexpr, STRIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(epoch_ptr)
    _wait(acknowledged_ptr, epoch, missing_ptr, timeout_ns, NUM_RANKS, STRIDE, INTERPRETED)
    if WITH_CHOICES:
        num_choices = num_tokens * TOPK
        for start in range(tl.program_id(0) * BLOCK, num_choices, tl.num_programs(0) * BLOCK):
            positions = start + tl.arange(0, BLOCK)
            given = positions < num_choices
            ids = tl.load(ids_ptr + positions, mask=given, other=-1).to(tl.int32)
            values = tl.load(values_ptr + positions, mask=given, other=0.0)
            for peer in tl.static_range(NUM_RANKS):
                ids_into = tl.load(addresses_ptr + NUM_RANKS + peer).to(tl.pointer_type(tl.int32))
                tl.store(ids_into + RANK * num_choices + positions, ids, mask=given)
                values_into = tl.load(addresses_ptr + 2 * NUM_RANKS + peer)
                values_into = values_into.to(tl.pointer_type(value_like_ptr.dtype.element_ty))
                tl.store(values_into + RANK * num_choices + positions, values, mask=given)
    tiles, blocks = tl.cdiv(num_tokens, ROWS), tl.cdiv(width, COLUMNS)
    item = tl.program_id(0)
    rows, ranks = _load_rows(tokens_ptr, ranks_ptr, item, blocks, num_tokens, width, stride, ROWS, COLUMNS)
    scales = _load_scales(scales_ptr, item // blocks, num_tokens, num_scales, ROWS, SCALES)
    while item < tiles * blocks:
        # loaded before the stores of this item, so that stores and loads are in flight at the same time
        following = item + tl.num_programs(0)
        next_rows, next_ranks = _load_rows(
            tokens_ptr, ranks_ptr, following, blocks, num_tokens, width, stride, ROWS, COLUMNS
        )
        next_scales = _load_scales(scales_ptr, following // blocks, num_tokens, num_scales, ROWS, SCALES)
        slots = RANK * num_tokens + ((item // blocks) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        columns = (item % blocks) * COLUMNS + tl.arange(0, COLUMNS)
        each = tl.arange(0, SCALES)
        for step in tl.static_range(NUM_RANKS):
            # each rank starts with its successor, so that the ranks do not all write to the same peer
            peer = (RANK + 1 + step) % NUM_RANKS
            needed = ((ranks >> peer) & 1) > 0
            into = tl.load(addresses_ptr + peer).to(tl.pointer_type(token_like_ptr.dtype.element_ty))
            into = tl.multiple_of(into, 16)
            into = into + slots[:, None] * width + columns[None, :]
            tl.store(into, rows, mask=needed[:, None] & (columns < width)[None, :])
            if scales_ptr is not None:
                into = tl.load(addresses_ptr + 5 * NUM_RANKS + peer).to(tl.pointer_type(scales_ptr.dtype.element_ty))
                into = into + slots[:, None] * num_scales + each[None, :]
                tl.store(into, scales, mask=needed[:, None] & ((each < num_scales) & (item % blocks == 0))[None, :])
        item = following
        rows, ranks, scales = next_rows, next_ranks, next_scales
    _signal_after_last_program(addresses_ptr, epoch_ptr, RANK, NUM_RANKS, STRIDE)


@triton.jit
def _load_rows(
    tokens_ptr, ranks_ptr, item, blocks, num_tokens, width, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Loads (columns of a few tokens, bit mask of the ranks that need each token, 0 beyond the last token)."""
    tokens = (item // blocks) * ROWS + tl.arange(0, ROWS)
    columns = (item % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    inside = tokens < num_tokens
    ranks = tl.load(ranks_ptr + tokens, mask=inside, other=0)
    mask = inside[:, None] & (columns < width)[None, :]
    rows = tl.load(tokens_ptr + tokens.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    return rows, ranks


@triton.jit
def _load_scales(scales_ptr, tile, num_tokens, num_scales, ROWS: tl.constexpr, SCALES: tl.constexpr):
    """Scales [ROWS, SCALES] of a few tokens, from a matrix [num_scales, num_tokens]; 0 without scales."""
    if scales_ptr is None:
        return tl.zeros((ROWS, SCALES), tl.float32)
    else:
        tokens, each = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, SCALES)
        mask = (tokens < num_tokens)[:, None] & (each < num_scales)[None, :]
        return tl.load(scales_ptr + each.to(tl.int64)[None, :] * num_tokens + tokens[:, None], mask=mask, other=0)


@triton.jit
def _mark_ranks(
    ids_ptr, owner_ptr, ranks_ptr, num_tokens,
    NUM_RANKS: tl.constexpr, TOPK: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    choices = tl.arange(0, CHOICES)
    given = (tokens < num_tokens)[:, None] & (choices < TOPK)[None, :]
    ids = tl.load(ids_ptr + tokens.to(tl.int64)[:, None] * TOPK + choices[None, :], mask=given, other=-1)
    ranks = tl.zeros((BLOCK,), dtype=tl.int32)
    for peer in tl.static_range(NUM_RANKS):
        owned = tl.load(owner_ptr + ids * NUM_RANKS + peer, mask=ids >= 0, other=0)
        ranks |= tl.max(owned.to(tl.int32), axis=1) << peer
    tl.store(ranks_ptr + tokens, ranks, mask=tokens < num_tokens)


@triton.jit
def _push_sums(
    rows_ptr, positions_ptr, values_ptr, addresses_ptr, acknowledged_ptr, epoch_ptr, missing_ptr,
    num_tokens, width, stride, timeout_ns, token_like_ptr, value_like_ptr,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, TOPK: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, IS_SUMMED: tl.constexpr, WITH_VALUES: tl.constexpr, STRIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(epoch_ptr)
    _wait(acknowledged_ptr, epoch, missing_ptr, timeout_ns, NUM_RANKS, STRIDE, INTERPRETED)
    blocks = tl.cdiv(width, COLUMNS)
    num_items = tl.cdiv(num_tokens, ROWS) * NUM_RANKS * blocks
    item = tl.program_id(0)
    sums, positions = _sum_rows(
        rows_ptr, positions_ptr, item, blocks, num_tokens, width, stride,
        RANK, NUM_RANKS, TOPK, CHOICES, ROWS, COLUMNS, IS_SUMMED,
    )  # fmt: skip
    while item < num_items:
        following = item + tl.num_programs(0)
        next_sums, next_places = _sum_rows(
            rows_ptr, positions_ptr, following, blocks, num_tokens, width, stride,
            RANK, NUM_RANKS, TOPK, CHOICES, ROWS, COLUMNS, IS_SUMMED,
        )  # fmt: skip
        peer, tokens, columns = _place_of(item, blocks, RANK, NUM_RANKS, ROWS, COLUMNS)
        slots = RANK * num_tokens + tokens.to(tl.int64)
        needed = tl.max(positions, axis=1) >= 0
        into = tl.load(addresses_ptr + peer).to(tl.pointer_type(token_like_ptr.dtype.element_ty))
        into = tl.multiple_of(into, 16)
        into = into + slots[:, None] * width + columns[None, :]
        stored = sums.to(token_like_ptr.dtype.element_ty)
        tl.store(into, stored, mask=needed[:, None] & (columns < width)[None, :])
        if WITH_VALUES:
            choices = tl.arange(0, CHOICES)
            given = (peer * num_tokens + tokens.to(tl.int64))[:, None] * TOPK + choices[None, :]
            filled = (positions >= 0) & ((item // NUM_RANKS) % blocks == 0)
            values = tl.load(values_ptr + given, mask=filled, other=0.0)
            values_into = tl.load(addresses_ptr + 2 * NUM_RANKS + peer)
            values_into = values_into.to(tl.pointer_type(value_like_ptr.dtype.element_ty))
            values_into = values_into + slots[:, None] * TOPK + choices[None, :]
            tl.store(values_into, values.to(value_like_ptr.dtype.element_ty), mask=filled)
        item = following
        sums, positions = next_sums, next_places
    _signal_after_last_program(addresses_ptr, epoch_ptr, RANK, NUM_RANKS, STRIDE)


@triton.jit
def _place_of(
    item, blocks, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Returns (peer, tokens, columns) of a work item. Neighbouring programs write to different peers."""
    peer = (RANK + 1 + item % NUM_RANKS) % NUM_RANKS
    tokens = (item // (NUM_RANKS * blocks)) * ROWS + tl.arange(0, ROWS)
    columns = ((item // NUM_RANKS) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    return peer, tokens, columns


@triton.jit
def _sum_rows(
    rows_ptr, positions_ptr, item, blocks, num_tokens, width, stride,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, TOPK: tl.constexpr, CHOICES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, IS_SUMMED: tl.constexpr,
):  # fmt: skip
    """Returns (sums [ROWS, COLUMNS] of the expert rows of ROWS tokens, indices of these rows [ROWS, CHOICES], -1 for
    no row). If IS_SUMMED, the input already has the sum of every token."""
    peer, tokens, columns = _place_of(item, blocks, RANK, NUM_RANKS, ROWS, COLUMNS)
    inside = tokens < num_tokens
    gathered = peer * num_tokens + tokens.to(tl.int64)
    choices = tl.arange(0, CHOICES)
    given = inside[:, None] & (choices < TOPK)[None, :]
    positions = tl.load(positions_ptr + gathered[:, None] * TOPK + choices[None, :], mask=given, other=-1)
    filled = (columns < width)[None, :]
    if IS_SUMMED:
        mask = inside[:, None] & filled
        total = tl.load(rows_ptr + gathered[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    else:
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for choice in tl.static_range(TOPK):
            row = tl.load(positions_ptr + gathered * TOPK + choice, mask=inside, other=-1)
            mask = (row >= 0)[:, None] & filled
            total += tl.load(rows_ptr + row[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    return total, positions


@triton.jit
def _sum_partials(
    ids_ptr, owner_ptr, slots_ptr, value_slots_ptr, sums_ptr, values_ptr, num_tokens, width,
    NUM_RANKS: tl.constexpr, TOPK: tl.constexpr, CHOICES: tl.constexpr, COLUMNS: tl.constexpr,
    WITH_VALUES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    choices = tl.arange(0, CHOICES)
    ids = tl.load(ids_ptr + token * TOPK + choices, mask=choices < TOPK, other=-1)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    values = tl.zeros((CHOICES,), dtype=tl.float32)
    for peer in tl.static_range(NUM_RANKS):
        owned = tl.load(owner_ptr + ids * NUM_RANKS + peer, mask=ids >= 0, other=0).to(tl.int32)
        needed = tl.max(owned, axis=0) > 0
        slot = peer * num_tokens + token
        total += tl.load(slots_ptr + slot * width + columns, mask=(columns < width) & needed, other=0.0).to(tl.float32)
        if WITH_VALUES:
            values += tl.load(value_slots_ptr + slot * TOPK + choices, mask=owned > 0, other=0.0)
    tl.store(sums_ptr + token * width + columns, total.to(sums_ptr.dtype.element_ty), mask=columns < width)
    if WITH_VALUES:
        if tl.program_id(1) == 0:
            tl.store(values_ptr + token * TOPK + choices, values, mask=choices < TOPK)


@triton.jit
def _wait_for_arrival(
    arrived_ptr, epoch_ptr, missing_ptr, timeout_ns,
    NUM_RANKS: tl.constexpr, STRIDE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    _wait(arrived_ptr, tl.load(epoch_ptr), missing_ptr, timeout_ns, NUM_RANKS, STRIDE, INTERPRETED)


@triton.jit
def _acknowledge(addresses_ptr, epoch_ptr, RANK: tl.constexpr, NUM_RANKS: tl.constexpr, STRIDE: tl.constexpr):
    epoch = tl.load(epoch_ptr)
    for peer in tl.static_range(NUM_RANKS):
        flags_ptr = tl.load(addresses_ptr + 4 * NUM_RANKS + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags_ptr + RANK * STRIDE, epoch, sem="release", scope="sys")
