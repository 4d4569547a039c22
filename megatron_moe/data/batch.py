"""Microbatches: token ids, labels and loss weights, and the context in which the model runs them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_moe.config.attention import RopeConfig
from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.data.samples import PADDING
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.context_parallel import SequencePart, fewest_ranks, split_places
from megatron_moe.parallel.rng import Key, RNGKey


@dataclass(frozen=True, kw_only=True)
class TokenMeta:
    """Positions, documents and padding of the tokens of one microbatch."""

    positions_BS: Tensor
    """int64 position of every token in its document (or in its sequence)."""
    segments_BS: Tensor | None = None
    """int64 number of the document inside the sequence; attention stays inside it. None: one document."""
    valid_BS: Tensor | None = None
    """bool, False for padding: such tokens are not routed and count in no balancing loss. None: all are real."""
    part: SequencePart | None = None
    """Which places of the sequence this context-parallel rank holds: the tensors here have its places only. None: all
    of them."""
    whole_segments_BS: Tensor | None = None
    """`segments_BS` of whole sequences, where this rank holds parts of them."""
    cu_seqlens: Tensor | None = None
    """int32 [documents + 1] boundaries of packed sequences, B = 1."""
    max_seqlen: int | None = None
    """Longest document in whose bounds attention stays, known to the host; None: nothing bounds it."""

    def take(self, x_BS: Tensor) -> Tensor:
        """What this rank holds of a tensor over the whole sequence."""
        return x_BS if self.part is None else self.part.take(x_BS)


class GraphRunner(Protocol):
    """CUDA graphs of one microbatch in flight (`memory.cuda_graphs.layer_graphs.GraphInstance`)."""

    def run(self, part: Any, state: Any, mb: "MicrobatchContext") -> Any:
        """Replays a captured module on a layer state."""
        ...


@dataclass(frozen=True, kw_only=True)
class MicrobatchContext:
    """What the modules of the model receive with the activations of one microbatch.

    The data loader sets `tokens`, the training step the fields about the step, the model `rotary`.
    """

    tokens: TokenMeta
    rng: RNGKey | None = None
    """Start of the keys of dropout and jitter. None: evaluation."""
    training: bool = True
    aux_loss_scale: Tensor | float = 1.0
    """Weight of this microbatch's balancing losses in the gradient: context-parallel ranks / microbatches, or under
    `--calculate-per-token-loss` the routed tokens of the whole microbatch."""
    metrics: MetricAccumulator | None = None
    """None: nothing is recorded (evaluation, recomputed forward)."""
    rotary: Mapping[RopeConfig, tuple[Tensor, Tensor]] | None = None
    """cos_SBD and sin_SBD of every kind of rotation in the model, computed from the positions once per microbatch.
    None: before the model has set them."""
    forced_logits: Mapping[int, Tensor] | None = None
    """[T, E] by layer: router logits of `--moe-router-force-load-balancing` and `-biased`, drawn in advance. None:
    routers draw them."""
    graph_instance: GraphRunner | None = None
    """CUDA graphs that this microbatch replays. None: every node is computed."""

    def key(self, *site: int | str) -> Key | None:
        """Key of the random draws of one site; None in evaluation."""
        return None if self.rng is None or not self.training else self.rng.site(*site)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Token-id tensors are [B, S]; activations in the model are [S, B, H]."""

    tokens_BS: Tensor
    """int64"""
    labels_BS: Tensor
    """int64, the next token"""
    loss_mask_BS: Tensor
    """Weight of every position in the loss, in promote(fp32, params dtype)."""
    context: MicrobatchContext
    whole: "MicroBatch | None" = None
    """The microbatch of which this is a context-parallel rank's part: what looks ahead or counts all tokens needs it.
    None: this is the whole."""


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """What the tokens of a sample say about loss, positions and attention."""

    vocab_size: int
    """Ids must be smaller."""
    eod: int
    pad: int
    """Id that is padding; -1: none in the data."""
    eod_mask_loss: bool = False
    """No loss where the input is the end of a document."""
    reset_position_ids: bool = False
    """Positions count from 0 in every document."""
    reset_attention_mask: bool = False
    """Attention stays inside a document."""


class Samples(Protocol):
    """`DocumentSamples` or `BlendedSamples`."""

    def __len__(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def tokens(self, index: int) -> np.ndarray: ...
    def locate(self, index: int, position: int) -> str: ...


def make_microbatch(samples: Samples, indices: np.ndarray, masks: MaskConfig, loss_dtype: torch.dtype) -> MicroBatch:
    """The samples `indices` [B] as one microbatch in host memory.

    Raises `DataProblem` for a token id outside the vocabulary, naming where in the data it stands.
    """
    text = np.stack([samples.tokens(int(index)) for index in indices])
    padding = (text == PADDING) | (text == masks.pad)
    ends = ((text == masks.eod) & ~padding)[:, :-1]  # padding gets the id 0, which may be that of the end
    text[padding] = 0
    _check_ids(text, samples, indices, masks.vocab_size)
    tokens = text[:, :-1]
    loss_mask = ~padding[:, 1:]
    if masks.eod_mask_loss:
        loss_mask &= ~ends
    starts = np.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    input_padding = padding[:, :-1]
    return MicroBatch(
        tokens_BS=torch.from_numpy(np.ascontiguousarray(tokens)),
        labels_BS=torch.from_numpy(np.ascontiguousarray(text[:, 1:])),
        loss_mask_BS=torch.from_numpy(loss_mask).to(loss_dtype),
        context=MicrobatchContext(
            tokens=TokenMeta(
                positions_BS=torch.from_numpy(_positions(starts, masks.reset_position_ids)),
                segments_BS=torch.from_numpy(np.cumsum(starts, axis=1)) if masks.reset_attention_mask else None,
                max_seqlen=_longest(starts) if masks.reset_attention_mask else None,
                valid_BS=torch.from_numpy(~input_padding) if input_padding.any() else None,
            )
        ),
    )


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The batch on `device`; copies to a GPU go through pinned memory and do not wait."""
    if batch.tokens_BS.device == device:
        return batch

    def moved(tensors: Any) -> Any:
        changes = {
            field.name: value.pin_memory().to(device, non_blocking=True)
            for field in fields(tensors)
            if isinstance(value := getattr(tensors, field.name), Tensor)
        }
        return replace(tensors, **changes)

    return replace(moved(batch), context=replace(batch.context, tokens=moved(batch.context.tokens)))


def split_sequence(batch: MicroBatch, context: ParallelContext) -> MicroBatch:
    """This context-parallel rank's part of a microbatch of which every rank of the group has the whole."""
    cp, meta = context.group("cp"), batch.context.tokens
    if cp.size == 1:
        return batch
    part = _part(batch, context)
    return MicroBatch(
        tokens_BS=part.take(batch.tokens_BS),
        labels_BS=part.take(batch.labels_BS),
        loss_mask_BS=part.take(batch.loss_mask_BS),
        context=replace(
            batch.context,
            tokens=replace(
                meta,
                positions_BS=part.take(meta.positions_BS),
                segments_BS=None if meta.segments_BS is None else part.take(meta.segments_BS),
                valid_BS=None if meta.valid_BS is None else part.take(meta.valid_BS),
                part=part,
                whole_segments_BS=None if meta.segments_BS is None else part.sequences(meta.segments_BS),
            ),
        ),
        whole=batch,
    )


def num_routed(batch: MicroBatch) -> int | Tensor:
    """Tokens that are not padding, on the device if there is padding. `--calculate-per-token-loss` multiplies balancing
    losses by this number, as Megatron-Core's router does, and divides them by the tokens in the loss: where
    `--eod-mask-loss` masks tokens, balancing losses weigh more."""
    valid_BS = batch.context.tokens.valid_BS
    return batch.tokens_BS.numel() if valid_BS is None else valid_BS.sum()


def context_degree(batch: MicroBatch, config: ParallelConfig) -> int:
    """Over how many ranks the sequences of a whole microbatch are split: all context-parallel ranks; or as few as the
    longest document needs, and groups of so many neighbours share the sequences."""
    if config.max_seqlen_per_dp_cp_rank is None:
        return config.cp
    num_sequences, seq = batch.tokens_BS.shape
    return fewest_ranks(
        batch.context.tokens.max_seqlen or seq, config.max_seqlen_per_dp_cp_rank, num_sequences, config.cp
    )


def _part(batch: MicroBatch, context: ParallelContext) -> SequencePart:
    cp, config, degree = context.group("cp"), context.config, context_degree(batch, context.config)
    return SequencePart(
        split_places(config.cp_split, batch.tokens_BS.shape[1], degree),
        cp.rank % degree,
        group="cp" if config.max_seqlen_per_dp_cp_rank is None else f"cp_{degree}",
        share=(cp.rank // degree, cp.size // degree),
    )


def _longest(starts: np.ndarray) -> int:
    """Tokens of the longest document, from where documents start [B, S]."""
    edge = np.ones_like(starts[:, :1])
    borders = np.flatnonzero(np.concatenate([edge, starts[:, 1:]], axis=1))
    return int(np.diff(borders, append=starts.size).max())


def _positions(starts: np.ndarray, reset: bool) -> np.ndarray:
    """int64 [B, S]: distance to the start of the document (`reset`) or of the sample."""
    places = np.broadcast_to(np.arange(starts.shape[1], dtype=np.int64), starts.shape)
    if not reset:
        return places.copy()
    return places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)


def _check_ids(text: np.ndarray, samples: Samples, indices: np.ndarray, vocab_size: int) -> None:
    if 0 <= text.min() and text.max() < vocab_size:
        return
    row, position = np.argwhere((text < 0) | (text >= vocab_size))[0]
    index = int(indices[row])
    raise DataProblem(
        f"token id {text[row, position]} in {samples.locate(index, int(position))} (sample {index}, position "
        f"{position}) is not in the vocabulary of {vocab_size}: the data was made with another tokenizer; "
        f"make it again with this one, or give the tokenizer (or --vocab-size) it was made with"
    )
