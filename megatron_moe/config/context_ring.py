"""Sizes of the symmetric memory through which a ring of context-parallel ranks exchanges keys and values."""

from typing import NamedTuple

from megatron_moe.config.tp_overlap import FLAG_BYTES, NUM_FLAGS


class RingBuffers(NamedTuple):
    """Sizes of the buffers of one rank, in bytes: multiples of `SLOT_ALIGN`."""

    keys_values: int
    """Keys and values of this rank, which the other ranks copy."""
    gradients: int
    """Slot for the gradients of keys and values that the previous rank of the ring sends."""

    def total(self, num_ranks: int) -> int:
        """Size of both buffers and of the flags in a ring of `num_ranks` ranks."""
        return self.keys_values + self.gradients + num_ranks * NUM_FLAGS * FLAG_BYTES
