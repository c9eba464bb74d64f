"""The points of serve_gpu.py's part large: what is measured, how a speed without prefill is taken, and what the cost model
says of the points that it was not shown."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

from draftsmith.bench.cost import CostModel, Point, fit, tokens_per_step
from draftsmith.bench.load import Pass, send
from draftsmith.bench.ways import Opened, counters_now
from draftsmith.capture.prompts import Prompt, make_prompt
from draftsmith.engine.client import EngineClient
from draftsmith.engine.metrics import Counters
from draftsmith.errors import UserError
from draftsmith.ui import QuietUi, Ui

MID, HIGH, LOW = (0.70, 0.45, 0.28, 0.18, 0.11), (0.85, 0.70, 0.58), (0.45, 0.18, 0.07)
LARGE = {
    "none": (0, ()),
    "k3": (3, MID[:3]),
    "k5": (5, MID),
    "k3_high": (3, HIGH),
    "k3_low": (3, LOW),
    "k1": (1, MID[:1]),
}
"""name → (draft tokens, acceptance per position, unconditional)."""
FIT = {"none": (1, 8, 64), "k3": (1, 8, 64), "k5": (1, 32, 64)}
"""The points that the cost model may see, chosen before anything was measured."""
LATE = ("k1",)
"""Started when the others are done and gone: six of them and their KV caches do not fit at once."""
BURSTS = {1: 4, 2: 3}
"""How often so many are sent at once: few requests need more drafts for the acceptance to come out as asked. Others: 2."""
BAR = 0.10
EVENT_TOKENS = 8
"""Tokens of a stream's event at part large (--stream-interval): the front end must not be what is measured."""


class Clock:
    """What is left of --seconds."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def steady(done: Pass) -> tuple[float, float]:
    """(tokens per second, seconds) while all requests were running: from the last one's first token to the first one's
    last. Events hold several tokens, so each request's count is taken between its events by line."""
    tracks = []
    for r in done.requests:
        total, track = 0, []
        for at, n in r.events:
            total += n
            track.append((r.start + at, total))
        tracks.append(track)
    start = max(t[0][0] for t in tracks)
    end = min(t[-1][0] for t in tracks)
    if end <= start:
        raise UserError("the requests did not run at the same time", "", "give more --max-tokens")
    return sum(_at(t, end) - _at(t, start) for t in tracks) / (end - start), end - start


def _at(track: list[tuple[float, int]], moment: float) -> float:
    for (t0, n0), (t1, n1) in pairwise(track):
        if t0 <= moment <= t1:
            return n0 + (n1 - n0) * (moment - t0) / (t1 - t0) if t1 > t0 else float(n1)
    return float(track[-1][1])


def talk(count: int) -> list[Prompt]:
    """`count` prompts, all different, of about as many tokens as each other."""
    words = ["river", "stone", "light", "paper", "cloud", "garden", "music", "winter", "silver", "bridge"]
    made = []
    for i in range(count):
        text = " ".join(words[(i * 7 + j * (i % 9 + 1)) % len(words)] for j in range(96))
        made.append(make_prompt([{"role": "user", "content": f"{i} {text}"}], "random"))
    return made


async def measure_point(
    client: EngineClient, c: int, bursts: int, max_tokens: int, ui: Ui
) -> tuple[float, float, Counters]:
    """(tokens per second while all run, seconds of it, counts of the whole) of `bursts` times `c` requests at once."""
    sampling = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    tokens = seconds = 0.0
    before = await counters_now(client)
    answered = 0
    for _ in range(bursts):
        done = await send(client, talk(c), c, sampling, ui)
        if done.refused or len(done.requests) != c or any(r.tokens != max_tokens for r in done.requests):
            raise UserError(f"{len(done.requests)} of {c} answers, refused: {done.refused}", "", "see the engine's log")
        rate, length = steady(done)
        tokens, seconds, answered = tokens + rate * length, seconds + length, answered + done.tokens
    counts = (await counters_now(client, before, answered)).since(before)
    return tokens / seconds, seconds, counts


def measure_large(
    name: str, opened: Opened, clock: Clock, sizes: list[int], max_tokens: int, rows: list[dict[str, Any]]
) -> None:
    """All concurrencies of one server; a row each is added to `rows` as it is measured."""
    ui = QuietUi()
    k, rates = LARGE[name]

    async def go() -> None:
        async with opened.client() as client:
            warm = {"max_tokens": 4 * EVENT_TOKENS, "temperature": 0.0, "ignore_eos": True}
            await send(client, talk(max(sizes)), max(sizes), warm, ui)
            for c in sizes:
                if clock.left < 15:
                    say(f"{name} at {c}: left out for want of time")
                    continue
                await send(client, talk(c), c, warm, ui)
                rate, seconds, counts = await measure_point(client, c, BURSTS.get(c, 2), max_tokens, ui)
                length = counts.length if k else 1.0
                rows.append(
                    {
                        "config": name,
                        "draft_tokens": k,
                        "rates": list(rates),
                        "concurrency": c,
                        "tokens_per_second": round(rate, 2),
                        "seconds": round(seconds, 2),
                        "drafts": counts.drafts,
                        "tokens_per_step_asked": round(1 + sum(rates), 4),
                        "tokens_per_step": round(length, 4),
                        "acceptance_per_position": [round(r, 4) for r in counts.rates],
                        "step_ms": round(1000 * c * length / rate, 4),
                    }
                )
                say(f"{name} at {c}: {rate:.1f} tokens/s, {length:.2f} tokens per step, step {c * length / rate:.5f} s")

    asyncio.run(go())


def with_speedups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    plain = {r["concurrency"]: r["tokens_per_second"] for r in rows if r["config"] == "none"}
    return [
        r | {"speedup": round(r["tokens_per_second"] / plain[r["concurrency"]], 4)} if r["concurrency"] in plain else r
        for r in rows
    ]


def fit_rows(rows: list[dict[str, Any]]) -> CostModel:
    """The model, fitted on the points of FIT alone."""
    seen = [r for r in rows if r["concurrency"] in FIT.get(r["config"], ())]
    return fit(Point(r["concurrency"], r["draft_tokens"], r["step_ms"] / 1000) for r in seen)


def judged(rows: list[dict[str, Any]], model: CostModel) -> list[dict[str, Any]]:
    """Every row with what the model says of it, by the acceptance that was asked for, and the errors."""
    out = []
    for r in with_speedups(rows):
        c, k = r["concurrency"], r["draft_tokens"]
        length = tokens_per_step(r["rates"], k) if k else 1.0
        said = model.tokens_per_second(c, k, length)
        row = r | {
            "fitted": c in FIT.get(r["config"], ()),
            "predicted_tokens_per_second": round(said, 2),
            "error": round(said / r["tokens_per_second"] - 1, 4),
        }
        if k and "speedup" in r:
            speedup = model.speedup(c, k, length)
            row |= {"predicted_speedup": round(speedup, 4), "speedup_error": round(speedup / r["speedup"] - 1, 4)}
        out.append(row)
    return out


def best_by_size(rows: list[dict[str, Any]], model: CostModel) -> dict[str, dict[str, Any]]:
    """concurrency → the fastest number of draft tokens at the middle acceptance (0 = no drafter): as measured, as the
    model says, and how much is lost by taking the model's word."""
    ks = {name: k for name, (k, rates) in LARGE.items() if rates == MID[:k]}
    speeds: dict[int, dict[int, float]] = {}
    for r in rows:
        if r["config"] in ks:
            speeds.setdefault(r["concurrency"], {})[r["draft_tokens"]] = r["tokens_per_second"]
    found = {}
    for c, by in sorted(speeds.items()):
        said = {k: model.tokens_per_second(c, k, tokens_per_step(MID, k) if k else 1.0) for k in by}
        measured, predicted = max(by, key=lambda k: by[k]), max(said, key=lambda k: said[k])
        found[str(c)] = {
            "of": sorted(by),
            "measured": measured,
            "predicted": predicted,
            "loss": round(1 - by[predicted] / by[measured], 4),
        }
    return found
