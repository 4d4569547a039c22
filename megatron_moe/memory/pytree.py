"""Structures of tensors, taken apart and put together again.

A structure is any nest of tuples, mappings and dataclasses. What differs between two structures besides the contents of
their tensors is their form, which can be compared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_PLAIN = (str, int, float, range, type(None), torch.dtype)
"""Of everything else that is no tensor the kind alone belongs to the form."""


@dataclass(frozen=True)
class Form:
    """A structure without the contents of its tensors."""

    described: tuple[Any, ...]
    """Everything but the tensors, in the order of a walk, and the shapes, types and places of those."""


def flatten(structure: Any) -> tuple[list[Tensor], Form]:
    """Its tensors, each once, and its form. A tensor that stands in two places is one tensor."""
    tensors: list[Tensor] = []
    number: dict[int, int] = {}
    described: list[Any] = []

    def note(tensor: Tensor) -> Tensor:
        if id(tensor) not in number:
            number[id(tensor)] = len(tensors)
            tensors.append(tensor)
            described.append((tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
        described.append(number[id(tensor)])
        return tensor

    _walk(structure, note, described.append)
    return tensors, Form(tuple(described))


def unflatten(structure: Any, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Any:
    """The structure with each of its `tensors` replaced by that of `others` in the same place."""
    instead = {id(tensor): other for tensor, other in zip(tensors, others, strict=True)}
    return _walk(structure, lambda tensor: instead[id(tensor)], lambda _: None)


def _walk(part: Any, change: Callable[[Tensor], Tensor], describe: Callable[[Any], None]) -> Any:
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, tuple):
        describe(("tuple", len(part)))
        parts = [_walk(each, change, describe) for each in part]
        return part._make(parts) if hasattr(part, "_make") else tuple(parts)
    if isinstance(part, Mapping):
        describe(("mapping", tuple(part)))
        return {name: _walk(each, change, describe) for name, each in part.items()}
    if is_dataclass(part) and not isinstance(part, type):
        describe(type(part))
        return map_fields(part, lambda value: _walk(value, change, describe))
    describe(part if isinstance(part, _PLAIN) else type(part))
    return part


def map_fields(instance: Any, change: Callable[[Any], Any]) -> Any:
    """The dataclass instance with `change` applied to each field in order; the same instance if nothing changes."""
    changed = {name: change(value) for name, value in vars(instance).items()}
    same = all(value is changed[name] for name, value in vars(instance).items())
    return instance if same else evolve(instance, changed)


def evolve(instance: T, changes: Mapping[str, Any]) -> T:
    """Copy of a frozen dataclass instance with changed fields, at a tenth of the host time of `dataclasses.replace`:
    neither `__init__` nor `__post_init__` runs."""
    copy = object.__new__(type(instance))
    copy.__dict__.update(instance.__dict__)
    copy.__dict__.update(changes)
    return copy
