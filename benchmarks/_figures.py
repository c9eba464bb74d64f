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
    words = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return os.environ.get("COMMIT")  # a bare GPU host has no git
    return done.stdout.strip() or os.environ.get("COMMIT")  # a copy of the tree on a GPU host has no history


def here() -> str:
    """Cores, and the GPU where the script has used one."""
    torch = sys.modules.get("torch")
    gpu = f"one {torch.cuda.get_device_name()}, " if torch is not None and torch.cuda.is_available() else ""
    return f"{gpu}{platform.machine()}, {os.cpu_count()} cores"


def command() -> str:
    """This command line, without machine paths."""
    words = [a if not a.startswith("/") else Path(a).name.upper() for a in sys.argv[1:]]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def write(
    name: str,
    *,
    claim: str,
    ours: Any,
    theirs: Any,
    unit: str,
    rows: list[Any],
    engine_version: str | None = None,
    machine: str | None = None,
    made_from: str | None = None,
    out: Path = RESULTS,
) -> Path:
    """Write the figure in the form that docs quote. machine: none = this one; made_from: the commit, none = git's."""
    numbers = isinstance(ours, int | float) and isinstance(theirs, int | float)
    ratio = round(ours / theirs, 4) if numbers and theirs else None
    path = out / f"{name}.json"
    write_json(
        path,
        {
            "claim": claim,
            "command": command(),
            "machine": machine or here(),
            "versions": versions() | ({"vllm": engine_version} if engine_version else {}),
            "date": time.strftime("%Y-%m-%d"),
            "commit": made_from or commit(),
            "ours": ours,
            "theirs": theirs,
            "unit": unit,
            "ratio": ratio,
            "rows": rows,
        },
    )
    return path
