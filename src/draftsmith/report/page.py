"""Turns gathered data into one self-contained page. Everything shown passes through the template's escaping; the
embedded JSON escapes `<`, so that no prompt or name can close the script (docs/security.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.report import charts
from draftsmith.report.data import DEFINITIONS
from draftsmith.report.summary import closing_lines

TILES = (
    ("tokens_per_target_step", "tokens per target step"),
    ("acceptance_length", "acceptance length"),
    ("acceptance_at_0", "acceptance at position 0"),
    ("lossless", "lossless"),
    ("drafts", "drafts"),
)


def number(value: Any) -> str:
    """A figure as text: three decimals under 10, one above, words for booleans, a dash for nothing."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return str(value)


def embed_json(value: Any) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return (
        text.replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )


def _tiles(bench: dict[str, Any]) -> list[dict[str, str]]:
    rates = bench.get("acceptance_per_position") or [None]
    values = bench | {"acceptance_at_0": rates[0]}
    return [{"key": k, "label": label, "text": number(values.get(k))} for k, label in TILES]


def _ways(bench: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    speeds = {w: by for w, by in (bench.get("tokens_per_second") or {}).items() if isinstance(by, dict) and by}
    counts = sorted({c for by in speeds.values() for c in by}, key=lambda c: -int(c))
    plain = speeds.get("none", {})
    rows = []
    per_way = bench.get("ways") or {}
    for way, by in speeds.items():
        figures = bench if way == "drafter" else per_way.get(way, {})
        ratios = [f"{by[c] / plain[c]:.2f}× at {c}" for c in counts if way != "none" and by.get(c) and plain.get(c)]
        rows.append(
            {
                "name": way,
                "per_step": number(1.0 if way == "none" else figures.get("tokens_per_target_step")),
                "length": number(None if way == "none" else figures.get("acceptance_length")),
                "speeds": [number(by.get(c)) for c in counts],
                "ratio": ", ".join(ratios) or "–",
            }
        )
    return counts, rows


def _sets(bench: dict[str, Any]) -> tuple[list[int], list[dict[str, Any]]]:
    groups = dict(bench.get("sets") or {}) | {"all": bench}
    width = max((len(v.get("acceptance_per_position") or []) for v in groups.values()), default=0)
    rows = []
    for name, values in groups.items():
        rates = [number(r) for r in values.get("acceptance_per_position") or []]
        rows.append(
            {
                "name": name,
                "per_step": number(values.get("tokens_per_target_step")),
                "length": number(values.get("acceptance_length")),
                "rates": rates + ["–"] * (width - len(rates)),
                "drafts": number(values.get("drafts")),
            }
        )
    return list(range(width)), rows


def _buckets(bench: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows by context length and by the writing of the prompt; nothing where the server counts no single steps."""
    groups = dict(bench.get("by_context_length") or {})
    languages = dict(bench.get("by_language") or {})
    # One writing only says nothing that the headline does not.
    groups |= languages if len(languages) > 1 else {}
    width = len(bench.get("acceptance_per_position") or [])
    rows = []
    for name, values in groups.items():
        rates = [number(r) for r in values.get("acceptance_per_position") or []][:width]
        rows.append(
            {
                "key": name,
                "name": f"{name} tokens" if name[:1].isdigit() else name,
                "length": number(values.get("acceptance_length")),
                "rates": rates + ["–"] * (width - len(rates)),
                "drafts": number(values.get("drafts")),
            }
        )
    return rows


OFF = 0.02
"""Gap between predicted and measured acceptance that is marked."""


def _predicted(bench: dict[str, Any]) -> list[dict[str, Any]]:
    """Predicted beside measured, position by position, in all and by set."""
    predicted = bench.get("predicted") or {}
    groups = [("all", predicted, bench)]
    groups += [(n, p, (bench.get("sets") or {}).get(n) or {}) for n, p in (predicted.get("sets") or {}).items()]
    rows = []
    for name, ours, theirs in groups:
        pairs = zip(
            ours.get("acceptance_per_position") or [], theirs.get("acceptance_per_position") or [], strict=False
        )
        for i, (p, m) in enumerate(pairs):
            rows.append(
                {
                    "set": name,
                    "position": i,
                    "predicted": number(float(p)),
                    "measured": number(float(m)),
                    "gap": f"{p - m:+.3f}",
                    "off": abs(p - m) > OFF,
                }
            )
    return rows


MOST_SAMPLES = 24
"""Answers that a page shows."""


def _samples(samples: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Answers as pieces: accepted; the target's own where a draft was refused; the target's own without a refusal (the
    first token, and that behind a draft of which all `steps` were accepted)."""
    out = []
    for s in samples[:MOST_SAMPLES]:
        tokens = s.get("tokens") or []
        pieces: list[dict[str, Any]] = []
        run = 0
        for i, p in enumerate(tokens):
            accepted = bool(p.get("accepted"))
            # The first token is the prefill's; every other one that was not accepted ends a verifying step.
            rejected = not accepted and i > 0 and run < steps
            own = "prefill" if not i else f"position {run}: the draft was rejected" if rejected else "all were accepted"
            title = f"position {run}: accepted" if accepted else own
            run = run + 1 if accepted else 0
            pieces.append({"text": str(p.get("text", "")), "accepted": accepted, "rejected": rejected, "title": title})
        count = sum(p["accepted"] for p in pieces)
        out.append(
            {
                "set": s.get("set", ""),
                "prompt": str(s.get("prompt", ""))[:400],
                "pieces": pieces,
                "accepted": count,
                "count": len(pieces),
                "share": round(count / max(len(pieces), 1), 3),
            }
        )
    return out


def _diagnosed(data: dict[str, Any]) -> str:
    """One line of what the diagnosis replayed; "" where there was none."""
    found = data["diagnosis"]
    if not found:
        return ""
    a = found.get("acceptance")
    if not a:
        return "the files could not be replayed"
    return f"replayed {found.get('rows')} rows: acceptance length {number(a.get('acceptance_length'))}"


def plotly_script() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def render(data: dict[str, Any]) -> str:
    """The page's HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    env = Environment(loader=PackageLoader("draftsmith", "report"), autoescape=True, undefined=StrictUndefined)
    bench = data["bench"] or {}
    figures = [charts.acceptance(bench)] if bench.get("acceptance_per_position") else []
    more = (charts.speed(bench), charts.speedup(bench), charts.by_context(bench))
    figures += [f for f in more if f] + charts.curves(data["metrics"])
    concurrencies, ways = _ways(bench)
    positions, sets = _sets(bench) if bench else ([], [])
    samples = _samples(data["samples"], len(bench.get("acceptance_per_position") or []) or 1)
    verdict = data["verdict"] or {}
    contract = data["contract"] or {}
    target = contract.get("target") or {}
    engine = bench.get("engine") or {}
    served = f"{engine.get('name', '')} {engine.get('version', 'not measured')}".strip()
    return env.get_template("page.html.j2").render(
        name=data["name"],
        subtitle=f"target {target.get('name', 'unknown')} · engine {served}",
        notices=bench.get("notices") or [],
        tiles=_tiles(bench) if bench else [],
        ways=ways,
        ways_caption="tokens per target step compares methods that draft at different times; acceptance length does not",
        concurrencies=concurrencies,
        positions=positions,
        sets=sets,
        diagnosed=_diagnosed(data),
        diagnosis=(data["diagnosis"] or {}).get("causes") or [],
        predicted=_predicted(bench),
        predicted_texts=f"{number((bench.get('predicted') or {}).get('texts'))} texts",
        buckets=_buckets(bench),
        charts=figures,
        charts_json=embed_json(figures),
        samples=samples,
        sample_sets=list(dict.fromkeys(s["set"] for s in samples)),
        verdict=verdict.get("verdict", ""),
        checks=verdict.get("checks") or [],
        stages=[
            {
                "name": n,
                "seconds": number(float(r["seconds"])),
                "result": closing_lines(n, r["result"]).replace("\n", ", "),
                "key": r["key"][:12],
            }
            for n, r in data["records"].items()
        ],
        definitions=list(DEFINITIONS.items()),
        contract=json.dumps(data["contract"], indent=1, ensure_ascii=False),
        versions=json.dumps(next((r["versions"] for r in data["records"].values()), {}) | {"engine": engine}, indent=1),
        recipe=json.dumps(data["recipe"], indent=1, ensure_ascii=False),
        plotly=plotly_script(),
    )


def write_page(run_folder: Path, out: Path) -> Path:
    """Gather the run's files and write the page to `out`."""
    from draftsmith.record import atomic_write
    from draftsmith.report.data import gather

    atomic_write(out, render(gather(run_folder)))
    return out
