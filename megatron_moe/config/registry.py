"""Registries that map the names of components, as used in flags, to components.

Built-in components and those of `--import` files register in the same way, when their module is imported:

    SCORE_FUNCTIONS.register("tanh", ScoreFunction(function=my_scores))

Entries are configs and functions without torch, or strings "package.module:name" that `resolve` imports when the model
is built. Registries are append-only and complete before the command line is parsed (docs/decisions/0002).
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Generic, TypeVar

from megatron_moe.config.exit_codes import ExitCode, RunError

T = TypeVar("T")


class RegistrationProblem(RunError):
    """A name is registered twice or is not registered, or its entry names an object that cannot be imported."""

    code = ExitCode.CONFIG


class ComponentRegistry(Generic[T]):
    """Components of one kind by name, in order of registration."""

    def __init__(self, kind: str, entry: str = "builtins:object", accepts: Callable[[Any], bool] = callable) -> None:
        """
        Args:
            kind: kind of the entries for messages, such as "score function".
            entry: class of the entries as "package.module:name", or a description of the entries for messages.
            accepts: predicate for valid entries; used only if `entry` is a description.
        """
        self.kind = kind
        self._entry = entry
        self._accepts = accepts
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T) -> T:
        """Adds an entry and returns it. Raises RegistrationProblem if the name is taken or the entry is invalid."""
        if name in self._entries:
            raise RegistrationProblem(f"the {self.kind} '{name}' is registered twice; choose another name")
        if not self.accepts(entry):
            found, (_, is_class, needed) = type(entry).__name__, self._entry.rpartition(":")
            needed = f"an instance of {needed}" if is_class else f"a {needed}"
            other = next((f"; register it as a {each.kind}" for each in CLASSES if each.accepts(entry)), "")
            raise RegistrationProblem(f"the {self.kind} '{name}' must be {needed}, but is of the type {found}{other}")
        self._entries[name] = entry
        return entry

    def accepts(self, entry: Any) -> bool:
        """Whether an entry is valid for this registry."""
        return isinstance(entry, resolve(self._entry)) if ":" in self._entry else self._accepts(entry)

    def get(self, name: str) -> T:
        """Returns the entry of a name. Raises RegistrationProblem with the registered names if there is none."""
        if name not in self._entries:
            known = ", ".join(self._entries) or "none"
            raise RegistrationProblem(
                f"'{name}' is not a registered {self.kind} (registered: {known}); --import the file that registers it"
            )
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restores the entries at the end of the `with` block."""
        before = dict(self._entries)
        try:
            yield
        finally:
            self._entries = before


def _declares_flags(entry: Any) -> bool:
    return isinstance(entry, type) and is_dataclass(entry) and all("flag" in each.metadata for each in fields(entry))


_CONFIG = "megatron_moe.config"
MIXERS: ComponentRegistry[Any] = ComponentRegistry("mixer", "function of the flags")
FEED_FORWARDS: ComponentRegistry[Any] = ComponentRegistry("feed-forward module", "function of the flags")
"""Functions from the flags to a sequence with the config of every layer's module (`config/component.py`)."""
RESIDUALS: ComponentRegistry[Any] = ComponentRegistry("residual connection", "function of the flags")
"""Functions from the flags to the config of the residual connections (`config/residual.py`)."""
UPDATE_RULES: ComponentRegistry[Any] = ComponentRegistry("update rule", f"{_CONFIG}.update_rules:UpdateRuleSpec")
TRANSPORTS: ComponentRegistry[Any] = ComponentRegistry("transport", f"{_CONFIG}.transport:ExpertTransport")
QUANTIZATION_RECIPES: ComponentRegistry[Any] = ComponentRegistry(
    "quantisation recipe", f"{_CONFIG}.precision:QuantizationRecipe"
)
ELEMENTS: ComponentRegistry[Any] = ComponentRegistry(
    "format of quantised elements", f"{_CONFIG}.precision:ElementFormat"
)
SCORE_FUNCTIONS: ComponentRegistry[Any] = ComponentRegistry("score function", f"{_CONFIG}.functions:ScoreFunction")
BALANCING: ComponentRegistry[Any] = ComponentRegistry("load-balancing method", f"{_CONFIG}.functions:Balancing")
ACTIVATIONS: ComponentRegistry[Any] = ComponentRegistry("activation", f"{_CONFIG}.functions:Activation")
METRICS: ComponentRegistry[Any] = ComponentRegistry("metric", f"{_CONFIG}.functions:RouterMetric")
FLAGS: ComponentRegistry[type] = ComponentRegistry(
    "flag group", "dataclass of fields declared by flag()", _declares_flags
)
"""Dataclasses of flags (`arguments/flag.py`) that imported files add."""
IMPORTED: ComponentRegistry[str] = ComponentRegistry("imported file", "builtins:str")
"""Absolute paths of imported files, with the SHA-256 of their contents."""

CLASSES: tuple[ComponentRegistry[Any], ...] = (
    *(UPDATE_RULES, TRANSPORTS, QUANTIZATION_RECIPES, ELEMENTS, SCORE_FUNCTIONS, BALANCING, ACTIVATIONS, METRICS),
)
"""Registries whose entries are instances of one class."""
REGISTRIES = (MIXERS, FEED_FORWARDS, RESIDUALS, *CLASSES, FLAGS, IMPORTED)


@contextmanager
def restored() -> Iterator[None]:
    """Undoes all registrations made inside the `with` block; for tests and notebooks."""
    with ExitStack() as stack:
        for registry in REGISTRIES:
            stack.enter_context(registry.restored())
        yield


def resolve(target: Any) -> Any:
    """Imports the object named by a string "package.module:name"; returns anything else unchanged. Raises
    RegistrationProblem if it cannot be imported."""
    if not isinstance(target, str):
        return target
    return _imported(target)


@cache
def _imported(target: str) -> Any:
    # cached: activations and score functions are resolved in every layer's forward
    module, _, name = target.partition(":")
    try:
        return attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: the module is an empty text
        raise RegistrationProblem(
            f"the registered object '{target}' cannot be imported ({type(error).__name__}: {error}); correct the file "
            "that registers it: 'package.module:name', or the object itself"
        ) from error
