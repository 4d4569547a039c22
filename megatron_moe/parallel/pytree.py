"""Flattening of pytrees (nested tuples, mappings and dataclasses) of tensors.

Differences from `torch.utils._pytree`: a tensor that occurs twice is one leaf, and dataclasses need no registration.
The structure (`TreeSpec`) is hashable and includes shapes and dtypes, so CUDA graphs can be looked up by it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_COMPARED_BY_VALUE = (str, int, float, range, type(None), torch.dtype)
"""Types of non-tensor leaves that the `TreeSpec` compares by value; other leaves are compared by type."""
TreeSpec = tuple[Any, ...]
"""Hashable pytree structure: containers, non-tensor leaves, and each tensor's position, shape, dtype, requires_grad."""


def flatten(tree: Any) -> tuple[list[Tensor], TreeSpec]:
    """Returns the tensors of a pytree and its structure. A tensor that occurs several times is returned once."""
    tensors: list[Tensor] = []
    indices: dict[int, int] = {}
    spec: list[Any] = []

    def add_tensor(tensor: Tensor) -> Tensor:
        if id(tensor) not in indices:
            indices[id(tensor)] = len(tensors)
            tensors.append(tensor)
            spec.append((tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        spec.append(indices[id(tensor)])
        return tensor

    _map(tree, add_tensor, spec.append)
    return tensors, tuple(spec)


def unflatten(tree: Any, tensors: Sequence[Tensor], replacements: Sequence[Tensor]) -> Any:
    """Copy of the pytree in which `tensors[i]` is replaced by `replacements[i]` for every i."""
    by_id = {id(tensor): replacement for tensor, replacement in zip(tensors, replacements, strict=True)}
    return _map(tree, lambda tensor: by_id[id(tensor)], lambda _: None)


def _map(tree: Any, change: Callable[[Tensor], Tensor], describe: Callable[[Any], None]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        describe(("tuple", len(tree)))
        items = [_map(each, change, describe) for each in tree]
        return tree._make(items) if hasattr(tree, "_make") else tuple(items)
    if isinstance(tree, Mapping):
        describe(("mapping", tuple(tree)))
        return {name: _map(each, change, describe) for name, each in tree.items()}
    if is_dataclass(tree) and not isinstance(tree, type):
        describe(type(tree))
        return map_fields(tree, lambda value: _map(value, change, describe))
    describe(tree if isinstance(tree, _COMPARED_BY_VALUE) else type(tree))
    return tree


def map_state(state: Any, change: Callable[[Tensor], Any]) -> Any:
    """Copy of the state between two steps of a computation with `change` applied to its tensors.

    A pending exchange is changed in place, because its start and its finish refer to the same object.
    """
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, tuple):
        if not state:
            return state
        parts = tuple([map_state(part, change) for part in state])
        return state if all(map(is_, parts, state)) else parts
    if hasattr(state, "replace_boundary"):
        state.replace_boundary(change)
    elif hasattr(state, "__dataclass_fields__"):
        changes = {}
        for name, part in vars(state).items():
            if part is not None:
                changed = change(part) if isinstance(part, Tensor) else map_state(part, change)
                if changed is not part:
                    changes[name] = changed
        return evolve(state, changes) if changes else state
    return state


def map_fields(instance: Any, change: Callable[[Any], Any]) -> Any:
    """Copy of a dataclass instance with `change` applied to each field; the instance itself if nothing changes."""
    changes = {name: changed for name, value in vars(instance).items() if (changed := change(value)) is not value}
    return evolve(instance, changes) if changes else instance


def evolve(instance: T, changes: Mapping[str, Any]) -> T:
    """Copy of a frozen dataclass instance with changed fields. Ten times faster than `dataclasses.replace`, because
    neither `__init__` nor `__post_init__` runs."""
    copy = object.__new__(type(instance))
    copy.__dict__.update(instance.__dict__, **changes)
    return copy
