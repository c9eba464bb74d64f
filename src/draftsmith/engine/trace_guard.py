"""What stands around a line of source: its function, and every condition that must hold for it to be reached."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Guard:
    """kind: if, not, for, while, except, with, case; text: the source of the condition; line: where it stands."""

    kind: str
    text: str
    line: int


@dataclass(frozen=True)
class Around:
    function: str
    function_line: int
    guards: tuple[Guard, ...]
    start: int
    end: int


def _path(node: ast.AST, line: int) -> list[tuple[ast.AST, str]]:
    """From the outside in: nodes around `line`, each with the field of its parent that it lies in."""
    path: list[tuple[ast.AST, str]] = []
    while True:
        for name, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            inner = next((c for c in children if isinstance(c, ast.AST) and _holds(c, line)), None)
            if inner is not None:
                path.append((inner, name))
                node = inner
                break
        else:
            return path


def _holds(node: ast.AST, line: int) -> bool:
    start, end = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    if start is None or end is None:
        return any(_holds(c, line) for c in ast.iter_child_nodes(node)) if isinstance(node, ast.match_case) else False
    decorators = getattr(node, "decorator_list", [])
    return bool(min([start, *(d.lineno for d in decorators)]) <= line <= end)


def around(source: str, line: int) -> Around | None:
    """Function and guards of a line; None where the source cannot be parsed or has no such line."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    path = _path(tree, line)
    if not path:
        return None
    names: list[str] = []
    function_line = 0
    guards: list[Guard] = []
    statement: ast.AST = path[0][0]
    parent: ast.AST = tree
    for node, name in path:
        _guard(parent, name, guards)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
            if not isinstance(node, ast.ClassDef):
                function_line, guards = node.lineno, []
        if isinstance(node, ast.stmt):
            statement = node
        parent = node
    if isinstance(statement, ast.Assert):
        guards.append(Guard("not", ast.unparse(statement.test), statement.lineno))
    simple = not hasattr(statement, "body")
    start, end = (statement.lineno, statement.end_lineno or line) if simple else (line, line)  # type: ignore[attr-defined]
    return Around(".".join(names), function_line, tuple(guards), start, end)


def _guard(parent: ast.AST, name: str, guards: list[Guard]) -> None:
    """Add the condition under which field `name` of `parent` runs."""
    if isinstance(parent, (ast.If, ast.IfExp)) and name in ("body", "orelse"):
        guards.append(Guard("if" if name == "body" else "not", ast.unparse(parent.test), parent.lineno))
    elif isinstance(parent, (ast.For, ast.AsyncFor)) and name == "body":
        guards.append(Guard("for", f"{ast.unparse(parent.target)} in {ast.unparse(parent.iter)}", parent.lineno))
    elif isinstance(parent, ast.While) and name == "body":
        guards.append(Guard("while", ast.unparse(parent.test), parent.lineno))
    elif isinstance(parent, ast.ExceptHandler) and name == "body":
        caught = ast.unparse(parent.type) if parent.type else "anything"
        guards.append(Guard("except", caught, parent.lineno))
    elif isinstance(parent, ast.match_case) and name == "body":
        guards.append(Guard("case", ast.unparse(parent.pattern), getattr(parent.pattern, "lineno", 0)))
    elif isinstance(parent, (ast.With, ast.AsyncWith)) and name == "body":
        guards.append(Guard("with", ", ".join(ast.unparse(i) for i in parent.items), parent.lineno))
