"""`draftsmith recipe`: a recipe to start from, or what each key of one means."""

from __future__ import annotations

import sys

import typer

from draftsmith.cli.common import console, print_json


def register(app: typer.Typer) -> None:
    app.command("recipe")(recipe)


def recipe(
    name: str = typer.Argument(
        "demo", help="which one: demo, quick (the same, rough and short) or gemma3 (a base model)"
    ),
    keys: bool = typer.Option(False, "--keys", help="list every key with its type, default and meaning instead"),
    as_json: bool = typer.Option(False, "--json", help="print it as JSON"),
) -> None:
    """Print a recipe to start from, or what each key means.

    `draftsmith recipe > mine.yaml` writes one; put your target and prompts into it. A key that is left out takes its
    default.
    """
    from draftsmith.recipe_keys import sections, shipped

    if not keys:
        text = shipped(name)
        if as_json:
            import yaml

            print_json(yaml.safe_load(text))
        else:
            sys.stdout.write(text)
        return
    found = sections()
    if as_json:
        print_json([{"section": s.name, "about": s.about, "keys": [k._asdict() for k in s.keys]} for s in found])
        return
    for section in found:
        console.print(f"{section.name or 'top level'}: {section.about}", style="bold", markup=False, highlight=False)
        width = max(len(k.name) for k in section.keys)
        for k in section.keys:
            line = f"  {k.name:{width}}  {k.meaning}  [{k.type}; {k.default}]"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
