"""Several servers of one device, started at the same time and measured one after another: an idle one costs nothing but
memory, and starting is most of the time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

from draftsmith.bench.ways import Opened
from draftsmith.engine.client import EngineClient
from draftsmith.engine.server import Server
from draftsmith.errors import UserError


class Fleet:
    """servers: name → a Server that is not started yet. As a context manager it leaves none behind.

    at_once: how many may be starting at the same moment."""

    def __init__(self, servers: Mapping[str, Server], at_once: int = 8) -> None:
        self.servers = dict(servers)
        self.pool = ThreadPoolExecutor(max(at_once, 1))
        self.starting: dict[str, Future[Server]] = {}

    def start(self, *names: str) -> None:
        """Begin starting these; returns at once."""
        for name in names:
            self.starting[name] = self.pool.submit(self.servers[name].start)

    def settle(self, timeout: float) -> None:
        """Wait until none is starting any more: one that loads and compiles would spoil its neighbours' figures."""
        wait(list(self.starting.values()), timeout=max(timeout, 1.0))

    def take(self, name: str, timeout: float) -> Server:
        """The server when it is ready, started now if it was not before; UserError if it died or is late."""
        if name not in self.starting:
            self.start(name)
        try:
            return self.starting[name].result(max(timeout, 1.0))
        except TimeoutError:
            raise UserError(f"{name} was not ready in time", "", f"see {self.servers[name].log}") from None

    @contextlib.contextmanager
    def open(self, name: str, timeout: float) -> Iterator[Opened]:
        """As bench/ways.py's openers, but the server stays up afterwards."""
        server = self.take(name, timeout)
        info = {
            "speculative": server.speculative,
            "ready_seconds": server.ready_seconds,
            "kv_tokens": server.kv_tokens,
            "args": server.args,
            "env": server.env,
            "raw_logits": "raw_logits" in server.args,
        }
        yield Opened(lambda: EngineClient(server.url, server.name, retries=2), info, server.require_alive)

    def stop(self, *names: str) -> None:
        """Stop these, at the same time, also those that are still starting."""
        threads = [threading.Thread(target=self.servers[name].stop, name=f"stop-{name}") for name in names]
        for name in names:
            if name in self.starting:
                self.starting.pop(name).cancel()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Stop all."""
        self.stop(*self.servers)
        self.pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
