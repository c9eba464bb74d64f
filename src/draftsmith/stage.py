"""One stop of the road: named inputs in, a folder with run.json out; skipped when done, resumed when killed.

A stage is a module-level `Stage` object in its package's stage.py. Its key is the content hash of its part of the
recipe and of the hashes of its inputs, so a change anywhere upstream re-makes all that follows and nothing else.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.recipe import Recipe
from draftsmith.record import content_hash, is_done, read_record, write_json, write_record
from draftsmith.secrets import redact
from draftsmith.ui import Ui

PENDING = ".pending"


@dataclass(frozen=True)
class Run:
    """A run in progress: its recipe and folder, and where each stage lies."""

    recipe: Recipe
    folder: Path
    ui: Ui
    scratch: dict[str, Any] = field(default_factory=dict)

    def stage_dir(self, name: str) -> Path:
        return self.folder / name

    def output_hash(self, name: str) -> str:
        """Hash of a finished stage's result (its record's key and result); UserError if it has not run."""
        record = read_record(self.stage_dir(name))
        if not record or record.get("status") != "done":
            raise UserError(
                f"stage {name!r} has not been run in {self.folder}",
                "its output is needed here",
                f"draftsmith {name} RECIPE, or draftsmith run RECIPE for the whole road",
            )
        return content_hash([record["key"], record["result"].get("output_hash")])


@dataclass(frozen=True)
class Stage:
    """name: the command's word. sections: the recipe sections whose values are part of the key, but for `apart`
    ("section.key"): what says how the work is spread, not what is made.
    inputs(run): name → hash of all else that goes in. work(run, folder): does it and returns the result (figures,
    counts; `output_hash` where the bytes made are determined). Work must be restartable: it finds its own leftovers
    in `folder`. `resumable=False` empties the folder before a restart."""

    name: str
    sections: tuple[str, ...]
    inputs: Callable[[Run], dict[str, str]]
    work: Callable[[Run, Path], dict[str, Any]]
    resumable: bool = True
    apart: tuple[str, ...] = ()

    def key(self, run: Run) -> tuple[str, dict[str, str], dict[str, Any]]:
        config = {s: run.recipe.model_dump(mode="json", by_alias=True)[s] for s in self.sections}
        for section, _, name in (dotted.partition(".") for dotted in self.apart):
            config[section].pop(name, None)
        inputs = self.inputs(run)
        return content_hash({"stage": self.name, "config": config, "inputs": inputs}), inputs, config


def execute(stage: Stage, run: Run, force: bool = False) -> dict[str, Any]:
    """Run a stage unless it is done; returns its record (with "skipped": True where it was).

    A folder left by other inputs is emptied first: its parts would be mixed with new ones."""
    key, inputs, config = stage.key(run)
    folder = run.stage_dir(stage.name)
    if not force and is_done(folder, key):
        return (read_record(folder) or {}) | {"skipped": True}
    pending = folder / PENDING
    same = pending.is_file() and pending.read_text(encoding="utf-8").strip() == key
    if folder.exists() and (force or not (same and stage.resumable)):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not same or not pending.is_file():
        write_json(folder / "inputs.json", redact({"inputs": inputs, "config": config}))
        from draftsmith.record import atomic_write

        atomic_write(pending, key + "\n")
    started = time.time()
    result = stage.work(run, folder)
    record = write_record(
        folder, stage=stage.name, key=key, inputs=inputs, config=config, result=result, started=started
    )
    pending.unlink(missing_ok=True)
    return record
