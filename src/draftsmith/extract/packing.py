"""Between a backend and a store: rows are checked and packed by several threads, and handed on in their order.

Looking for NaN, encoding and summing cost more than writing; done by one thread they would hold up an engine that gives
more than a few hundred megabytes of states a second.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from draftsmith.extract.rows import Item
from draftsmith.extract.source import finite
from draftsmith.extract.states import States
from draftsmith.extract.store import Prepared, StateWriter

AHEAD_BYTES = 512 << 20
"""Packed rows that may wait to be written."""


def threads() -> int:
    """Half of the cores, at most eight."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 2))


def prepare(writer: StateWriter, row_id: str, states: States) -> Prepared | None:
    """The row ready to be put; None where it holds NaN or infinite values."""
    return writer.prepare(row_id, states) if finite(states) else None


def packed(
    made: Iterable[tuple[list[Item], list[States]]], writer: StateWriter
) -> Iterator[tuple[list[Item], list[tuple[Item, Prepared | None]]]]:
    """Batches with their rows ready to be put (None: not finite), in order; rows that are stored already are left out."""
    waiting: deque[tuple[list[Item], list[tuple[Item, Future[Prepared | None]]], int]] = deque()
    ahead = 0

    def first() -> tuple[list[Item], list[tuple[Item, Prepared | None]]]:
        batch, rows, _ = waiting.popleft()
        return batch, [(item, future.result()) for item, future in rows]

    with ThreadPoolExecutor(threads(), thread_name_prefix="pack") as pool:
        try:
            for batch, states in made:
                wanted = [(i, s) for i, s in zip(batch, states, strict=True) if i.row_id not in writer.done]
                size = sum(s.aux.numel() * s.aux.element_size() for _, s in wanted)
                waiting.append((batch, [(i, pool.submit(prepare, writer, i.row_id, s)) for i, s in wanted], size))
                ahead += size
                while len(waiting) > 1 and (ahead > AHEAD_BYTES or all(f.done() for _, f in waiting[0][1])):
                    ahead -= waiting[0][2]
                    yield first()
            while waiting:
                yield first()
        finally:
            pool.shutdown(cancel_futures=True)
