"""`draftsmith demo`: a drafter for SmolLM2-135M-Instruct, made, served in a real vLLM and measured, from nothing."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import typer

from draftsmith.cli.stages import parse_overrides


def register(app: typer.Typer) -> None:
    @app.command(
        "demo", help="Make, serve and measure a drafter for SmolLM2-135M-Instruct, with all set-up (CPU or GPU)."
    )
    def demo(
        quick: bool = typer.Option(False, help="the same road with fewer prompts and steps; its figures are rough"),
        out: Path = typer.Option(Path("runs"), help="folder for the run"),
        engine: str = typer.Option(None, help="environment with your own vLLM; 'reference' = built-in engine, no vLLM"),
        overrides: list[str] = typer.Option(
            [], "--set", help="section.key=value laid over the recipe; may be repeated"
        ),
        as_json: bool = typer.Option(False, "--json", help="print the records as JSON"),
    ) -> None:
        import yaml

        from draftsmith.cli.run import finish
        from draftsmith.engine.ensure import ensure_engine
        from draftsmith.pipeline import run_all
        from draftsmith.recipe import parse_recipe
        from draftsmith.ui import ConsoleUi

        ui = ConsoleUi()
        name = "quick.yaml" if quick else "demo.yaml"
        raw = yaml.safe_load((files("draftsmith") / "recipes" / name).read_text(encoding="utf-8"))
        raw["out"] = str(out)
        if engine is not None:
            raw.setdefault("engine", {})["path"] = engine
        for dotted, value in parse_overrides(overrides).items():
            section, _, leaf = dotted.rpartition(".")
            (raw.setdefault(section, {}) if section else raw)[leaf] = value
        recipe = parse_recipe(raw, f"recipes/{name}")
        # A failed install must never pass as a demo: the reference engine serves only where it was asked for,
        # or where no vLLM exists for the platform (ensure_engine says so).
        recipe.engine.path = ensure_engine(recipe.engine.path, ui)
        if quick:
            ui.note("quick demo: few prompts and steps, so its figures are rough")
        finish(Path(recipe.folder).resolve(), run_all(recipe, ui), as_json)
