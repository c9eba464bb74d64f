"""vocab, extract, train, export, report: each one stage of a recipe (capture, check and bench have files of their own)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
import yaml

from draftsmith.cli.common import print_json
from draftsmith.errors import UserError

if TYPE_CHECKING:
    from draftsmith.stage import Run

HELP = {
    "vocab": "Choose the draft vocabulary from the captured answers.",
    "extract": "Make the hidden states of the captured rows.",
    "train": "Train or fine-tune the drafter on the states.\n\nThe best checkpoint is chosen by acceptance on rows held out. "
    "Killed at any moment, the same command goes on.",
    "export": "Write the best checkpoint for the engine.\n\nIn its dialect, nothing left to a default, read back bit for bit.",
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


def run_one(
    name: str, recipe_path: Path, overrides: list[str], force: bool, as_json: bool, stream: bool = False
) -> None:
    """Run one stage from the command line and print its result. stream: train from running engines."""
    from draftsmith.pipeline import open_run, run_stage
    from draftsmith.recipe import load_recipe
    from draftsmith.ui import ConsoleUi

    ui = ConsoleUi()
    settings = parse_overrides(overrides)
    recipe = load_recipe(recipe_path, settings)
    run = open_run(recipe, ui)
    if stream:
        run = _streaming(recipe_path, settings, run)
    record = run_stage(run, name, force)
    if as_json:
        print_json(record)
    else:
        state = "already done" if record.get("skipped") else f"done in {record['seconds']:.0f} s"
        ui.note(f"{name}: {state}, {run.stage_dir(name)}")
        for key, value in record["result"].items():
            if not isinstance(value, dict | list) and not key.endswith("hash"):
                ui.note(f"  {key}: {value}")


def _streaming(recipe_path: Path, settings: dict[str, Any], run: Run) -> Run:
    """The run with `train.stream` on. Where extract has not run, its checks are made now and nothing is stored; a store
    that is there stays."""
    from draftsmith.pipeline import open_run, run_stage
    from draftsmith.recipe import load_recipe
    from draftsmith.record import read_record

    if run.recipe.train.stream == "off":
        settings = settings | {"train.stream": "memory"}
    done = (read_record(run.stage_dir("extract")) or {}).get("status") == "done"
    if not done:
        settings = settings | {"extract.keep": "never"}
    run = open_run(load_recipe(recipe_path, settings), run.ui)
    if not done:
        run_stage(run, "extract")
    return run


def register(app: typer.Typer) -> None:
    for name, text in HELP.items():
        if name != "train":
            _add(app, name, text)

    @app.command("train", help=HELP["train"])
    def train(
        recipe: Path = typer.Argument(help="YAML recipe (`draftsmith recipe` prints one to start from)"),
        overrides: list[str] = typer.Option(
            [], "--set", help="section.key=value laid over the recipe; may be repeated"
        ),
        stream: bool = typer.Option(
            False, "--stream", help="read the states from running engines, through a bounded buffer; nothing is stored"
        ),
        force: bool = typer.Option(False, help="re-make it even if it is done"),
        as_json: bool = typer.Option(False, "--json", help="print the record as JSON"),
    ) -> None:
        run_one("train", recipe, overrides, force, as_json, stream)


def _add(app: typer.Typer, name: str, text: str) -> None:
    @app.command(name, help=text)
    def command(
        recipe: Path = typer.Argument(help="YAML recipe (`draftsmith recipe` prints one to start from)"),
        overrides: list[str] = typer.Option(
            [], "--set", help="section.key=value laid over the recipe; may be repeated"
        ),
        force: bool = typer.Option(False, help="re-make it even if it is done"),
        as_json: bool = typer.Option(False, "--json", help="print the record as JSON"),
    ) -> None:
        run_one(name, recipe, overrides, force, as_json)
