"""Why an engine died, as one block: the root line of its log, the condition that raised it, and the remedy."""

from __future__ import annotations

import re
from pathlib import Path

from draftsmith.engine.find import Engine
from draftsmith.errors import Exit, UserError

LARGEST = 8 << 20
"""Of a longer log only the end is read."""

MEMORY = re.compile(r"out of memory|Cannot allocate memory|MemoryError|less than desired (?:CPU|GPU) memory", re.I)

_ERROR = re.compile(r"^(?:[\w.]*\.)?(\w*(?:Error|Exception)): (.+)")
_PREFIX = re.compile(r"^(?:\([^)]*\)\s*)?(?:(?:ERROR|CRITICAL|WARNING|INFO)\s+[\d-]+\s+[\d:]+\s+\[[^\]]*\]\s*)?")


def last_errors(text: str, count: int = 3) -> list[str]:
    """The distinct `SomeError: …` lines of a log, first ones first, log prefixes taken off."""
    found: list[str] = []
    for line in text.splitlines():
        bare = _PREFIX.sub("", line.strip())
        if _ERROR.match(bare) and bare not in found:
            found.append(bare)
    return found[:count]


def explain_death(log: Path, code: int, engine: Engine) -> UserError:
    """The block for an engine that ended by itself. code: its exit code, 128 + signal for a killed one."""
    text = ""
    if log.exists():
        with log.open("rb") as f:
            f.seek(max(log.stat().st_size - LARGEST, 0))
            text = f.read().decode(errors="replace")
    how = f"killed by signal {code - 128}" if code > 128 else f"exit code {code}"
    head = f"{engine.label} ended by itself ({how})"
    traced = _traced(text, engine, head, log)
    if traced is not None:
        return traced
    tail = [line.strip() for line in text.splitlines() if line.strip()][-3:]
    shown = " | ".join(last_errors(text) or tail) or "it wrote nothing"
    memory = code == 137 or bool(MEMORY.search(text))
    return UserError(
        f"{head}: {shown[:700]}",
        "memory ran out" if memory else "",
        f"see {log}" + ("; a smaller engine.max_model_len or KV cache needs less" if memory else ""),
        Exit.NO,
    )


def _traced(text: str, engine: Engine, head: str, log: Path) -> UserError | None:
    """By the engine's own source (engine/trace.py); None where the log holds no error that it knows."""
    from draftsmith.engine.flags import known_flags
    from draftsmith.engine.reader import locate
    from draftsmith.engine.trace import explain
    from draftsmith.engine.trace_advice import advice_for, flag_advice
    from draftsmith.engine.trace_index import Index

    located = locate(engine.package.parent)
    found = explain(text, Index.of(located.source, located.engine, located.version))
    if found is None or found.place is None:
        return None
    place, error = found.place, found.error
    guards = "; ".join(g.text for g in found.around.guards) if found.around else ""
    advice = advice_for(f"{error.message} {error.wrapped}", place.file)
    if advice is None and error.type == "usage":
        advice = flag_advice(error.message, known_flags(engine.package))
    message = " ".join(error.message.split())
    return UserError(
        f"{head}: {error.type.rpartition('.')[2]}: {message[:500]}",
        f"raised at {place.file}:{place.line} in {place.function or 'the module itself'}"
        + (f", where {guards[:300]}" if guards else ""),
        (advice["fix"] + "; " if advice else "") + f"draftsmith explain {log} shows the lines",
        Exit.NO,
    )
