"""`draftsmith diagnose`: why is acceptance low? Causes in order of likelihood, with evidence and fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from draftsmith.cli.common import console, print_json
from draftsmith.errors import Exit, UserError


def show(found: dict[str, Any]) -> None:
    """The causes as text, likeliest first."""
    a = found["acceptance"]
    if a is None:
        console.print("the files cannot be replayed: they do not hold a whole drafter", highlight=False)
    else:
        console.print(
            f"replayed {found['rows']} rows: acceptance length {a['acceptance_length']:.2f}, per position "
            f"{' '.join(f'{p:.2f}' for p in a['acceptance_per_position'])}, {found['nats_per_token']:.2f} nats per token",
            highlight=False,
            soft_wrap=True,
        )
    if not found["causes"]:
        console.print("nothing wrong found: files, states, template, map and settings agree")
    for i, c in enumerate(found["causes"], 1):
        console.print(f"{i}. {c['cause']}", style="bold", markup=False, highlight=False, soft_wrap=True)
        for line in c["evidence"]:
            console.print(f"   {line}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"   fix: {c['fix']}", markup=False, highlight=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    @app.command("diagnose", help="Say why acceptance is low: likeliest causes first, with a fix.")
    def diagnose(
        run: Path = typer.Option(None, help="a run's folder: target, drafter, rows and states are found in it"),
        target: str = typer.Option(None, help="folder of the target"),
        drafter: Path = typer.Option(None, help="folder of the exported drafter, any dialect"),
        rows: Path = typer.Option(None, help="folder of captured rows"),
        states: Path = typer.Option(None, help="folder of the states it was trained on, to be audited"),
        bench: Path = typer.Option(None, help="bench.json of this drafter, in place of the run's"),
        engine: str = typer.Option(None, help="environment of the engine; none = the managed one"),
        sample: int = typer.Option(24, help="rows to replay"),
        max_tokens: int = typer.Option(512, help="tokens of a row to replay"),
        steps: int = typer.Option(3, help="draft steps as served"),
        apply: Path = typer.Option(None, help="write the drafter, mended by the likeliest cause, to this folder"),
        as_json: bool = typer.Option(False, "--json", help="print the causes as JSON"),
    ) -> None:
        from draftsmith.diagnose.load import load_subject
        from draftsmith.diagnose.rank import apply as write_mended
        from draftsmith.diagnose.rank import diagnose as find_causes
        from draftsmith.record import read_json, write_json
        from draftsmith.ui import ConsoleUi, QuietUi

        ui = QuietUi() if as_json else ConsoleUi()
        measured = read_json(bench) if bench is not None else None
        subject = load_subject(
            run, target, drafter, rows, states, sample, max_tokens, steps, engine, ui, bench=measured
        )
        if isinstance(subject, dict):
            found = subject
        else:
            found = find_causes(subject, ui)
        causes = found.pop("_causes", [])
        if run is not None:
            write_json(run / "diagnose" / "diagnosis.json", found)
        if as_json:
            print_json(found)
        else:
            show(found)
        if apply is not None:
            mendable = [c for c in causes if c.setup is not None]
            if not mendable or isinstance(subject, dict):
                raise UserError(
                    "no cause that was found can be mended in the drafter's files",
                    "" if not found["causes"] else found["causes"][0]["cause"],
                    "follow the fix above",
                )
            write_mended(mendable[0], subject, apply)
            ui.note(f"wrote the mended drafter to {apply}: {mendable[0].cause}")
        if found["causes"] and found["causes"][0]["score"] > 1.0 and not apply:
            raise typer.Exit(int(Exit.NO))
