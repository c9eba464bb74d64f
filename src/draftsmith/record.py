"""run.json beside every output: command line, versions, input hashes, resolved recipe; and the atomic writes
and content hashes on which "skip what is done" and "go on after a kill" rest.

A stage folder is complete if and only if its run.json says `"status": "done"` and its `key` is the one that the
inputs give now. run.json is written last, by rename, so a killed stage is never taken for a finished one.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftsmith import __version__
from draftsmith.secrets import redact

RECORD = "run.json"


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path, chunk: int = 1 << 23) -> str:
    """Hex sha256 of a file's bytes, read in chunks into one buffer (a new one for each costs a third of the time)."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(chunk, max(path.stat().st_size, 1))))
    with path.open("rb", buffering=0) as f:
        while n := f.readinto(buffer):
            digest.update(buffer[:n])
    return digest.hexdigest()


def content_hash(value: Any) -> str:
    """Hex sha256 of a JSON-able value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return sha256_bytes(text.encode())


def folder_hash(folder: Path, names: Iterable[str] | None = None) -> str:
    """Content hash of a folder's files (relative name → sha256); run.json itself left out."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != RECORD)
    if names is not None:
        wanted = set(names)
        files = [p for p in files if p.name in wanted]
    return content_hash({str(p.relative_to(folder)): sha256_file(p) for p in files})


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write `path` so that a kill at any moment leaves the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = data.encode() if isinstance(data, str) else data
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(raw)
            f.flush()
            os.fsync(f.fileno())
        Path(tmp).chmod(0o644)
        Path(tmp).replace(path)
    except BaseException:
        Path(tmp).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """`atomic_write` of indented JSON."""
    atomic_write(path, json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def versions() -> dict[str, str]:
    """Versions of what a result depends on, without importing any of it."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"draftsmith": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "transformers", "safetensors", "pyarrow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_record(
    folder: Path,
    *,
    stage: str,
    key: str,
    inputs: dict[str, Any],
    config: dict[str, Any],
    result: dict[str, Any],
    started: float,
    status: str = "done",
) -> dict[str, Any]:
    """Write `folder/run.json` and return it.

    stage: the command's name; key: content hash of all that went in (`inputs` and `config`);
    inputs: name → hash; config: the resolved part of the recipe; result: figures and counts;
    started: `time.time()` at the start.
    """
    record: dict[str, Any] = {
        "stage": stage,
        "status": status,
        "key": key,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": versions(),
        "inputs": inputs,
        "config": config,
        "result": result,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 3),
    }
    record = redact(record)
    write_json(folder / RECORD, record)
    return record


def read_record(folder: Path) -> dict[str, Any] | None:
    """The folder's run.json, or None where there is none or it is unreadable (a killed first write)."""
    try:
        found = read_json(folder / RECORD)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def is_done(folder: Path, key: str) -> bool:
    """True if the stage in `folder` finished with just these inputs."""
    record = read_record(folder)
    return bool(record and record.get("status") == "done" and record.get("key") == key)


def free_bytes(path: Path) -> int:
    """Free bytes of the disk that will hold `path`."""
    probe = path
    while not probe.exists():
        probe = probe.parent
    return shutil.disk_usage(probe).free
