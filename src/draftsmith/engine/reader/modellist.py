"""The model-type list that vLLM 0.8.5 to 0.21 test a target against before EAGLE-3 is allowed, in every shape it has had.

    0.8.5–0.10.0   `"llama" not in self.target_model_config.hf_text_config.model_type`
    0.10.1–0.16    a local list `eagle3_target_supported`, `not any(x in ….model_type for x in list)`
    0.17–0.21      the list renamed, more methods (`self.method in ("eagle3", "extract_hidden_states", …)`)
    0.22 and later no list

The reader looks for the shape (a condition on `….model_type` that guards a raise and names "eagle3"), not for names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from draftsmith.check.types import Evidence
from draftsmith.engine.reader.modules import Module, Modules

CONFIG_MODULES = ("vllm.config.speculative", "vllm.config")


@dataclass(frozen=True)
class ModelList:
    """entries: the accepted words, or None where a list is there that could not be read. tested: the expression whose
    value they are looked for in. guard: the condition; where: the raise. The test is "word in model_type"."""

    entries: tuple[str, ...] | None
    methods: tuple[str, ...]
    tested: str
    guard: Evidence
    where: Evidence
    template: tuple[str | ast.expr, ...]
    name: str | None
    list_evidence: Evidence | None = None

    @property
    def reads_text_config(self) -> bool:
        """Whether the engine looks at the text config's model_type, and not at the outer one."""
        return "text_config" in self.tested

    def applies(self, method: str) -> bool:
        return method in self.methods

    def matching(self, model_type: str) -> str | None:
        """The first word of the list that stands in `model_type`."""
        return next((word for word in self.entries or () if word in model_type), None)

    def message(self, model_type: str, method: str = "eagle3") -> str:
        """The engine's own words for this target."""
        parts: list[str] = []
        for part in self.template:
            if isinstance(part, str):
                parts.append(part)
                continue
            text = ast.unparse(part)
            if text == self.name:
                parts.append(repr(list(self.entries or ())))
            elif text.endswith(".model_type"):
                parts.append(repr(model_type))
            elif text.endswith(".method"):
                parts.append(method)
            else:
                parts.append("{" + text + "}")
        return "".join(parts)


def read_model_list(modules: Modules) -> tuple[ModelList | None, Module | None]:
    """(the list or None where the release has none, the module that was read or None where there is no such module)."""
    last: Module | None = None
    for name in CONFIG_MODULES:
        module = modules.get(name)
        if module is None:
            continue
        if "class SpeculativeConfig" not in module.text:
            continue
        last = module
        if ".model_type" not in module.text or "eagle3" not in module.text:
            continue
        for function in _functions(module.tree.body):
            text = "\n".join(module.lines[function.lineno - 1 : function.end_lineno])
            if ".model_type" in text and "eagle3" in text:
                found = _in_function(module, function)
                if found is not None:
                    return found, module
    return None, last


def _functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Functions and methods, outermost ones (walking the whole tree takes a tenth of a second)."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef | ast.If):
            yield from _functions(node.body)


def _in_function(module: Module, function: ast.FunctionDef) -> ModelList | None:
    for node in ast.walk(function):
        if not isinstance(node, ast.If):
            continue
        methods = _methods(node.test)
        test = _membership(node.test)
        raised = next((s for s in node.body if isinstance(s, ast.Raise)), None)
        if "eagle3" not in methods or test is None or raised is None:
            continue
        tested, words = test
        entries, name, where = _words(module, function, words)
        guard = module.evidence(node.test, most=12)
        template = _template(raised)
        return ModelList(entries, methods, tested, guard, module.evidence(raised), template, name, where)
    return None


def _methods(test: ast.expr) -> tuple[str, ...]:
    """The methods that a condition names: `self.method == "eagle3"`, `self.method in ("eagle3", …)`."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("method"):
            right = node.comparators[0]
            if isinstance(node.ops[0], ast.Eq | ast.In):
                return tuple(
                    c.value for c in ast.walk(right) if isinstance(c, ast.Constant) and isinstance(c.value, str)
                )
    return ()


def _membership(test: ast.expr) -> tuple[str, ast.expr] | None:
    """(the tested expression, the words): `"llama" not in X.model_type` or `not any(w in X.model_type for w in WORDS)`."""
    for node in ast.walk(test):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("any", "all")
            and node.args
        ):
            loop = node.args[0]
            if isinstance(loop, ast.GeneratorExp | ast.ListComp) and isinstance(loop.elt, ast.Compare):
                tested = ast.unparse(loop.elt.comparators[0])
                if tested.endswith(".model_type") and isinstance(loop.elt.ops[0], ast.In | ast.NotIn):
                    return tested, loop.generators[0].iter
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotIn):
            tested = ast.unparse(node.comparators[0])
            if tested.endswith(".model_type"):
                return tested, node.left
    return None


def _words(
    module: Module, function: ast.FunctionDef, node: ast.expr
) -> tuple[tuple[str, ...] | None, str | None, Evidence | None]:
    """(the words, the name they have in the source, where they stand)."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
    value: ast.expr | None = node
    if name is not None:
        value = None
        for place in (function, module.tree):
            for statement in ast.walk(place):
                targets = (
                    statement.targets
                    if isinstance(statement, ast.Assign)
                    else [statement.target]
                    if isinstance(statement, ast.AnnAssign)
                    else []
                )
                if any(ast.unparse(t).rsplit(".", 1)[-1] == name for t in targets):
                    value = statement.value  # type: ignore[attr-defined]
            if value is not None:
                break
    if value is None:
        return None, name, None
    evidence = module.evidence(value, most=24)
    if isinstance(value, ast.Call) and len(value.args) == 1:  # frozenset([...]), tuple([...])
        value = value.args[0]
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return (value.value,), name, evidence
    if isinstance(value, ast.List | ast.Tuple | ast.Set) and all(
        isinstance(e, ast.Constant) and isinstance(e.value, str) for e in value.elts
    ):
        return tuple(str(e.value) for e in value.elts if isinstance(e, ast.Constant)), name, evidence
    return None, name, evidence


def _template(raised: ast.Raise) -> tuple[str | ast.expr, ...]:
    """The message as text and expressions: what an f-string is made of."""
    call = raised.exc
    if not isinstance(call, ast.Call) or not call.args:
        return ()
    message = call.args[0]
    if isinstance(message, ast.Constant):
        return (str(message.value),)
    if isinstance(message, ast.JoinedStr):
        return tuple(
            str(p.value) if isinstance(p, ast.Constant) else p.value
            for p in message.values
            if isinstance(p, ast.Constant | ast.FormattedValue)
        )
    return ("{" + ast.unparse(message) + "}",)
