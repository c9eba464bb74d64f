"""The train stage over several processes: started once per GPU by torchrun.

    torchrun --nproc-per-node 2 -m draftsmith.train.worker RECIPE [--set section.key=value]…

Rank 0 keeps the stage's folder and record like any stage; the others only train. Killed at any moment it goes on, on
the same or another number of ranks.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftsmith.errors import Exit, UserError
from draftsmith.stage import Run, execute
from draftsmith.ui import QuietUi, Ui


def train_together(recipe: Path, overrides: dict[str, Any], ui: Ui | None = None) -> dict[str, Any] | None:
    """This process's part of the train stage. Returns the stage's record on rank 0, None on the others."""
    import torch

    from draftsmith.pipeline import open_run
    from draftsmith.recipe import load_recipe
    from draftsmith.record import is_done, read_record
    from draftsmith.train.parallel import Ranks, process_group
    from draftsmith.train.stage import STAGE, select, train_on

    def part(run: Run, folder: Path) -> dict[str, Any]:
        Ranks.current().wait()
        figures = train_on(run, folder)
        Ranks.current().wait()
        return select(run, folder, figures) if Ranks.current().first else figures

    with process_group() as ranks:
        run = open_run(load_recipe(recipe, overrides), (ui or QuietUi()) if ranks.first else QuietUi())
        folder = run.stage_dir(STAGE.name)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        done = torch.tensor([int(ranks.first and is_done(folder, STAGE.key(run)[0]))], device=device)
        if int(ranks.sum(done)):
            return (read_record(folder) or {}) | {"skipped": True} if ranks.first else None
        if ranks.first:
            return execute(replace(STAGE, work=part), run)
        part(run, folder)
        return None


def main(arguments: list[str]) -> int:
    """Command line: a recipe and --set pairs."""
    from draftsmith.cli.stages import parse_overrides
    from draftsmith.ui import ConsoleUi

    ui = ConsoleUi()
    pairs = [b for a, b in itertools.pairwise(arguments) if a == "--set"]
    plain = [a for i, a in enumerate(arguments) if a != "--set" and (i == 0 or arguments[i - 1] != "--set")]
    if len(plain) != 1:
        ui.warn("usage: torchrun --nproc-per-node N -m draftsmith.train.worker RECIPE [--set section.key=value]…")
        return int(Exit.BAD_INPUT)
    try:
        record = train_together(Path(plain[0]), parse_overrides(pairs), ui)
    except UserError as e:
        ui.warn(str(e))
        return int(e.code)
    if record is not None:
        ui.note(f"train: {record['result']}")
    return int(Exit.OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
