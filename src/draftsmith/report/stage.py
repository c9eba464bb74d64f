"""Stage `report`: report/index.html, made from the records of all stages before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith import __version__
from draftsmith.recipe import STAGES
from draftsmith.record import content_hash, read_record
from draftsmith.report.page import write_page
from draftsmith.stage import Run, Stage


def _inputs(run: Run) -> dict[str, str]:
    records = {s: read_record(run.stage_dir(s)) for s in STAGES if s != "report"}
    return {"draftsmith": __version__} | {s: content_hash(r) for s, r in records.items() if r}


def _work(run: Run, folder: Path) -> dict[str, Any]:
    page = write_page(run.folder, folder / "index.html")
    return {"page": str(page), "bytes": page.stat().st_size}


STAGE = Stage("report", (), _inputs, _work, resumable=False)
