"""`draftsmith run RECIPE`: the whole road, resumable, one table at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from draftsmith.cli.common import console, print_json
from draftsmith.cli.stages import parse_overrides


def finish(folder: Path, rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print the closing table and figures of a run."""
    from draftsmith.report.summary import closing_lines

    if as_json:
        print_json({"run": str(folder), "stages": rows})
        return
    table = Table(title=f"{folder.name}", title_justify="left")
    for column in ("stage", "status", "seconds", "result"):
        table.add_column(column, justify="right" if column == "seconds" else "left")
    for row in rows:
        table.add_row(row["stage"], row["status"], f"{row['seconds']:.0f}", closing_lines(row["stage"], row["result"]))
    console.print(table)
    for row in rows:
        if row["stage"] == "export" and row["result"].get("folder"):
            console.print(f"drafter: {row['result']['folder']}", soft_wrap=True, highlight=False, markup=False)
    page = folder / "report" / "index.html"
    if page.exists():
        console.print(f"report: {page}", soft_wrap=True, highlight=False)


def register(app: typer.Typer) -> None:
    @app.command(
        "run",
        help="Walk the whole road of a recipe; skip what is done.\n\n"
        "The stages: capture, vocab, extract, train, export, check, bench, report. Killed at any moment, the same "
        "command goes on.",
    )
    def run(
        recipe: Path = typer.Argument(help="YAML recipe (`draftsmith recipe` prints one to start from)"),
        overrides: list[str] = typer.Option(
            [], "--set", help="section.key=value laid over the recipe; may be repeated"
        ),
        until: str = typer.Option(None, help="stop after this stage (one of those above)"),
        force: str = typer.Option(None, help="re-make this stage even if it is done"),
        as_json: bool = typer.Option(False, "--json", help="print the records as JSON"),
    ) -> None:
        from draftsmith.pipeline import run_all
        from draftsmith.recipe import load_recipe
        from draftsmith.ui import ConsoleUi

        loaded = load_recipe(recipe, parse_overrides(overrides))
        finish(Path(loaded.folder).resolve(), run_all(loaded, ConsoleUi(), until, force), as_json)
