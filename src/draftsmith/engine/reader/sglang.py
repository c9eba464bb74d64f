"""SGLang, read like vLLM: which classes implement its EAGLE-3 hook, what an aux layer id means there, which draft classes.

SGLang has no model-type list and no protocol: it calls `model.set_eagle3_layers_to_capture(ids)` and refuses a model without
it (srt/model_executor/…/attention_backend_setup.py; earlier in model_runner.py). What each class makes of the ids differs
(+1 always, +1 if the first is 1, not if the last is the number of layers), so the method itself is read along.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from draftsmith.check.types import Evidence
from draftsmith.engine.reader.configkeys import Reads, reads_of
from draftsmith.engine.reader.evaluate import UNKNOWN, evaluate
from draftsmith.engine.reader.graph import ClassRef
from draftsmith.engine.reader.modules import Module
from draftsmith.engine.reader.registry import Entry
from draftsmith.target.config import text_config

if TYPE_CHECKING:
    from draftsmith.engine.reader.facts import EngineFacts

MODELS = "sglang/srt/models"
HOOK = "set_eagle3_layers_to_capture"
GROUP = "EntryClass"
FALLBACK = "TransformersForCausalLM"
ID_READERS = (
    "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state",
    "sglang.srt.model_executor.model_runner",
)
CALLERS = (
    "sglang.srt.model_executor.model_runner_components.attention_backend_setup",
    "sglang.srt.model_executor.model_runner",
)


@dataclass(frozen=True)
class Hook:
    """supports: None = could not tell. method: where the hook is defined (class, function)."""

    supports: bool | None
    reason: str
    evidence: list[Evidence] = field(default_factory=list)
    cls: ClassRef | None = None
    method: tuple[ClassRef, ast.FunctionDef] | None = None


_ENTRY = re.compile(r"^EntryClass\b[^=\n]*=\s*(\[[^\]]*\]|\w+)", re.MULTILINE)


def index(facts: EngineFacts) -> dict[str, Entry]:
    """Registered class → where. Read as text, since there are 230 files and the one line matters in each."""
    if "sglang" not in facts.kept:
        found: dict[str, Entry] = {}
        for name in facts.source.names(MODELS):
            if not name.endswith(".py") or name == "__init__.py":
                continue
            text = facts.source.read(f"{MODELS}/{name}")
            for match in _ENTRY.finditer(text):
                line = text.count("\n", 0, match.start()) + 1
                for cls in re.findall(r"\w+", re.sub(r"#.*", "", match.group(1))):
                    found.setdefault(cls, Entry(cls, f"sglang.srt.models.{name.removesuffix('.py')}", cls, GROUP, line))
        facts.kept["sglang"] = found
    kept: dict[str, Entry] = facts.kept["sglang"]
    return kept


def drafters(facts: EngineFacts) -> dict[str, Entry]:
    """Registered EAGLE-3 draft classes."""
    return {name: entry for name, entry in index(facts).items() if "eagle3" in name.lower()}


def entry_of(facts: EngineFacts, config: dict[str, Any]) -> Entry | None:
    """The registered class for a target's architectures; the Transformers fallback where none is registered."""
    names = config.get("architectures")
    for name in [n for n in names if isinstance(n, str)] if isinstance(names, list) else []:
        if name in index(facts):
            return index(facts)[name]
    return index(facts).get(FALLBACK)


def registered(facts: EngineFacts, entry: Entry) -> Evidence:
    """The line that registers a class."""
    module = facts.modules.get(entry.module)
    return module.evidence_at(entry.line) if module is not None else Evidence(entry.module, entry.line, "")


def hook_of(facts: EngineFacts, config: dict[str, Any]) -> Hook:
    """Whether the class that would serve a target has the EAGLE-3 hook, and so has the one inside it."""
    names = config.get("architectures")
    asked = names[0] if isinstance(names, list) and names else None
    called = f"SGLang {facts.version or ''}".strip()
    entry = entry_of(facts, config)
    if entry is None:
        return Hook(False, f"{asked} is not registered in {called}")
    cls = facts.class_of(entry)
    if cls is None:
        return Hook(None, f"{entry.module}.{entry.cls} was not found in the source")
    through = "" if entry.cls == asked else f"{asked} is not registered in {called}; its fallback "
    place = [registered(facts, entry), cls.evidence]
    method = facts.graph.members(cls).get(HOOK)
    if method is None or not isinstance(method[1], ast.FunctionDef):
        return Hook(
            False, f"{through}{cls.name} does not implement {HOOK} in {called}", [*place, *_callers(facts)], cls
        )
    owner, function = method[0], method[1]
    place.append(owner.module.evidence(function, most=1))
    inner = _inner(facts, owner, function, config)
    if inner is not None and HOOK not in facts.graph.members(inner):
        reason = f"{through}{cls.name} hands {HOOK} to {inner.name}, which does not implement it"
        return Hook(False, reason, [*place, inner.evidence], cls)
    return Hook(True, f"{through}{cls.name} implements {HOOK}", place, cls, (owner, function))


def _callers(facts: EngineFacts) -> list[Evidence]:
    """Where a model without the hook is refused."""
    for name in CALLERS:
        rel = name.replace(".", "/") + ".py"
        if facts.source.exists(rel):
            module = Module(name, rel, facts.source.read(rel), False)
            line = module.line_of(f'"{HOOK}"') or module.line_of(f".{HOOK}(")
            if line:
                return [module.evidence_at(line)]
    return []


def _inner(facts: EngineFacts, owner: ClassRef, function: ast.FunctionDef, config: dict[str, Any]) -> ClassRef | None:
    """The language model that a wrapper's hook hands the ids to: what `__init__` makes of the attribute, or what the text
    config's architecture names; None where the hook does its work itself or it cannot be told."""
    target = next(
        (
            node.func.value.attr
            for node in ast.walk(function)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == HOOK
            and isinstance(node.func.value, ast.Attribute)
        ),
        None,
    )
    if target is None or target == "model":
        return None
    for line in facts.graph.mro(owner):
        for node in ast.walk(line.node) if isinstance(line, ClassRef) else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == f"self.{target}":
                made = node.value.func if isinstance(node.value, ast.Call) else None
                if isinstance(made, ast.Name) and isinstance(line, ClassRef):
                    found = _resolve_locally(facts, line, made.id)
                    if found is not None:
                        return found
    inner = text_config(config)
    entry = entry_of(facts, inner) if inner is not config and inner.get("architectures") else None
    return None if entry is None else facts.class_of(entry)


def _resolve_locally(facts: EngineFacts, owner: ClassRef, name: str) -> ClassRef | None:
    """A name as the methods of a class see it: imports inside a method first, then the module's."""
    for node in ast.walk(owner.node):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return facts.graph.resolve_class(owner.module.absolute(node.level, node.module), alias.name)
    return facts.graph.resolve_class(owner.module.name, name)


def id_reads(facts: EngineFacts) -> Reads:
    """Where the engine looks for aux layer ids: the nested key alone."""
    for name in ID_READERS:
        module = facts.modules.get(name)
        kept = [r for r in reads_of(module, module.tree) if r.under[:1] == ("eagle_config",)] if module else []
        if module is not None and kept:
            return Reads(module.evidence_at(kept[0].where.line), tuple(kept))
    return Reads(None)


def captured(
    facts: EngineFacts, config: dict[str, Any], ids: tuple[int, ...] | None, num_layers: int
) -> tuple[int, ...] | None:
    """The layers whose entering stream SGLang would hand to the drafter, in draftsmith's (vLLM's) numbering, for the ids
    in the drafter's config (None = it has none). None where the class's method could not be read along.
    """
    hook = hook_of(facts, config)
    if hook.method is None:
        return None
    owner, function = hook.method
    return _follow(facts, owner, function, config, ids, num_layers, 0)


def _follow(
    facts: EngineFacts,
    owner: ClassRef,
    function: ast.FunctionDef,
    config: dict[str, Any],
    ids: tuple[int, ...] | None,
    n: int,
    depth: int,
) -> tuple[int, ...] | None:
    parameters = [a.arg for a in function.args.args if a.arg != "self"]
    if not parameters or depth > 3:
        return None
    frame: dict[str, Any] = {parameters[0]: ids}

    def known(node: ast.expr) -> Any:
        text = ast.unparse(node)
        if text in frame:
            return frame[text]
        if text.endswith("is_last_rank"):
            return True
        if text.endswith("num_hidden_layers") or re.fullmatch(r"len\(self\.[\w.]*layers\)", text):
            return n
        if text.startswith("hasattr(self"):
            return True
        return UNKNOWN

    for statement in facts.graph.flat(function.body, known):
        value: Any = UNKNOWN
        if isinstance(statement, ast.Assign):
            name = ast.unparse(statement.targets[0])
            value = evaluate(statement.value, known)
            if not name.endswith("layers_to_capture") or name == "layers_to_capture" or name in parameters:
                frame[name] = value
                continue
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            if not (isinstance(call.func, ast.Attribute) and call.func.attr == HOOK and call.args):
                continue
            value = evaluate(call.args[0], known)
            if not ast.unparse(call.func.value).endswith(".model"):  # handed to the model inside, whose rule it then is
                inner = _inner(facts, owner, function, config)
                method = None if inner is None else facts.graph.members(inner).get(HOOK)
                if method is None or not isinstance(method[1], ast.FunctionDef) or value is UNKNOWN:
                    return None
                return _follow(facts, method[0], method[1], text_config(config), value, n, depth + 1)
        else:
            continue
        return tuple(value) if isinstance(value, tuple) and all(isinstance(v, int) for v in value) else None
    return None
