"""Runs a command and outlives nobody: the process between draftsmith and an engine. Standard library only; run by path.

    python process_guard.py LOG GRACE -- command…

vLLM starts an engine core and workers of its own; killed from outside, some of them stay. So the guard adopts every
orphan below it (PR_SET_CHILD_SUBREAPER), watches its own parent, and when the parent is gone (also by SIGKILL), or it
is told to stop, or the command ends, takes down all that is below it: SIGTERM first, SIGKILL after GRACE seconds.
The command itself dies with the guard (PR_SET_PDEATHSIG). Where the parent was killed, the folder that
DRAFTSMITH_GUARD_REMOVE names is removed: what lies there (states in memory) is nobody's any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
REMOVE = "DRAFTSMITH_GUARD_REMOVE"


def prctl(option: int, value: int) -> None:
    """Linux only; nothing elsewhere (no engine is launched there)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Process ids below `root`, from /proc; zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_bytes().rpartition(b") ")[2].split()
            except OSError:
                continue  # it ended while we looked
            if fields[0] != b"Z":
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def take_down(child: subprocess.Popen[bytes], grace: float) -> None:
    """Ask the command to stop, then everything below us, then make sure."""
    me = os.getpid()
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        end = time.monotonic() + grace
        while child.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
    _signal_all(descendants(me), signal.SIGTERM)
    end = time.monotonic() + 2.0
    while descendants(me) and time.monotonic() < end:
        reap()
        time.sleep(0.05)
    while left := descendants(me):
        _signal_all(left, signal.SIGKILL)
        reap()
        time.sleep(0.05)


def reap() -> None:
    """Collect adopted orphans that have ended (the child itself is collected by Popen.poll, which copes)."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def guard(command: list[str], grace: float, log: str | None, parent: int, remove: str | None = None) -> int:
    """Run `command` until it ends, we are told to stop, or `parent` is our parent no more; its exit code (128 + signal
    for a killed one). log: file for its output; None = our own. remove: a folder that goes where `parent` did."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _frame: told.append(n))
    with Path(log).open("ab", buffering=0) if log else contextlib.nullcontext() as out:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    while child.poll() is None and not told and os.getppid() == parent:
        time.sleep(0.2)
    code, left_alone = child.poll(), os.getppid() != parent
    take_down(child, grace)
    if left_alone and remove:
        shutil.rmtree(remove, ignore_errors=True)
    return 0 if code is None else (128 - code if code < 0 else code)


def main() -> int:
    parent = int(os.environ.pop("DRAFTSMITH_GUARD_PARENT", os.getppid()))
    remove = os.environ.pop(REMOVE, None)
    return guard(sys.argv[sys.argv.index("--") + 1 :], float(sys.argv[2]), sys.argv[1], parent, remove)


if __name__ == "__main__":
    sys.exit(main())
