"""Claim: `make demo` from a clean clone ends in at most 45 minutes (QUICK=1: 15) and 8 GiB on two cores, installs included.

    python benchmarks/demo_run.py [--quick]

Clones the committed tree into a new folder with an empty home (pip's download cache is kept), runs the command that
README gives, and samples the memory of all its processes every four seconds (PSS: shared pages counted once). The
figures of the demo's own bench stand beside the time. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import _figures
import psutil

ROOT = Path(__file__).parent.parent
KEYS = ("tokens_per_target_step", "acceptance_length", "acceptance_per_position", "drafts", "lossless", "ties")


def memory_of(root: psutil.Process) -> int:
    """Bytes that the process and all below it hold, shared pages counted once."""
    held = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            held += process.memory_full_info().pss
        except psutil.Error:  # gone meanwhile
            continue
    return held


def run_demo(folder: Path, quick: bool, log: Path) -> tuple[float, int]:
    """Seconds and peak bytes of the demo in a fresh clone in `folder`; raises if it does not end with 0."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "main")], check=True)
    cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=True)
    home = folder / "home"
    home.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    env |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "PIP_CACHE_DIR": cache.stdout.strip()}
    started = time.monotonic()
    with log.open("wb") as out:
        command = ["make", "demo", *(["QUICK=1"] if quick else [])]
        process = subprocess.Popen(command, cwd=folder / "main", env=env, stdout=out, stderr=out)
        peak = 0

        def watch() -> None:
            nonlocal peak
            root = psutil.Process(process.pid)
            while process.poll() is None:
                peak = max(peak, memory_of(root))
                time.sleep(4)

        watcher = threading.Thread(target=watch)
        watcher.start()
        code = process.wait()
        seconds = time.monotonic() - started
        watcher.join()
    if code:
        raise SystemExit(f"make demo ended with {code}; see {log}")
    return seconds, peak


def write(quick: bool, seconds: float, peak: int, bench: dict[str, Any], stages: dict[str, float]) -> Path:
    limit = 15 if quick else 45
    row = {k: bench[k] for k in KEYS} | {"tokens_per_second": bench["tokens_per_second"]}
    return _figures.write(
        "demo_quick" if quick else "demo",
        claim=f"make demo{' QUICK=1' if quick else ''} from a clean clone with an empty home, all installs included",
        ours=round(seconds / 60, 1),
        theirs=limit,
        unit="minutes (theirs: the limit)",
        rows=[row, {"peak_gib": round(peak / 2**30, 2), "stage_seconds": stages}],
        engine_version=bench["engine"]["version"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    folder = Path(tempfile.mkdtemp(prefix="demo-"))
    try:
        log = Path(tempfile.gettempdir()) / "demo-run.log"
        seconds, peak = run_demo(folder, quick, log)
        run = next(p.parent.parent for p in (folder / "main" / "runs").glob("*/bench/bench.json"))
        bench = json.loads((run / "bench" / "bench.json").read_text())
        records = {p.parent.name: json.loads(p.read_text()) for p in run.glob("*/run.json")}
        stages = {name: r["seconds"] for name, r in records.items()}
        print(write(quick, seconds, peak, bench, stages))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
