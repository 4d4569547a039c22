"""Costs of layers and pipeline stages in FLOPs: GEMMs of one sequence, forward and backward (`cost_model/flops.py`).

The cost of the loss includes the logits of every depth of multi-token prediction. The embedding costs nothing.
"""

from dataclasses import dataclass

from megatron_moe.config.model import LayerConfig, ModelConfig
from megatron_moe.config.pipeline_layout import PipelineLayout, StageLayout
from megatron_moe.cost_model.flops import count_flops, count_layer_flops


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Costs of each decoder layer and of the embedding, MTP layers and loss, in any unit."""

    layers: tuple[float, ...]
    embedding: float = 0.0
    mtp: float = 0.0
    """Cost of all MTP layers together."""
    loss: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.layers) + self.embedding + self.mtp + self.loss

    def of_stage(self, stage: StageLayout) -> float:
        ends = self.embedding * stage.embedding + self.mtp * (stage.num_mtp > 0) + self.loss * stage.loss
        return ends + sum(self.layers[layer] for layer in stage.layers)


def flop_costs(model: ModelConfig, seq_length: int, *, with_weights: bool = False) -> StageCosts:
    """GEMM FLOPs of one sequence, forward and backward, for each layer, all MTP layers and the loss. `with_weights`:
    those of GEMMs with weight matrices."""

    def cost(layer: LayerConfig) -> float:
        flops = count_layer_flops(layer, seq_length)
        return float(flops.total - (flops.core_attention + flops.indexer if with_weights else 0))

    whole, of_layer = count_flops(model, 1, seq_length), {layer: cost(layer) for layer in set(model.layers)}
    without = count_layer_flops(model.mtp_layer, seq_length).total - cost(model.mtp_layer)
    return StageCosts(
        layers=tuple(of_layer[layer] for layer in model.layers),
        mtp=float(whole.mtp - model.num_mtp * without),
        loss=float(whole.head),
    )


def cost_table(layout: PipelineLayout, costs: StageCosts) -> str:
    """Table of stages (rank, chunk, contents, share of the total cost) and a line about the most expensive rank."""
    lines = layout.table().splitlines()
    shares = [costs.of_stage(stage) / costs.total for stage in layout.stages]
    width = max(map(len, lines))
    rows = [f"{lines[0]:<{width}}   cost"]
    rows += [f"{line:<{width}} {share:>6.1%}" for line, share in zip(lines[1:], shares, strict=True)]
    ranks = [sum(shares[rank :: layout.pp]) for rank in range(layout.pp)]
    most, ratio = ranks.index(max(ranks)), max(ranks) * layout.pp
    rows.append(f"rank {most} has the highest cost: {ratio:.3f} times the mean over {layout.pp} ranks")
    return "\n".join(rows)
