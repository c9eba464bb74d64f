"""One line of figures per stage, for the closing table of a run."""

from __future__ import annotations

from typing import Any

KEYS: dict[str, tuple[str, ...]] = {
    "capture": ("rows", "answer_tokens", "tokens_per_second", "dropped"),
    "vocab": ("size", "coverage", "held_out_coverage"),
    "extract": ("rows", "tokens", "bytes", "tokens_per_second", "agreement"),
    "train": ("steps", "acceptance_length", "acceptance_per_position", "tokens_per_second"),
    "export": ("tensors",),
    "check": ("verdict", "engine", "warnings"),
    "bench": ("tokens_per_target_step", "acceptance_length", "acceptance_per_position", "lossless", "ties"),
    "report": (),
}
"""Stage → the keys of its result that are worth a place in the table."""


def closing_lines(stage: str, result: dict[str, Any]) -> str:
    """`key value` pairs of a stage's result, one per line."""
    return "\n".join(
        f"{k.replace('_', ' ')} {_short(result[k])}" for k in KEYS.get(stage, ()) if result.get(k) is not None
    )


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1 else f"{value:,.2f}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return " ".join(_short(v) for v in value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {_short(v)}" for k, v in value.items())
    return str(value)
