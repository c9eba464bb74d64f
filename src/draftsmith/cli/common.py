"""What the commands share: consoles, JSON output, progress bars."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console()
error_console = Console(stderr=True)


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
