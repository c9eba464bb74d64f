"""Three-valued reading of Python expressions: a value where it follows from what is known, else UNKNOWN. Nothing is executed.

`known` is asked for names, attributes and calls (as the unparsed text of the expression).
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"

    def __bool__(self) -> bool:
        raise TypeError("UNKNOWN is neither true nor false; compare with `is`")


UNKNOWN = _Unknown()
Known = Callable[[ast.expr], Any]

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Is: lambda a, b: a is b,
    ast.IsNot: lambda a, b: a is not b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}


def evaluate(node: ast.expr, known: Known) -> Any:
    """The value of `node`, or UNKNOWN."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BoolOp):
        return _bool_op(node, known)
    if isinstance(node, ast.UnaryOp):
        value = evaluate(node.operand, known)
        if value is UNKNOWN:
            return UNKNOWN
        if isinstance(node.op, ast.Not):
            return not value
        return -value if isinstance(node.op, ast.USub) and isinstance(value, int | float) else UNKNOWN
    if isinstance(node, ast.Compare):
        return _compare(node, known)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        values = [evaluate(item, known) for item in node.elts]
        return UNKNOWN if any(v is UNKNOWN for v in values) else tuple(values)
    if isinstance(node, ast.IfExp):
        test = evaluate(node.test, known)
        if test is UNKNOWN:
            return UNKNOWN
        return evaluate(node.body if test else node.orelse, known)
    if isinstance(node, ast.Call):
        return _call(node, known)
    if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
        return known(node)
    return UNKNOWN


def _bool_op(node: ast.BoolOp, known: Known) -> Any:
    """`and` is false as soon as one part is, `or` true as soon as one is, whatever the unknown parts are."""
    decides = isinstance(node.op, ast.Or)
    unknown = False
    value: Any = not decides
    for part in node.values:
        value = evaluate(part, known)
        if value is UNKNOWN:
            unknown = True
        elif bool(value) is decides:
            return value
    return UNKNOWN if unknown else value


def _compare(node: ast.Compare, known: Known) -> Any:
    left = evaluate(node.left, known)
    result: Any = True
    for op, right_node in zip(node.ops, node.comparators, strict=True):
        right = evaluate(right_node, known)
        if left is UNKNOWN or right is UNKNOWN:
            return UNKNOWN
        try:
            result = _COMPARE[type(op)](left, right)
        except TypeError:
            return UNKNOWN
        if not result:
            return False
        left = right
    return result


def _call(node: ast.Call, known: Known) -> Any:
    """any/all over one comprehension, bool, len, set-like constructors; everything else is asked of `known`."""
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in ("any", "all") and len(node.args) == 1:
        return _quantifier(name, node.args[0], known)
    if name in ("bool", "len", "frozenset", "set", "tuple", "list") and len(node.args) == 1:
        value = evaluate(node.args[0], known)
        if value is UNKNOWN:
            return UNKNOWN
        if name == "bool":
            return bool(value)
        try:
            return len(value) if name == "len" else tuple(value)
        except TypeError:
            return UNKNOWN
    return known(node)


def _quantifier(name: str, node: ast.expr, known: Known) -> Any:
    if not isinstance(node, ast.GeneratorExp | ast.ListComp) or len(node.generators) != 1:
        return UNKNOWN
    loop = node.generators[0]
    items = evaluate(loop.iter, known)
    if items is UNKNOWN or items is None or not isinstance(loop.target, ast.Name) or loop.ifs:
        return UNKNOWN
    target = loop.target.id
    unknown = False
    for item in items:

        def inner(n: ast.expr, item: Any = item) -> Any:
            return item if isinstance(n, ast.Name) and n.id == target else known(n)

        value = evaluate(node.elt, inner)
        if value is UNKNOWN:
            unknown = True
        elif bool(value) is (name == "any"):
            return name == "any"
    return UNKNOWN if unknown else name == "all"
