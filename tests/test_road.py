"""The road against SIGKILL: killed once in every stage, it goes on, and ends in the very bytes of a run that was not.

The target is a tiny random Llama, the server a deterministic stub; the engine's stages (check, bench) are left out here
and met in tests/engine.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.capture.rows import iter_rows
from draftsmith.record import folder_hash, read_record
from tiny_road import write_recipe

sys.path.append(str(Path(__file__).parent / "capture"))

STAGES = ("capture", "vocab", "extract", "train", "export")
PROMPTS = 40


def start(recipe: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "draftsmith.cli.main", "run", str(recipe), "--until", "export"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command, env=env, start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(recipe: Path) -> None:
    process = start(recipe)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


def kill_in(recipe: Path, stage: str, after: float) -> bool:
    """Start the run and SIGKILL it `after` seconds into `stage`; False if it had left the stage by then."""
    process = start(recipe)
    folder = recipe.parent / "tiny" / stage
    limit = time.monotonic() + 240
    while not (folder / ".pending").exists() and process.poll() is None:
        assert time.monotonic() < limit, f"{stage} never began"
        time.sleep(0.005)
    time.sleep(after)
    inside = (read_record(folder) or {}).get("status") != "done"
    os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), output
    return inside


@pytest.mark.timeout(900)
def test_killed_in_every_stage_ends_in_the_same_bytes(tmp_path: Path, tiny_target: Path) -> None:
    from stub_server import StubServer

    rng = random.Random(7)
    with StubServer(tiny_target) as server:
        recipe = write_recipe(tmp_path, tiny_target, server.url, PROMPTS)
        run = tmp_path / "tiny"
        inside = {stage: kill_in(recipe, stage, rng.uniform(0.0, 0.15)) for stage in STAGES}
        assert inside["capture"] and inside["train"], f"no kill met a stage at work: {inside}"
        finish(recipe)
        rows = [(r.prompt_id, r.sample) for r in iter_rows(run / "capture")]
        assert len(rows) == len(set(rows)) == PROMPTS * 2, "every (prompt, sample) exactly once"
        killed = {stage: folder_hash(run / stage, ARTIFACTS[stage]) for stage in STAGES[1:]}
        # The same rows, uninterrupted: everything after capture is made again.
        for stage in STAGES[1:]:
            shutil.rmtree(run / stage)
        finish(recipe)
        whole = {stage: folder_hash(run / stage, ARTIFACTS[stage]) for stage in STAGES[1:]}
    assert killed == whole


ARTIFACTS: dict[str, list[str] | None] = {
    "vocab": ["vocab.safetensors", "contract.json"],
    "extract": None,
    "train": ["model.safetensors", "drafter.json", "contract.json"],
    "export": None,
}
"""Files whose bytes are determined (train's logs hold times); None = all of the stage's."""
