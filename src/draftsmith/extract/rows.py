"""Captured rows as extraction wants them: cut to length, in batches that are the same on every start.

The batches decide the last bits of the states (padding changes the order of sums), so they must not depend on what
was done before a kill: they are planned over all rows, and rows that are stored already are computed with their batch
or left out with the whole of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

WINDOW = 4096
"""Rows sorted by length at a time: bounds memory, and keeps appended rows out of earlier batches."""


class Captured(Protocol):
    @property
    def row_id(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def boundary(self) -> int: ...


@dataclass(frozen=True)
class Item:
    """One row to extract: token ids int32 [T], boundary = index of the first answer token (1 … T - 1)."""

    row_id: str
    token_ids: np.ndarray
    boundary: int

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def supervised(self) -> int:
        """Positions that carry a teacher: boundary - 1 … T - 1."""
        return self.tokens - max(self.boundary - 1, 0)


def cut_rows(rows: Iterable[Captured], max_length: int, counts: Counter[str]) -> Iterator[Item]:
    """Rows cut to `max_length` tokens. counts gets "cut" (kept, the tail is not learnt) and, for rows left out,
    "no answer tokens" or "prompt longer than max_length"."""
    for row in rows:
        if row.boundary >= len(row.token_ids):
            counts["no answer tokens"] += 1
            continue
        if row.boundary >= max_length:
            counts["prompt longer than max_length"] += 1
            continue
        if len(row.token_ids) > max_length:
            counts["cut"] += 1
        yield Item(row.row_id, np.asarray(row.token_ids[:max_length], dtype=np.int32), row.boundary)


def batches(items: Iterable[Item], batch_tokens: int) -> Iterator[list[Item]]:
    """Rows of like length together, at most `batch_tokens` padded tokens each (one long row may exceed it)."""
    stream = iter(items)
    while window := list(islice(stream, WINDOW)):
        window.sort(key=lambda i: (i.tokens, i.row_id))
        batch: list[Item] = []
        for item in window:
            if batch and item.tokens * (len(batch) + 1) > batch_tokens:
                yield batch
                batch = []
            batch.append(item)
        yield batch
