"""Measure one way of serving (drafter, none, ngram): every prompt set at every concurrency, counters read around each.

A way's results lie in ways/<way>/; each pass is written when it ends, way.json last. A bench that was killed goes on
with the first pass that is missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from draftsmith.bench.load import Pass, send
from draftsmith.bench.sampling import SamplingTest, draw
from draftsmith.capture.prompts import Prompt
from draftsmith.engine.client import EngineClient
from draftsmith.engine.metrics import Counters, read_counters
from draftsmith.errors import UserError
from draftsmith.record import read_json, write_json
from draftsmith.ui import Ui

WARM_TOKENS = 16
SAMPLED = "sampled.json"
"""The short answers at a temperature, for the test of sampling/sampling.py."""
SEEDS = {"drafter": 0, "none": 1_000_000, "ngram": 2_000_000}
"""First seed of each way's short answers: the sides must not share their randomness."""
MIXED = "mixed"
"""Set name of the passes that take prompts of all sets in turn."""


@dataclass(frozen=True)
class Plan:
    """What is measured. prompts: set → prompts, in order. concurrency: the first one above 1 takes all prompts, set by
    set; 1 takes `single_prompts` of all sets in turn, shorter; every other takes a mixture."""

    prompts: dict[str, list[Prompt]]
    concurrency: list[int]
    max_tokens: int = 128
    single_prompts: int = 20
    single_max_tokens: int = 64
    temperature: float = 0.0
    repeats: int = 1
    sampling_test: SamplingTest | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def main(self) -> int:
        """The concurrency whose figures are the headline."""
        return next((c for c in self.concurrency if c > 1), self.concurrency[0])

    def mixture(self, count: int) -> list[Prompt]:
        """`count` prompts of all sets in turn."""
        longest = max(len(p) for p in self.prompts.values())
        turns = [p[i] for i in range(longest) for p in self.prompts.values() if i < len(p)]
        return turns[:count]

    def passes(self) -> list[tuple[str, int, str, list[Prompt], int]]:
        """(name, concurrency, set, prompts, max_tokens) of every pass, in order."""
        found = []
        for c in self.concurrency:
            for again in range(self.repeats):
                tail = f"-r{again}" if again else ""
                if c == self.main and c > 1:
                    found += [(f"c{c}-{s}{tail}", c, s, p, self.max_tokens) for s, p in self.prompts.items()]
                elif c == 1:
                    some = self.mixture(self.single_prompts)
                    found.append((f"c1-{MIXED}{tail}", 1, MIXED, some, self.single_max_tokens))
                else:
                    some = self.mixture(max(2 * c, self.single_prompts))
                    found.append((f"c{c}-{MIXED}{tail}", c, MIXED, some, self.max_tokens))
        return found

    def sampling(self, max_tokens: int) -> dict[str, Any]:
        found: dict[str, Any] = {"max_tokens": max_tokens, "temperature": self.temperature, **self.extra}
        if self.temperature > 0:
            found["seed"] = 0
        return found


@dataclass(frozen=True)
class Opened:
    """A server that is up. client: makes a client of it. info: what to record (ready_seconds, kv_tokens, command …).
    check: raises if the server has died meanwhile."""

    client: Callable[[], EngineClient]
    info: dict[str, Any]
    check: Callable[[], None] = lambda: None


class Opener(Protocol):
    """Starts the server of a way."""

    def __call__(self, way: str) -> AbstractContextManager[Opened]: ...


@dataclass(frozen=True)
class Measured:
    """One way's results. passes: name → Pass; counters: name → counts of that pass; info: of the server."""

    way: str
    passes: dict[str, Pass]
    counters: dict[str, Counters]
    info: dict[str, Any]
    foreign: int = 0
    """Tokens that the server answered to others while we measured."""


SETTLE = 3.0
"""Seconds at most that the last step's counts may take to reach the page after its answer has."""


async def counters_now(client: EngineClient, before: Counters | None = None, tokens: int = 0) -> Counters:
    """The server's counters now; with `before`, once they hold the `tokens` answered since (or SETTLE has passed)."""
    end = time.monotonic() + SETTLE
    while True:
        found = read_counters(await client.metrics())
        late = before is not None and 0 <= found.tokens - before.tokens < tokens
        if not late or time.monotonic() > end:
            return found
        await asyncio.sleep(0.05)


async def _measure(opened: Opened, way: str, plan: Plan, folder: Path, ui: Ui) -> None:
    async with opened.client() as client:
        todo = [p for p in plan.passes() if not (folder / f"{p[0]}.json").is_file()]
        if todo:
            warm = plan.mixture(min(max(plan.concurrency), 8))
            before = await counters_now(client)
            warmed = await send(client, warm, len(warm), plan.sampling(WARM_TOKENS), ui, f"{way}: warm-up")
            await counters_now(client, before, warmed.tokens)
        for name, concurrency, set_name, prompts, max_tokens in todo:
            title = f"{way}: {set_name}, {len(prompts)} prompts, {concurrency} at once"
            before = await counters_now(client)
            try:
                done = await send(client, prompts, concurrency, plan.sampling(max_tokens), ui, title)
            except UserError:
                opened.check()  # a dead engine's own reason is worth more than "did not answer"
                raise
            counts = (await counters_now(client, before, done.tokens)).since(before)
            write_json(folder / f"{name}.counters.json", counts.as_dict())
            done.save(folder / f"{name}.json")
            ui.note(f"  {way} {set_name} at {concurrency}: {done.tokens / done.seconds:.1f} tokens/s")
        if plan.sampling_test is not None and not (folder / SAMPLED).is_file():
            # Short prompts: the answers are a few tokens, so nearly all of the cost is reading the prompt.
            prompts = sorted(plan.mixture(10**9), key=lambda p: len(p.first_user))
            drawn = await draw(client, prompts, plan.sampling_test, SEEDS.get(way, 3_000_000), ui, way)
            drawn.save(folder / SAMPLED)


def load_way(folder: Path, way: str, plan: Plan) -> Measured | None:
    """A finished way's results, None if it is not finished."""
    home = folder / "ways" / way
    if not (home / "way.json").is_file():
        return None
    names = [p[0] for p in plan.passes()]
    passes = {n: Pass.load(home / f"{n}.json") for n in names}
    counters = {n: Counters.from_dict(read_json(home / f"{n}.counters.json")) for n in names}
    foreign = sum(max(counters[n].tokens - passes[n].tokens, 0) for n in names)
    return Measured(way, passes, counters, read_json(home / "way.json"), foreign)


def measure_way(
    opener: Opener,
    way: str,
    plan: Plan,
    folder: Path,
    ui: Ui,
    after: Callable[[EngineClient], Awaitable[None]] | None = None,
) -> Measured:
    """Measure one way, or load it if it is done. after: more to ask while its server is up."""
    done = load_way(folder, way, plan)
    if done and after is None:
        ui.note(f"{way}: already measured")
        return done
    home = folder / "ways" / way
    home.mkdir(parents=True, exist_ok=True)
    with opener(way) as opened:

        async def all_of_it() -> None:
            if done is None:
                await _measure(opened, way, plan, home, ui)
                write_json(home / "way.json", opened.info)
            if after is not None:
                async with opened.client() as client:
                    await after(client)

        asyncio.run(all_of_it())
    found = load_way(folder, way, plan)
    assert found is not None
    return found
