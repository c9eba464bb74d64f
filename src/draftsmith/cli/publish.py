"""`draftsmith publish`: a drafter with a model card made from its records, to a folder or a hub repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from draftsmith.cli.common import console, print_json


def register(app: typer.Typer) -> None:
    @app.command(
        "publish",
        help="Give a drafter away, with a model card made from its records.\n\n"
        "The card names target, data, figures with their definitions, the engine it was checked with and how to serve "
        "it. The hub's token is taken from HF_TOKEN only, its address from HF_ENDPOINT.",
    )
    def publish(
        source: Path = typer.Argument(..., metavar="DIR", help="a run's folder, or an exported drafter"),
        destination: str = typer.Argument(
            ..., metavar="REPO|FOLDER", help="owner/name on the hub; or a folder: ./name or any path"
        ),
        licence: str = typer.Option(None, "--license", help="licence of the drafter, as the hub writes it: apache-2.0"),
        public: bool = typer.Option(False, help="make a new hub repository public"),
        as_json: bool = typer.Option(False, "--json", help="print what was written as JSON"),
    ) -> None:
        from draftsmith.publish.push import is_repository, to_folder, to_hub

        if is_repository(destination):
            address = to_hub(source, destination, licence, private=not public)
            found: dict[str, Any] = {"repository": destination, "address": address}
        else:
            found = {"folder": destination, "files": to_folder(source, Path(destination).expanduser(), licence)}
        if as_json:
            print_json(found)
        elif "address" in found:
            console.print(f"published as {found['address']}", markup=False)
        else:
            console.print(f"wrote {', '.join(found['files'])} to {destination}", markup=False, soft_wrap=True)
