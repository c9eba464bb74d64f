"""A deterministic OpenAI-compatible server for tests: the same answer for the same conversation, in any order, any time.

It speaks as much HTTP/1.1 as the client needs, renders ChatML with the byte tokenizer of tests/conftest.py, and answers
with token ids. `python stub_server.py TOKENIZER_FOLDER [PORT]` runs it alone; StubServer runs it in a thread.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

Change = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


def byte_names() -> list[str]:
    """The character that stands for each byte in byte-level BPE (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names, extra = {b: chr(b) for b in plain}, 0
    for b in range(256):
        if b not in names:
            names[b] = chr(256 + extra)
            extra += 1
    return [names[b] for b in range(256)]


class Stub:
    """Renders and answers. The answer's words depend on the prompt ids and the seed alone."""

    def __init__(self, tokenizer: Path) -> None:
        vocab = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
        self.byte_ids = [vocab[name] for name in byte_names()]
        self.start, self.end = vocab["<|im_start|>"], vocab["<|im_end|>"]

    def encode(self, text: str) -> list[int]:
        return [self.byte_ids[b] for b in text.encode()]

    def render(self, messages: list[dict[str, Any]]) -> list[int]:
        out: list[int] = []
        for m in messages:
            out += [self.start, *self.encode(f"{m['role']}\n{m['content']}"), self.end, *self.encode("\n")]
        return [*out, self.start, *self.encode("assistant\n")]

    @staticmethod
    def words(prompt_ids: list[int], seed: int) -> str:
        digest = sha256(json.dumps([prompt_ids, seed]).encode()).hexdigest()
        return f"answer {digest[: 8 + int(digest[0], 16)]}"

    def reply(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        chat = "messages" in body
        ids = self.render(body["messages"]) if chat else self.encode(body["prompt"])
        text = self.words(ids, int(body.get("seed", 0)))
        answer = [*self.encode(text), self.end]
        most, reason = int(body.get("max_tokens", 1 << 20)), "stop"
        if len(answer) > most:
            answer, text, reason = answer[:most], text.encode()[:most].decode(), "length"
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "token_ids": answer}
        out: dict[str, Any] = {
            "id": "x",
            "model": "stub",
            "usage": {
                "prompt_tokens": len(ids),
                "completion_tokens": len(answer),
                "total_tokens": len(ids) + len(answer),
            },
        }
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
            out["prompt_token_ids"] = ids
        else:
            choice |= {"text": text, "prompt_token_ids": ids}
        return out | {"choices": [choice]}


class StubServer:
    """The stub in a thread: `with StubServer(folder) as s: s.url`. change(request, reply) edits replies; delay in
    seconds; `asked` counts answered requests."""

    stub_class: type[Stub] = Stub

    def __init__(self, tokenizer: Path, change: Change | None = None, delay: float = 0.0, port: int = 0) -> None:
        self.stub, self.change, self.delay, self.port = self.stub_class(tokenizer), change, delay, port
        self.asked = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> StubServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self.handle, "127.0.0.1", self.port))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode("latin-1").split("\r\n")
                length = next((int(x.split(":")[1]) for x in lines if x.lower().startswith("content-length")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                status, reply = self.answer(lines[0].split()[1], body)
                if self.delay and body:
                    await asyncio.sleep(self.delay)
                raw = json.dumps(reply).encode()
                writer.write(
                    f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
                )
                writer.write(raw)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the other side hung up, or the test is over
        finally:
            writer.close()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/health":
            return 200, {}
        if path == "/v1/models":
            return 200, {"data": [{"id": "stub", "max_model_len": 100000}]}
        if path == "/tokenize":
            ids = self.stub.render(body["messages"]) if "messages" in body else self.stub.encode(body["prompt"])
            return 200, {"tokens": ids}
        if path not in ("/v1/chat/completions", "/v1/completions"):
            return 404, {"error": {"message": "no such path"}}
        if "prompt_logprobs" in body:
            return 400, {"error": {"message": "this server has no prompt logprobs"}}
        self.asked += 1
        reply = self.stub.reply(path, body)
        if self.change:
            reply = self.change(body, reply)
        return int(reply.pop("status", 200)), reply


if __name__ == "__main__":
    with StubServer(Path(sys.argv[1]), port=int(sys.argv[2]) if len(sys.argv) > 2 else 0) as alone:
        print(alone.url, flush=True)
        threading.Event().wait()
