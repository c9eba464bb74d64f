"""Reading what somebody else wrote: JSON of bounded size, names that stay inside their folder, text fit for a terminal.

Everything here turns an attack into a ValueError with a sentence; callers make their own UserError of it
(docs/security.md lists the threats).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

MAX_JSON = 64 << 20
"""Bytes of one config or index. The largest known index (a trillion-parameter mixture of experts) is under 20 MB."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that steer a terminal or turn the direction of text; tab and newline are not among them."""


def parse_json(raw: bytes | str) -> Any:
    """`json.loads` whose every failure is a ValueError, nesting beyond the interpreter's stack included."""
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, limit: int = MAX_JSON) -> Any:
    """The JSON of a file of at most `limit` bytes. ValueError for what it holds, OSError where it cannot be read."""
    with path.open("rb") as f:
        raw = f.read(limit + 1)
    if len(raw) > limit:
        raise ValueError(f"it is larger than {limit:,} bytes")
    return parse_json(raw)


def inside(folder: Path, name: str) -> Path:
    """The path of file `name` of `folder`; ValueError if the name, or a link on its way, leads out of the folder.

    A link may leave a hub snapshot for the blobs of the same cache entry
    (models--owner--name/{snapshots/REV/FILE → blobs/HASH})."""
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name[:80]!r} is not a file of this folder")
    path = folder / name
    try:
        real, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as e:
        raise ValueError(f"{name[:80]!r} cannot be resolved: {type(e).__name__}") from None
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(a) for a in allowed):
        raise ValueError(f"{name!r} is a link that leaves the folder")
    return path


def printable(text: str) -> str:
    """The text with terminal escapes and direction marks made visible as U+FFFD."""
    return _CONTROL.sub("\ufffd", text)
