"""The check at the start of a run that the ranks together own the model: every element, once."""

from collections.abc import Mapping

import torch

from megatron_moe.config.exit_codes import RunError
from megatron_moe.optim.clip_grads import counted, over_the_world
from megatron_moe.optim.grad_buffers import GradBuffers
from megatron_moe.parallel.param_meta import Grid


def check_coverage(buffers: GradBuffers, elements: Mapping[Grid, int]) -> None:
    """Compares what the ranks count with the number of elements that the model has on each grid.

    Norms, zeros and checkpoints are made of what the ranks count, and the optimizer steps what they own. All ranks
    call it together.

    Raises:
        RunError: something is owned twice or by nobody.
    """
    owned = dict.fromkeys(elements, 0)
    for buffer in counted(buffers):
        owned[buffer.key.grid] += sum(buffer.layout.elements(start, end) for start, end in buffer.owned)
    sums = torch.tensor(list(owned.values()), dtype=torch.int64, device=buffers.device)
    # world: 16 bytes
    found = over_the_world(sums, buffers, buffers.context).tolist()
    for (grid, expected), number in zip(elements.items(), found, strict=True):
        if number != expected:
            what = "the experts" if grid == "expert" else "everything but the experts"
            raise RunError(
                f"the ranks together own {number:,} elements of {what}, the model has {expected:,}: with the layout "
                f"{buffers.context.config} some would be stepped and counted twice or never; this is an error of the "
                f"program and not of the command line, and another layout may be free of it"
            )
