"""A multimodal class that passes vLLM's EAGLE-3 test still hands the work to the language model inside it, which may not
collect aux states at all: the engine then stops on an assertion (or, before 0.18, on the first request).
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from draftsmith.engine.reader.graph import ClassRef
from draftsmith.engine.reader.registry import Entry
from draftsmith.target.config import text_config

if TYPE_CHECKING:
    from draftsmith.engine.reader.facts import EngineFacts

MAKER = "init_vllm_registered_model"
MARKS = ("EagleModelMixin", "aux_hidden_state_layers")
"""What stands in the source of a language model that collects aux states."""


def inner_entry(facts: EngineFacts, outer: ClassRef, config: dict[str, Any]) -> Entry | None:
    """The registry entry of the language model inside a wrapper: the architecture that the wrapper names when it makes
    it, or the text config's own; None for a target that is no wrapper, and where it cannot be told."""
    text = text_config(config)
    if facts.registry is None or text is config:
        return None
    named = _named(facts, outer)
    declared = text.get("architectures")
    names = (
        [*named]
        if len(named) == 1
        else [n for n in declared if isinstance(n, str)]
        if isinstance(declared, list)
        else []
    )
    return next((facts.registry.entries[n] for n in names if n in facts.registry.entries), None)


def _named(facts: EngineFacts, outer: ClassRef) -> set[str]:
    """Architectures written out where the wrapper makes its language model; the nearest class that makes one counts."""
    for owner in facts.graph.mro(outer):
        found: set[str] = set()
        for node in ast.walk(owner.node) if isinstance(owner, ClassRef) else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(MAKER):
                for keyword in node.keywords:
                    if keyword.arg == "architectures":
                        found |= {str(c.value) for c in ast.walk(keyword.value) if isinstance(c, ast.Constant)}
        if found:
            return found
    return set()


def hollow(facts: EngineFacts, outer: ClassRef) -> bool:
    """Whether a wrapper that has the interface always makes a language model that collects no aux states."""
    entries = facts.registry.entries if facts.registry else {}
    inner = [entries[name] for name in _named(facts, outer) if name in entries]
    return bool(inner) and all(collects(facts, entry)[0] is False for entry in inner)


def collects(facts: EngineFacts, entry: Entry) -> tuple[bool | None, ClassRef | None]:
    """(whether a language model's class, or the files of its ancestors, collect aux states, the class)."""
    cls = facts.class_of(entry)
    if cls is None:
        return None, None
    if facts.support(entry).supports:
        return True, cls
    owners = [c for c in facts.graph.mro(cls) if isinstance(c, ClassRef) and not c.module.name.endswith(".interfaces")]
    return any(mark in owner.module.text for owner in owners for mark in MARKS), cls
