"""Names, classes and base classes across files: imports, re-exports, aliases, star imports, platform-split packages,
lazy module `__getattr__`. What it cannot follow it returns as Foreign or None, never as a guess.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from draftsmith.check.types import Evidence
from draftsmith.engine.reader.evaluate import UNKNOWN, evaluate
from draftsmith.engine.reader.modules import Module, Modules


@dataclass(frozen=True)
class ClassRef:
    """A class and the module that defines it."""

    module: Module
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def evidence(self) -> Evidence:
        """The class statement with its bases, without the body."""
        last = max((int(b.end_lineno or 0) for b in self.node.bases), default=self.node.lineno)
        last = max(last, self.node.lineno)
        if last > self.node.lineno and last < len(self.module.lines):
            last += 1  # the line that closes the bracket
        return self.module.evidence_at(self.node.lineno, min(last - self.node.lineno + 1, 14))

    def __hash__(self) -> int:
        return hash((self.module.name, self.node.lineno))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassRef) and (self.module.name, self.node.lineno) == (
            other.module.name,
            other.node.lineno,
        )


@dataclass(frozen=True)
class Foreign:
    """A name from outside the installation ("torch.nn.Module"), or one that could not be followed ("?text")."""

    name: str


Found = ClassRef | Foreign | Module | None

_PLATFORMS = ("cuda", "rocm", "xpu", "cpu", "tpu")
_DEVICE_TYPE = {"rocm": "cuda"}


def platform_facts(platform: str, node: ast.expr) -> Any:
    """What a module-level condition may ask: the platform, and whether a type checker is looking."""
    text = ast.unparse(node)
    if text in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        return False
    if text == "current_platform.device_type":
        return _DEVICE_TYPE.get(platform, platform)
    if text == "current_platform.is_cuda_alike()":
        return platform in ("cuda", "rocm")
    if text == "current_platform.is_out_of_tree()":
        return False
    for one in _PLATFORMS:
        if text == f"current_platform.is_{one}()":
            return platform == one
    return UNKNOWN


@dataclass(eq=False)
class Graph:
    """Resolves names in `modules` as they would be bound on `platform`."""

    modules: Modules
    platform: str
    _bindings: dict[str, dict[str, list[ast.stmt]]] = field(default_factory=dict)
    _mro: dict[ClassRef, list[ClassRef | Foreign]] = field(default_factory=dict)

    def known(self, node: ast.expr) -> Any:
        return platform_facts(self.platform, node)

    # names

    def resolve(self, module_name: str, name: str) -> Found:
        """What `name` is in a module: a class, a module, something foreign, or None (not found, or no class)."""
        module = self.modules.get(module_name)
        return None if module is None else self._lookup(module, name, frozenset())

    def resolve_class(self, module_name: str, name: str) -> ClassRef | None:
        found = self.resolve(module_name, name)
        return found if isinstance(found, ClassRef) else None

    def flat(self, body: list[ast.stmt], known: Any = None) -> Iterator[ast.stmt]:
        """Statements that run on this platform. Of an `if` that cannot be decided both branches, the first one first."""
        known = known or self.known
        for statement in body:
            if isinstance(statement, ast.If):
                test = evaluate(statement.test, known)
                if test is UNKNOWN or test:
                    yield from self.flat(statement.body, known)
                if test is UNKNOWN or not test:
                    yield from self.flat(statement.orelse, known)
            elif isinstance(statement, ast.Try):
                yield from self.flat(statement.body, known)
                yield from self.flat(statement.orelse, known)
                for handler in statement.handlers:
                    yield from self.flat(handler.body, known)
            elif isinstance(statement, ast.With):
                yield from self.flat(statement.body, known)
            else:
                yield statement

    def bindings(self, module: Module) -> dict[str, list[ast.stmt]]:
        """Name → the statements that bind it at module level, first choice first. "*" holds the star imports."""
        if module.name not in self._bindings:
            found: dict[str, list[ast.stmt]] = {}
            for statement in self.flat(module.tree.body):
                for name in _bound(statement):
                    found.setdefault(name, []).append(statement)
            self._bindings[module.name] = found
        return self._bindings[module.name]

    def value(self, module: Module, name: str) -> ast.expr | None:
        """The expression that a module-level name is assigned (its first binding)."""
        for statement in self.bindings(module).get(name, []):
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                return statement.value
        return None

    def _lookup(self, module: Module, name: str, seen: frozenset[tuple[str, str]]) -> Found:
        key = (module.name, name)
        if key in seen:
            return None
        seen = seen | {key}
        for statement in self.bindings(module).get(name, []):
            found = self._binding(module, statement, name, seen)
            if found is not None:
                return found
        for statement in self.bindings(module).get("*", []):
            assert isinstance(statement, ast.ImportFrom)
            target = self.modules.get(module.absolute(statement.level, statement.module))
            found = None if target is None else self._lookup(target, name, seen)
            if found is not None:
                return found
        if module.is_package:
            below = self.modules.get(f"{module.name}.{name}")
            if below is not None:
                return below
        return self._lazy(module, name, seen)

    def _binding(self, module: Module, statement: ast.stmt, name: str, seen: frozenset[tuple[str, str]]) -> Found:
        if isinstance(statement, ast.ClassDef):
            return ClassRef(module, statement)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            return self._expression(module, statement.value, seen)
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                bound = alias.asname or alias.name.split(".", 1)[0]
                if bound == name:
                    return self._module(alias.name if alias.asname else bound)
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return self._imported(module.absolute(statement.level, statement.module), alias.name, seen)
        return None

    def _module(self, name: str) -> Found:
        return self.modules.get(name) if self.modules.inside(name) else Foreign(name)

    def _imported(self, source: str, name: str, seen: frozenset[tuple[str, str]]) -> Found:
        if not self.modules.inside(source):
            return Foreign(f"{source}.{name}")
        target = self.modules.get(source)
        found = None if target is None else self._lookup(target, name, seen)
        return found if found is not None else self.modules.get(f"{source}.{name}")

    def _expression(self, module: Module, node: ast.expr, seen: frozenset[tuple[str, str]]) -> Found:
        if isinstance(node, ast.Name):
            found = self._lookup(module, node.id, seen)
            return Foreign(f"builtins.{node.id}") if found is None and hasattr(builtins, node.id) else found
        if isinstance(node, ast.Attribute):
            base = self._expression(module, node.value, seen)
            if isinstance(base, Module):
                return self._lookup(base, node.attr, seen)
            return Foreign(f"{base.name}.{node.attr}") if isinstance(base, Foreign) else None
        if isinstance(node, ast.Subscript):  # Generic[T], Base[Config]
            return self._expression(module, node.value, seen)
        if isinstance(node, ast.Call):  # a class made from a class: as_seq_cls_model(X)
            for argument in node.args:
                found = self._expression(module, argument, seen)
                if isinstance(found, ClassRef):
                    return found
        return None

    def _lazy(self, module: Module, name: str, seen: frozenset[tuple[str, str]]) -> Found:
        """A name that the module's own `__getattr__` makes: read along the branch that `name` would take."""
        hook = next((s for s in self.bindings(module).get("__getattr__", []) if isinstance(s, ast.FunctionDef)), None)
        if hook is None or not hook.args.args:
            return None
        parameter = hook.args.args[0].arg

        def known(node: ast.expr) -> Any:
            if isinstance(node, ast.Name):
                if node.id == parameter:
                    return name
                value = self.value(module, node.id)
                return UNKNOWN if value is None or isinstance(value, ast.Name) else evaluate(value, self.known)
            return self.known(node)

        local: dict[str, Found] = {}
        for statement in self.flat(hook.body, known):
            if isinstance(statement, ast.Raise):
                return None
            if isinstance(statement, ast.Import | ast.ImportFrom):
                for bound in _bound(statement):
                    local[bound] = self._binding(module, statement, bound, seen)
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self._returned(statement.value, parameter, name, local, seen)
        return None

    def _returned(
        self, node: ast.expr, parameter: str, name: str, local: dict[str, Found], seen: frozenset[tuple[str, str]]
    ) -> Found:
        """`return Name`, `return module.Name`, `return getattr(module, name)`, `return {"Name": Name}[name]`."""
        if isinstance(node, ast.Name):
            return local.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            base = local.get(node.value.id)
            return self._lookup(base, node.attr, seen) if isinstance(base, Module) else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            if isinstance(node.args[0], ast.Name):
                base = local.get(node.args[0].id)
                return self._lookup(base, name, seen) if isinstance(base, Module) else None
            return None
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == name:
                    return self._returned(value, parameter, name, local, seen)
        return None

    # classes

    def bases(self, cls: ClassRef) -> list[ClassRef | Foreign]:
        result: list[ClassRef | Foreign] = []
        for node in cls.node.bases:
            found = self._expression(cls.module, node, frozenset())
            result.append(found if isinstance(found, ClassRef | Foreign) else Foreign(f"?{ast.unparse(node)}"))
        return result

    def mro(self, cls: ClassRef) -> list[ClassRef | Foreign]:
        """The class and all its ancestors, nearest first (C3; where the bases admit none, depth first)."""
        if cls not in self._mro:
            self._mro[cls] = [cls]  # a cycle in broken source ends here
            bases = self.bases(cls)
            lines = [list(self.mro(b)) if isinstance(b, ClassRef) else [b] for b in bases]
            self._mro[cls] = [cls, *_merge([*lines, list(bases)])]
        return self._mro[cls]

    def members(self, cls: ClassRef, annotations: bool = False) -> dict[str, tuple[ClassRef, ast.stmt]]:
        """Names bound in the bodies of the class and its ancestors → (class, statement), nearest first.

        annotations: also names that are only annotated (`x: int`), which a Protocol counts as members.
        """
        found: dict[str, tuple[ClassRef, ast.stmt]] = {}
        for owner in self.mro(cls):
            if isinstance(owner, ClassRef):
                for statement in self.flat(owner.node.body):
                    if isinstance(statement, ast.AnnAssign) and statement.value is None and not annotations:
                        continue
                    for name in _bound(statement):
                        found.setdefault(name, (owner, statement))
        return found


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            for node in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(node, ast.Name):
                    yield node.id
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.asname or alias.name.split(".", 1)[0]
    elif isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name


def _merge(lines: list[list[Any]]) -> list[Any]:
    """C3 merge; where there is no consistent order, what is left in the order it comes."""
    result: list[Any] = []
    lines = [line for line in lines if line]
    while lines:
        head = next((line[0] for line in lines if not any(line[0] in other[1:] for other in lines)), lines[0][0])
        result.append(head)
        lines = [rest for rest in ([item for item in line if item != head] for line in lines) if rest]
    return result
