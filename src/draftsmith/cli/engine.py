"""`draftsmith engine`: install the managed engine, or say what an installed one is."""

from __future__ import annotations

from pathlib import Path

import typer

from draftsmith.cli.common import console, print_json


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Install a managed vLLM, or show the one that is found.")

    @group.command("install")
    def install(
        version: str | None = typer.Option(None, "--version", help="Release to install instead of the tested one."),
        platform: str | None = typer.Option(
            None, "--platform", help="cpu or cuda; none = cuda where an NVIDIA GPU answers, else cpu."
        ),
        wheelhouse: Path | None = typer.Option(
            None, "--wheelhouse", help="Install from this folder of wheels, without a package index."
        ),
        force: bool = typer.Option(False, "--force", help="Throw an existing environment away and make it anew."),
        as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    ) -> None:
        """Make a managed environment with vLLM.

        What is known to break there is mended, and that it imports is verified. It lies in $DRAFTSMITH_HOME/engines
        (default ~/.cache/draftsmith/engines). Killed, the same command goes on."""
        from draftsmith.engine.facts import describe
        from draftsmith.engine.install import install as make
        from draftsmith.ui import ConsoleUi, QuietUi

        engine = make(
            version, platform=platform, wheelhouse=wheelhouse, force=force, ui=QuietUi() if as_json else ConsoleUi()
        )
        found = describe(engine)
        if as_json:
            print_json(found)
        else:
            _show(found)

    @group.command("show")
    def show(
        engine: str | None = typer.Option(
            None, "--engine", help="Interpreter, environment or site-packages folder; none = the managed one."
        ),
        as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    ) -> None:
        """Say which engine was found, where, and with what.

        Version, interpreter, platform, torch, triton, plugin state. Reads files only."""
        from draftsmith.engine.facts import describe
        from draftsmith.engine.find import find_engine

        found = describe(find_engine(engine))
        if as_json:
            print_json(found)
        else:
            _show(found)

    app.add_typer(group, name="engine")


def _show(found: dict[str, object]) -> None:
    for key, value in found.items():
        text = "-" if value is None else str(value)
        console.print(f"{key:<14} {text}", markup=False, highlight=False, soft_wrap=True)
