"""The tensors of a checkpoint by exact key, without loading the checkpoint: headers first, then byte ranges.

A safetensors file is eight bytes of header length, a JSON header (name → dtype, shape, offsets), and the data; rows of
a matrix are therefore one byte range, on a disk and over HTTP alike.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from draftsmith.errors import UserError
from draftsmith.target.config import load_config
from draftsmith.untrusted import MAX_JSON, inside, parse_json, read_json

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_HEADER = 100_000_000
"""Bytes; safetensors' own reader refuses more."""
MAX_INDEX = 4 * MAX_JSON
GAP_ROWS = 16
"""Rows between two wanted ones that are read along rather than asked for apart."""


class Bytes(Protocol):
    """A file that gives byte ranges: on this disk, or on the hub (target/ranges.py)."""

    name: str

    def size(self) -> int: ...

    def read(self, start: int, length: int) -> bytes: ...


class LocalBytes:
    """Byte ranges of a file on this machine."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)

    def size(self) -> int:
        return self.path.stat().st_size

    def read(self, start: int, length: int) -> bytes:
        with self.path.open("rb") as f:
            return os.pread(f.fileno(), length, start)


@dataclass(frozen=True)
class Entry:
    """One tensor: where its bytes lie. start: absolute offset in the file."""

    file: Bytes
    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int


def read_header(file: Bytes) -> dict[str, Entry]:
    """name → Entry of one safetensors file. UserError if the file is cut off or no safetensors."""
    size = file.size()
    try:
        (length,) = struct.unpack("<Q", file.read(0, 8))
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ValueError(f"header of {length} bytes in a file of {size}")
        header = parse_json(file.read(8, length))
        out = {}
        for name, e in header.items():
            if name == "__metadata__":
                continue
            begin, end = e["data_offsets"]
            if not 0 <= begin <= end <= size - 8 - length:
                raise ValueError(f"{name} does not lie inside the file")
            if not _sound(e["dtype"], e["shape"], end - begin):
                raise ValueError(f"{name} is {e['dtype']} {e['shape']} in {end - begin} bytes")
            out[name] = Entry(file, e["dtype"], tuple(e["shape"]), 8 + length + begin, end - begin)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(
            f"{file.name} is no whole safetensors file: {e}",
            "a download that was cut off looks like this (or a pointer left by git-lfs)",
            "download it again",
        ) from None
    return out


def _sound(dtype: Any, shape: Any, length: int) -> bool:
    """Whether shape and dtype fill just these bytes; dtypes that are not known here are read by nobody."""
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        return False
    return dtype not in DTYPES or math.prod(shape) * DTYPES[dtype].itemsize == length


def read_tensor(entry: Entry, rows: Sequence[int] | None = None) -> torch.Tensor:
    """The tensor, or its given rows in the given order ([len(rows), ...]), in the stored dtype."""
    if entry.dtype not in DTYPES:
        raise UserError(
            f"{entry.file.name} holds a tensor of type {entry.dtype}, which is not known here", "", "report it"
        )
    dtype = DTYPES[entry.dtype]
    if rows is None:
        return _tensor(entry.file.read(entry.start, entry.length), dtype).reshape(entry.shape)
    out = torch.empty((len(rows), *entry.shape[1:]), dtype=dtype)
    if not rows:
        return out
    width = entry.length // entry.shape[0]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    if rows[order[0]] < 0 or rows[order[-1]] >= entry.shape[0]:
        raise UserError(
            f"row {rows[order[-1]]} of a table with {entry.shape[0]} rows ({entry.file.name})",
            "the ids come from another vocabulary",
            "use the draft vocab that was made for this target",
        )
    at = 0
    while at < len(order):
        end = at + 1
        while end < len(order) and rows[order[end]] - rows[order[end - 1]] <= GAP_ROWS:
            end += 1
        first, last = rows[order[at]], rows[order[end - 1]]
        raw = entry.file.read(entry.start + first * width, (last - first + 1) * width)
        block = _tensor(raw, dtype).reshape(last - first + 1, *entry.shape[1:])
        places = torch.tensor(order[at:end])
        picks = torch.tensor([rows[i] - first for i in order[at:end]])
        if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):  # no indexing kernels for these
            out.view(torch.uint8)[places] = block.view(torch.uint8)[picks]
        else:
            out[places] = block[picks]
        at = end
    return out


def _tensor(raw: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)


class Checkpoint:
    """All tensors of a target by name, from a local folder or a hub id; nothing is read until asked for.

    `config` is its config.json. Which files: those of the index where there is one, else model.safetensors, else
    consolidated.safetensors, else every *.safetensors."""

    def __init__(self, entries: dict[str, Entry], config: dict[str, object], name: str) -> None:
        self.entries, self.config, self.name = entries, config, name

    @staticmethod
    def open(source: Path | str, revision: str | None = None) -> Checkpoint:
        path = Path(source).expanduser()
        if path.is_dir():
            entries: dict[str, Entry] = {}
            for file in local_files(path):
                entries |= read_header(LocalBytes(file))
            return Checkpoint(entries, load_config(path), str(path))
        from draftsmith.target.ranges import hub_entries

        return Checkpoint(hub_entries(str(source), revision), load_config(source, revision), str(source))

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        return read_tensor(self.entries[name], rows)


def index_files(raw: object, name: str) -> list[str]:
    """The files that a model.safetensors.index.json names, in order."""
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{name}: the index of its safetensors has no weight_map", "", "download it again")
    return sorted({str(v) for v in weight_map.values()})


def choose_files(present: Sequence[str], index: object | None, name: str) -> list[str]:
    """Which of the files `present` hold the checkpoint. UserError where none does, or one of the index is missing."""
    if index is not None:
        files = index_files(index, name)
        if missing := [f for f in files if f not in present]:
            raise UserError(
                f"{name}: {len(missing)} of {len(files)} weight files are missing, the first {missing[0]}",
                "the index names them",
                "finish the download",
            )
        return files
    tensors = sorted(f for f in present if f.endswith(".safetensors"))
    for single in ("model.safetensors", "consolidated.safetensors"):
        if single in tensors:
            return [single]
    if tensors:
        return tensors
    pickles = [f for f in present if f.endswith((".bin", ".pt", ".pth", ".gguf"))]
    raise UserError(
        f"{name} holds no safetensors" + (f" (but {pickles[0]})" if pickles else ""),
        "the target's embedding, final norm and lm_head are read from them; pickles are never opened",
        "take the safetensors form of the model",
    )


def local_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder."""
    present = [p.name for p in sorted(folder.iterdir())]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        index = folder / "consolidated.safetensors.index.json"
    parsed = None
    if index.is_file():
        try:
            parsed = read_json(index, MAX_INDEX)
        except ValueError as e:
            raise UserError(f"{index} is not JSON: {e}", "", "download it again") from None
    try:
        return [inside(folder, f) for f in choose_files(present, parsed, str(folder))]
    except ValueError as e:
        raise UserError(
            f"{folder}: {e}",
            "a file that came with a model must not choose what is read elsewhere on this machine",
            "copy the weights themselves into the folder",
        ) from None
