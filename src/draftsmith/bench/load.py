"""Send prompts to a server, so many at once, and keep what came back with its times."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.capture.prompts import Prompt
from draftsmith.engine.client import EngineClient, RefusedError, Stream
from draftsmith.errors import Exit, UserError
from draftsmith.record import atomic_write
from draftsmith.ui import Ui

MAX_REFUSED = 0.1
"""Share of the requests that a server may refuse (a prompt longer than its context) before the measurement stops."""


@dataclass(frozen=True)
class Request:
    """One answered prompt. start, seconds: when it was sent (since the run began) and how long it took.
    events: [seconds since start, tokens] of each event of the stream. steps: [drafted, accepted] per verifying step,
    where the server counts per request."""

    set: str
    prompt_id: str
    prompt_tokens: int
    tokens: int
    token_ids: list[int]
    text: str
    finish_reason: str
    start: float
    seconds: float
    ttft: float
    events: list[tuple[float, int]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Pass:
    """All requests of one set at one concurrency; seconds: wall clock of the whole."""

    requests: list[Request]
    seconds: float
    refused: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(r.tokens for r in self.requests)

    def save(self, path: Path) -> None:
        """Write as one JSON file, atomically."""
        atomic_write(path, json.dumps(asdict(self), ensure_ascii=False) + "\n")

    @staticmethod
    def load(path: Path) -> Pass:
        raw = json.loads(path.read_text(encoding="utf-8"))
        requests = [
            Request(
                **r
                | {
                    "events": [tuple(e) for e in r["events"]],
                    "steps": [tuple(s) for s in r["steps"]],
                }
            )
            for r in raw["requests"]
        ]
        return Pass(requests, raw["seconds"], raw["refused"])


def _request(prompt: Prompt, stream: Stream, start: float) -> Request:
    return Request(
        set=prompt.source,
        prompt_id=prompt.prompt_id,
        prompt_tokens=len(stream.prompt_token_ids) or stream.usage.get("prompt_tokens", 0),
        tokens=stream.tokens,
        token_ids=stream.token_ids,
        text=stream.text,
        finish_reason=stream.finish_reason,
        start=round(start, 4),
        seconds=round(stream.seconds, 4),
        ttft=round(stream.ttft, 4),
        events=[(round(c.at, 4), len(c.token_ids) or 1) for c in stream.chunks],
        steps=stream.steps,
        prompt_token_ids=stream.prompt_token_ids,
    )


async def send(
    client: EngineClient,
    prompts: Sequence[Prompt],
    concurrency: int,
    sampling: dict[str, Any],
    ui: Ui,
    title: str = "",
    seeds: Sequence[int] | None = None,
) -> Pass:
    """Answer every prompt once, `concurrency` at a time, in order. sampling: max_tokens, temperature, …; seeds: one
    per prompt.

    A refused request is counted by its reason; more than MAX_REFUSED of them, or a server that is gone, is a
    UserError."""
    queue = list(enumerate(prompts))[::-1]
    done: list[Request | None] = [None] * len(prompts)
    refused: dict[str, int] = {}
    began = time.perf_counter()

    with ui.task(title or f"{len(prompts)} prompts, {concurrency} at once", len(prompts), "answers") as task:

        async def worker() -> None:
            while queue:
                at, prompt = queue.pop()
                start = time.perf_counter() - began
                extra: dict[str, Any] = {"tools": prompt.tools} if prompt.tools else {}
                if seeds is not None:
                    extra["seed"] = seeds[at]
                try:
                    stream = await client.stream_chat(prompt.messages, **sampling, **extra)
                except RefusedError as e:
                    refused[e.message[:200]] = refused.get(e.message[:200], 0) + 1
                else:
                    done[at] = _request(prompt, stream, start)
                task.advance(1)

        await asyncio.gather(*(worker() for _ in range(min(concurrency, len(prompts)))))
    seconds = time.perf_counter() - began
    if sum(refused.values()) > MAX_REFUSED * len(prompts):
        reason, count = max(refused.items(), key=lambda kv: kv[1])
        raise UserError(
            f"the server refused {sum(refused.values())} of {len(prompts)} prompts; {count} of them: {reason}",
            "what is left would not be the set that was asked for",
            "raise engine.max_model_len, or measure on shorter prompts",
            Exit.NO,
        )
    return Pass([r for r in done if r is not None], round(seconds, 4), refused)
