"""Captured rows on disk: append-only parquet parts, each closed atomically, and a ledger that survives any kill.

    rows/part-00000.parquet …   never changed once they are there
    rows/ledger.jsonl           one line a closed part: name, rows, sha256, units that were given up

A unit is one (prompt, sample); its rows, one an assistant turn, always lie in one part. A part that is complete but has
no line yet (killed between the two) is taken over at the next start; half-written files have another name and are removed.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftsmith.errors import UserError
from draftsmith.record import content_hash, sha256_file

LEDGER = "ledger.jsonl"
PART = "part-{:05d}.parquet"


@dataclass(frozen=True)
class Row:
    """One assistant turn. token_ids: prompt and answer; boundary: index of the first answer token. thinking: the mode
    (default, on, off). finish_reason: "stop", "length" (cut at max_tokens, no end token), "tool_calls"."""

    row_id: str
    prompt_id: str
    sample: int
    turn: int
    source: str
    token_ids: list[int]
    boundary: int
    finish_reason: str
    thinking: str
    temperature: float
    top_p: float
    server_model: str
    answer_text: str


SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("prompt_id", pa.string()),
        ("sample", pa.int32()),
        ("turn", pa.int32()),
        ("source", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("boundary", pa.int32()),
        ("finish_reason", pa.string()),
        ("thinking", pa.string()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("server_model", pa.string()),
        ("answer_text", pa.string()),
    ]
)
_NAMES = [f.name for f in fields(Row)]


def row_id(prompt_id: str, sample: int, turn: int) -> str:
    return f"{prompt_id}-{sample}-{turn}"


Unit = tuple[str, int]
"""(prompt_id, sample)."""


def rows_folder(folder: Path) -> Path:
    """Where the parts lie: the folder itself, or its `rows` (a capture stage's folder)."""
    return folder if (folder / LEDGER).is_file() or not (folder / "rows").is_dir() else folder / "rows"


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """The ledger's whole lines; a last line that was cut off by a kill does not count."""
    try:
        raw = (folder / LEDGER).read_bytes()
    except FileNotFoundError:
        return []
    out = []
    for line in raw[: raw.rfind(b"\n") + 1].splitlines():
        try:
            out.append(json.loads(line))
        except ValueError as e:
            raise UserError(
                f"{folder / LEDGER} is broken: {e}",
                "it says which rows are there",
                "remove the ledger: it is made anew from the parts",
            ) from None
    return out


def write_part(path: Path, rows: Sequence[Row]) -> None:
    """A parquet file of rows, complete or not there."""
    table = pa.Table.from_pydict({n: [getattr(r, n) for r in rows] for n in _NAMES}, schema=SCHEMA)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as f:
            pq.write_table(table, f, compression="zstd")
            f.flush()
            os.fsync(f.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class RowWriter:
    """Appends units; closes a part every `every_rows` rows or `every_seconds` seconds. One process at a time.

    given_up: reasons of units that got no rows, over the folder's life. `done` tells, at the start, which units are
    settled already; it is dropped from memory by the caller when it has read it."""

    def __init__(self, folder: Path, every_rows: int = 500, every_seconds: float = 20.0) -> None:
        self.folder, self.every_rows, self.every_seconds = folder, every_rows, every_seconds
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".*.part"):
            left.unlink()
        self.ledger = self._mended_ledger()
        self.count = sum(line["rows"] for line in self.ledger)
        self.given_up: Counter[str] = Counter(u[2] for line in self.ledger for u in line.get("given_up", []))
        self._next = len(self.ledger)
        self._rows: list[Row] = []
        self._lost: list[tuple[str, int, str]] = []
        self._since = time.monotonic()
        self.on_close: Callable[[Sequence[Row]], None] | None = None
        """Told which rows have just been closed on disk."""

    def _mended_ledger(self) -> list[dict[str, Any]]:
        ledger = read_ledger(self.folder)
        path = self.folder / LEDGER
        if path.is_file() and not path.read_bytes().endswith(b"\n"):  # the line that the kill cut off
            raw = path.read_bytes()
            with path.open("r+b") as f:
                f.truncate(raw.rfind(b"\n") + 1)
        known = {line["part"] for line in ledger}
        for line in ledger:
            if line["part"] and not (self.folder / line["part"]).is_file():
                raise UserError(
                    f"{self.folder / line['part']} is missing",
                    f"the ledger says it holds {line['rows']} rows",
                    "put it back, or remove the whole folder and capture again",
                )
        for part in sorted(self.folder.glob("part-*.parquet")):
            if part.name not in known:
                line = {"part": part.name, "rows": pq.read_metadata(part).num_rows, "sha256": sha256_file(part)}
                self._append(line)
                ledger.append(line)
        return ledger

    def settled(self) -> Iterator[Unit]:
        """Every unit that has its rows or was given up."""
        for line in self.ledger:
            if line["part"]:
                table = pq.read_table(self.folder / line["part"], columns=["prompt_id", "sample"])
                yield from dict.fromkeys(zip(table["prompt_id"].to_pylist(), table["sample"].to_pylist(), strict=True))
            yield from ((p, s) for p, s, _ in line.get("given_up", []))

    @property
    def rows_so_far(self) -> int:
        """Rows in closed parts and rows waiting for one."""
        return self.count + len(self._rows)

    def add(self, rows: Sequence[Row]) -> None:
        """All rows of one unit."""
        self._rows.extend(rows)
        self._maybe_close()

    def give_up(self, prompt_id: str, sample: int, reason: str) -> None:
        """A unit that gets no rows, with its reason; it is not tried again."""
        self._lost.append((prompt_id, sample, reason))
        self.given_up[reason] += 1
        self._maybe_close()

    def _maybe_close(self) -> None:
        full = len(self._rows) + len(self._lost) >= self.every_rows
        if full or time.monotonic() - self._since >= self.every_seconds:
            self.close_part()

    def close_part(self) -> None:
        """Write what is waiting as one part and one ledger line."""
        self._since = time.monotonic()
        if not self._rows and not self._lost:
            return
        line: dict[str, Any] = {"part": None, "rows": len(self._rows), "sha256": None}
        if self._rows:
            path = self.folder / PART.format(self._next)
            write_part(path, self._rows)
            line |= {"part": path.name, "sha256": sha256_file(path)}
        if self._lost:
            line["given_up"] = self._lost
        self._append(line)
        self._next += 1
        self.count += len(self._rows)
        closed, self._rows, self._lost = self._rows, [], []
        if self.on_close is not None:
            self.on_close(closed)

    def _append(self, line: dict[str, Any]) -> None:
        path = self.folder / LEDGER
        size = path.stat().st_size if path.is_file() else 0
        try:
            with path.open("ab") as f:
                f.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
                f.flush()
                os.fsync(f.fileno())
        except OSError:  # a half line would swallow the next one
            os.truncate(path, size)
            raise


def write_rows(folder: Path, rows: Iterable[Row], every_rows: int = 500) -> int:
    """Write all rows into a new or existing folder; returns how many."""
    writer = RowWriter(folder, every_rows, every_seconds=float("inf"))
    count = 0
    for row in rows:
        writer.add([row])
        count += 1
    writer.close_part()
    return count


def iter_rows(folder: Path) -> Iterator[Row]:
    """All rows in the order they were stored, one part in memory at a time. folder: a rows folder, or one holding it.

    UserError where there are none, or a part is missing or was changed."""
    folder = rows_folder(folder)
    for line in _require(folder):
        if line["part"] is None:
            continue
        path = folder / line["part"]
        try:
            table = pq.read_table(path)
        except (pa.ArrowInvalid, OSError) as e:
            raise UserError(
                f"{path} cannot be read: {str(e).splitlines()[0]}",
                f"the ledger says it holds {line['rows']} rows",
                "put it back, or capture again",
            ) from None
        if table.num_rows != line["rows"]:
            raise UserError(f"{path} holds {table.num_rows} rows, the ledger says {line['rows']}", "", "capture again")
        for batch in table.to_batches(max_chunksize=256):
            for record in batch.to_pylist():
                yield Row(**{n: record[n] for n in _NAMES})


def _require(folder: Path) -> list[dict[str, Any]]:
    ledger = read_ledger(folder)
    if not ledger:
        raise UserError(
            f"{folder} holds no captured rows", "they are the input of this stage", "run draftsmith capture first"
        )
    return ledger


def count_rows(folder: Path) -> int:
    """How many rows a folder holds (from the ledger)."""
    return sum(line["rows"] for line in read_ledger(rows_folder(folder)))


def row_facts(folder: Path) -> dict[str, Any]:
    """Counts over all rows, read by column: finish_reasons, prompt_tokens, answer_tokens, longest (tokens)."""
    folder = rows_folder(folder)
    reasons: Counter[str] = Counter()
    prompt = whole = longest = 0
    for line in read_ledger(folder):
        if line["part"] is None:
            continue
        table = pq.read_table(folder / line["part"], columns=["finish_reason", "boundary", "token_ids"])
        lengths = pc.list_value_length(table["token_ids"])
        reasons.update(table["finish_reason"].to_pylist())
        prompt += pc.sum(table["boundary"]).as_py()
        whole += pc.sum(lengths).as_py()
        longest = max(longest, pc.max(lengths).as_py())
    return {
        "finish_reasons": dict(reasons.most_common()),
        "prompt_tokens": prompt,
        "answer_tokens": whole - prompt,
        "longest": longest,
    }


def rows_hash(folder: Path) -> str:
    """Content hash of all rows in their order: that of the parts' sha256, as the ledger has them."""
    return content_hash([line["sha256"] for line in _require(rows_folder(folder)) if line["part"]])


def verify_rows(folder: Path) -> int:
    """Compare every part with its sha256 and every unit's rows; returns the number of rows. UserError names the fault."""
    folder = rows_folder(folder)
    for line in _require(folder):
        if line["part"] and sha256_file(folder / line["part"]) != line["sha256"]:
            raise UserError(f"{folder / line['part']} was changed after it was closed", "", "capture again")
    seen: set[str] = set()
    for row in iter_rows(folder):
        if row.row_id in seen:
            raise UserError(f"row {row.row_id} is there twice in {folder}", "", "report this; capture again")
        seen.add(row.row_id)
    return len(seen)
