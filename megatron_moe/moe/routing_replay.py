"""Records the routers' expert choices, and replays given choices in place of the selection.

Reinforcement learning needs this: tokens must be routed to the same experts in the training pass as in the rollout or
in the pass that computed their log probabilities. Choices are exchanged as int16 [B, S, L, K]: for every position of
every sequence of a microbatch, the experts in each of L layers. They do not depend on the layout of the ranks. Choices
belong to one microbatch's context, so recompute, pipelines and CUDA graphs read the choices of the right microbatch.

    layers = routed_layers(model, num_layers)
    recorder = RoutingRecorder(layers, context)
    run(replace(batch, context=recorder.attach(batch.context)))  # a forward of any kind
    ids_BSLK = recorder.gather_ids(batch.context.tokens)
    given = forced_routing(ids_BSLK, layers, batch.context.tokens, context, own_layers=layers)
    run(replace(batch, context=replace(batch.context, forced_routing=given)))
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_moe.data.batch import ForcedRouting, MicrobatchContext, TokenMeta
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.moe.router import Router
from megatron_moe.parallel.context import ParallelContext, ProcessGroup
from megatron_moe.parallel.context_parallel import SequencePart
from megatron_moe.parallel.tensor_parallel import gather_shard, select_local_positions


def routed_layers(model: nn.Module, num_layers: int) -> tuple[int, ...]:
    """Global indices of this rank's decoder layers in which tokens select experts, ascending.

    `num_layers`: decoder layers of the model. Routers of later layers, of multi-token prediction, are left out: they
    see shifted tokens.
    """
    routers = (module for module in model.modules() if isinstance(module, Router))
    return tuple(sorted(router.layer for router in routers if router.layer < num_layers))


class RoutingRecorder:
    """Records the expert choices of one microbatch's forward at a time, without reading them on the host."""

    def __init__(self, layers: Sequence[int], context: ParallelContext) -> None:
        """`layers`: as `routed_layers` returns them; equal on the ranks that share a sequence."""
        self.layers = tuple(layers)
        self._context = context
        self._ids: dict[int, Tensor] = {}

    def attach(self, mb: MicrobatchContext) -> MicrobatchContext:
        """Returns a context with which a forward records its choices here, replacing earlier ones. Metrics of this
        forward are not logged."""
        self._ids.clear()
        return replace(mb, metrics=MetricAccumulator(trace_routing=self._add))

    def _add(self, layer: int, ids_TK: Tensor) -> None:
        if layer in self.layers:
            self._ids[layer] = ids_TK.to(torch.int16)

    def gather_ids(self, tokens: TokenMeta) -> Tensor:
        """Choices of all positions of this rank's sequences, int16 [B, S, L, K], on the device; -1 means no expert.

        Call on all ranks that share the sequences. Communication: an all-gather over tp (with sequence parallelism)
        and one over cp, of 2 bytes per choice. Raises ValueError if a layer has recorded nothing.
        """
        if missing := [layer for layer in self.layers if layer not in self._ids]:
            raise ValueError(
                f"no expert choices of layers {missing} were recorded: run a forward with an attached context"
            )
        batch_size = len(tokens.positions_BS)
        ids_TLK = torch.stack([self._ids[layer] for layer in self.layers], dim=1)
        ids_SBLK = ids_TLK.unflatten(0, (-1, batch_size)).contiguous()
        if self._context.config.sequence_parallel:
            ids_SBLK = gather_shard(ids_SBLK, self._context.group("tp"))
        if tokens.part is not None:
            ids_SBLK = _whole_sequences(ids_SBLK, tokens.part, self._context.group(tokens.part.group))
        return ids_SBLK.transpose(0, 1)


def _whole_sequences(ids_SBLK: Tensor, part: SequencePart, group: ProcessGroup) -> Tensor:
    """Joins the positions of the ranks that share the sequences, in the order of positions."""
    gathered, start = gather_shard(ids_SBLK, group), 0
    whole = torch.empty_like(gathered)
    for chunk in (chunk for chunks in part.of_ranks for chunk in chunks):
        whole[chunk.start : chunk.stop] = gathered[start : start + len(chunk)]
        start += len(chunk)
    return whole


def forced_routing(
    ids_BSLK: Tensor,
    layers: Sequence[int],
    tokens: TokenMeta,
    context: ParallelContext,
    *,
    own_layers: Sequence[int],
    given_BS: Tensor | None = None,
) -> ForcedRouting:
    """Extracts the choices of this rank's tokens and layers, for `MicrobatchContext.forced_routing`.

    Args:
        ids_BSLK: integer choices of the whole microbatch, of S positions or of the first S - 1: a rollout does not
            route the last token that it generates, whose experts are then selected.
        layers: global index of each of the L layers; more than those of this rank are allowed.
        tokens: positions of this rank's part of the microbatch.
        own_layers: layers of this rank, as `routed_layers` returns them.
        given_BS: bool; False for positions whose experts are selected as usual. None means that the choices of all
            positions are given.

    Raises ValueError for a wrong number of layers, sequences or positions, or if a layer of this rank is missing.
    """
    num_sequences, num_positions, num_layers, _ = ids_BSLK.shape
    wanted = _whole_shape(tokens)
    if num_layers != len(layers):
        named = f"{len(layers)}: {list(layers)}"
        raise ValueError(f"the ids are the choices of {num_layers} layers, but `layers` names {named}")
    if missing := sorted(set(own_layers) - set(layers)):
        raise ValueError(f"no expert choices for layers {missing} of this rank; given: layers {list(layers)}")
    if num_sequences != wanted[0] or wanted[1] - num_positions not in (0, 1):
        found = f"{num_sequences} sequences of {num_positions} positions"
        raise ValueError(f"expert choices for {found}; the microbatch has {wanted[0]} of {wanted[1]}")
    if num_positions < wanted[1]:
        native_BS = torch.arange(wanted[1], device=ids_BSLK.device).expand(wanted) < num_positions
        given_BS = native_BS if given_BS is None else native_BS & nn.functional.pad(given_BS[:, :num_positions], (0, 1))
        ids_BSLK = nn.functional.pad(ids_BSLK, (0, 0, 0, 0, 0, 1))
    place = {layer: index for index, layer in enumerate(layers)}
    ids = {layer: _by_token(ids_BSLK[:, :, place[layer]], tokens, context).long() for layer in own_layers}
    return ForcedRouting(ids=ids, forced_T=None if given_BS is None else _by_token(given_BS, tokens, context))


def _whole_shape(tokens: TokenMeta) -> tuple[int, int]:
    """Returns (sequences, positions) of the whole microbatch."""
    batch_size, num_positions = tokens.positions_BS.shape
    if tokens.part is None:
        return batch_size, num_positions
    return batch_size * tokens.part.share[1], num_positions * len(tokens.part.of_ranks)


def _by_token(x_BS: Tensor, tokens: TokenMeta, context: ParallelContext) -> Tensor:
    """This rank's part of a tensor [B, S, ...] of the microbatch, with token t = s * B + b first: [T, ...]."""
    return select_local_positions(tokens.select(x_BS), context).transpose(0, 1).flatten(0, 1).contiguous()
