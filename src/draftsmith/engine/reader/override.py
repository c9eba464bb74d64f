"""What the engine makes of a draft model's config before it looks at the method: vLLM's SpeculativeConfig.hf_config_override
turns many `model_type`s and architectures into those of MTP heads, EAGLE-3 drafter or not.

    override_of(facts, {"model_type": "deepseek_v3", "architectures": ["Eagle3DeepseekV2ForCausalLM"]})
    # Override(model_type="deepseek_mtp", architecture="DeepSeekMTPModel", …)

Read as three-valued: a branch whose test does not follow from the config is not taken.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from draftsmith.check.types import Evidence
from draftsmith.engine.reader.evaluate import UNKNOWN, evaluate
from draftsmith.engine.reader.functions import find_function
from draftsmith.engine.reader.modules import Module

if TYPE_CHECKING:
    from draftsmith.engine.reader.facts import EngineFacts

FUNCTION = "hf_config_override"
DRAFTER = "LlamaForCausalLMEagle3"
MODULES = ("vllm.config.speculative", "vllm.config.__init__", "vllm.config")
"""Where releases have it (0.11, 0.10.1, before)."""


@dataclass(frozen=True)
class Override:
    """model_type and architecture as they are afterwards; where: the branches that were taken."""

    model_type: str
    architecture: str | None
    where: tuple[Evidence, ...]


@dataclass
class _Walk:
    """The names that the function has bound so far, and the config as it has become."""

    module: Module
    config: dict[str, Any]
    names: dict[str, Any] = field(default_factory=dict)
    where: list[Evidence] = field(default_factory=list)

    def known(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return self.names.get(node.id, UNKNOWN)
        if isinstance(node, ast.Attribute) and self.is_config(node.value):
            return _plain(self.config[node.attr]) if node.attr in self.config else UNKNOWN
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) >= 2:
            return self._asked(node.func.id, node.args)
        if isinstance(node, ast.NamedExpr) and isinstance(node.target, ast.Name):
            self.names[node.target.id] = evaluate(node.value, self.known)
            return self.names[node.target.id]
        return UNKNOWN

    def is_config(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == "hf_config" and node.id not in self.names

    def _asked(self, function: str, args: list[ast.expr]) -> Any:
        """getattr and hasattr of the config. A key that is not written may still have a default of the library's."""
        key = args[1].value if isinstance(args[1], ast.Constant) else None
        if function not in ("getattr", "hasattr") or not self.is_config(args[0]) or not isinstance(key, str):
            return UNKNOWN
        if key not in self.config:
            return UNKNOWN
        return True if function == "hasattr" else _plain(self.config[key])

    def run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.If):
                test = evaluate(statement.test, self.known)
                if test is UNKNOWN:
                    continue
                before = dict(self.config)
                self.run(statement.body if test else statement.orelse)
                if self.config != before and test:
                    self.where.append(self.module.evidence(statement, most=8))
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self._assign(statement.targets[0], statement.value)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self._update(statement.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = self._value(value)
        elif isinstance(target, ast.Attribute) and self.is_config(target.value):
            self.config[target.attr] = self._value(value)
        elif (
            isinstance(target, ast.Subscript)
            and isinstance(target.value, ast.Name)
            and isinstance(target.slice, ast.Constant)
            and isinstance(self.names.get(target.value.id), dict)
        ):
            self.names[target.value.id][target.slice.value] = self._value(value)

    def _value(self, node: ast.expr) -> Any:
        """As evaluate, and dicts of literal keys."""
        if isinstance(node, ast.Dict):
            return {
                k.value: self._value(v)
                for k, v in zip(node.keys, node.values, strict=True)
                if isinstance(k, ast.Constant)
            }
        if isinstance(node, ast.Subscript) and isinstance(self.names.get(ast.unparse(node.value)), dict):
            key = evaluate(node.slice, self.known)
            return self.names[ast.unparse(node.value)].get(key, UNKNOWN) if isinstance(key, str) else UNKNOWN
        if isinstance(node, ast.List | ast.Tuple):
            return tuple(self._value(item) for item in node.elts)
        return evaluate(node, self.known)

    def _update(self, call: ast.Call) -> None:
        """`hf_config.update({…})` or of a name that holds such a dict."""
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "update" and call.args):
            return
        values = self._value(call.args[0])
        if self.is_config(call.func.value) and isinstance(values, dict):
            self.config |= values


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def override_of(facts: EngineFacts, config: dict[str, Any]) -> Override | None:
    """What becomes of a drafter's config.json; None where its model_type and architecture stay as they are (or the
    release has no such function). config: with `model_type` and `architectures`, as transformers would hold it."""
    kind, names = config.get("model_type"), config.get("architectures")
    if not isinstance(kind, str) or not (isinstance(names, list) and names and isinstance(names[0], str)):
        return None
    for module, function in _functions(facts):
        walk = _Walk(module, dict(config))
        walk.run(function.body)
        after, made = walk.config.get("model_type"), _plain(walk.config.get("architectures"))
        first = made[0] if isinstance(made, tuple) and made and isinstance(made[0], str) else None
        if (after, first) == (kind, names[0]):
            return None
        return Override(after if isinstance(after, str) else kind, first, tuple(walk.where))
    return None


def rewritten_types(facts: EngineFacts) -> list[str]:
    """Every model_type that a Llama drafter may not have, since the function turns it into another; sorted."""
    words = {
        n.value
        for _, function in _functions(facts)
        for n in ast.walk(function)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value
    }
    return sorted(w for w in words if override_of(facts, {"model_type": w, "architectures": [DRAFTER]}))


def _functions(facts: EngineFacts) -> Iterator[tuple[Module, ast.FunctionDef]]:
    for name in MODULES:
        found = find_function(facts.modules, name, FUNCTION)
        if found is not None:
            yield found
