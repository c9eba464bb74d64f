"""Known faults of this engine release that would meet this pair (engine/faults.py has the table).

engine.faults   one row per fault that the installed source proves; a pass row where it proves none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from draftsmith.check.types import CheckRow, Context, Evidence, check
from draftsmith.engine.faults import Fault, faults_of

ID = "engine.faults"


def _concerns(fault: Fault, ctx: Context) -> bool:
    """Whether the fault meets this target and drafter; what is not known counts as met."""
    names = (ctx.target_config or {}).get("architectures")
    known = isinstance(names, list) and bool(names)
    if fault.architectures and known and not any(name in fault.architectures for name in names or ()):
        return False
    return fault.only == "" or ONLY[fault.only](ctx)


def _aux_at_end(ctx: Context) -> bool:
    ids: Any = (ctx.drafter_config or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = (ctx.target_text_config or {}).get("num_hidden_layers")
    return isinstance(ids, list) and isinstance(layers, int) and layers in ids


def _plain_latent_rope(ctx: Context) -> bool:
    """Whether target or drafter has latent attention and the default rope (yarn has a class of its own)."""
    configs = [c for c in (ctx.target_text_config, ctx.drafter_config) if c]
    return any(isinstance(c.get("kv_lora_rank"), int) and _default_rope(c) for c in configs)


def _default_rope(config: dict[str, Any]) -> bool:
    parts = [config.get(key) for key in ("rope_parameters", "rope_scaling")]
    kinds = [p.get("rope_type", p.get("type")) for p in parts if isinstance(p, dict)]
    return all(kind in (None, "default") for kind in kinds)


ONLY: dict[str, Callable[[Context], bool]] = {
    "aux_at_end": _aux_at_end,
    "plain_latent_rope": _plain_latent_rope,
}
"""Fault.only → whether it is so for this pair."""


@check("engine", ids=(ID,), needs=("engine",))
def known_faults(ctx: Context) -> Iterator[CheckRow]:
    facts = ctx.engine
    assert facts is not None
    if facts.name != "vllm":
        yield CheckRow(ID, "engine", "pass", f"no faults are known of {facts.name}")
        return
    platform = ctx.options.platform or facts.platform
    found = [f for f in faults_of(facts.source, platform) if _concerns(f.fault, ctx)]
    for one in found:
        mended = " (draftsmith's plugin mends it while serving)" if one.fault.mend else ""
        yield CheckRow(
            ID,
            "engine",
            "warn",
            f"{one.fault.id}: {one.fault.symptom}{mended}",
            [Evidence(one.file, one.line, one.text)],
            one.fault.advice,
        )
    if not found:
        where = f"vLLM {facts.version or '(version unknown)'}{f' on {platform}' if platform else ''}"
        yield CheckRow(ID, "engine", "pass", f"none of the known faults is in the source of {where} for this pair")
