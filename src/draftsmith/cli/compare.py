"""`draftsmith compare`: runs side by side, as a page and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from draftsmith.cli.common import console, print_json


def register(app: typer.Typer) -> None:
    app.command("compare")(compare)


def compare(
    runs: list[Path] = typer.Argument(..., help="two or more folders of runs or benches"),
    out: Path = typer.Option(None, help="write the page to this file; none = only print the table"),
    as_json: bool = typer.Option(False, "--json", help="print the comparison as JSON"),
) -> None:
    """Put runs side by side, with what differs in their recipes.

    Figures, predicted and measured acceptance, speed-up.
    """
    from draftsmith.record import atomic_write
    from draftsmith.report.compare import compare as of
    from draftsmith.report.compare import render

    found = of(runs)
    if out is not None:
        atomic_write(out, render(found))
    shown = {k: v for k, v in found.items() if not k.startswith("_")}
    if as_json:
        print_json(shown | {"page": str(out) if out else None})
        return
    show(shown)
    if out is not None:
        console.print(f"wrote {out}", highlight=False)


def show(found: dict[str, Any]) -> None:
    """The table as text."""
    from rich.table import Table

    from draftsmith.report.page import number

    table = Table("figure", *map(str, found["runs"]))
    for row in found["figures"]:
        table.add_row(row["name"], *(number(v) for v in row["values"]))
    console.print(table)
    for part in ("recipe", "contract", "engine"):
        for key, values in found[part].items():
            console.print(
                f"{part} {key}: {' | '.join(map(str, values))}", markup=False, highlight=False, soft_wrap=True
            )
    if found["note"]:
        console.print(str(found["note"]), highlight=False)
