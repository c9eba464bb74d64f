"""Runs side by side: their figures, where their recipes differ, and one chart of each kind for all.

A run is a folder that `draftsmith run` made, or any folder with a bench.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.report import charts
from draftsmith.report.data import gather, read_optional
from draftsmith.report.page import embed_json, number, plotly_script

HEAD: tuple[tuple[str, str], ...] = (
    ("tokens_per_target_step", "tokens per target step"),
    ("acceptance_length", "acceptance length"),
    ("drafts", "drafts"),
    ("lossless", "lossless"),
    ("ties", "ties"),
)


def load(folder: Path) -> dict[str, Any]:
    """{"name", "bench", "recipe", "contract", "records"} of a run or bench folder. UserError where it is neither."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder", "", "give folders that draftsmith run or bench made")
    data = gather(folder)
    if data["bench"] is None:
        data["bench"] = read_optional(folder / "bench.json")
    if data["bench"] is None and not data["records"]:
        raise UserError(
            f"{folder} holds neither a run nor a bench.json", "there is nothing to compare", "give another folder"
        )
    return {k: data[k] for k in ("name", "bench", "recipe", "contract", "records")} | {"folder": str(folder)}


def names_of(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Short names, told apart by as much of the path as it takes."""
    names = [r["name"] for r in runs]
    if len(set(names)) == len(names):
        return names
    for depth in range(2, 12):
        names = ["/".join(Path(r["folder"]).resolve().parts[-depth:]) for r in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{i + 1}. {r['name']}" for i, r in enumerate(runs)]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix.rstrip("."): value}
    out: dict[str, Any] = {}
    for key, v in value.items():
        out |= _flat(v, f"{prefix}{key}.")
    return out


def differences(parts: Sequence[dict[str, Any] | None], skip: Sequence[str] = ()) -> dict[str, list[Any]]:
    """Dotted key → the value of each, of those keys in which they are not all alike."""
    flat = [_flat(p or {}) for p in parts]
    keys = dict.fromkeys(k for f in flat for k in f)
    return {
        k: [f.get(k) for f in flat] for k in keys if k not in skip and any(f.get(k) != flat[0].get(k) for f in flat[1:])
    }


def figures(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """[{"name", "key", "values"}]: one row a figure, one value a run (None = not measured)."""
    benches = [r["bench"] or {} for r in runs]
    rows = [{"name": label, "key": key, "values": [b.get(key) for b in benches]} for key, label in HEAD]
    width = max((len(b.get("acceptance_per_position") or []) for b in benches), default=0)
    for i in range(width):
        rows.append(_row(f"acceptance at position {i}", f"acceptance_{i}", [_rate(b, i) for b in benches]))
    for i in range(width):
        values = [_rate(b.get("predicted") or {}, i) for b in benches]
        if any(v is not None for v in values):
            rows.append(_row(f"predicted at position {i}", f"predicted_{i}", values))
    for key, label in (("speedup", "speed-up at {c} at once"), ("tokens_per_second", "tokens/s, drafter, {c} at once")):
        tables = [b.get(key) or {} for b in benches]
        if key == "tokens_per_second":
            tables = [t.get("drafter") or t.get("endpoint") or {} for t in tables]
        for c in sorted({c for t in tables for c in t}, key=int):
            rows.append(_row(label.format(c=c), f"{key}_{c}", [t.get(c) for t in tables]))
    for name in dict.fromkeys(s for b in benches for s in b.get("sets") or {}):
        values = [((b.get("sets") or {}).get(name) or {}).get("tokens_per_target_step") for b in benches]
        rows.append(_row(f"tokens per target step, {name}", f"{name}.tokens_per_target_step", values))
    for stage, key, label in (
        ("capture", "answer_tokens", "answer tokens captured"),
        ("train", "steps", "training steps"),
        ("train", "acceptance_length", "acceptance length, held-out rows"),
    ):
        values = [((r["records"].get(stage) or {}).get("result") or {}).get(key) for r in runs]
        if any(v is not None for v in values):
            rows.append(_row(label, f"{stage}.{key}", values))
    return [r for r in rows if any(v is not None for v in r["values"])]


def _row(name: str, key: str, values: list[Any]) -> dict[str, Any]:
    return {"name": name, "key": key, "values": values}


def _rate(part: dict[str, Any], i: int) -> Any:
    rates = part.get("acceptance_per_position") or []
    return rates[i] if i < len(rates) else None


def overlaps(runs: Sequence[dict[str, Any]]) -> str:
    """What can be said of the headline: whether the runs' intervals of tokens per target step exclude each other."""
    bounds = [((r["bench"] or {}).get("interval") or {}).get("tokens_per_target_step") for r in runs]
    known = [b for b in bounds if b]
    if len(known) < len(bounds):
        return ""
    low, high = max(b[0] for b in known), min(b[1] for b in known)
    if low <= high:
        return "their 95 % intervals of tokens per target step overlap: the difference may be chance"
    return "their 95 % intervals of tokens per target step do not all overlap: the difference is no chance"


def compare(folders: Sequence[Path]) -> dict[str, Any]:
    """Everything as JSON: {"runs", "figures", "recipe", "contract", "engine", "note"}. UserError for fewer than two."""
    if len(folders) < 2:
        raise UserError(f"{len(folders)} run given", "a comparison needs two or more", "draftsmith compare RUN RUN")
    runs = [load(f) for f in folders]
    return {
        "runs": names_of(runs),
        "figures": figures(runs),
        "recipe": differences([r["recipe"] for r in runs], skip=("name", "out")),
        "contract": differences([r["contract"] for r in runs]),
        "engine": differences([(r["bench"] or {}).get("engine") for r in runs]),
        "note": overlaps(runs),
        "_benches": [r["bench"] or {} for r in runs],
    }


def _charts(names: Sequence[str], benches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    width = max((len(b.get("acceptance_per_position") or []) for b in benches), default=0)
    bars = [
        {
            "type": "bar",
            "name": charts.plain(n),
            "x": [f"position {i}" for i in range(width)],
            "y": [_rate(b, i) for i in range(width)],
        }
        for n, b in zip(names, benches, strict=True)
    ]
    out = [charts.figure("Acceptance by position", bars, "", "accepted / drafts")] if width else []
    lines = []
    for n, b in zip(names, benches, strict=True):
        by = b.get("speedup") or {}
        if by:
            counts = sorted(by, key=int)
            lines.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": charts.plain(n),
                    "x": [int(c) for c in counts],
                    "y": [by[c] for c in counts],
                }
            )
    if lines:
        out.append(charts.figure("Speed-up against no drafter", lines, "requests at once", "times"))
    return out


def render(found: dict[str, Any]) -> str:
    """The comparison as one self-contained page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    env = Environment(loader=PackageLoader("draftsmith", "report"), autoescape=True, undefined=StrictUndefined)
    drawn = _charts(found["runs"], found["_benches"])
    rows = []
    for row in found["figures"]:
        numbers = [v for v in row["values"] if isinstance(v, int | float) and not isinstance(v, bool)]
        best = max(numbers) if len(set(numbers)) > 1 and row["key"] not in ("ties", "drafts") else None
        cells = [{"text": number(v), "best": best is not None and v == best} for v in row["values"]]
        rows.append({"name": row["name"], "key": row["key"], "cells": cells})
    tables = [
        {
            "title": title,
            "rows": [{"key": k, "values": [_said(v) for v in values]} for k, values in found[part].items()],
        }
        for part, title in (("recipe", "Recipes"), ("contract", "Contracts"), ("engine", "Engines"))
    ]
    return env.get_template("compare.html.j2").render(
        title=" · ".join(found["runs"]),
        names=found["runs"],
        note=found["note"],
        rows=rows,
        tables=[t for t in tables if t["rows"]],
        charts=drawn,
        charts_json=embed_json(drawn),
        plotly=plotly_script(),
    )


def _said(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "–" if value is None else str(value)
