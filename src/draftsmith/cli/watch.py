"""`draftsmith watch`: follow a production server's counters and say when acceptance falls below what was measured."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftsmith.cli.common import console
from draftsmith.errors import Exit, UserError

if TYPE_CHECKING:
    from draftsmith.bench.watch import Event, Expected, Reading, Watcher
    from draftsmith.engine.client import EngineClient


def register(app: typer.Typer) -> None:
    app.command("watch")(watch)


def watch(
    url: str = typer.Argument(..., help="address of a running vLLM or SGLang server"),
    bench: Path = typer.Option(None, help="bench.json, or a folder with one, that measured this drafter"),
    expect: float = typer.Option(None, help="acceptance length to hold the server to, in place of a bench"),
    every: float = typer.Option(15.0, min=0.01, help="seconds between two looks"),
    lasting: float = typer.Option(None, "--for", help="stop after so many seconds; none = watch until stopped"),
    tolerance: float = typer.Option(0.1, help="share of the measured gain (length - 1) that may be lost"),
    min_drafts: int = typer.Option(200, min=1, help="drafts that a window must hold"),
    log: Path = typer.Option(None, help="append every event to this file, as JSON lines"),
    until_fall: bool = typer.Option(False, help="stop with exit code 1 at the first fall"),
    model: str = typer.Option(None, help="served model name; none = its first"),
    api_key_env: str = typer.Option(None, help="environment variable that holds the server's key"),
    as_json: bool = typer.Option(False, "--json", help="print events as JSON lines"),
) -> None:
    """Follow a production server; say when acceptance falls.

    It falls when it lies below what the drafter was measured at. Restarts and changes of engine, model or traffic are
    noticed.

    Exit codes: 0 all is well, 1 acceptance lies below, 2 bad input.
    """
    from draftsmith.bench.watch import Watcher
    from draftsmith.secrets import secret

    expected = _expected(bench, expect)
    watcher = Watcher(expected, tolerance, min_drafts)

    def tell(event: Event) -> None:
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a", encoding="utf-8") as f:
                f.write(json.dumps(event.as_dict(), ensure_ascii=False) + "\n")
        if as_json:
            print(json.dumps(event.as_dict(), ensure_ascii=False), flush=True)
        else:
            since = f", since {_clock(event.since)}" if event.kind == "fallen" and event.since else ""
            style = {"fallen": "bold red", "down": "red", "restart": "yellow", "changed": "yellow", "back": "green"}
            console.print(
                f"{_clock(event.at)} {event.text}{since}", style=style.get(event.kind), markup=False, highlight=False,
                soft_wrap=True,
            )  # fmt: skip

    key = secret(api_key_env) if api_key_env else None
    if expected and not as_json:
        console.print(f"measured: acceptance length {expected.length:.3f} ({expected.source})", highlight=False)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_follow(url, model, key, watcher, tell, every, lasting, until_fall))
    for event in watcher.finish():
        tell(event)
    if watcher.fallen:
        raise typer.Exit(int(Exit.NO))


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _expected(bench: Path | None, expect: float | None) -> Expected | None:
    from draftsmith.bench.watch import Expected
    from draftsmith.record import read_json

    if expect is not None:
        if expect <= 1:
            raise UserError(f"--expect {expect}", "an acceptance length is 1 or more: 1 + accepted / drafts", "")
        return Expected(expect, [], "--expect")
    if bench is None:
        return None
    path = next((p for p in (bench, bench / "bench.json", bench / "bench" / "bench.json") if p.is_file()), None)
    if path is None:
        raise UserError(f"{bench} holds no bench.json", "", "give the file, or the folder of a bench or run")
    return Expected.of(read_json(path), str(path))


async def _look(client: EngineClient) -> Reading:
    from draftsmith.bench.endpoint import version_of
    from draftsmith.bench.watch import Reading
    from draftsmith.engine.metrics import read_counters

    counters = read_counters(await client.metrics())
    card = await client.model_card()
    identity = {"model": str(card.get("id")), "model folder": str(card.get("root") or "")}
    version = await version_of(client)
    if version:
        identity["engine version"] = version
    return Reading(time.time(), counters, identity)


async def _follow(
    url: str, model: str | None, key: str | None, watcher: Watcher, tell: Any, every: float, lasting: float | None,
    until_fall: bool,
) -> None:  # fmt: skip
    from draftsmith.engine.client import EngineClient

    end = None if lasting is None else time.monotonic() + lasting
    first, down = True, False
    async with EngineClient(url, model, api_key=key, retries=0, timeout=max(every, 10.0)) as client:
        while True:
            try:
                reading = await _look(client)
            except UserError as e:
                if first:
                    raise
                if not down:
                    tell(watcher.lost(time.time(), e.what))
                down = True
            else:
                if first and not reading.counters.speculative:
                    raise UserError(
                        f"{url} drafts nothing: its metrics page has no speculation counters",
                        "there is no acceptance to watch",
                        "serve with a drafter (draftsmith serve)",
                    )
                first = down = False
                for event in watcher.observe(reading):
                    tell(event)
                if until_fall and watcher.fallen:
                    return
            if end is not None and time.monotonic() + every > end:
                return
            await asyncio.sleep(every)
