"""From a bench's figures to the cost model, and from that to what was not measured: other numbers of draft tokens, other
concurrencies, and why a drafter whose guesses are accepted does not pay.

Whatever it says of a point that was not measured is a prediction and is named so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from draftsmith.bench.cost import CostModel, Point, fit, tokens_per_step
from draftsmith.bench.endpoint import ENDPOINT
from draftsmith.errors import UserError

MARGIN = 0.02
"""A larger number of draft tokens must be faster by this share to be preferred: it costs memory and latency spread."""


def best_of(rates: dict[int, float], plain: float | None) -> int:
    """The number of draft tokens to use: the smallest within MARGIN of the fastest; 0 (no drafter) where plain
    serving is as fast."""
    fastest = max(rates.values())
    if plain is not None and plain >= fastest:
        return 0
    return min(k for k, rate in rates.items() if rate >= fastest * (1 - MARGIN))


def lead_of(bench: dict[str, Any]) -> str:
    """The way whose drafter is meant: `drafter`, or `endpoint` where a running server was measured."""
    return "drafter" if "drafter" in (bench.get("tokens_per_second") or {}) else ENDPOINT


def draft_tokens(bench: dict[str, Any]) -> int | None:
    """The number of draft tokens that the drafter was served with; None where bench.json does not say."""
    way = (bench.get("ways") or {}).get(lead_of(bench)) or {}
    given = ((way.get("server") or {}).get("speculative") or {}).get("num_speculative_tokens")
    return int(given) if given else len(way.get("acceptance_per_position") or []) or None


def points_of(bench: dict[str, Any]) -> list[Point]:
    """Every measured speed of a bench.json, tune's included, as a point of the cost model."""
    found: dict[tuple[int, int], Point] = {}

    def add(c: str, k: int, rate: float | None, length: float | None) -> None:
        if rate and (length or not k):
            found.setdefault((int(c), k), Point.of_rate(int(c), k, rate, length if k and length else 1.0))

    ways = bench.get("ways") or {}
    for c, speed in ((ways.get("none") or {}).get("speed") or {}).items():
        add(c, 0, speed.get("tokens_per_second"), None)
    k, drafter = draft_tokens(bench), ways.get(lead_of(bench)) or {}
    for c, speed in (drafter.get("speed") or {}).items() if k else ():
        length = ((drafter.get("by_concurrency") or {}).get(c) or {}).get("acceptance_length")
        add(c, k or 0, speed.get("tokens_per_second"), length)
    for c, row in ((bench.get("tune") or {}).get("by_concurrency") or {}).items():
        for number, rate in row["tokens_per_second"].items():
            add(c, int(number), rate, row["acceptance_length"].get(number))
    return [found[key] for key in sorted(found)]


def around(concurrency: Iterable[int]) -> list[int]:
    """The concurrencies that are told of: those measured and the powers of two up to twice the largest."""
    given = sorted(set(concurrency))
    powers = (2**i for i in range(20))
    return sorted({*given, *(p for p in powers if p <= 2 * given[-1])})


def forecast(
    tune: dict[str, Any], points: Sequence[Point], rates: Sequence[float], concurrency: Sequence[int]
) -> dict[str, Any]:
    """What `--tune` did not measure: {"model", "by_concurrency": {c: {"tokens_per_second": {k: …}, "none", "best",
    "best_is_predicted"}}}; "none" only where it was not measured. Or {"why_not": …} where the points are too few.

    tune: its by_concurrency as measured. rates: acceptance per position (unconditional) of the longest draft."""
    try:
        model = fit(points)
    except UserError as e:
        return {"why_not": f"{e.what}: {e.fix}"}
    measured = tune["by_concurrency"]
    most = max(tune["num_speculative_tokens"])
    rows: dict[str, Any] = {}
    for c in around(concurrency):
        known = measured.get(str(c), {})
        said = {
            k: round(model.tokens_per_second(c, k, tokens_per_step(rates, k)), 2)
            for k in range(1, most + 1)
            if str(k) not in known.get("tokens_per_second", {})
        }
        plain = known.get("none")
        row: dict[str, Any] = {"tokens_per_second": {str(k): v for k, v in said.items()}}
        if plain is None:
            plain = row["none"] = round(model.tokens_per_second(c, 0), 2)
        speeds = said | {int(k): v for k, v in known.get("tokens_per_second", {}).items()}
        row["best"] = best_of(speeds, plain)
        row["best_is_predicted"] = "none" in row if row["best"] == 0 else row["best"] in said
        rows[str(c)] = row
    return {"model": model.as_dict(), "by_concurrency": rows}


def why_slower(bench: dict[str, Any]) -> tuple[list[str], str]:
    """(evidence lines, advice) for a drafter that is slower than none somewhere.

    What it would need to break even is measured: its tokens per step over its speed-up. What a step is spent on, and
    whether fewer draft tokens would pay, comes from the cost model, where the bench has points enough to fit it."""
    speeds = bench.get("tokens_per_second") or {}
    plain, ours = speeds.get("none") or {}, speeds.get(lead_of(bench)) or {}
    by = ((bench.get("ways") or {}).get(lead_of(bench)) or {}).get("by_concurrency") or {}
    lines = []
    for c in plain:
        if not (plain.get(c) and ours.get(c)):
            continue
        ratio = ours[c] / plain[c]
        has = (by.get(c) or {}).get("acceptance_length") or bench.get("acceptance_length")
        needs = f"; it breaks even at {has / ratio:.2f} tokens per step and has {has:.2f}" if has else ""
        lines.append(f"{ratio:.2f}× the speed of no drafter at {c} at once{needs}")
    k = draft_tokens(bench)
    try:
        model = fit(points_of(bench))
    except UserError:
        return lines, "fewer speculative tokens, a smaller batch, or no drafter for a target this small"
    rates = bench.get("acceptance_per_position") or []
    sizes = [int(c) for c in plain if ours.get(c)]
    if k:
        lines += [step_line(model, c, k) for c in sizes]
    return lines, _advice(model, sizes, rates)


def step_line(model: CostModel, concurrency: int, draft_tokens: int) -> str:
    """What a step is spent on, as a sentence."""
    parts = {name: 1000 * seconds for name, seconds in model.parts(concurrency, draft_tokens).items()}
    return (
        f"by the cost model a step at {concurrency} at once takes the target {parts['target']:.2f} ms; {draft_tokens} draft "
        f"tokens add {parts['drafting']:.2f} ms for the drafter's runs ({parts['drafting'] / parts['target']:.0%} of a target "
        f"step) and {parts['tokens']:.2f} ms for the more tokens"
    )


def _advice(model: CostModel, sizes: Sequence[int], rates: Sequence[float]) -> str:
    """The number of draft tokens that the model would take at each concurrency; none where none pays."""
    told = []
    for c in sizes:
        k, rate = model.best(c, rates)
        plain = model.tokens_per_second(c, 0)
        if k:
            told.append(f"at {c} at once {k} draft token{'s' if k > 1 else ''} (predicted {rate / plain:.2f}×)")
        else:
            told.append(f"at {c} at once no drafter")
    if told and all(t.endswith("no drafter") for t in told):
        return "no number of draft tokens is predicted to pay here: a larger target, a smaller drafter, or better acceptance"
    return "; ".join(told) + "; bench --tune measures it"
