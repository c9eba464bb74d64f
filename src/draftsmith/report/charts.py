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


def _figure(title: str, traces: list[dict[str, Any]], x: str, y: str) -> dict[str, Any]:
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
        traces.append({"type": "bar", "name": name, "x": [f"position {i}" for i in range(len(rates))], "y": rates})
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
    return _figure("Acceptance by position", traces, "", "accepted / drafts")


def speed(bench: dict[str, Any]) -> dict[str, Any] | None:
    """Tokens per second of the ways at each concurrency."""
    ways = bench.get("tokens_per_second") or {}
    traces = [
        {"type": "bar", "name": way, "x": [f"{c} at once" for c in by], "y": list(by.values())}
        for way, by in ways.items()
        if isinstance(by, dict) and by
    ]
    return _figure("Speed", traces, "", "tokens/s") if traces else None


def curves(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loss, and validation acceptance, against the optimizer step."""
    out = []
    loss = [(m["step"], m["loss"]) for m in metrics if "loss" in m and "step" in m]
    if loss:
        out.append(_figure("Training loss", [_line("loss", loss)], "optimizer step", "loss"))
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
        out.append(_figure("Validation acceptance (held-out rows)", traces, "optimizer step", ""))
    return out


def _line(name: str, points: list[tuple[float, float]]) -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines", "name": name, "x": [p[0] for p in points], "y": [p[1] for p in points]}
