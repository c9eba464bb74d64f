"""Reading from a server that may be hostile or broken: an end to every body, every line and every wait.

A body of unknown length, a line without an end and a stream that trickles for ever each become a `TooMuchError`, a
UserError that names the limit; nothing that came is kept in memory beyond it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from draftsmith.errors import UserError

MAX_BODY = 256 << 20
"""Bytes of one answer. Logprobs of a 32k-token prompt, the largest thing that is asked for, take about 30 MB."""
MAX_LINE = 16 << 20
"""Bytes of one server-sent event."""
MAX_TOKEN = 1 << 31
SLACK = 64
"""Tokens that an answer may hold beyond max_tokens: an engine may overshoot within its last step."""


class TooMuchError(UserError):
    """The server sends more, or longer, than any honest answer needs."""

    def __init__(self, url: str, what: str) -> None:
        super().__init__(
            f"{url} {what}",
            "no honest answer is like that; the rest was not read",
            "see what listens at that address, and its log",
        )


async def read_body(response: httpx.Response, url: str) -> bytes:
    """The whole body of a streamed response; TooMuchError beyond MAX_BODY bytes."""
    got, limit = bytearray(), MAX_BODY
    async for part in response.aiter_bytes():
        got += part
        if len(got) > limit:
            raise TooMuchError(url, f"sent more than {limit:,} bytes in one answer")
    return bytes(got)


async def whole(response: httpx.Response, url: str) -> httpx.Response:
    """A streamed response as one that was read to its end, within bounds; the connection is given back."""
    try:
        body = await read_body(response, url)
    finally:
        await response.aclose()
    headers = [(k, v) for k, v in response.headers.items() if k not in ("content-encoding", "content-length")]
    return httpx.Response(response.status_code, headers=headers, content=body, request=response.request)


async def read_lines(response: httpx.Response, url: str) -> AsyncIterator[str]:
    """The body's lines as they come; TooMuchError beyond MAX_BODY bytes in all or MAX_LINE in one line."""
    rest, total, limit, line_limit = b"", 0, MAX_BODY, MAX_LINE
    async for part in response.aiter_bytes():
        total += len(part)
        if total > limit:
            raise TooMuchError(url, f"sent more than {limit:,} bytes in one stream")
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > line_limit:
            raise TooMuchError(url, f"sent a line of more than {line_limit:,} bytes")
        for line in lines:
            yield line.rstrip(b"\r").decode("utf-8", errors="replace")
    if rest:
        yield rest.decode("utf-8", errors="replace")


@asynccontextmanager
async def within(seconds: float, url: str) -> AsyncIterator[None]:
    """TooMuchError where the body takes longer than `seconds` in all: time-outs of single reads do not see a trickle."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise TooMuchError(url, f"was not done after {seconds:,.0f} s") from None


def require_asked(count: int, asked: Any, url: str) -> None:
    """TooMuchError where `count` tokens have come of `asked` (max_tokens; None: not limited)."""
    if isinstance(asked, int) and count > asked + SLACK:
        raise TooMuchError(url, f"sent more than the {asked} tokens that were asked for")


def token_ids(found: Any, url: str) -> list[int]:
    """`found` as token ids; UserError where it is anything but a list of whole numbers that can be ids."""
    ids = found or []
    if not isinstance(ids, list) or not all(type(t) is int and 0 <= t < MAX_TOKEN for t in ids):
        raise UserError(
            f"{url} gave token ids that are none: {str(found)[:80]}",
            "they would be trained on",
            "see what listens at that address",
        )
    return ids
