"""Would the runtime plugin's shim serve a class that lacks the EAGLE-3 interface? Read from source.

The shim itself proves the form of the stream on the loaded model; here only what can be read is asked: that the class
(or the language model inside it) makes its layers by the engine's `make_layers`, that the layer's forward takes a hidden
state by a name that the shim knows, and that the runner will find the embedding to share with the drafter, which it
looks for before the shim has its turn (vllm/v1/spec_decode/llm_base_proposer.py, _maybe_share_embeddings).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from draftsmith.check.types import Evidence
from draftsmith.engine.plugin_src.draftsmith_vllm.shim import HIDDEN_NAMES
from draftsmith.engine.reader.graph import ClassRef
from draftsmith.engine.reader.wrapper import inner_entry

if TYPE_CHECKING:
    from draftsmith.engine.reader.facts import EngineFacts
    from draftsmith.engine.reader.registry import Entry

MAKER = "make_layers"
"""vllm/model_executor/models/utils.py"""
SHARED = ("embed_tokens", "embedding")


def shim_place(facts: EngineFacts, entry: Entry, config: dict[str, Any]) -> Evidence | None:
    """Where the layers are made that the shim would record; None where it could not serve. config: the target's."""
    outer = facts.class_of(entry)
    inner = None if outer is None else inner_entry(facts, outer, config)
    cls = outer if inner is None else facts.class_of(inner)
    if cls is None:
        return None
    for decoder in _made(facts, cls, "model"):
        owners = [c for c in facts.graph.mro(decoder) if isinstance(c, ClassRef)]
        if not any(_assigns(owner, name) for owner in owners for name in SHARED):
            continue
        for owner in owners:
            for node in ast.walk(owner.node):
                if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == MAKER:
                    return owner.module.evidence_at(node.lineno, 2) if _fits(facts, owner, node) else None
    return None


def _assigned(owner: ClassRef, attribute: str) -> Iterator[ast.expr]:
    """What `self.attribute` is assigned in the class's own body (of a tuple assignment, the whole value)."""
    for node in ast.walk(owner.node):
        if isinstance(node, ast.Assign):
            targets = [e for t in node.targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
            if any(ast.unparse(t) == f"self.{attribute}" for t in targets):
                yield node.value


def _assigns(owner: ClassRef, attribute: str) -> bool:
    return next(_assigned(owner, attribute), None) is not None


def _made(facts: EngineFacts, cls: ClassRef, attribute: str) -> Iterator[ClassRef]:
    """The classes that `self.attribute` may be made of: `X(…)` in the class or an ancestor, what a method of the same
    class that is called there returns (`self._init_model(…)`), or a class attribute (`self.model_cls(…)`)."""
    for owner in facts.graph.mro(cls):
        if not isinstance(owner, ClassRef):
            continue
        for value in _assigned(owner, attribute):
            if not isinstance(value, ast.Call):
                continue
            name = ast.unparse(value.func)
            if name.startswith("self."):
                member = facts.graph.members(cls).get(name.removeprefix("self."))
                module, names = (member[0].module.name, _returned(member[1])) if member else ("", [])
            else:
                module, names = owner.module.name, [name]
            for one in names:
                found = facts.graph.resolve_class(module, one)
                if found is not None:
                    yield found


def _returned(member: ast.stmt) -> list[str]:
    """Names of the classes that a method makes and returns, or that a class attribute is."""
    if isinstance(member, ast.Assign | ast.AnnAssign) and member.value is not None:
        return [ast.unparse(member.value)]
    found = [n.value for n in ast.walk(member) if isinstance(n, ast.Return)]
    return [ast.unparse(call.func) for call in found if isinstance(call, ast.Call)]


def _fits(facts: EngineFacts, owner: ClassRef, call: ast.Call) -> bool:
    """Whether the layer class takes a hidden state by a known name; True where the class is chosen at run time."""
    made = next((a.body for a in call.args if isinstance(a, ast.Lambda)), None)
    if not isinstance(made, ast.Call):
        return True
    layer = facts.graph.resolve_class(owner.module.name, ast.unparse(made.func))
    if layer is None:
        return True
    found = facts.graph.members(layer).get("forward")
    if found is None or not isinstance(found[1], ast.FunctionDef):
        return True
    arguments = found[1].args
    return any(a.arg in HIDDEN_NAMES for a in [*arguments.args, *arguments.kwonlyargs])
