"""Which config keys a piece of engine source reads, below which other key, and with which default.

Seen forms: `getattr(config, "k", d)`, `config.k`, `hasattr(config, "k")`, `eagle_config.get("k", d)`, `eagle_config["k"]`,
`"k" in eagle_config`, where `eagle_config` is a local name for a nested part (`getattr(config, "eagle_config", …)`),
and loops over names of nested parts (`for name in ("dflash_config", "eagle_config")`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from draftsmith.check.types import Evidence
from draftsmith.engine.reader.modules import Module

Path_ = tuple[str, ...]

_BASE = re.compile(r"(^|\.)(config|hf_config|hf_text_config|draft_hf_config|config_dict|pre_trained_config)$")
"""Expressions that stand for a config.json's top level (not `vllm_config`, `quant_config`, …)."""

ABSENT = "(required)"
"""The default of a key that is read without one."""


@dataclass(frozen=True)
class KeyRead:
    """One reading of a key. under: the nested parts above it (() = top level). default: source text of the default,
    ABSENT where there is none, None where the key is only tested for."""

    key: str
    under: Path_
    default: str | None
    where: Evidence

    @property
    def spelled(self) -> str:
        return ".".join([*self.under, self.key])


@dataclass(frozen=True)
class Reads:
    """All readings in one piece of source. place: where that piece begins, None where the release has no such piece."""

    place: Evidence | None
    reads: tuple[KeyRead, ...] = field(default_factory=tuple)

    def all(self, key: str) -> list[KeyRead]:
        return [r for r in self.reads if r.key == key]

    def get(self, key: str, under: Path_ = ()) -> KeyRead | None:
        """The reading of a key at this place; one that carries a default before one that does not."""
        found = [r for r in self.reads if r.key == key and r.under == under]
        return next((r for r in found if r.default not in (None, ABSENT)), found[0] if found else None)

    def understands(self, key: str) -> bool:
        """Whether the key is read anywhere, at the top or nested."""
        return any(r.key == key for r in self.reads)


def reads_of(module: Module, node: ast.AST) -> list[KeyRead]:
    """Every reading below `node` (a function, a class or a whole module), in source order, each place once."""
    found: dict[tuple[str, Path_, int], KeyRead] = {}
    for scope in _scopes(node):
        local = _local_parts(scope)
        for read in _in_scope(module, scope, local):
            key = (read.key, read.under, read.where.line)
            if key not in found or found[key].default is None:
                found[key] = read
    return sorted(found.values(), key=lambda r: r.where.line)


def _scopes(node: ast.AST) -> Iterator[ast.AST]:
    """The functions below `node`, or `node` itself where it is one."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _scopes(child)


def _local_parts(scope: ast.AST) -> dict[str, list[Path_]]:
    """Local names that stand for a part of the config → the paths they may stand for."""
    loops: dict[str, list[str]] = {}
    for node in ast.walk(scope):
        if (
            isinstance(node, ast.For)
            and isinstance(node.target, ast.Name)
            and isinstance(node.iter, ast.Tuple | ast.List)
        ):
            loops[node.target.id] = [str(e.value) for e in node.iter.elts if isinstance(e, ast.Constant)]
    local: dict[str, list[Path_]] = {}
    for _ in range(3):  # names made of names made of the config
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                paths = _part(node.value, local, loops)
                if paths and name not in local and not _BASE.search(name):
                    local[name] = paths
    return local


def _part(node: ast.expr, local: dict[str, list[Path_]], loops: dict[str, list[str]]) -> list[Path_]:
    """The paths that an expression stands for as a container of keys; empty where it is none."""
    if isinstance(node, ast.BoolOp):  # getattr(config, "eagle_config", None) or {}
        return next((p for p in (_part(v, local, loops) for v in node.values) if p), [])
    if isinstance(node, ast.IfExp):
        return _part(node.body, local, loops) or _part(node.orelse, local, loops)
    if isinstance(node, ast.Name) and node.id in local:
        return local[node.id]
    if isinstance(node, ast.Name | ast.Attribute) and _BASE.search(ast.unparse(node)):
        return [()]
    if isinstance(node, ast.Call):
        names: list[str] = []
        base: ast.expr | None = None
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) >= 2:
            base, names = node.args[0], _names(node.args[1], loops)
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
            base, names = node.func.value, _names(node.args[0], loops)
        if base is not None:
            return [(*p, n) for p in _part(base, local, loops) for n in names]
    return []


def _names(node: ast.expr, loops: dict[str, list[str]]) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    return loops.get(node.id, []) if isinstance(node, ast.Name) else []


def _in_scope(module: Module, scope: ast.AST, local: dict[str, list[Path_]]) -> Iterator[KeyRead]:
    for node in ast.walk(scope):
        for key, base, default in _reading(node):
            for path in _part(base, local, {}):
                yield KeyRead(key, path, default, module.evidence(node, most=3))


def _literal(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _reading(node: ast.AST) -> Iterator[tuple[str, ast.expr, str | None]]:
    """(key, container, default) where a node reads a key by a literal name."""
    if isinstance(node, ast.Call):
        yield from _call(node)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        key = _literal(node.slice)
        if key is not None:
            yield key, node.value, ABSENT
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        base = node.value
        plain = isinstance(base, ast.Name | ast.Attribute) and _BASE.search(ast.unparse(base))
        if plain and not node.attr.startswith("_") and node.attr not in _METHODS:
            yield node.attr, base, ABSENT
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        key = _literal(node.left)
        if key is not None:
            yield key, node.comparators[0], None


_METHODS = ("get", "pop", "to_dict", "update", "items")


def _call(node: ast.Call) -> Iterator[tuple[str, ast.expr, str | None]]:
    """getattr, hasattr and .get calls with a literal key."""
    args = node.args
    if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr") and len(args) >= 2:
        key = _literal(args[1])
        if key is not None:
            has = node.func.id == "hasattr"
            yield key, args[0], None if has else ast.unparse(args[2]) if len(args) > 2 else ABSENT
    elif isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop") and args:
        key = _literal(args[0])
        if key is not None:
            yield key, node.func.value, ast.unparse(args[1]) if len(args) > 1 else "None"
