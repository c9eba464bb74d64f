"""What check_cold, silent_faults and gate_observed share: one figure as benchmarks/results/NAME.json."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from draftsmith.record import versions, write_json

RESULTS = Path(__file__).parent / "results"


def commit() -> str | None:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def command() -> str:
    """This command line, without machine paths."""
    words = [a if not a.startswith("/") else Path(a).name.upper() for a in sys.argv[1:]]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def write(
    name: str, *, claim: str, ours: Any, theirs: Any, unit: str, rows: list[Any], engine_version: str | None = None
) -> Path:
    """Write the figure in the form that docs quote."""
    ratio = round(ours / theirs, 4) if isinstance(theirs, int | float) and theirs else None
    path = RESULTS / f"{name}.json"
    write_json(
        path,
        {
            "claim": claim,
            "command": command(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "versions": versions() | ({"vllm": engine_version} if engine_version else {}),
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit(),
            "ours": ours,
            "theirs": theirs,
            "unit": unit,
            "ratio": ratio,
            "rows": rows,
        },
    )
    return path
