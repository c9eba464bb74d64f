"""From the device to one file a request, beside the engine's own thread and never in its way.

The runner's thread copies a step's states into rows that are kept for it on the device and notes whose they are: nothing is
done there a request, for hundreds of them run at once and the engine computes its next step meanwhile. A thread of ours
takes what several small steps have left there in one copy to a ring of host memory (pinned where there is a GPU): each time
the two change places costs the engine more than a step's copies do. A request's file is written straight from the ring once
it has ended; one that outlives its place is moved out of it first. Where files are not written fast enough the ring fills,
then the rows on the device, and the runner waits: states are never dropped, and memory does not grow.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import NAME, logger
from .kept import Kept, Piece
from .ring import Ring, Stage, bits, copy_rows

AT_ONCE = 2
"""Full steps (max_num_batched_tokens rows each) that may wait on the device."""
STEPS_CPU, STEPS_GPU = 4, 8
"""Full steps that the ring holds. On a GPU answers of a few hundred tokens then end before their place is needed again, and
nothing of them is moved: 64 at once, 300 tokens of prompt and 256 of answer each, are 36,000 rows; a full step is 8,192."""
PAUSE = 0.025
"""Seconds that small steps are gathered for."""
URGENT = 4
"""Where this part of a full step waits, it is taken at once."""
FULL, FULL_PAUSE = 100.0, 0.1
"""Seconds for which a file waits for room on a full disk (the client takes others away meanwhile, and waits for this one
120 s), and between tries."""


@dataclass(eq=False, slots=True)
class Step:
    """What a step left on the device: n rows from row a on; the rows after `a` of the stage's `tops` hold the most likely
    tokens of the step's rows `tops`. numbers, at, counts: as Ring.fill takes them. members: the requests. upto: what the
    stage is told once it was copied. mark: where the runner's stream was when all was there, None on a CPU."""

    a: int = 0
    n: int = 0
    upto: int = 0
    numbers: Any = None
    at: Any = None
    counts: Any = None
    members: Sequence[Kept | None] = ()
    tops: list[Any] = field(default_factory=list)
    found: int = 0
    ended: list[Kept] = field(default_factory=list)
    mark: Any = None


class Carrier:
    """Takes what the runner's thread hands over, in order; writes files into `folder`. max_tokens: of one step."""

    def __init__(self, folder: Path, layers: Sequence[int], hidden: int, max_tokens: int, threads: int = 0) -> None:
        self.folder, self.layers, self.hidden = folder, layers, hidden
        self.max_tokens = max_tokens
        self.stage: Stage | None = None
        self.ring: Ring | None = None
        self.requests: dict[int, Kept] = {}
        """Those whose states came and that have no file yet, by number."""
        self._step = Step()
        self._given: deque[Step] = deque()
        self._wake, self._asleep, self._urgent = threading.Event(), False, False
        self._members: Sequence[Kept | None] = ()
        self._stream: Any = None
        self._event: Any = None
        self._tops: Any = None
        workers = threads or max(2, min(8, (os.cpu_count() or 2) // 4))
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix=f"{NAME}-write")
        self._thread: threading.Thread | None = None

    # the runner's thread

    def rows(
        self, aux: Sequence[Any], ids: Any, numbers: Any, at: Any, counts: Any, members: Sequence[Kept | None]
    ) -> None:
        """This step's streams [rows, hidden] of each layer and its ids [rows], rows in the order of the batch.

        numbers, at, counts: int32 [requests], each request's number (0: nobody's), first position and rows in this step;
        members: the requests themselves. Waits where too much is on its way."""
        n = int(counts.sum())
        if self.stage is None:
            self.stage = Stage(AT_ONCE * self.max_tokens, len(self.layers), self.hidden, ids.device)
        if n > self.stage.size:
            logger.error("%s: a step of %d tokens, where the engine said at most %d", NAME, n, self.max_tokens)
            return
        step = self._step
        step.a, step.upto = self.stage.room(n, self._call)
        step.n, step.numbers, step.at, step.counts, step.members = n, numbers, at, counts, members
        copy_rows(aux, ids, self.stage, step.a, step.a + n)

    def tops(self, found: Any, rows: Any) -> None:
        """Most likely tokens [m] after these rows, int [m], of the step whose rows were handed over last."""
        step = self._step
        if step.n:
            assert self.stage is not None
            begin = step.a + step.found
            self.stage.tops[begin : begin + len(rows)].copy_(found)
            step.found += len(rows)
            step.tops.append(rows)

    def ended(self, kept: Kept) -> None:
        """The request is over: write its file."""
        self._step.ended.append(kept)

    def commit(self, urgent: bool = False) -> None:
        """The step is complete. urgent: someone waits for its files alone."""
        step = self._step
        if not step.n and not step.ended:
            return
        self._step = Step()
        if step.n:
            assert self.stage is not None
            step.mark = _mark(self.stage.device)
        self._given.append(step)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"{NAME}-carry", daemon=True)
            self._thread.start()
        if urgent or step.n * URGENT >= self.max_tokens:
            self._call()
        elif self._asleep:
            self._wake.set()

    def _call(self) -> None:
        self._urgent = True
        self._wake.set()

    # our thread

    def _run(self) -> None:
        while True:
            self._asleep = True
            if not self._given:
                self._wake.wait()
            self._asleep = False
            self._wake.clear()
            if not self._urgent:
                self._wake.wait(PAUSE)
            self._urgent = False
            self._take()

    def _take(self) -> None:
        """All that was handed over, as many steps at once as lie one behind the other and are not more than a full one."""
        while self._given:
            steps = [self._given.popleft()]
            n, end, upto = steps[0].n, steps[0].a + steps[0].n, steps[0].upto
            while self._given:
                step = self._given[0]
                if step.n and n and (step.a != end or n + step.n > self.max_tokens):
                    break
                steps.append(self._given.popleft())
                if step.n:
                    n, end, upto = n + step.n, step.a + step.n, step.upto
            try:
                if n:
                    self._copy([s for s in steps if s.n], n)
            except Exception as e:  # the engine must go on; the client says that a file is missing
                logger.exception("%s: states could not be taken over: %s", NAME, e)
            finally:
                if n:
                    assert self.stage is not None
                    self.stage.free(upto)
            for step in steps:
                for kept in step.ended:
                    if kept.number in self.requests:
                        kept.future = self.pool.submit(self._write, kept)

    def _copy(self, steps: list[Step], n: int) -> None:
        """n rows of steps that lie one behind the other: to the ring, and whose they are."""
        import numpy as np

        stage = self.stage
        assert stage is not None
        if self.ring is None:
            full = STEPS_GPU if stage.device.type == "cuda" else STEPS_CPU
            self.ring = Ring(full * self.max_tokens, len(self.layers), self.hidden, stage.device)
        for step in steps:
            if step.members is not self._members:
                self._members = step.members
                self.requests.update((k.number, k) for k in step.members if k is not None)
        ring, a = self.ring, steps[0].a
        first = ring.room(n, self.requests, self.pool)
        there, here = slice(a, a + n), slice(first, first + n)
        if steps[-1].mark is None:  # numpy's copies, not torch's: those would start threads beside the engine's
            ring.memory.streams[here], ring.memory.last[here] = bits(stage.streams[there]), bits(stage.last[there])
            ring.memory.ids[here], tops = stage.ids[there].numpy(), stage.tops[there].numpy()
        else:
            tops = self._from_gpu(stage, ring, there, here, steps[-1].mark)
        ring.fill(first, *(np.concatenate([getattr(s, k) for s in steps]) for k in ("numbers", "at", "counts")))
        for step in steps:
            begin = step.a - a
            for rows in step.tops:
                ring.memory.tops[first + step.a - a + rows] = tops[begin : begin + len(rows)]
                begin += len(rows)

    def _from_gpu(self, stage: Stage, ring: Ring, there: slice, here: slice, mark: Any) -> Any:
        """Copies on a stream of our own that goes on where the runner's was at `mark`; → the most likely tokens. They go to
        pinned memory alone: one to other memory holds the driver until all before it is computed, and the engine's thread
        could start nothing meanwhile (on one H200 a prefill step of 190 ms took 9 ms longer, one of answers nearly twice
        as long)."""
        import torch

        if self._stream is None:
            torch.cuda.set_device(stage.device)
            self._stream = torch.cuda.Stream(stage.device)
            self._event = torch.cuda.Event(blocking=True)
            self._tops = torch.empty(stage.size, dtype=torch.int32, pin_memory=True)
        tops = self._tops[: there.stop - there.start]
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            for host, device in ((ring.streams, stage.streams), (ring.last, stage.last), (ring.ids, stage.ids)):
                host[here].copy_(device[there], non_blocking=True)
            tops.copy_(stage.tops[there], non_blocking=True)
            self._event.record(self._stream)
        self._event.synchronize()
        return tops.numpy()

    def _write(self, kept: Kept) -> None:
        try:
            assert self.ring is not None
            pieces = kept.pieces(self.ring.find(kept))
            until = time.monotonic() + FULL
            while not self._written(kept, pieces, time.monotonic() > until):
                time.sleep(FULL_PAUSE)
        except ValueError as e:
            logger.error("%s: %s of %s; it gets no states", NAME, e, kept.name)
        except OSError as e:
            logger.error("%s: the states of %s could not be written: %s", NAME, kept.name, e)
        except Exception as e:
            logger.exception("%s: the states of %s could not be gathered: %s", NAME, kept.name, e)
        finally:
            kept.moved = []  # the last steps name it until others come
            del self.requests[kept.number]

    def _written(self, kept: Kept, pieces: list[Piece], last: bool) -> bool:
        """Whether there was room for the file. OSError: of another kind, or at the `last` try."""
        try:
            kept.write(pieces, self.folder, self.layers, self.hidden)
        except OSError as e:
            if e.errno != errno.ENOSPC or last:
                raise
            return False
        return True


def _mark(device: Any) -> Any:
    """Where the runner's stream is now; None on a CPU."""
    if device.type != "cuda":
        return None
    import torch

    event = torch.cuda.Event()
    event.record()
    return event
