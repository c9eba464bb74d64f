"""Stage `check`: the exported drafter against the target, in the engine of the run; NO ends the run.

check/verdict.json is the verdict as `draftsmith check --json` prints it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.errors import Exit, UserError
from draftsmith.record import content_hash, folder_hash, write_json
from draftsmith.stage import Run, Stage
from draftsmith.target.resolve import resolve_target

VERDICT = "verdict.json"


def _drafter(run: Run) -> Path:
    from draftsmith.dialects.stage import exported_folder

    return exported_folder(run)


def _engine(run: Run) -> str | None:
    """What the reader is given; None for the built-in reference engine, which has no source to read."""
    from draftsmith.engine.find import find_engine

    if run.recipe.engine.path == "reference":
        return None
    return str(find_engine(run.recipe.engine.path).site)


def _inputs(run: Run) -> dict[str, str]:
    from draftsmith.engine.find import find_engine

    path = run.recipe.engine.path
    engine = "reference" if path == "reference" else content_hash(find_engine(path).label)
    return {"export": run.output_hash("export"), "engine": engine}


def _work(run: Run, folder: Path) -> dict[str, Any]:
    from draftsmith.check.run import check_pair
    from draftsmith.check.types import Options

    recipe, drafter = run.recipe, _drafter(run)
    options = Options(
        max_model_len=recipe.engine.max_model_len,
        num_speculative_tokens=recipe.bench.num_speculative_tokens,
        method="eagle3",
        dtype=recipe.engine.dtype,
        deep=True,
        env=recipe.engine.env,
        plugin=True,
    )
    rows = run.stage_dir("capture")
    verdict = check_pair(
        str(resolve_target(recipe.target)), str(drafter), _engine(run), options, rows if rows.is_dir() else None
    )
    write_json(folder / VERDICT, verdict.to_json())
    for row in verdict.checks:
        if row.status == "warn":
            run.ui.warn(f"{row.id}: {row.found}" + (f"; {row.fix}" if row.fix else ""))
    bad = [r for r in verdict.checks if r.status == "fail"]
    if bad:
        raise UserError(
            f"the engine does not take {drafter.name}: " + "; ".join(f"{r.id}: {r.found}" for r in bad[:4]),
            f"serving it would fail or accept nothing; all rows are in {folder / VERDICT}",
            "; ".join(dict.fromkeys(r.fix for r in bad[:4] if r.fix)),
            Exit.NO,
        )
    counts = {s: sum(r.status == s for r in verdict.checks) for s in ("pass", "warn", "skip")}
    run.ui.note(f"check: {verdict.verdict}, " + ", ".join(f"{n} {s}" for s, n in counts.items()))
    return {"verdict": verdict.verdict, **counts, "folder": str(drafter), "output_hash": folder_hash(folder, [VERDICT])}


STAGE = Stage("check", ("engine", "bench"), _inputs, _work, resumable=False)
