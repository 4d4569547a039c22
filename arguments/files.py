"""YAML files with flags, in three formats.

Own format: flag names, flat or nested by group, with dashes or underscores; optional sections `environment`
(variables), `base` (files to include, relative to this file) and `about` (description of the recipe).
Model Zoo: `MODEL_ARGS` with dashed flags, and `ENV_VARS`.
Megatron-LM dev: `ARGS` with underscores, and `ENV_VARS`.
Anchors and merge keys (`<<: *name`) work as in YAML: the mapping's own keys override merged ones.
`${NAME}`, `${NAME:-default}` and `$NAME` are replaced by environment variables, `$$` by a dollar sign. Nothing is
executed. Scalars are read as text and converted to the type of the flag, not by YAML's rules for numbers.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from os.path import normpath
from pathlib import Path
from typing import Any

import yaml

from arguments.environment import character_problem, permission_problem
from arguments.errors import Problem
from arguments.flags import Registry, groups, with_dashes
from arguments.parser import Given
from arguments.recognised import find_recognised

_VARIABLE = re.compile(
    r"\$(?:(?P<dollar>\$)|\{(?P<braced>\w+)(?::-(?P<default>[^}]*))?\}"
    r"|(?P<plain>[A-Za-z_]\w*)|(?P<shell>[({]))"
)
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""YAML loader: the C loader of libyaml if PyYAML was built with libyaml, else the Python loader."""
_STANDARD = "tag:yaml.org,2002:"
_NULL, _MERGE = f"{_STANDARD}null", f"{_STANDARD}merge"
_PLAIN_TAGS = ("null", "bool", "int", "float", "str", "timestamp", "value", "merge", "seq", "map")
_ARGUMENTS = ("MODEL_ARGS", "ARGS")
_ENVIRONMENT = ("ENV_VARS", "environment")
_BASE, _ABOUT = "base", "about"
_NO_FLAGS = (*_ENVIRONMENT, _BASE, _ABOUT)


@dataclass
class FlagFile:
    """Contents of one YAML file with flags, and the problems found in it."""

    path: Path
    readable: bool = True
    flags: list[Given] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables required by the run."""
    bases: list[Path] = field(default_factory=list)
    """Files listed in `base`, which this file includes, absolute or relative to this file."""
    about: dict[str, str] = field(default_factory=dict)
    """Entries of section `about`, which describes a recipe."""
    problems: list[Problem] = field(default_factory=list)


class _Unusable(Exception):
    """Raised for a value that cannot be read. The problem has already been recorded, unless this is an `_Unset`."""


class _Unset(_Unusable):
    """Raised for a value that refers to unset environment variables."""

    def __init__(self, variables: Iterable[str], line: int) -> None:
        self.variables, self.line = tuple(variables), line
        super().__init__()


def read_files(
    path: Path,
    registry: Registry,
    environ: Mapping[str, str],
    above: tuple[Path, ...] = (),
    needless: frozenset[str] = frozenset(),
    allowed: Collection[str] = (),
) -> list[FlagFile]:
    """Reads a file and, recursively, the files in its `base`, which precede it in the result. `above`: files that
    include this file. `needless`: names of flags that are skipped if their values cannot be read. `allowed`: names of
    further environment variables that files may set."""
    if path.resolve() in above:
        problem = Problem(what=f"{display_path(path)} includes itself", remedy="remove it from `base`")
        return [FlagFile(path, problems=[problem])]
    named_in = (
        f"`base` of {display_path(above[-1])}, whose paths start at the folder of that file" if above else "--config"
    )
    file = read_file(path, registry, environ, needless, named_in, allowed)
    below = (*above, path.resolve())
    paths = [Path(normpath(path.parent / base)) for base in file.bases]
    bases = [read_files(base, registry, environ, below, needless, allowed) for base in paths]
    return [*(found for files in bases for found in files), file]


def read_file(
    path: Path,
    registry: Registry,
    environ: Mapping[str, str],
    needless: frozenset[str] = frozenset(),
    named_in: str = "--config",
    allowed: Collection[str] = (),
) -> FlagFile:
    """Reads one file, to which `named_in` (a flag or file) refers. Errors are collected in `FlagFile.problems`."""
    file = FlagFile(path)
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except OSError as error:
        problem = Problem(what=f"{path} cannot be read: {error.strerror}", remedy=f"correct {named_in}")
        return FlagFile(path, readable=False, problems=[problem])
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        line, reason = _not_yaml(error)
        where = f"{display_path(path)}:{line}" if line else display_path(path)
        problem = Problem(what=f"{where} is not YAML: {reason}", remedy="correct the file")
        return FlagFile(path, readable=False, problems=[problem])
    _Reader(file, registry, environ, needless, allowed).read(root)
    return file


def display_path(path: Path) -> Path:
    """Path as shown in messages: relative to the current folder if the path is inside it, otherwise unchanged."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def read_yaml(path: str) -> Any:
    """Content of a YAML file that contains no flags. Raises ValueError, whose message is a verb phrase about the file,
    if it cannot be read or parsed."""
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        line, reason = _not_yaml(error)
        raise ValueError(f"is not YAML{f' in line {line}' if line else ''}: {reason}") from None


def _not_yaml(error: Exception) -> tuple[int | None, str]:
    """Line, if it is known, and reason of a parse error."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        context, problem = error.context or "", error.problem or ""
        # PyYAML joins both in this order: "while parsing a flow sequence", "did not find ..."
        joined = f"{problem} {context}" if context.startswith("while ") else f"{context}, {problem}".removeprefix(", ")
        return error.problem_mark.line + 1, joined.rstrip()
    return None, str(getattr(error, "reason", error))


@dataclass
class _Reader:
    file: FlagFile
    registry: Registry
    environ: Mapping[str, str]
    needless: frozenset[str]
    allowed: Collection[str]
    unset: dict[str, list[int]] = field(default_factory=dict)
    """Maps each unset environment variable to the line numbers that use it."""
    merged: dict[int, list[tuple[str, yaml.Node]]] = field(default_factory=dict)
    """Cache of expanded mappings: `id` of the YAML node -> entries. A shared anchor is expanded only once."""

    def __post_init__(self) -> None:
        self._shown = display_path(self.file.path)

    def read(self, root: yaml.Node | None) -> None:
        if root is not None:
            self._read_root(root)
        for variable, lines in self.unset.items():
            places = ", ".join(map(str, dict.fromkeys(lines)))
            what = f"{self._shown}:{places} needs the environment variable {variable}, which is not set"
            self.file.problems.append(Problem(what=what, remedy=f"export {variable}=..."))

    def _read_root(self, root: yaml.Node) -> None:
        pairs = self._pairs(root)
        sections = dict(pairs)
        for name in _ENVIRONMENT:
            if name in sections:
                self._read_texts(sections[name], self.file.environment, self._refuse_variable)
        if _ABOUT in sections:
            self._read_texts(sections[_ABOUT], self.file.about)
        if _BASE in sections:
            self._read_bases(sections[_BASE])
        foreign = [name for name in _ARGUMENTS if name in sections]
        for name in foreign:
            self._read_flags(self._pairs(sections[name]), false_is_absent=True)
        if not foreign:
            self._read_flags(pairs, false_is_absent=False, without=_NO_FLAGS, in_groups=True)

    def _read_texts(
        self, node: yaml.Node, texts: dict[str, str], check: Callable[[str, str, yaml.Node], None] | None = None
    ) -> None:
        """Adds `name: value` entries to `texts`, except those that cannot be read or that `check` rejects."""
        for name, node_of_value in self._pairs(node):
            try:
                value = self._scalar(node_of_value)
                if check:
                    check(name, value, node_of_value)
            except _Unusable as error:
                self._report(error)
                continue
            texts[name] = value

    def _refuse_variable(self, name: str, value: str, node: yaml.Node) -> None:
        """Records a problem and raises _Unusable if files must not set this environment variable (`permission_problem`)
        or its value contains control characters."""
        wrong, remedy = permission_problem(name, value, self.allowed)
        if not wrong and character_problem(value):
            wrong, remedy = (
                f"sets the environment variable {name} to {value!r}, {character_problem(value)}",
                "remove it",
            )
        if wrong:
            self._problem(node, wrong, remedy)
            raise _Unusable

    def _read_bases(self, node: yaml.Node) -> None:
        """Reads section `base`, which is one path or a list of paths."""
        for item in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            try:
                self.file.bases.append(Path(self._scalar(item)))
            except _Unusable as error:
                self._report(error)

    def _read_flags(
        self,
        pairs: Iterable[tuple[str, yaml.Node]],
        *,
        false_is_absent: bool,
        without: tuple[str, ...] = (),
        in_groups: bool = False,
    ) -> None:
        for name, value in pairs:
            if name in without:
                continue
            if in_groups and name in groups() and isinstance(value, yaml.MappingNode):
                self._read_flags(self._pairs(value), false_is_absent=false_is_absent)
            else:
                self._read_flag(name, value, false_is_absent)

    def _read_flag(self, name: str, node: yaml.Node, false_is_absent: bool) -> None:
        option, origin = "--" + name.lstrip("-"), self._place(node)
        found = self.registry.find(option)
        if found and found[0].group == "start":
            self._problem(node, f"{option} belongs on the command line, not in a file")
            return
        known = len(self.file.problems)
        try:
            given = self._given(option, node, origin)
        except _Unusable as error:
            if found and found[0].name in self.needless:
                del self.file.problems[known:]
                return
            if not find_recognised(with_dashes(option)):  # recognised flags that are not implemented need no value
                self._report(error)
            self.file.flags.append(Given(option, (), origin, state="unusable"))
            return
        empty_variable = given.words == ("",) and isinstance(node, yaml.ScalarNode) and node.value != ""
        absent = false_is_absent and given.words == ("false",) and not (found and found[0].is_switch)
        if not absent and not empty_variable:
            self.file.flags.append(given)

    def _given(self, option: str, node: yaml.Node, origin: str) -> Given:
        if not self._is_plain(node):
            raise _Unusable
        if isinstance(node, yaml.SequenceNode):
            return Given(option, tuple(self._scalar(item) for item in node.value), origin)
        if node.tag == _NULL and isinstance(node, yaml.ScalarNode):
            return Given(option, None, origin)
        return Given(option, (self._scalar(node),), origin, state="one text")

    def _report(self, error: _Unusable) -> None:
        """Records the unset variables if `error` is `_Unset`. Other problems have already been recorded."""
        if isinstance(error, _Unset):
            for variable in error.variables:
                self.unset.setdefault(variable, []).append(error.line)

    def _pairs(self, node: yaml.Node) -> list[tuple[str, yaml.Node]]:
        """Returns the merged entries (`<<`) of a mapping, except overridden ones, followed by its own entries."""
        if not isinstance(node, yaml.MappingNode):
            self._problem(node, "must contain `name: value` entries")
            return []
        if id(node) not in self.merged:
            self.merged[id(node)] = []  # ends the recursion of a mapping that merges itself
            self.merged[id(node)] = self._expanded(node) if self._is_plain(node) else []
        return self.merged[id(node)]

    def _expanded(self, node: yaml.MappingNode) -> list[tuple[str, yaml.Node]]:
        own: list[tuple[str, yaml.Node]] = []
        bases: list[yaml.Node] = []
        for key, value in node.value:
            if key.tag == _MERGE:
                bases += value.value if isinstance(value, yaml.SequenceNode) else [value]
            elif isinstance(key, yaml.ScalarNode):
                own.append((str(key.value), value))
            else:
                self._problem(key, "has a key that is not a name")
        pairs = own
        for base in bases:  # earlier bases take precedence
            names = {with_dashes(name.lstrip("-")) for name, _ in pairs}
            pairs = [*(pair for pair in self._pairs(base) if with_dashes(pair[0].lstrip("-")) not in names), *pairs]
        return pairs

    def _scalar(self, node: yaml.Node) -> str:
        """Text of a scalar with its variables substituted."""
        if not isinstance(node, yaml.ScalarNode):
            self._problem(node, "must be a text, a number or a list of these")
            raise _Unusable
        if not self._is_plain(node):
            raise _Unusable
        if "\0" in node.value:
            self._problem(node, f"contains a NUL character, {node.value!r}", "remove it")
            raise _Unusable
        found = [(match, self._variable(match, node)) for match in _VARIABLE.finditer(node.value)]
        unset = [match["braced"] or match["plain"] for match, value in found if value is None]
        if unset:
            raise _Unset(unset, node.start_mark.line + 1)
        values = iter(found)
        return _VARIABLE.sub(lambda _: next(values)[1] or "", node.value)

    def _is_plain(self, node: yaml.Node) -> bool:
        """Returns whether the node has a standard YAML tag for plain data; records a problem if it does not."""
        tag = str(node.tag)
        if tag.startswith(_STANDARD) and tag.removeprefix(_STANDARD) in _PLAIN_TAGS:
            return True
        self._problem(node, f"has the tag {tag.replace(_STANDARD, '!!')}; only texts, numbers and lists are allowed")
        return False

    def _variable(self, match: re.Match[str], node: yaml.Node) -> str | None:
        """Text that replaces a variable reference; None if the variable is not set."""
        if match["dollar"]:
            return "$"
        if match["shell"]:
            self._problem(node, f"contains shell code, {node.value!r}, which is not executed; write its result")
            raise _Unusable
        name = match["braced"] or match["plain"]
        value = self.environ.get(name, self.file.environment.get(name))
        return value or match["default"] if match["default"] is not None else value

    def _problem(self, node: yaml.Node, what: str, remedy: str = "") -> None:
        self.file.problems.append(Problem(what=f"{self._place(node)} {what}", remedy=remedy))

    def _place(self, node: yaml.Node) -> str:
        return f"{self._shown}:{node.start_mark.line + 1}"
