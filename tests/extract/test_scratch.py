"""Folders of states on their way: gone with their process, whatever ended it, and never another's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.contract import Contract
from draftsmith.engine import process_guard
from draftsmith.extract import scratch, wire
from draftsmith.extract.wire import Wire
from made_states import facts

OWNER = """
import sys, time
from pathlib import Path
from draftsmith.extract import scratch
folder, lock = scratch.make(Path(sys.argv[1]), "states-")
(folder / "s0.safetensors").write_bytes(b"x" * 1000)
print(folder, flush=True)
time.sleep(60)
"""


def owner(where: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has made a folder, and the folder."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(where)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_killed_processs_folder_goes_when_the_next_is_made_and_a_living_ones_stays(tmp_path: Path) -> None:
    (killed, left), (living, used) = owner(tmp_path), owner(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    mine, lock = scratch.make(tmp_path, "states-")
    assert not left.exists() and (used / "s0.safetensors").is_file()
    scratch.remove(mine, lock)
    assert not mine.exists()
    living.kill()
    living.wait()
    assert scratch.clear(tmp_path, "states-") == [used] and not list(tmp_path.iterdir())


def test_nothing_but_such_folders_is_touched(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (others / scratch.OWNER).touch()
    (tmp_path / "states-link").symlink_to(others)
    (tmp_path / "states-file").touch()
    full = tmp_path / "states-full"  # without its owner's file, and not empty: none of ours
    full.mkdir()
    (full / "x").touch()
    linked = tmp_path / "states-linked"
    linked.mkdir()
    (linked / scratch.OWNER).symlink_to(others / scratch.OWNER)
    young, old = tmp_path / "states-young", tmp_path / "states-old"
    for folder in (young, old):
        folder.mkdir()
    os.utime(old, (time.time() - 999, time.time() - 999))
    os.utime(full, (time.time() - 999, time.time() - 999))
    assert scratch.clear(tmp_path, "states-") == []
    assert {p.name for p in tmp_path.iterdir()} == {
        *("others", "states-link", "states-file", "states-full", "states-linked", "states-young")
    }
    assert (others / scratch.OWNER).is_file()


@pytest.fixture
def contract() -> Contract:
    return facts()


def test_a_wire_clears_what_a_killed_one_left(
    tmp_path: Path, contract: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "RAM_FOLDER", tmp_path)
    monkeypatch.setattr(wire, "RAM_BYTES", 0)
    left = tmp_path / f"{wire.PREFIX}x"
    left.mkdir()
    (left / scratch.OWNER).touch()
    with Wire(contract, tmp_path / "run") as one, Wire(contract, tmp_path / "run") as two:
        assert set(tmp_path.iterdir()) == {one.folder, two.folder}
    assert not list(tmp_path.iterdir())


def test_files_that_nobody_wants_are_swept(tmp_path: Path, contract: Contract) -> None:
    with Wire(contract, tmp_path) as w:
        for name in ("s0", "s1", "s2"):
            w.path(name).touch()
        (w.folder / ".s3.part").touch()  # the engine is at it
        assert w.sweep({"s1"}) == 2
        assert {p.name for p in w.folder.iterdir()} == {scratch.OWNER, "s1.safetensors", ".s3.part"}


PARENT = """
import os, subprocess, sys
guard, folder = sys.argv[1:]
env = dict(os.environ, DRAFTSMITH_GUARD_REMOVE=folder)
subprocess.Popen([sys.executable, guard, os.devnull, "1", "--", "sleep", "60"], env=env)
print("up", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [True, False])
def test_the_guard_removes_the_folder_of_a_killed_parent_alone(tmp_path: Path, killed: bool) -> None:
    folder = tmp_path / "states"
    folder.mkdir()
    (folder / "s0.safetensors").touch()
    if killed:
        words = [sys.executable, "-c", PARENT, process_guard.__file__, str(folder)]
        parent = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
        time.sleep(0.5)
        assert folder.is_dir()
        parent.kill()
        parent.wait()
        end = time.monotonic() + 20
        while folder.exists() and time.monotonic() < end:
            time.sleep(0.05)
        assert not folder.exists()
    else:
        words = [sys.executable, process_guard.__file__, os.devnull, "1", "--", "true"]
        subprocess.run(words, env={**os.environ, process_guard.REMOVE: str(folder)}, check=True, timeout=30)
        assert (folder / "s0.safetensors").is_file()
