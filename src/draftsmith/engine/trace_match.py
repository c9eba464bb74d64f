"""Fit a message to the texts that a site can produce; in linear time, without regular expressions.

White space counts as one blank on both sides, since logs wrap and sources break lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from draftsmith.engine.trace_templates import Hole, Template

LEAST = 6
"""Letters and digits of literals that a match must hold: below that a template says nothing."""
_WORD = re.compile(r"[A-Za-z]{3}")


@dataclass(frozen=True)
class Match:
    """score: literal characters that agree, less where only a part of the message or template was used.
    values: expression → text, in the order of the template. whole: the template accounts for the whole message."""

    score: float
    values: tuple[tuple[str, str], ...]
    whole: bool


def squeeze(text: str) -> str:
    """Runs of white space as one blank."""
    return re.sub(r"\s+", " ", text)


def _weight(literal: str) -> int:
    return sum(c.isalnum() for c in literal)


def match(template: Template, message: str, cut: bool = False) -> Match | None:
    """`message` (already squeezed and stripped) against one template. cut: its end may be missing.

    Tried in turn: the whole message from its beginning; the template's beginning, the message going on behind it
    (engines append hints); the template inside the message (wrapped by another error); the message's end missing.
    """
    parts = [p if isinstance(p, Hole) else squeeze(p) for p in template]
    literals = [p for p in parts if isinstance(p, str)]
    if sum(map(_weight, literals)) < LEAST or not any(_WORD.search(p) for p in literals):
        return None
    if isinstance(parts[0], str):
        parts[0] = parts[0].lstrip()
    if isinstance(parts[-1], str):
        parts[-1] = parts[-1].rstrip()
    # The blank before an empty value at the end was stripped with the message.
    whole = _fit(parts, message, 0) or _fit(parts, message + " ", 0)
    if whole is not None:
        values, end = whole
        score = float(sum(_weight(p) for p in parts if isinstance(p, str)))
        rest = len(message) - end
        return Match(score if rest <= 0 else score * 0.9, values, rest <= 0)
    if cut:
        found = _fit_cut(parts, message)
        if found is not None:
            return found
    first = max((p for p in parts if isinstance(p, str)), key=_weight)
    if isinstance(parts[0], str) and first in message:
        at = message.find(parts[0].strip()) if parts[0].strip() else -1
        if at > 0:
            inner = _fit(parts, message, at)
            if inner is not None:
                return Match(0.7 * sum(_weight(p) for p in parts if isinstance(p, str)), inner[0], False)
    return None


def _fit(parts: list[Hole | str], message: str, start: int) -> tuple[tuple[tuple[str, str], ...], int] | None:
    """Values and where the template ends in the message. The last literal is looked for at the very end first, so that
    a value may hold what the literals hold."""
    at = start
    values: list[tuple[str, str]] = []
    waiting: str | None = None
    for i, part in enumerate(parts):
        if isinstance(part, Hole):
            if waiting is not None:
                values.append((waiting, ""))
            waiting = part.expr
            continue
        if waiting is None:
            if not message.startswith(part, at):
                return None
            at += len(part)
            continue
        last = i == len(parts) - 1
        found = len(message) - len(part) if last and message.endswith(part) else message.find(part, at)
        if found < at:
            found = message.find(part, at)
        if found < 0:
            return None
        values.append((waiting, message[at:found].strip()))
        waiting = None
        at = found + len(part)
    if waiting is not None:
        values.append((waiting, message[at:].strip()))
        at = len(message)
    return tuple(values), at


def _fit_cut(parts: list[Hole | str], message: str) -> Match | None:
    """The message stops in the middle of the template: what is there must agree to its last character."""
    at, score = 0, 0
    values: list[tuple[str, str]] = []
    waiting: str | None = None
    for part in parts:
        if isinstance(part, Hole):
            waiting = part.expr
            continue
        found = at if waiting is None else message.find(part, at)
        if waiting is None and not message.startswith(part, at):
            rest = message[at:]
            if not part.startswith(rest):
                return None
            score += _weight(rest)
            break
        if found < 0:
            # The cut lies in the value, or in the literal behind it.
            for keep in range(min(len(part), len(message) - at), 0, -1):
                if message.endswith(part[:keep]):
                    values.append((waiting or "?", message[at : len(message) - keep].strip()))
                    score += _weight(part[:keep])
                    break
            else:
                values.append((waiting or "?", message[at:].strip()))
            break
        if waiting is not None:
            values.append((waiting, message[at:found].strip()))
        waiting = None
        at = found + len(part)
        score += _weight(part)
    return Match(score * 0.8, tuple(values), False) if score >= 2 * LEAST else None
