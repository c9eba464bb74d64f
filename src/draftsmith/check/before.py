"""Before a single row is captured: can any installed or known release serve an EAGLE-3 drafter for this target, through
which class, in which form, at which aux layers?

    verdict = before_training("models/target", engine="/opt/vllm")
    require_servable("models/target", None)          # UserError with exit code 1 where the answer is NO
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.check import values as v
from draftsmith.check.headers import Weights
from draftsmith.check.run import make_context
from draftsmith.check.runner import said
from draftsmith.check.target import Target
from draftsmith.check.types import CheckRow, Context, EngineId, Evidence, Group, Options, Verdict, run_checks
from draftsmith.errors import Exit, UserError

if TYPE_CHECKING:
    from draftsmith.engine.reader import EngineFacts

GATE: tuple[Group, ...] = ("gate",)
ROWS = ("gate.releases", "form.choice", "runner.default_ids", "pair.mappable")


def _releases(target: Target, facts: EngineFacts | None, given: bool = False) -> CheckRow:
    """given: the plugin makes this engine take it, whatever the releases do by themselves."""
    from draftsmith.engine.releases import answers

    # The table of the engine that was asked for: vLLM's releases say nothing of SGLang's.
    known = answers(target.raw, engine=facts.name if facts is not None else "vllm")
    takers = [a.version for a in known if a.takes]
    name = target.architecture or "(no architecture)"
    if takers:
        text = f"known releases that take {name}: {takers[0]} … {takers[-1]} ({len(takers)} of {len(known)})"
        return CheckRow("gate.releases", "gate", "pass", text)
    if not known:
        return CheckRow("gate.releases", "gate", "skip", "no table of known releases")
    last = known[-1]
    if last.interface is None:
        text = f"{name} is not registered in {last.version}; perhaps it is served through the Transformers backend"
        return CheckRow("gate.releases", "gate", "skip" if facts is None else "pass", text)
    reason = "; ".join(last.notes) or "no EAGLE-3 interface"
    if given:
        text = f"none of the {len(known)} known releases takes {name} by itself ({reason}); draftsmith's plugin makes this one"
        return CheckRow("gate.releases", "gate", "pass", text)
    return CheckRow(
        "gate.releases",
        "gate",
        "fail" if facts is None else "warn",
        f"none of the {len(known)} known releases ({known[0].version} … {last.version}) takes {name}: {reason}",
        [],
        "a drafter for it would be wasted in vLLM; --model-impl transformers, or SGLang, may serve it",
    )


def _choice(target: Target, facts: EngineFacts | None) -> CheckRow:
    """Which form of drafter, and under which registered class."""
    mla = v.integer(target.text, "kv_lora_rank") is not None
    registered = sorted(facts.drafters) if facts is not None else []
    mla_class = next((n for n in registered if "Deepseek" in n), None)
    llama_class = next((n for n in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM") if n in registered), None)
    if facts is not None and not llama_class:
        return CheckRow("form.choice", "form", "fail", f"{facts.name} {facts.version} registers no Llama drafter", [],
                        "a later release")  # fmt: skip
    text = f"Llama form ({llama_class or 'LlamaForCausalLMEagle3'})"
    if not mla:
        return CheckRow("form.choice", "form", "pass", text)
    if facts is not None and (blocks := _cpu_blocks(facts)):
        only = f"MLA form ({mla_class}) only" if mla_class else f"{facts.name} {facts.version} has no MLA drafter class"
        return CheckRow(
            "form.choice", "form", "pass" if mla_class else "fail",
            f"{only}: the CPU build has no cache block that holds latent attention and a Llama drafter's heads", blocks,
            "" if mla_class else "a GPU, or a later release",
        )  # fmt: skip
    if facts is None or mla_class:
        text += f", or MLA form ({mla_class or 'Eagle3DeepseekV2ForCausalLM'}), whose cache is as small as the target's"
    else:
        text += f"; {facts.name} {facts.version} has no MLA drafter class"
    return CheckRow("form.choice", "form", "pass", text)


def _cpu_blocks(facts: EngineFacts) -> list[Evidence]:
    """Where the CPU build says that its two kinds of cache have no block size in common; [] where they have, or on
    another platform."""
    if facts.name != "vllm" or facts.platform != "cpu":
        return []
    from draftsmith.check.release import Release

    found = Release.of(facts).cpu_blocks
    return found[1] if found else []


def _ids(target: Target, facts: EngineFacts | None) -> CheckRow:
    n = target.layers
    if n is None:
        return CheckRow("runner.default_ids", "runner", "skip", "the target's number of layers cannot be read")
    evidence: list[Evidence] = []
    ids: tuple[int, ...] = (2, n // 2, n - 3)
    if facts is not None and facts.name == "vllm":
        from draftsmith.check.release import Release

        found, evidence = Release.of(facts).default_ids(target)
        ids = found or ids
    if len(set(ids)) < len(ids) or min(ids) < 0 or list(ids) != sorted(ids):
        return CheckRow(
            "runner.default_ids", "runner", "warn", f"{n} layers: the default {ids} is not three distinct, ascending layers",
            evidence, "choose them: extract.aux_layers in the recipe",
        )  # fmt: skip
    return CheckRow("runner.default_ids", "runner", "pass", "; ".join(said(k, n) for k in ids), evidence)


def _sizes(target: Target) -> CheckRow:
    if None in (target.hidden, target.layers, target.vocab):
        return CheckRow("pair.mappable", "pair", "fail", "hidden size, layers or vocabulary cannot be read", [],
                        "give the target's own config.json")  # fmt: skip
    return CheckRow("pair.mappable", "pair", "pass",
                    f"hidden {target.hidden}, {target.layers} layers, {target.vocab:,} tokens")  # fmt: skip


def rows_before(ctx: Context) -> Iterator[CheckRow]:
    """The rows, the gate's first where an engine is there."""
    target = Target(ctx.target_folder, ctx.target_config or {}, Weights())
    gate = list(run_checks(ctx, groups=GATE)) if ctx.engine is not None else []
    yield from gate
    given = ctx.options.plugin and bool(gate) and all(r.status == "pass" for r in gate)
    yield _releases(target, ctx.engine, given)
    yield _choice(target, ctx.engine)
    yield _sizes(target)
    yield _ids(target, ctx.engine)


def before_training(target: str | Path, engine: str | None = None, options: Options | None = None) -> Verdict:
    """The verdict for a target alone. engine None = the managed one, and where there is none the known releases."""
    from importlib import import_module

    import_module("draftsmith.check.gate")
    ctx = make_context(str(target), None, engine, options or Options())
    rows = list(rows_before(ctx))
    return Verdict.of(ctx.engine.id if ctx.engine is not None else EngineId(), rows)


def require_servable(target: str | Path, engine: str | None = None, options: Options | None = None) -> Verdict:
    """The verdict for the engine as draftsmith launches it, with its plugin; UserError (exit code NO) naming every reason
    where it is no. "unknown" passes."""
    verdict = before_training(target, engine, options or Options(plugin=True))
    if verdict.verdict == "no":
        bad = [r for r in verdict.checks if r.status == "fail"]
        raise UserError(
            f"no EAGLE-3 drafter for {target}: " + "; ".join(r.found for r in bad),
            "capture, training and hours of both would be wasted: the engine refuses the pair, most releases only after "
            "loading the target",
            "; ".join(dict.fromkeys(r.fix for r in bad if r.fix)),
            Exit.NO,
        )
    return verdict
