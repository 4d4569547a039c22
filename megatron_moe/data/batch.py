"""Microbatches: token ids, labels, loss weights and the other inputs of the model (`MicrobatchContext`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_moe.config.attention import RopeConfig
from megatron_moe.config.exit_codes import DataProblem
from megatron_moe.config.packing import PackingConfig
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.data.packing import Row, round_up
from megatron_moe.data.samples import PADDING, Samples
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.logs.timers import Timers
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.context_parallel import SequencePart, smallest_cp_degree, split_positions
from megatron_moe.parallel.rng import Key, RNGKey


@dataclass(frozen=True, kw_only=True)
class TokenMeta:
    """Positions, documents and padding of the tokens of one microbatch."""

    positions_BS: Tensor
    """Position of every token, int64: in its document if `reset_position_ids` is set, otherwise in its sequence."""
    ids_BS: Tensor | None = None
    """Token ids, int64; set by the model if routers select experts by token id, else None."""
    segments_BS: Tensor | None = None
    """Document index of every token, int64. Attention is limited to tokens with equal indices. None means no limit."""
    valid_BS: Tensor | None = None
    """False for padding tokens, which routers and balancing losses ignore; bool. None means that all tokens are
    valid."""
    part: SequencePart | None = None
    """Part of the microbatch that this context-parallel rank processes. None if the microbatch is not split."""
    whole_segments_BS: Tensor | None = None
    """`segments_BS` for all positions of this rank's sequences. None if the sequences are not split or `segments_BS` is
    None."""
    max_seqlen: int | None = None
    """Number of tokens of the longest document. None means that attention is not limited to documents."""

    def select(self, x_BS: Tensor) -> Tensor:
        """Selects this context-parallel rank's part of `x_BS`, a tensor of the whole microbatch."""
        return x_BS if self.part is None else self.part.select(x_BS)


class GraphRunner(Protocol):
    """Interface of the CUDA graphs of one microbatch; `GraphInstance` implements it."""

    def run(self, part: Any, state: Any, mb: "MicrobatchContext") -> Any:
        """Runs the module `part` on the inputs `state` as a CUDA graph and returns the module's outputs."""


@dataclass(frozen=True, kw_only=True)
class ForcedRouting:
    """Experts of the tokens of one microbatch, chosen elsewhere: by a trace (`--moe-routing-replay-path`) or a program
    (`moe.routing_replay`). Probabilities are computed from the current scores of these experts."""

    ids: Mapping[int, Tensor]
    """Maps the index of a decoder layer to int64 expert ids [T, K]; -1 means no expert."""
    forced_T: Tensor | None = None
    """False for tokens whose experts the routers select; bool. None means that the experts of all tokens are given."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchContext:
    """Inputs of the model's modules for one microbatch, apart from activations.

    The data loader sets `tokens`, and the model sets `rotary`, `selected_keys` and `forced_logits`. The other fields
    are set by the code that runs the microbatch: a training step, an evaluation or `LanguageModel`.
    """

    tokens: TokenMeta
    rng: RNGKey | None = None
    """Base key for the random numbers of dropout and router jitter. None in evaluation."""
    training: bool = True
    aux_loss_scale: Tensor | float = 1.0
    """Factor that multiplies the gradients of balancing losses: with `--calculate-per-token-loss`, the number of
    non-padding tokens in the unsplit microbatch, otherwise cp size / number of microbatches per step; with fp16, times
    the loss scale. A repeated MTP layer divides it by its number of depths."""
    metrics: MetricAccumulator | None = None
    """Accumulates metrics of the forward. None in evaluation and in recomputed forwards."""
    rotary: Mapping[RopeConfig, tuple[Tensor, Tensor]] | None = None
    """RoPE variant -> (cos_SBD, sin_SBD), for all variants in the model; computed once per microbatch. None before
    that."""
    selected_keys: dict[int, Tensor] | None = None
    """Layer index -> ids of the keys that its indexer has selected, for later layers of the same model chunk that
    attend to the same keys. None outside of a model."""
    forced_logits: Mapping[int, Tensor] | None = None
    """Layer index -> random router logits [T, E], drawn in advance for `--moe-router-force-load-balancing` or
    `--moe-router-force-biased`. If None, each router that needs random logits draws them itself in its forward."""
    forced_routing: ForcedRouting | None = None
    """Experts that the decoder's routers use instead of selecting. None means that they select."""
    timers: Timers | None = None
    """Timers of the nodes of layers (`--timing-log-level 2`); None if nodes are not timed."""
    graph_instance: GraphRunner | None = None
    """CUDA graphs that this microbatch replays. None means eager execution."""

    def key(self, *site: int | str) -> Key | None:
        """Random key for the call site identified by `site`; None in evaluation."""
        return None if self.rng is None or not self.training else self.rng.draw_key(*site)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Tokens, labels and loss weights [B, S] of one microbatch."""

    tokens_BS: Tensor
    """Token ids of the input, int64."""
    labels_BS: Tensor
    """Label of every position, int64: the id of the next token."""
    loss_mask_BS: Tensor
    """Loss weight of every position, 0 or 1. The dtype is fp32, or the parameter dtype if that is wider."""
    context: MicrobatchContext
    whole: "MicroBatch | None" = None
    """The unsplit microbatch, if context parallelism splits it and this is one rank's part; else None."""


@dataclass(frozen=True, kw_only=True)
class MaskConfig:
    """Vocabulary size and special token ids, and their effects on loss, positions and attention."""

    vocab_size: int
    """Size of the vocabulary; token ids must be smaller."""
    eod: int
    pad: int
    """Id of padding tokens in the data; -1 if there is none."""
    eod_mask_loss: bool = False
    """Excludes positions whose input token is end-of-document from the loss."""
    reset_position_ids: bool = False
    """Restarts positions at 0 in every document."""
    reset_attention_mask: bool = False
    """Limits attention to tokens of the same document."""


def make_microbatch(samples: Samples, indices: np.ndarray, masks: MaskConfig, loss_dtype: torch.dtype) -> MicroBatch:
    """Builds a microbatch of the samples `indices` [B] in host memory.

    Raises `DataProblem` for a token id outside the vocabulary; the message states the location in the data.
    """
    text = np.stack([samples.tokens(int(index)) for index in indices])
    padding = (text == PADDING) | (text == masks.pad)
    ends = ((text == masks.eod) & ~padding)[:, :-1]  # padding becomes id 0, which may be the id of eod
    text[padding] = 0
    _check_ids(text, samples, indices, masks.vocab_size)
    loss_mask = ~padding[:, 1:]
    if masks.eod_mask_loss:
        loss_mask &= ~ends
    starts = np.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    input_padding = padding[:, :-1]
    return MicroBatch(
        tokens_BS=torch.from_numpy(np.ascontiguousarray(text[:, :-1])),
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


def make_packed_microbatch(
    samples: Samples,
    rows: Sequence[Row],
    packing: PackingConfig,
    seq_length: int,
    masks: MaskConfig,
    loss_dtype: torch.dtype,
) -> MicroBatch:
    """Builds a microbatch [B, seq_length] in host memory whose row b holds the samples `rows[b]`, one after the other.

    Positions restart and attention is limited to one sample. Positions without a sample are padding. Raises
    `DataProblem` for a token id outside the vocabulary.
    """
    shape = len(rows), seq_length
    tokens, labels, positions, segments = (np.zeros(shape, dtype=np.int64) for _ in range(4))
    valid, loss_mask = (np.zeros(shape, dtype=bool) for _ in range(2))
    own_tail, longest = packing.thd_tail_padding_policy == "append_dummy_seq", 1
    for number, row in enumerate(rows):
        start = 0
        for segment, index in enumerate(row):
            text = samples.tokens(index).astype(np.int64)
            padding = text == masks.pad
            ends = (text == masks.eod) & ~padding
            text[padding] = 0
            _check_ids(text[None], samples, np.array([index]), masks.vocab_size)
            here = np.s_[number, start : start + len(text) - 1]
            tokens[here], labels[here], valid[here] = text[:-1], text[1:], ~padding[:-1]
            loss_mask[here] = ~padding[1:] & ~(ends[:-1] & masks.eod_mask_loss)
            # extends to the end of the row; later samples overwrite the rest
            positions[number, start:], segments[number, start:] = np.arange(seq_length - start), segment
            longest = max(longest, len(text) - 1)
            end, start = start + len(text) - 1, start + round_up(len(text) - 1, packing.pad_packed_seq_alignment)
        if row and own_tail and end < seq_length:
            positions[number, end:], segments[number, end:] = np.arange(seq_length - end), len(row)
    return MicroBatch(
        tokens_BS=torch.from_numpy(tokens),
        labels_BS=torch.from_numpy(labels),
        loss_mask_BS=torch.from_numpy(loss_mask).to(loss_dtype),
        context=MicrobatchContext(
            tokens=TokenMeta(
                positions_BS=torch.from_numpy(positions),
                segments_BS=torch.from_numpy(segments),
                max_seqlen=longest,
                valid_BS=torch.from_numpy(valid),
            )
        ),
    )


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """Copies the batch to `device`. Copies to a GPU are asynchronous and use pinned memory."""
    if batch.tokens_BS.device == device:
        return batch

    def copy_to_device(tensors: Any) -> Any:
        changes = {
            field.name: value.pin_memory().to(device, non_blocking=True)
            for field in fields(tensors)
            if isinstance(value := getattr(tensors, field.name), Tensor)
        }
        return replace(tensors, **changes)

    return replace(copy_to_device(batch), context=replace(batch.context, tokens=copy_to_device(batch.context.tokens)))


def split_sequence(batch: MicroBatch, context: ParallelContext) -> MicroBatch:
    """Selects this context-parallel rank's part of `batch`, which is the same on all ranks of the group."""
    cp, meta = context.group("cp"), batch.context.tokens
    if cp.size == 1:
        return batch
    part = _part(batch, context)
    tokens = replace(
        meta,
        positions_BS=part.select(meta.positions_BS),
        segments_BS=None if meta.segments_BS is None else part.select(meta.segments_BS),
        valid_BS=None if meta.valid_BS is None else part.select(meta.valid_BS),
        part=part,
        whole_segments_BS=None if meta.segments_BS is None else part.select_sequences(meta.segments_BS),
    )
    return MicroBatch(
        tokens_BS=part.select(batch.tokens_BS),
        labels_BS=part.select(batch.labels_BS),
        loss_mask_BS=part.select(batch.loss_mask_BS),
        context=replace(batch.context, tokens=tokens),
        whole=batch,
    )


def num_routed(batch: MicroBatch) -> int | Tensor:
    """Number of tokens that are not padding; a device tensor if there is padding.

    With `--calculate-per-token-loss`, balancing losses are multiplied by this number, as in Megatron-Core, and divided
    by the number of tokens in the loss. Balancing losses therefore get more weight if `--eod-mask-loss` masks tokens.
    """
    valid_BS = batch.context.tokens.valid_BS
    return batch.tokens_BS.numel() if valid_BS is None else valid_BS.sum()


def context_degree(batch: MicroBatch, config: ParallelConfig) -> int:
    """Number of ranks over which each sequence is split: all context-parallel ranks or, with dynamic context
    parallelism, the number that the longest document needs. Groups of this size then process different sequences."""
    if config.max_seqlen_per_dp_cp_rank is None:
        return config.cp
    num_sequences, seq = batch.tokens_BS.shape
    longest, limit = batch.context.tokens.max_seqlen or seq, config.max_seqlen_per_dp_cp_rank
    return smallest_cp_degree(longest, limit, num_sequences, config.cp, config.min_dynamic_context_parallel_size)


def _part(batch: MicroBatch, context: ParallelContext) -> SequencePart:
    cp, config, degree = context.group("cp"), context.config, context_degree(batch, context.config)
    return SequencePart(
        split_positions(config.cp_split, batch.tokens_BS.shape[1], degree),
        cp.rank % degree,
        group="cp" if config.max_seqlen_per_dp_cp_rank is None else f"cp_{degree}",
        share=(cp.rank // degree, cp.size // degree),
    )


def _longest(starts: np.ndarray) -> int:
    """Length of the longest document. `starts` [B, S]: True at the first token of documents, except at position 0."""
    edge = np.ones_like(starts[:, :1])
    borders = np.flatnonzero(np.concatenate([edge, starts[:, 1:]], axis=1))
    return int(np.diff(borders, append=starts.size).max())


def _positions(starts: np.ndarray, reset: bool) -> np.ndarray:
    """Position ids, int64 [B, S], counted from the first token of the document if `reset`, else from the first token of
    the sample."""
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
        f"{position}) is not in the vocabulary of {vocab_size}: the data was tokenized with another tokenizer; "
        f"tokenize it again, or give its tokenizer (or --vocab-size)"
    )
