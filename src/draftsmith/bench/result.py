"""Put bench.json together from what the ways measured."""

from __future__ import annotations

from typing import Any

from draftsmith.bench.buckets import by_bucket
from draftsmith.bench.figures import DEFINITIONS, acceptance, counts_of_steps, spread
from draftsmith.bench.load import Pass, Request
from draftsmith.bench.stats import paired_ratio_interval, rate_interval, ratio_interval
from draftsmith.bench.ways import MIXED, Measured, Plan
from draftsmith.engine.metrics import Counters

FOREIGN_SHARE = 0.01
"""More of the server's tokens than this given to others, and the counters are not ours alone."""


def _total(counters: list[Counters]) -> Counters:
    total = counters[0]
    for c in counters[1:]:
        total = total.plus(c)
    return total


def _names(plan: Plan, concurrency: int, set_name: str | None = None) -> list[str]:
    return [n for n, c, s, _, _ in plan.passes() if c == concurrency and (set_name is None or s == set_name)]


def accepted_of(request: Request) -> int:
    """Accepted tokens of a request: by the server's count, else by the stream's events (1 + accepted each)."""
    if request.steps:
        return sum(a for _, a in request.steps)
    return sum(n - 1 for _, n in request.events)


def intervals(requests: list[Request]) -> dict[str, Any]:
    """95 % intervals over prompts of the acceptance figures; {} for too few prompts."""
    tokens = [float(r.tokens) for r in requests]
    accepted = [float(accepted_of(r)) for r in requests]
    found: dict[str, Any] = {
        "tokens_per_target_step": ratio_interval(tokens, [t - a for t, a in zip(tokens, accepted, strict=True)])
    }
    if all(r.steps for r in requests):
        per = [counts_of_steps([r.steps], r.tokens) for r in requests]
        drafts = [float(c.drafts) for c in per]
        found["acceptance_length"] = ratio_interval([c.drafts + c.accepted for c in per], drafts)
        width = max(len(c.accepted_per_position) for c in per)
        found["acceptance_per_position"] = [
            ratio_interval([_at(c.accepted_per_position, i) for c in per], drafts) for i in range(width)
        ]
    return {k: v for k, v in found.items() if v is not None}


def _at(values: list[int], i: int) -> float:
    return float(values[i]) if i < len(values) else 0.0


def speed_of(passes: list[Pass], single: bool) -> dict[str, Any]:
    """Tokens per second of some passes together, with its interval, and the latencies."""
    requests = [r for p in passes for r in p.requests]
    seconds = sum(p.seconds for p in passes)
    rate = sum(p.tokens for p in passes) / seconds if seconds else 0.0
    if single:
        bounds = ratio_interval([r.tokens for r in requests], [r.seconds for r in requests])
    else:
        bounds, base, events = None, 0.0, []
        for p in passes:
            events += [(base + r.start + at, n) for r in p.requests for at, n in r.events]
            base += p.seconds
        bounds = rate_interval(sorted(events), base)
    itl = [b[0] - a[0] for r in requests for a, b in zip(r.events, r.events[1:], strict=False)]
    return {
        "tokens_per_second": round(rate, 2),
        "interval": bounds,
        "ttft": spread([r.ttft for r in requests]),
        "itl": spread(itl),
        "requests": len(requests),
        "tokens": sum(p.tokens for p in passes),
        "seconds": round(seconds, 2),
    }


def way_result(m: Measured, plan: Plan) -> dict[str, Any]:
    """One way's part of bench.json: headline figures at `plan.main`, by set, speed by concurrency."""
    main = plan.main
    main_names = _names(plan, main)
    requests = [r for n in main_names for r in m.passes[n].requests]
    found: dict[str, Any] = acceptance(_total([m.counters[n] for n in main_names]))
    found["interval"] = intervals(requests) if found["drafts"] else {}
    found["sets"] = {}
    for name in dict.fromkeys(s for _, c, s, _, _ in plan.passes() if c == main):
        names = _names(plan, main, name)
        own = [r for n in names for r in m.passes[n].requests]
        # A mixed pass has no counters per set; the server's per-request counts take their place where it has them.
        groups = {name: own} if name != MIXED else {s: [r for r in own if r.set == s] for s in plan.prompts}
        for s, some in groups.items():
            counts = _total([m.counters[n] for n in names]) if name != MIXED else None
            if counts is None and some and all(r.steps for r in some):
                counts = counts_of_steps([r.steps for r in some], sum(r.tokens for r in some))
            if counts is not None and some:
                found["sets"][s] = acceptance(counts) | {"interval": intervals(some) if counts.drafts else {}}
    found["speed"] = {str(c): speed_of([m.passes[n] for n in _names(plan, c)], c == 1) for c in plan.concurrency}
    found["by_concurrency"] = {
        str(c): acceptance(_total([m.counters[n] for n in _names(plan, c)])) for c in plan.concurrency
    }
    if any(r.steps for r in requests):
        found["by_context_length"] = by_bucket(requests)
    found["refused"] = {k: v for n in m.passes for k, v in m.passes[n].refused.items()}
    found["server"] = m.info
    return found


def assemble(
    plan: Plan,
    ways: dict[str, Measured],
    lossless: dict[str, Any] | None,
    engine: dict[str, Any],
    lead: str = "drafter",
) -> dict[str, Any]:
    """bench.json. lead: the way whose figures stand at the top (drafter; endpoint for a foreign server)."""
    results = {name: way_result(m, plan) for name, m in ways.items()}
    top = results.get(lead) or next(iter(results.values()))
    head = (
        "tokens_per_target_step",
        "acceptance_length",
        "acceptance_per_position",
        "acceptance_conditional",
        "drafts",
    )
    bench: dict[str, Any] = {k: top[k] for k in head}
    bench["interval"] = top["interval"]
    bench["lossless"] = lossless["lossless"] if lossless else None
    bench["ties"] = lossless["ties"] if lossless else None
    bench["tokens_per_second"] = {
        way: {c: s["tokens_per_second"] for c, s in r["speed"].items()} for way, r in results.items()
    }
    bench["sets"] = top["sets"]
    bench["speedup"], bench["speedup_interval"] = _speedups(results, ways, plan, lead)
    bench["ways"] = results
    bench["losslessness"] = lossless
    bench["definitions"] = DEFINITIONS
    bench["engine"] = engine
    bench["settings"] = {
        "sets": {s: len(p) for s, p in plan.prompts.items()},
        "concurrency": plan.concurrency,
        "max_tokens": plan.max_tokens,
        "single_prompts": plan.single_prompts,
        "single_max_tokens": plan.single_max_tokens,
        "temperature": plan.temperature,
        "repeats": plan.repeats,
        "main_concurrency": plan.main,
    }
    bench["notices"] = notices(bench, ways)
    return bench


def _speedups(
    results: dict[str, Any], ways: dict[str, Measured], plan: Plan, lead: str
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Speed of the drafter over none by concurrency; the interval only one at a time, where prompts pair."""
    if lead not in results or "none" not in results:
        return {}, {}
    ratios: dict[str, float] = {}
    bounds: dict[str, list[float]] = {}
    for c in map(str, plan.concurrency):
        ours, plain = (results[w]["speed"][c]["tokens_per_second"] for w in (lead, "none"))
        if plain:
            ratios[c] = round(ours / plain, 4)
        if c == "1":
            sides = [
                {r.prompt_id: (r.tokens, r.seconds) for n in _names(plan, 1) for r in ways[w].passes[n].requests}
                for w in (lead, "none")
            ]
            both = [p for p in sides[0] if p in sides[1]]
            pair = [([float(s[p][0]) for p in both], [float(s[p][1]) for p in both]) for s in sides]
            found = paired_ratio_interval(pair[0], pair[1])
            if found:
                bounds[c] = found
    return ratios, bounds


def notices(bench: dict[str, Any], ways: dict[str, Measured]) -> list[str]:
    """What a reader must not overlook."""
    found = []
    if bench["engine"].get("path") == "reference":
        found.append(
            "measured with the built-in reference engine: acceptance is exact, its speed says nothing about a served one"
        )
    for c, ratio in bench["speedup"].items():
        if ratio < 1:
            found.append(f"slower than without a drafter at {c} at once: {ratio:.2f}×")
    lossless = bench["losslessness"] or {}
    worse = len(lossless.get("differences") or []) - (lossless.get("ties") or 0)
    if worse > 0:
        found.append(f"not lossless: {worse} of {lossless['compared']} answers differ by more than a tie")
    for name, m in ways.items():
        total = sum(c.tokens for c in m.counters.values())
        if total and m.foreign > FOREIGN_SHARE * total:
            found.append(
                f"{name}: the server answered others as well ({m.foreign:,} of {total:,} tokens); its counters hold theirs too"
            )
    for key, value in bench["settings"].get("rough", {}).items():
        found.append(f"rough: {key} {value}")
    return found
