"""bench.json as a page of Markdown tables, for pull requests and model cards."""

from __future__ import annotations

from typing import Any


def _num(value: Any, digits: int = 2) -> str:
    if value is None:
        return "–"
    return f"{value:,.{digits}f}" if isinstance(value, float) else f"{value:,}"


def _between(bounds: list[float] | None, digits: int = 2) -> str:
    return f" [{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]" if bounds else ""


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(r) + " |" for r in rows])


def _acceptance(bench: dict[str, Any]) -> str:
    groups = dict(bench["sets"]) | {"all": bench}
    width = max((len(g["acceptance_per_position"]) for g in groups.values()), default=0)
    rows = []
    for name, g in groups.items():
        bounds = g.get("interval") or {}
        rates = [_num(r, 3) for r in g["acceptance_per_position"]] + ["–"] * (width - len(g["acceptance_per_position"]))
        step = _num(g["tokens_per_target_step"]) + _between(bounds.get("tokens_per_target_step"))
        length = _num(g["acceptance_length"]) + _between(bounds.get("acceptance_length"))
        rows.append([name, step, length, *rates, _num(g["drafts"])])
    head = ["set", "tokens per target step", "acceptance length", *(f"position {i}" for i in range(width)), "drafts"]
    return table(head, rows)


def _speed(bench: dict[str, Any]) -> str:
    rows = []
    for way, result in bench["ways"].items():
        for c, s in result["speed"].items():
            ratio = bench["speedup"].get(c) if way == next(iter(bench["ways"])) else None
            rate = _num(s["tokens_per_second"], 1) + _between(s["interval"], 1)
            ms = [
                _num(v * 1000 if v is not None else None, 1)
                for v in (s["ttft"]["p50"], s["itl"]["p50"], s["itl"]["p99"])
            ]
            rows.append([way, c, rate, f"{ratio:.2f}×" if ratio else "–", _num(result["tokens_per_target_step"]), *ms])
    head = ["way", "at once", "tokens/s", "speed-up", "tokens per target step"]
    return table([*head, "TTFT p50, ms", "ITL p50, ms", "ITL p99, ms"], rows)


def _group(title: str, groups: dict[str, Any]) -> str:
    if not groups:
        return ""
    rows = [
        [
            k,
            _num(g["acceptance_length"]),
            ", ".join(_num(r, 3) for r in g["acceptance_per_position"]),
            _num(g["drafts"]),
        ]
        for k, g in groups.items()
    ]
    return f"\n\n### By {title}\n\n" + table([title, "acceptance length", "per position", "drafts"], rows)


def _tune(tune: dict[str, Any] | None) -> str:
    """Tokens per second by draft tokens and concurrency; what the cost model predicts stands behind a tilde."""
    if not tune:
        return ""
    said: dict[str, Any] = tune.get("predicted") or {}
    predicted: dict[str, Any] = said.get("by_concurrency") or {}
    ks = range(1, max(tune["num_speculative_tokens"]) + 1) if predicted else tune["num_speculative_tokens"]
    rows = []
    for c in predicted or tune["by_concurrency"]:
        row, guess = tune["by_concurrency"].get(c, {}), predicted.get(c, {})
        speeds, guesses = row.get("tokens_per_second", {}), guess.get("tokens_per_second", {})
        cells = [_either(speeds.get(str(k)), guesses.get(str(k))) for k in ks]
        best = f"~{guess['best']}" if guess.get("best_is_predicted") else str(guess.get("best", row.get("best")))
        rows.append([c, *cells, _either(row.get("none"), guess.get("none")), best])
    head = ["at once", *(f"{k} draft token{'s' if k > 1 else ''}" for k in ks), "no drafter", "best"]
    page = "\n\n### Draft tokens, tokens/s\n\n" + table(head, rows)
    if predicted:
        model = said["model"]
        page += (
            f"\n\n~ predicted by the cost model, not measured (fitted on {model['points']} measured speeds, the largest error "
            f"there {model['residual']:.1%}); 0 = no drafter"
        )
    elif said:
        page += f"\n\nNothing is predicted beside what was measured: {said['why_not']}"
    return page


def _either(measured: float | None, predicted: float | None) -> str:
    return _num(measured, 1) if measured is not None or predicted is None else f"~{_num(predicted, 1)}"


def to_markdown(bench: dict[str, Any]) -> str:
    """The whole page."""
    engine = bench["engine"]
    name = " ".join(str(engine[k]) for k in ("name", "version", "platform") if engine.get(k))
    parts = [f"## Bench: {name}", ""]
    parts += [f"> {n}" for n in bench["notices"]] + ([""] if bench["notices"] else [])
    parts += [_acceptance(bench), "", _speed(bench)]
    lossless = bench.get("losslessness")
    if lossless:
        verdict = {True: "yes", False: "NO", None: "could not tell"}[lossless["lossless"]]
        parts += [
            "",
            f"Lossless at temperature 0: {verdict} ({lossless['equal']} of {lossless['compared']} equal, "
            f"{lossless['ties']} ties)",
        ]
    sampled = bench.get("sampling")
    if sampled:
        parts += ["", f"At temperature {sampled['temperature']:g}: {sampled['verdict']} (p = {sampled['p']:.4f})"]
    page = "\n".join(parts) + _group("context length", bench.get("by_context_length") or {})
    page += _group("writing of the prompt", bench.get("by_language") or {}) + _tune(bench.get("tune"))
    return page + "\n\n" + "\n".join(f"- **{k}**: {v}" for k, v in bench["definitions"].items()) + "\n"
