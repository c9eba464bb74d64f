"""What long work shows while it runs: a task with a rate and a remaining time, notes and warnings.

Stages get a `Ui` and never print themselves, so that they stay silent in tests and under `--json`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from draftsmith.untrusted import printable


class Task(Protocol):
    def advance(self, n: float = 1, info: str = "") -> None: ...


class Ui(Protocol):
    """Where a stage reports."""

    @contextmanager
    def task(self, title: str, total: float, unit: str) -> Iterator[Task]:
        """Progress of `total` units; `info` of `advance` is a short changing text (loss, counts)."""
        yield _Silent()

    def note(self, text: str) -> None:
        """One line worth reading: counts by reason, a choice made."""

    def warn(self, text: str) -> None:
        """One line that the user should act on."""


class _Silent:
    def advance(self, n: float = 1, info: str = "") -> None:
        pass


class QuietUi:
    """Collects notes and warnings, shows nothing."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    @contextmanager
    def task(self, title: str, total: float, unit: str) -> Iterator[Task]:
        yield _Silent()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


class _Line:
    """Progress as plain lines every few seconds, for logs and pipes."""

    def __init__(self, title: str, total: float, unit: str, every: float = 15.0) -> None:
        self.title, self.total, self.unit, self.every = title, total, unit, every
        self.done, self.started, self.last = 0.0, time.monotonic(), time.monotonic()

    def advance(self, n: float = 1, info: str = "") -> None:
        self.done += n
        now = time.monotonic()
        if now - self.last >= self.every:
            self.last = now
            self.show(info)

    def show(self, info: str = "") -> None:
        spent = max(time.monotonic() - self.started, 1e-9)
        rate = self.done / spent
        left = f", {(self.total - self.done) / rate:,.0f} s left" if rate else ""
        print(
            printable(
                f"{self.title}: {self.done:,.0f} of {self.total:,.0f} {self.unit}, {rate:,.1f} {self.unit}/s{left} {info}"
            ),
            file=sys.stderr,
            flush=True,
        )


class ConsoleUi:
    """Rich bars on a terminal, plain lines elsewhere; everything goes to standard error."""

    def __init__(self) -> None:
        from draftsmith.cli.common import error_console

        self.console = error_console

    @contextmanager
    def task(self, title: str, total: float, unit: str) -> Iterator[Task]:
        if not self.console.is_terminal:
            line = _Line(title, total, unit)
            yield line
            line.show()
            return
        from draftsmith.cli.common import progress

        with progress(unit) as bar:
            handle = bar.add_task(title, total=total, rate="")
            started = time.monotonic()

            class Bar:
                done = 0.0

                def advance(self, n: float = 1, info: str = "") -> None:
                    self.done += n
                    rate = self.done / max(time.monotonic() - started, 1e-9)
                    bar.update(handle, advance=n, rate=f"{rate:,.1f}/s {info}")

            yield Bar()

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)
