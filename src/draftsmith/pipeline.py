"""The whole road: the stages of a recipe in order, each skipped when done, and one table at the end."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.recipe import STAGES, Recipe
from draftsmith.record import read_record, write_json
from draftsmith.secrets import redact
from draftsmith.stage import Run, Stage, execute
from draftsmith.ui import Ui

MODULES = {name: f"draftsmith.{name}.stage" for name in STAGES} | {"export": "draftsmith.dialects.stage"}
"""Stage name → the module whose STAGE it is."""


def load_stage(name: str) -> Stage:
    """The stage object of that name; its package is imported only now (torch is not needed to check or report)."""
    stage = import_module(MODULES[name]).STAGE
    assert isinstance(stage, Stage) and stage.name == name
    return stage


def open_run(recipe: Recipe, ui: Ui) -> Run:
    """Make the run's folder and write the resolved recipe into it."""
    folder = Path(recipe.folder).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "recipe.json", redact(recipe.model_dump(mode="json", by_alias=True)))
    except OSError as e:
        raise UserError(f"cannot write the run's folder {folder}: {e}", "", "give another `out` in the recipe") from e
    return Run(recipe, folder, ui)


def run_stage(run: Run, name: str, force: bool = False) -> dict[str, Any]:
    """Run one stage (or skip it) and return its record."""
    states_gone = run.stage_dir("extract") / "deleted"
    if name == "train" and states_gone.exists() and not _would_skip(run, "train"):
        # The states were deleted after an earlier training; what trains now needs them again.
        states_gone.unlink()
        execute(load_stage("extract"), run, force=True)
    record = execute(load_stage(name), run, force)
    if name == "train" and run.recipe.extract.keep == "until-trained" and not states_gone.exists():
        freed = _delete_states(run.stage_dir("extract"))
        states_gone.write_text("states deleted after training\n", encoding="utf-8")
        run.ui.note(f"deleted the hidden states, {freed / 1e9:.2f} GB")
    return record


def _would_skip(run: Run, name: str) -> bool:
    stage = load_stage(name)
    record = read_record(run.stage_dir(name))
    return bool(record and record.get("status") == "done" and record.get("key") == stage.key(run)[0])


def _delete_states(folder: Path) -> int:
    freed = 0
    for shard in folder.glob("*.safetensors"):
        freed += shard.stat().st_size
        shard.unlink()
    return freed


def run_all(recipe: Recipe, ui: Ui, until: str | None = None, force: str | None = None) -> list[dict[str, Any]]:
    """Walk the road. until: last stage to run. force: stage to re-make even if done (those after it follow by key).

    Returns a row per stage: {"stage", "status": "done"|"already done", "seconds", "result"}."""
    for word in (until, force):
        if word is not None and word not in STAGES:
            raise UserError(f"no stage {word!r}", "", f"stages: {', '.join(STAGES)}")
    run = open_run(recipe, ui)
    rows = []
    names = STAGES[: STAGES.index(until) + 1] if until else STAGES
    for i, name in enumerate(names, 1):
        ui.note(f"[{i}/{len(names)}] {name}")
        started = time.time()
        record = run_stage(run, name, force=name == force)
        skipped = bool(record.get("skipped"))
        rows.append(
            {
                "stage": name,
                "status": "already done" if skipped else "done",
                "seconds": round(record["seconds"] if skipped else time.time() - started, 1),
                "result": record["result"],
            }
        )
    return rows
