"""Base class of cost records with one number per kind of cost."""

from dataclasses import dataclass
from typing import Generic, Self, TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Amounts(Generic[Number]):
    """Record of numbers that supports addition and multiplication by a factor, field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __mul__(self, factor: Number) -> Self:
        return type(self)(**{name: value * factor for name, value in vars(self).items()})

    @property
    def total(self) -> Number:
        """Sum of all fields."""
        return sum(vars(self).values())
