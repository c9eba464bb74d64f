"""One GPU, several benchmark processes: they import and compile side by side and time one at a time."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path


class Gate:
    """`shared` while building and compiling, `exclusive` while warming up and timing. Fair: who waits for the
    exclusive lock holds the turn, so that nobody new gets in before."""

    def __init__(self) -> None:
        folder = Path(tempfile.gettempdir())
        self.lock = (folder / "draftsmith-bench.lock").open("w")
        self.turn = (folder / "draftsmith-bench.turn").open("w")

    def _take(self, mode: int) -> None:
        fcntl.flock(self.lock, fcntl.LOCK_UN)
        fcntl.flock(self.turn, fcntl.LOCK_EX)
        fcntl.flock(self.lock, mode)
        fcntl.flock(self.turn, fcntl.LOCK_UN)

    def shared(self) -> None:
        self._take(fcntl.LOCK_SH)

    def exclusive(self) -> None:
        self._take(fcntl.LOCK_EX)

    def free(self) -> None:
        fcntl.flock(self.lock, fcntl.LOCK_UN)
