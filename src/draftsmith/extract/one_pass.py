"""One pass: states are kept while the answers are given, so that rows need no second prefill.

During capture a `Keeper` names a file for each request, and stores its states once the row itself is closed on disk
(capture/rows.py): a kill in between leaves rows without states, never states without rows. The extract stage then
adopts the store and computes only what is missing. Files lie in memory, so those of answers that become no row are
removed, and no answer is asked for while many wait to be stored.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from draftsmith.contract import Contract, compare
from draftsmith.errors import UserError
from draftsmith.record import read_json

if TYPE_CHECKING:
    from draftsmith.extract.codecs import Codec
    from draftsmith.extract.store import Prepared, StateWriter
    from draftsmith.extract.wire import Wire
    from draftsmith.stage import Run

FOLDER = "states"
"""Inside the capture stage's folder."""
CROWDED_BYTES = 1 << 30
"""States of rows that are not closed yet; above it capture closes a part at once."""
BEHIND_BYTES = 1 << 30
"""States of closed rows that are not stored yet; above it capture asks for no more answers."""
SWEEP = 2.0
"""Seconds between looks for files that nobody wants."""


class _Row(Protocol):
    @property
    def row_id(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def boundary(self) -> int: ...


class Keeper:
    """Between capture and a store. writer: takes the states; alive(): raises where the engine has died.

    Thread-safe for one capture: `ask`, `keep` and `settled` are called from its event loop, storing is a thread's."""

    def __init__(self, wire: Wire, writer: StateWriter, alive: Callable[[], None], max_length: int) -> None:
        self.wire, self.writer, self.alive, self.max_length = wire, writer, alive, max_length
        from draftsmith.extract.packing import threads

        self._bytes_per_token = 2 * writer.hidden * len(wire.layers)
        self._waiting: dict[str, tuple[str, int]] = {}
        self._wanted: set[str] = set()
        """Names of attempts whose files may not be removed: under way, or of rows that are not stored yet."""
        self._unstored = 0
        """Bytes; added by the capture's thread and taken off by ours, under the lock."""
        self._lock = threading.Lock()
        self._queue: queue.Queue[tuple[_Row, str, Future[Prepared | None]] | None] = queue.Queue()
        self._pool = ThreadPoolExecutor(threads(), thread_name_prefix="pack")
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._store, name="states", daemon=True)
        self._thread.start()

    def ask(self) -> tuple[str, dict[str, Any]]:
        """A name for one attempt at a request, and the body fields that ask for its states."""
        name, fields = self.wire.ask(None)
        self._wanted.add(name)
        return name, fields

    def keep(self, row: _Row, name: str) -> None:
        """The attempt under `name` became this row."""
        if len(row.token_ids) <= self.max_length:
            self._waiting[row.row_id] = (name, len(row.token_ids))
        else:  # a row that will be cut is computed as cut, in the second pass
            self.drop(name)

    def drop(self, name: str) -> None:
        """The attempt under `name` became no row. The engine may still be at it: its file is removed once it is there."""
        self._wanted.discard(name)

    def crowded(self) -> bool:
        """Whether the rows that wait to be closed hold more states than should lie about."""
        return sum(n for _, n in self._waiting.values()) * self._bytes_per_token > CROWDED_BYTES

    def behind(self) -> bool:
        """Whether storing is so far behind that no more should be asked for. Raises what storing met."""
        self._raise()
        return self._unstored > BEHIND_BYTES

    def settled(self, rows: Sequence[_Row]) -> None:
        """These rows are closed on disk: their states may be stored."""
        self._raise()
        for row in rows:
            if (found := self._waiting.pop(row.row_id, None)) is not None:
                with self._lock:
                    self._unstored += found[1] * self._bytes_per_token
                self._queue.put((row, found[0], self._pool.submit(self._ready, row, found[0])))

    def _ready(self, row: _Row, name: str) -> Prepared | None:
        from draftsmith.extract.packing import prepare

        return prepare(self.writer, row.row_id, self.wire.take(name, row.token_ids, row.boundary, self.alive))

    def _store(self) -> None:
        swept = time.monotonic()
        while True:
            try:
                if time.monotonic() - swept > SWEEP:
                    swept = time.monotonic()
                    self.wire.sweep(self._wanted)
                job = self._queue.get(timeout=SWEEP)
            except queue.Empty:
                continue
            except OSError as e:
                self._error = e
                continue
            if job is None:
                return
            if self._error is None:
                try:
                    self._put(*job)
                except BaseException as e:  # handed to the capture's own thread
                    self._error = e

    def _put(self, row: _Row, name: str, future: Future[Prepared | None]) -> None:
        prepared = future.result()
        if row.row_id not in self.writer.done:
            if prepared is not None:
                self.writer.put(prepared)
            else:
                self.writer.skip(row.row_id, "NaN or infinite states")
        self.drop(name)
        with self._lock:
            self._unstored -= len(row.token_ids) * self._bytes_per_token

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Store what is queued; raises what storing met."""
        self._queue.put(None)
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)
        self._raise()


def require_possible(run: Run) -> None:
    """UserError where the recipe asks for one pass and cannot have it."""
    if run.recipe.capture.endpoints:
        raise UserError(
            "extract.passes is 1 and capture.endpoints names servers",
            "states are kept by our plugin, in an engine that capture starts itself",
            "leave endpoints out, or set extract.passes: 2",
        )
    if run.recipe.extract.codec == "fp8-topk":
        raise UserError(
            "extract.passes is 1 and extract.codec is fp8-topk",
            "the draft vocab, on which the logits are kept, is chosen from the answers afterwards",
            "set extract.codec: fp8, or extract.passes: 2",
        )


@contextmanager
def keeping(run: Run, wire: Wire, contract: Contract, alive: Callable[[], None]) -> Iterator[Keeper]:
    """A keeper that writes into the capture's `states` folder; what is queued is stored before it closes."""
    from draftsmith.extract.codecs import make_codec
    from draftsmith.extract.store import StateWriter

    folder = run.stage_dir("capture") / FOLDER
    with StateWriter(folder, contract, make_codec(run.recipe.extract.codec)) as writer:
        keeper = Keeper(wire, writer, alive, run.recipe.extract.max_length)
        try:
            yield keeper
        finally:
            keeper.close()


def adopt(run: Run, folder: Path, contract: Contract, codec: Codec) -> bool:
    """Move what capture kept into the extract stage's folder, file by file (a kill in between is harmless). False, and
    a note, where it was made for other layers or another codec. Must come before a writer opens `folder`."""
    source = run.stage_dir("capture") / FOLDER
    if not (source / "store.json").is_file() and not (folder / "store.json").is_file():
        return False
    if (source / "store.json").is_file():
        facts = read_json(source / "store.json")
        if facts["codec"] != codec.name or compare(contract, Contract.load(source), frozenset({"data_hash"})):
            run.ui.note("the states kept during capture are of other layers or another codec; they are made anew")
            return False
        for path in sorted(source.glob("shard-*")) + [
            source / n for n in ("skipped.jsonl", "contract.json", "store.json")
        ]:
            if path.is_file():
                path.rename(folder / path.name)
    return True
