"""Receive slots in symmetric memory through which the ranks of a group exchange the tokens of an MoE layer.

Exchanges of one channel are numbered by an epoch, which starts at 1. In every exchange each rank

1. pushes: waits until all ranks have acknowledged the epoch before, writes to the slots of other ranks, and then sets
   its arrival flag on every rank to the new epoch (`push_tokens`, `push_sums`);
2. waits for the arrival flags of all ranks (`wait_for_peers`);
3. reads its own slots;
4. acknowledges: sets its acknowledgement flag on every rank (`acknowledge`), after which the slots may be overwritten.

Epochs and flags are on the device and only grow, so a CUDA graph can replay an exchange. All ranks of the group run the
exchanges of a channel in the same order, and each finishes one before it starts the next.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.config.precision import OperandFormat
from megatron_moe.precision.quantized_tensor import QuantizedCopy, QuantizedTensor
from megatron_moe.precision.quantizers import element_dtype

FLAG_STRIDE = 32
"""int32 elements between two flags: 128 bytes, so that ranks do not write to the same cache line."""
_ALIGNMENT = 256

Allocate = Callable[[int], tuple[Tensor, ...]]
"""Function that allocates `num_bytes` zeros on every rank and returns the buffers of all ranks, uint8 [num_bytes]
each."""


@dataclass(frozen=True, kw_only=True)
class ChannelShape:
    """Sizes, dtype and format of a channel, which are the same on all ranks."""

    num_ranks: int
    num_tokens: int
    """Number of tokens T per rank."""
    width: int
    """Width H of a token."""
    topk: int
    dtype: torch.dtype
    """Dtype of tokens. Probabilities and their gradients have the dtype promote(fp32, dtype)."""
    fmt: OperandFormat | None = None
    """FP8 format, with one scale per block of a token, in which tokens are sent; None if they are sent in `dtype`."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the slots for tokens."""
        return self.dtype if self.fmt is None else element_dtype(self.fmt.element)

    @property
    def scales(self) -> tuple[int, torch.dtype]:
        """Number of scales per token and their dtype."""
        if self.fmt is None:
            return 0, torch.float32
        return -(-self.width // self.fmt.block[1]), torch.uint8 if self.fmt.scale == "e8m0" else torch.float32


@dataclass(frozen=True, kw_only=True, eq=False)
class PushChannel:
    """Slots and flags of all ranks of a group, P of them, seen from one rank."""

    shape: ChannelShape
    rank: int
    """Index of this rank in the group of P ranks."""
    tokens: tuple[Tensor, ...]
    """Per rank: [P, T, H], where [p, t] receives token t of rank p, or the partial sum of rank p for token t."""
    ids: tuple[Tensor, ...]
    """Per rank: int32 [P, T, K] expert ids."""
    probs: tuple[Tensor, ...]
    """Per rank: [P, T, K], probabilities or their gradients, in promote(fp32, dtype)."""
    arrived: tuple[Tensor, ...]
    """Per rank: int32 [P, FLAG_STRIDE]; [p, 0] is the last epoch that rank p has pushed."""
    acknowledged: tuple[Tensor, ...]
    """Per rank: int32 [P, FLAG_STRIDE]; [p, 0] is the last epoch that rank p has read."""
    scales: tuple[Tensor, ...]
    """Per rank: [P, T, blocks], scales of the tokens; no blocks if tokens are not quantised."""
    epoch: Tensor
    """int32 [2]: (epoch of the last push of this rank, number of finished programs of the current push)."""
    addresses: Tensor
    """int64 [6, P]: addresses of `tokens`, `ids`, `probs`, `arrived`, `acknowledged` and `scales` of all ranks."""
    late_rank_flag: Tensor
    """int32 scalar in memory that the host can read: 1 + the first rank that did not arrive within `timeout_s`, or 0.
    Pinned if the channel is on a GPU."""
    timeout_s: float
    num_programs: int | None
    """Thread blocks of a push; None means one per SM of the GPU."""

    @property
    def received(self) -> Tensor | QuantizedTensor:
        """Tokens or sums received from all ranks, [P * T, H]."""
        tokens_GH, fmt = self.tokens[self.rank].flatten(0, 1), self.shape.fmt
        if fmt is None:
            return tokens_GH
        scales = self.scales[self.rank].flatten(0, 1).T
        return QuantizedTensor(QuantizedCopy(tokens_GH, scales), None, fmt.block, self.shape.dtype)

    @property
    def received_ids(self) -> Tensor:
        """Expert ids received from all ranks, int32 [P * T, K]."""
        return self.ids[self.rank].flatten(0, 1)

    @property
    def received_probs(self) -> Tensor:
        """Probabilities or their gradients received from all ranks, [P * T, K]."""
        return self.probs[self.rank].flatten(0, 1)


def new_channel(
    shape: ChannelShape, rank: int, allocate: Allocate, timeout_s: float, num_programs: int | None
) -> PushChannel:
    """Allocates a channel. Collective over its group."""
    num, choices = shape.num_ranks, (shape.num_ranks, shape.num_tokens, shape.topk)
    wide = torch.promote_types(torch.float32, shape.dtype)
    specs: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((num, shape.num_tokens, shape.width), shape.stored_dtype),
        (choices, torch.int32),
        (choices, wide),
        ((num, FLAG_STRIDE), torch.int32),
        ((num, FLAG_STRIDE), torch.int32),
        ((num, shape.num_tokens, shape.scales[0]), shape.scales[1]),
    ]
    starts, num_bytes = [], 0
    for size, dtype in specs:
        starts.append(num_bytes)
        num_bytes += -(-_num_bytes(size, dtype) // _ALIGNMENT) * _ALIGNMENT
    parts = allocate(num_bytes)
    views = [
        tuple(part[start : start + _num_bytes(size, dtype)].view(dtype).view(size) for part in parts)
        for start, (size, dtype) in zip(starts, specs, strict=True)
    ]
    tokens, ids, probs, arrived, acknowledged, scales = views
    device = parts[rank].device
    on_gpu = device.type == "cuda"
    return PushChannel(
        shape=shape,
        rank=rank,
        tokens=tokens,
        ids=ids,
        probs=probs,
        arrived=arrived,
        acknowledged=acknowledged,
        scales=scales,
        epoch=torch.zeros(2, dtype=torch.int32, device=device),
        addresses=torch.tensor([[_address(each) for each in view] for view in views], device=device),
        late_rank_flag=torch.zeros((), dtype=torch.int32, device="cpu" if on_gpu else device, pin_memory=on_gpu),
        timeout_s=timeout_s,
        num_programs=num_programs,
    )


def _num_bytes(size: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(size).numel() * dtype.itemsize


def _address(tensor: Tensor) -> int:
    return 0 if tensor.device.type == "meta" else tensor.data_ptr()
