"""The gate: would this engine allow EAGLE-3 for this target at all? Two questions, both always answered.

gate.list       is the target's model type on the engine's list (vLLM 0.8.5 to 0.21), by the engine's own test;
gate.interface  does the class that the engine would choose for the target implement the EAGLE-3 hooks.

Source of the rules: vllm/config/speculative.py (`_verify_args`), vllm/model_executor/models/{registry,interfaces}.py,
vllm/v1/worker/gpu_model_runner.py; sglang/srt/… `set_eagle3_layers_to_capture`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from draftsmith.check.types import CheckRow, Context, Evidence, Status, check
from draftsmith.engine.reader.resolve import lacks_embedding

if TYPE_CHECKING:
    from draftsmith.engine.reader import EngineFacts
    from draftsmith.engine.reader.modellist import ModelList
    from draftsmith.engine.reader.registry import Entry
    from draftsmith.engine.reader.resolve import Resolved

LIST, INTERFACE = "gate.list", "gate.interface"


def _row(id_: str, status: Status, found: str, evidence: list[Evidence], fix: str = "") -> CheckRow:
    return CheckRow(id_, "gate", status, found, evidence, fix)


def engine_word(name: str) -> str:
    """The engine's name as people write it."""
    return {"vllm": "vLLM", "sglang": "SGLang"}.get(name, name)


def _called(facts: EngineFacts) -> str:
    return f"{engine_word(facts.name)} {facts.version or '(version unknown)'}"


def _types(ctx: Context) -> tuple[str | None, str | None]:
    """(the text config's model_type, the outer one)."""
    text, outer = ctx.target_text_config or {}, ctx.target_config or {}
    return _word(text.get("model_type")), _word(outer.get("model_type"))


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


@check("gate", ids=(LIST,), needs=("target_config", "engine"))
def model_type_list(ctx: Context) -> Iterator[CheckRow]:
    """The engine's model-type list, by the engine's own semantics: substring, of the config that it looks at."""
    facts = ctx.engine
    assert facts is not None
    method = ctx.options.method or "eagle3"
    inner, outer = _types(ctx)
    kinds = f"text model_type {inner!r}, outer model_type {outer!r}"
    if facts.name != "vllm":
        yield _row(LIST, "pass", f"{_called(facts)} has no model-type list ({kinds})", [])
        return
    allowed, place = facts.model_list, facts.model_list_place
    if place is None:
        yield _row(
            LIST, "skip", f"no class SpeculativeConfig found in {facts.path}: cannot tell whether there is a list", []
        )
        return
    if allowed is None:
        yield _row(LIST, "pass", f"{_called(facts)} has no model-type list for EAGLE-3 ({kinds})", [place])
        return
    if not allowed.applies(method):
        said = " and ".join(allowed.methods)
        yield _row(LIST, "pass", f"the model-type list is for {said}, not for {method}", [allowed.guard])
        return
    if allowed.entries is None:
        found = f"{_called(facts)} tests {allowed.tested} against a list that could not be read"
        yield _row(LIST, "skip", found, [allowed.guard, allowed.where])
        return
    tested = inner if allowed.reads_text_config else outer
    if tested is None:
        found = f"config.json has no {'text ' if allowed.reads_text_config else ''}model_type, which {allowed.tested} would be"
        yield _row(LIST, "skip", found, [allowed.guard], "take the config.json of the published model")
        return
    yield _listed(ctx, facts, allowed, tested, kinds, method)


def _listed(ctx: Context, facts: EngineFacts, allowed: ModelList, tested: str, kinds: str, method: str) -> CheckRow:
    entries = allowed.entries or ()
    words = ", ".join(entries)
    evidence = [e for e in (allowed.list_evidence, allowed.guard, allowed.where) if e is not None]
    word = allowed.matching(tested)
    which = "text config's" if allowed.reads_text_config else "outer"
    if word is not None:
        found = (
            f"{_called(facts)} allows EAGLE-3 for model types that contain one of {words}; {kinds}: {word!r} matches"
        )
        return _row(LIST, "pass", found, evidence)
    if ctx.options.plugin and (why := _plugin_widens(ctx, facts)):
        text = f"{_called(facts)} lists {words}, which {tested!r} does not contain; draftsmith's plugin adds it: {why}"
        return _row(LIST, "pass", text, evidence)
    found = (
        f"{_called(facts)} allows EAGLE-3 only for model types that contain one of {words}; it tests the {which} "
        f"model_type, which is {tested!r} ({kinds}). It would stop with: {allowed.message(tested, method)}"
    )
    return _row(LIST, "fail", found, evidence, _way_out(ctx))


@check("gate", ids=(INTERFACE,), needs=("target_config", "engine"))
def interface(ctx: Context) -> Iterator[CheckRow]:
    """Whether the class that serves the target implements the engine's EAGLE-3 interface."""
    facts = ctx.engine
    assert facts is not None and ctx.target_config is not None
    if facts.name == "sglang":
        yield _sglang(ctx, facts)
        return
    if facts.registry is None:
        reason = next(iter(facts.modules.unreadable.items()), None)
        found = f"no model registry found in {facts.path}" + (f" ({reason[0]}: {reason[1]})" if reason else "")
        yield _row(INTERFACE, "skip", found, [])
        return
    if facts.interface is None:
        found = f"{_called(facts)} has no EAGLE-3: neither the interface nor a runner that asks for it"
        yield _row(INTERFACE, "fail", found, [], _way_out(ctx))
        return
    resolved = facts.resolve(ctx.target_config, ctx.options.model_impl)
    if resolved.entry is None or resolved.how in ("unknown", "unsupported"):
        status: Status = "skip" if resolved.how == "unknown" else "fail"
        yield _row(INTERFACE, status, resolved.reason, resolved.evidence, _way_out(ctx))
        return
    yield _supported(ctx, facts, resolved)


def _supported(ctx: Context, facts: EngineFacts, resolved: Resolved) -> CheckRow:
    assert resolved.entry is not None and facts.interface is not None
    support = facts.support(resolved.entry)
    inner, outer = _types(ctx)
    who = f"{resolved.architecture} (model_type {outer!r}, text {inner!r})"
    if resolved.how == "transformers":
        who += f" through the Transformers backend, {resolved.entry.cls}"
    evidence = [*resolved.evidence, *support.evidence]
    if support.supports is None:
        return _row(
            INTERFACE, "skip", f"{who}: {support.reason}", evidence, "report this engine's layout to draftsmith"
        )
    if support.supports and (places := lacks_embedding(facts, resolved, ctx.target_config or {})):
        found = f"{who}: {support.reason}, but its input embedding is not where the drafter's loader looks for it"
        return _row(INTERFACE, "fail", found, [*evidence, *places], _way_out(ctx))
    if support.supports:
        return _inside(ctx, facts, resolved, f"{who}: {support.reason}", evidence)
    given = _plugin_gives(ctx, facts, resolved.entry)
    if given is not None and ctx.options.plugin:
        text = f"{who}: {support.reason}; draftsmith's plugin gives it, recording the layers made at {given.file}:{given.line}"
        return _row(INTERFACE, "pass", text, [*evidence, given])
    raised = facts.interface.raises
    says = "Model does not support EAGLE3 interface" if raised else "an AttributeError"
    found = (
        f"{who}: {support.reason} in {_called(facts)} ({facts.platform}). It would stop with {says!r} after loading the "
        "target's weights"
    )
    where = [e for e in (facts.interface.where,) if e is not None]
    fix = _way_out(ctx) + (f"; {WITH_PLUGIN}" if given is not None else "")
    return _row(INTERFACE, "fail", found, [*evidence, *raised, *where], fix)


WITH_PLUGIN = "draftsmith serve, bench and run give this class the interface by their runtime plugin (check --plugin)"


def _plugin_gives(ctx: Context, facts: EngineFacts, entry: Entry) -> Evidence | None:
    """Where the layers lie that the runtime plugin would record; None where it would not."""
    from draftsmith.engine.inject import PLUGINS_VARIABLE, plugin_problem
    from draftsmith.engine.reader.shim import shim_place

    assert ctx.target_config is not None
    site = facts.source.path("")
    if ctx.options.pipeline_parallel > 1 or ctx.options.env.get(PLUGINS_VARIABLE) == "":
        return None
    if site is not None and plugin_problem(site, ["interface"]):
        return None
    return shim_place(facts, entry, ctx.target_config)


def _plugin_widens(ctx: Context, facts: EngineFacts) -> str:
    """Why the runtime plugin will add this target to the list; "" where it will not."""
    from draftsmith.engine.remedy import plugin_can

    assert ctx.target_config is not None
    if facts.registry is None or plugin_can(ctx, ctx.options.env) is not None:
        return ""
    resolved = facts.resolve(ctx.target_config, ctx.options.model_impl)
    if resolved.entry is None:
        return ""
    if facts.support(resolved.entry).supports:
        return f"{resolved.architecture} has the interface"
    given = _plugin_gives(ctx, facts, resolved.entry)
    return f"{resolved.architecture} gets the interface too" if given is not None else ""


def _inside(ctx: Context, facts: EngineFacts, resolved: Resolved, found: str, evidence: list[Evidence]) -> CheckRow:
    """The same question to the language model inside a wrapper, where the engine says which class that is."""
    from draftsmith.engine.reader.backend import transformers_need
    from draftsmith.engine.reader.wrapper import collects, inner_entry

    assert resolved.entry is not None and ctx.target_config is not None
    need = transformers_need(facts, resolved.entry)
    if need is not None:
        have = f"transformers {need.installed} is installed" if need.installed else f"it pins transformers {need.pin}"
        evidence = [*evidence, need.where]
        found += f"; the backend asks for transformers {need.required} for EAGLE-3, and {have}"
        if need.met is False:
            return _row(INTERFACE, "fail", f"{found}: the engine would stop while loading", evidence, _way_out(ctx))
    outer = facts.class_of(resolved.entry)
    inner = None if outer is None else inner_entry(facts, outer, ctx.target_config)
    does, cls = (None, None) if inner is None else collects(facts, inner)
    if inner is None or cls is None or does is None:
        return _row(INTERFACE, "pass", found, evidence)
    if does:
        return _row(INTERFACE, "pass", f"{found}; the language model inside, {cls.name}, collects aux states", evidence)
    found += (
        f", but the language model inside, {cls.name}, does not collect aux states: the engine would stop while loading"
    )
    return _row(INTERFACE, "fail", found, [*evidence, cls.evidence], _way_out(ctx))


def _sglang(ctx: Context, facts: EngineFacts) -> CheckRow:
    from draftsmith.engine.reader.sglang import hook_of

    assert ctx.target_config is not None
    hook = hook_of(facts, ctx.target_config)
    status: Status = "skip" if hook.supports is None else "pass" if hook.supports else "fail"
    return _row(INTERFACE, status, hook.reason, hook.evidence, "" if hook.supports else _way_out(ctx))


def _way_out(ctx: Context) -> str:
    """What to do about a NO: the first known release that takes the target, and the remedies."""
    from draftsmith.engine.releases import first_release

    assert ctx.target_config is not None
    first = first_release(ctx.target_config, (ctx.engine.name if ctx.engine else None) or "vllm")
    ask = "draftsmith remedy shows what else can be done with this release"
    if first is None:
        return f"no known release takes this target as it is; {ask}"
    return f"the first release that takes this target is {first}; {ask}"
