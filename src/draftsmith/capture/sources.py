"""Prompt sources: files read record by record, so that a million prompts cost no memory, and the built-in sets.

A spec is a path or the name of a built-in set (capture/builtin.py), with an optional ":COUNT".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from draftsmith.capture.prompts import Dropped, Prompt, Rules, read_record
from draftsmith.errors import UserError, nearest
from draftsmith.record import sha256_file

BLOCK = 1 << 20


@dataclass(frozen=True)
class Source:
    """One prompt source. count: how many are wanted (None = all). note: something the user should know about it."""

    name: str
    path: Path
    count: int | None = None
    first_turn: bool = False
    note: str = ""

    def records(self) -> Iterator[tuple[int, Any]]:
        """(line or record number, record) of the file; UserError at the first broken one."""
        suffixes = self.path.suffixes
        if self.path.suffix == ".parquet":
            return _parquet(self.path)
        if ".json" in suffixes and _is_array(self.path):
            return array_records(self.path)
        return _lines(self.path)

    def prompts(self, rules: Rules) -> Iterator[Prompt | Dropped]:
        """Every record as a Prompt or a reason, in file order."""
        if self.first_turn and not rules.first_turn:
            rules = Rules(rules.assistant_role, rules.drop_images, rules.system, True, rules.roles)
        for number, record in self.records():
            yield read_record(record, self.name, rules, f"{self.path.name}:{number}")

    def hash(self) -> str:
        return sha256_file(self.path)


def open_source(spec: str) -> Source:
    """The source that a spec names. UserError for a path that does not exist and an unknown set."""
    from draftsmith.capture.builtin import BUILTIN, builtin_source

    name, count = split_spec(spec)
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix not in (".jsonl", ".json", ".parquet", ".ndjson", ".txt"):
            raise UserError(
                f"{path} is no prompt file: {path.suffix or 'no ending'}",
                "",
                "give .jsonl, .json (an array), .parquet, or .txt with a prompt a line",
            )
        return Source(path.stem, path, count)
    if name in BUILTIN:
        return builtin_source(name, count)
    close = nearest(name, list(BUILTIN))
    raise UserError(
        f"no prompt file and no built-in set {name!r}",
        "",
        f"did you mean {close[0]!r}?" if close else f"built-in sets: {', '.join(BUILTIN)}; else give a path",
    )


def split_spec(spec: str) -> tuple[str, int | None]:
    """ "mt_bench:40" → ("mt_bench", 40); a COUNT that is no positive number is refused."""
    name, colon, count = spec.rpartition(":")
    if not colon or "/" in count or "\\" in count:
        return spec, None
    if not count.isdigit() or int(count) == 0:
        raise UserError(f"{spec!r}: {count!r} is no count", "", "write SOURCE or SOURCE:COUNT, e.g. mt_bench:40")
    return name, int(count)


def _broken(path: Path, number: int, reason: str, unit: str = "line") -> UserError:
    return UserError(
        f"{path}: {unit} {number} is broken: {reason}",
        "a file with broken lines is often cut off or of another kind, and prompts would be missing without a word",
        "mend or remove the line; nothing was captured",
    )


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    plain = path.suffix == ".txt"
    with path.open("rb") as f:
        for number, raw in enumerate(f, 1):
            if not raw.strip():
                continue
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, line.rstrip("\r\n") if plain else json.loads(line)
            except UnicodeDecodeError as e:
                raise _broken(path, number, f"not UTF-8 ({e.reason})") from None
            except ValueError as e:
                raise _broken(path, number, f"not JSON ({e})") from None


def _is_array(path: Path) -> bool:
    with path.open("rb") as f:
        return f.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def array_records(path: Path, tolerant: bool = False) -> Iterator[tuple[int, Any]]:
    """The elements of a JSON array, one by one. tolerant: stop without error where the file is cut off."""
    with path.open("r", encoding="utf-8-sig") as f:
        yield from array_elements(f, path, tolerant)


def array_elements(f: IO[str], path: Path, tolerant: bool = False) -> Iterator[tuple[int, Any]]:
    """As `array_records`, from an open text file."""
    decoder = json.JSONDecoder()
    text, number = f.read(BLOCK), 0
    at = text.index("[") + 1
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at < len(text) and text[at] == "]":
            return
        reason = "the file ends inside it"
        if at < len(text):
            try:
                value, end = decoder.raw_decode(text, at)
            except ValueError as e:
                reason = str(e)
            else:
                # a number at the end of the block may go on in the next one
                if end < len(text) or not isinstance(value, (int, float)):
                    number += 1
                    yield number, value
                    at = end
                    continue
        block = f.read(max(BLOCK, len(text) - at))  # at least doubles, so a long record is not parsed too often
        if not block:
            if tolerant:
                return
            raise _broken(path, number + 1, reason, "record")
        text, at = text[at:] + block, 0


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=512):
                for record in batch.to_pylist():
                    number += 1
                    yield number, record
    except (pa.ArrowInvalid, OSError) as e:
        raise _broken(path, number + 1, str(e).splitlines()[0], "record") from None
