"""vocab, extract, train, export, report: each one stage of a recipe (capture, check and bench have files of their own)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
import yaml

from draftsmith.cli.common import print_json
from draftsmith.errors import UserError

HELP = {
    "vocab": "Choose the draft vocabulary from the captured answers.",
    "extract": "Make the hidden states of the captured rows.",
    "train": "Train (or fine-tune) the drafter on the states; the best checkpoint is chosen by acceptance.",
    "export": "Write the best checkpoint in the engine's dialect, nothing left to a default.",
    "report": "Make the run's page: one self-contained HTML file.",
}


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """`section.key=value` options as a dict; values are YAML. UserError on a pair without '='."""
    out: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign:
            raise UserError(f"--set {pair!r} has no '='", "", "write --set section.key=value, e.g. --set train.seed=1")
        try:
            out[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as e:
            raise UserError(f"--set {pair!r}: the value is no YAML: {e}", "", "quote it") from None
    return out


def run_one(name: str, recipe_path: Path, overrides: list[str], force: bool, as_json: bool) -> None:
    """Run one stage from the command line and print its result."""
    from draftsmith.pipeline import open_run, run_stage
    from draftsmith.recipe import load_recipe
    from draftsmith.ui import ConsoleUi

    ui = ConsoleUi()
    run = open_run(load_recipe(recipe_path, parse_overrides(overrides)), ui)
    record = run_stage(run, name, force)
    if as_json:
        print_json(record)
    else:
        state = "already done" if record.get("skipped") else f"done in {record['seconds']:.0f} s"
        ui.note(f"{name}: {state}, {run.stage_dir(name)}")
        for key, value in record["result"].items():
            if not isinstance(value, dict | list) and not key.endswith("hash"):
                ui.note(f"  {key}: {value}")


def register(app: typer.Typer) -> None:
    for name, text in HELP.items():
        _add(app, name, text)


def _add(app: typer.Typer, name: str, text: str) -> None:
    @app.command(name, help=text)
    def command(
        recipe: Path = typer.Argument(help="YAML recipe (recipes/demo.yaml is an example)"),
        overrides: list[str] = typer.Option(
            [], "--set", help="section.key=value laid over the recipe; may be repeated"
        ),
        force: bool = typer.Option(False, help="re-make it even if it is done"),
        as_json: bool = typer.Option(False, "--json", help="print the record as JSON"),
    ) -> None:
        run_one(name, recipe, overrides, force, as_json)
