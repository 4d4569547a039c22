"""Creates quantizers for modules that are built without a model."""

import torch

from megatron_moe.config.precision import LowPrecisionConfig, PrecisionConfig
from megatron_moe.kernels.ops import Kernels
from megatron_moe.precision.quantizer_factory import LinearQuantizers


def quantizers(config: LowPrecisionConfig, kernels: Kernels, device: str = "cpu") -> LinearQuantizers:
    """Creates a `LinearQuantizers` that applies this recipe to all linear layers."""
    precision = PrecisionConfig(low_precision=config)
    return LinearQuantizers(precision, kernels, torch.device(device), num_decoder_layers=0)
