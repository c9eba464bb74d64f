"""Where an engine speaks of errors, and in what words: every raise, assert, error log and refusal of one source file,
each with the texts it can produce, as literals and holes.

A hole keeps the expression that fills it, so that a message found in a log gives the values back:
`f"Got {self.n=}"` → ["Got self.n=", Hole("self.n")]. Names are followed to what was assigned to them just above.
"""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product


@dataclass(frozen=True)
class Hole:
    """A value in a message: the expression whose value stands there."""

    expr: str


Part = str | Hole
Template = tuple[Part, ...]

MOST = 8
"""Alternatives kept for one site; a message built in more ways than these is matched by its frames."""


@dataclass(frozen=True)
class Site:
    """One place that can produce an error text. kind: raise, assert, log, usage or response; exc: exception class, or
    the log level; function: dotted name of what encloses it ("" at module level). Lines are 1-based."""

    file: str
    line: int
    end: int
    kind: str
    exc: str
    function: str
    templates: tuple[Template, ...]


LOG_LEVELS = {
    "error": "error",
    "exception": "error",
    "critical": "critical",
    "fatal": "critical",
    "error_once": "error",
}
USAGE = ("error", "exit")
RESPONSES = ("create_error_response", "ErrorResponse", "HTTPException")
_MESSAGE_WORDS = ("message", "msg", "detail", "reason", "error", "err_msg", "error_msg")
_PERCENT = re.compile(
    r"%(?:\((?P<key>[^)]*)\))?[#0\- +]*(?:\*|\d+)?(?:\.(?:\*|\d+))?[hlL]?(?P<kind>[diouxXeEfFgGcrsa%])"
)
_SAME_TEXT = ("strip", "rstrip", "lstrip", "dedent", "str", "cleandoc", "capitalize")


def _hole(node: ast.AST) -> Template:
    return (Hole(ast.unparse(node)),)


def join(templates: Iterable[Template]) -> Template:
    """Concatenation; neighbouring literals become one."""
    out: list[Part] = []
    for template in templates:
        for part in template:
            if isinstance(part, str) and out and isinstance(out[-1], str):
                out[-1] += part
            else:
                out.append(part)
    return tuple(p for p in out if p != "")


@dataclass
class Scope:
    """Assignments that a name in a message may come from: of the function around it, then of the module."""

    assigned: dict[str, list[tuple[int, ast.expr, bool]]] = field(default_factory=dict)
    outer: Scope | None = None

    def add(self, body: Iterable[ast.stmt]) -> None:
        for node in _own_nodes(body):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.assigned.setdefault(target.id, []).append((node.lineno, node.value, False))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                self.assigned.setdefault(node.target.id, []).append((node.lineno, node.value, False))
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and isinstance(node.op, ast.Add):
                self.assigned.setdefault(node.target.id, []).append((node.lineno, node.value, True))
            elif isinstance(node, ast.NamedExpr) and isinstance(node.target, ast.Name):
                self.assigned.setdefault(node.target.id, []).append((node.lineno, node.value, False))
        for known in self.assigned.values():
            known.sort(key=lambda item: item[0])

    def before(self, name: str, line: int) -> list[list[ast.expr]]:
        """The ways `name` may have been built up by `line`: lists of expressions to put together."""
        known = [a for a in self.assigned.get(name, []) if a[0] < line or self.outer is None]
        plain = [a for a in known if not a[2]]
        if not plain:
            return self.outer.before(name, line) if self.outer else []
        ways: list[list[ast.expr]] = []
        for at, value, _ in plain[-4:]:
            ways.append([value])
            following = next((p[0] for p in plain if p[0] > at), 1 << 30)
            parts = [a for a in known if a[2] and at < a[0] < following]
            # Each addition may stand behind a condition, so every beginning of the row is possible, and all of it.
            ways += [[value, *(p[1] for p in parts[: n + 1])] for n in range(len(parts))]
        return ways[-MOST:]


def _own_nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes of a function's body, without those of functions and classes defined in it."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _own_nodes(ast.iter_child_nodes(node))


def texts(node: ast.expr, scope: Scope, line: int, depth: int = 0) -> list[Template]:
    """The texts that an expression can have, at most MOST."""
    if depth > 5:
        return [_hole(node)]
    if isinstance(node, ast.Constant):
        return [(node.value,)] if isinstance(node.value, str) else [(str(node.value),)]
    if isinstance(node, ast.JoinedStr):
        return [_joined(node)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = (texts(side, scope, line, depth + 1) for side in (node.left, node.right))
        return [join(pair) for pair in product(left, right)][:MOST]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return [t for left in texts(node.left, scope, line, depth + 1) for t in [percent(left, _arguments(node.right))]]
    if isinstance(node, ast.IfExp):
        both = texts(node.body, scope, line, depth + 1) + texts(node.orelse, scope, line, depth + 1)
        return both[:MOST]
    if isinstance(node, ast.Name):
        found: list[Template] = []
        for way in scope.before(node.id, line):
            options = [texts(e, scope, min(line, getattr(e, "lineno", line)), depth + 1) for e in way]
            found += [join(choice) for choice in product(*options)][:MOST]
        return found[:MOST] or [_hole(node)]
    if isinstance(node, ast.Call):
        return _called(node, scope, line, depth)
    return [_hole(node)]


def _joined(node: ast.JoinedStr) -> Template:
    parts: list[Template] = []
    for value in node.values:
        if isinstance(value, ast.FormattedValue):
            parts.append(_hole(value.value))
        elif isinstance(value, ast.Constant):
            parts.append((str(value.value),))
    return join(parts)


def _arguments(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def percent(template: Template, arguments: list[ast.expr]) -> Template:
    """A %-format filled: each conversion becomes the hole of its argument."""
    out: list[Template] = []
    left = list(arguments)
    for part in template:
        if isinstance(part, Hole):
            out.append((part,))
            continue
        at = 0
        for found in _PERCENT.finditer(part):
            out.append((part[at : found.start()],))
            at = found.end()
            if found["kind"] == "%":
                out.append(("%",))
            elif found["key"] is not None:
                out.append((Hole(found["key"]),))
            else:
                out.append(_hole(left.pop(0)) if left else (Hole("?"),))
        out.append((part[at:],))
    return join(out)


def _format(text: str, node: ast.Call) -> Template:
    named = {k.arg: k.value for k in node.keywords if k.arg}
    out: list[Template] = []
    count = 0
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError:
        return (text,)
    for literal, name, _, _ in pieces:
        out.append((literal,))
        if name is None:
            continue
        head = re.split(r"[.\[]", name, maxsplit=1)[0]
        index = int(head) if head.isdigit() else count
        count += head == ""
        if head in named:
            out.append(_hole(named[head]))
        elif (head == "" or head.isdigit()) and index < len(node.args):
            out.append(_hole(node.args[index]))
        else:
            out.append((Hole(name or "?"),))
    return join(out)


def _called(node: ast.Call, scope: Scope, line: int, depth: int) -> list[Template]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if name == "format" and owner is not None:
        whole = [t for t in texts(owner, scope, line, depth + 1) if len(t) == 1 and isinstance(t[0], str)]
        return [_format(str(t[0]), node) for t in whole] or [_hole(node)]
    if name == "join" and isinstance(owner, ast.Constant) and isinstance(owner.value, str) and len(node.args) == 1:
        items = node.args[0]
        if isinstance(items, (ast.List, ast.Tuple)) and items.elts:
            options = [texts(e, scope, line, depth + 1)[:2] for e in items.elts]
            rows = [
                join([t for i, one in enumerate(choice) for t in ([(owner.value,)] if i else []) + [one]])
                for choice in product(*options)
            ]
            return rows[:MOST]
        return [_hole(node)]
    if name in _SAME_TEXT:
        inner = owner if name in ("strip", "rstrip", "lstrip", "capitalize") else (node.args[0] if node.args else None)
        if inner is not None:
            return texts(inner, scope, line, depth + 1)
    return [_hole(node)]


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _message(call: ast.Call, scope: Scope) -> list[Template]:
    """The texts of an exception made by `call`: its first argument that holds words, or a keyword named like one."""
    named = [k.value for k in call.keywords if k.arg in _MESSAGE_WORDS]
    best: list[Template] = []
    for node in [*call.args, *named]:
        found = texts(node, scope, call.lineno)
        if any(isinstance(p, str) and re.search(r"[A-Za-z]{3}", p) for t in found for p in t):
            return found
        best = best or found
    return best


def _log_site(node: ast.Call, scope: Scope) -> tuple[str, str, list[Template]] | None:
    """(kind, level, texts) if the call reports an error; None for any other call."""
    if not isinstance(node.func, (ast.Attribute, ast.Name)):
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
    owner = _dotted(node.func.value).lower() if isinstance(node.func, ast.Attribute) else ""
    if name in LOG_LEVELS and owner.rpartition(".")[2] in ("logger", "logging", "log", "_logger") and node.args:
        found = [percent(t, node.args[1:]) for t in texts(node.args[0], scope, node.lineno)]
        return "log", LOG_LEVELS[name], found
    if name in USAGE and "parser" in owner and node.args:
        return "usage", name, texts(node.args[-1], scope, node.lineno)
    if name in RESPONSES and isinstance(node.func, (ast.Name, ast.Attribute)):
        return "response", name, _message(node, scope)
    return None


def _is_error_class(node: ast.ClassDef) -> bool:
    words = [_dotted(b).rpartition(".")[2] for b in node.bases]
    return any(w.endswith(("Error", "Exception", "Warning", "Interrupt")) for w in words)


def sites(source: str, file: str) -> list[Site]:
    """Every site of one file; [] where it cannot be parsed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    module = Scope()
    module.add(s for s in tree.body if not isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)))
    found: list[Site] = []
    _walk(tree, file, "", module, None, found)
    return found


def _walk(node: ast.AST, file: str, function: str, scope: Scope, error_class: str | None, found: list[Site]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = Scope(outer=scope)
            inner.add(child.body)
            _walk(child, file, f"{function}.{child.name}".lstrip("."), inner, error_class, found)
            continue
        if isinstance(child, ast.ClassDef):
            name = f"{function}.{child.name}".lstrip(".")
            _walk(child, file, name, scope, child.name if _is_error_class(child) else None, found)
            continue
        site = _site(child, scope, error_class)
        if site is not None:
            kind, exc, templates = site
            end = getattr(child, "end_lineno", None) or child.lineno  # type: ignore[attr-defined]
            unique = tuple(dict.fromkeys(t for t in templates if t))
            found.append(Site(file, child.lineno, end, kind, exc, function, unique))  # type: ignore[attr-defined]
        _walk(child, file, function, scope, error_class, found)


def _site(node: ast.AST, scope: Scope, error_class: str | None) -> tuple[str, str, list[Template]] | None:
    if isinstance(node, ast.Raise) and node.exc is not None:
        made: ast.expr | None = node.exc
        if isinstance(made, ast.Name):
            ways = scope.before(made.id, node.lineno)
            made = next((w[0] for w in reversed(ways) if isinstance(w[0], ast.Call)), made)
        if isinstance(made, ast.Call):
            return "raise", _dotted(made.func).rpartition(".")[2], _message(made, scope)
        return "raise", _dotted(node.exc).rpartition(".")[2], []
    if isinstance(node, ast.Assert):
        return "assert", "AssertionError", texts(node.msg, scope, node.lineno) if node.msg is not None else []
    if isinstance(node, ast.Call):
        if error_class and isinstance(node.func, ast.Attribute) and node.func.attr == "__init__" and node.args:
            return "raise", error_class, _message(node, scope)
        return _log_site(node, scope)
    return None
