"""What is kept of one request while it runs, and the file that it becomes.

Hundreds of requests run at once and each step adds to all of them, on a thread that shares the interpreter with the
engine's own: a step only notes where its rows lie. Looking through the notes, gathering and writing is for numpy and the
system, once a request has ended or must leave the ring, on threads that hold nobody up.
"""

from __future__ import annotations

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


@dataclass(eq=False)
class Rows:
    """Host memory for tokens: streams int16 [rows, (layers - 1) * hidden] and last int16 [rows, hidden] (bf16's bits; the
    last layer lies apart, since fewer positions of it are wanted), ids int32 [rows]."""

    streams: Any
    last: Any
    ids: Any

    def part(self, index: Any) -> Rows:
        """A copy of these rows."""
        return Rows(self.streams.take(index, axis=0), self.last.take(index, axis=0), self.ids.take(index))


@dataclass(eq=False, slots=True)
class Kept:
    """The states of one request: where its tokens lie, in the order of their positions.

    first: position from which `argmax` and the last layer are wanted; ends: tokens after which the request is over, None
    where only the scheduler knows. notes: (position, row of the ring, rows) of the steps that were not looked through
    yet; pieces: (memory, first row there, rows) of those that were. moved: number of the ring's segment up to which all
    was moved out of it. top_at, top_of: positions and their most likely tokens. future: the file's writing, once over."""

    name: str
    first: int
    ends: int | None = None
    argmax_wanted: bool = True
    over: bool = False
    written: bool = False
    moved: int = 0
    start: int = -1
    end: int = 0
    notes: list[tuple[int, int, int]] = field(default_factory=list)
    pieces: list[tuple[Rows, int, int]] = field(default_factory=list)
    top_at: list[int] = field(default_factory=list)
    top_of: list[int] = field(default_factory=list)
    broken: bool = False
    future: Future[None] | None = None

    def settle(self, ring: Rows) -> None:
        """Turn the notes into pieces; many of them are gathered into memory of their own."""
        import numpy as np

        notes, self.notes = self.notes, []
        if len(notes) > SCATTERED:
            at, row, n = np.array(notes).T
            if bool((at[1:] == at[:-1] + n[:-1]).all()):
                self.put(int(at[0]), ring.part(_each(row, n)), 0, int(n.sum()))
                return
        for at, row, n in notes:
            self.put(at, ring, row, n)

    def put(self, at: int, rows: Rows, begin: int, n: int) -> None:
        """Tokens at positions at … at + n - 1 lie in `rows` from `begin`."""
        if self.start < 0:
            self.start = self.end = at
        # After a preemption the tokens are computed again from the start: the same values, by position.
        while self.pieces and at < self.end:
            memory, where, length = self.pieces.pop()
            keep = max(length - (self.end - at), 0)
            self.end -= length - keep
            if keep:
                self.pieces.append((memory, where, keep))
        if at < self.start:
            self.start = self.end = at
        self.broken |= at != self.end
        if self.pieces and self.pieces[-1][0] is rows and sum(self.pieces[-1][1:]) == begin:
            _, where, length = self.pieces.pop()
            self.pieces.append((rows, where, length + n))
        else:
            self.pieces.append((rows, begin, n))
        self.end = at + n

    def move_out(self, ring: Rows) -> None:
        """Copy what lies in the ring into memory of its own: all of it, so that this comes once a round of the ring."""
        import numpy as np

        self.settle(ring)
        mine = [p for p in self.pieces if p[0] is ring]
        if not mine:
            return
        rows, counts = np.array([p[1:] for p in mine]).T
        own, at, pieces = ring.part(_each(rows, counts)), 0, []
        for memory, where, n in self.pieces:
            if memory is not ring:
                pieces.append((memory, where, n))
                continue
            if pieces and pieces[-1][0] is own:
                pieces[-1] = (own, pieces[-1][1], pieces[-1][2] + n)
            else:
                pieces.append((own, at, n))
            at += n
        self.pieces = pieces

    def forget(self) -> None:
        """Let go of what was gathered, once it is written."""
        self.pieces, self.top_at, self.top_of = [], [], []

    def argmax(self) -> Any:
        """int32 [tokens from `start` on], -1 where none was wanted."""
        import numpy as np

        out = np.full(self.end - self.start, -1, dtype=np.int32)
        at, of = np.array(self.top_at, dtype=np.int64), np.array(self.top_of, dtype=np.int32)
        inside = (at >= self.start) & (at < self.end)
        out[at[inside] - self.start] = of[inside]
        return out

    def write(self, folder: Path, layers: Sequence[int], hidden: int) -> None:
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
        parts += [_bytes(m.streams[a : a + k]) for m, a, k in self.pieces]
        for memory, where, k in self.pieces:
            past = min(skip, k)
            skip -= past
            parts.append(_bytes(memory.last[where + past : where + k]))
        parts.append(_bytes(np.concatenate([m.ids[a : a + k] for m, a, k in self.pieces])))
        parts.append(_bytes(self.argmax()))
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


def _each(starts: Any, counts: Any) -> Any:
    """starts, counts int [m] → starts[0], starts[0] + 1, … counts[0] of them, then those of the next."""
    import numpy as np

    ends = counts.cumsum()
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1])


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
