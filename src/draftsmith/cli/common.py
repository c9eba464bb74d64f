"""What the commands share: consoles, JSON output, progress bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment

from draftsmith.untrusted import printable


class CarefulConsole(Console):
    """A console on which no shown text can steer the terminal: names of models, tensors and prompts are others' words
    (docs/security.md). rich makes its own escapes after this point."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            clean = segment.text if segment.control else printable(segment.text)
            yield segment if clean == segment.text else Segment(clean, segment.style)


console = CarefulConsole()
error_console = CarefulConsole(stderr=True)


def print_json(value: Any) -> None:
    """One JSON document on standard output, nothing else."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=str) + "\n")


def progress(unit: str) -> Progress:
    """A progress bar on standard error with rate and remaining time; the task field `rate` is shown as text."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=error_console,
        transient=False,
    )
