"""Command lines of draftsmith, parsed by draftsmith's own parser and not run."""

from __future__ import annotations

from typing import Any

import typer

from draftsmith.cli.main import app


def parse(words: list[str]) -> None:
    """Raises the parser's own error where `draftsmith WORDS…` is no command of ours, or has an option it does not know."""
    command: Any = typer.main.get_command(app)
    context, rest = command.context_class(command, info_name="draftsmith"), list(words)
    while hasattr(command, "get_command"):
        found = command.get_command(context, rest[0]) if rest else None
        if found is None:
            raise ValueError(f"draftsmith has no command {' '.join(words)!r}")
        command, rest = found, rest[1:]
    command.make_context(command.name, rest, parent=context)
