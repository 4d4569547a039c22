"""A violating and a valid command line per rule, and flags that the cases of several rule files share."""

from typing import NamedTuple

NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
MLA = "--multi-latent-attention --rope-type rope"
EIGHT_RANKS = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --global-batch-size 32"
SHARED = "--moe-shared-expert-intermediate-size 64"
BALANCING = "--moe-router-load-balancing-type"
GRAPHS = f"{NO_DROPOUT} --cuda-graph-impl local"
GRAPH_MODULES = f"{GRAPHS} --cuda-graph-modules"


class Case(NamedTuple):
    """Changes of the small command line that violate a rule, part of the message, and changes that do not."""

    rule: str
    bad: str
    sentence: str
    good: str
    without: str = ""
    """Flags that are removed in both command lines."""
    environ: dict[str, str] | None = None
