"""A world of any size in one process: collectives that carry nothing.

torch's "fake" backend gives every tensor back as it was, and fills what is gathered with this rank's own part. Shapes,
groups and memory are those of the rank that is played; values that would come from other ranks are not.
"""

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def enter_fake_world(rank: int, world_size: int) -> None:
    """Makes this process rank `rank` of `world_size` without any peer. It must not belong to a process group yet."""
    assert not dist.is_initialized(), "this process belongs to a process group already; stop its context first"
    # Registers what collectives do with tensors that have no data. torch's compiler comes with it, which takes a second
    # or more to import: the start of a training need not pay for it.
    import torch.distributed._tools.fake_collectives  # noqa: F401

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
