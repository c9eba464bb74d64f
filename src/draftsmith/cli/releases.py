"""`draftsmith releases TARGET [DRAFTER]`: which known releases take a target, and a drafter; the first and the last."""

from __future__ import annotations

from pathlib import Path

import typer

from draftsmith.cli.common import console, print_json
from draftsmith.errors import Exit

_WORD = {True: "yes", False: "NO", None: "?"}


def register(app: typer.Typer) -> None:
    app.command("releases")(releases)


def releases(
    target: str = typer.Argument(help="The target: a folder, a config.json, a hub id, or 'smollm2', the demo's own."),
    drafter: str = typer.Argument("", help="A drafter's folder or config.json, to ask for the pair."),
    engine: str = typer.Option("vllm", "--engine", help="vllm or sglang."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document."),
) -> None:
    """Which known releases of an engine take this target?

    The matrix, the first and the last; with a drafter, for the pair.

    The table was read from published wheels, platform-split classes as on CUDA; an installed engine is asked with `check`.
    """
    from rich.table import Table

    from draftsmith.check.gate import engine_word
    from draftsmith.engine.releases import answers, table
    from draftsmith.errors import UserError
    from draftsmith.target.config import load_config, text_config

    if not table(engine).releases:
        raise UserError(f"no table of releases for {engine!r}", fix="--engine vllm or --engine sglang")
    config = load_config(target)
    draft = load_config(Path(drafter).expanduser()) if drafter else None
    rows = answers(config, draft, engine)
    taken = [row.version for row in rows if row.takes]
    first, last = (taken[0], taken[-1]) if taken else (None, None)
    if as_json:
        print_json(
            {
                "engine": engine,
                "target": target,
                "drafter": drafter or None,
                "first": first,
                "last": last,
                "releases": [
                    {
                        "version": row.version,
                        "takes": row.takes,
                        "list": row.listed,
                        "interface": row.interface,
                        "drafter": row.drafter,
                        "notes": list(row.notes),
                    }
                    for row in rows
                ],
            }
        )
        raise typer.Exit(Exit.OK if taken else Exit.NO)
    shown = Table(box=None, pad_edge=False)
    for column in (
        engine_word(engine),
        "takes it",
        "list",
        "interface",
        *(["drafter"] if draft is not None else []),
        "why",
    ):
        shown.add_column(column)
    for row in rows:
        cells = [row.version, _WORD[row.takes], _WORD[row.listed], _WORD[row.interface]]
        shown.add_row(*cells, *([_WORD[row.drafter]] if draft is not None else []), "; ".join(row.notes))
    console.print(shown)
    kind, names = text_config(config).get("model_type"), config.get("architectures")
    what = f"{', '.join(names) if isinstance(names, list) else target} (text model_type {kind!r})"
    if taken:
        console.print(
            f"{what}: first taken by {engine_word(engine)} {first}, last known {last}", markup=False, soft_wrap=True
        )
    else:
        console.print(
            f"{what}: no known release of {engine_word(engine)} surely takes it", markup=False, soft_wrap=True
        )
    raise typer.Exit(Exit.OK if taken else Exit.NO)
