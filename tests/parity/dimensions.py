"""Dimensions of the parity matrix and the rules for legal combinations of their values.

A cell has a value for every dimension. Its name lists the values that differ from the first value of their dimension,
as in `tp=2 sp=on ep=4 dispatcher=alltoall`.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from math import prod
from types import MappingProxyType

from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.tp_overlap import OVERLAPPED
from megatron_moe.parallel.grid import ParallelSizesError, all_groups

LARGEST_WORLD = 8
NUM_LAYERS, GLOBAL_BATCH, SEQ = 4, 8, 32

DIMENSIONS = MappingProxyType(
    {
        "tp": ("1", "2", "4"),
        "sp": ("off", "on", "overlap"),
        "cp": ("1", "2", "4"),
        "cpcomm": ("p2p", "allgather", "a2a", "a2a+p2p"),
        "cpdegree": ("fixed", "dynamic"),
        "pp": ("1", "2", "4"),
        "vpp": ("1", "2"),
        "stages": ("even", "custom"),
        "dp": ("1", "2", "4"),
        "ep": ("1", "2", "4", "8"),
        "etp": ("1", "2"),
        "order": ("dp-pp", "pp-dp"),
        "dispatcher": ("local", "allgather", "alltoall", "flex", "hierarchical"),
        "zero": ("off", "on", "grads", "params", "buffers", "replicas", "outer"),
        "overlap": ("off", "grads", "params", "experts"),
        "wgrad": ("fused", "delayed", "exchange"),
        "balance": ("aux", "none", "seq", "global", "bias"),
        "capacity": ("none", "drop", "position", "pad"),
        "shared": ("off", "on", "overlap"),
        "experts": ("grouped", "sequential"),
        "latent": ("off", "on"),
        "layers": ("moe", "dense", "single"),
        "attention": ("gqa", "mla", "delta", "mamba"),
        "groups": ("whole", "shared"),
        "sinks": ("off", "on"),
        "mtp": ("off", "on"),
        "head": ("untied", "tied"),
        "loss": ("mean", "token"),
        "documents": ("whole", "packed", "varlen"),
        "dropout": ("off", "on"),
        "accumulation": ("1", "2", "4"),
        "recompute": ("none", "full", "small", "moe"),
        "optimizer": ("device", "cpu", "streamed", "muon"),
        "graphs": ("off", "router", "layers", "step"),
    }
)
"""Values of each dimension; the first one is the default."""

Cell = Mapping[str, str]


def num_ranks(cell: Cell) -> int | None:
    """World size of a cell, or None if an axis has no value yet."""
    axes = ("tp", "cp", "pp", "dp")
    return prod(int(cell[axis]) for axis in axes) if all(axis in cell for axis in axes) else None


def parallel_config(cell: Cell) -> ParallelConfig:
    """Builds the parallel config of a cell."""
    sizes = {axis: int(cell[axis]) for axis in ("tp", "cp", "pp", "ep", "etp")}
    # With the hierarchical dispatcher, expert groups span two hosts.
    ranks_per_host = sizes["ep"] * sizes["etp"] // 2 if cell["dispatcher"] == "hierarchical" else None
    return ParallelConfig(
        **sizes,
        world_size=num_ranks(cell) or 1,
        sequence_parallel=cell["sp"] != "off",
        tp_comm_overlap=OVERLAPPED if cell["sp"] == "overlap" else (),
        virtual_stages=int(cell["vpp"]),
        cp_sub_axes=(2, 2) if cell["cpcomm"] == "a2a+p2p" else None,
        max_seqlen_per_dp_cp_rank=SEQ // sizes["cp"] if cell["cpdegree"] == "dynamic" else None,
        order=f"tp-cp-ep-{cell['order']}",
        ranks_per_host=ranks_per_host,
    )


def _folds(cell: Cell) -> bool:
    return _fits(*(int(cell[axis]) for axis in ("tp", "cp", "pp", "dp", "ep", "etp")))


@cache
def _fits(tp: int, cp: int, pp: int, dp: int, ep: int, etp: int) -> bool:
    """Returns True if both grids fold onto the same world of at most LARGEST_WORLD ranks."""
    world = tp * cp * pp * dp
    if world > LARGEST_WORLD:
        return False
    try:
        all_groups(ParallelConfig(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, world_size=world))
    except ParallelSizesError:
        return False
    return True


def _stages_are_common(cell: Cell) -> bool:
    """Returns True if both grids have the same pipeline groups.

    With the order pp-dp, this requires tp * cp == etp * ep.
    """
    sizes = {axis: int(cell[axis]) for axis in ("tp", "cp", "pp", "ep", "etp")}
    outside = cell["order"] == "dp-pp" or sizes["pp"] == 1
    return outside or sizes["tp"] * sizes["cp"] == sizes["etp"] * sizes["ep"]


def _is_one(cell: Cell, *axes: str) -> bool:
    return all(cell[axis] == "1" for axis in axes)


UNSHARDED = ("off", "on")
"""Values of "zero" that shard neither gradients nor weights."""


def _replicas_divide(cell: Cell) -> bool:
    """Returns True if the data-parallel ranks of both grids can be divided into two replicas of the shards."""
    if cell["zero"] not in ("replicas", "outer"):
        return True
    ranks = num_ranks(cell)
    assert ranks is not None, f"unknown number of ranks: {cell}"
    return int(cell["dp"]) % 2 == 0 and ranks // prod(int(cell[axis]) for axis in ("pp", "ep", "etp")) % 2 == 0


EXPERT_DIMENSIONS = ("ep", "etp", "dispatcher", "balance", "capacity", "shared", "experts", "latent")


def _only_in_moe(name: str, cell: Cell) -> bool:
    return cell["layers"] != "dense" or cell[name] == DIMENSIONS[name][0]


def _reads_fixed_weights(cell: Cell) -> bool:
    """Returns True if module graphs read weights at fixed addresses.

    Weights have fixed addresses if only gradients are sharded, or if weights are gathered to two buffers.
    """
    return cell["graphs"] != "step" and cell["zero"] in ("grads", "buffers")


def _experts_have_copies(cell: Cell) -> bool:
    """Returns False for captured MoE layers with sharded gradients whose experts have no data-parallel replicas.

    Such layers would shard the gradients of some of their weights only.
    """
    if cell["graphs"] != "layers" or cell["zero"] in UNSHARDED:
        return True
    return (num_ranks(cell) or 1) > prod(int(cell[axis]) for axis in ("pp", "ep", "etp"))


Rule = tuple[tuple[str, ...], Callable[[Cell], bool]]
"""Pair of dimensions and a predicate that returns True if the combination of their values is legal."""
RULES: tuple[Rule, ...] = (
    (("tp", "cp", "pp", "dp", "ep", "etp"), _folds),
    (("tp", "cp", "pp", "ep", "etp", "order"), _stages_are_common),
    # Sequence parallelism requires tensor parallelism, and MoE layers under tensor parallelism require both.
    (("tp", "sp"), lambda c: c["sp"] == "off" or c["tp"] != "1"),
    (("tp", "sp", "layers"), lambda c: c["sp"] != "off" or c["tp"] == "1" or c["layers"] == "dense"),
    # Buffers for overlapped communication have a fixed number of rows.
    (("sp", "cpdegree"), lambda c: c["sp"] != "overlap" or c["cpdegree"] == "fixed"),
    (("cp", "cpcomm"), lambda c: c["cpcomm"] == "p2p" or c["cp"] != "1"),
    (("cp", "cpcomm"), lambda c: c["cpcomm"] != "a2a+p2p" or c["cp"] == "4"),
    # All-to-all exchanges whole heads, and there are four heads.
    (("tp", "cp", "cpcomm"), lambda c: c["cpcomm"] != "a2a" or int(c["tp"]) * int(c["cp"]) <= 4),
    (("tp", "cp", "cpcomm"), lambda c: c["cpcomm"] != "a2a+p2p" or int(c["tp"]) <= 2),
    # Dynamic context parallelism requires packed documents and at least two sequences per microbatch.
    (("cp", "cpdegree"), lambda c: c["cpdegree"] == "fixed" or c["cp"] != "1"),
    (("cpdegree", "cpcomm"), lambda c: c["cpdegree"] == "fixed" or c["cpcomm"] != "a2a+p2p"),
    (("cpdegree", "documents"), lambda c: c["cpdegree"] == "fixed" or c["documents"] != "whole"),
    (("cpdegree", "balance"), lambda c: c["cpdegree"] == "fixed" or c["balance"] != "seq"),
    (
        ("cpdegree", "dp", "accumulation"),
        lambda c: c["cpdegree"] == "fixed" or 2 <= int(c["dp"]) * int(c["accumulation"]) <= 4,
    ),
    # Sequences with different numbers of tokens require the per-token loss.
    (("documents", "loss"), lambda c: c["documents"] != "varlen" or c["loss"] == "token"),
    # Fewer query groups than tensor-parallel ranks require tensor parallelism and grouped-query attention.
    (("tp", "groups"), lambda c: c["groups"] == "whole" or c["tp"] != "1"),
    (("attention", "groups"), lambda c: c["groups"] == "whole" or c["attention"] == "gqa"),
    # Linear attention has four heads for context-parallel and tensor-parallel ranks, and no sinks.
    (("tp", "cp", "attention"), lambda c: c["attention"] in ("gqa", "mla") or int(c["tp"]) * int(c["cp"]) <= 4),
    (("sinks", "attention"), lambda c: c["sinks"] == "off" or c["attention"] in ("gqa", "mla")),
    # Virtual and custom stages require a pipeline. Interleaving runs microbatches in groups of pp.
    (("pp", "vpp"), lambda c: c["vpp"] == "1" or c["pp"] != "1"),
    (("pp", "stages"), lambda c: c["stages"] == "even" or c["pp"] != "1"),
    (("pp", "vpp", "accumulation"), lambda c: c["vpp"] == "1" or int(c["accumulation"]) % int(c["pp"]) == 0),
    (("dp", "accumulation"), lambda c: int(c["dp"]) * int(c["accumulation"]) <= GLOBAL_BATCH),
    (("ep", "etp", "dispatcher"), lambda c: c["dispatcher"] != "local" or _is_one(c, "ep", "etp")),
    (("ep", "etp", "dispatcher"), lambda c: c["dispatcher"] != "hierarchical" or not _is_one(c, "ep", "etp")),
    # Overlap with communication requires communication.
    (("overlap", "dp"), lambda c: c["overlap"] != "grads" or c["dp"] != "1"),
    (("overlap", "dp"), lambda c: c["overlap"] != "params" or c["dp"] != "1"),
    (("overlap", "zero"), lambda c: c["overlap"] != "params" or c["zero"] != "off"),
    # Gradients of a sharded layer are reduced in its backward, so they cannot be delayed. Overlapped microbatches use
    # weights of more layers than two buffers hold.
    (("zero", "dp", "cp"), lambda c: c["zero"] in UNSHARDED or not _is_one(c, "dp", "cp")),
    (("zero", "wgrad"), lambda c: c["zero"] in UNSHARDED or c["wgrad"] != "delayed"),
    (("zero", "overlap"), lambda c: c["zero"] != "buffers" or c["overlap"] != "experts"),
    (("zero", "tp", "cp", "pp", "dp", "ep", "etp"), _replicas_divide),
    (("overlap", "ep"), lambda c: c["overlap"] != "experts" or c["ep"] != "1"),
    (("overlap", "shared"), lambda c: c["overlap"] != "experts" or c["shared"] != "overlap"),
    (("overlap", "pp", "vpp"), lambda c: c["overlap"] != "experts" or c["pp"] == "1" or c["vpp"] != "1"),
    (("overlap", "wgrad"), lambda c: c["overlap"] != "experts" or c["wgrad"] == "fused"),
    (("wgrad", "ep"), lambda c: c["wgrad"] != "exchange" or c["ep"] != "1"),
    (
        ("shared", "dispatcher"),
        lambda c: c["shared"] != "overlap" or c["dispatcher"] in ("alltoall", "flex", "hierarchical"),
    ),
    (("shared", "latent"), lambda c: c["shared"] != "overlap" or c["latent"] == "off"),
    # Context-parallel ranks have different dropout masks, which one rank cannot reproduce.
    (("cp", "dropout"), lambda c: c["dropout"] == "off" or c["cp"] == "1"),
    # Overlapped layers run node by node, so whole layers or MoE blocks cannot be recomputed.
    (("overlap", "recompute"), lambda c: c["overlap"] != "experts" or c["recompute"] not in ("full", "moe")),
    (("layers", "recompute"), lambda c: c["recompute"] != "moe" or c["layers"] != "dense"),
    # A captured module uses no random numbers and is not part of a recomputed module.
    (("graphs", "dropout"), lambda c: c["graphs"] == "off" or c["dropout"] == "off"),
    (("graphs", "recompute"), lambda c: c["graphs"] in ("off", "step") or c["recompute"] in ("none", "small")),
    # Captured experts read row offsets on the device, and only kernels can exchange tokens inside a graph.
    (("graphs", "experts"), lambda c: c["graphs"] in ("off", "router") or c["experts"] == "grouped"),
    (
        ("graphs", "ep", "etp", "dispatcher"),
        lambda c: c["graphs"] in ("off", "router") or c["dispatcher"] == "flex" or _is_one(c, "ep", "etp"),
    ),
    (("graphs", "overlap"), lambda c: c["graphs"] != "layers" or c["overlap"] != "experts"),
    # Captured modules read gathered weights at fixed addresses. A captured step can neither gather weights nor move
    # optimizer state.
    (("graphs", "zero"), lambda c: c["graphs"] == "off" or c["zero"] in UNSHARDED or _reads_fixed_weights(c)),
    (("graphs", "zero", "tp", "cp", "pp", "dp", "ep", "etp"), _experts_have_copies),
    (("graphs", "optimizer"), lambda c: c["graphs"] != "step" or c["optimizer"] not in ("cpu", "streamed")),
    (("graphs", "documents"), lambda c: c["graphs"] != "step" or c["documents"] != "varlen"),
    # In a dense model, expert dimensions have their default values.
    *((("layers", name), partial(_only_in_moe, name)) for name in EXPERT_DIMENSIONS),
)


def legal(cell: Cell) -> bool:
    """Returns True if a cell, which may be incomplete, breaks no rule."""
    return all(rule(cell) for needs, rule in RULES if all(name in cell for name in needs))


def name_of(cell: Cell) -> str:
    """Returns the name of a cell: its non-default values, or `plain` if there are none."""
    parts = [
        f"{name}={value}" for name, values in DIMENSIONS.items() if (value := cell.get(name, values[0])) != values[0]
    ]
    return " ".join(parts) or "plain"


def cell_of(name: str) -> dict[str, str]:
    """Returns the cell with a name from `name_of`. Raises AssertionError if the cell is not legal."""
    cell = {dimension: values[0] for dimension, values in DIMENSIONS.items()}
    for part in name.split() if name != "plain" else ():
        dimension, _, value = part.partition("=")
        assert value in DIMENSIONS.get(dimension, ()), f"{part!r} of cell {name!r} is not a value of a dimension"
        cell[dimension] = value
    assert legal(cell), f"cell {name!r} is not legal"
    return cell
