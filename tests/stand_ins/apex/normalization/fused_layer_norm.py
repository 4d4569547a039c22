"""Stand-in for apex's norms, computed by torch."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def fused_rms_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    return F.rms_norm(input.float(), tuple(normalized_shape), weight.float(), eps).to(input.dtype)


def fused_layer_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Sequence[int],
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    return F.layer_norm(input.float(), tuple(normalized_shape), weight.float(), bias.float(), eps).to(input.dtype)
