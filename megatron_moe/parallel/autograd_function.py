"""Base class of the program's autograd functions."""

from typing import TYPE_CHECKING, Any

from torch.autograd.function import _SingleLevelFunction


class AutogradFunction(_SingleLevelFunction):
    """`torch.autograd.Function` without support for functorch transforms, which are not used here.

    `torch.autograd.Function.apply` examines every argument for them, in as much host time as the rest of the call.
    """

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: Any) -> Any:
            """Calls `forward` and records the function in the autograd graph."""
