"""Resources that all modules of a model share."""

from typing import Generic, NamedTuple, TypeVar

from megatron_moe.kernels.ops import Kernels
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.peer_ring import NO_PEERS, ContextPeers
from megatron_moe.parallel.sequence_shards import PeerShards
from megatron_moe.precision.quantizer_factory import NO_QUANTIZERS, LinearQuantizers

ExpertComm = TypeVar("ExpertComm")


class ModelResources(NamedTuple, Generic[ExpertComm]):
    """Resources that all modules of a model share. `ExpertComm`: type of the communication state, which only MoE layers
    know."""

    ctx: ParallelContext
    kernels: Kernels
    saved_tensors: SavedTensorPolicy
    expert_comm: ExpertComm | None = None
    """Communication state that the token dispatchers of all layers share. If None, every MoE layer creates its own."""
    quantizers: LinearQuantizers = NO_QUANTIZERS
    """Creates the quantizers of the linear layers of the module that receives these resources."""
    peers: PeerShards | None = None
    """Symmetric memory of the tensor-parallel ranks; None without `--tp-comm-overlap`."""
    context_peers: ContextPeers = NO_PEERS
    """Symmetric memory of the context-parallel ranks."""

    def for_submodule(self, name: str) -> "ModelResources[ExpertComm]":
        return self._replace(quantizers=self.quantizers.for_submodule(name))

    def for_layer_module(self, path: str, layer: int) -> "ModelResources":
        """Returns these resources for the module `path` of a transformer layer."""
        return self._replace(quantizers=self.quantizers.for_submodule(path, layer))
