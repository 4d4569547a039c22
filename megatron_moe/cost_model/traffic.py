"""What a rank sends in one step, by group, and how long that takes if nothing else happens meanwhile.

Bytes are those that leave the rank. Of collectives over n ranks: all-gather and reduce-scatter of N bytes (N / n on
each rank) send N (n - 1) / n, an all-reduce twice that, whatever the algorithm. Formulas and their derivation are in
docs/communication-volume.md.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from megatron_moe.config.attention import (
    AttentionConfig,
    CoreAttentionConfig,
    MLAConfig,
)
from megatron_moe.config.model import LayerConfig
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.activations import ActivationSizes, num_bytes
from megatron_moe.cost_model.expert_load import LoadChoice, LoadSpread
from megatron_moe.cost_model.hardware import GPU, LINK_EFFICIENCY
from megatron_moe.cost_model.placement import Placement
from megatron_moe.cost_model.shards import held_by_rank, share_of_layer

_PROBABILITY = 4
"""Bytes of a row's probability and its place, which travel with it."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One kind of communication of one rank."""

    group: str
    what: str
    bytes: float
    """Sent by the rank in one step."""
    far: float
    """Of these, to ranks outside its NVLink domain."""
    hidden: bool = False
    """Other work goes on meanwhile, as far as there is any."""

    def seconds(self, gpu: GPU) -> float:
        """With NVLink and network at work together, at the rate that large collectives reach."""
        near = (self.bytes - self.far) / gpu.nvlink
        return max(near, self.far / gpu.network) / LINK_EFFICIENCY


def ring(size: int, num_bytes: float, placement: Placement, **names: str) -> Traffic:
    """An all-gather or a reduce-scatter of `num_bytes` in whole, around a ring. Where the group leaves an NVLink domain
    the ring crosses the network once per domain, and the ports of the ranks there share that."""
    sent = num_bytes * (size - 1) / size
    return Traffic(bytes=sent, far=_crossing_share(placement) * sent, **names)  # type: ignore[arg-type]


def _crossing_share(placement: Placement) -> float:
    """Of what goes around a ring, the share that passes the network port of one rank."""
    domains = placement.domains[1]
    return domains / placement.size if domains > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class ExpertTraffic:
    """Rows of one MoE layer and one microbatch on their way to experts, of one rank."""

    ranks: LoadSpread
    """Ranks that one token goes to, its own included."""
    domains: LoadSpread
    """NVLink domains that one token goes to, its own included."""
    rows_sent: float
    """Rows to other ranks: one per choice."""
    copies_sent: float
    """One copy per other rank that holds an expert of the token."""
    copies_far: float
    """One copy per other NVLink domain."""
    rows_taken: LoadSpread
    """Rows that one rank's experts take."""
    row_bytes: float
    """With its probability and place."""
    low_row_bytes: float
    """The same of a row in FP8, with its scales."""


class Destinations:
    """On how many ranks a token has experts; remembered, since many plans ask the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[LoadChoice, int], LoadSpread] = {}

    def of(self, choice: LoadChoice, num_parts: int) -> LoadSpread:
        """`LoadChoice.destinations`."""
        if (choice, num_parts) not in self._known:
            self._known[choice, num_parts] = choice.destinations(num_parts)
        return self._known[choice, num_parts]


def expert_traffic(
    config: MoEConfig,
    num_ranks: int,
    num_domains: int,
    sizes: ActivationSizes,
    *,
    block: int = 128,
    destinations: Destinations | None = None,
) -> ExpertTraffic:
    """Of a router under which all experts are equally likely. `block`: channels of a row that share a scale, of 4 bytes
    (1 x 128 blocks), or of 1 byte for the 32 of MXFP8."""
    choice, tokens, known = LoadChoice.of(config.router), sizes.residual, destinations or Destinations()
    ranks, domains = known.of(choice, num_ranks), known.of(choice, num_domains)
    width = config.experts.hidden_size
    scale = 4 if block == 128 else 1
    other = (num_ranks - 1) / num_ranks
    return ExpertTraffic(
        ranks=ranks,
        domains=domains,
        rows_sent=tokens * config.router.topk * other,
        copies_sent=tokens * ranks.mean * other,
        copies_far=tokens * domains.mean * (num_domains - 1) / num_domains,
        rows_taken=choice.rows(num_ranks, num_ranks * tokens),
        row_bytes=width * sizes.activation + _PROBABILITY,
        low_row_bytes=width + scale * (width // block) + _PROBABILITY,
    )


@dataclass(frozen=True)
class Communication:
    """Communication of the ranks of one pipeline stage."""

    plan: RunPlan
    placements: dict[str, Placement]
    """By name of a group."""
    num_microbatches: int
    destinations: Destinations = field(default_factory=Destinations)

    def of_rank(self, rank: int) -> list[Traffic]:
        """Everything that a rank of pipeline rank `rank` sends in a step."""
        found: dict[tuple[str, str], Traffic] = {}
        for each in (*self._layers(rank), *self._ends(rank), *self._data_parallel(rank), *self._pipeline(rank)):
            at = (each.group, each.what)
            if at in found:
                found[at] = replace(found[at], bytes=found[at].bytes + each.bytes, far=found[at].far + each.far)
            elif each.bytes:
                found[at] = each
        return list(found.values())

    def expert_traffic(self, config: MoEConfig) -> ExpertTraffic:
        """Of one layer and microbatch."""
        placement = self.placements["ep"]
        block = 32 if self.plan.precision.low == "mxfp8" else 128
        return expert_traffic(
            config,
            placement.size,
            placement.domains[1],
            self._sizes,
            block=block,
            destinations=self.destinations,
        )

    @property
    def _sizes(self) -> ActivationSizes:
        plan = self.plan
        return ActivationSizes.of(
            plan.parallel, plan.precision, micro=plan.batch.micro, seq_length=plan.data.seq_length
        )

    def _layers(self, rank: int) -> Iterator[Traffic]:
        model, stages = self.plan.model, self.plan.layout.chunks(rank)
        layers = [model.layers[index] for stage in stages for index in stage.layers]
        layers += [model.layers[-1]] * sum(stage.num_mtp for stage in stages)
        for layer, count in Counter(layers).items():
            times = count * self.num_microbatches
            for each in (*self._tensor_parallel(layer), *self._context_parallel(layer), *self._experts(layer)):
                yield replace(each, bytes=each.bytes * times, far=each.far * times)

    def _tensor_parallel(self, layer: LayerConfig) -> Iterator[Traffic]:
        """Into a matrix cut by columns: all-gather, in the backward once more and a reduce-scatter. Out of one cut by
        rows: reduce-scatter, all-gather in the backward. Without sequence parallelism an all-reduce each."""
        mixer, feed_forward, hidden = layer.mixer, layer.feed_forward, layer.mixer.hidden_size
        if isinstance(mixer, MLAConfig):
            into = mixer.kv_lora_rank + (hidden if mixer.q_lora_rank is None else mixer.q_lora_rank)
            yield self._crossing("attention", into, hidden, as_is=mixer.qk_rope_dim)
        else:
            shared = mixer.num_query_groups < self.plan.parallel.tp
            yield self._crossing("attention", hidden, hidden, as_is=mixer.qkv_width if shared else 0)
        if not isinstance(feed_forward, MoEConfig):
            yield self._crossing("MLP", hidden, hidden)
        elif feed_forward.shared is not None:
            yield self._crossing("shared experts", hidden, hidden)

    def _crossing(self, what: str, into: int, out: int, *, as_is: int = 0) -> Traffic:
        """`into`, `out`: channels of the tensors that enter and leave cut matrices; `as_is`: of those that every rank's
        heads read without a matrix (MLA's shared rotated part; q, k and v where ranks share query groups), and that the
        backward does not gather again."""
        if self.plan.parallel.sequence_parallel:
            passes = 3 * into + 2 * (out + as_is)
        else:
            passes = 2 * (into + out + as_is)
        size = float(self._sizes.inner * passes * self._sizes.activation)
        return ring(self.plan.parallel.tp, size, self.placements["tp"], group="tp", what=what)

    def _context_parallel(self, layer: LayerConfig) -> Iterator[Traffic]:
        """What is exchanged so that every query meets its keys."""
        cp, sizes = self.plan.parallel.cp, self._sizes
        share = share_of_layer(layer, self.plan.parallel).mixer
        keys = _key_value_width(share)
        heads = _query_width(share) + keys + _output_width(share)
        here, wide = sizes.inner * sizes.activation, sizes.inner * sizes.internal
        match _exchange(share.core):
            case "p2p":
                size = (2 * (cp - 1) * keys * here + cp * keys * wide) if cp > 1 else 0.0
            case "allgather":
                size = (cp - 1) * keys * (here + wide)
            case _:
                size = 2 * heads * here * (cp - 1) / cp
        far = size * _crossing_share(self.placements["cp"])
        yield Traffic(group="cp", what="keys and values", bytes=size, far=far, hidden=True)

    def _experts(self, layer: LayerConfig) -> Iterator[Traffic]:
        config, parallel, sizes = layer.feed_forward, self.plan.parallel, self._sizes
        if not isinstance(config, MoEConfig) or parallel.ep * parallel.etp == 1:
            return
        if config.dispatcher == "allgather":
            yield from self._gathered(config)
            return
        traffic, placement = self.expert_traffic(config), self.placements["ep"]
        far = 1 - placement.near
        for what, rows in (("dispatch", "rows"), ("combine", "results")):
            # forward, and in the backward the gradients the same way back
            if config.dispatcher == "flex":
                sent = 2 * traffic.copies_sent * traffic.row_bytes
                crossing = 2 * traffic.copies_far * traffic.row_bytes
            else:
                sent = 2 * traffic.rows_sent * traffic.row_bytes
                crossing = sent * far
            beside = self.plan.pipeline.overlap
            yield Traffic(group="ep", what=f"{what}: {rows}", bytes=sent, far=min(sent, crossing), hidden=beside)
        rows_of_all = float(parallel.etp * sizes.residual * config.router.topk)
        size = rows_of_all * config.experts.hidden_size * 2 * (sizes.activation + sizes.internal)
        yield ring(parallel.etp, size, self.placements["etp"], group="etp", what="rows and partial results")

    def _gathered(self, config: MoEConfig) -> Iterator[Traffic]:
        """Tokens to all ranks, sums back in the internal format; in the backward the same with the parts exchanged."""
        sizes, ranks = self._sizes, self.plan.parallel.ep * self.plan.parallel.etp
        each = float(ranks * sizes.residual * config.experts.hidden_size)
        placement = self.placements["etp_ep"]
        size = each * (sizes.activation + sizes.internal)
        yield ring(ranks, size, placement, group="etp_ep", what="dispatch: tokens of all ranks")
        yield ring(ranks, 2 * each * sizes.internal, placement, group="etp_ep", what="combine: sums of all ranks")

    def _ends(self, rank: int) -> Iterator[Traffic]:
        """Embedding and head under tensor parallelism."""
        hidden = self.plan.model.hidden_size
        mtp = self.plan.model.mtp.num_layers if self.plan.model.mtp else 0
        for stage in self.plan.layout.chunks(rank):
            for name, times in (("embedding", stage.embedding + stage.num_mtp), ("head", stage.loss * (1 + mtp))):
                into, out = (0, hidden) if name == "embedding" else (hidden, 0)
                each = self._crossing(name, into, out)
                count = times * self.num_microbatches
                yield replace(each, bytes=each.bytes * count, far=each.far * count)

    def _data_parallel(self, rank: int) -> Iterator[Traffic]:
        """Gradients are reduced once per step; with ZeRO-1 to their owners, who send new weights to all."""
        plan, parallel = self.plan, self.plan.parallel
        held = held_by_rank(plan.model, plan.layout, rank, parallel)
        config = plan.data_parallel
        for group, size, elements, names in (
            ("dp_cp", parallel.dp * parallel.cp, held.attention, "all but experts"),
            ("edp", parallel.edp, held.expert, "experts"),
        ):
            placement = self.placements[group]
            grads = float(elements * num_bytes(plan.precision.grads))
            passes = 1 if config.sharded_optimizer else 2
            reduced = ring(size, passes * grads, placement, group=group, what=f"gradients: {names}")
            yield replace(reduced, hidden=config.overlap_grad_reduce)
            if config.sharded_optimizer:
                weights = float(elements * num_bytes(plan.precision.params))
                gathered = ring(size, weights, placement, group=group, what=f"weights: {names}")
                yield replace(gathered, hidden=config.overlap_param_gather)

    def _pipeline(self, rank: int) -> Iterator[Traffic]:
        """Hidden states to the next stage, their gradients to the one before."""
        layout, sizes = self.plan.layout, self._sizes
        if layout.pp == 1:
            return
        last = len(layout.stages) - 1
        sent = sum((chunk < last) + (chunk > 0) for chunk in range(rank, last + 1, layout.pp))
        size = float(sent * self.num_microbatches * sizes.residual * self.plan.model.hidden_size * sizes.activation)
        crosses = self.placements["pp"].domains[1] > 1
        yield Traffic(group="pp", what="hidden states", bytes=size, far=size if crosses else 0.0, hidden=True)


def _exchange(core: CoreAttentionConfig) -> str:
    return core.context_exchange


def _query_width(config: AttentionConfig | MLAConfig) -> int:
    return config.num_heads * config.q_head_dim if isinstance(config, MLAConfig) else config.q_width


def _output_width(config: AttentionConfig | MLAConfig) -> int:
    return config.num_heads * config.v_head_dim if isinstance(config, MLAConfig) else config.q_width


def _key_value_width(config: AttentionConfig | MLAConfig) -> int:
    if isinstance(config, MLAConfig):
        return config.num_heads * (config.q_head_dim + config.v_head_dim)
    return 2 * config.kv_width
