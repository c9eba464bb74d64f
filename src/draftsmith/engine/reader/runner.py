"""Which of vLLM's two model runners would serve a target? They read aux layer ids from different keys.

The release's own rule is read along: `VllmConfig.use_v2_model_runner` (vllm/config/vllm.py) and the methods it calls are
followed statement by statement over what is known of target and launch. Nothing is executed. A condition about a feature
that was not asked for counts as not met and is named in `assumptions`; a condition about the model that cannot be decided
makes the answer None. Releases before 0.22 have no rule: V1 unless VLLM_USE_V2_MODEL_RUNNER says otherwise.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from draftsmith.check.types import Evidence, Options
from draftsmith.engine.reader.evaluate import UNKNOWN, evaluate
from draftsmith.engine.reader.functions import find_function
from draftsmith.engine.reader.graph import platform_facts
from draftsmith.engine.reader.modules import Module
from draftsmith.engine.reader.resolve import experts
from draftsmith.target.config import text_config

if TYPE_CHECKING:
    from draftsmith.engine.reader.facts import EngineFacts

CONFIG = "vllm.config.vllm"
RULE = "use_v2_model_runner"
VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_DEPTH = 6


@dataclass(frozen=True)
class Choice:
    """runner None = could not tell. why: one sentence; evidence: the line that decided, and the rule."""

    runner: Literal["v1", "v2"] | None
    why: str
    evidence: list[Evidence]
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Sym:
    """An object of the engine of which single attributes are known: `self`, `self.model_config`, …"""

    path: str


class _UndecidedError(Exception):
    """A condition on which the answer hangs cannot be decided."""


def choose_runner(
    facts: EngineFacts, target: dict[str, Any], options: Options, parallel_drafting: bool = False
) -> Choice:
    """The runner for a target (its config.json) under these options, with an EAGLE-3 drafter."""
    found = find_function(facts.modules, CONFIG, RULE)
    if found is None:
        return _before_the_rule(facts, options)
    module, function = found
    reading = _Reading(facts, module, _facts_of(facts, target, options, parallel_drafting))
    try:
        value = reading.run(function, {})
    except _UndecidedError as e:
        where = reading.last or module.evidence_at(function.lineno)
        return Choice(
            None, f"which runner serves it hangs on what is not known here: {e}", [where], tuple(reading.assumed)
        )
    runner: Literal["v1", "v2"] | None = "v2" if value is True else "v1" if value is False else None
    evidence = [module.evidence_at(function.lineno)]
    if reading.last is not None:
        evidence.insert(0, reading.last)
    why = reading.reason or f"{VARIABLE} is not set and nothing speaks against the default"
    return Choice(runner, f"{(runner or 'neither').upper()} runner: {why}", evidence, tuple(reading.assumed))


def _before_the_rule(facts: EngineFacts, options: Options) -> Choice:
    """Releases without a rule: the variable alone decides, where the release knows it."""
    envs = facts.modules.get("vllm.envs")
    line = envs.line_of(VARIABLE) if envs else None
    if envs is None or line is None:
        return Choice("v1", "V1 runner: this release has no other", [])
    asked = _truth(options.env.get(VARIABLE))
    why = (
        f"{VARIABLE} is {options.env[VARIABLE]!r}"
        if asked is not None
        else f"{VARIABLE} is not set, and off by default"
    )
    return Choice("v2" if asked else "v1", f"{'V2' if asked else 'V1'} runner: {why}", [envs.evidence_at(line)])


def _truth(value: str | None) -> bool | None:
    return None if value is None or value == "" else value.strip().lower() in ("1", "true", "yes", "on")


def triton_there(facts: EngineFacts) -> tuple[bool, str]:
    """Whether vLLM would find a usable Triton (vllm/triton_utils/importing.py), and how that is known."""
    if facts.located.site:
        there = facts.source.exists("triton/__init__.py")
        if facts.platform != "cpu":
            return there, f"triton is {'' if there else 'not '}in the environment"
        there = there and facts.source.exists("triton/backends/cpu")
        return there, f"a Triton with a CPU backend is {'' if there else 'not '}in the environment"
    if facts.platform == "cpu":
        return False, "a CPU build without triton-cpu is assumed"
    return True, f"on {facts.platform} Triton comes with torch"


def _facts_of(facts: EngineFacts, target: dict[str, Any], options: Options, parallel_drafting: bool) -> dict[str, Any]:
    """Dotted path → value, for what is known of the launch."""
    text = text_config(target)
    entry = facts.resolve(target, options.model_impl).entry
    cls = None if entry is None else facts.class_of(entry)

    def ancestor(name: str) -> Any:
        return UNKNOWN if cls is None else facts.is_a(cls, name)

    names = target.get("architectures")
    return {
        "self.model_config": _Sym("self.model_config"),
        "self.speculative_config": _Sym("self.speculative_config"),
        "self.parallel_config": _Sym("self.parallel_config"),
        "self.model_config.runner_type": "generate",
        "self.model_config.architectures": tuple(n for n in names if isinstance(n, str))
        if isinstance(names, list)
        else (),
        "self.model_config.is_moe": experts(text) > 0,
        "self.model_config.is_quantized": bool(target.get("quantization_config") or text.get("quantization_config")),
        "self.model_config.is_diffusion": False,
        "self.model_config.is_hybrid": ancestor("IsHybrid"),
        "self.model_config.is_attention_free": ancestor("IsAttentionFree"),
        "self.model_config.has_inner_state": ancestor("HasInnerState"),
        "self.model_config.use_mla": bool(text.get("kv_lora_rank")),
        "self.speculative_config.method": "eagle3",
        "self.speculative_config.parallel_drafting": parallel_drafting,
        "self.parallel_config.tensor_parallel_size": options.tensor_parallel,
        "self.parallel_config.pipeline_parallel_size": options.pipeline_parallel,
        f"envs.{VARIABLE}": _truth(options.env.get(VARIABLE)),
        "HAS_TRITON": triton_there(facts)[0],
    }


_OF_THE_MODEL = ("model_config", "HAS_TRITON", "architectures", "_is_default")
"""A condition that names one of these is about the target, and may not be assumed away."""


@dataclass
class _Reading:
    """Follows functions of one module over known facts."""

    facts: EngineFacts
    module: Module
    known_facts: dict[str, Any]
    assumed: list[str] = field(default_factory=list)
    last: Evidence | None = None
    reason: str = ""
    depth: int = 0

    def run(self, function: ast.FunctionDef, frame: dict[str, Any]) -> Any:
        """The value that the function returns; None where it ends without."""
        if self.depth > _DEPTH:
            raise _UndecidedError(f"{function.name} goes too deep")
        self.depth += 1
        try:
            done, value = self._block(function.body, frame, function.name == RULE)
        finally:
            self.depth -= 1
        return value if done else None

    def _block(self, body: list[ast.stmt], frame: dict[str, Any], outer: bool) -> tuple[bool, Any]:
        """(whether a return was met, its value)."""
        for statement in body:
            if isinstance(statement, ast.Return):
                value = None if statement.value is None else self._value(statement.value, frame)
                if value is UNKNOWN:
                    raise _UndecidedError(ast.unparse(statement))
                if outer:
                    self.last = self.module.evidence(statement)
                return True, value
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                frame[statement.targets[0].id] = self._value(statement.value, frame)
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                if statement.value is not None:
                    frame[statement.target.id] = self._value(statement.value, frame)
            elif isinstance(statement, ast.If):
                done, value = self._branch(statement, frame, outer)
                if done:
                    return True, value
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self._append(statement.value, frame)
            elif isinstance(statement, ast.Raise):
                raise _UndecidedError(f"the engine would raise at line {statement.lineno}")
            elif isinstance(statement, ast.For | ast.While | ast.With | ast.Try):
                raise _UndecidedError(f"a {type(statement).__name__.lower()} block at line {statement.lineno}")
        return False, None

    def _branch(self, statement: ast.If, frame: dict[str, Any], outer: bool) -> tuple[bool, Any]:
        text = ast.unparse(statement.test)
        test = self._value(statement.test, frame)
        if test is UNKNOWN:
            if any(word in text for word in _OF_THE_MODEL) and "is not None" not in text:
                raise _UndecidedError(text)
            self.assumed.append(f"not: {text}")
            test = False
        taken = statement.body if test else statement.orelse
        done, value = self._block(taken, frame, outer)
        if done and outer and test:
            self.reason = self._because(statement.test, text, frame)
        return done, value

    def _because(self, test: ast.expr, text: str, frame: dict[str, Any]) -> str:
        """Why a branch was taken, in words."""
        if "HAS_TRITON" in text:
            return triton_there(self.facts)[1]
        if isinstance(test, ast.Name) and isinstance(frame.get(test.id), tuple) and frame[test.id]:
            return f"the V2 runner of this release does not yet do {', '.join(map(str, frame[test.id]))}"
        if VARIABLE.lower().removeprefix("vllm_") in text:
            return f"{VARIABLE} is set"
        if "_is_default_v2" in text:
            return "this release starts its V2 runner by default only for other models"
        return f"because {text}"

    def _append(self, call: ast.Call, frame: dict[str, Any]) -> None:
        """`features.append("…")` and `features.extend(self.method())` on a local list."""
        if not (isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.args):
            return
        name = call.func.value.id
        if call.func.attr in ("append", "extend") and isinstance(frame.get(name), tuple):
            value = self._value(call.args[0], frame)
            if value is UNKNOWN:
                value = ast.unparse(call.args[0])
            more = tuple(value) if call.func.attr == "extend" and isinstance(value, tuple) else (value,)
            frame[name] = (*frame[name], *more)

    def _value(self, node: ast.expr, frame: dict[str, Any]) -> Any:
        return evaluate(node, lambda n: self._known(n, frame))

    def _known(self, node: ast.expr, frame: dict[str, Any]) -> Any:
        text = ast.unparse(node)
        if text in self.known_facts:
            return self.known_facts[text]
        platform = platform_facts(self.facts.platform, node)
        if platform is not UNKNOWN:
            return platform
        if isinstance(node, ast.Name):
            return self._name(node.id, frame)
        if isinstance(node, ast.Attribute):
            base = self._value(node.value, frame)
            return self._attribute(base, node.attr)
        if isinstance(node, ast.Call):
            return self._call(node, frame)
        return UNKNOWN

    def _attribute(self, base: Any, name: str) -> Any:
        return self.known_facts.get(f"{base.path}.{name}", UNKNOWN) if isinstance(base, _Sym) else UNKNOWN

    def _name(self, name: str, frame: dict[str, Any]) -> Any:
        if name == "self":
            return _Sym("self")
        if name in frame:
            return frame[name]
        value = self.facts.graph.value(self._parsed(), name)
        return UNKNOWN if value is None else self._value(value, {})

    def _call(self, node: ast.Call, frame: dict[str, Any]) -> Any:
        if isinstance(node.func, ast.Name):
            if node.func.id == "getattr" and len(node.args) >= 2 and isinstance(node.args[1], ast.Constant):
                value = self._attribute(self._value(node.args[0], frame), str(node.args[1].value))
                missing = value is UNKNOWN and len(node.args) > 2 and "model_config" not in ast.unparse(node.args[0])
                return self._value(node.args[2], frame) if missing else value
            return self._function(node.func.id)
        if (
            isinstance(node.func, ast.Attribute)
            and isinstance(self._value(node.func.value, frame), _Sym)
            and not node.args
        ):
            return self._function(node.func.attr)
        return UNKNOWN

    def _function(self, name: str) -> Any:
        """What a function or method of the same file returns; UNKNOWN where it cannot be followed."""
        found = find_function(self.facts.modules, self.module.name, name)
        if found is None:
            return UNKNOWN
        try:
            return self.run(found[1], {})
        except _UndecidedError:
            if any(word in name for word in _OF_THE_MODEL):
                raise
            return UNKNOWN

    def _parsed(self) -> Module:
        return self.facts.modules.get(self.module.name) or self.module
