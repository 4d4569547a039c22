"""GEMMs that `--tp-comm-overlap` overlaps with tensor-parallel communication, under the names of Transformer Engine."""

from types import MappingProxyType

from megatron_moe.config.component import ParamSpec
from megatron_moe.config.parallel import ParallelConfig

LAYERS = MappingProxyType({"qkv": 0, "proj": 1, "fc1": 0, "fc2": 1})
"""Kind of linear layer -> dim of its weight that tensor parallelism shards."""
GEMMS = tuple(f"{layer}_{each}" for layer in LAYERS for each in ("fprop", "dgrad", "wgrad"))
"""All names. In a column-parallel layer (qkv, fc1), `fprop` overlaps with the gather of its input, `dgrad` with the
second gather, for the weight gradient, and `wgrad` with the scatter of the input gradient. In a row-parallel layer
(proj, fc2), `fprop` overlaps with the scatter of its output and `dgrad` with the gather of its gradient."""
OVERLAPPED = tuple(name for name in GEMMS if name not in ("proj_wgrad", "fc2_wgrad"))
"""Names of the GEMMs that have communication to overlap with."""
MIN_ROWS = 512
"""Fewest rows (positions times sequences) of a shard for which communication is overlapped on a GPU. An estimate: at
350 GB/s, the copy of 512 rows of 4096 bf16 channels takes 12 us, less than the host takes to launch it."""
SLOT_ALIGN = 512
"""Alignment in bytes of the buffers for shards."""
FLAG_BYTES = 128
"""Distance between two flags in symmetric memory, so that ranks do not write to the same cache line."""
NO_EFFECT = "--tp-comm-overlap has no effect"
"""Beginning of the notes at start, which is known from the flags, and of the log line of a host without peer access."""
NUM_FLAGS = 4
"""Flags per pair of ranks: a shard can be copied, has been copied, has arrived in a slot, and has been summed."""

_BY_COUNT = MappingProxyType({"attention": ("qkv", "proj"), "dense_mlp": ("fc1", "fc2"), "shared": ("fc1", "fc2")})


def tp_overlap_layer_kind(spec: ParamSpec) -> str:
    """Kind of the linear layer whose weight is `spec`; empty if it does not take part.

    Takes part: column- and row-parallel layers of mixers, dense MLPs and shared experts. Not: the input projection of
    multi-token prediction, whose output is gathered; the head, whose GEMMs take much longer than its communication; and
    experts, whose tokens are exchanged.
    """
    layers, tp_dim = _BY_COUNT.get(spec.counted), spec.meta.tp_dim
    if layers is None or tp_dim is None or spec.meta.role != "matrix" or spec.reads_gathered or spec.low == "mtp":
        return ""
    return layers[tp_dim]


def overlapped_gemms(spec: ParamSpec, parallel: ParallelConfig) -> tuple[str, ...]:
    """Names of the GEMMs of one linear layer that overlap with its communication."""
    layer = tp_overlap_layer_kind(spec)
    if not layer or parallel.tp == 1 or not parallel.sequence_parallel:
        return ()
    return tuple(name for name in parallel.tp_comm_overlap if name.startswith(f"{layer}_"))


def symmetric_bytes(shard_bytes: int, num_ranks: int) -> int:
    """Bytes of symmetric memory of a rank: a send buffer for its shard, one slot per other rank, and flags."""
    return num_ranks * (shard_bytes + NUM_FLAGS * FLAG_BYTES)
