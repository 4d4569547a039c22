"""Patterns of Triton kernels that compilers translate wrongly."""

import ast
from collections.abc import Iterator

from tests.house_rules.source import Source


def _called(node: ast.AST) -> str:
    """Last part of the name of the function that a node calls, or an empty string."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _calls(root: ast.AST, name: str) -> list[ast.Call]:
    return [node for node in ast.walk(root) if isinstance(node, ast.Call) and _called(node) == name]


def _names(root: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(root) if isinstance(node, ast.Name)}


def _assigned(function: ast.FunctionDef) -> Iterator[tuple[str, ast.expr]]:
    """Yields each name that a function assigns, with the assigned expression."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def transposed_product_findings(file: Source) -> list[str]:
    """Finds products of `dot`, or values computed from them, that are transposed and multiplied by another `dot`.

    Triton 3.4 to 3.7.0 computes such products wrongly on Hopper.
    """
    findings = []
    for function in (node for node in file.nodes if isinstance(node, ast.FunctionDef)):
        if not _calls(function, "trans"):
            continue
        assigned = list(_assigned(function))
        products: set[str] = set()
        while more := {name for name, value in assigned if _calls(value, "dot") or products & _names(value)} - products:
            products |= more

        def is_transposed_product(root: ast.AST, products: set[str] = products) -> bool:
            return any(_calls(call, "dot") or products & _names(call) for call in _calls(root, "trans"))

        transposed = {name for name, value in assigned if is_transposed_product(value)}
        for call in _calls(function, "dot"):
            if any(is_transposed_product(operand) or transposed & _names(operand) for operand in call.args[:2]):
                findings.append(f"{file.path}:{call.lineno}: {ast.unparse(call)}")
    return findings
