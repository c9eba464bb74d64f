"""Runs of a real engine, recorded over HTTP and replayed without it.

A recording holds every exchange of a scenario (request's hash → answer; pages in the order they were read) and the
engine's log. It is found by the engine's version and the hash of what the scenario was made of, so a changed scenario
has no recording until `make test-full` (DRAFTSMITH_RECORD=1) has run it in the real engine again.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

FOLDER = Path(__file__).parent / "engine" / "recorded"
KEPT_METRICS = ("vllm:", "# TYPE vllm:")
"""Lines kept of a metrics page; the rest is the web server's and Python's own."""

Exchange = dict[str, Any]


def fixture_hash(*made_of: Path | str) -> str:
    """12 hex digits over the files (by content) and words that a scenario is made of."""
    h = hashlib.sha256()
    for part in made_of:
        h.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        h.update(b"\0")
    return h.hexdigest()[:12]


def recording_path(name: str, fixture: str, version: str) -> Path:
    return FOLDER / f"vllm-{version}" / f"{name}-{fixture}.json.xz"


def recordings(name: str, fixture: str) -> list[Path]:
    """Of every engine version that this very scenario was recorded with."""
    return sorted(FOLDER.glob(f"vllm-*/{name}-{fixture}.json.xz"))


def _request_key(method: str, path: str, body: bytes) -> str:
    if method == "POST" and body:
        body = json.dumps(json.loads(body), sort_keys=True).encode()
    return f"{method} {path} {hashlib.sha256(body).hexdigest()[:16] if body else ''}".strip()


class _Served:
    """A threaded HTTP server on a free port of this machine whose answers `answer` gives."""

    def __init__(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _do(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                status, kind, data = outer.answer(self.command, self.path, self.rfile.read(size), dict(self.headers))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = _do  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def answer(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, bytes]:
        raise NotImplementedError

    def __enter__(self) -> Any:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()


class Recorder(_Served):
    """Stands before a real server and keeps what goes through."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.exchanges: list[Exchange] = []
        self._behind = httpx.Client(base_url=url, timeout=300)
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, bytes]:
        passed = {k: v for k, v in headers.items() if k.lower() in ("content-type", "accept", "authorization")}
        found = self._behind.request(method, path, content=body or None, headers=passed)
        kind = found.headers.get("content-type", "")
        text = found.text
        if path == "/metrics":
            text = "".join(line + "\n" for line in text.splitlines() if line.startswith(KEPT_METRICS))
        with self._lock:
            self.exchanges.append(
                {"request": _request_key(method, path, body), "status": found.status_code, "kind": kind, "text": text}
            )
        return found.status_code, kind, text.encode()


class Replayer(_Served):
    """Answers as the recorded server did; a request that was never made is an error that says so."""

    def __init__(self, exchanges: Iterable[Exchange]) -> None:
        super().__init__()
        self._left: dict[str, list[Exchange]] = defaultdict(list)
        for exchange in exchanges:
            self._left[exchange["request"]].append(exchange)
        self._lock = threading.Lock()
        self.unknown: list[str] = []

    def answer(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, bytes]:
        key = _request_key(method, path, body)
        with self._lock:
            left = self._left.get(key)
            if not left:
                self.unknown.append(f"{key} {body[:300].decode(errors='replace')}")
                return 400, "application/json", b'{"error": {"message": "this request is not in the recording"}}'
            found = left.pop(0) if len(left) > 1 else left[0]
        return found["status"], found["kind"], found["text"].encode()


def record(path: Path, recorder: Recorder, log: Path, seen: dict[str, Any], hidden: Path) -> None:
    """Write a recording if DRAFTSMITH_RECORD asks for it. seen: what the scenario found, compared at every replay.
    hidden: a folder of this machine, whose name is taken out."""
    if not os.environ.get("DRAFTSMITH_RECORD"):
        return
    whole = {"exchanges": recorder.exchanges, "log": log.read_text(encoding="utf-8", errors="replace"), "seen": seen}
    text = json.dumps(whole, indent=0, ensure_ascii=False).replace(str(hidden), "/fixture")
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob(path.name.rpartition("-")[0] + "-*.json.xz"):
        old.unlink()
    path.write_bytes(lzma.compress(text.encode(), preset=6))


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
    return found


def replay(path: Path, scenario: Callable[[str], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the scenario finds now against the recorded server, and what it found in the real one."""
    whole = load(path)
    with Replayer(whole["exchanges"]) as server:
        found = scenario(server.url)
        assert not server.unknown, server.unknown
    return found, whole["seen"]
