"""The figures of benchmarks/serve_gpu.py's part large: speed while all requests run, and what the model is judged by."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from draftsmith.bench.cost import CostModel
from draftsmith.bench.load import Pass, Request
from draftsmith.errors import UserError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TRUE = CostModel(
    floor=4.4e-3, knee=160.0, per_request=1.2e-5, per_draft_token=7e-6, draft_pass=2.4e-4, draft_fixed=4e-4
)


@pytest.fixture(scope="module")
def points() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_serve_points", BENCHMARKS / "_serve_points.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def request(start: float, ttft: float, itl: float, events: int, per_event: int = 8) -> Request:
    times = [(ttft + i * itl, 1 if i == 0 else per_event) for i in range(events)]
    tokens = sum(n for _, n in times)
    return Request("set", "p", 10, tokens, [], "", "length", start, times[-1][0], ttft, times)


def test_speed_is_taken_while_all_run(points: ModuleType) -> None:
    """Four requests of 100 tokens/s each that begin apart: prefill, the ramp and the end do not count."""
    some = [request(0.2 * i, 0.5 + 0.1 * i, 0.08, 40) for i in range(4)]
    rate, seconds = points.steady(Pass(some, 10.0))
    assert rate == pytest.approx(400.0)
    assert seconds == pytest.approx(0.5 + 39 * 0.08 - (0.6 + 0.8))
    # One that is twice as fast ends the window at its own end.
    faster = [some[0], request(0.0, 0.5, 0.04, 40)]
    rate, seconds = points.steady(Pass(faster, 10.0))
    assert (rate, seconds) == (pytest.approx(300.0), pytest.approx(39 * 0.04))


def test_requests_that_never_ran_together_are_refused(points: ModuleType) -> None:
    with pytest.raises(UserError, match="did not run at the same time"):
        points.steady(Pass([request(0.0, 0.1, 0.01, 5), request(3.0, 0.1, 0.01, 5)], 4.0))


def rows_of(points: ModuleType, odd: float = 1.0) -> list[dict[str, Any]]:
    """Every point as TRUE has it; `odd` times the speed at one that is not fitted."""
    rows = []
    for name, (k, rates) in points.LARGE.items():
        for c in (1, 2, 8, 32, 64):
            length = 1 + sum(rates)
            rate = TRUE.tokens_per_second(c, k, length) * (odd if (name, c) == ("k3_high", 32) else 1.0)
            step = 1000 * c * length / rate
            rows.append(
                {
                    "config": name,
                    "draft_tokens": k,
                    "rates": list(rates),
                    "concurrency": c,
                    "tokens_per_second": rate,
                    "step_ms": step,
                }
            )
    return rows


def test_the_model_sees_the_chosen_points_alone(points: ModuleType) -> None:
    """A wrong point that is not fitted is told as wrong, and moves no other."""
    good = points.judged(rows_of(points), points.fit_rows(rows_of(points)))
    assert sum(r["fitted"] for r in good) == sum(len(c) for c in points.FIT.values()) == 9
    assert max(abs(r["error"]) for r in good) < 0.03
    bad = points.judged(rows_of(points, 1.3), points.fit_rows(rows_of(points, 1.3)))
    wrong = [r for r in bad if abs(r["error"]) > points.BAR]
    assert [(r["config"], r["concurrency"]) for r in wrong] == [("k3_high", 32)]
    assert wrong[0]["speedup_error"] == pytest.approx(1 / 1.3 - 1, abs=0.03)
    assert not wrong[0]["fitted"]
