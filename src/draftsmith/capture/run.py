"""Capture: every (prompt, sample) answered once by the running target, whatever happens in between.

Units are handed to as many tasks as the servers take; finished ones go to the row writer, which closes parts atomically.
After a kill the settled units are read back from the parts and the rest is asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.capture.ask import Asker, DifferentIdsError, GivenUp, Keeper, NoIdsError, Settings
from draftsmith.capture.local import LocalClient
from draftsmith.capture.plan import Plan, require_share
from draftsmith.capture.pool import Pool
from draftsmith.capture.prompts import Prompt
from draftsmith.capture.rows import Row, RowWriter, row_facts, rows_hash
from draftsmith.engine.client import EngineClient
from draftsmith.target.tokenizer import TargetTokenizer
from draftsmith.ui import Task, Ui

BEHIND_PAUSE = 0.05
"""Seconds between looks whether the states of earlier answers are stored."""
JUDGE_AFTER = 200
"""Units after which a high share of losses stops capture at once instead of at its end."""


@dataclass(frozen=True)
class Servers:
    """Which servers are asked and how hard. limit: requests in flight per server. clients: ready ones, instead of urls."""

    urls: Sequence[str] = ()
    clients: Sequence[EngineClient] = ()
    model: str | None = None
    api_key: str | None = None
    limit: int = 16
    timeout: float = 600.0
    patience: float = 300.0
    backoff: float = 0.5


class Progress:
    """Counts of what has been done since this start, for the progress line and the result."""

    def __init__(self, task: Task, asker: Asker) -> None:
        self.task, self.asker, self.started = task, asker, time.monotonic()
        self.cut = 0

    def rate(self) -> float:
        return self.asker.answer_tokens / max(time.monotonic() - self.started, 1e-9)

    def news(self, text: str) -> None:
        """Of answers that are being written: their batch may take minutes."""
        self.task.advance(0, text)

    def unit(self, rows: Sequence[Row]) -> None:
        self.cut += sum(r.finish_reason == "length" for r in rows)
        self.task.advance(1, f"{self.rate():,.0f} tokens/s, {self.cut:,} cut")


def settled_flags(plan: Plan, writer: RowWriter, samples: int) -> np.ndarray[Any, Any]:
    """bool [kept prompts, samples]: which units need no asking; the order is the plan's."""
    flags = np.zeros((plan.total, samples), bool)
    order = np.argsort(plan.hashes, kind="stable")
    ordered = plan.hashes[order]
    for prompt_id, sample in writer.settled():
        key = np.uint64(int(prompt_id, 16))
        at = int(np.searchsorted(ordered, key))
        if at < len(ordered) and ordered[at] == key and sample < samples:
            flags[order[at], sample] = True
    return flags


def _open_units(plan: Plan, flags: np.ndarray[Any, Any]) -> Iterator[tuple[Prompt, int]]:
    for i, prompt in enumerate(plan):
        for sample in range(flags.shape[1]):
            if not flags[i, sample]:
                yield prompt, sample


def capture_rows(
    plan: Plan,
    folder: Path,
    settings: Settings,
    servers: Servers,
    tokenizer: TargetTokenizer | None,
    ui: Ui,
    *,
    samples: int = 1,
    max_dropped: float = 0.5,
    every_rows: int = 500,
    every_seconds: float = 20.0,
    keeper: Keeper | None = None,
) -> dict[str, Any]:
    """Ask all units that are not settled; rows go to `folder`. Returns the counts (keys of run.json's result).

    UserError: no server answers, the server's rendering differs from ours, no token ids, too many losses."""
    writer = RowWriter(folder, every_rows, every_seconds)
    if keeper is not None:
        writer.on_close = keeper.settled
    flags = settled_flags(plan, writer, samples)
    left = int(flags.size - flags.sum())
    if left < flags.size:
        ui.note(f"{flags.size - left:,} of {flags.size:,} answers are there already; {left:,} to go")
    counts: dict[str, Any] = {}
    if left:
        counts = asyncio.run(_capture(plan, flags, left, writer, settings, servers, tokenizer, ui, max_dropped, keeper))
    require_share(writer.count, writer.given_up, max_dropped, "capture")
    facts = row_facts(folder)
    ui.note(
        f"{writer.count:,} rows, {facts['answer_tokens']:,} answer tokens; ended by "
        + ", ".join(f"{reason}: {n:,}" for reason, n in facts["finish_reasons"].items())
    )
    if writer.given_up:
        ui.note("answers given up: " + ", ".join(f"{n:,} {r}" for r, n in writer.given_up.most_common()))
    return {
        "prompts": plan.total,
        "samples": samples,
        "rows": writer.count,
        "prompts_dropped": dict(plan.dropped),
        "answers_given_up": dict(writer.given_up),
        **facts,
        **counts,
        "output_hash": rows_hash(folder),
    }


async def _capture(
    plan: Plan,
    flags: np.ndarray[Any, Any],
    left: int,
    writer: RowWriter,
    settings: Settings,
    servers: Servers,
    tokenizer: TargetTokenizer | None,
    ui: Ui,
    max_dropped: float,
    keeper: Keeper | None,
) -> dict[str, Any]:
    units = _open_units(plan, flags)
    pool = Pool(
        servers.urls,
        ui,
        clients=servers.clients,
        model=servers.model,
        api_key=servers.api_key,
        limit=servers.limit,
        timeout=servers.timeout,
        patience=servers.patience,
        backoff=servers.backoff,
    )
    async with pool:
        await pool.greet()
        asker = Asker(pool, settings, tokenizer, keeper)
        with ui.task("capture", left, "answers") as task:
            progress = Progress(task, asker)
            for client in servers.clients:
                if isinstance(client, LocalClient):
                    client.tell = progress.news

            async def worker() -> None:
                for prompt, sample in units:  # a generator: each unit goes to one worker
                    while keeper is not None and keeper.behind():
                        await asyncio.sleep(BEHIND_PAUSE)
                    try:
                        rows = await asker.unit(prompt, sample)
                    except GivenUp as e:
                        writer.give_up(prompt.prompt_id, sample, str(e))
                        progress.unit([])
                        if sum(writer.given_up.values()) >= JUDGE_AFTER:
                            require_share(writer.rows_so_far, writer.given_up, max_dropped, "capture")
                    else:
                        writer.add(rows)
                        if keeper is not None and keeper.crowded():
                            writer.close_part()
                        progress.unit(rows)

            tasks = [asyncio.create_task(worker()) for _ in range(min(pool.capacity, left))]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                for finished in done:
                    finished.result()
            except (DifferentIdsError, NoIdsError) as e:
                raise e.block from None
            finally:
                for open_task in tasks:
                    open_task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                writer.close_part()
        for reason, n in pool.retries.most_common(6):
            ui.note(f"asked again {n:,} times: {reason}")
        if asker.cut_chains:
            ui.note(f"{asker.cut_chains:,} conversations end early, after a cut or failed answer")
    return {
        "tokens_per_second": round(progress.rate(), 1),
        "asked_again": dict(pool.retries),
        "answered": {e.url: e.answered for e in pool.endpoints},
        "conversations_ended_early": asker.cut_chains,
    }
