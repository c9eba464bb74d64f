"""The ladder: the least that makes an engine take a pair. Each rung is tried on paper first, by the same checks that
give the verdict, and only what they then pass is proposed.

    nothing → flags → shadow drafter folder → runtime plugin → another release → source patch
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draftsmith.engine.inject import PLUGINS_VARIABLE, plugin_problem
from draftsmith.engine.remedy_shadow import Change, rewrite, shadow_path

if TYPE_CHECKING:
    from draftsmith.check.types import CheckRow, Context, Options

Rung = Literal["nothing", "flags", "shadow", "plugin", "release", "patch", "none"]
RUNGS: tuple[Rung, ...] = ("nothing", "flags", "shadow", "plugin", "release", "patch")
GATE = frozenset({"gate.list", "gate.interface"})
RELEASE_DECIDES = GATE | {
    "form.architecture",
    "runner.last_layer",
    "runner.multimodal",
    "pair.pipeline_parallel",
    "silence.switches",
    "engine.faults",
}
"""Checks that another release may answer otherwise."""
WORTH_MENDING = frozenset({"runner.aux_ids", "silence.residual", "form.tie", "form.mrope", "silence.input_norm"})
"""Warnings that a shadow folder takes away, so that it is proposed for them as well."""


@dataclass(frozen=True)
class Step:
    """rung; title for people; why, from the checks; data: what applying it needs."""

    rung: Rung
    title: str
    why: str
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """rung: the highest of the steps, "none" where nothing suffices. left: rows that still fail after all steps.
    release: the version to install instead, where that is the rung."""

    rung: Rung
    steps: tuple[Step, ...]
    left: tuple[CheckRow, ...]
    target: str
    drafter: Path
    method: str = "eagle3"
    model_impl: str = "auto"
    changes: tuple[Change, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    num_speculative_tokens: int = 3

    @property
    def suffices(self) -> bool:
        return self.rung != "none"

    def launch(self, drafter: Path | None = None) -> list[str]:
        """The command that serves the pair after the steps. drafter: where the shadow folder was written, if elsewhere."""
        shadow = shadow_path(self.drafter) if any(s.rung == "shadow" for s in self.steps) else self.drafter
        spec = {
            "model": str(drafter or shadow),
            "method": self.method,
            "num_speculative_tokens": self.num_speculative_tokens,
        }
        command = ["vllm", "serve", self.target]
        if self.model_impl != "auto":
            command += ["--model-impl", self.model_impl]
        return [*command, "--speculative-config", json.dumps(spec)]

    def to_json(self) -> dict[str, Any]:
        return {
            "rung": self.rung,
            "suffices": self.suffices,
            "steps": [{"rung": s.rung, "title": s.title, "why": s.why} | s.data for s in self.steps],
            "left": [{"id": r.id, "found": r.found, "fix": r.fix} for r in self.left],
            "launch": shlex.join(self.launch()),
        }


def _judge(ctx: Context, options: Options, config: dict[str, Any] | None = None) -> tuple[list[CheckRow], Context]:
    """All rows for other options or another drafter config; engine, target and headers stay what they are."""
    from draftsmith.check.types import Context, run_checks

    known: dict[str, Any] = {"target_config": ctx.target_config, "engine": ctx.engine}
    known["drafter_config"] = ctx.drafter_config if config is None else config
    made = Context(ctx.target_folder, ctx.drafter_folder, ctx.engine_path, options, **known)
    for name in ("typed_drafter", "rows_folder"):
        if name in ctx.__dict__:
            made.__dict__[name] = ctx.__dict__[name]
    return list(run_checks(made)), made


def _bad(rows: list[CheckRow], with_warnings: bool = False) -> dict[str, CheckRow]:
    states = ("fail", "warn") if with_warnings else ("fail",)
    bad = {r.id: r for r in rows if r.status in states and (r.status == "fail" or r.id in WORTH_MENDING)}
    undecided = {r.id: r for r in rows if r.status == "skip" and r.id in GATE}
    return bad | undecided


def plugin_can(ctx: Context, env: dict[str, str]) -> str | None:
    """None if the runtime plugin can widen this engine's list for this target, else why not."""
    facts = ctx.engine
    if facts is None or facts.model_list is None:
        return "this release has no list"
    problem = plugin_problem(facts.source.path(""), ["gate"]) if facts.source.path("") else None
    if problem:
        return problem
    if facts.model_list.entries is None or len(facts.model_list.entries) < 3:
        # The compiler keeps shorter lists as single constants (CPython), so there is no list object to extend.
        return "this release keeps its list in a form that cannot be extended at run time"
    if facts.model_list.where.file != "vllm/config/speculative.py":
        return f"its list lies in {facts.model_list.where.file}"
    if env.get(PLUGINS_VARIABLE) == "":
        return f"{PLUGINS_VARIABLE} is empty: no plugin is wanted here"
    return None


def climb(ctx: Context, only: Rung | None = None) -> Plan:
    """The first rung that suffices. only: take this one for the gate ("plugin", "release" or "patch"), whatever would
    have come before it."""
    from dataclasses import replace

    from draftsmith.check.look import look_of

    assert ctx.drafter_folder is not None and ctx.target_config is not None
    options = replace(ctx.options, method=ctx.options.method or "eagle3")
    steps: list[Step] = []
    rows, _ = _judge(ctx, ctx.options)
    as_given = {r.id: r for r in rows if r.status in ("fail", "warn")}
    bad = _bad(rows, with_warnings=True)
    if "form.method" in as_given:
        options = replace(options, method="eagle3")
        rows, _ = _judge(ctx, options)
        bad = _bad(rows, with_warnings=True)
        steps.append(Step("flags", '"method": "eagle3" in the speculative config', as_given["form.method"].found))
    if "gate.interface" in bad and only in (None, "plugin") and not options.plugin:
        # Before --model-impl transformers: it keeps the engine's own class and kernels (benchmarks/shim.py).
        other = replace(options, plugin=True)
        tried = _bad(_judge(ctx, other)[0], with_warnings=True)
        if not set(tried) & GATE and not set(tried) - set(bad):
            title = "the runtime plugin, which gives the target's class the EAGLE-3 interface in the engine's processes"
            why = "; ".join(bad[i].found for i in sorted(GATE & set(bad)))
            steps.append(Step("plugin", title, why, {"features": ["gate", "interface", "mends"]}))
            options, bad = other, tried
    if "gate.interface" in bad and only is None and options.model_impl == "auto":
        other = replace(options, model_impl="transformers")
        tried = _bad(_judge(ctx, other)[0], with_warnings=True)
        if "gate.interface" not in tried and not set(tried) - set(bad):
            steps.append(
                Step("flags", "--model-impl transformers", f"{bad['gate.interface'].found}; its Transformers class can")
            )
            options, bad = other, tried
    config, changes = dict(ctx.drafter_config or {}), []
    rest = set(bad) - GATE
    if rest:
        rewritten, proposed = rewrite(look_of(ctx))
        if proposed:
            tried = _bad(_judge(ctx, options, rewritten)[0], with_warnings=True)
            if not set(tried) - set(bad) and set(tried) != set(bad):
                gone = sorted(set(bad) - set(tried))
                steps.append(
                    Step(
                        "shadow",
                        f"a drafter folder with its config rewritten: {shadow_path(ctx.drafter_folder)}",
                        "; ".join(f"{i}: {bad[i].found}" for i in gone),
                        {"changes": [str(c) for c in proposed]},
                    )
                )
                config, changes, bad = rewritten, proposed, tried
    bad = {i: r for i, r in bad.items() if r.status != "warn"}
    steps, bad = _gate(ctx, config, steps, bad, only)
    rung: Rung = "none" if bad else max((s.rung for s in steps), key=RUNGS.index, default="nothing")
    return Plan(
        rung,
        tuple(steps),
        tuple(bad.values()),
        str(ctx.target_folder or ""),
        ctx.drafter_folder,
        options.method or "eagle3",
        options.model_impl,
        tuple(changes),
        config,
        options.num_speculative_tokens or 3,
    )


def _gate(
    ctx: Context, config: dict[str, Any], steps: list[Step], bad: dict[str, CheckRow], only: Rung | None
) -> tuple[list[Step], dict[str, CheckRow]]:
    """Plugin, release or patch for what the gate still refuses."""
    assert ctx.target_config is not None
    if not bad:
        return steps, bad
    listed_only = set(bad) == {"gate.list"} and bad["gate.list"].status == "fail"
    why_not = plugin_can(ctx, ctx.options.env) if listed_only else "the list is not all that refuses the pair"
    if listed_only and only in (None, "plugin") and why_not is None:
        text = (ctx.target_text_config or {}).get("model_type")
        title = f"the runtime plugin, which adds {text!r} to the list in the engine's processes"
        return [*steps, Step("plugin", title, bad["gate.list"].found, {"features": ["gate", "mends"]})], {}
    if only in (None, "release") and not set(bad) - RELEASE_DECIDES:
        from draftsmith.engine.releases import answers

        name = ctx.engine.name if ctx.engine is not None else "vllm"
        taking = [a.version for a in answers(ctx.target_config, config, name) if a.takes]
        if taking:
            title = f"install {name} {taking[0]} or later (the last known one that takes the pair: {taking[-1]})"
            why = "; ".join(r.found for r in bad.values())
            return [*steps, Step("release", title, why, {"first": taking[0], "last": taking[-1]})], {}
    if listed_only and only in (None, "patch") and ctx.engine is not None and ctx.engine.model_list is not None:
        allowed = ctx.engine.model_list
        text = (ctx.target_text_config or {}).get("model_type")
        place = allowed.list_evidence
        if place is not None and isinstance(text, str) and allowed.entries is not None:
            title = f"a source patch: {text!r} added to the list at {place.file}:{place.line}"
            why = f"{bad['gate.list'].found}; {why_not}" if why_not else bad["gate.list"].found
            data = {"file": place.file, "line": place.line, "model_type": text}
            return [*steps, Step("patch", title, why, data)], {}
    return steps, bad
