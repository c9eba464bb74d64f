"""Tensors of a model on the hub by HTTP range requests: a few megabytes out of a terabyte."""

from __future__ import annotations

from typing import Any

import httpx

from draftsmith.errors import UserError
from draftsmith.target.hub import endpoint, offline, token_headers
from draftsmith.target.tensors import MAX_INDEX, Entry, choose_files, read_header
from draftsmith.untrusted import parse_json

HEAD_BYTES = 1 << 20
"""Read with the first request, so that most headers cost one."""


class HttpBytes:
    """Byte ranges of one file behind a URL. Raises UserError where the server does not answer or ignores ranges."""

    def __init__(self, client: httpx.Client, url: str, name: str) -> None:
        self.client, self.url, self.name = client, url, name
        self._size: int | None = None
        self._head = b""

    def _fetch(self, start: int, length: int) -> bytes:
        reason = ""
        for _ in range(4):
            try:
                with self.client.stream(
                    "GET", self.url, headers={"Range": f"bytes={start}-{start + length - 1}"}
                ) as reply:
                    got = _at_most(reply, length) if reply.status_code == 206 else b""
            except httpx.HTTPError as e:
                reason = f"{type(e).__name__} {e}".strip()
                continue
            if reply.status_code == 206:
                total = reply.headers.get("content-range", "").rpartition("/")[2]
                self._size = int(total) if total.isdigit() else self._size
                if _is_whole(got, start, length, self._size):
                    return got
                reason = f"{len(got):,} bytes came of {length:,}"
                continue
            reason = f"status {reply.status_code}" + (" (ranges are ignored)" if reply.status_code == 200 else "")
            if reply.status_code < 500 and reply.status_code != 429:
                break
        raise UserError(
            f"{self.name} cannot be read at {self.url}: {reason}",
            "the needed rows are read by range requests",
            "try again, or give a local folder",
        )

    def size(self) -> int:
        if self._size is None:
            self._head = self._fetch(0, HEAD_BYTES)
        return self._size if self._size is not None else len(self._head)

    def read(self, start: int, length: int) -> bytes:
        if self._size is None:
            self.size()
        if start + length <= len(self._head):
            return self._head[start : start + length]
        return self._fetch(start, length)


def _is_whole(got: bytes, start: int, length: int, size: int | None) -> bool:
    """Whether all that was asked for came, or all up to the file's end."""
    return len(got) == length or (size is not None and start + len(got) == size)


def _at_most(reply: httpx.Response, length: int) -> bytes:
    """The body, broken off beyond `length` bytes: a server may send without end."""
    got = bytearray()
    for part in reply.iter_bytes():
        got += part
        if len(got) > length:
            raise httpx.DecodingError(f"more than {length:,} bytes came", request=reply.request)
    return bytes(got)


def hub_entries(model: str, revision: str | None = None) -> dict[str, Entry]:
    """name → Entry of a hub model's tensors; only headers are fetched."""
    # httpx drops the token where a redirect leads to another host (a content network).
    client = httpx.Client(timeout=60.0, follow_redirects=True, headers=token_headers())
    base = f"{endpoint()}/{model}/resolve/{revision or 'main'}"

    def small(url: str) -> Any | None:
        try:
            with client.stream("GET", url) as reply:
                raw = _at_most(reply, MAX_INDEX)
        except httpx.HTTPError as e:
            raise offline(model, f"{type(e).__name__} {e}") from None
        if reply.status_code == 404:
            return None
        if reply.status_code != 200:
            raise offline(model, f"status {reply.status_code}")
        return parse_json(raw)

    listing = small(f"{endpoint()}/api/models/{model}" + (f"/revision/{revision}" if revision else ""))
    if listing is None:
        raise offline(model, "no such model")
    present = [s["rfilename"] for s in listing.get("siblings") or []]
    index_name = "model.safetensors.index.json"
    index = small(f"{base}/{index_name}") if index_name in present else None
    entries: dict[str, Entry] = {}
    for name in choose_files(present, index, model):
        entries |= read_header(HttpBytes(client, f"{base}/{name}", f"{model}/{name}"))
    return entries
