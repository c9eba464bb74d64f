"""Measure servers that somebody else runs: any OpenAI-compatible endpoint with its metrics page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from draftsmith.bench.ways import Opened
from draftsmith.engine.client import EngineClient, RefusedError, root_url
from draftsmith.engine.metrics import Counters, read_counters
from draftsmith.errors import UserError

ENDPOINT = "endpoint"
"""The way's name of a server that is not ours."""


@dataclass(frozen=True)
class EndpointOpener:
    """urls: way → address ("endpoint", and "none" for the same model served plainly). Nothing is started."""

    urls: dict[str, str]
    model: str | None = None
    api_key: str | None = None

    @contextlib.contextmanager
    def __call__(self, way: str) -> Iterator[Opened]:
        url = self.urls[way]
        yield Opened(lambda: EngineClient(url, self.model, api_key=self.api_key, retries=2), {"url": root_url(url)})


async def version_of(client: EngineClient) -> str | None:
    """The engine's own version, where it has a page that says it (vLLM: /version)."""
    try:
        found = (await client._json("GET", "/version")).get("version")
    except UserError:
        return None
    return str(found) if found else None


async def _probe(client: EngineClient) -> tuple[dict[str, Any], Counters]:
    async with client:
        card = await client.model_card()
        try:
            return card, read_counters(await client.metrics())
        except RefusedError as e:
            raise UserError(
                f"{client.url}/metrics: {e.message or e.status}",
                "acceptance is read off the server's own counters",
                "start SGLang with --enable-metrics; a proxy in front must pass /metrics through",
            ) from None


def describe_endpoint(url: str, model: str | None = None, api_key: str | None = None) -> dict[str, Any]:
    """What bench.json says of a foreign server; UserError if it is down or has no counters."""
    card, counters = asyncio.run(_probe(EngineClient(url, model, api_key=api_key, retries=1)))
    return {
        "name": counters.kind,
        "version": None,
        "path": root_url(url),
        "model": card.get("id"),
        "root": card.get("root"),
        "max_model_len": card.get("max_model_len"),
        "speculative": counters.speculative,
        "gauges": counters.gauges,
    }
