"""From the device to one file a request, beside the engine's own thread and never in its way.

The runner's thread only starts copies and notes what lies where; a thread of ours waits for them. What a step gave lies
in a ring of host memory (pinned where there is a GPU) until its requests have ended; a file is then written straight
from the ring. A request that outlives its place in the ring is moved out of it first. Where files are not written fast
enough the ring fills and the runner waits: states are never dropped, and memory does not grow.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import NAME, logger
from .kept import Kept, Rows

AT_ONCE = 2
"""Full steps (max_num_batched_tokens rows each) whose states may wait on the device. Steps of answers are small, and
hundreds of them may wait: the runner must not stand still each time our thread comes a few milliseconds late."""
STEPS_CPU, STEPS_GPU = 4, 8
"""Full steps that the ring holds. On a GPU answers of a few hundred tokens then end before their place is needed again, and
nothing of them is moved: 64 at once, 300 tokens of prompt and 256 of answer each, are 36,000 rows; a full step is 8,192."""
SLOW, PERIOD = 0.05, 60.0
"""Share of a period (seconds) that the runner may wait for us before the log says so."""


Placed = list[tuple[Kept, int, int, int]]
"""(request, its first position, first row of the step or of its most likely tokens, how many)."""


@dataclass(eq=False)
class Segment:
    """Rows a … b - 1 of the ring, filled by one step, and what lies there of whom."""

    a: int
    b: int
    number: int
    placed: Placed = field(default_factory=list)


class Ring:
    """`rows` rows of host memory that steps fill one after another. device: pinned where it is a GPU."""

    def __init__(self, rows: int, layers: int, hidden: int, device: Any) -> None:
        import torch

        pin = device.type == "cuda"
        self.streams = torch.empty(rows, layers - 1, hidden, dtype=torch.bfloat16, pin_memory=pin)
        self.last = torch.empty(rows, hidden, dtype=torch.bfloat16, pin_memory=pin)
        self.ids = torch.empty(rows, dtype=torch.int32, pin_memory=pin)
        self.memory = Rows(_bits(self.streams), _bits(self.last), self.ids.numpy())
        self.size, self._head, self._count = rows, 0, 0
        self.filled: deque[Segment] = deque()

    def room(self, n: int, pool: ThreadPoolExecutor, arrive: Callable[[], None]) -> Segment:
        """The next n rows. Waits for files that are written from them; `pool` moves out who goes on, once what is on its
        way has come (`arrive`)."""
        a = self._head if self._head + n <= self.size else 0
        while self.filled:
            old = self.filled[0]
            # Segments lie in the order in which they were filled: the oldest is the first that the head meets.
            skipped = a < self._head and old.a >= self._head
            if not skipped and not (old.a < a + n and a < old.b):
                break
            leaving: list[Future[None]] = []
            for kept, *_ in old.placed:
                if kept.written or (not kept.over and kept.moved >= old.number):
                    continue
                if kept.over:
                    assert kept.future is not None
                    leaving.append(kept.future)
                    continue
                arrive()
                kept.moved = self._count
                # By several threads: one alone, with a ring full of prompts, holds up the engine for a second.
                leaving.append(pool.submit(kept.move_out, self.memory))
            for future in leaving:
                future.result()
            self.filled.popleft()
        self._head, self._count = a + n, self._count + 1
        segment = Segment(a, a + n, self._count)
        self.filled.append(segment)
        return segment


class Waiting:
    """Rows that are on their way, at most `limit` (a single step may be longer); `add` waits for room."""

    def __init__(self, limit: int) -> None:
        self.limit, self.rows = limit, 0
        self._changed = threading.Condition()
        self.stood, self._since = 0.0, time.monotonic()

    def add(self, n: int) -> None:
        with self._changed:
            if self.rows and self.rows + n > self.limit:
                begun = time.monotonic()
                self._changed.wait_for(lambda: not self.rows or self.rows + n <= self.limit)
                self._note(begun)
            self.rows += n

    def done(self, n: int) -> None:
        with self._changed:
            self.rows -= n
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


class Carrier:
    """Takes what the runner's thread hands over, in order; writes files into `folder`. max_tokens: of one step."""

    def __init__(self, folder: Path, layers: Sequence[int], hidden: int, max_tokens: int, threads: int = 0) -> None:
        self.folder, self.layers, self.hidden = folder, layers, hidden
        self._max_tokens = max_tokens
        self._ring: Ring | None = None
        self._coming: list[tuple[Any, ...]] = []
        self._coming_rows = 0
        self._coming_tops: list[tuple[Any, Placed]] = []
        self._stream: Any = None
        self._event: Any = None
        self._jobs: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.waiting = Waiting(AT_ONCE * max_tokens)
        workers = threads or max(2, min(8, (os.cpu_count() or 2) // 4))
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix=f"{NAME}-write")
        self._thread: threading.Thread | None = None

    # the runner's thread

    def rows(self, streams: Any, last: Any, ids: Any, placed: Placed) -> None:
        """This step's streams bf16 [n, layers - 1, hidden], last layer bf16 [n, hidden] and ids int32 [n], all nobody
        else's. Waits where too many steps are on their way."""
        self.waiting.add(ids.shape[0])
        self._give(("rows", streams, last, ids, placed, _mark(ids)))

    def tops(self, found: Any, placed: Placed) -> None:
        """Most likely tokens [m] after positions of the step handed over last."""
        self._give(("tops", found, placed, _mark(found)))

    def ended(self, kept: Kept) -> None:
        """The request is over: write its file."""
        self._give(("ended", kept))

    def _give(self, job: tuple[Any, ...]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"{NAME}-carry", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    # our thread

    def _run(self) -> None:
        while True:
            what, *rest = self._jobs.get()
            try:
                getattr(self, f"_do_{what}")(*rest)
            except Exception as e:  # the engine must go on; the client says that a file is missing
                logger.exception("%s: states could not be taken over: %s", NAME, e)
                self._arrive()
            del rest  # what lies on the device must not wait there for the next job

    # Copies are started as they come and waited for together, once a full step of rows is on its way or a file is to be
    # written: at each wait this thread and the engine's change places, which costs more than a small step's copies.

    def _arrive(self) -> None:
        """Wait until all that was started is in host memory."""
        if self._event is not None and self._coming:
            self._event.record(self._stream)
            self._event.synchronize()
        for host, placed in self._coming_tops:
            found = host.tolist()
            for kept, at, begin, n in placed:
                if n == 1:
                    kept.top_at.append(at)
                    kept.top_of.append(found[begin])
                else:
                    kept.top_at += range(at, at + n)
                    kept.top_of += found[begin : begin + n]
        self._coming_tops, self._coming = [], []
        if self._coming_rows:
            self.waiting.done(self._coming_rows)
            self._coming_rows = 0

    def _do_rows(self, streams: Any, last: Any, ids: Any, placed: Placed, mark: Any) -> None:
        n = ids.shape[0]
        self._coming_rows += n
        if self._ring is None:
            steps = STEPS_GPU if ids.device.type == "cuda" else STEPS_CPU
            self._ring = Ring(max(steps * self._max_tokens, n), len(self.layers), self.hidden, ids.device)
        ring = self._ring
        if n > ring.size:
            raise RuntimeError(f"a step of {n} tokens, where the engine said at most {self._max_tokens}")
        segment = ring.room(n, self.pool, self._arrive)
        here = slice(segment.a, segment.b)
        if mark is None:  # numpy's copies, not torch's: those would start threads beside the engine's
            ring.memory.streams[here], ring.memory.last[here] = _bits(streams), _bits(last)
            ring.memory.ids[here] = ids.numpy()
        else:
            with self._beside(ids.device, mark):
                for host, found in ((ring.streams, streams), (ring.last, last), (ring.ids, ids)):
                    host[here].copy_(found, non_blocking=True)
        self._coming.append((streams, last, ids))
        segment.placed, a = placed, segment.a
        for kept, at, begin, count in placed:
            kept.notes.append((at, a + begin, count))
        if self._coming_rows >= self._max_tokens:
            self._arrive()

    def _do_tops(self, found: Any, placed: Placed, mark: Any) -> None:
        import torch

        if self._ring is None:
            return
        if mark is None:
            host = found.to(torch.int32)
        else:
            with self._beside(found.device, mark):
                found = found.to(torch.int32)
                host = torch.empty(found.shape, dtype=torch.int32, pin_memory=True)
                host.copy_(found, non_blocking=True)
        self._coming.append((found,))
        self._coming_tops.append((host, placed))

    def _do_ended(self, kept: Kept) -> None:
        kept.over = True
        self._arrive()
        if kept.notes or kept.pieces:
            kept.future = self.pool.submit(self._write, kept)
        else:
            kept.written = True

    def _write(self, kept: Kept) -> None:
        try:
            assert self._ring is not None
            kept.settle(self._ring.memory)
            if kept.broken:
                logger.error("%s: positions of %s are missing; it gets no states", NAME, kept.name)
            else:
                kept.write(self.folder, self.layers, self.hidden)
        except OSError as e:
            logger.error("%s: the states of %s could not be written: %s", NAME, kept.name, e)
        except Exception as e:
            logger.exception("%s: the states of %s could not be gathered: %s", NAME, kept.name, e)
        finally:
            kept.forget()  # the ring's segments name it until they are filled again
            kept.written = True

    def _beside(self, device: Any, mark: Any) -> Any:
        """A stream of our own that goes on where the runner's was at `mark`. Copies on it go to pinned memory alone: one to
        other memory holds the driver until all before it is computed, and the engine's thread could start nothing
        meanwhile (on one H200 a prefill step of 190 ms took 9 ms longer, one of answers nearly twice as long)."""
        import torch

        if self._stream is None:
            torch.cuda.set_device(device)
            self._stream = torch.cuda.Stream(device)
            self._event = torch.cuda.Event(blocking=True)
        self._stream.wait_event(mark)
        return torch.cuda.stream(self._stream)


def _bits(tensor: Any) -> Any:
    """bf16 [rows, …] → its memory as int16 [rows, n]."""
    import torch

    return tensor.view(torch.int16).reshape(tensor.shape[0], -1).numpy()


def _mark(tensor: Any) -> Any:
    """Where the runner's stream is now; None on a CPU."""
    if tensor.device.type != "cuda":
        return None
    import torch

    event = torch.cuda.Event()
    event.record()
    return event
