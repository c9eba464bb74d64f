"""`--assert 'tokens_per_target_step>=1.4,speedup_1>=1.3'`: conditions on the figures of bench.json."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

from draftsmith.errors import UserError, nearest

OPS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(r"^\s*([\w.]+)\s*(>=|<=|==|>|<)\s*([\w.+-]+)\s*$")


def names(bench: dict[str, Any]) -> dict[str, float | None]:
    """Every figure that can be asserted: the headline ones, acceptance_0 …, speedup_<concurrency>,
    lossless and sampling (1 = as without the drafter), <set>.<figure>."""
    found: dict[str, float | None] = {}

    def add(prefix: str, part: dict[str, Any]) -> None:
        for key in ("tokens_per_target_step", "acceptance_length", "drafts"):
            if key in part:
                found[prefix + key] = part[key]
        for i, rate in enumerate(part.get("acceptance_per_position") or []):
            found[f"{prefix}acceptance_{i}"] = rate

    add("", bench)
    for name, part in (bench.get("sets") or {}).items():
        add(f"{name}.", part)
    lossless = bench.get("lossless")
    found["lossless"] = None if lossless is None else float(lossless)
    found["ties"] = bench.get("ties")
    sampling = bench.get("sampling")
    found["sampling"] = None if not sampling else float(sampling["verdict"] == "same")
    speeds = bench.get("tokens_per_second") or {}
    for way, by in speeds.items():
        for c, rate in by.items():
            found[f"tokens_per_second_{way}_{c}"] = rate
    for c, rate in (bench.get("speedup") or {}).items():
        found[f"speedup_{c}"] = rate
    return found


def parse(texts: list[str]) -> list[tuple[str, str, float]]:
    """(name, operator, value) of comma-separated conditions; UserError on one that cannot be read."""
    found = []
    for text in (part for t in texts for part in t.split(",") if part.strip()):
        match = _FORM.match(text)
        value = {"true": 1.0, "false": 0.0}.get(match[3].lower()) if match else None
        try:
            number = value if value is not None else float(match[3]) if match else None
        except ValueError:
            number = None
        if match is None or number is None:
            raise UserError(
                f"{text.strip()!r} is no condition", "", "write NAME>=NUMBER, e.g. tokens_per_target_step>=1.4"
            )
        found.append((match[1], match[2], number))
    return found


def check(texts: list[str], bench: dict[str, Any]) -> list[dict[str, Any]]:
    """[{"condition", "value", "held"}]; UserError on a name that bench.json has not."""
    known = names(bench)
    rows = []
    for name, op, wanted in parse(texts):
        if name not in known:
            close = nearest(name, list(known))
            raise UserError(
                f"there is no figure {name!r} to assert",
                "",
                f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}",
            )
        value = known[name]
        rows.append(
            {"condition": f"{name}{op}{wanted:g}", "value": value, "held": value is not None and OPS[op](value, wanted)}
        )
    return rows
