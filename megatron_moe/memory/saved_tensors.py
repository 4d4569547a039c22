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
    """Interface of a policy, which packs some of the tensors that are saved for backward."""

    def pack(self, tensor: Tensor) -> PackedTensor | None:
        """Packed form of the tensor; None: the policy does not apply to it."""
        ...

    def close(self) -> None:
        """Called at the end of the scope."""
        ...


class SavedTensorPolicy:
    """Policies of one run. Scopes nest: a saved tensor goes to the innermost scope whose policy applies to it."""

    def __init__(
        self,
        recompute: RecomputeConfig | None = None,
        *,
        offload: ActivationOffload | None = None,
        stash: PagedStash | None = None,
        tp: ProcessGroup | None = None,
    ) -> None:
        """`recompute`, `offload`, `stash`: None disables them. `tp`: group over which `--distribute-saved-activations`
        shards the inputs of recomputed layers."""
        self.offload = offload
        self.stash = stash
        self._recompute = recompute or RecomputeConfig()
        self._shard_over = tp if self._recompute.distribute_saved_activations else None
        self._policies: list[Policy] = []

    def is_recomputed(self, module: str) -> bool:
        """Whether a module is recomputed in backward (selective recompute)."""
        return self._recompute.recompute_granularity == "selective" and module in self._recompute.recompute_modules

    def run(self, module: str, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Runs `run(*tensors)`; if `module` is recomputed, only its inputs are saved."""
        return checkpoint(run, run, *tensors) if self.is_recomputed(module) else run(*tensors)

    def checkpoint(self, run: Callable[..., Tensor], *tensors: Tensor, mb: MicrobatchContext) -> Tensor:
        """Runs `run(*tensors, mb)` and recomputes it in backward. Metrics are recorded only in the first forward."""
        group, unrecorded = self._shard_over, replace(mb, metrics=None)
        return checkpoint(lambda *x: run(*x, mb), lambda *x: run(*x, unrecorded), *tensors, shard_over=group)

    def layers(self, number: int, *, ahead: bool = False) -> list[tuple[int, bool]]:
        """Divides a stage's `number` layers into groups, in order: (number of layers, whether the group is recomputed).

        `ahead`: True for layers of multi-token prediction, which form groups of one layer.
        """
        config = self._recompute
        if config.recompute_granularity != "full":
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
    ) -> Scope:
        """Scope of the consumers of `outputs` = `make(*inputs)`: if `module` is recomputed, they save a
        `DiscardedOutput` instead of the outputs. May be entered several times while the outputs are alive."""
        if not self.is_recomputed(module) or not torch.is_grad_enabled():
            return nullcontext()
        kept = [self.pack(tensor.detach()) for tensor in inputs]
        return _Scope(self.pack, self._policies, DiscardedOutput(make, kept, outputs))

    def offload_scope(self, module: str) -> Scope:
        """Scope of one call of a module: tensors that an offloaded module saves are moved to the host."""
        if self.offload is None or module not in self.offload.config.offload_modules or not torch.is_grad_enabled():
            return nullcontext()
        return _Scope(self.pack, self._policies, self.offload.open(module))

    def stash_rows(self, rows_RW: Tensor, valid: Tensor) -> Scope:
        """Scope of the consumers of `rows_RW`: only the first `valid` rows (int32 scalar on the device) are saved, in
        pages."""
        if self.stash is None or not torch.is_grad_enabled():
            return nullcontext()
        return _Scope(self.pack, self._policies, self.stash.open(rows_RW, valid))

    def pack(self, tensor: Tensor) -> PackedTensor:
        """Packs a tensor with the innermost open scope that applies to it."""
        for policy in reversed(self._policies):
            packed = policy.pack(tensor)
            if packed is not None:
                return packed
        return tensor


class _Scope(AbstractContextManager[None]):
    """Applies a policy to the tensors that are saved inside. Reusable, but not reentrant."""

    def __init__(self, pack: Callable[[Tensor], PackedTensor], policies: list[Policy], policy: Policy) -> None:
        self._policies = policies
        self._policy = policy
        self._hooks = saved_tensors_hooks(pack, unpack)

    def __enter__(self) -> None:
        self._policies.append(self._policy)
        self._hooks.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._hooks.__exit__(*raised)
        self._policies.pop().close()
