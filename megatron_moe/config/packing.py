"""Packing of variable-length sequences into rows of fixed length."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """Packing of the sequences of a global batch into rows of `seq_length` positions (`--use-varlen-dataset`)."""

    sequence_packing_scheduler: Literal["dp_balanced", "default_dynamic_cp"] = "dp_balanced"
    """dp_balanced: packs sequences in their order. default_dynamic_cp: packs them by decreasing length, so that rows
    with long sequences share microbatches, and other microbatches need fewer context-parallel ranks."""
    thd_max_packed_sequences: int | None = None
    """Maximum number of sequences per row, including the padding sequence that `append_dummy_seq` adds; None means no
    maximum."""
    thd_tail_padding_policy: Literal["append_dummy_seq", "extend_last"] = "append_dummy_seq"
    """Whether padding at the end of a row forms a separate sequence or extends the last one."""
    pad_packed_seq_alignment: int = 1
    """Every sequence starts at a multiple of this number of positions in its row."""

    @property
    def most_sequences(self) -> int | None:
        """Maximum number of sequences per row, without the padding sequence; None means no maximum."""
        if self.thd_max_packed_sequences is None:
            return None
        return self.thd_max_packed_sequences - (self.thd_tail_padding_policy == "append_dummy_seq")
