"""Figures from counts, marks, buckets, conditions, intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.bench.asserts import check, names
from draftsmith.bench.buckets import bucket_of, by_bucket, language_of
from draftsmith.bench.figures import acceptance, counts_of_steps
from draftsmith.bench.forecast import best_of
from draftsmith.bench.load import Request
from draftsmith.bench.lossless import bf16_step, first_difference
from draftsmith.bench.samples import accepted_marks, pieces
from draftsmith.bench.stats import paired_ratio_interval, rate_interval, ratio_interval
from draftsmith.engine.metrics import Counters
from draftsmith.errors import UserError


def request(tokens: int, steps: list[tuple[int, int]], events: list[tuple[float, int]], prompt: int = 10) -> Request:
    return Request("set", "p", prompt, tokens, list(range(tokens)), "", "length", 0.0, 1.0, 0.1, events, steps)


def test_the_prototypes_figures() -> None:
    # prototype.md: 5,806 drafts of 3 for 9,004 tokens at .341 .131 .058
    per = [round(5806 * r) for r in (0.341, 0.131, 0.058)]
    found = acceptance(Counters("vllm", 5806, 3 * 5806, sum(per), per, 9004))
    assert found["acceptance_length"] == pytest.approx(1.53, abs=0.005)
    assert found["tokens_per_target_step"] == pytest.approx(9004 / (9004 - sum(per)), abs=1e-4)
    assert found["acceptance_conditional"] == [0.341, pytest.approx(0.384, abs=1e-3), pytest.approx(0.443, abs=1e-3)]


def test_no_drafts_is_one_token_per_step() -> None:
    assert acceptance(Counters("vllm", tokens=100))["tokens_per_target_step"] == 1.0
    assert acceptance(Counters("vllm"))["tokens_per_target_step"] is None


@given(st.lists(st.lists(st.tuples(st.just(3), st.integers(0, 3)), max_size=20), max_size=10))
def test_steps_count_as_the_server_counts(steps: list[list[tuple[int, int]]]) -> None:
    counts = counts_of_steps(steps, tokens=1)
    flat = [a for request_steps in steps for _, a in request_steps]
    assert counts.drafts == len(flat)
    assert counts.accepted == sum(flat) == sum(counts.accepted_per_position)
    assert counts.accepted_per_position == sorted(counts.accepted_per_position, reverse=True)


def test_marks_by_steps_and_by_events() -> None:
    by_steps = request(7, [(3, 2), (3, 0), (3, 3)], [(0.1, 7)])
    assert accepted_marks(by_steps) == [False, True, True, False, False, True, True]
    by_events = request(5, [], [(0.1, 1), (0.2, 3), (0.3, 1)])
    assert accepted_marks(by_events) == [False, True, True, False, False]
    assert accepted_marks(request(5, [], [(0.1, 1)])) is None


def test_pieces_join_to_the_text_also_inside_a_character() -> None:
    raw = "aé€b".encode()
    texts = pieces(list(range(len(raw))), lambda ids: raw[: len(ids)].decode(errors="replace"))
    assert "".join(texts) == "aé€b"
    assert texts == ["a", "", "é", "", "", "€", "b"]


def test_buckets_count_each_draft_where_it_was_made() -> None:
    found = by_bucket([request(9, [(3, 3), (3, 0), (3, 0)], [], prompt=124)])
    assert {k: v["drafts"] for k, v in found.items()} == {"0-127": 1, "128-255": 2}
    assert [bucket_of(n) for n in (0, 127, 128, 200_000)] == ["0-127", "0-127", "128-255", "131072-"]


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Hello there", "latin"),
        ("Привет", "cyrillic"),
        ("你好世界", "chinese"),
        ("日本語のテキスト", "japanese"),
        ("안녕하세요", "korean"),
        ("1 + 1 = 2", "none"),
    ],
)
def test_language(text: str, language: str) -> None:
    assert language_of(text) == language


def test_steps_of_bf16_and_first_difference() -> None:
    assert (bf16_step(20.0), bf16_step(-1.0), bf16_step(31.9)) == (0.125, 2**-7, 0.125)
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


BENCH: dict[str, Any] = {
    "tokens_per_target_step": 1.52,
    "acceptance_length": 1.53,
    "acceptance_per_position": [0.34, 0.13],
    "drafts": 10,
    "lossless": True,
    "ties": 0,
    "sets": {"gsm8k": {"tokens_per_target_step": 1.7, "acceptance_per_position": [0.43]}},
    "tokens_per_second": {"drafter": {"1": 22.8}, "none": {"1": 20.0}},
    "speedup": {"1": 1.14},
}


def test_conditions_hold_or_not() -> None:
    rows = check(["tokens_per_target_step>=1.4, speedup_1>=1.3", "lossless==true", "gsm8k.acceptance_0>0.4"], BENCH)
    assert [r["held"] for r in rows] == [True, False, True, True]
    assert names(BENCH)["tokens_per_second_none_1"] == 20.0
    for verdict, held in (("same", True), ("different", False)):
        assert check(["sampling==true"], BENCH | {"sampling": {"verdict": verdict}})[0]["held"] is held
    assert check(["sampling==true"], BENCH)[0]["held"] is False, "what was not tested does not hold"


def test_conditions_that_cannot_be_read() -> None:
    with pytest.raises(UserError, match="no condition"):
        check(["tokens_per_target_step is fine"], BENCH)
    with pytest.raises(UserError) as e:
        check(["token_per_target_step>=1"], BENCH)
    assert "tokens_per_target_step" in e.value.fix


def test_intervals_cover_the_truth() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for seed in range(60):
        steps = rng.integers(20, 60, 40).astype(float)
        tokens = steps * 1.5 + rng.normal(0, 5, 40)
        bounds = ratio_interval(list(tokens), list(steps), seed)
        assert bounds is not None
        held += bounds[0] <= 1.5 <= bounds[1]
    assert held >= 52


def test_pairing_narrows_the_interval() -> None:
    rng = np.random.default_rng(1)
    tokens = np.full(20, 64.0)
    plain = rng.uniform(1.0, 5.0, 20)
    ours = plain / 1.3
    paired = paired_ratio_interval((list(tokens), list(ours)), (list(tokens), list(plain)))
    assert paired == pytest.approx([1.3, 1.3])
    assert ratio_interval([1, 2], [1, 1]) is None


def test_rate_interval_of_an_even_stream() -> None:
    events = [(i * 0.1, 1) for i in range(200)]
    assert rate_interval(events, 20.0) == pytest.approx([10.0, 10.0], rel=0.02)


def test_best_number_of_draft_tokens() -> None:
    assert best_of({1: 100.0, 2: 119.0, 3: 120.0, 5: 90.0}, 80.0) == 2
    assert best_of({1: 70.0, 3: 79.0}, 80.0) == 0
