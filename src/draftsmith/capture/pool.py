"""Several servers as one: each request goes to the one with the least in flight, is tried again elsewhere when it fails,
and a server that dies is left alone for a while and then tried again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType

from draftsmith.engine.client import Answer, EngineClient, RefusedError
from draftsmith.errors import Exit, UserError
from draftsmith.ui import Ui

LEAVE_AFTER = 3
"""Failures in a row after which a server is left alone."""

LONGEST_REST = 30.0
"""Seconds a server is left alone at most before it is tried again."""


FAULTY_TRIES = 8
"""Answers that cannot be right, one after another to the same request, after which it is given up."""


class FaultyAnswer(Exception):  # noqa: N818 (it is the answer that is faulty)
    """An answer that arrived but cannot be right (another's ids); asked for again. The text is the reason."""


class Endpoint:
    """One server and how it has been doing."""

    def __init__(self, client: EngineClient, limit: int) -> None:
        self.client, self.limit = client, limit
        self.url = client.url
        self.in_flight = 0
        self.failures = 0
        self.rests_until = 0.0
        self.answered = 0
        self.verified = False
        self.mismatches = 0
        self.model = ""

    def free(self, now: float) -> bool:
        """Whether it may be given one more request: one at a time until its rendering has been compared with ours, and
        after a rest until one succeeds."""
        if self.rests_until > now:
            return False
        return self.in_flight < (1 if self.failures >= LEAVE_AFTER or not self.verified else self.limit)


class Pool:
    """Servers that run the same target.

    clients: ready ones, instead of urls. limit: requests in flight per server.
    patience: seconds for which no server may answer before capture stops.
    tries: how often one request is made before it is given up as this request's own fault.
    """

    def __init__(
        self,
        urls: Sequence[str],
        ui: Ui,
        *,
        clients: Sequence[EngineClient] = (),
        model: str | None = None,
        api_key: str | None = None,
        limit: int = 16,
        timeout: float = 600.0,
        patience: float = 300.0,
        backoff: float = 0.5,
        tries: int = 12,
    ) -> None:
        self.ui, self.patience, self.backoff, self.tries = ui, patience, backoff, tries
        made = clients or [
            EngineClient(u, model, api_key=api_key, timeout=timeout, retries=0, connections=limit + 4)
            for u in dict.fromkeys(urls)
        ]
        self.endpoints = [Endpoint(c, limit) for c in made]
        self.retries: Counter[str] = Counter()
        self._last_answer = time.monotonic()
        self._change = asyncio.Condition()

    @property
    def capacity(self) -> int:
        return sum(e.limit for e in self.endpoints)

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for e in self.endpoints:
            await e.client.close()

    async def _take(self) -> Endpoint:
        """The free server with the least in flight; waits for one. UserError when none has answered for `patience`."""
        while True:
            now = time.monotonic()
            free = [e for e in self.endpoints if e.free(now)]
            if free:
                chosen = min(free, key=lambda e: (e.in_flight / e.limit, e.failures, random.random()))
                chosen.in_flight += 1
                return chosen
            resting = [e.rests_until - now for e in self.endpoints if e.rests_until > now]
            if len(resting) == len(self.endpoints) and now - self._last_answer > self.patience:
                raise self._all_gone()
            async with self._change:
                try:
                    await asyncio.wait_for(self._change.wait(), min([1.0, *resting]) + 0.01)
                except TimeoutError:
                    continue

    def _all_gone(self) -> UserError:
        reasons = ", ".join(f"{r} ({n}x)" for r, n in self.retries.most_common(2))
        return UserError(
            f"no server answers: {', '.join(e.url for e in self.endpoints)} ({reasons})",
            f"none has answered for {self.patience:.0f} s",
            "start them again; the same command goes on from here, nothing that was stored is lost",
        )

    async def ask(self, request: Callable[[Endpoint], Awaitable[Answer]]) -> tuple[Endpoint, Answer]:
        """Make one request somewhere until it succeeds. `request` raises FaultyAnswer for an answer it does not believe.

        RefusedError (4xx) goes to the caller; so does a FaultyAnswer that comes every time."""
        started, failed, faulty = time.monotonic(), 0, 0
        while True:
            endpoint = await self._take()
            pause = 0.1 * self.backoff
            try:
                answer = await request(endpoint)
            except RefusedError:
                self._well(endpoint)
                raise
            except FaultyAnswer as e:
                faulty += 1
                self.retries[str(e)] += 1
                self._well(endpoint)
                if faulty >= FAULTY_TRIES:
                    raise
            except UserError as e:
                failed += 1
                self._failed(endpoint, e)
                # others get answers while this one never does: it is this request's own fault
                if failed >= self.tries and self._last_answer > started + 1.0:
                    raise FaultyAnswer("the server failed at every try") from None
                pause = min(self.backoff * 2 ** min(failed - 1, 6), 20.0)
            else:
                self._well(endpoint)
                return endpoint, answer
            finally:
                endpoint.in_flight -= 1
                async with self._change:
                    self._change.notify()
            await asyncio.sleep(pause * (0.5 + random.random()))

    async def greet(self) -> None:
        """Ask every server for its model once. UserError where none answers, or they serve different models."""

        async def one(endpoint: Endpoint) -> str | None:
            reason = ""
            for attempt in range(3):
                if attempt:
                    await asyncio.sleep(self.backoff * attempt * (0.5 + random.random()))
                try:
                    endpoint.model = await endpoint.client.model()
                    return None
                except UserError as e:
                    reason = e.what.rpartition("tries: ")[2] or e.what
            endpoint.failures, endpoint.rests_until = LEAVE_AFTER, time.monotonic() + 2 * self.backoff
            return reason

        reasons = await asyncio.gather(*(one(e) for e in self.endpoints))
        down = [(e.url, r) for e, r in zip(self.endpoints, reasons, strict=True) if r is not None]
        if len(down) == len(self.endpoints):
            raise UserError(
                f"no server answers at {', '.join(u for u, _ in down)}: {down[0][1]}",
                "the target's own answers come from it",
                "start it (draftsmith serve, or vllm serve), check address and port, or leave capture.endpoints empty",
                Exit.BAD_INPUT,
            )
        for url, reason in down:
            self.ui.warn(f"{url} does not answer ({reason[:120]}); it is tried again later")
        self._last_answer = time.monotonic()

    def _well(self, endpoint: Endpoint) -> None:
        if endpoint.failures >= LEAVE_AFTER:
            self.ui.note(f"{endpoint.url} answers again")
        endpoint.failures, endpoint.rests_until = 0, 0.0
        endpoint.answered += 1
        self._last_answer = time.monotonic()

    def _failed(self, endpoint: Endpoint, error: UserError) -> None:
        endpoint.failures += 1
        reason = error.what.rpartition("tries: ")[2] or error.what
        self.retries[reason[:80]] += 1
        over = endpoint.failures - LEAVE_AFTER
        if over >= 0:
            endpoint.rests_until = time.monotonic() + min(self.backoff * 2 ** min(over + 1, 10), LONGEST_REST)
            if over == 0:
                self.ui.warn(f"{endpoint.url} is left alone for now: {reason[:120]}")
