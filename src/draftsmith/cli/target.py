"""draftsmith target: what is seen in a target model, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer


def register(app: typer.Typer) -> None:
    @app.command("target")
    def target(
        model: str = typer.Argument(help="folder or hub id of the target; 'smollm2' fetches the demo's own"),
        as_json: bool = typer.Option(False, "--json", help="print the facts as JSON"),
    ) -> None:
        """Show a target's sizes, tokenizer, and where its weights lie.

        Where its embedding, final norm and lm_head are, its chat template and stop tokens. Only headers are read; of a
        hub id a few megabytes, never its weights.
        """
        from draftsmith.cli.common import console, print_json
        from draftsmith.recipe import TargetSection
        from draftsmith.target.describe import describe
        from draftsmith.target.resolve import SMOLLM2, resolve_target

        is_hub = model.lower() != SMOLLM2 and not Path(model).expanduser().exists() and model.count("/") == 1
        source: Path | str = model if is_hub else resolve_target(TargetSection(model=model))
        facts = describe(source, model)
        if as_json:
            print_json(facts)
            return
        for key, value in facts.items():
            _show(console, key, value)


def _show(console: Any, key: str, value: Any, indent: str = "") -> None:
    if isinstance(value, dict) and value:
        console.print(f"{indent}{key}", markup=False, highlight=False)
        for k, v in value.items():
            _show(console, k, v, indent + "  ")
    elif value not in (None, {}, []):
        console.print(f"{indent}{key}: {value}", markup=False, highlight=False, soft_wrap=True)
