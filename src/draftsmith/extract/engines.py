"""An engine that makes states and may die: it is started when first asked, and replaced when it fails.

A row is asked for again until it is there, so an engine's death costs time and nothing else: whoever waits for a batch
gets it whole and once, from the engine or from the one that took its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

from draftsmith.errors import UserError
from draftsmith.extract.rows import Item, batches
from draftsmith.extract.states import States
from draftsmith.ui import Ui

if TYPE_CHECKING:
    from draftsmith.extract.source import Backend
    from draftsmith.stage import Run

    Start = Callable[[], AbstractContextManager[Backend]]

ATTEMPTS = 3
"""How often a batch is tried, each time on a new engine, before it is held to be the batch's own fault."""


class Engine:
    """One place for an engine. start: opens a backend (a context manager); batch_tokens: tokens per forward.

    Thread-safe: several threads may ask at once (`lanes`), and a failure that all of them meet replaces it once."""

    def __init__(self, start: Start, batch_tokens: int, ui: Ui, name: str = "engine", lanes: int = 1) -> None:
        self.start, self.batch_tokens, self.ui, self.name, self.lanes = start, batch_tokens, ui, name, lanes
        self.replaced = 0
        self._stack = ExitStack()
        self._backend: Backend | None = None
        self._generation = 0
        self._closed = False
        self._lock = threading.Lock()

    def _get(self) -> tuple[int, Backend]:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self.name} is closed")
            if self._backend is None:
                self._backend = self._stack.enter_context(self.start())
            return self._generation, self._backend

    def _discard(self, generation: int, why: Exception) -> None:
        with self._lock:
            if generation != self._generation or self._closed:
                return
            self._generation += 1
            self.replaced += 1
            self._backend = None
            self.ui.warn(f"{self.name} failed and is replaced: {str(why).splitlines()[0] if str(why) else type(why)}")
            stack, self._stack = self._stack, ExitStack()
            try:
                stack.close()
            except Exception as e:  # it is gone already; what its end met changes nothing
                self.ui.note(f"{self.name}: {e}")

    def compute(self, pack: Sequence[Item]) -> list[States]:
        """States of the rows, in their order. Raises what the last of ATTEMPTS engines raised, or what starting one did.

        Rows of like length go through the target together: a function of the pack alone, so that no other row and no
        failure in between changes a bit."""
        for attempt in range(1, ATTEMPTS + 1):
            generation, backend = self._get()
            try:
                made: dict[str, States] = {}
                for batch in batches({i.row_id: i for i in pack}.values(), self.batch_tokens):
                    made |= zip((i.row_id for i in batch), backend.compute(batch), strict=True)
                return [made[i.row_id] for i in pack]
            except Exception as e:
                self._discard(generation, e)
                if attempt == ATTEMPTS or self._closed:
                    raise
        raise AssertionError("no attempt was made")

    def close(self) -> None:
        """Stop the engine; threads that wait for it get an error."""
        with self._lock:
            self._closed = True
            self._backend = None
            self._stack.close()


def engines_of(run: Run, count: int, name: str = "engine") -> list[Engine]:
    """`count` engines of the recipe's extract backend, none started yet. In-process ones cannot be several. name: of
    them and their logs."""
    from draftsmith.contract import Contract
    from draftsmith.extract.source import open_backend
    from draftsmith.extract.stage import settle_codec

    section = run.recipe.extract
    if section.backend == "transformers" and count > 1:
        raise UserError(
            f"train.stream_engines is {count} and extract.backend is transformers",
            "that backend computes inside this process: a second one would only share its cores",
            "set extract.backend: vllm, or train.stream: ray (each engine in a process of its own)",
        )
    contract = Contract.load(run.stage_dir("extract"))
    _, draft_ids = settle_codec(run)

    def start(number: int) -> Start:
        return lambda: open_backend(run, contract, draft_ids, f"{name}-{number}")

    lanes = 1 if section.backend == "transformers" else 2  # the next pack is asked for while one is collected
    return [Engine(start(i), section.batch_tokens, run.ui, f"{name} {i}", lanes) for i in range(count)]
