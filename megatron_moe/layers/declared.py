"""Parameters and linear layers of a component, from the declaration in its config."""

from collections.abc import Iterable
from typing import Any, cast

from megatron_moe.config.component import Component, ParamSpec
from megatron_moe.config.precision import LinearRole
from megatron_moe.config.tp_overlap import tp_overlap_layer_kind
from megatron_moe.layers.linear import Linear
from megatron_moe.layers.resources import ModelResources
from megatron_moe.parallel.parameter import Parameter, new_parameter
from megatron_moe.parallel.sequence_shards import layer_collectives


class DeclaredParameters:
    """Creates parameters and linear layers from `Component.parameters`, so that a module does not repeat shapes, shards
    and roles."""

    def __init__(self, specs: Iterable[ParamSpec], resources: ModelResources[Any]) -> None:
        self._resources = resources
        self._specs = {spec.name: spec for spec in specs}

    @classmethod
    def of(cls, config: Component, resources: ModelResources[Any]) -> "DeclaredParameters":
        """Creates this rank's shards of the parameters that the config of a component declares."""
        return cls(config.parameters(resources.ctx.config), resources)

    def parameter(self, name: str) -> Parameter:
        """Creates this rank's shard of a parameter."""
        return new_parameter(self._specs[name].shape, self._specs[name].meta, self._resources.ctx)

    def optional_parameter(self, name: str) -> Parameter | None:
        """This rank's shard of a parameter; None if it is not declared."""
        return self.parameter(name) if name in self._specs else None

    def linear(
        self, name: str, *, role: LinearRole | None = None, saves_input: bool = False, common_input: bool = False
    ) -> Linear:
        """Linear layer with the parameters `name`.weight and, if declared, `name`.bias.

        Args:
            role: role in FP8 and FP4 recipes; None selects `ParamSpec.low`.
            saves_input, common_input: see `LinearQuantizers.new_quantizer`.
        """
        weight, resources = self._specs[f"{name}.weight"], self._resources
        quantizer = None
        if weight.low:
            quantizer = resources.quantizers.new_quantizer(
                role or cast(LinearRole, weight.low), name, saves_input=saves_input, common_input=common_input
            )
        return Linear(
            self.parameter(f"{name}.weight"),
            self.optional_parameter(f"{name}.bias"),
            resources.ctx,
            resources.kernels,
            quantizer=quantizer,
            collectives=layer_collectives(resources.ctx, resources.peers, tp_overlap_layer_kind(weight)),
        )
