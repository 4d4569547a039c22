"""Base class of modules whose GEMMs may have quantised operands."""

from torch import nn

from megatron_moe.parallel.parameter import Parameter
from megatron_moe.precision.linear_quantizer import LinearQuantizer


class QuantizedModule(nn.Module):
    """Module with one weight, or one stack of weights, that GEMMs multiply."""

    weight: Parameter | None
    """Weight of the module; None if the caller of `forward` passes it."""
    quantizer: LinearQuantizer | None
    """Quantizer of the FP8 or FP4 operands of the GEMMs; None means that they use the dtype of the weight."""

    def _set_weight(self, weight: Parameter | None, quantizer: LinearQuantizer | None) -> None:
        """Sets the weight and its quantizer, whose state becomes buffers of the module. Called by the constructor."""
        self.weight = weight
        self.quantizer = quantizer
        if quantizer is None:
            return
        for name, tensor in quantizer.state.items():
            self.register_buffer(name, tensor)
        if weight is not None:
            weight.stored = quantizer.new_storage(weight)


def quantizers_of(model: nn.Module) -> list[LinearQuantizer]:
    modules = (module for module in model.modules() if isinstance(module, QuantizedModule))
    return [module.quantizer for module in modules if module.quantizer is not None]


def quantizers_by_weight(model: nn.Module) -> dict[nn.Parameter, LinearQuantizer]:
    """Maps the weight of each module that has one to its quantizer."""
    modules = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    return {
        module.weight: module.quantizer
        for module in modules
        if module.quantizer is not None and module.weight is not None
    }
