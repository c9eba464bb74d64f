"""Keep a server up until it is told to stop: the live panel, the watch over its life, the orderly end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

from draftsmith.engine.metrics import Counters, read_counters
from draftsmith.engine.server import Server
from draftsmith.ui import Ui

POLL = 2.0


def panel(server: Server, counters: Counters | None, rate: float, started: float) -> Table:
    """The live view: where it listens, what it has, what it accepts."""
    table = Table.grid(padding=(0, 2))
    table.add_row("engine", server.engine.label)
    table.add_row("address", f"{server.url}/v1  (model {server.name})")
    table.add_row("ready in", f"{server.ready_seconds:.0f} s" if server.ready_seconds else "starting")
    table.add_row("KV cache", f"{server.kv_tokens:,} tokens" if server.kv_tokens else "-")
    table.add_row("up", f"{time.monotonic() - started:,.0f} s")
    if counters is not None:
        table.add_row("answered", f"{counters.tokens:,} tokens, {rate:,.1f}/s now")
        if counters.drafts:
            per = "  ".join(f"{r:.3f}" for r in counters.rates)
            table.add_row("acceptance", f"length {counters.length:.2f}, per position {per}")
    return table


class _Stopped(BaseException):
    """SIGTERM or SIGHUP, as an exception that no handler of errors takes."""


@contextmanager
def _orderly() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped

    kept = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except (_Stopped, KeyboardInterrupt):
        pass
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def run_until_stopped(
    server: Server, ready: Callable[[dict[str, Any]], None], ui: Ui, console: Console | None = None
) -> None:
    """Serve until Ctrl-C, SIGTERM or the engine's death (UserError with its root line). console: for the live panel."""
    with _orderly(), server:
        ready({"url": server.url, "name": server.name, "ready_seconds": server.ready_seconds, "log": str(server.log)})
        started, last = time.monotonic(), (time.monotonic(), 0)
        live = Live(console=console, refresh_per_second=1, transient=True) if console else None
        with live or _nothing(), httpx.Client(timeout=5.0) as http:
            while True:
                server.require_alive()
                if live is not None:
                    counters = _read(http, server.url)
                    now = time.monotonic()
                    tokens = counters.tokens if counters else last[1]
                    rate = (tokens - last[1]) / max(now - last[0], 1e-9)
                    last = (now, tokens)
                    live.update(panel(server, counters, rate, started))
                time.sleep(POLL)
    ui.note("stopped; no process of the engine is left")


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _read(http: httpx.Client, url: str) -> Counters | None:
    """The counters, None while the page does not answer (the process itself is watched elsewhere)."""
    try:
        return read_counters(http.get(url + "/metrics").text)
    except httpx.HTTPError:
        return None
