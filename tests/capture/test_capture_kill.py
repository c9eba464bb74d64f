"""SIGKILL at any moment: after the restart each (prompt, sample) is there once, and closed parts have not changed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stub_server import Stub, StubServer

from draftsmith.capture.rows import iter_rows, verify_rows
from draftsmith.errors import UserError

DRIVER = """
import sys
from pathlib import Path
from draftsmith.capture.ask import Settings
from draftsmith.capture.plan import plan_prompts
from draftsmith.capture.prompts import Rules
from draftsmith.capture.run import Servers, capture_rows
from draftsmith.ui import QuietUi
url, prompts, folder = sys.argv[1:4]
plan = plan_prompts([prompts], [], 0, Rules(), 0.5)
capture_rows(plan, Path(folder), Settings(), Servers([url], limit=8), None, QuietUi(), samples=2, every_rows=30)
"""


def write_prompts(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(count)))
    return path


def start(url: str, prompts: Path, folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", DRIVER, url, str(prompts), str(folder)], env=os.environ | {})


def test_killed_at_random_moments_it_goes_on(tmp_path: Path, byte_tokenizer) -> None:  # type: ignore[no-untyped-def]
    folder, rng = tmp_path / "rows", random.Random(5)
    target, prompts = byte_tokenizer(), write_prompts(tmp_path / "p.jsonl", 300)
    closed: dict[str, bytes] = {}
    kills = 0
    with StubServer(target, delay=0.03) as server:
        while True:
            begun = server.asked
            process = start(server.url, prompts, folder)
            if kills < 3:
                while process.poll() is None and server.asked < begun + 1 + rng.randrange(150):
                    time.sleep(0.005)
                process.send_signal(signal.SIGKILL)
                kills += process.wait() == -signal.SIGKILL
            else:
                assert process.wait(120) == 0
            now = {p.name: p.read_bytes() for p in sorted(folder.glob("part-*.parquet"))}
            assert {n: now.get(n) for n in closed} == closed
            closed = now
            if process.returncode == 0:
                break
    assert kills == 3
    assert verify_rows(folder) == 600
    stub = Stub(target)
    units = set()
    for row in iter_rows(folder):
        units.add((row.prompt_id, row.sample))
        answer = row.token_ids[row.boundary :]
        assert answer == [*stub.encode(row.answer_text), stub.end]
    assert len(units) == 600


def test_a_full_disk_stops_cleanly_and_goes_on(
    tmp_path: Path,
    byte_tokenizer,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from draftsmith.capture import rows as rows_module
    from draftsmith.capture.ask import Settings
    from draftsmith.capture.plan import plan_prompts
    from draftsmith.capture.prompts import Rules
    from draftsmith.capture.run import Servers, capture_rows
    from draftsmith.ui import QuietUi

    target, prompts = byte_tokenizer(), write_prompts(tmp_path / "p.jsonl", 60)
    plan = plan_prompts([str(prompts)], [], 0, Rules(), 0.5)
    real, folder = rows_module.pq.write_table, tmp_path / "rows"

    def full(table, where, **kwargs):  # type: ignore[no-untyped-def]
        if len(list(folder.glob("part-*.parquet"))) >= 2:
            where.write(b"half a fi")
            raise OSError(28, "No space left on device")
        return real(table, where, **kwargs)

    def capture(url: str) -> None:
        capture_rows(plan, folder, Settings(), Servers([url], limit=4), None, QuietUi(), every_rows=10)

    with StubServer(target) as server:
        with monkeypatch.context() as patch:
            patch.setattr(rows_module.pq, "write_table", full)
            with pytest.raises((OSError, UserError), match="No space left"):
                capture(server.url)
        assert verify_rows(folder) == 20
        assert not list(folder.glob(".*.part"))
        capture(server.url)
    assert verify_rows(folder) == 60
