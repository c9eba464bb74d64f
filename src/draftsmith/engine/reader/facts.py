"""Everything that is asked of an installed engine, read on first use and once. What is SGLang's own is in sglang.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from draftsmith.check.types import EngineId, Evidence
from draftsmith.engine.reader import sglang
from draftsmith.engine.reader.graph import ClassRef, Graph
from draftsmith.engine.reader.interface import Interface, Support, read_interface, support_of
from draftsmith.engine.reader.located import Located
from draftsmith.engine.reader.modellist import ModelList, read_model_list
from draftsmith.engine.reader.modules import Modules
from draftsmith.engine.reader.registry import Entry, Registry, is_eagle3, read_registry
from draftsmith.engine.reader.resolve import Resolved, resolve_architecture
from draftsmith.engine.reader.source import Source


@dataclass(eq=False)
class EngineFacts:
    """An engine's facts. `located` says where it lies; everything else is lazy.

    Paths in evidence are relative to the folder that holds the package ("vllm/config/speculative.py").
    """

    located: Located
    platform: str = ""
    kept: dict[str, Any] = field(default_factory=dict)
    """What readers of one engine keep for the next question."""
    modules: Modules = field(init=False)
    graph: Graph = field(init=False)

    def __post_init__(self) -> None:
        self.platform = self.platform or self.located.platform
        self.modules = Modules(self.located.source, (self.located.engine,))
        self.graph = Graph(self.modules, self.platform)

    @property
    def name(self) -> str:
        return self.located.engine

    @property
    def version(self) -> str | None:
        return self.located.version

    @property
    def path(self) -> str:
        return self.located.path

    @property
    def source(self) -> Source:
        return self.located.source

    @property
    def id(self) -> EngineId:
        return EngineId(self.name, self.version, self.path)

    @property
    def release(self) -> tuple[int, ...]:
        """(0, 16, 0) of "0.16.0+cpu"; () where the version is not known."""
        parts: list[int] = []
        for part in (self.version or "").partition("+")[0].split("."):
            digits = "".join(c for c in part if c.isdigit()) if part[:1].isdigit() else ""
            if not digits:
                break
            parts.append(int(digits))
        return tuple(parts)

    # the gate

    @cached_property
    def _list(self) -> tuple[ModelList | None, Evidence | None]:
        found, module = read_model_list(self.modules)
        if module is None:
            return found, None
        line = module.line_of("class SpeculativeConfig")
        return found, module.evidence_at(line) if line else None

    @property
    def model_list(self) -> ModelList | None:
        """The model-type list, None where this release has none."""
        return self._list[0]

    @property
    def model_list_place(self) -> Evidence | None:
        """Where the list would stand (the config class); None where that class was not found at all."""
        return self._list[1]

    @cached_property
    def registry(self) -> Registry | None:
        return read_registry(self.graph)

    @cached_property
    def interface(self) -> Interface | None:
        return read_interface(self.graph)

    def resolve(self, config: dict[str, Any], model_impl: str = "auto") -> Resolved:
        """Which registry entry a target's config leads to, or why none."""
        return resolve_architecture(self, config, model_impl)

    def class_of(self, entry: Entry) -> ClassRef | None:
        """The class behind a registry entry on this platform."""
        return self.graph.resolve_class(entry.module, entry.cls)

    def support(self, entry: Entry) -> Support:
        """Whether the class behind an entry passes the engine's EAGLE-3 test."""
        if self.name == "sglang":
            hook = sglang.hook_of(self, {"architectures": [entry.architecture]})
            return Support(hook.supports, hook.reason, (), hook.evidence)
        if self.interface is None:
            return Support(False, f"{self.name} {self.version} has no EAGLE-3")
        cls = self.class_of(entry)
        if cls is None:
            return Support(None, f"{entry.module}.{entry.cls} was not found in the source")
        return support_of(self.graph, self.interface, cls)

    def supports(self, architecture: str) -> Support | None:
        """The same by architecture name; None where it is not registered."""
        if self.name == "sglang":
            entry = sglang.index(self).get(architecture)
        else:
            entry = self.registry.entries.get(architecture) if self.registry else None
        return None if entry is None else self.support(entry)

    # drafters

    @cached_property
    def drafters(self) -> dict[str, Entry]:
        """Registered EAGLE-3 draft architectures."""
        if self.name == "sglang":
            return sglang.drafters(self)
        if self.registry is None:
            return {}
        return {arch: e for arch, e in self.registry.entries.items() if is_eagle3(e)}

    def is_a(self, cls: ClassRef, name: str) -> bool:
        """Whether a class has an ancestor of this name (IsHybrid, SupportsPP, …)."""
        return any(isinstance(c, ClassRef) and c.name == name for c in self.graph.mro(cls))
