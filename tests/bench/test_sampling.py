"""The distribution test: quiet on equal samplers, loud on the ways an engine can get sampling wrong."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from draftsmith.bench.load import Pass, Request
from draftsmith.bench.sampling import ALPHA, SamplingTest, compare_scores, compare_tokens, draw, judge
from draftsmith.capture.prompts import Prompt
from draftsmith.engine.client import EngineClient
from draftsmith.ui import QuietUi

sys.path.insert(0, str(Path(__file__).parent))
from fake_endpoint import FakeEndpoint

VOCAB, PROMPTS, COUNT, PLACES = 200, 12, 32, 6


def sampler(seed: int, temperature: float = 1.0, noise: bool = False, shift: float = 0.0) -> dict[str, list[list[int]]]:
    """Answers of a made-up model: each prompt and place has logits of its own (fixed), sampled at `temperature`."""
    fixed, rng = np.random.default_rng(99), np.random.default_rng(seed)
    found: dict[str, list[list[int]]] = {}
    for p in range(PROMPTS):
        logits = fixed.normal(0, 3, (PLACES, VOCAB)) / temperature
        logits[:, 0] += shift
        places = []
        for row in logits:
            weights = np.ones(VOCAB) if noise else np.exp(row - row.max())
            places.append(rng.choice(VOCAB, COUNT, p=weights / weights.sum()))
        found[f"p{p}"] = np.stack(places, axis=1).tolist()
    return found


def test_equal_samplers_are_called_equal() -> None:
    values = [compare_tokens(sampler(2 * i), sampler(2 * i + 1), seed=i) for i in range(5)]
    assert min(values) > ALPHA
    assert max(values) > 0.05


@pytest.mark.parametrize(
    "wrong", [{"noise": True}, {"temperature": 0.5}, {"temperature": 1.6}, {"shift": 6.0}], ids=lambda w: str(w)
)
def test_wrong_samplers_are_caught(wrong: dict[str, float]) -> None:
    assert compare_tokens(sampler(1, **wrong), sampler(2)) < ALPHA


def test_scores_tell_noise() -> None:
    rng = np.random.default_rng(3)
    fine = {f"p{i}": list(rng.normal(-1.5, 0.5, 16)) for i in range(8)}
    also = {f"p{i}": list(rng.normal(-1.5, 0.5, 16)) for i in range(8)}
    noise = {f"p{i}": list(rng.normal(-10.0, 1.0, 16)) for i in range(8)}
    assert compare_scores(fine, also)[0] > ALPHA
    p, difference = compare_scores(noise, fine)
    assert p < ALPHA and difference == pytest.approx(-8.5, abs=0.3)


def as_pass(answers: dict[str, list[list[int]]]) -> Pass:
    rows = [
        Request("s", p, 5, len(a), a, "", "length", 0.0, 1.0, 0.1, [], [], [1, 2])
        for p, some in answers.items()
        for a in some
    ]
    return Pass(rows, 1.0)


def test_verdict() -> None:
    test = SamplingTest(0.7)
    assert judge(as_pass(sampler(1)), as_pass(sampler(2)), None, test)["verdict"] == "same"
    found = judge(as_pass(sampler(1, noise=True)), as_pass(sampler(2)), None, test)
    assert (found["verdict"], found["answers"]) == ("different", [384, 384])
    assert json.loads(json.dumps(found)) == found


def test_every_answer_is_drawn_with_a_seed_of_its_own() -> None:
    prompts = [Prompt(f"p{i}", "set", [{"role": "user", "content": "x"}]) for i in range(3)]
    test = SamplingTest(0.7, prompts=2, count=4, tokens=3, at_once=4)

    async def go(url: str) -> Pass:
        async with EngineClient(url, "m") as client:
            return await draw(client, prompts, test, 50, QuietUi(), "drafter")

    with FakeEndpoint(ttft=0.0, itl=0.0) as server:
        drawn = asyncio.run(go(server.url))
        seeds = sorted(r["seed"] for r in server.requests)
    assert seeds == list(range(50, 58))
    assert {r["temperature"] for r in server.requests} == {0.7}
    assert [r.prompt_id for r in drawn.requests] == ["p0"] * 4 + ["p1"] * 4
