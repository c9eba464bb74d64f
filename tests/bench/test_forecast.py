"""What is said of points nobody measured: tune's predictions, and why an accepted drafter is slower."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith.bench.cost import CostModel, tokens_per_step
from draftsmith.bench.forecast import around, forecast, points_of, why_slower
from draftsmith.bench.markdown import _tune
from draftsmith.bench.tune import sweep
from draftsmith.bench.ways import Opened, Opener, Plan
from draftsmith.capture.prompts import make_prompt
from draftsmith.diagnose.signals import slower
from draftsmith.engine.client import EngineClient
from draftsmith.ui import QuietUi

sys.path.insert(0, str(Path(__file__).parent))
from fake_endpoint import FakeEndpoint

MODEL = CostModel(
    floor=4.4e-3, knee=160.0, per_request=1.2e-5, per_draft_token=7e-6, draft_pass=2.4e-4, draft_fixed=4e-4
)
TINY = CostModel(
    floor=1.9e-3, knee=float("inf"), per_request=4e-5, per_draft_token=5e-6, draft_pass=9e-4, draft_fixed=5e-4
)
RATES = [0.7, 0.45, 0.28, 0.18, 0.11]
SMOLLM2 = [0.340, 0.130, 0.055]


def made_bench(model: CostModel, k: int, rates: list[float], sizes: list[int]) -> dict[str, Any]:
    """bench.json as far as it is read here, with the speeds of `model`."""
    length = tokens_per_step(rates, k)
    ours = {str(c): model.tokens_per_second(c, k, length) for c in sizes}
    plain = {str(c): model.tokens_per_second(c, 0) for c in sizes}
    return {
        "tokens_per_second": {"none": plain, "drafter": ours},
        "acceptance_per_position": rates[:k],
        "acceptance_length": length,
        "tokens_per_target_step": length,
        "ways": {
            "none": {"speed": {c: {"tokens_per_second": r} for c, r in plain.items()}},
            "drafter": {
                "speed": {c: {"tokens_per_second": r} for c, r in ours.items()},
                "by_concurrency": {c: {"acceptance_length": length} for c in ours},
                "server": {"speculative": {"num_speculative_tokens": k}},
            },
        },
    }


def made_tune(model: CostModel, ks: list[int], sizes: list[int]) -> dict[str, Any]:
    rows = {}
    for c in sizes:
        rows[str(c)] = {
            "tokens_per_second": {str(k): model.tokens_per_second(c, k, tokens_per_step(RATES, k)) for k in ks},
            "acceptance_length": {str(k): tokens_per_step(RATES, k) for k in ks},
            "none": model.tokens_per_second(c, 0),
            "best": 1,
        }
    return {"num_speculative_tokens": ks, "by_concurrency": rows}


def test_every_measured_speed_is_a_point() -> None:
    bench = made_bench(MODEL, 3, RATES, [1, 8])
    tune = made_tune(MODEL, [1, 3, 5], [1, 8])
    found = points_of(bench | {"tune": tune})
    assert [(p.concurrency, p.draft_tokens) for p in found] == [
        (1, 0), (1, 1), (1, 3), (1, 5), (8, 0), (8, 1), (8, 3), (8, 5)
    ]  # fmt: skip
    for p in found:
        assert p.step_seconds == pytest.approx(MODEL.step_seconds(p.concurrency, p.draft_tokens))
    assert points_of({"tokens_per_second": {"none": {"8": 3.0}}}) == []


def test_tune_predicts_what_lies_between_and_marks_it() -> None:
    sizes = [1, 8, 64]
    bench, tune = made_bench(MODEL, 3, RATES, sizes), made_tune(MODEL, [1, 5], sizes)
    tune["predicted"] = forecast(tune, points_of(bench | {"tune": tune}), RATES, sizes)
    rows = tune["predicted"]["by_concurrency"]
    assert list(rows) == ["1", "2", "4", "8", "16", "32", "64", "128"]
    assert set(rows["8"]["tokens_per_second"]) == {"2", "3", "4"}  # 1 and 5 were measured
    assert "none" not in rows["8"]
    for c in (1, 2, 16, 64, 128):
        for k, rate in rows[str(c)]["tokens_per_second"].items():
            true = MODEL.tokens_per_second(c, int(k), tokens_per_step(RATES, int(k)))
            assert rate == pytest.approx(true, rel=0.03)
    assert rows["1"]["best"] == 4
    assert rows["1"]["best_is_predicted"]
    page = _tune(tune)
    two = next(line for line in page.splitlines() if line.startswith("| 2 |"))
    assert two.count("~") == 7  # five numbers of draft tokens, no drafter, best
    one = next(line for line in page.splitlines() if line.startswith("| 1 |"))
    assert one.count("~") == 4
    assert "predicted by the cost model, not measured" in page


def test_tune_without_points_enough_says_so_and_shows_what_was_measured() -> None:
    bench, tune = made_bench(MODEL, 3, RATES, [8]), made_tune(MODEL, [1, 3], [8])
    tune["predicted"] = forecast(tune, points_of(bench | {"tune": tune}), RATES, [8])
    assert set(tune["predicted"]) == {"why_not"}
    page = _tune(tune)
    assert "~" not in page
    assert "Nothing is predicted" in page
    assert "| 8 |" in page


def test_around_goes_a_step_beyond() -> None:
    assert around([8, 1]) == [1, 2, 4, 8, 16]
    assert around([6]) == [1, 2, 4, 6, 8]


def test_a_drafter_that_cannot_pay_is_told_what_it_would_need() -> None:
    """The figures of SmolLM2 on a GPU: 1.52 tokens per step and slower at every concurrency."""
    bench = made_bench(TINY, 3, SMOLLM2, [1, 8, 32])
    evidence, advice = why_slower(bench)
    needs = TINY.break_even(32, 3)
    has = tokens_per_step(SMOLLM2, 3)
    assert (
        f"{has / needs:.2f}× the speed of no drafter at 32 at once; it breaks even at {needs:.2f} tokens per step and has "
        f"{has:.2f}" in evidence
    )
    share = (3 * 9e-4 + 5e-4) / TINY.step_seconds(1, 0)
    assert any(f"({share:.0%} of a target step)" in line for line in evidence)
    assert "no number of draft tokens is predicted to pay" in advice
    cause = next(iter(slower(bench)))
    assert cause.id == "speed.cost"
    assert cause.evidence == evidence
    assert " at once drafting" not in cause.cause  # everywhere


def test_slower_only_in_a_large_batch_is_told_with_the_better_number() -> None:
    bench = made_bench(MODEL, 5, RATES, [1, 128])
    ratio = bench["tokens_per_second"]["drafter"]["128"] / bench["tokens_per_second"]["none"]["128"]
    assert ratio < 0.97 < bench["tokens_per_second"]["drafter"]["1"] / bench["tokens_per_second"]["none"]["1"]
    cause = next(iter(slower(bench)))
    assert "at 128 at once drafting costs more" in cause.cause
    assert "at 1 at once " in cause.fix


def test_a_running_server_beside_its_baseline_is_explained_as_well() -> None:
    bench = made_bench(TINY, 3, SMOLLM2, [1, 8, 32])
    expected = why_slower(bench)
    for group in (bench["tokens_per_second"], bench["ways"]):
        group["endpoint"] = group.pop("drafter")
    del bench["ways"]["endpoint"]["server"]
    bench["ways"]["endpoint"]["acceptance_per_position"] = SMOLLM2
    assert why_slower(bench) == expected
    assert next(iter(slower(bench))).evidence == expected[0]


def test_a_drafter_that_pays_is_no_cause_and_old_figures_still_are() -> None:
    assert not list(slower(made_bench(MODEL, 3, RATES, [1, 8])))
    old = {
        "tokens_per_target_step": 1.52,
        "tokens_per_second": {"none": {"32": 6783.0}, "drafter": {"32": 5041.0}},
    }
    cause = next(iter(slower(old)))
    assert cause.evidence == ["0.74× the speed of no drafter at 32 at once"]
    assert "no drafter for a target this small" in cause.fix


def test_a_sweep_measures_what_was_asked_and_predicts_the_rest(tmp_path: Path) -> None:
    """Servers whose step takes 6 ms and 3 ms more for each draft token, whatever the batch."""

    def opener(k: int) -> Opener:
        @contextlib.contextmanager
        def opened(way: str) -> Iterator[Opened]:
            drafts = way == "drafter"
            seconds = 0.006 + (0.003 * k if drafts else 0.0)
            pattern = [min(k, 1)] if drafts else None
            with FakeEndpoint(pattern=pattern, k=k, ttft=seconds, itl=seconds) as server:
                client: Callable[[], EngineClient] = lambda: EngineClient(server.url, "fake")  # noqa: E731
                yield Opened(client, {"speculative": {"num_speculative_tokens": k} if drafts else None})

        return opened

    prompts = [make_prompt([{"role": "user", "content": f"question {i}"}], "p") for i in range(4)]
    plan = Plan({"p": prompts}, [2, 1], max_tokens=9, single_prompts=2, single_max_tokens=9)
    known = CostModel(
        floor=6e-3, knee=float("inf"), per_request=0.0, per_draft_token=0.0, draft_pass=3e-3, draft_fixed=0.0
    )
    bench = made_bench(known, 3, [0.9, 0.0, 0.0], [2, 1])
    tune = sweep(opener, [1, 5], plan, bench, tmp_path, QuietUi())
    measured, rows = tune["by_concurrency"], tune["predicted"]["by_concurrency"]
    assert set(measured["2"]["tokens_per_second"]) == {"1", "5"}
    assert measured["2"]["none"] == bench["tokens_per_second"]["none"]["2"]
    assert set(rows) == {"1", "2", "4"}
    assert set(rows["2"]["tokens_per_second"]) == {"2", "3", "4"}
    assert "none" not in rows["2"]
    assert rows["4"]["none"] > measured["2"]["none"]
    assert tune["predicted"]["model"]["points"] == 2 * 4  # none, 1, 3 and 5 draft tokens at two concurrencies
