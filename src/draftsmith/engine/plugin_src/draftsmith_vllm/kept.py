"""What is kept of one request, and the file that it becomes.

Looking for a request's rows, gathering and writing is for numpy and the system, once it has ended or must leave the ring,
on threads that hold nobody up; while it runs, nothing is done for it alone.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCATTERED = 16
"""Pieces of a request that are written as they lie. More of them (an answer: one a step) are gathered first."""
BUFFERS = 512
"""Parts of a file written by one call (the system's limit is 1,024)."""

_numbers = itertools.count(1)


@dataclass(eq=False)
class Rows:
    """Host memory for tokens: streams int16 [rows, (layers - 1) * hidden] and last int16 [rows, hidden] (bf16's bits; the
    last layer lies apart, since fewer positions of it are wanted), ids int32 [rows], tops int32 [rows] (the most likely
    next token, -1 where nobody asked)."""

    streams: Any
    last: Any
    ids: Any
    tops: Any

    def part(self, index: Any) -> Rows:
        """A copy of these rows."""
        return Rows(*(a.take(index, axis=0) for a in (self.streams, self.last, self.ids, self.tops)))


Found = tuple[Rows, Any, Any]
"""(memory, rows there int [n], their positions int32 [n]), in the order in which they were computed."""
Piece = tuple[Rows, int, int]
"""(memory, first row there, rows)."""


@dataclass(eq=False, slots=True)
class Kept:
    """One request whose states are wanted.

    first: position from which `argmax` and the last layer are wanted; ends: tokens after which the request is over, None
    where only the scheduler knows. moved: what had to leave the ring before the request was over. start, end: positions
    that are there. future: the file's writing, once over. number: tells requests apart in the ring, from 1."""

    name: str
    first: int
    ends: int | None = None
    argmax_wanted: bool = True
    moved: list[Found] = field(default_factory=list)
    start: int = 0
    end: int = 0
    future: Future[None] | None = None
    number: int = field(default_factory=_numbers.__next__)

    def pieces(self, ring: Found) -> list[Piece]:
        """Where the tokens lie, in the order of their positions. ring: those that are still there.

        ValueError: a position is missing."""
        import numpy as np

        found = [f for f in (*self.moved, ring) if len(f[1])]
        if not found:
            raise ValueError("all positions are missing")
        of = np.repeat(np.arange(len(found)), [len(f[1]) for f in found])
        rows, at = (np.concatenate([f[k] for f in found]) for k in (1, 2))
        if not _consecutive(at):
            # After a preemption the tokens are computed again, and with another sample they may be others: the last count.
            at, back = np.unique(at[::-1], return_index=True)
            if not _consecutive(at):
                raise ValueError(f"positions {at[:-1][np.diff(at) != 1][0] + 1} and on are missing")
            chosen = len(rows) - 1 - back
            of, rows = of[chosen], rows[chosen]
        self.start, self.end = int(at[0]), int(at[-1]) + 1
        pieces: list[Piece] = []
        for a, b in _stretches(np.diff(of) != 0, len(of)):
            memory, here = found[of[a]][0], rows[a:b]
            runs = _stretches(np.diff(here) != 1, b - a)
            if len(runs) > SCATTERED:
                pieces.append((memory.part(here), 0, b - a))
            else:
                pieces += [(memory, int(here[c]), d - c) for c, d in runs]
        return pieces

    def move(self, ring: Found) -> None:
        """Copy what lies in the ring into memory of its own: all of it, so that this comes once a round of the ring."""
        import numpy as np

        memory, rows, at = ring
        self.moved.append((memory.part(rows), np.arange(len(rows)), at))

    def argmax(self, pieces: list[Piece]) -> Any:
        """int32 [tokens from `start` on], -1 where none was wanted."""
        import numpy as np

        out = np.full(self.end - self.start, -1, dtype=np.int32)
        if self.argmax_wanted:
            out = np.concatenate([m.tops[a : a + n] for m, a, n in pieces])
            out[: max(self.first - self.start, 0)] = -1
        return out

    def write(self, pieces: list[Piece], folder: Path, layers: Sequence[int], hidden: int) -> None:
        """One safetensors file: header and the rows as they lie, then a rename."""
        import numpy as np

        n, skip = self.end - self.start, min(max(self.first - self.start, 0), self.end - self.start)
        shapes: tuple[tuple[str, str, list[int], int], ...] = (
            ("streams", "BF16", [n, len(layers) - 1, hidden], 2),
            ("last", "BF16", [n - skip, hidden], 2),
            ("token_ids", "I32", [n], 4),
            ("argmax", "I32", [n], 4),
        )
        header: dict[str, Any] = {"__metadata__": {"layers": json.dumps(list(layers)), "start": str(self.start)}}
        at = 0
        for name, kind, shape, size in shapes:
            for length in shape:
                size *= length
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        parts = [memoryview(len(text).to_bytes(8, "little") + text)]
        parts += [_bytes(m.streams[a : a + k]) for m, a, k in pieces]
        for memory, where, k in pieces:
            past = min(skip, k)
            skip -= past
            parts.append(_bytes(memory.last[where + past : where + k]))
        parts.append(_bytes(np.concatenate([m.ids[a : a + k] for m, a, k in pieces])))
        parts.append(_bytes(self.argmax(pieces)))
        parts = [p for p in parts if len(p)]
        part = folder / f".{self.name}.part"
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for i in range(0, len(parts), BUFFERS):
                _write(descriptor, parts[i : i + BUFFERS])
        except OSError:
            part.unlink(missing_ok=True)  # what fills the disk must not stay there
            raise
        finally:
            os.close(descriptor)
        part.rename(folder / f"{self.name}.safetensors")


def _consecutive(at: Any) -> bool:
    return bool((at[1:] - at[:-1] == 1).all())


def _stretches(breaks: Any, n: int) -> list[tuple[int, int]]:
    """breaks bool [n - 1], True where a new one begins → (first, one past the last) of each."""
    cuts = [0, *((breaks.nonzero()[0] + 1).tolist()), n]
    return list(itertools.pairwise(cuts))


def _bytes(rows: Any) -> memoryview:
    return memoryview(rows).cast("B") if rows.size else memoryview(b"")


def _write(descriptor: int, parts: list[memoryview]) -> None:
    """All of the parts: one call may write less than it was given."""
    done = os.writev(descriptor, parts)
    for p in parts:
        if done >= len(p):
            done -= len(p)
            continue
        rest = p[done:]
        done = 0
        while rest:
            rest = rest[os.write(descriptor, rest) :]
