"""Modules of an installation by dotted name, parsed once and only when asked for; evidence from their lines."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass, field
from functools import cached_property

from draftsmith.check.types import Evidence
from draftsmith.engine.reader.source import Source


@dataclass(eq=False)
class Module:
    """One source file. `rel` as in evidence ("vllm/config/speculative.py"), `name` dotted."""

    name: str
    rel: str
    text: str
    is_package: bool

    @cached_property
    def lines(self) -> list[str]:
        return self.text.split("\n")

    @cached_property
    def tree(self) -> ast.Module:
        """SyntaxError where this Python cannot parse it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(self.text)

    def evidence(self, node: ast.AST, most: int = 6) -> Evidence:
        """The lines of a node (at most `most` of them), with the line number of the first."""
        first = int(getattr(node, "lineno", 1))
        last = min(int(getattr(node, "end_lineno", first) or first), first + most - 1)
        return Evidence(self.rel, first, "\n".join(self.lines[first - 1 : last]))

    def line_of(self, needle: str) -> int | None:
        """1-based line of the first place where `needle` stands, without parsing."""
        at = self.text.find(needle)
        return None if at < 0 else self.text.count("\n", 0, at) + 1

    def evidence_at(self, line: int, count: int = 1) -> Evidence:
        return Evidence(self.rel, line, "\n".join(self.lines[line - 1 : line - 1 + count]))

    def absolute(self, level: int, module: str | None) -> str:
        """The dotted name that `from <level dots><module> import …` means in this module."""
        if level == 0:
            return module or ""
        parts = self.name.split(".")
        drop = level - 1 if self.is_package else level
        base = parts[: len(parts) - drop] if drop else parts
        return ".".join([*base, module] if module else base)


@dataclass(eq=False)
class Modules:
    """All modules below the packages of a source. `unreadable` collects the files that could not be parsed."""

    source: Source
    packages: tuple[str, ...]
    unreadable: dict[str, str] = field(default_factory=dict)
    _cache: dict[str, Module | None] = field(default_factory=dict)

    def inside(self, name: str) -> bool:
        """Whether a dotted name belongs to the installation (and not to torch, transformers, …)."""
        return name.split(".", 1)[0] in self.packages

    def get(self, name: str) -> Module | None:
        """The module, or None where there is no such file or it cannot be parsed (then see `unreadable`)."""
        if name not in self._cache:
            self._cache[name] = self._load(name)
        return self._cache[name]

    def first(self, *names: str) -> Module | None:
        return next((module for module in map(self.get, names) if module is not None), None)

    def _load(self, name: str) -> Module | None:
        if not name or not self.inside(name):
            return None
        stem = name.replace(".", "/")
        for rel, is_package in ((f"{stem}.py", False), (f"{stem}/__init__.py", True)):
            try:
                module = Module(name, rel, self.source.read(rel), is_package)
            except FileNotFoundError:
                continue
            try:
                _ = module.tree
            except (SyntaxError, ValueError, RecursionError) as e:
                self.unreadable[rel] = str(e)
                return None
            return module
        return None
