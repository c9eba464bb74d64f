"""Memory that one step after another fills: the device's, where a step leaves its states, and the host's, where they stay
until their requests have ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from . import NAME, logger
from .kept import Found, Kept, Rows

SLOW, PERIOD = 0.05, 60.0
"""Share of a period (seconds) that the runner may wait for us before the log says so."""


class Stage:
    """`rows` rows on the device. The runner's thread takes them in order (`room`), ours gives them back (`free`).

    streams bf16 [rows, layers - 1, hidden], last bf16 [rows, hidden], ids int32 [rows], tops int32 [rows]."""

    def __init__(self, rows: int, layers: int, hidden: int, device: Any) -> None:
        import torch

        self.size, self.device = rows, device
        with torch.inference_mode(False):  # tensors made within it could not be written to outside
            self.streams = torch.empty(rows, layers - 1, hidden, dtype=torch.bfloat16, device=device)
            self.last = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)
            self.ids = torch.empty(rows, dtype=torch.int32, device=device)
            self.tops = torch.empty(rows, dtype=torch.int32, device=device)
        self._made = self._taken = 0  # rows since both were equal, with those that are skipped at the end
        self._changed = threading.Condition()
        self.stood, self._since = 0.0, time.monotonic()

    def room(self, n: int, call: Any) -> tuple[int, int]:
        """(first of n rows that follow each other, what `free` is to be given for them), n at most `size`. Waits where too
        many are on their way; `call` tells our thread so."""
        with self._changed:
            begun = 0.0
            while True:
                if self._made == self._taken:
                    self._made = self._taken = 0
                first = self._made % self.size
                skipped = 0 if first + n <= self.size else self.size - first
                if self._made + skipped + n - self._taken <= self.size:
                    break
                begun = begun or time.monotonic()
                call()
                self._changed.wait()
            if begun:
                self._note(begun)
            self._made += skipped + n
            return (self._made - n) % self.size, self._made

    def free(self, upto: int) -> None:
        """Everything up to there was copied."""
        with self._changed:
            self._taken = upto
            self._changed.notify()

    def _note(self, begun: float) -> None:
        """Say so where the runner stands still for more than a small share of its time."""
        now = time.monotonic()
        self.stood += now - begun
        if now - self._since > PERIOD:
            if self.stood > SLOW * (now - self._since):
                logger.warning(
                    "%s: the engine waited %.0f s of the last %.0f s for states to be written; they are made faster than "
                    "they are taken away",
                    NAME,
                    self.stood,
                    now - self._since,
                )
            self.stood, self._since = 0.0, now


class Ring:
    """`rows` rows of host memory, pinned where the device is a GPU, and whose each of them is."""

    def __init__(self, rows: int, layers: int, hidden: int, device: Any) -> None:
        import numpy as np
        import torch

        pin = device.type == "cuda"
        self.size, self._head = rows, 0
        self.streams = torch.empty(rows, layers - 1, hidden, dtype=torch.bfloat16, pin_memory=pin)
        self.last = torch.empty(rows, hidden, dtype=torch.bfloat16, pin_memory=pin)
        self.ids = torch.empty(rows, dtype=torch.int32, pin_memory=pin)
        self.memory = Rows(bits(self.streams), bits(self.last), self.ids.numpy(), np.full(rows, -1, dtype=np.int32))
        self.owners = np.zeros(rows, dtype=np.int32)
        """Number of the request, 0 where there is none."""
        self.positions = np.zeros(rows, dtype=np.int32)

    def room(self, n: int, requests: dict[int, Kept], pool: ThreadPoolExecutor) -> int:
        """First of the next n rows, which are nobody's then: waits for the files that are written from them, and has moved
        out who goes on. requests: those that have no file yet, by number."""
        import numpy as np

        fits = self._head + n <= self.size
        a = self._head if fits else 0
        # Rows that are left out at the end must not stay there: what lies behind the head is taken for older than the rest.
        gone = [slice(a, a + n)] if fits else [slice(self._head, self.size), slice(0, n)]
        leaving: dict[int, Future[None]] = {}
        for part in gone:
            for number in np.unique(self.owners[part]).tolist():
                kept = requests.get(number)
                if kept is not None and number not in leaving:
                    # By several threads: one alone, with a ring full of prompts, holds up the engine for a second.
                    leaving[number] = kept.future or pool.submit(self._move_out, kept)
        for future in leaving.values():
            future.result()
        for part in gone:
            self.owners[part] = 0
        self._head = a + n
        return a

    def fill(self, first: int, numbers: Any, at: Any, counts: Any) -> None:
        """From row `first` on lie `counts` rows of each request, from its position `at`: int32 [requests] each."""
        import numpy as np

        n = int(counts.sum())
        here = slice(first, first + n)
        self.positions[here] = np.repeat(at - counts.cumsum() + counts, counts) + np.arange(n)
        self.memory.tops[here] = -1
        self.owners[here] = np.repeat(numbers, counts)

    def find(self, kept: Kept) -> Found:
        import numpy as np

        rows = np.flatnonzero(self.owners == kept.number)
        older = int(np.searchsorted(rows, self._head))
        rows = np.concatenate([rows[older:], rows[:older]])
        return self.memory, rows, self.positions[rows]

    def _move_out(self, kept: Kept) -> None:
        found = self.find(kept)
        kept.move(found)
        self.owners[found[1]] = 0


def bits(tensor: Any) -> Any:
    """bf16 [rows, …] → its memory as int16 [rows, n]."""
    import torch

    return tensor.view(torch.int16).reshape(tensor.shape[0], -1).numpy()


def copy_rows(aux: Sequence[Any], ids: Any, stage: Stage, a: int, b: int) -> None:
    """The first b - a rows of every layer's stream and of the ids into the stage's rows a … b - 1, on the device."""
    import torch

    *lower, last = (x[: b - a] for x in aux)
    if lower and last.dtype == torch.bfloat16:
        torch.stack(lower, dim=1, out=stage.streams[a:b])
    elif lower:
        stage.streams[a:b].copy_(torch.stack(lower, dim=1))
    stage.last[a:b].copy_(last)
    stage.ids[a:b].copy_(ids[: b - a])
