"""The list of planted bugs."""

from tests.mutants import (
    in_checkpoints,
    in_layouts,
    in_memory,
    in_models,
    in_watch,
)
from tests.mutants.bug import Bug

BUGS: tuple[Bug, ...] = (
    *in_layouts.GRADIENTS,
    *in_layouts.BALANCING,
    *in_layouts.EXPERTS,
    *in_memory.MEMORY,
    *in_models.ROUTING,
    *in_models.ATTENTION,
    *in_models.TRAINING,
    *in_models.RESUMING,
    *in_checkpoints.SAVING,
    *in_checkpoints.LOADING,
    *in_watch.WATCHING,
)
