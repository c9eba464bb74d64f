"""Plotly figures as JSON; the page carries plotly's script once and draws them."""

from __future__ import annotations

from typing import Any

COLORS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#dc2626", "#0891b2")
LAYOUT: dict[str, Any] = {
    "margin": {"l": 52, "r": 12, "t": 36, "b": 60},
    "height": 320,
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, sans-serif", "size": 13},
    "legend": {"orientation": "h", "y": -0.32},
    "colorway": list(COLORS),
}


def plain(text: Any) -> str:
    """A name as plotly shows it letter by letter: it reads tags, links among them, in titles and names."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def figure(title: str, traces: list[dict[str, Any]], x: str, y: str) -> dict[str, Any]:
    return {
        "data": traces,
        "layout": LAYOUT
        | {
            "title": {"text": title, "font": {"size": 15}},
            "xaxis": {"title": {"text": x}},
            "yaxis": {"title": {"text": y}},
        },
    }


def acceptance(bench: dict[str, Any]) -> dict[str, Any]:
    """Acceptance by draft position, one bar group per set; the offline prediction as points where there is one."""
    traces: list[dict[str, Any]] = []
    groups = {"all": bench} | dict(bench.get("sets") or {})
    for name, values in groups.items():
        rates = values.get("acceptance_per_position") or []
        traces.append(
            {"type": "bar", "name": plain(name), "x": [f"position {i}" for i in range(len(rates))], "y": rates}
        )
    predicted = (bench.get("predicted") or {}).get("acceptance_per_position")
    if predicted:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "predicted offline",
                "marker": {"symbol": "diamond", "size": 11},
                "x": [f"position {i}" for i in range(len(predicted))],
                "y": predicted,
            }
        )
    return figure("Acceptance by position", traces, "", "accepted / drafts")


def speed(bench: dict[str, Any]) -> dict[str, Any] | None:
    """Tokens per second of the ways at each concurrency."""
    ways = bench.get("tokens_per_second") or {}
    traces = [
        {"type": "bar", "name": plain(way), "x": [f"{plain(c)} at once" for c in by], "y": list(by.values())}
        for way, by in ways.items()
        if isinstance(by, dict) and by
    ]
    return figure("Speed", traces, "", "tokens/s") if traces else None


def speedup(bench: dict[str, Any]) -> dict[str, Any] | None:
    """Speed-up over no drafter against how many requests run at once, with its interval where there is one; the line at
    1 is where a drafter begins to pay."""
    speeds = bench.get("tokens_per_second") or {}
    alone = speeds.get("none") or {}
    bounds = bench.get("speedup_interval") or {}
    traces: list[dict[str, Any]] = []
    for way, by in speeds.items():
        counts = sorted((c for c in by if alone.get(c)), key=int) if way != "none" and isinstance(by, dict) else []
        if not counts:
            continue
        ratios = [by[c] / alone[c] for c in counts]
        trace: dict[str, Any] = {"type": "scatter", "mode": "lines+markers", "name": plain(way)}
        trace |= {"x": [int(c) for c in counts], "y": [round(r, 4) for r in ratios]}
        if way not in ("none", "ngram") and any(c in bounds for c in counts):
            high = [bounds[c][1] - r if c in bounds else 0.0 for c, r in zip(counts, ratios, strict=True)]
            low = [r - bounds[c][0] if c in bounds else 0.0 for c, r in zip(counts, ratios, strict=True)]
            trace["error_y"] = {"type": "data", "symmetric": False, "array": high, "arrayminus": low}
        traces.append(trace)
    if not traces:
        return None
    drawn = figure("Speed-up against no drafter", traces, "requests at once", "times")
    drawn["layout"]["xaxis"] |= {"type": "log", "tickvals": sorted({x for t in traces for x in t["x"]})}
    drawn["layout"]["shapes"] = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": {"dash": "dot", "width": 1}}
    ]
    return drawn


def by_context(bench: dict[str, Any]) -> dict[str, Any] | None:
    """Acceptance by position against the length of the context."""
    groups = bench.get("by_context_length") or {}
    width = max((len(v.get("acceptance_per_position") or []) for v in groups.values()), default=0)
    names = list(groups)
    traces = []
    for i in range(width):
        rates = [(groups[n].get("acceptance_per_position") or [])[i : i + 1] or [None] for n in names]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"position {i}",
                "x": [plain(n) for n in names],
                "y": [r[0] for r in rates],
            }
        )
    return (
        figure("Acceptance by context length", traces, "tokens before the draft", "accepted / drafts")
        if traces
        else None
    )


def curves(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loss, and validation acceptance, against the optimizer step."""
    out = []
    losses: dict[int, list[tuple[float, float]]] = {}
    for m in metrics:
        if "loss" in m and "step" in m:
            losses.setdefault(m.get("draft_steps", 0), []).append((m["step"], m["loss"]))
    if losses:
        # The loss is a sum over the draft steps: one line for each number of them, for they do not compare.
        names = {k: f"{k} draft step{'' if k == 1 else 's'}" if k else "loss" for k in losses}
        lines = [_line(names[k], points) for k, points in losses.items()]
        out.append(figure("Training loss", lines, "optimizer step", "loss, summed over draft steps"))
    length = [(m["step"], m["acceptance_length"]) for m in metrics if "acceptance_length" in m]
    if length:
        traces = [_line("acceptance length", length)]
        positions = max(len(m["acceptance_per_position"]) for m in metrics if m.get("acceptance_per_position"))
        for i in range(positions):
            points = [
                (m["step"], m["acceptance_per_position"][i])
                for m in metrics
                if len(m.get("acceptance_per_position") or []) > i
            ]
            traces.append(_line(f"position {i}", points))
        out.append(figure("Validation acceptance (held-out rows)", traces, "optimizer step", ""))
    return out


def _line(name: str, points: list[tuple[float, float]]) -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines", "name": name, "x": [p[0] for p in points], "y": [p[1] for p in points]}
