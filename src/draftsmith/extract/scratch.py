"""Folders for files on their way, which go with their process: at its end, or, where it was killed, when another one makes
a folder beside them. They lie in memory (/dev/shm), so that what a kill leaves is memory that nobody gives back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

OWNER = ".owner"
"""Locked (flock) by the process whose folder it is, for as long as it lives."""
YOUNG = 60.0
"""Seconds for which a folder without that file may be one that is just being made."""


def make(where: Path, prefix: str) -> tuple[Path, int]:
    """A new folder, its owner's lock (a descriptor); give both to `remove`. Folders of that prefix whose process is gone
    are removed first."""
    clear(where, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
    lock = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: nobody else can take it either, and it stays
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder, lock


def remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(lock)


def clear(where: Path, prefix: str) -> list[Path]:
    """Remove this user's folders of that prefix whose process is gone; returns them."""
    gone = []
    for folder in where.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            try:
                lock = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
            except FileNotFoundError:
                if time.time() - found.st_mtime > YOUNG:
                    folder.rmdir()  # killed while it was made, so nothing is in it
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                gone.append(folder)
            finally:
                os.close(lock)
    return gone
