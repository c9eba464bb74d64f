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
    if isinstance(node, ast.BinOp):
        return _arithmetic(node, known)
    if isinstance(node, ast.ListComp):
        return _comprehension(node, known)
    if isinstance(node, ast.Subscript):
        return _item(node, known)
    if isinstance(node, ast.Call):
        return _call(node, known)
    if isinstance(node, ast.Name | ast.Attribute | ast.NamedExpr):
        return known(node)
    return UNKNOWN


_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
}


def _arithmetic(node: ast.BinOp, known: Known) -> Any:
    """+ - * // of whole numbers. A set or tuple minus another is what is left of the first."""
    left, right = evaluate(node.left, known), evaluate(node.right, known)
    if isinstance(left, tuple) and isinstance(right, tuple) and isinstance(node.op, ast.Sub):
        return tuple(item for item in left if item not in right)
    apply = _ARITHMETIC.get(type(node.op))
    if apply is None or not all(isinstance(v, int) and abs(v) < 1 << 32 for v in (left, right)):
        return UNKNOWN
    return UNKNOWN if isinstance(node.op, ast.FloorDiv) and right == 0 else apply(left, right)


def _item(node: ast.Subscript, known: Known) -> Any:
    """`items[0]` of known items; everything else is asked of `known`."""
    items = evaluate(node.value, known)
    if isinstance(items, tuple):
        index = evaluate(node.slice, known)
        if isinstance(index, int) and -len(items) <= index < len(items):
            return items[index]
        return UNKNOWN
    return known(node)


def _comprehension(node: ast.ListComp, known: Known) -> Any:
    """`[f(x) for x in items]` over known items."""
    loop = node.generators[0]
    items = evaluate(loop.iter, known)
    if len(node.generators) != 1 or loop.ifs or not isinstance(items, tuple) or not isinstance(loop.target, ast.Name):
        return UNKNOWN
    values = [evaluate(node.elt, _with(known, loop.target.id, item)) for item in items]
    return UNKNOWN if any(v is UNKNOWN for v in values) else tuple(values)


def _with(known: Known, name: str, value: Any) -> Known:
    return lambda n: value if isinstance(n, ast.Name) and n.id == name else known(n)


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
    if name in ("max", "min") and len(node.args) == 1:
        values = evaluate(node.args[0], known)
        whole = isinstance(values, tuple) and values and all(isinstance(v, int) for v in values)
        return (max if name == "max" else min)(values) if whole else UNKNOWN
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
        value = evaluate(node.elt, _with(known, target, item))
        if value is UNKNOWN:
            unknown = True
        elif bool(value) is (name == "any"):
            return name == "any"
    return UNKNOWN if unknown else name == "all"
