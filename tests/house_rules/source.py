"""Repository files as syntax trees, for the house rules."""

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ("pretrain_moe.py", "megatron_moe", "arguments", "tools")
"""The product, without tests."""


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: str
    """Path relative to the root, with slashes."""
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Syntax tree. Rules that only read texts do not parse them.

        It is exempt from garbage collection: collections that visit a million nodes would take most of the time.
        """
        tree = ast.parse(self.text, filename=self.path)
        gc.freeze()
        return tree

    @property
    def module(self) -> str:
        """Dotted name; for an `__init__.py` the name of the package."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree."""
        return tuple(ast.walk(self.tree))

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())


@dataclass(frozen=True)
class Import:
    """An imported module and the line of the import."""

    module: str
    line: int
    in_function: bool


def source(path: str, text: str) -> Source:
    """A file of the repository, or an example of a test."""
    return Source(path, text)


@cache
def _stored(path: Path) -> Source:
    """A file of the repository."""
    return source(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))


@cache
def sources(*tops: str) -> tuple[Source, ...]:
    """Every Python file under the given files and folders of the root that exist."""
    found: list[Source] = []
    for top in tops:
        place = ROOT / top
        found += map(_stored, [place] if place.is_file() else sorted(place.rglob("*.py")))
    return tuple(found)


@cache
def imports(file: Source) -> tuple[Import, ...]:
    """Every import of the file, including those in functions. `from a import b` counts as a.b if that is a module."""
    return tuple(_imports(file))


def _imports(file: Source) -> Iterator[Import]:
    kinds = (ast.Import, ast.ImportFrom)
    statements = [node for node in file.nodes if isinstance(node, kinds)]
    bodies = [range(function.lineno, (function.end_lineno or 0) + 1) for function in functions(file)]
    for node in statements:
        inside = any(node.lineno in body for body in bodies)
        if isinstance(node, ast.Import):
            yield from (Import(name.name, node.lineno, inside) for name in node.names)
        else:
            base = _absolute(file, node)
            for name in node.names:
                module = f"{base}.{name.name}" if _is_module(f"{base}.{name.name}") else base
                yield Import(module, node.lineno, inside)


def functions(file: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    yield from (node for node in file.nodes if isinstance(node, kinds))


def report(findings: list[str], rule: str) -> None:
    """Fails with the rule and one finding per line."""
    assert not findings, f"{rule}\n" + "\n".join(f"  {finding}" for finding in findings)


def _absolute(file: Source, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = file.path.split("/")[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


@cache
def _is_module(name: str) -> bool:
    place = ROOT / name.replace(".", "/")
    return place.with_suffix(".py").is_file() or place.is_dir()
