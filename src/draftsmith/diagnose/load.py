"""Puts a diagnosis' subject together from a run's folder or from the parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.contract import FILE, Contract
from draftsmith.diagnose import signals
from draftsmith.diagnose.subject import SampleRow, Subject, sample_rows
from draftsmith.errors import UserError
from draftsmith.record import read_json
from draftsmith.ui import Ui


def _from_run(run: Path) -> dict[str, Any]:
    from draftsmith.dialects.stage import export_name
    from draftsmith.recipe import parse_recipe
    from draftsmith.target.resolve import resolve_target

    if not (run / "recipe.json").exists():
        raise UserError(
            f"{run} is no run: it has no recipe.json", "", "give the folder that `draftsmith run` made, or the parts"
        )
    recipe = parse_recipe(read_json(run / "recipe.json"), str(run / "recipe.json"))
    states = run / "extract"
    return {
        "target": str(resolve_target(recipe.target)),
        "drafter": run / "export" / export_name(recipe),
        "rows": run / "capture",
        "states": states if any(states.glob("*.safetensors")) else None,
        "steps": recipe.bench.num_speculative_tokens,
        "held_out": recipe.train.held_out_rows,
        "engine": recipe.engine.path,
    }


def load_subject(
    run: Path | None,
    target: str | None,
    drafter: Path | None,
    rows: Path | None,
    states: Path | None,
    sample: int,
    max_tokens: int,
    steps: int,
    engine: str | None,
    ui: Ui,
) -> Subject | dict[str, Any]:
    """The subject; or, where the drafter's files cannot be read as a drafter at all, the finished diagnosis that says so."""
    found: dict[str, Any] = _from_run(run) if run is not None else {}
    target = target or found.get("target")
    drafter = drafter or found.get("drafter")
    rows = rows or found.get("rows")
    states = states or found.get("states")
    steps = found.get("steps", steps)
    if target is None or drafter is None or rows is None:
        raise UserError("target, drafter and rows are needed", "", "give --run, or --target, --drafter and --rows")
    folder = Path(target)
    from draftsmith.capture.rows import iter_rows
    from draftsmith.dialects import foreign
    from draftsmith.target.config import target_facts
    from draftsmith.target.weights import read_embedding
    from draftsmith.train.data import split_rows

    layers = target_facts(folder).num_layers
    contract = Contract.load(drafter) if (drafter / FILE).exists() else None
    try:
        checkpoint = foreign.read(drafter, aux_meaning="entering", target_layers=layers)
    except UserError as e:
        subject = Subject(drafter, folder, None, [], None, layers, steps)  # type: ignore[arg-type]
        causes = sorted(signals.check_rows(subject, engine or found.get("engine")), key=lambda c: -c.score)
        listed = [c.as_dict() for c in causes]
        if not listed:
            listed = [{"id": "files", "cause": e.what, "score": signals.PROVEN, "evidence": [e.why], "fix": e.fix}]
        return {
            "acceptance": {"acceptance_length": 1.0, "acceptance_per_position": [0.0] * steps},
            "nats_per_token": float("inf"),
            "rows": 0,
            "causes": listed,
            "verdict": "likely cause found",
        }
    every = [r for r in iter_rows(rows) if len(r.token_ids) > r.boundary + 8]
    if len(every) < 2:
        raise UserError(f"{rows} holds {len(every)} usable rows", "the diagnosis replays real answers", "capture some")
    prompt_of = {r.row_id: r.prompt_id for r in every}
    entries = [_Entry(r.row_id, len(r.token_ids), r.boundary) for r in every]
    held = {e.row_id for e in split_rows(entries, found.get("held_out", 0.04), lambda i: prompt_of[i]).held_out}
    fresh = [r for r in every if r.row_id in held]
    trained = [r for r in every if r.row_id not in held]
    ui.note(f"running the target over {min(len(fresh), sample)} held-out and {min(len(trained), 8)} trained rows")
    out = Subject(
        drafter=drafter,
        target=folder,
        checkpoint=checkpoint,
        rows=sample_rows(folder, fresh or trained, sample, max_tokens),
        embedding=read_embedding(folder).float(),
        num_layers=layers,
        steps=steps,
        contract=contract,
        states_folder=states,
        run_folder=run,
        train_rows=sample_rows(folder, _spread(trained, 8), 8, max_tokens),
    )
    from draftsmith.diagnose.rank import load_bench

    out.bench = load_bench(run)
    return out


class _Entry:
    def __init__(self, row_id: str, tokens: int, boundary: int) -> None:
        self.row_id, self.tokens, self.boundary = row_id, tokens, boundary


def _spread(rows: list[Any], count: int) -> list[Any]:
    step = max(len(rows) // count, 1)
    return rows[::step][:count]


__all__ = ["SampleRow", "load_subject"]
