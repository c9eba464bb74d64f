"""Times of a pass, on a clock that only the server moves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from draftsmith.bench import load
from draftsmith.bench.load import Pass, send
from draftsmith.bench.result import intervals, speed_of
from draftsmith.capture.prompts import Prompt
from draftsmith.engine import client as client_module
from draftsmith.engine.client import EngineClient
from draftsmith.errors import UserError
from draftsmith.ui import QuietUi

PROMPTS = [Prompt(f"p{i}", "set", [{"role": "user", "content": f"q{i}"}]) for i in range(8)]


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def perf_counter(self) -> float:
        return self.now


class Events(httpx.AsyncByteStream):
    """Events given as (seconds to wait, tokens)."""

    def __init__(self, clock: Clock, plan: list[tuple[float, int]]) -> None:
        self.clock, self.plan = clock, plan

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for wait, tokens in self.plan:
            self.clock.now += wait
            choice = {"delta": {"content": "x" * tokens}, "token_ids": [7] * tokens}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
        yield b"data: [DONE]\n\n"


def run(monkeypatch: pytest.MonkeyPatch, answer: Any, clock: Clock, concurrency: int = 1) -> Pass:
    stub = SimpleNamespace(perf_counter=clock.perf_counter)
    monkeypatch.setattr(client_module, "time", stub)
    monkeypatch.setattr(load, "time", stub)

    async def go() -> Pass:
        async with EngineClient("http://engine", "m", transport=httpx.MockTransport(answer), backoff=0) as client:
            return await send(client, PROMPTS, concurrency, {"max_tokens": 7}, QuietUi())

    return asyncio.run(go())


def test_times_are_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    plan = [(0.4, 1), (0.1, 3), (0.1, 1), (0.3, 2)]
    done = run(monkeypatch, lambda request: httpx.Response(200, stream=Events(clock, plan)), clock)
    speed = speed_of([done], single=True)
    assert speed["tokens_per_second"] == pytest.approx(7 / 0.9, rel=1e-3)
    assert speed["ttft"]["p50"] == pytest.approx(0.4)
    assert speed["itl"]["p50"] == pytest.approx(0.1)
    assert speed["itl"]["p99"] == pytest.approx(0.3)
    assert speed["interval"] == pytest.approx([7.78, 7.78], abs=0.01)
    assert [r.prompt_id for r in done.requests] == [p.prompt_id for p in PROMPTS]
    # one prefill token, then 2, 0 and 1 accepted: 7 tokens in 4 target steps
    assert intervals(done.requests)["tokens_per_target_step"] == pytest.approx([1.75, 1.75])


def test_a_passing_fault_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(), []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        if len(calls) % 3 == 1:
            return httpx.Response(503, text="warming up")
        if len(calls) % 3 == 2:
            raise httpx.ConnectError("reset")
        return httpx.Response(200, stream=Events(clock, [(0.1, 7)]))

    done = run(monkeypatch, answer, clock)
    assert (len(done.requests), len(calls)) == (8, 24)


def test_refused_prompts_are_counted_and_too_many_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": "prompt of 9000 tokens is too long"}})

    with pytest.raises(UserError, match=r"refused 8 of 8 prompts.*9000"):
        run(monkeypatch, refuse, clock)


def test_a_pass_comes_back_from_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    clock = Clock()
    done = run(monkeypatch, lambda request: httpx.Response(200, stream=Events(clock, [(0.1, 2)])), clock, 3)
    done.save(tmp_path / "pass.json")
    assert Pass.load(tmp_path / "pass.json") == done
