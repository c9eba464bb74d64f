"""Run something right after a module has been imported, or now if it has been already.

A fault is mended in the module that has it, and that module may be imported before or after the plugin is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _After(Loader):
    def __init__(self, inner: Loader, then: Callable[[ModuleType], None]) -> None:
        self.inner, self.then = inner, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        # Tools that ask a module for its loader (inspect, pickling by source) shall see the real one.
        module.__loader__ = self.inner
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        self.then(module)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        calls = self.waiting.get(fullname)
        if not calls:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None

        def then(module: ModuleType) -> None:
            for call in self.waiting.pop(fullname, []):
                call(module)

        spec.loader = _After(spec.loader, then)
        return spec


_finder = _Finder()


def after_import(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call `call(module)` once module `name` is there. Re-entrant: the same `call` waits only once."""
    module = sys.modules.get(name)
    # A module in the middle of its import is in sys.modules too, without its functions.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        call(module)
        return
    waiting = _finder.waiting.setdefault(name, [])
    if call not in waiting:
        waiting.append(call)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
