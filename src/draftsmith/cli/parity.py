"""`draftsmith parity`: exported files through the trainer's model and through the engine's own drafter, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from draftsmith.cli.common import console, print_json
from draftsmith.errors import Exit, UserError


def show(found: dict[str, Any]) -> None:
    """The comparison as text: one line a stage, then the first disagreement."""
    who = found["engine"] or "no engine"
    console.print(f"{who}, {found['class']}: {found['rows']} rows, {found['tokens']} tokens", highlight=False)
    if found["aux"]:
        for k, far in found["aux"].items():
            console.print(f"  aux stream {k}: target in the engine against transformers {far:.1e}", highlight=False)
    for row in found["stages"]:
        name = row["stage"] if row["step"] is None else f"step {row['step']} {row['stage']}"
        kind = "differ" if row["stage"] == "proposals" else "relative L2"
        far = f"{row['distance']:.2%} {kind}" if row["stage"] == "proposals" else f"{kind} {row['distance']:.1e}"
        console.print(f"  {'ok  ' if row['agrees'] else 'FAIL'} {name}: {far}", highlight=False, markup=False)
    if found.get("predicted"):
        p = found["predicted"]
        rates = " ".join(f"{r:.3f}" for r in p["acceptance_per_position"])
        console.print(
            f"predicted acceptance per position {rates}, length {p['acceptance_length']:.2f}", highlight=False
        )
    first = found["first"]
    if first is None:
        console.print("both sides agree at every step", style="bold")
        return
    step = "" if first["step"] is None else f" of draft step {first['step']}"
    size = "" if first["distance"] is None else f" (relative L2 {first['distance']:.2e})"
    console.print(f"first disagreement: {first['stage']}{step}{size}", style="bold", markup=False, highlight=False)
    console.print(f"  made by: {first['where']}", markup=False, highlight=False, soft_wrap=True)
    for s in found["suspects"][:3]:
        says = "explains it" if s["distance"] <= 1e-3 else "comes nearer"
        console.print(
            f"  {says}: {s['what']} (then {s['distance']:.1e})", markup=False, highlight=False, soft_wrap=True
        )


def register(app: typer.Typer) -> None:
    app.command("parity")(parity)


def parity(
    run: Path = typer.Option(None, help="a run's folder: target, drafter, its trained checkpoint and rows are in it"),
    target: str = typer.Option(None, help="folder of the target"),
    drafter: Path = typer.Option(None, help="folder of the exported drafter"),
    rows: Path = typer.Option(None, help="folder of captured rows"),
    trained: Path = typer.Option(
        None, help="the trainer's own checkpoint (train/best), in place of the exported files"
    ),
    engine: str = typer.Option(
        None, help="environment of vLLM; none given = the managed one; 'none' = read the files twice"
    ),
    aux: bool = typer.Option(False, help="also start the engine on the target and compare its aux states"),
    sample: int = typer.Option(2, min=1, help="rows to compare"),
    max_tokens: int = typer.Option(96, min=8, help="tokens of a row to compare"),
    steps: int = typer.Option(3, min=1, help="draft steps"),
    predict: int = typer.Option(8, min=0, help="rows to predict acceptance on, by replay"),
    as_json: bool = typer.Option(False, "--json", help="print the comparison as JSON"),
) -> None:
    """Does the engine compute what the trainer computed?

    Runs the exported files through the trainer's model and through the engine's own drafter class, on the same tokens;
    compares fused state, states, logits and proposals step by step and names the first disagreement, its size and the
    likeliest switch. Exit codes: 0 they agree, 1 they do not, 2 bad input.
    """
    from draftsmith.bench.parity import parity as compare
    from draftsmith.diagnose.load import load_subject
    from draftsmith.diagnose.replay import acceptance
    from draftsmith.diagnose.subject import Setup
    from draftsmith.engine.find import find_engine
    from draftsmith.record import write_json
    from draftsmith.ui import ConsoleUi, QuietUi

    ui = QuietUi() if as_json else ConsoleUi()
    if steps >= max_tokens:
        raise UserError(f"{steps} draft steps in {max_tokens} tokens", "", "give more tokens")
    if run is None and (target is None or drafter is None or rows is None):
        raise UserError("target, drafter and rows are needed", "", "give --run, or --target, --drafter and --rows")
    found_engine = None if engine == "none" else find_engine(engine)
    where = str(found_engine.site) if found_engine else None
    count = max(sample, predict)
    subject = load_subject(run, target, drafter, rows, None, count, 512, steps, where, ui, train_sample=0)
    if isinstance(subject, dict):
        raise UserError(
            subject["causes"][0]["cause"], "these files are no whole drafter", subject["causes"][0]["fix"], Exit.NO
        )
    from draftsmith.bench.parity_rows import cut, trained_setup

    checkpoint = trained or (run / "train" / "best" if run and (run / "train" / "best").is_dir() else None)
    own: Setup | None = trained_setup(subject, checkpoint) if checkpoint else None
    some = [cut(row, max_tokens) for row in subject.rows[:sample]]
    found = compare(subject, some, steps, found_engine, own)
    found["aux"] = {}
    if aux:
        if found_engine is None:
            raise UserError("--aux starts the engine", "", "give --engine")
        from draftsmith.bench.parity_aux import engine_streams_distance

        found["aux"] = engine_streams_distance(found_engine, subject, some, ui)
    if predict:
        found["predicted"] = acceptance(subject.setup(), subject.rows[:predict], steps).as_dict()
    if run is not None:
        write_json(run / "diagnose" / "parity.json", found)
    if as_json:
        print_json(found)
    else:
        show(found)
    if found["first"] is not None or any(far > 2e-2 for far in found["aux"].values()):
        raise typer.Exit(int(Exit.NO))
