"""vLLM's model registry as data: architecture → module and class, and how an architecture that is not in it resolves."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from draftsmith.check.types import Evidence
from draftsmith.engine.reader.graph import Graph
from draftsmith.engine.reader.modules import Module

REGISTRY_MODULE = "vllm.model_executor.models.registry"
MODELS_PACKAGE = "vllm.model_executor.models"
WHOLE = "_VLLM_MODELS"
SPECULATIVE = "_SPECULATIVE_DECODING_MODELS"
FORMER = "_PREVIOUSLY_SUPPORTED_MODELS"


@dataclass(frozen=True)
class Entry:
    """One row of the registry. `module` is dotted, `group` the dict it stands in (`_TEXT_GENERATION_MODELS`)."""

    architecture: str
    module: str
    cls: str
    group: str
    line: int

    @property
    def by_transformers(self) -> bool:
        """Whether vLLM serves it through transformers' own modelling code."""
        return self.cls.startswith("Transformers")


@dataclass(frozen=True)
class Registry:
    module: Module
    entries: dict[str, Entry]
    former: dict[str, str] = field(default_factory=dict)
    """Architectures that were taken out → the last release that had them."""

    def evidence(self, entry: Entry) -> Evidence:
        line = self.module.lines[entry.line - 1]
        count = 1 if ")" in line else 4
        return self.module.evidence_at(entry.line, count)

    def group(self, name: str) -> dict[str, Entry]:
        return {arch: e for arch, e in self.entries.items() if e.group == name}


def read_registry(graph: Graph) -> Registry | None:
    """All entries of `_VLLM_MODELS`, later pieces over earlier ones, as the dict display does. None without a registry."""
    module = graph.modules.get(REGISTRY_MODULE)
    if module is None:
        return None
    entries: dict[str, Entry] = {}
    whole = graph.value(module, WHOLE)
    if isinstance(whole, ast.Dict):
        _collect(graph, module, WHOLE, whole, entries)
    else:
        for name in graph.bindings(module):
            value = graph.value(module, name)
            if name.endswith("_MODELS") and name != FORMER and isinstance(value, ast.Dict):
                _collect(graph, module, name, value, entries)
    former = graph.value(module, FORMER)
    gone: dict[str, str] = {}
    if isinstance(former, ast.Dict):
        for key, value in zip(former.keys, former.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                gone[str(key.value)] = str(value.value)
    return Registry(module, entries, gone)


def _collect(graph: Graph, module: Module, group: str, node: ast.Dict, entries: dict[str, Entry]) -> None:
    for key, value in zip(node.keys, node.values, strict=True):
        if key is None:  # **_OTHER_MODELS
            if isinstance(value, ast.Name):
                piece = graph.value(module, value.id)
                if isinstance(piece, ast.Dict):
                    _collect(graph, module, value.id, piece, entries)
            continue
        if not isinstance(key, ast.Constant) or not isinstance(value, ast.Tuple) or len(value.elts) < 2:
            continue
        words = [e.value for e in value.elts[:2] if isinstance(e, ast.Constant)]
        if len(words) == 2 and isinstance(key.value, str):
            entries[key.value] = Entry(key.value, _module_name(str(words[0])), str(words[1]), group, key.lineno)


def _module_name(relative: str) -> str:
    """vLLM's `_resolve_module_name`: names below the models package are relative, full names stand for themselves."""
    return relative if relative.startswith("vllm.") else f"{MODELS_PACKAGE}.{relative}"


def is_eagle3(entry: Entry) -> bool:
    """Whether an entry is an EAGLE-3 (or P-EAGLE) draft model."""
    return entry.group == SPECULATIVE and ("eagle3" in entry.cls.lower() or "eagle3" in entry.architecture.lower())
