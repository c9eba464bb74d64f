"""Files that outlive a release: each has a `format` number, and steps that bring an old one to the present.

A format's owner keeps `FORMAT` and `STEPS` (number → function from that number's content to the next one's). A change of
meaning raises FORMAT and adds a step; nothing that was written is ever left unreadable without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError

Step = Callable[[dict[str, Any]], dict[str, Any]]


def upgrade(raw: dict[str, Any], current: int, steps: Mapping[int, Step], path: Path, what: str) -> dict[str, Any]:
    """`raw` in format `current`. No `format` means 0, as files had it before they were numbered.

    UserError where it is of a newer format, of none, or of one that no step leads on from."""
    found = raw.get("format", 0)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise UserError(
            f"{path} has {what} format {found!r}, which is no number", "", "re-make the stage that wrote it"
        )
    if found > current:
        raise UserError(
            f"{path} has {what} format {found}; this draftsmith knows up to {current}",
            "what it does not know could change the meaning",
            "upgrade draftsmith",
        )
    while found < current:
        if found not in steps:
            raise UserError(
                f"{path} has {what} format {found}, from which nothing leads to {current}",
                "it was written by a release that is too old",
                "re-make the stage that wrote it",
            )
        raw = steps[found](dict(raw)) | {"format": found + 1}
        found += 1
    return raw
