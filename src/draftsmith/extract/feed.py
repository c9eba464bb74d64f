"""Packs of states in the order in which the trainer will ask for them, made ahead by engines up to a bound of bytes.

Back-pressure works both ways: engines wait while the buffer is full, the trainer waits while its next pack is not
there. Packs are numbered; each number is made until it is there and given out once, in order, whatever engine made it
and however often that one died.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from draftsmith.extract.buffer import Buffer
from draftsmith.extract.engines import Engine
from draftsmith.extract.rows import Item
from draftsmith.extract.states import States

Pack = Sequence[Item]


@dataclass
class FeedFigures:
    """bytes held now and at most; seconds that the trainer waited for engines, and they (together) for it."""

    held: int = 0
    peak: int = 0
    packs: int = 0
    starved: float = 0.0
    blocked: float = 0.0


@dataclass
class _Open:
    """What the threads share; under the condition."""

    reserved: dict[int, int] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    waiting: list[tuple[int, Pack]] = field(default_factory=list)
    made: int = 0
    given: int = 0
    ended: bool = False
    working: int = 0
    error: BaseException | None = None


class Feed:
    """Iterate it: (pack, its states), in order. limit: bytes that may wait or be in the making (one pack always may).

    `close` stops the threads; engines stay as they are and may serve another feed."""

    def __init__(
        self, engines: Sequence[Engine], packs: Iterable[Pack], buffer: Buffer, limit: int, figures: FeedFigures
    ) -> None:
        self.buffer, self.limit, self.figures = buffer, limit, figures
        self._packs = iter(packs)
        self._order: dict[int, Pack] = {}
        self._state = _Open()
        self._changed = threading.Condition()
        self._stop = False
        lanes = [(e, n) for n in range(max(e.lanes for e in engines)) for e in engines if n < e.lanes]
        self._threads = [
            threading.Thread(target=self._work, args=(e,), name=f"{e.name}.{n}", daemon=True) for e, n in lanes
        ]
        self._state.working = len(self._threads)
        for t in self._threads:
            t.start()

    # engines' side

    def _next_job(self) -> tuple[int, Pack] | None:
        """The lowest pack that nobody is making, once there is room for it; None when there is none left."""
        s, began = self._state, time.monotonic()
        with self._changed:
            while not self._stop and s.error is None:
                if not s.waiting and not s.ended:
                    self._pull()
                if s.waiting:
                    job = min(s.waiting, key=lambda j: j[0])
                    if self._reserve(*job):
                        s.waiting.remove(job)
                        self.figures.blocked += time.monotonic() - began
                        return job
                elif s.ended and not s.reserved:
                    return None  # all are taken over: nothing can come back any more
                self._changed.wait(0.5)
        return None

    def _pull(self) -> None:
        s = self._state
        pack = next(self._packs, None)
        if pack is None:
            s.ended = True
            self._changed.notify_all()
        else:
            s.waiting.append((s.made, pack))
            self._order[s.made] = pack
            s.made += 1

    def _reserve(self, number: int, pack: Pack) -> bool:
        """Whether the pack may be made now. The one that the trainer waits for always may: it must not wait for room
        that only the trainer could make."""
        s = self._state
        if number in s.reserved:  # of an engine that could not make it
            return True
        size, total = self.buffer.size(pack), sum(s.reserved.values())
        if s.reserved and total + size > self.limit and number != s.given:
            return False
        s.reserved[number] = size
        self.figures.held = total + size
        self.figures.peak = max(self.figures.peak, total + size)
        return True

    def _work(self, engine: Engine) -> None:
        s = self._state
        try:
            while (job := self._next_job()) is not None:
                number, pack = job
                try:
                    states = engine.compute(pack)
                except Exception as e:
                    # this engine cannot be had any more: another takes the pack, the last one's failure is everyone's
                    with self._changed:
                        s.waiting.append(job)
                        if s.working == 1:
                            s.error = e
                    return
                self.buffer.put(number, states)
                with self._changed:
                    s.ready.add(number)
                    self._changed.notify_all()
        except BaseException as e:
            with self._changed:
                s.error = s.error or e
        finally:
            with self._changed:
                s.working -= 1
                self._changed.notify_all()

    # the trainer's side

    def __iter__(self) -> Iterator[tuple[Pack, list[States]]]:
        s = self._state
        while True:
            began = time.monotonic()
            with self._changed:
                number = s.given
                while number not in s.ready:
                    if s.error is not None:
                        raise s.error
                    if self._stop or (s.ended and number >= s.made):
                        return
                    self._changed.wait(0.5)
                self.figures.starved += time.monotonic() - began
            states = self.buffer.take(number)
            with self._changed:
                s.ready.discard(number)
                self.figures.held -= s.reserved.pop(number)
                self.figures.packs += 1
                s.given += 1
                pack = self._order.pop(number)
                self._changed.notify_all()
            yield pack, states

    def close(self, wait: float = 60.0) -> None:
        """Stop making packs; what was made and not asked for is dropped."""
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        for t in self._threads:
            t.join(wait)
        self.buffer.close()
