"""One shard: a safetensors file written row by row in a single pass, resumable after a kill.

A safetensors header comes first but is known last, so room for it is left at the start and filled with spaces (the
format allows them). Tensors are named `{row number in the shard}.{field}`. While a shard grows it is
`.NAME.part` with a journal of one JSON line per finished row (offsets and a CRC); a restart keeps what the journal
proves and cuts the rest off. Closing writes the header, syncs, renames, and then writes NAME's `.json` (index and
sha256): a shard without that file is not part of the store.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.extract.states import States
from draftsmith.record import read_json, sha256_file, write_json

HEADER_ROOM = 1 << 20
"""Bytes kept for the header; a shard also closes when this is nearly full."""
_ROW_HEADER = 96
"""Header bytes that one tensor takes at most, besides its name."""

DTYPES: dict[torch.dtype, str] = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass(frozen=True)
class Entry:
    """One row of the index. shard: the file's stem; number: the row's place in it; tokens T; bytes stored."""

    row_id: str
    shard: str
    number: int
    tokens: int
    boundary: int
    final_start: int
    argmax: bool
    bytes: int
    answer: bool = False


def _raw(t: Tensor) -> memoryview:
    flat = t.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


@dataclass(frozen=True)
class Packed:
    """One row's tensors as they will lie in a shard: (field, dtype, shape, first byte, end) and their bytes, padding
    included. Made by any thread; adding it to a shard only writes."""

    fields: list[tuple[str, str, list[int], int, int]]
    blocks: list[memoryview]
    size: int
    crc: int


def pack(fields: dict[str, Tensor]) -> Packed:
    """Wide types first and the whole padded to 8 bytes, so that every tensor lies aligned."""
    described: list[tuple[str, str, list[int], int, int]] = []
    blocks: list[memoryview] = []
    at = crc = 0
    for name, t in sorted(fields.items(), key=lambda kv: (-kv[1].element_size(), kv[0])):
        raw = _raw(t)
        described.append((name, DTYPES[t.dtype], list(t.shape), at, at + len(raw)))
        blocks.append(raw)
        at += len(raw)
    if pad := -at % 8:
        described.append(("pad", "U8", [pad], at, at + pad))
        blocks.append(memoryview(bytes(pad)))
        at += pad
    for raw in blocks:
        crc = zlib.crc32(raw, crc)
    return Packed(described, blocks, at, crc)


class ShardWriter:
    """Rows appended to `folder/.{name}.part`. `close()` makes `folder/{name}.safetensors` and `.json`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.part = folder / f".{name}.part"
        self.journal = folder / f".{name}.journal"
        self.entries: list[Entry] = []
        self.header: dict[str, dict[str, Any]] = {}
        self.end = 0
        self._header_bytes = 64
        self._recover()
        self._file = self.part.open("r+b" if self.part.exists() else "w+b")
        self._file.truncate(HEADER_ROOM + self.end)
        self._file.seek(HEADER_ROOM + self.end)
        self._log = self.journal.open("a", encoding="utf-8")

    def _recover(self) -> None:
        """Keep the journalled rows whose bytes are all there."""
        finished = self.folder / f"{self.name}.safetensors"
        if finished.is_file() and self.journal.is_file():  # killed between the rename and the index
            finished.replace(self.part)
        if not (self.journal.is_file() and self.part.is_file()):
            self.journal.unlink(missing_ok=True)
            self.part.unlink(missing_ok=True)
            return
        good: list[str] = []
        with self.journal.open(encoding="utf-8") as log, self.part.open("rb") as data:
            for line in log:
                try:
                    row = json.loads(line)
                except ValueError:
                    break
                data.seek(HEADER_ROOM + self.end)
                block = data.read(row["end"] - self.end)
                if len(block) != row["end"] - self.end or zlib.crc32(block) != row["crc"]:
                    break
                self._take(Entry(**row["entry"]), row["fields"], row["end"])
                good.append(line)
        temporary = self.journal.with_suffix(".new")
        temporary.write_text("".join(good), encoding="utf-8")
        temporary.replace(self.journal)

    def _take(self, entry: Entry, fields: dict[str, dict[str, Any]], end: int) -> None:
        self.entries.append(entry)
        self.header |= fields
        self._header_bytes += sum(len(name) + _ROW_HEADER for name in fields)
        self.end = end

    @property
    def bytes(self) -> int:
        return HEADER_ROOM + self.end

    def fits(self, fields: int, size: int, limit: int) -> bool:
        """Whether a row of `fields` tensors and `size` bytes still belongs here (an empty shard takes any row)."""
        if not self.entries:
            return True
        room = self._header_bytes + fields * (_ROW_HEADER + 24) <= HEADER_ROOM
        return room and self.bytes + size <= limit

    def add(self, row_id: str, row: States, packed: Packed) -> None:
        """Append one row; `packed`: what the codec made of it."""
        number, start = len(self.entries), self.end
        described = {
            f"{number}.{name}": {"dtype": dtype, "shape": shape, "data_offsets": [start + a, start + b]}
            for name, dtype, shape, a, b in packed.fields
        }
        at = start + packed.size
        self._file.seek(HEADER_ROOM + start)  # an earlier row may have failed half-way: disk full
        for raw in packed.blocks:
            self._file.write(raw)
        self._file.flush()
        entry = Entry(
            row_id,
            self.name,
            number,
            row.tokens,
            row.boundary,
            row.final_start,
            row.argmax is not None,
            at - start,
            row.answer is not None,
        )
        line = json.dumps({"entry": asdict(entry), "fields": described, "end": at, "crc": packed.crc})
        self._log.write(line + "\n")
        self._log.flush()
        self._take(entry, described, at)

    def release(self) -> None:
        """Close the files and leave the part for a later start."""
        self._file.close()
        self._log.close()

    def close(self, turn: Callable[[], object] | None = None) -> list[Entry]:
        """Finish the shard; returns its index. An empty one leaves nothing behind. turn: called before the shard gets
        its name, once it is synced and summed (it may wait for another's, or raise)."""
        if not self.entries:
            self.release()
            self.part.unlink(missing_ok=True)
            self.journal.unlink(missing_ok=True)
            return []
        text = json.dumps(self.header, separators=(",", ":")).encode()
        if len(text) > HEADER_ROOM - 8:
            raise AssertionError(f"header of {self.name} takes {len(text)} bytes, room is {HEADER_ROOM - 8}")
        self._file.seek(0)
        self._file.write((HEADER_ROOM - 8).to_bytes(8, "little") + text.ljust(HEADER_ROOM - 8))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.release()
        final = self.folder / f"{self.name}.safetensors"
        digest = sha256_file(self.part)
        if turn is not None:
            turn()
        self.part.replace(final)
        index = {"sha256": digest, "bytes": self.bytes, "rows": [asdict(e) for e in self.entries]}
        write_json(self.folder / f"{self.name}.json", index)
        self.journal.unlink(missing_ok=True)
        return self.entries


def read_index(path: Path) -> tuple[dict[str, Any], list[Entry]]:
    """A shard's .json: the record and its rows."""
    try:
        found = read_json(path)
        rows = [Entry(**row) for row in found["rows"]]
        if not isinstance(found["sha256"], str) or not isinstance(found["bytes"], int):
            raise TypeError("sha256 or bytes")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(
            f"{path} is no index of a shard: {type(e).__name__} {e}",
            "without it nothing says which rows the shard holds",
            "copy it again, or remove the shard and its index and run draftsmith extract",
        ) from None
    require_own(rows, path)
    return found, rows


def require_own(rows: list[Entry], path: Path) -> None:
    """UserError where an index names another shard than its own: that could be any file of this machine."""
    if strange := next((e for e in rows if e.shard != path.stem), None):
        raise UserError(
            f"{path}: row {strange.row_id!r} is said to lie in {strange.shard!r}",
            "an index names rows of its own shard alone",
            "the store was tampered with or mixed up; copy it again, or remove that shard and extract again",
        )
