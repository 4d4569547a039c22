"""How a flag is declared: one field of a frozen dataclass, whose docstring is its help.

    hidden_size: int = flag(REQUIRED, essential=True)
    \"\"\"Width of the residual stream.\"\"\"

declares `--hidden-size`. Its type and choices are the field's annotation; a `bool` field also gets `--no-NAME`.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Final, Literal

Status = Literal["same", "close", "ours", "not yet", "refused"]
"""Compared with Megatron-LM: the same meaning; close to it (the note says how); only here; parsed but not available
yet; never available (the note says what to use)."""


class _Required:
    """The default of a flag that must be given."""

    def __repr__(self) -> str:
        return "required"


REQUIRED: Final = _Required()


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What `flag()` adds to a dataclass field."""

    names: tuple[str, ...]
    off: tuple[str, ...]
    status: Status
    least: float | None
    below: float | None
    works: tuple[object, ...]
    note: str
    harmless: bool
    essential: bool
    bare: str | None


def flag(
    default: object,
    *,
    names: tuple[str, ...] = (),
    off: tuple[str, ...] = (),
    status: Status = "same",
    least: float | None = None,
    below: float | None = None,
    works: tuple[object, ...] = (),
    note: str = "",
    harmless: bool = False,
    essential: bool = False,
    bare: str | None = None,
) -> Any:
    """A dataclass field that is a flag.

    Args:
        default: its value when nobody gives it; `REQUIRED`: somebody must.
        names: other spellings with the same meaning, with their dashes.
        off: other spellings of `--no-NAME`, such as Megatron's `--disable-bias-linear`.
        status: how it compares with Megatron's flag of that name.
        least: the smallest number that makes sense.
        below: every number must be smaller than this.
        works: for "not yet" and "refused": values besides the default that are available.
        note: for "close": the difference; for "not yet" and "refused": what to use instead.
        harmless: leaving it out changes no number, so `--allow-ignored-flags` may ignore it where it is not available.
        essential: shown by a plain `--help`.
        bare: its value when it stands there without one.
    """
    declaration = Declaration(
        names=names,
        off=off,
        status=status,
        least=least,
        below=below,
        works=works,
        note=note,
        harmless=harmless,
        essential=essential,
        bare=bare,
    )
    return field(default=default, metadata={"flag": declaration})


@dataclass(frozen=True)
class Flag:
    """A declared flag."""

    group: str
    name: str
    """With underscores: `hidden_size`."""
    type: Any
    default: object
    declaration: Declaration

    @property
    def option(self) -> str:
        """`--hidden-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        return self.type is bool

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def on_options(self) -> tuple[str, ...]:
        """Every spelling that takes the flag's value, or that switches it on."""
        return (self.option, *self.declaration.names)

    @property
    def off_options(self) -> tuple[str, ...]:
        """Every spelling that switches it off."""
        return ("--no-" + self.option[2:], *self.declaration.off) if self.is_switch else ()

    def available(self, value: object) -> bool:
        """Does this program have what `value` asks for?"""
        unavailable = self.declaration.status in ("not yet", "refused")
        return not unavailable or value == self.default or value in self.declaration.works


def flags_of(group: str, group_class: type) -> Iterator[Flag]:
    """The flags that a group declares, in order."""
    for entry in fields(group_class):
        yield Flag(group, entry.name, entry.type, _default(entry), entry.metadata["flag"])


def _default(entry: Field[Any]) -> object:
    assert entry.default is not MISSING, f"flag {entry.name} has no default"
    return entry.default


def docstrings(group_class: type) -> dict[str, str]:
    """The string below every field, read from the source; empty where the source is not at hand."""
    try:
        source = inspect.getsource(group_class)
    except (OSError, TypeError):
        return {}
    body = ast.parse(textwrap.dedent(source)).body[0]
    assert isinstance(body, ast.ClassDef), f"{group_class} is not a class"
    found = {}
    for statement, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and _is_text(below):
            found[statement.target.id] = " ".join(below.value.value.split())  # type: ignore[attr-defined]
    return found


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
