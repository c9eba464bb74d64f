"""`--tune`: how many draft tokens are best at each concurrency? Every number is measured; the best one is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.bench.result import way_result
from draftsmith.bench.ways import Opener, Plan, measure_way
from draftsmith.ui import Ui

MARGIN = 0.02
"""A larger number of draft tokens must be faster by this share to be preferred: it costs memory and latency spread."""


def best_of(rates: dict[int, float], plain: float | None) -> int:
    """The number of draft tokens to use: the smallest within MARGIN of the fastest; 0 (no drafter) where plain
    serving is as fast."""
    fastest = max(rates.values())
    if plain is not None and plain >= fastest:
        return 0
    return min(k for k, rate in rates.items() if rate >= fastest * (1 - MARGIN))


def sweep(
    opener_of: Callable[[int], Opener],
    numbers: list[int],
    plan: Plan,
    bench: dict[str, Any],
    folder: Path,
    ui: Ui,
) -> dict[str, Any]:
    """Measure the drafter with each number of draft tokens, one server start each, and recommend.

    Returns {"num_speculative_tokens": […], "by_concurrency": {c: {"tokens_per_second": {k: …},
    "acceptance_length": {k: …}, "none", "best"}}}."""
    plan = replace(plan, sampling_test=None)
    results = {}
    for k in numbers:
        ui.note(f"tune: {k} draft tokens")
        measured = measure_way(opener_of(k), "drafter", plan, folder / f"k{k}", ui)
        results[k] = way_result(measured, plan)
    rows: dict[str, Any] = {}
    for c in map(str, plan.concurrency):
        rates = {k: r["speed"][c]["tokens_per_second"] for k, r in results.items()}
        plain = bench["tokens_per_second"].get("none", {}).get(c)
        rows[c] = {
            "tokens_per_second": {str(k): v for k, v in rates.items()},
            "acceptance_length": {str(k): r["by_concurrency"][c]["acceptance_length"] for k, r in results.items()},
            "none": plain,
            "best": best_of(rates, plain),
        }
        ui.note(f"tune: at {c} at once best with {rows[c]['best']} draft tokens")
    return {"num_speculative_tokens": numbers, "by_concurrency": rows}
