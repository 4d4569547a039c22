"""Transforms between the parameters of mixers with linear attention and their Hugging Face tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_moe.checkpoint.huggingface.weight_map import Transform

FILTERS = Transform(lambda tensors: tensors[0].squeeze(1), lambda tensor: [tensor.unsqueeze(1)])
"""Filters of the short convolution: Hugging Face [C, 1, K] <-> this program's [C, K]."""


BY_HEAD = Transform(lambda tensors: tensors[0].flatten(), lambda tensor: [tensor.view(1, 1, -1, 1)])
"""One number per head: Hugging Face [1, 1, N, 1] <-> this program's [N]."""


def filters_by_section(*sizes: int) -> Transform:
    """Separate filters of q, k and v, each [C, 1, K] <-> this program's [3 C, K]. `sizes`: number of channels of
    each."""
    return Transform(
        lambda tensors: torch.cat(list(tensors)).squeeze(1), lambda tensor: list(tensor.unsqueeze(1).split(sizes))
    )


def by_key_head(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> Transform:
    """Qwen3-Next's `in_proj_qkvz` and `in_proj_ba` <-> this program's rows q, k, v, z, beta, decay.

    Rows of the Hugging Face tensors are ordered by key head: the head's q and k, then v and z of its value heads
    (`in_proj_ba`: their beta and decay).
    """
    values = value_heads // key_heads
    widths = ((key_dim, key_dim, values * value_dim, values * value_dim), (values, values))

    def from_hf(tensors: Sequence[Tensor]) -> Tensor:
        rows = []
        for tensor, parts in zip(tensors, widths, strict=True):
            rows += [part.flatten(0, 1) for part in tensor.unflatten(0, (key_heads, -1)).split(parts, dim=1)]
        return torch.cat(rows)

    def to_hf(tensor: Tensor) -> list[Tensor]:
        sizes = [key_heads * width for parts in widths for width in parts]
        q, k, v, z, beta, decay = (part.unflatten(0, (key_heads, -1)) for part in tensor.split(sizes))
        return [torch.cat(parts, dim=1).flatten(0, 1) for parts in ((q, k, v, z), (beta, decay))]

    return Transform(from_hf, to_hf)


def by_section(*sizes: int) -> Transform:
    """Qwen3.5's separate projections of q, k and v together, z, beta and decay <-> this program's rows. `sizes`: number
    of rows of each."""
    return Transform(lambda tensors: torch.cat(list(tensors)), lambda tensor: list(tensor.split(sizes)))
