"""Does a model class of this installation have vLLM's EAGLE-3 interface? Read from its source, never imported.

Importing a model class in the front end would cost seconds and may touch the accelerator, which vLLM avoids there.
Base classes are followed by name through the imports of each file.
"""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from importlib.util import find_spec, resolve_name
from pathlib import Path

INTERFACE = "SupportsEagle3"
"""vllm/model_executor/models/interfaces.py"""
MAKERS = ("make_layers", "init_vllm_registered_model")
"""What a class's file calls where its decoder layers are made by the engine's own means, here or in the language model
inside (vllm/model_executor/models/utils.py)."""


@lru_cache(maxsize=256)
def _file(module: str) -> str | None:
    """The module's file, found without importing it (its parents are imported already, or are plain folders)."""
    parent, _, last = module.rpartition(".")
    package = sys.modules.get(parent)
    for folder in getattr(package, "__path__", ()) if package else ():
        for candidate in (Path(folder) / f"{last}.py", Path(folder) / last / "__init__.py"):
            if candidate.is_file():
                return str(candidate)
    parent_file = _file(parent) if package is None and parent else None
    if parent_file is not None and Path(parent_file).name == "__init__.py":
        folder = Path(parent_file).parent
        for candidate in (folder / f"{last}.py", folder / last / "__init__.py"):
            if candidate.is_file():
                return str(candidate)
    if parent:
        return None
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec else None


@lru_cache(maxsize=256)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return None


def _imports(tree: ast.Module, module: str, is_package: bool) -> dict[str, tuple[str, str]]:
    """Name in this file → (module, name there), of every `from … import …` outside functions."""
    package = module if is_package else module.rpartition(".")[0]
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        try:
            origin = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
        except ImportError:
            continue
        for alias in node.names:
            found.setdefault(alias.asname or alias.name, (origin, alias.name))
    return found


def _name(base: ast.expr) -> str | None:
    """Last part of a base class expression: Foo, pkg.Foo, Foo[T]."""
    if isinstance(base, ast.Subscript):
        return _name(base.value)
    if isinstance(base, ast.Attribute):
        return base.attr
    return base.id if isinstance(base, ast.Name) else None


def has_interface(module: str, name: str) -> bool | None:
    """True or False as the source says; None where the class cannot be found in it."""
    return _search(module, name, set())


def _search(module: str, name: str, seen: set[tuple[str, str]]) -> bool | None:
    if name == INTERFACE:
        return True
    if (module, name) in seen:
        return False
    seen.add((module, name))
    file = _file(module)
    tree = _tree(file) if file else None
    if file is None or tree is None:
        return None
    imports = _imports(tree, module, Path(file).name == "__init__.py")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for base in node.bases:
                base_name = _name(base)
                if base_name == INTERFACE:
                    return True
                if base_name is None:
                    continue
                local = any(isinstance(n, ast.ClassDef) and n.name == base_name for n in ast.walk(tree))
                origin = (module, base_name) if local else imports.get(base_name)
                # Classes of other packages (torch, typing) have no part in vLLM's interfaces.
                if origin and (local or origin[0].startswith("vllm")) and _search(*origin, seen):
                    return True
            return False
    if name in imports:
        return _search(*imports[name], seen)
    return None


def has_layers(module: str, name: str) -> bool:
    """Does the source of a class, or of one of its bases, make its decoder layers so that the shim can find them? What
    it then finds is proved on the loaded model."""
    return _layers(module, name, set())


def _layers(module: str, name: str, seen: set[tuple[str, str]]) -> bool:
    if (module, name) in seen or not module.startswith("vllm"):
        return False
    seen.add((module, name))
    file = _file(module)
    tree = _tree(file) if file else None
    if file is None or tree is None:
        return False
    imports = _imports(tree, module, Path(file).name == "__init__.py")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            if any(isinstance(n, ast.Call) and _name(n.func) in MAKERS for n in ast.walk(tree)):
                return True
            bases = [b for b in map(_name, node.bases) if b in imports]
            return any(_layers(*imports[b], seen) for b in bases if b)
    return name in imports and _layers(*imports[name], seen)
