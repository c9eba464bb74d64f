"""draftsmith capture: the target answers the recipe's prompts through its server; its token ids are stored as rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer


def register(app: typer.Typer) -> None:
    @app.command("capture")
    def capture(
        recipe: Path = typer.Argument(help="YAML recipe (`draftsmith recipe` prints one to start from)"),
        endpoint: list[str] = typer.Option(
            [], "--endpoint", help="server that already runs the target; may be given many times"
        ),
        preview: int = typer.Option(
            0, min=0, help="dry run: show the rows of so many prompts, supervised tokens coloured"
        ),
        trust_answers: bool = typer.Option(
            False, help="take the answers in the files as they are (the target's own logs) instead of asking again"
        ),
        assistant_role: str | None = typer.Option(None, help="a further name for the assistant in the prompt files"),
        drop_images: bool = typer.Option(False, help="take the text of messages with images (text-only targets)"),
        overrides: list[str] = typer.Option(
            [], "--set", help="section.key=value laid over the recipe; may be repeated"
        ),
        force: bool = typer.Option(False, help="re-make it even if it is done"),
        as_json: bool = typer.Option(False, "--json", help="print the record as JSON"),
    ) -> None:
        """Let the target answer the recipe's prompts; store its token ids.

        It answers through its server, one that runs or one that is started. Prompts are files (JSONL, JSON array or
        parquet of messages, ShareGPT turns, OpenAI request/response logs or plain prompts; .txt with a prompt a line) or
        built-in sets. Killed at any moment, it goes on where it was."""
        from draftsmith.cli.stages import run_one

        given: dict[str, Any] = {
            "endpoints": list(endpoint) or None,
            "trust_answers": trust_answers or None,
            "assistant_role": assistant_role,
            "drop_images": drop_images or None,
        }
        laid_over = [*overrides, *(f"capture.{k}={_yaml(v)}" for k, v in given.items() if v is not None)]
        if not preview:
            run_one("capture", recipe, laid_over, force, as_json)
            return
        from draftsmith.capture.preview import show_preview
        from draftsmith.cli.stages import parse_overrides
        from draftsmith.recipe import load_recipe
        from draftsmith.stage import Run
        from draftsmith.ui import ConsoleUi

        made = load_recipe(recipe, parse_overrides(laid_over))
        show_preview(Run(made, Path(made.folder).resolve(), ConsoleUi()), preview)


def _yaml(value: Any) -> str:
    import json

    return json.dumps(value)
