"""Checks for global state and swallowed errors."""

import ast
from collections.abc import Iterator

from tests.house_rules.source import Source

TELEMETRY = ("megatron_moe/logs/writers.py", "megatron_moe/warmup/kernel_warmup.py", "megatron_moe/config/imports.py")
"""Files in which any failure must not stop training (R8): telemetry, and the warm-up of kernels; and the file that runs
a user's file, whose errors are reported with the flags."""

_CONTAINER_CALLS = ("dict", "list", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict")


def global_findings(file: Source) -> list[str]:
    """`global` statements."""
    return [
        f"{file.path}:{node.lineno} global {', '.join(node.names)}"
        for node in file.nodes
        if isinstance(node, ast.Global)
    ]


def container_findings(file: Source) -> list[str]:
    """Mutable containers bound at module or class level."""
    return [
        f"{file.path}:{statement.lineno} {_name(statement)} is a {kind}; use a tuple, or MappingProxyType({{...}})"
        for statement in _shared_statements(file.tree)
        if (kind := _container_kind(statement.value)) is not None
    ]


def cache_findings(file: Source) -> list[str]:
    """Functions cached for the lifetime of the process."""
    return [
        f"{file.path}:{node.lineno} {node.name} is cached for the lifetime of the process"
        for node in file.nodes
        if isinstance(node, ast.FunctionDef)
        and any(_last_name(decorator) in ("cache", "lru_cache") for decorator in node.decorator_list)
        and not file.path.startswith("megatron_moe/config/")
    ]


def except_findings(file: Source) -> list[str]:
    """Handlers that catch all exceptions."""
    findings = []
    for node in file.nodes:
        if isinstance(node, ast.ExceptHandler):
            names = [None] if node.type is None else [_last_name(name) for name in _elements(node.type)]
            broad = {None, "Exception", "BaseException"} & set(names)
            if broad and file.path not in TELEMETRY and not _raises_again(node):
                findings.append(f"{file.path}:{node.lineno} except {names[0] or ''}".rstrip())
    return findings


def _raises_again(handler: ast.ExceptHandler) -> bool:
    """True if the handler ends with a bare raise."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def _shared_statements(tree: ast.Module) -> Iterator[ast.Assign | ast.AnnAssign]:
    """Assignments at module and class level, also under if and try."""
    blocks: list[ast.AST] = [tree]
    while blocks:
        for child in ast.iter_child_nodes(blocks.pop()):
            if isinstance(child, ast.Assign | ast.AnnAssign):
                yield child
            elif isinstance(child, ast.ClassDef | ast.If | ast.Try | ast.With):
                blocks.append(child)


def _container_kind(value: ast.expr | None) -> str | None:
    if isinstance(value, ast.List | ast.ListComp):
        return "list"
    if isinstance(value, ast.Dict | ast.DictComp):
        return "dict"
    if isinstance(value, ast.Set | ast.SetComp):
        return "set"
    if isinstance(value, ast.Call) and _last_name(value.func) in _CONTAINER_CALLS:
        return _last_name(value.func)
    return None


def _name(statement: ast.Assign | ast.AnnAssign) -> str:
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    return ast.unparse(target)


def _elements(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
