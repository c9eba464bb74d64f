"""`--tune`: how many draft tokens are best at each concurrency? The numbers that were asked for are measured; those between
and beside them are predicted by the cost model, and said to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.bench.forecast import best_of, forecast, points_of
from draftsmith.bench.result import way_result
from draftsmith.bench.ways import Opener, Plan, measure_way
from draftsmith.ui import Ui


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
    "acceptance_length": {k: …}, "none", "best"}}, "predicted": forecast.py's}."""
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
    tune: dict[str, Any] = {"num_speculative_tokens": numbers, "by_concurrency": rows}
    rates = results[max(numbers)]["acceptance_per_position"]
    tune["predicted"] = forecast(tune, points_of(bench | {"tune": tune}), rates, plan.concurrency)
    for c, row in tune["predicted"].get("by_concurrency", {}).items():
        if row["best_is_predicted"]:
            ui.note(f"tune: at {c} at once {row['best'] or 'no'} draft tokens are predicted to be best (not measured)")
    return tune
