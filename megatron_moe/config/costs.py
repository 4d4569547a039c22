"""Base class of dataclasses with one number per kind of cost."""

from dataclasses import dataclass
from typing import Generic, Self, TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class CostSum(Generic[Number]):
    """Base of dataclasses whose fields are all numbers. Supports field-wise addition and multiplication by a factor."""

    def __add__(self, other: Self) -> Self:
        return type(self)(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __mul__(self, factor: Number) -> Self:
        return type(self)(**{name: value * factor for name, value in vars(self).items()})

    @property
    def total(self) -> Number:
        """Sum of all fields."""
        total: Number = sum(vars(self).values())
        return total
