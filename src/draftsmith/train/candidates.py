"""`train.select: engine`: the loop keeps its best few checkpoints, for the engine to choose among (bench/choose.py).

    train/candidates/step-000400/{drafter.json, model.safetensors, contract.json, offline.json}
    train/candidates/held_out.json          ids of the rows that were not trained on

Offline acceptance replays captured texts, teacher-forced, in float32; the engine drafts over its own answers with the
exported types. The two may order close checkpoints otherwise; a far worse one is never worth an engine's start.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.record import read_json, write_json
from draftsmith.train.checkpoint import write_native
from draftsmith.train.loop import Training

FOLDER = "candidates"
OFFLINE = "offline.json"
HELD_OUT = "held_out.json"
KEPT = 3
"""Checkpoints that are kept for the engine."""


@dataclass
class KeepingTraining(Training):
    """Training that keeps its KEPT best validations, not only the best."""

    def _log(self, figures: dict[str, Any]) -> None:
        super()._log(figures)
        if "acceptance_length" in figures:
            self.validated = figures

    def _validate(self) -> None:
        super()._validate()
        with self.core.whole() as model:
            if self.ranks.first:
                place = self.folder / FOLDER / f"step-{self.progress.steps:06d}"
                shutil.rmtree(place, ignore_errors=True)
                write_native(place, model, self.rms, self.contract)
                write_json(place / OFFLINE, self.validated)
                write_json(self.folder / FOLDER / HELD_OUT, [e.row_id for e in self.split.held_out])
                for worse in candidates(self.folder)[KEPT:]:
                    shutil.rmtree(worse)


def candidates(folder: Path) -> list[Path]:
    """The checkpoints kept in a train folder, best offline acceptance first, of equal ones the later. One without its
    figures was cut off by a kill and does not count: the loop makes it again."""
    found = [p.parent for p in (folder / FOLDER).glob(f"step-*/{OFFLINE}")]
    return sorted(found, key=lambda p: (read_json(p / OFFLINE)["acceptance_length"], p.name), reverse=True)
