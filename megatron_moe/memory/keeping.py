"""What the layers keep between forward and backward. They ask here by the name of a part; the answer never changes a
number."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_moe.data.batch import TokenMeta
from megatron_moe.memory.forgotten import Forgotten, Packed, unpack
from megatron_moe.memory.offload import Offload
from megatron_moe.memory.recompute import run_twice
from megatron_moe.memory.stash import Stash
from megatron_moe.parallel.context import Group
from megatron_moe.specs.memory import RecomputeSpec

Scope = AbstractContextManager[object]
"""Inside of it some of the tensors that are saved for the backward are kept in another form."""


class Policy(Protocol):
    """Takes some of the tensors that are saved for the backward."""

    def pack(self, tensor: Tensor) -> Packed | None:
        """What is kept instead; None: the policy does not take this tensor."""
        ...

    def close(self) -> None:
        """Its scope was left."""
        ...


class Keeping:
    """The wishes of one run. Scopes may stand in each other: the innermost is asked first, and what it does not take is
    the next one's."""

    def __init__(
        self,
        recompute: RecomputeSpec | None = None,
        *,
        offload: Offload | None = None,
        stash: Stash | None = None,
        tp: Group | None = None,
    ) -> None:
        """`recompute`: None: nothing runs twice. `offload`: None: all stays on the device. `stash`: None: rows are kept
        whole. `tp`: who shares out the inputs of recomputed layers, where that is wished."""
        self.offload = offload
        self.stash = stash
        self._recompute = recompute or RecomputeSpec()
        self._spread = tp if self._recompute.distribute else None
        self._policies: list[Policy] = []

    def twice(self, module: str) -> bool:
        """Whether a part is run again in the backward."""
        return self._recompute.granularity == "selective" and module in self._recompute.modules

    def run(self, module: str, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`run(*tensors)`; of a chosen module only the tensors are kept, and the backward runs it again."""
        return run_twice(run, run, *tensors) if self.twice(module) else run(*tensors)

    def again(self, run: Callable[..., Tensor], *tensors: Tensor, meta: TokenMeta) -> Tensor:
        """`run(*tensors, meta)`, run again in the backward. Metrics are recorded in the forward only."""
        unrecorded = replace(meta, tally=None)
        return run_twice(
            lambda *given: run(*given, meta), lambda *given: run(*given, unrecorded), *tensors, spread=self._spread
        )

    def layers(self, number: int, *, ahead: bool = False) -> list[tuple[int, bool]]:
        """How the layers of a stage are run: (how many in one go, are they run again in the backward?), in order.

        `ahead`: the layers of multi-token prediction, which are run one by one.
        """
        spec = self._recompute
        if spec.granularity != "full":
            return [(1, False)] * number
        if spec.method == "block":
            again = 0 if ahead else min(spec.num_layers, number)
            return [(1, True)] * again + [(1, False)] * (number - again)
        size = 1 if ahead else spec.num_layers
        return [(min(size, number - first), True) for first in range(0, number, size)]

    def forget(
        self,
        module: str,
        make: Callable[..., Tensor | tuple[Tensor, ...]],
        inputs: tuple[Tensor, ...],
        *outputs: Tensor,
    ) -> Scope:
        """The scope of the consumers of `outputs`, which `make(*inputs)` gave, under a name of their own: whoever saves
        one of a chosen module there, saves a note of how it is made. It may be entered several times, as long as
        somebody holds the outputs."""
        if not self.twice(module) or not torch.is_grad_enabled():
            return nullcontext()
        kept = [self.pack(tensor.detach()) for tensor in inputs]
        return _Scope(self, self._policies, Forgotten(make, kept, outputs))

    def region(self, module: str) -> Scope:
        """The scope of one run of a module: what a chosen one saves waits on the host."""
        if self.offload is None or module not in self.offload.spec.modules or not torch.is_grad_enabled():
            return nullcontext()
        return _Scope(self, self._policies, self.offload.open(module))

    def used_rows(self, rows_RW: Tensor, valid: Tensor) -> Scope:
        """The scope of the consumers of rows of which those past `valid`, an int32 scalar on the device, hold nothing
        and need not be kept."""
        if self.stash is None or not torch.is_grad_enabled():
            return nullcontext()
        return _Scope(self, self._policies, self.stash.open(rows_RW, valid))

    def pack(self, tensor: Tensor) -> Packed:
        """What the scopes that are open keep of a tensor that is saved for the backward."""
        for policy in reversed(self._policies):
            packed = policy.pack(tensor)
            if packed is not None:
                return packed
        return tensor


class _Scope(AbstractContextManager[None]):
    """Tensors that are saved inside are offered to the policy. May be entered more than once, not inside of itself."""

    def __init__(self, keeping: Keeping, policies: list[Policy], policy: Policy) -> None:
        self._policies = policies
        self._policy = policy
        self._hooks = saved_tensors_hooks(keeping.pack, unpack)

    def __enter__(self) -> None:
        self._policies.append(self._policy)
        self._hooks.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._hooks.__exit__(*raised)
        self._policies.pop().close()
