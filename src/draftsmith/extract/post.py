"""Requests to an engine on this machine from many threads: one kept connection a thread, nothing but the standard library.

A row of states needs one request; a full HTTP client costs about a millisecond of this process for each, in which no
row can be stored.
"""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any
from urllib.parse import urlsplit


class Poster:
    """url: the engine's root. timeout: seconds for an answer."""

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        parts = urlsplit(url)
        self._host, self._port, self._root = parts.hostname or "", parts.port, parts.path.rstrip("/")
        self._timeout = timeout
        self._own = threading.local()
        self._all: list[http.client.HTTPConnection] = []

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body of the answer. OSError or http.client.HTTPException where there is none."""
        raw = json.dumps(body, separators=(",", ":")).encode()
        fresh = False
        while True:
            connection = getattr(self._own, "connection", None)
            if connection is None:
                connection, fresh = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout), True
                self._own.connection = connection
                self._all.append(connection)
            try:
                connection.request("POST", self._root + path, raw, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                return answer.status, answer.read()
            except (OSError, http.client.HTTPException) as e:
                connection.close()
                self._own.connection = None
                # A kept connection may have been closed at the other end meanwhile; a request is harmless to repeat.
                if fresh or isinstance(e, TimeoutError):
                    raise

    def close(self) -> None:
        for connection in self._all:
            connection.close()
