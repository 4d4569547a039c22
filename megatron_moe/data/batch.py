"""One microbatch: tokens, labels, and what travels with the activations."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megatron_moe.logs.tally import Tally
from megatron_moe.parallel.rng import Key
from megatron_moe.specs.attention import RopeSpec


@dataclass(frozen=True, kw_only=True)
class TokenMeta:
    """What the layers must know about the tokens besides their activations. The model never asks a global for these."""

    positions_BS: Tensor
    """int64 position of every token in its document (or in its sequence)."""
    segments_BS: Tensor | None = None
    """int64 number of the document inside the sequence; attention stays inside it. None: one document."""
    valid_BS: Tensor | None = None
    """bool, False for padding: such tokens are not routed and count in no balancing loss. None: all are real."""
    cu_seqlens: Tensor | None = None
    """int32 [documents + 1] boundaries of packed sequences, B = 1."""
    max_seqlen: int | None = None
    """Longest packed sequence, known to the host."""
    aux_scale: Tensor | float = 1.0
    """Weight with which balancing losses of this microbatch enter the gradient: 1 / number of microbatches, or the
    number of valid tokens of the microbatch when the loss is divided once by the tokens of the global batch."""
    random_key: Key | None = None
    """(seed, iteration, place of the microbatch in the global batch): key of dropout and jitter; a site appends its own
    name. None: evaluation."""
    tally: Tally | None = None
    """Where metrics are recorded; None: nowhere (evaluation, a recomputed forward)."""
    training: bool = True
    rotary: Mapping[RopeSpec, tuple[Tensor, Tensor]] | None = None
    """cos_SBD and sin_SBD of every kind of rotation in the model, made from the positions once per microbatch. Set by the
    model before its layers run; others leave it None."""

    def key(self, site: str) -> Key | None:
        """The key of the random draws of one site; None in evaluation."""
        return None if self.random_key is None or not self.training else (*self.random_key, site)


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Token-id tensors are [B, S]; activations in the model are [S, B, H]."""

    tokens_BS: Tensor
    """int64"""
    labels_BS: Tensor
    """int64, the next token"""
    loss_mask_BS: Tensor
    """Weight of every position in the loss, in promote(fp32, params dtype)."""
    meta: TokenMeta
