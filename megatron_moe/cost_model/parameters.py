"""Parameter counts, computed from a model's configuration without building it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron_moe.config.component import UNSHARDED, ParamSpec
from megatron_moe.config.costs import CostSum
from megatron_moe.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ParamCount(CostSum[int]):
    """Number of parameters by kind. Biases are counted with their weight matrix."""

    embedding: int = 0
    """Word embedding, including the rows that pad the vocabulary, and learned position embedding."""
    attention: int = 0
    """Attention projections, their biases and the sink logits."""
    dense_mlp: int = 0
    router: int = 0
    """Router weight and bias. The expert bias of auxiliary-loss-free balancing is a buffer and is not counted."""
    experts: int = 0
    shared: int = 0
    """Shared experts and their gates."""
    latent: int = 0
    """Projections into and out of the experts' latent space."""
    norms: int = 0
    """Layer norms, q and k norms, norms of MLA's compressed q and kv, and the final norm."""
    connections: int = 0
    """Projections, scales and biases of hyper-connections."""
    mtp: int = 0
    """Norms, projections and layers of multi-token prediction."""
    head: int = 0
    """Weight and bias of the output head. A weight that is tied to the embedding is not counted."""

    @property
    def without_mtp(self) -> "ParamCount":
        """Counts without multi-token prediction, as in published model sizes."""
        return replace(self, mtp=0)


def count_elements(parameters: Iterable[ParamSpec], *, active: bool = False) -> ParamCount:
    """Number of elements by kind. `active`: counts only the routed experts that process a token."""
    found: Counter[str] = Counter()
    for spec in parameters:
        found[spec.counted] += spec.active_elements if active else spec.elements
    return ParamCount(**found)


def count_parameters(model: ModelConfig, *, active: bool = False) -> ParamCount:
    """Parameter counts of the model. `active`: counts only the K routed experts per layer that process a token."""
    total = ParamCount()
    for layer, times in Counter(model.layers).items():
        total += count_elements(layer.parameters(UNSHARDED), active=active) * times
    ends = (*model.embedding_parameters(UNSHARDED), *model.final_norm_parameters(UNSHARDED), *model.head_parameters())
    if model.mtp is not None:
        depth = count_elements(model.mtp_parameters(UNSHARDED), active=active).total
        total += ParamCount(mtp=depth * model.mtp.num_distinct_layers)
    return total + count_elements(ends)
