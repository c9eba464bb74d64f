"""The cost model: parameters and speeds recovered from made-up steps, with noise too, and refusals."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from draftsmith.bench.cost import CostModel, Point, fit, tokens_per_step
from draftsmith.errors import Exit, UserError

LARGE = CostModel(
    floor=4.4e-3, knee=160.0, per_request=1.2e-5, per_draft_token=7e-6, draft_pass=2.4e-4, draft_fixed=4e-4
)
SMALL = CostModel(
    floor=1.9e-3, knee=math.inf, per_request=4e-5, per_draft_token=5e-6, draft_pass=3.5e-4, draft_fixed=5e-4
)
"""An 8B target, and one of 135M that is bound by launches, as they cost on a large GPU."""
SHOWN = [(1, 0), (8, 0), (64, 0), (1, 3), (8, 3), (64, 3), (1, 5), (32, 5), (64, 5)]
HIDDEN = [p for p in itertools.product((1, 2, 8, 16, 32, 64), (0, 1, 3, 5)) if p not in SHOWN]


def points(model: CostModel, some: list[tuple[int, int]], noise: float = 0.0, seed: int = 0) -> list[Point]:
    rng = np.random.default_rng(seed)
    return [Point(c, k, model.step_seconds(c, k) * float(1 + noise * rng.standard_normal())) for c, k in some]


@pytest.mark.parametrize("true", [LARGE, SMALL])
def test_parameters_come_back(true: CostModel) -> None:
    found = fit(points(true, SHOWN))
    for name in ("floor", "per_request", "per_draft_token", "draft_pass", "draft_fixed"):
        # The knee is looked for on a grid, which moves what is beside it a little.
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.15, abs=1e-6), name
    assert (found.knee == math.inf) if true.knee == math.inf else found.knee == pytest.approx(true.knee, rel=0.12)
    assert found.residual < 0.005
    assert found.points == len(SHOWN)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("true", [LARGE, SMALL])
def test_points_not_shown_are_predicted_with_noise(true: CostModel, seed: int) -> None:
    found = fit(points(true, SHOWN, noise=0.01, seed=seed))
    errors = [found.step_seconds(c, k) / true.step_seconds(c, k) - 1 for c, k in HIDDEN]
    assert max(map(abs, errors)) < 0.06


def test_a_step_of_another_form_is_predicted_within_the_bar() -> None:
    """A roofline with a corner, launches and KV reads, padding to eights: not the model's own form."""

    def seconds(c: int, k: int) -> float:
        n = -(-c * (k + 1) // 8) * 8 if c > 1 else c * (k + 1)
        read, compute = 3.6e-3, 2 * 8.2e9 * n / 620e12
        target = max(read, compute) + 0.15 * min(read, compute) + 0.9e-3 + c * 350 * 147456 / 4e12 + 3e-6 * n
        return target + (0.35e-3 + k * 0.25e-3 + 2e-6 * k * c if k else 0.0)

    found = fit(Point(c, k, seconds(c, k)) for c, k in SHOWN)
    assert max(abs(found.step_seconds(c, k) / seconds(c, k) - 1) for c, k in HIDDEN) < 0.10


def test_one_number_of_draft_tokens_at_two_concurrencies_is_enough() -> None:
    true = replace(LARGE, knee=math.inf, draft_fixed=0.0)
    found = fit(points(true, [(1, 0), (8, 0), (1, 3), (8, 3)]))
    assert found.residual < 1e-6
    assert found.draft_fixed == 0.0
    assert found.speedup(4, 3, 2.4) == pytest.approx(true.speedup(4, 3, 2.4), rel=1e-3)


@pytest.mark.parametrize(
    "shown",
    [
        [],
        [(1, 0), (8, 0), (64, 0)],
        [(8, 0), (1, 3), (8, 3)],
        [(1, 0), (8, 0), (8, 1), (8, 3)],
    ],
)
def test_too_few_points_are_refused(shown: list[tuple[int, int]]) -> None:
    with pytest.raises(UserError, match="too few to fit a cost model") as caught:
        fit(points(LARGE, shown))
    assert caught.value.code == Exit.UNKNOWN
    assert "concurrency 8,1" in caught.value.fix


def test_a_drafted_token_may_cost_more_than_a_request() -> None:
    """Steps of a tiny pair in a real engine on a CPU core, where every token is paid for in full."""
    shown = [Point(1, 0, 0.0250), Point(8, 0, 0.0358), Point(1, 3, 0.0869), Point(8, 3, 0.1587)]
    found = fit(shown)
    assert found.residual < 1e-6
    assert found.per_draft_token > found.per_request > 0


def test_no_parameter_is_negative_whatever_was_measured() -> None:
    """A drafter that seems to cost nothing: noise, not a negative cost."""
    shown = [Point(1, 0, 5e-3), Point(8, 0, 4.9e-3), Point(1, 3, 4.8e-3), Point(8, 3, 5.1e-3)]
    found = fit(shown)
    parts = (found.floor, found.per_request, found.per_draft_token, found.draft_pass, found.draft_fixed)
    assert min(parts) >= 0
    assert found.residual < 0.05


def test_break_even_and_parts_are_those_of_a_step() -> None:
    parts = LARGE.parts(32, 3)
    assert sum(parts.values()) == pytest.approx(LARGE.step_seconds(32, 3))
    assert parts["drafting"] == pytest.approx(4e-4 + 3 * 2.4e-4)
    needed = LARGE.break_even(32, 3)
    assert needed > 1
    assert LARGE.speedup(32, 3, needed) == pytest.approx(1.0)
    assert LARGE.tokens_per_second(32, 3, 2.0) == pytest.approx(64 / LARGE.step_seconds(32, 3))
    assert Point.of_rate(32, 3, LARGE.tokens_per_second(32, 3, 2.0), 2.0).step_seconds == pytest.approx(
        LARGE.step_seconds(32, 3)
    )


def test_the_best_number_of_draft_tokens_falls_with_the_batch() -> None:
    rates = (0.7, 0.45, 0.28, 0.18, 0.11)
    best = [LARGE.best(c, rates)[0] for c in (1, 32, 64, 256)]
    assert best[0] >= 3
    assert best == sorted(best, reverse=True)
    assert best[-1] < best[0]
    assert SMALL.best(32, (0.05, 0.0))[0] == 0


def test_further_positions_are_accepted_as_often_as_the_last_known() -> None:
    assert tokens_per_step((0.8, 0.4), 2) == pytest.approx(2.2)
    assert tokens_per_step((0.8, 0.4), 4) == pytest.approx(1 + 0.8 + 0.4 + 0.2 + 0.1)
    assert tokens_per_step((0.5,), 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert tokens_per_step((0.8, 0.4), 1) == pytest.approx(1.8)
    assert tokens_per_step((), 3) == 1.0
    assert tokens_per_step((0.0, 0.0), 3) == 1.0


def test_json_has_no_infinity() -> None:
    assert SMALL.as_dict()["knee"] is None
    assert LARGE.as_dict()["knee"] == 160.0
