"""What the layers keep between forward and backward. They ask here by the name of a part; the answer never changes a
number."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_moe.config.memory import RecomputeConfig
from megatron_moe.data.batch import MicrobatchContext
from megatron_moe.memory.activation_offload import ActivationOffload
from megatron_moe.memory.output_discard import (
    DiscardedOutput,
    PackedTensor,
    unpack,
)
from megatron_moe.memory.paged_stash import PagedStash
from megatron_moe.memory.recompute import checkpoint
from megatron_moe.parallel.context import ProcessGroup

Scope = AbstractContextManager[object]
"""Inside of it some of the tensors that are saved for the backward are kept in another form."""


class Policy(Protocol):
    """Takes some of the tensors that are saved for the backward."""

    def pack(self, tensor: Tensor) -> PackedTensor | None:
        """What is kept instead; None: the policy does not take this tensor."""
        ...

    def close(self) -> None:
        """Its scope was left."""
        ...


class SavedTensorPolicy:
    """The wishes of one run. Scopes may stand in each other: the innermost is asked first, and what it does not take is
    the next one's."""

    def __init__(
        self,
        recompute: RecomputeConfig | None = None,
        *,
        offload: ActivationOffload | None = None,
        stash: PagedStash | None = None,
        tp: ProcessGroup | None = None,
    ) -> None:
        """`recompute`: None: nothing runs twice. `offload`: None: all stays on the device. `stash`: None: rows are kept
        whole. `tp`: who shares out the inputs of recomputed layers, where that is wished."""
        self.offload = offload
        self.stash = stash
        self._recompute = recompute or RecomputeConfig()
        self._spread = tp if self._recompute.distribute else None
        self._policies: list[Policy] = []

    def is_recomputed(self, module: str) -> bool:
        """Whether a part is run again in the backward."""
        return self._recompute.granularity == "selective" and module in self._recompute.modules

    def run(self, module: str, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`run(*tensors)`; of a chosen module only the tensors are kept, and the backward runs it again."""
        return checkpoint(run, run, *tensors) if self.is_recomputed(module) else run(*tensors)

    def checkpoint(self, run: Callable[..., Tensor], *tensors: Tensor, mb: MicrobatchContext) -> Tensor:
        """`run(*tensors, mb)`, run again in the backward. Metrics are recorded in the forward only."""
        unrecorded = replace(mb, metrics=None)
        return checkpoint(
            lambda *given: run(*given, mb), lambda *given: run(*given, unrecorded), *tensors, spread=self._spread
        )

    def layers(self, number: int, *, ahead: bool = False) -> list[tuple[int, bool]]:
        """How the layers of a stage are run: (how many in one go, are they run again in the backward?), in order.

        `ahead`: the layers of multi-token prediction, which are run one by one.
        """
        config = self._recompute
        if config.granularity != "full":
            return [(1, False)] * number
        if config.method == "block":
            checkpoint = 0 if ahead else min(config.num_layers, number)
            return [(1, True)] * checkpoint + [(1, False)] * (number - checkpoint)
        size = 1 if ahead else config.num_layers
        return [(min(size, number - first), True) for first in range(0, number, size)]

    def discard_output(
        self,
        module: str,
        make: Callable[..., Tensor | tuple[Tensor, ...]],
        inputs: tuple[Tensor, ...],
        *outputs: Tensor,
    ) -> Scope:
        """The scope of the consumers of `outputs`, which `make(*inputs)` gave, under a name of their own: whoever saves
        one of a chosen module there, saves a note of how it is made. It may be entered several times, as long as
        somebody holds the outputs."""
        if not self.is_recomputed(module) or not torch.is_grad_enabled():
            return nullcontext()
        kept = [self.pack(tensor.detach()) for tensor in inputs]
        return _Scope(self, self._policies, DiscardedOutput(make, kept, outputs))

    def offload_scope(self, module: str) -> Scope:
        """The scope of one run of a module: what a chosen one saves waits on the host."""
        if self.offload is None or module not in self.offload.config.modules or not torch.is_grad_enabled():
            return nullcontext()
        return _Scope(self, self._policies, self.offload.open(module))

    def stash_rows(self, rows_RW: Tensor, valid: Tensor) -> Scope:
        """The scope of the consumers of rows of which those past `valid`, an int32 scalar on the device, hold nothing
        and need not be kept."""
        if self.stash is None or not torch.is_grad_enabled():
            return nullcontext()
        return _Scope(self, self._policies, self.stash.open(rows_RW, valid))

    def pack(self, tensor: Tensor) -> PackedTensor:
        """What the scopes that are open keep of a tensor that is saved for the backward."""
        for policy in reversed(self._policies):
            packed = policy.pack(tensor)
            if packed is not None:
                return packed
        return tensor


class _Scope(AbstractContextManager[None]):
    """Tensors that are saved inside are offered to the policy. May be entered more than once, not inside of itself."""

    def __init__(self, saved_tensors: SavedTensorPolicy, policies: list[Policy], policy: Policy) -> None:
        self._policies = policies
        self._policy = policy
        self._hooks = saved_tensors_hooks(saved_tensors.pack, unpack)

    def __enter__(self) -> None:
        self._policies.append(self._policy)
        self._hooks.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._hooks.__exit__(*raised)
        self._policies.pop().close()
