"""A hostile or broken endpoint, or model hub."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from threat import HarmError, refused, require, threat

from draftsmith.engine import bounded, client
from draftsmith.engine.client import EngineClient
from draftsmith.errors import UserError

PART = 64 << 10
LIMIT = 1 << 20


class Parts(httpx.AsyncByteStream):
    """A body that counts how much of it was taken. It ends by itself after 64 parts, so that no test hangs."""

    def __init__(self, part: bytes, pause: float = 0.0) -> None:
        self.part, self.pause, self.taken = part, pause, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(64):
            self.taken += 1
            await asyncio.sleep(self.pause)
            yield self.part


def ask(stream: httpx.AsyncByteStream | None = None, streamed: bool = False, **more: Any) -> Any:
    """One completion from a server that answers with `stream`, or as `answer` (a function of the request) says."""
    answer = more.pop("answer", lambda request: httpx.Response(200, stream=stream))

    async def go() -> Any:
        transport = httpx.MockTransport(answer)
        async with EngineClient("http://host", "m", retries=0, transport=transport, **more) as c:
            call = c.stream_complete if streamed else c.complete
            return await call([1], max_tokens=8)

    return asyncio.run(go())


def small_limits(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(bounded, "MAX_BODY", LIMIT)
    mp.setattr(bounded, "MAX_LINE", LIMIT)


def _no_body_limit(mp: pytest.MonkeyPatch) -> None:
    async def all_of_it(response: httpx.Response, url: str) -> bytes:
        return b"".join([part async for part in response.aiter_bytes()])

    mp.setattr(bounded, "read_body", all_of_it)


@threat("T22", "an answer without end", _no_body_limit)
def _(tmp: Path) -> None:
    body = Parts(b"x" * PART)
    with pytest.MonkeyPatch.context() as mp:
        small_limits(mp)
        with contextlib.suppress(UserError):
            ask(body)
    require(body.taken * PART <= LIMIT + 2 * PART, f"{body.taken * PART:,} bytes were taken")


def _no_line_limit(mp: pytest.MonkeyPatch) -> None:
    async def lines(response: httpx.Response, url: str) -> AsyncIterator[str]:
        async for line in response.aiter_lines():
            yield line

    mp.setattr(client, "read_lines", lines)


@threat("T23", "a streamed line without end", _no_line_limit)
def _(tmp: Path) -> None:
    body = Parts(b"x" * PART)
    with pytest.MonkeyPatch.context() as mp:
        small_limits(mp)
        with contextlib.suppress(UserError):
            ask(body, streamed=True)
    require(body.taken * PART <= LIMIT + 2 * PART, f"{body.taken * PART:,} bytes were taken")


@threat("T24", "a stream of tokens without end", lambda mp: mp.setattr(client, "require_asked", lambda *a: None))
def _(tmp: Path) -> None:
    event = {"choices": [{"text": "x" * 8, "token_ids": list(range(8))}]}
    with refused("asked for"):
        ask(Parts(b"data: " + json.dumps(event).encode() + b"\n\n"), streamed=True)


def _no_clock(mp: pytest.MonkeyPatch) -> None:
    @contextlib.asynccontextmanager
    async def for_ever(seconds: float, url: str) -> AsyncIterator[None]:
        yield

    mp.setattr(client, "within", for_ever)


@threat("T25", "an answer that trickles for ever", _no_clock)
def _(tmp: Path) -> None:
    body = Parts(b" ", pause=0.02)
    with contextlib.suppress(UserError):
        ask(body, timeout=0.1)  # no single wait is longer than 0.02 s
    require(body.taken < 40, f"it was waited for to the end, {body.taken} parts")


def _believe_any_length(mp: pytest.MonkeyPatch) -> None:
    mp.setattr("draftsmith.target.ranges._is_whole", lambda *a: True)


def ranges(answer: Any) -> Any:
    from draftsmith.target.ranges import HttpBytes

    return HttpBytes(httpx.Client(transport=httpx.MockTransport(answer)), "http://hub/f", "f")


@threat("T26", "fewer bytes than the answer's length says", _believe_any_length)
def _(tmp: Path) -> None:
    file = ranges(lambda r: httpx.Response(206, content=b"x" * 10, headers={"Content-Range": "bytes 0-63/9999"}))
    file._size = 9999
    with refused("bytes came of"):
        file.read(0, 64)


class SyncParts(httpx.SyncByteStream):
    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[bytes]:
        for _ in range(64):
            self.taken += 1
            yield b"x" * PART


def _read_it_all(mp: pytest.MonkeyPatch) -> None:
    mp.setattr("draftsmith.target.ranges._at_most", lambda reply, length: reply.read())


@threat("T27", "a hub that sends more than the range asked for", _read_it_all)
def _(tmp: Path) -> None:
    made: list[SyncParts] = []

    def answer(request: httpx.Request) -> httpx.Response:
        made.append(SyncParts())
        return httpx.Response(206, stream=made[-1], headers={"Content-Range": "bytes 0-7/9999"})

    file = ranges(answer)
    file._size = 9999
    with contextlib.suppress(UserError):
        file.read(0, 8)
    require(max(p.taken for p in made) <= 2, "the whole body was taken")


def _follow(mp: pytest.MonkeyPatch) -> None:
    class Following(httpx.AsyncClient):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**(kwargs | {"follow_redirects": True}))

    mp.setattr(httpx, "AsyncClient", Following)


@threat("T28", "a redirect to a file or to another host", _follow)
def _(tmp: Path) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        where = "file:///etc/passwd" if len(asked) == 1 else "http://metadata/latest/credentials"
        return httpx.Response(307, headers={"Location": where})

    for _ in range(2):
        with contextlib.suppress(UserError, httpx.HTTPError):
            ask(answer=answer)
    require(all(u.startswith("http://host/") for u in asked), f"asked instead: {asked}")


@threat(
    "T29", "token ids that are none", lambda mp: mp.setattr(client, "token_ids", lambda found, url: list(found or []))
)
def _(tmp: Path) -> None:
    forged: list[Any] = [["a"], [-1], [1 << 40], [True], {"0": 1}]
    for ids in forged:
        choice = {"text": "x", "token_ids": ids, "finish_reason": "stop"}
        with refused("token ids that are none"):
            ask(answer=lambda r, choice=choice: httpx.Response(200, json={"choices": [choice]}))


@threat("T30", "an answer that repeats the key it was asked with", lambda mp: mp.setattr(
    EngineClient, "_message", lambda self, response: client._message(response)
))  # fmt: skip
def _(tmp: Path) -> None:
    key = "very-private-key"
    try:
        ask(answer=lambda r: httpx.Response(401, json={"error": r.headers["authorization"]}), api_key=key)
    except UserError as e:
        require(key not in str(e), "the key stands in the message, and so in logs")
        return
    raise HarmError("401 was taken for an answer")


def _any_name(mp: pytest.MonkeyPatch) -> None:
    import re

    from draftsmith.engine.plugin_src.draftsmith_vllm import states

    mp.setattr(states, "SAFE", re.compile(".*", re.DOTALL))


@threat("T31", "a forged name for hidden states, outside their folder", _any_name)
def _(tmp: Path) -> None:
    from types import SimpleNamespace as Space

    from draftsmith.engine.plugin_src.draftsmith_vllm.states import KEY, Tap

    runner = Space(model_config=Space(get_hidden_size=lambda: 4))
    tap = Tap(runner, {"folder": str(tmp / "states"), "layers": [2, 8]})
    for n, name in enumerate(("../../owned", "/etc/owned", "a/b", "x\0", ".hidden")):
        request = Space(req_id=str(n), prompt_token_ids=[1], sampling_params=Space(extra_args={KEY: name}))
        tap.begin(Space(finished_req_ids=[], scheduled_new_reqs=[request]))
    require(not tap.kept, f"states would be written as {[k.name for k in tap.kept.values()]}")
