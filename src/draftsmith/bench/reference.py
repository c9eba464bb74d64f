"""The reference engine as one more server of the bench."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.bench.ways import Opened
from draftsmith.engine.reference import ReferenceClient, ReferenceEngine
from draftsmith.record import versions
from draftsmith.ui import Ui


@dataclass(frozen=True)
class ReferenceOpener:
    """Opens the reference engine for a way of the bench."""

    target: Path
    drafter: Path | None
    num_speculative_tokens: int
    ui: Ui

    @contextlib.contextmanager
    def __call__(self, way: str) -> Iterator[Opened]:
        self.ui.note(f"{way}: loading the reference engine")
        engine = ReferenceEngine(self.target, self.drafter, way, self.num_speculative_tokens)
        info = {"speculative": way, "raw_logits": True, "num_speculative_tokens": self.num_speculative_tokens}
        yield Opened(lambda: ReferenceClient(engine), info)


def describe_reference() -> dict[str, Any]:
    """What bench.json says of it."""
    found = versions()
    return {
        "name": "reference",
        "version": found["draftsmith"],
        "path": "reference",
        "platform": "cpu",
        "torch": found.get("torch"),
        "transformers": found.get("transformers"),
    }
