"""Selects the quantizer of every linear layer of a model from the number formats of a run."""

from fnmatch import fnmatchcase
from typing import NamedTuple

import torch

from megatron_moe.config.precision import LinearRole, LowPrecisionConfig, PrecisionConfig, quantization_recipe
from megatron_moe.precision.linear_quantizer import DelayedScaling, LinearQuantizer, Quantizers


class LinearQuantizers(NamedTuple):
    """Creates the quantizers of the linear layers in one module of a model, by the layers' names and roles.

    The recipe applies to all linear layers that are constructed with a role, except the first and last decoder layers
    that it excludes, and the output layer without `LowPrecisionConfig.output_layer`. Patterns of
    `PrecisionConfig.module_precision` override it for single layers.
    """

    precision: PrecisionConfig
    kernels: Quantizers | None
    """Ops of the quantizers; None only if `precision` has no recipe."""
    device: torch.device
    num_decoder_layers: int
    path: str = ""
    """Global name of the module, whose layers' names are appended."""
    layer: int | None = None
    """Index of the transformer layer to which the module belongs; None outside layers. Layers from `num_decoder_layers`
    on belong to multi-token prediction."""

    def for_submodule(self, name: str, layer: int | None = None) -> "LinearQuantizers":
        """Returns the `LinearQuantizers` of the submodule `name`. `layer`: index of the transformer layer if the
        submodule is one."""
        return self._replace(path=self._join(name), layer=self.layer if layer is None else layer)

    def new_quantizer(
        self,
        role: LinearRole,
        name: str,
        *,
        saves_input: bool = False,
        common_input: bool = False,
        experts: tuple[int, int] | None = None,
    ) -> LinearQuantizer | None:
        """Quantizer of the linear layer `name` of this module; None if its GEMMs use the dtype of the parameters.

        Args:
            saves_input: the layer's input is saved for backward in any case, recomputed, or stored in pages, so that
                the layer saves it instead of a columnwise copy.
            common_input: another layer reads the same input, so that a columnwise copy is worth its memory only if
                both can share it.
            experts: (number of experts of the model, first expert of this rank) for a stack of layers; None for one
                layer.
        """
        config = self._config(role, self._join(name))
        if config is None:
            return None
        assert self.kernels is not None, "a recipe without kernels"
        module = "experts" if role == "expert_latent" else role
        in_low_precision = module == "head" or module in config.activation_modules
        num_experts, first = experts or (None, 0)
        is_delayed = quantization_recipe(config.recipe).has_history
        return LinearQuantizer(
            config.of_experts if role == "experts" else config,
            self.kernels,
            name=self._join(name),
            save_input=saves_input or not in_low_precision or (common_input and config.fused_block is None),
            delayed=DelayedScaling(config, self.device, num_experts, first) if is_delayed else None,
            device=self.device,
            stores_weight=self.precision.low_precision_params,
        )

    def _config(self, role: LinearRole, name: str) -> LowPrecisionConfig | None:
        config, layer = self.precision.low_precision, self.layer
        if config is None:
            return None
        if role == "head":
            return config if config.output_layer else None
        is_decoder = layer is not None and layer < self.num_decoder_layers
        found = config if not is_decoder or config.covers(layer or 0, self.num_decoder_layers) else None
        for override in self.precision.module_precision:
            if fnmatchcase(name, override.pattern):
                applies = override.in_params_dtype if found is None else override.in_low_precision
                return override.config if applies else found
        return found

    def _join(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


NO_QUANTIZERS = LinearQuantizers(PrecisionConfig(), None, torch.device("cpu"), 0)
"""Creates no quantizers, for a model without quantised GEMMs."""
