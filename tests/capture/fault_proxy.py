"""A proxy that spoils a share of the answers: 429, 500, reset in mid-body, a stall, truncated JSON, another's ids.

It stands before any OpenAI-compatible server: `with FaultProxy("http://127.0.0.1:8000", share=0.2) as p: p.url`.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from urllib.parse import urlsplit

KINDS = ("429", "500", "reset", "stall", "truncated", "wrong ids")


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of one HTTP/1.1 message with Content-Length."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").lower().split("\r\n")
    length = next((int(x.split(":")[1]) for x in lines if x.startswith("content-length")), 0)
    return head, await reader.readexactly(length)


def reply(status: int, body: bytes, claimed: int | None = None) -> bytes:
    length = len(body) if claimed is None else claimed
    return f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode() + body


class FaultProxy:
    """share: of all POST answers; stall: seconds. `injected` counts what was done."""

    def __init__(self, upstream: str, share: float = 0.2, stall: float = 60.0, seed: int = 0, port: int = 0) -> None:
        parts = urlsplit(upstream)
        self.host, self.upstream_port = parts.hostname or "127.0.0.1", parts.port or 80
        self.share, self.stall, self.port = share, stall, port
        self.injected: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._previous: dict[str, object] | None = None
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head, body = await read_message(reader)
                if not await self._pass_on(head, body, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the other side hung up, or the test is over
        finally:
            writer.close()

    async def _pass_on(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Ask upstream, spoil or not, answer; False if the connection is over."""
        try:
            up_reader, up_writer = await asyncio.open_connection(self.host, self.upstream_port)
        except OSError:  # the server is dead: so is the connection
            writer.transport.abort()
            return False
        try:
            up_writer.write(head + body)
            await up_writer.drain()
            answer_head, answer = await read_message(up_reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.transport.abort()
            return False
        finally:
            up_writer.close()
        if not head.startswith(b"POST") or self._rng.random() >= self.share:
            if head.startswith(b"POST"):
                self._previous = json.loads(answer)
            writer.write(answer_head + answer)
            await writer.drain()
            return True
        return await self._spoil(answer, writer)

    async def _spoil(self, answer: bytes, writer: asyncio.StreamWriter) -> bool:
        kind = self._rng.choice(KINDS)
        if kind == "wrong ids" and self._previous is None:
            kind = "500"
        self.injected[kind] += 1
        if kind in ("429", "500"):
            writer.write(reply(int(kind), b'{"error": {"message": "injected"}}'))
        elif kind == "truncated":
            writer.write(reply(200, answer[: len(answer) // 2]))
        elif kind == "wrong ids":
            writer.write(reply(200, self._with_anothers_ids(answer)))
        elif kind == "reset":
            writer.write(reply(200, answer[: len(answer) // 3], claimed=len(answer)))
            await writer.drain()
            writer.transport.abort()
            return False
        else:
            await asyncio.sleep(self.stall)
            writer.transport.abort()
            return False
        await writer.drain()
        return True

    def _with_anothers_ids(self, answer: bytes) -> bytes:
        """The answer with the previous one's ids: of the answer, of the prompt, or of both with the count to match."""
        found, other = json.loads(answer), self._previous
        assert isinstance(other, dict)
        choice, theirs = found["choices"][0], other["choices"][0]  # type: ignore[index]
        what = self._rng.choice(["answer", "prompt", "both"])
        if what != "prompt":
            choice["token_ids"] = theirs["token_ids"]
            found["usage"]["completion_tokens"] = len(theirs["token_ids"])
        if what != "answer":
            found["prompt_token_ids"] = other.get("prompt_token_ids")
        return json.dumps(found).encode()
