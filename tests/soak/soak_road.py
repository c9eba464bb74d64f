"""The road in a loop: runs killed at random moments and finished, beside one process that walks it again and again.

`soak(folder, minutes, seeds)` gives a `Round` per walk: what was lost, left behind or grown. The target is a tiny random
Llama and the server a deterministic stub, so that the loop turns many times and everything but the engine is met.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tiny_road import write_recipe

MARK = "DRAFTSMITH_SOAK"
PROMPTS, SAMPLES = 24, 2
STAGES = ("capture", "vocab", "extract", "train", "export")
SIDE = Path(__file__).with_name("soak_side.py")


@dataclass
class Round:
    """seed: of the kills. kills: how many met the run at work. lost, left: rows and leftovers, in words. rss, fds,
    threads: of the process that walks the road again and again, after this walk."""

    seed: int
    kills: int = 0
    lost: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    rss: int = 0
    fds: int = 0
    threads: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def make_recipe(folder: Path, target: Path, endpoint: str) -> Path:
    folder.mkdir(parents=True)
    return write_recipe(
        folder, target, endpoint, PROMPTS, capture={"samples": SAMPLES, "concurrency": 4, "max_tokens": 24},
        extract={"batch_tokens": 512, "self_check_rows": 0}, train={"epochs": 1, "batch_tokens": 512},
    )  # fmt: skip


def start(recipe: Path, mark: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "draftsmith.cli.main", "run", str(recipe), "--until", "export"]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        MARK: mark,
        "TMPDIR": str(recipe.parent.parent / "tmp"),
    }
    return subprocess.Popen(
        command, env=env, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def closed_rows(run: Path) -> dict[tuple[str, int], list[int]]:
    """Rows that are on the disk for good: nothing may take them away again."""
    from draftsmith.capture.rows import iter_rows

    if not (run / "capture" / "rows").is_dir():
        return {}
    return {(r.prompt_id, r.sample): r.token_ids for r in iter_rows(run / "capture")}


def alive(mark: str) -> list[int]:
    """Processes that were started for this round and still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def killed_walk(recipe: Path, seed: int, mark: str) -> Round:
    """Start the run, SIGKILL its whole group at random moments, finish it; what was lost or left behind."""
    rng, found, run = random.Random(seed), Round(seed), recipe.parent / "tiny"
    kept: dict[tuple[str, int], list[int]] = {}
    for _ in range(3):
        process = start(recipe, mark)
        stage = rng.choice(STAGES)
        while process.poll() is None and not (run / stage / ".pending").exists():
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.8))
        found.kills += process.poll() is None
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        now = closed_rows(run)
        found.lost += [f"row {k} after a kill in {stage}" for k, ids in kept.items() if now.get(k) != ids]
        kept = now
    process = start(recipe, mark)
    if process.wait(600) != 0:
        found.lost.append(f"the run did not finish: exit code {process.returncode}")
        return found
    rows = closed_rows(run)
    found.lost += [f"row {k} at the end" for k, ids in kept.items() if rows.get(k) != ids]
    if len(rows) != PROMPTS * SAMPLES:
        found.lost.append(f"{len(rows)} rows of {PROMPTS * SAMPLES}")
    for stage in STAGES:
        record = json.loads((run / stage / "run.json").read_text())
        if record["status"] != "done":
            found.lost.append(f"{stage} is {record['status']}")
    found.left += [
        str(p.relative_to(run)) for p in run.rglob("*") if p.name.endswith((".part", ".pending", ".journal"))
    ]
    found.left += [str(p) for p in (recipe.parent.parent / "tmp").iterdir()]
    found.left += [f"process {pid}" for pid in alive(mark)]
    return found


def soak(folder: Path, target: Path, minutes: float, seeds: Sequence[int]) -> list[Round]:
    """Walk for so many minutes (at least two rounds); every round's folder is removed when it was sound."""
    import shutil

    sys.path.append(str(Path(__file__).parents[1] / "capture"))
    from stub_server import StubServer

    (folder / "tmp").mkdir(parents=True)
    end, rounds = time.monotonic() + 60 * minutes, []
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", MARK: "worker"}
    with (
        StubServer(target) as server,
        subprocess.Popen(
            [sys.executable, str(SIDE)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as worker,
    ):
        assert worker.stdin is not None and worker.stdout is not None
        for n, seed in enumerate(itertools.cycle(seeds)):
            if time.monotonic() > end and n >= 2:
                break
            place = folder / f"round-{n}"
            found = killed_walk(
                make_recipe(place, target, server.url), seed + 1000 * (n // len(seeds)), f"{folder}-{n}"
            )
            again = make_recipe(folder / f"again-{n}", target, server.url)
            print(again, file=worker.stdin, flush=True)
            answer = worker.stdout.readline()
            if not answer.startswith("{"):
                found.lost.append("the walking process died")
                rounds.append(found)
                break
            told = json.loads(answer)
            found.rss, found.fds, found.threads = told["rss"], told["fds"], told["threads"]
            rounds.append(found)
            if not found.lost and not found.left:
                shutil.rmtree(place)
            shutil.rmtree(again.parent)
        worker.stdin.close()
        worker.wait(60)
    if alive("worker"):
        rounds[-1].left.append("the walking process")
    return rounds


def growth(rounds: Sequence[Round]) -> list[str]:
    """What grew from walk to walk, in words. The first walks load code and fill caches; they set the level."""
    warm = max(1, len(rounds) // 4)
    later = rounds[warm:]
    if not later:
        return []
    level, last = rounds[warm - 1], later[-1]
    found = []
    per_walk = (last.rss - level.rss) / len(later)
    if per_walk > RSS_PER_WALK and last.rss > level.rss * 1.15:
        found.append(
            f"memory: {per_walk / 2**20:.1f} MiB a walk, {level.rss / 2**20:.0f} to {last.rss / 2**20:.0f} MiB"
        )
    if last.fds > level.fds + 4:
        found.append(f"open files: {level.fds} to {last.fds}")
    if last.threads > level.threads + 4:
        found.append(f"threads: {level.threads} to {last.threads}")
    return found


RSS_PER_WALK = 2 << 20
"""Bytes a walk by which the resident memory may rise; allocators keep some of what they got."""
