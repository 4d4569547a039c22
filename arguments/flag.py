"""Declarations of flags as fields of frozen dataclasses; the docstring of a field is the help text of the flag.

    hidden_size: int = flag(REQUIRED, essential=True)
    \"\"\"Width of the residual stream.\"\"\"

declares `--hidden-size`. The annotation gives the type and the choices; a `bool` field also gets `--no-NAME`.
"""

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

from arguments.values import words_of, yaml_value

Status = Literal["same", "differs", "new", "unsupported", "refused"]
"""Comparison of a flag with Megatron-LM's flag. "same": it has the same meaning; "differs": its meaning differs; "new":
Megatron-LM has no such flag. "unsupported": some values are not available yet; "refused": some will not be
implemented."""


class _Required:
    """Type of `REQUIRED`, which takes the place of a default for flags that must be given."""

    def __repr__(self) -> str:
        return "required"


REQUIRED: Final = _Required()


class FlagDeclaration(NamedTuple):
    """Metadata of a flag, which `flag` attaches to a dataclass field."""

    names: tuple[str, ...] = ()
    """Alternative spellings, with leading dashes."""
    off: tuple[str, ...] = ()
    """Alternative spellings of `--no-NAME`, such as Megatron's `--disable-bias-linear`."""
    status: Status = "same"
    """Comparison with Megatron's flag of the same name."""
    least: float | None = None
    """Inclusive lower bound of numbers."""
    below: float | None = None
    """Exclusive upper bound of numbers."""
    works: tuple[object, ...] = ()
    """Values other than the default that are available in spite of status "unsupported" or "refused"."""
    note: str = ""
    """Difference from Megatron (status "differs"), or alternative to the flag ("unsupported" and "refused")."""
    harmless: bool = False
    """Whether the flag never affects results, so that `--allow-ignored-flags` ignores it if unavailable."""
    essential: bool = False
    """Whether `--help` without arguments lists the flag."""
    bare: str | None = None
    """Value if the flag is given without a value, e.g. `yaml` for `--print-config`."""
    repeats: bool = False
    """Whether the values of a list accumulate if the flag is given several times, or in files too."""


def flag(default: object, **declaration: Any) -> Any:
    """Declares a dataclass field as a flag.

    Args:
        default: value if the flag is not given; `REQUIRED`: the flag must be given.
        declaration: fields of `FlagDeclaration`.
    """
    return field(default=default, metadata={"flag": FlagDeclaration(**declaration)})


def differs(default: object, note: str, **options: Any) -> Any:
    """Declares a flag whose meaning differs from Megatron's flag of the same name; `note` states the difference."""
    return flag(default, status="differs", note=note, **options)


def new_flag(default: object, note: str = "", **options: Any) -> Any:
    """Declares a flag that Megatron does not have."""
    return flag(default, status="new", note=note, **options)


def unsupported(default: object, note: str, **options: Any) -> Any:
    """Declares a flag of a feature that is not available yet; `note` states the alternative."""
    return flag(default, status="unsupported", note=note, **options)


def refused(default: object, note: str, **options: Any) -> Any:
    """Declares a flag of a feature that will not be available; `note` states the alternative."""
    return flag(default, status="refused", note=note, **options)


@dataclass(frozen=True)
class Flag:
    """Flag of the command line: a field of the dataclass of its group."""

    group: str
    name: str
    """Name with underscores: `hidden_size`."""
    type: Any
    default: object
    declaration: FlagDeclaration

    @cached_property
    def option(self) -> str:
        """Main spelling: `--hidden-size`. A name that is a keyword of Python ends with an underscore: `import_`."""
        return "--" + self.name.rstrip("_").replace("_", "-")

    @property
    def is_switch(self) -> bool:
        return self.type is bool

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @cached_property
    def on_options(self) -> tuple[str, ...]:
        """Spellings that set the flag to a value or, for a switch, turn it on."""
        return (self.option, *self.declaration.names)

    @cached_property
    def off_options(self) -> tuple[str, ...]:
        """Spellings that turn a switch off; empty for other flags."""
        return ("--no-" + self.option[2:], *self.declaration.off) if self.is_switch else ()

    def text(self, value: object) -> str:
        """Formats a value of the flag for messages and help texts."""
        if self.is_switch:
            return "on" if value else "off"
        return "not set" if value in (None, ()) else " ".join(words_of(self.type, value))

    def yaml(self, value: object) -> str:
        """Formats a value of the flag as YAML."""
        return yaml_value(self.type, value)

    @cached_property
    def default_yaml(self) -> str:
        return self.yaml(self.default)

    @cached_property
    def may_be_unavailable(self) -> bool:
        """Whether this program does not support some values of the flag."""
        return self.declaration.status in ("unsupported", "refused")

    def available(self, value: object) -> bool:
        """Whether this program supports `value` for the flag."""
        return not self.may_be_unavailable or value == self.default or value in self.declaration.works


def flags_of(group: str, group_class: type) -> Iterator[Flag]:
    """Yields the flags of a group in order of declaration."""
    for entry in fields(group_class):
        yield Flag(group, entry.name, entry.type, _default(entry), entry.metadata["flag"])


def _default(entry: Field[Any]) -> object:
    assert entry.default is not MISSING, f"flag {entry.name} has no default"
    return entry.default


def docstrings(group_class: type) -> dict[str, str]:
    """Maps field names to docstrings, which are read from the source file; empty if the source is not available."""
    try:
        # Parses the module's source, because `getsource` of a class must tokenise the file to find the end of the
        # class.
        module = ast.parse(inspect.getsource(sys.modules[group_class.__module__]))
    except (KeyError, OSError, TypeError):
        return {}
    (body,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == group_class.__name__)
    found = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and _is_text(following):
            found[statement.target.id] = " ".join(following.value.value.split())  # type: ignore[attr-defined]
    return found


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
