"""Saved-tensor policies (recompute, output discard, offload, paged stash), selected by module name. They never change
numerics."""

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
from megatron_moe.memory.output_discard import DiscardedOutput, PackedTensor, unpack
from megatron_moe.memory.paged_stash import PagedStash
from megatron_moe.memory.recompute import checkpoint
from megatron_moe.parallel.context import ProcessGroup

Scope = AbstractContextManager[object]
"""Context manager in which some of the tensors saved for backward are packed by a `Policy`."""


class Policy(Protocol):
    """Interface of a saved-tensor policy, which decides how tensors that autograd saves for backward are stored."""

    def pack(self, tensor: Tensor) -> PackedTensor | None:
        """Returns the packed form of the tensor, or None if the policy does not apply to it."""

    def close(self) -> None:
        """Called at the end of the scope."""


class SavedTensorPolicy:
    """Saved-tensor policies of one run. If scopes are nested, the innermost policy that applies packs the tensor."""

    def __init__(
        self,
        recompute: RecomputeConfig | None = None,
        *,
        offload: ActivationOffload | None = None,
        stash: PagedStash | None = None,
        tp: ProcessGroup | None = None,
    ) -> None:
        """`recompute`, `offload`, `stash`: None disables the technique. `tp`: group over which the saved inputs of
        recomputed layers are sharded if `--distribute-saved-activations` is set."""
        self.offload = offload
        self.stash = stash
        self._recompute = recompute or RecomputeConfig()
        self._shard_over = tp if self._recompute.distribute_saved_activations else None
        self._policies: list[Policy] = []

    def is_recomputed(self, module: str) -> bool:
        """Whether selective recompute is configured and includes the module."""
        return module in self._recompute.recompute_modules

    def run(self, module: str, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Returns `run(*tensors)`; if `module` is recomputed, only `tensors` are saved for backward."""
        return checkpoint(run, run, *tensors) if self.is_recomputed(module) else run(*tensors)

    def checkpoint(self, run: Callable[..., Tensor], *tensors: Tensor, mb: MicrobatchContext) -> Tensor:
        """Returns `run(*tensors, mb)` and recomputes it in backward. Metrics are recorded only in the first forward."""
        group, unrecorded = self._shard_over, replace(mb, metrics=None)
        return checkpoint(lambda *x: run(*x, mb), lambda *x: run(*x, unrecorded), *tensors, shard_over=group)

    def recompute_groups(self, number: int, *, ahead: bool = False) -> list[tuple[int, bool]]:
        """Divides the `number` layers of a stage into groups. Returns (number of layers, is recomputed) for each group.

        `ahead`: True for the layers of multi-token prediction. They form groups of one layer and are recomputed only
        with full recompute by the method "uniform"."""
        config = self._recompute
        if config.recompute_method is None:
            return [(1, False)] * number
        if config.recompute_method == "block":
            checkpoint = 0 if ahead else min(config.recompute_num_layers, number)
            return [(1, True)] * checkpoint + [(1, False)] * (number - checkpoint)
        size = 1 if ahead else config.recompute_num_layers
        return [(min(size, number - first), True) for first in range(0, number, size)]

    def discard_output(
        self,
        module: str,
        make: Callable[..., Tensor | tuple[Tensor, ...]],
        inputs: tuple[Tensor, ...],
        *outputs: Tensor,
    ) -> "DiscardScope":
        """Scope in which to run the consumers of `outputs`, which are the result of `make(*inputs)`. If `module` is
        recomputed, consumers do not save the outputs; backward calls `make` again. The scope is reusable."""
        if not self.is_recomputed(module) or not torch.is_grad_enabled():
            return DiscardScope()
        kept = [self.pack(tensor.detach()) for tensor in inputs]
        return _OpenDiscardScope(self.pack, self._policies, DiscardedOutput(make, kept, outputs))

    def offload_scope(self, module: str) -> Scope:
        """Scope in which to call `module`. If offload is enabled for it, its saved tensors can be moved to the host."""
        if self.offload is None or module not in self.offload.config.offload_modules or not torch.is_grad_enabled():
            return nullcontext()
        return _Scope(self.pack, self._policies, self.offload.begin_group(module))

    def after_replay(self) -> None:
        """Called after the replay of a captured module: starts the offload copies that were delayed until then."""
        if self.offload is not None:
            self.offload.after_replay()

    def stash_rows(self, rows_RW: Tensor, valid: Tensor) -> Scope:
        """Scope in which to run the consumers of `rows_RW`. If the paged stash is enabled, only the first `valid` rows
        (int32 scalar on the device) are saved."""
        if self.stash is None or self.stash.is_disabled or not torch.is_grad_enabled():
            return nullcontext()
        return _Scope(self.pack, self._policies, self.stash.new_policy(rows_RW, valid))

    def pack(self, tensor: Tensor) -> PackedTensor:
        """Packs the tensor with the innermost open policy that applies to it; returns the tensor itself if none
        does."""
        for policy in reversed(self._policies):
            packed = policy.pack(tensor)
            if packed is not None:
                return packed
        return tensor


class _Scope(AbstractContextManager[None]):
    """Context manager that applies a policy to the tensors saved for backward in its body. Reusable, not reentrant."""

    def __init__(self, pack: Callable[[Tensor], PackedTensor], policies: list[Policy], policy: Policy) -> None:
        self._pack = pack
        self._policies = policies
        self._policy = policy
        self._hooks = saved_tensors_hooks(pack, unpack)

    def __enter__(self) -> None:
        self._policies.append(self._policy)
        self._hooks.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._hooks.__exit__(*raised)
        self._policies.pop().close()


class DiscardScope(nullcontext[None]):
    """Context manager in which consumers of discarded outputs run; this base class does nothing, because nothing is
    discarded."""

    def recomputing_inside(self, guard: Callable[[], Scope]) -> "DiscardScope":
        """Returns a scope whose recomputation runs inside `guard()`, which provides the weights."""
        return self


class _OpenDiscardScope(_Scope, DiscardScope):
    _policy: DiscardedOutput

    def recomputing_inside(self, guard: Callable[[], Scope]) -> DiscardScope:
        return _OpenDiscardScope(self._pack, self._policies, self._policy.recomputing_inside(guard))
