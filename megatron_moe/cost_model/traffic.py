"""Communication volume of a rank in one step, by process group, and its time without overlap.

Volumes are bytes sent by one rank. In an all-gather or reduce-scatter of a tensor of N bytes over n ranks, each rank
sends N (n - 1) / n bytes; in an all-reduce, twice as many. docs/communication-volume.md derives the formulas.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType

from megatron_moe.config.costs import ActivationSizes, bytes_per_element
from megatron_moe.config.fsdp import FSDPConfig
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.param_meta import Grid
from megatron_moe.config.precision import LowPrecisionConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.config.tp_overlap import overlapped_gemms
from megatron_moe.config.transport import SentCopies, TokenExchange
from megatron_moe.cost_model.activations import activation_sizes
from megatron_moe.cost_model.expert_load import LoadSpread, RandomRouting, token_copies
from megatron_moe.cost_model.hardware import GPU, LINK_EFFICIENCY
from megatron_moe.cost_model.placement import Placement
from megatron_moe.cost_model.shards import (
    LocalElements,
    elements_of_rank,
    layer_recipes,
    quantizable_elements,
    stored_bytes,
)
from megatron_moe.cost_model.weight_gathers import unit_gathers

_PROBABILITY = 4
"""Bytes of the fp32 routing probability that is sent with each row."""
_ID = 4
"""Bytes of an expert id."""
_SHARDED = MappingProxyType({"dense_mlp": "MLP", "shared": "shared experts"})
"""Field of `ParamCount` -> module in reports, if they differ."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One kind of communication of one rank in one step."""

    group: str
    what: str
    bytes: float
    """Bytes sent by the rank."""
    network_bytes: float
    """Part of `bytes` that is sent outside the rank's NVLink domain."""
    hidden: bool = False
    """True if the communication overlaps with computation."""

    def repeated(self, times: int) -> "Traffic":
        return replace(self, bytes=self.bytes * times, network_bytes=self.network_bytes * times)

    def seconds(self, gpu: GPU) -> float:
        """Time in seconds at the bandwidth of large collectives; NVLink and network transfers run concurrently."""
        near = (self.bytes - self.network_bytes) / gpu.nvlink
        return max(near, self.network_bytes / gpu.network) / LINK_EFFICIENCY


def ring_traffic(size: int, num_bytes: float, placement: Placement, **names: str) -> Traffic:
    """Traffic of one rank in a ring all-gather or reduce-scatter of a tensor of `num_bytes` over `size` ranks. The ring
    leaves each NVLink domain once; the network ports of all ranks of the domain share this traffic equally."""
    sent = num_bytes * (size - 1) / size
    return Traffic(bytes=sent, network_bytes=_crossing_share(placement) * sent, **names)  # type: ignore[arg-type]


def _crossing_share(placement: Placement) -> float:
    """Fraction of ring traffic that leaves the NVLink domain: 1 / (ranks per domain), or 0 inside a single domain."""
    domains = placement.domain_span[1]
    return domains / placement.size if domains > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class ExpertTraffic:
    """Statistics of the token dispatch of one MoE layer and microbatch, per rank unless noted."""

    ranks: LoadSpread
    """Number of ranks that hold at least one of a token's selected experts; may include the token's own rank."""
    domains: LoadSpread
    """Number of NVLink domains with at least one of a token's selected experts; may include the token's own domain."""
    rows_sent: float
    """Number of rows sent to other ranks if each token is sent once per selected expert."""
    copies_sent: float
    """Number of rows sent to other ranks if each token is sent once per destination rank."""
    copies_between_domains: float
    """Number of rows sent to other NVLink domains if each token is sent once per destination domain."""
    rows_taken: LoadSpread
    """Number of rows that one rank's experts receive, including rows of the rank's own tokens."""
    row_bytes: float
    """Bytes per row in the activation format, including the routing probability."""
    low_row_bytes: float
    """Bytes per row in FP8, including scales and routing probability."""


def expert_traffic(
    exchange: TokenExchange, num_ranks: int, num_domains: int, sizes: ActivationSizes, *, block: int = 128
) -> ExpertTraffic:
    """Statistics of the token dispatch over `num_ranks` expert-parallel ranks in `num_domains` NVLink domains, with
    uniformly random routing. `block`: channels per FP8 scale, 128 (4-byte scales) or 32 (MXFP8, 1-byte scales)."""
    choice, tokens = RandomRouting.of(exchange), sizes.residual
    ranks, domains = choice.destinations(num_ranks), choice.destinations(num_domains)
    width = exchange.width
    scale = 4 if block == 128 else 1
    other = (num_ranks - 1) / num_ranks
    return ExpertTraffic(
        ranks=ranks,
        domains=domains,
        rows_sent=tokens * exchange.topk * other,
        copies_sent=tokens * ranks.mean * other,
        copies_between_domains=tokens * domains.mean * (num_domains - 1) / num_domains,
        rows_taken=choice.rows(num_ranks, num_ranks * tokens),
        row_bytes=width * sizes.activation_itemsize + _PROBABILITY,
        low_row_bytes=width + scale * -(-width // block) + _PROBABILITY,
    )


@dataclass(frozen=True)
class Communication:
    """Computes the communication volume of a plan's ranks in one step."""

    plan: RunPlan
    placements: dict[str, Placement]
    """Process group name -> placement."""

    def of_rank(self, rank: int) -> list[Traffic]:
        """Communication of one rank in one step, by process group and purpose. `rank`: the pipeline rank."""
        found: dict[tuple[str, str], Traffic] = {}
        for each in (*self._layers(rank), *self._ends(rank), *self._data_parallel(rank), *self._pipeline(rank)):
            at = (each.group, each.what)
            if at in found:
                found[at] = replace(
                    found[at],
                    bytes=found[at].bytes + each.bytes,
                    network_bytes=found[at].network_bytes + each.network_bytes,
                )
            elif each.bytes:
                found[at] = each
        return list(found.values())

    def exchange(self, layer: LayerConfig, low: LowPrecisionConfig | None = None) -> TokenExchange | None:
        """Exchange of the layer's tokens; None if there is none. `low`: FP8 or FP4 recipe of the layer's experts; None
        if they have none."""
        return layer.feed_forward.exchange(self.plan.parallel, self._sizes, low)

    def expert_traffic(self, exchange: TokenExchange) -> ExpertTraffic:
        """Statistics of the token dispatch of one layer and microbatch, with uniformly random routing."""
        placement = self.placements["ep"]
        low = self.plan.precision.low_precision
        block = low.fused_block or 128 if low is not None else 128
        return expert_traffic(exchange, placement.size, placement.domain_span[1], self._sizes, block=block)

    @property
    def _sizes(self) -> ActivationSizes:
        return activation_sizes(self.plan)

    def _layers(self, rank: int) -> Iterator[Traffic]:
        for (layer, recipe), count in Counter(layer_recipes(self.plan, rank)).items():
            times = count * self.plan.num_microbatches
            for each in (*self._tensor_parallel(layer), *self._context_parallel(layer), *self._experts(layer, recipe)):
                yield each.repeated(times)

    def _tensor_parallel(self, layer: LayerConfig) -> Iterator[Traffic]:
        """Yields the traffic of tensor-parallel linears. Without sequence parallelism, each linear has one all-reduce.
        With it, a column-parallel linear has an all-gather in forward, and an all-gather and a reduce-scatter in
        backward; a row-parallel linear has a reduce-scatter in forward and an all-gather in backward.
        `--tp-comm-overlap` overlaps them with GEMMs."""
        columns, rows, overlapped = Counter[str](), Counter[str](), Counter[str]()
        for spec in layer.parameters(self.plan.parallel):
            is_matrix = spec.meta.role == "matrix" and spec.meta.grid == "attention"
            if is_matrix and spec.meta.tp_dim is not None and not spec.reads_gathered:
                channels = spec.shape[1 - spec.meta.tp_dim]
                (rows if spec.meta.tp_dim else columns)[spec.counted] += channels
                overlapped[spec.counted] += channels * len(overlapped_gemms(spec, self.plan.parallel))
        gathered = {
            "attention": layer.mixer.gathered_channels(self.plan.parallel),
            "dense_mlp": layer.feed_forward.gathered_channels(self.plan.parallel),
        }
        for counted in {**columns, **rows}:
            what, other = _SHARDED.get(counted, counted), gathered.get(counted, 0)
            yield self._sharded_linears(what, columns[counted], rows[counted], other=other, less=overlapped[counted])
            hidden = self._passes(f"{what}, during GEMMs", overlapped[counted])
            yield replace(hidden, hidden=True)

    def _sharded_linears(self, what: str, columns: int, rows: int, *, other: int = 0, less: int = 0) -> Traffic:
        """Traffic of a module's tensor-parallel linears. `columns`: input channels of all column-parallel linears.
        `rows`: output channels of all row-parallel linears. `other`: channels that are gathered for core attention in
        forward only (MLA's shared rotated k, or q, k and v if ranks share query groups). `less`: channels, counted once
        per collective, that are not included."""
        if self.plan.parallel.sequence_parallel:
            passes = 3 * columns + 2 * (rows + other)
        else:
            passes = 2 * (columns + rows + other)
        return self._passes(what, passes - less)

    def _passes(self, what: str, channels: int) -> Traffic:
        """Traffic of collectives over tp for all positions. `channels`: their channels, an all-reduce counted twice."""
        size = float(self._sizes.inner * channels * self._sizes.activation_itemsize)
        return ring_traffic(self.plan.parallel.tp, size, self.placements["tp"], group="tp", what=what)

    def _context_parallel(self, layer: LayerConfig) -> Iterator[Traffic]:
        """Yields the traffic of the mixer between context-parallel ranks."""
        size = layer.mixer.context_parallel_traffic(self.plan.parallel, self._sizes)
        far = size * _crossing_share(self.placements["cp"])
        yield Traffic(group="cp", what="keys and values", bytes=size, network_bytes=far, hidden=True)

    def _experts(self, layer: LayerConfig, low: LowPrecisionConfig | None) -> Iterator[Traffic]:
        """Yields the traffic of the token dispatcher. `low`: FP8 or FP4 recipe of the layer's experts; None if they
        have none."""
        parallel, sizes, exchange = self.plan.parallel, self._sizes, self.exchange(layer, low)
        if exchange is None:
            return
        copies = exchange.transport.copies
        if copies is SentCopies.ALL_RANKS:
            yield from self._allgather_dispatch(exchange)
            return
        if copies is SentCopies.PER_HOST:
            yield from self._hierarchical_dispatch(exchange)
            return
        traffic, far = self.expert_traffic(exchange), 1 - self.placements["ep"].share_in_domain
        group, rows, crossing = "ep", traffic.rows_sent, traffic.rows_sent * far
        if copies is SentCopies.PER_RANK:  # one row to every rank that has a part of a selected expert
            ranks = parallel.ep * parallel.etp
            group = "ep" if parallel.etp == 1 else "etp_ep"
            receivers = ranks if exchange.transport.sends_unneeded else traffic.ranks.mean * parallel.etp
            rows = sizes.residual * receivers * (ranks - 1) / ranks
            crossing = min(rows, traffic.copies_between_domains)
        for what, fmt in zip(("dispatch: rows", "combine: results"), exchange.formats, strict=True):
            # forward and backward, one of which may be in FP8
            row_bytes = traffic.row_bytes + (traffic.row_bytes if fmt is None else traffic.low_row_bytes)
            sent, distant = rows * row_bytes, crossing * row_bytes
            yield Traffic(group=group, what=what, bytes=sent, network_bytes=distant, hidden=self.plan.pipeline.overlap)
        if exchange.clone_bytes:
            sent = exchange.clone_bytes
            yield Traffic(group=group, what="clones of experts", bytes=sent, network_bytes=sent * far)
        if copies is SentCopies.PER_CHOICE:
            gathered_rows = float(parallel.etp * sizes.residual * exchange.topk)
            size = gathered_rows * exchange.width * 2 * (sizes.activation_itemsize + sizes.internal_itemsize)
            yield ring_traffic(parallel.etp, size, self.placements["etp"], group="etp", what="rows and partial results")

    def _hierarchical_dispatch(self, exchange: TokenExchange) -> Iterator[Traffic]:
        """Yields the traffic between hosts, where a token is sent once per host, and within hosts, where it is sent
        once per rank. Ids and probabilities of all choices are sent with dispatched tokens, and the gradients of the
        probabilities with those of the tokens."""
        sizes, topk = self._sizes, exchange.topk
        copies = token_copies(exchange, self.plan.parallel)
        domains = self.placements["etp_ep"].domain_span[1]
        row, hidden = exchange.width * sizes.activation_itemsize, self.plan.pipeline.overlap
        for what, row_bytes in (
            ("dispatch", 2 * row + topk * (_ID + 2 * sizes.internal_itemsize)),
            ("combine", 2 * row),
        ):
            sent = copies.per_token * sizes.residual * row_bytes  # forward and backward
            between, far = sent * (1 - 1 / copies.num_hosts), sent * (1 - 1 / domains)
            yield Traffic(
                group="etp_ep", what=f"{what}: between hosts", bytes=between, network_bytes=far, hidden=hidden
            )
            within = copies.forwarded * sizes.residual * row_bytes * (1 - 1 / copies.ranks_per_host)
            yield Traffic(group="etp_ep", what=f"{what}: within hosts", bytes=within, network_bytes=0.0, hidden=hidden)

    def _allgather_dispatch(self, exchange: TokenExchange) -> Iterator[Traffic]:
        """Yields the traffic of the all-gather dispatcher. Forward all-gathers tokens (in the activation format) and
        reduce-scatters outputs. Backward does the reverse. Outputs and gradients are sent in fp32 or wider."""
        sizes, ranks = self._sizes, self.plan.parallel.ep * self.plan.parallel.etp
        elements = float(ranks * sizes.residual * exchange.width)
        placement = self.placements["etp_ep"]
        size = elements * (sizes.activation_itemsize + sizes.internal_itemsize)
        yield ring_traffic(ranks, size, placement, group="etp_ep", what="dispatch: tokens of all ranks")
        yield ring_traffic(
            ranks, 2 * elements * sizes.internal_itemsize, placement, group="etp_ep", what="combine: sums of all ranks"
        )

    def _ends(self, rank: int) -> Iterator[Traffic]:
        """Yields the tensor-parallel traffic of embeddings and heads, including those of MTP, on the rank's stages."""
        hidden = self.plan.model.hidden_size
        for stage in self.plan.layout.chunks(rank):
            for each, times in (
                (self._sharded_linears("embedding", 0, hidden), stage.embedding + stage.num_mtp),
                (self._sharded_linears("head", hidden, 0), stage.loss * (1 + self.plan.model.num_mtp)),
                (self._loss(), stage.loss * (1 + self.plan.model.num_mtp)),
                (self._mtp_projection(), stage.num_mtp),
            ):
                yield each.repeated(times * self.plan.num_microbatches)

    def _mtp_projection(self) -> Traffic:
        """Traffic of the projection [H, 2H] of every residual stream in one depth of multi-token prediction. Its output
        channels are gathered in forward and, with sequence parallelism, their gradients in backward."""
        hidden = self.plan.model.hidden_size * self.plan.model.residual.num_streams
        once = 0 if self.plan.parallel.sequence_parallel else hidden
        return self._sharded_linears("multi-token prediction", 2 * hidden, 0, other=hidden, less=once)

    def _loss(self) -> Traffic:
        """Traffic of the vocabulary-parallel loss: an all-gather of three numbers per token in forward."""
        tp, sizes = self.plan.parallel.tp, self._sizes
        return ring_traffic(
            tp, float(3 * tp * sizes.inner * sizes.internal_itemsize), self.placements["tp"], group="tp", what="loss"
        )

    def _data_parallel(self, rank: int) -> Iterator[Traffic]:
        """Yields the data-parallel traffic: an all-reduce of the gradients or, with ZeRO-1, a reduce-scatter of the
        gradients and an all-gather of the weights. `_sharded` yields that of ZeRO-2 and ZeRO-3."""
        plan, parallel = self.plan, self.plan.parallel
        held, low = elements_of_rank(plan.model, plan.layout, rank, parallel), LocalElements()
        config, stored = plan.data_parallel, stored_bytes(plan.precision)
        if plan.precision.low_precision_params:
            low = quantizable_elements(plan, rank)
        for group, size, elements, of_low, names in (
            ("dp_cp", parallel.dp * parallel.cp, held.attention, low.attention, "all but experts"),
            ("edp", parallel.edp, held.expert, low.expert, "experts"),
        ):
            placement = self.placements[group]
            grads = float(elements * bytes_per_element(plan.precision.grads))
            weights = float((elements - of_low) * bytes_per_element(plan.precision.params)) + of_low * stored.gathered
            amax = 2 * of_low * stored.amax  # the magnitudes of weights stored in FP8 or FP4 are all-reduced
            if config.fsdp is not None:
                yield from self._sharded(config.fsdp, rank, group, size, elements, weights, amax, names)
                continue
            passes = 1 if config.use_distributed_optimizer else 2
            reduced = ring_traffic(size, passes * grads, placement, group=group, what=f"gradients: {names}")
            yield replace(reduced, hidden=config.overlap_grad_reduce)
            if config.use_distributed_optimizer:
                gathered = ring_traffic(size, weights + amax, placement, group=group, what=f"weights: {names}")
                yield replace(gathered, hidden=config.overlap_param_gather)

    def _sharded(
        self,
        config: FSDPConfig,
        rank: int,
        group: str,
        size: int,
        elements: int,
        weights: float,
        amax: float,
        names: str,
    ) -> Iterator[Traffic]:
        """Yields the traffic of ZeRO-2 and ZeRO-3 in one step. `weights`: bytes of all weights as they are stored.
        `amax`: bytes that are reduced for the scales of weights stored in FP8 or FP4.

        Gradients are reduce-scattered in every microbatch and, with several optimizer instances, summed over the
        replicas once per step; replicas that divide the optimizer state gather new weights from each other. ZeRO-3
        gathers the weights of layers whenever they are not in memory, and those of embedding and head once per step.
        ZeRO-2 gathers all weights once per step.
        """
        plan, times = self.plan, self.plan.num_microbatches
        instances = plan.parallel.num_distributed_optimizer_instances
        placement, precision = self.placements[group], plan.precision
        shards = max(size // instances, 1)
        comm = bytes_per_element(precision.grads if config.grad_comm is None else config.grad_comm)
        grads = ring_traffic(shards, float(elements * comm * times), placement, group=group, what=f"gradients: {names}")
        # replicas sum their shards after the last microbatch: all-reduce, or reduce-scatter and gather of new weights
        is_divided = config.outer_dp_sharding_strategy == "optim"
        of_replicas = (instances - 1) / instances / shards
        outer = elements * bytes_per_element(precision.grads) * of_replicas * (1 if is_divided else 2)
        new_weights = weights * of_replicas if is_divided else 0.0
        yield replace(grads, bytes=grads.bytes + outer, network_bytes=grads.network_bytes + outer, hidden=True)
        if config.shards_weights and elements:
            grid: Grid = "expert" if group == "edp" else "attention"
            gathered = sum(number * times for number, times in unit_gathers(plan, rank, grid).values())
            weights = gathered * (weights / elements)
        sent = ring_traffic(shards, weights + amax, placement, group=group, what=f"weights: {names}")
        new_bytes = sent.bytes + new_weights, sent.network_bytes + new_weights
        yield replace(sent, bytes=new_bytes[0], network_bytes=new_bytes[1], hidden=True)

    def _pipeline(self, rank: int) -> Iterator[Traffic]:
        """Yields the pipeline traffic: hidden states to the next stage and their gradients to the previous stage."""
        model, layout, sizes = self.plan.model, self.plan.layout, self._sizes
        if layout.pp == 1:
            return
        # stages whose inputs this rank sends, and those whose gradients of the input it sends
        stages = [stage for own in range(rank, len(layout.stages), layout.pp) for stage in (own, own + 1)]
        inner = (stage for stage in stages if 0 < stage < len(layout.stages))
        sent = sum(layout.received_states(stage, model.residual.num_streams, model.num_mtp) for stage in inner)
        states = sent * self.plan.num_microbatches * sizes.residual
        size = float(states * model.hidden_size * sizes.activation_itemsize)
        crosses = self.placements["pp"].domain_span[1] > 1
        yield Traffic(group="pp", what="hidden states", bytes=size, network_bytes=size if crosses else 0.0, hidden=True)
