"""What the tools that run something for pretrain_moe.py do with their words. Imports no torch."""

import argparse
from collections.abc import Mapping, Sequence

from arguments.dry_run.cluster import Cluster, ClusterFlags, cluster_of
from arguments.flags import Registry
from arguments.parser import start_settings


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def add_cluster_options(parser: argparse.ArgumentParser, *more_names: str) -> None:
    """`--gpus`, `--nodes` and `--gpus-per-node`, as pretrain_moe.py has them. `more_names`: of `--gpus`."""
    parser.add_argument(
        "--gpus", "--world-size", *more_names, type=positive, help="ranks of all nodes (the recipe's or file's)"
    )
    parser.add_argument("--nodes", type=positive, help="nodes (as many as the ranks need)")
    parser.add_argument("--gpus-per-node", type=positive, help="ranks of each node (those of that kind of GPU)")


def cluster_asked(
    options: argparse.Namespace, words: Sequence[str], environ: Mapping[str, str], *, otherwise: int | None = 1
) -> Cluster:
    """The cluster of options and of the flags of a run. Raises FlagErrors."""
    start = start_settings(words, Registry.declared())
    kind = getattr(options, "gpu", None) or start.setting("gpu").value
    flags = ClusterFlags(gpu=kind, gpus=options.gpus, nodes=options.nodes, gpus_per_node=options.gpus_per_node)
    return cluster_of(flags, start, environ, otherwise=otherwise)


def words_around_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A tool's own words, and behind the first `--` those of pretrain_moe.py."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]
