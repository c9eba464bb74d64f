"""Safetensors headers of a model folder, read without trusting a byte of them, and without reading a weight.

A file is 8 bytes of little-endian header length, the header (JSON: name → dtype, shape, [begin, end)), the data.
Every fault becomes a sentence in `Weights.problems`; nothing here raises for what a file holds. Pickled weights
(`*.bin`, `*.pt`) are seen and named, never opened.

    weights = read_weights(folder); weights.tensors["fc.weight"].shape
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.check.types import TensorHeader
from draftsmith.errors import UserError
from draftsmith.untrusted import inside

if TYPE_CHECKING:
    import numpy as np

MAX_HEADER = 100_000_000
"""Bytes of one file's header; the format's own reader refuses more."""
MAX_INDEX = 256_000_000
MAX_RANK = 16
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth")

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one element of each dtype that the format knows."""

_NUMPY = {
    "BOOL": "|u1", "U8": "|u1", "I8": "|i1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4",
    "I64": "<i8", "U64": "<u8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip


@dataclass
class Weights:
    """What lies in a folder. problems: sentences, each a reason why an engine's loader would stop or go wrong.
    pickles: weight files that are there and were not opened. nbytes: of all tensors, kept or not."""

    tensors: dict[str, TensorHeader] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    pickles: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    nbytes: int = 0


class _HeaderError(ValueError):
    pass


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _fault(name: str, entry: Any, base: int, size: int) -> str:
    """What is wrong with an entry of the header."""
    if not isinstance(entry, dict):
        return f"{name!r} is {type(entry).__name__}, not an object"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        return f"{name!r} has the unknown dtype {str(dtype)[:40]!r}"
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_size(d) for d in shape):
        return f"{name!r} has no shape of at most {MAX_RANK} sizes"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(o) for o in offsets):
        return f"{name!r} has no pair of data offsets"
    begin, end = offsets
    if begin > end or base + end > size:
        return f"{name!r} ends at byte {base + end:,} of a file of {size:,}: the file is cut or still loading"
    return f"{name!r} is {dtype} {shape} in {end - begin:,} bytes"


def _load(path: Path) -> tuple[dict[str, Any], int, int]:
    """(the header as parsed, where the data begins, the file's size)."""
    with path.open("rb") as f:
        size = os.fstat(f.fileno()).st_size
        prefix = f.read(8)
        if prefix == b"version ":
            raise _HeaderError("is a git-lfs pointer, not the weights")
        if len(prefix) < 8:
            raise _HeaderError(f"holds {size} bytes, too few for a header")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER or 8 + length > size:
            raise _HeaderError(f"declares a header of {length:,} bytes in a file of {size:,}")
        raw = f.read(length)
    try:
        header = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise _HeaderError(f"has a header that is not JSON ({type(e).__name__})") from None
    if not isinstance(header, dict):
        raise _HeaderError(f"has a header that is {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    # A name that stands twice is lost in the dict; its offsets are still in the bytes.
    if raw.count(b'"data_offsets"') > len(header):
        raise _HeaderError("names a tensor twice")
    return header, 8 + length, size


def _parse(path: Path, keep: tuple[str, ...] | None) -> tuple[dict[str, TensorHeader], list[str], int]:
    """(tensors that are wanted, all names, bytes of data) of one file. Written for speed: a large target has 70,000
    tensors, and each is looked at."""
    header, base, size = _load(path)
    room = size - base
    tensors: dict[str, TensorHeader] = {}
    total, last, ordered = 0, 0, True
    for name, entry in header.items():
        try:
            shape, (begin, end), count = entry["shape"], entry["data_offsets"], BITS[entry["dtype"]]
            sound = type(shape) is list and type(begin) is int is type(end) and len(shape) <= MAX_RANK
            if sound:
                for d in shape:
                    if type(d) is not int or d < 0:
                        sound = False
                        break
                    count *= d
            sound = sound and 0 <= begin <= end <= room and (count + 7) // 8 == end - begin
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound:
            raise _HeaderError(_fault(name, entry, base, size))
        if begin < last:
            ordered = False
        last = end
        total += end - begin
        if keep is None or name.endswith(keep):
            tensors[name] = TensorHeader(name, entry["dtype"], tuple(shape), path, base + begin, base + end)
    if not ordered:
        last, owner = 0, ""
        for begin, end, name in sorted((*e["data_offsets"], n) for n, e in header.items()):
            if begin < last and end > begin:
                raise _HeaderError(f"{name!r} overlaps {owner!r}")
            if end > last:
                last, owner = end, name
    return tensors, list(header), total


_TAIL = re.compile(rb'"data_offsets": ?\[([0-9]{1,18}), ?([0-9]{1,18})\] ?\} ?\} *$')


def _glance(path: Path) -> int | None:
    """Bytes of data of a file that is whole by its length and by its header's last entry, which ends where the file
    does; None where that is not so and the header must be parsed to say why."""
    with path.open("rb") as f:
        size = os.fstat(f.fileno()).st_size
        length = int.from_bytes(f.read(8), "little")
        if not 0 < length <= min(MAX_HEADER, size - 8):
            return None
        f.seek(8 + max(0, length - 512))
        tail = _TAIL.search(f.read(min(length, 512)))
    room = size - 8 - length
    return room if tail is not None and int(tail.group(2)) == room else None


def _inside(folder: Path, name: str) -> Path | str:
    """The file `name` of the folder, or a sentence why it is refused (untrusted.inside)."""
    try:
        path = inside(folder, name)
        there = path.is_file()
    except ValueError as e:
        return f"the index names {e}" if "not a file" in str(e) else str(e)
    except OSError as e:
        return f"{name[:80]!r} cannot be looked at: {e.strerror}"
    return path if there else f"{name!r} is missing"


def _shards(folder: Path, weights: Weights) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files to read, and the index's map of tensor name → file ({} without an index)."""
    index = folder / INDEX
    if not index.is_file():
        found = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
        paths = []
        for p in found:
            checked = _inside(folder, p.name)
            if isinstance(checked, str):
                weights.problems.append(checked)
            else:
                paths.append(checked)
        numbered = [p.name for p in paths if "-of-" in p.name]
        total = {n.rsplit("-of-", 1)[1].removesuffix(".safetensors") for n in numbered}
        if len(total) == 1 and (t := total.pop()).isdigit() and int(t) != len(numbered):
            weights.problems.append(f"{len(numbered)} of {int(t)} shards are here, and no index")
        return paths, {}
    try:
        if index.stat().st_size > MAX_INDEX:
            raise ValueError(f"{index.stat().st_size:,} bytes")
        table = json.loads(index.read_bytes())["weight_map"]
        if not isinstance(table, dict) or not set(map(type, table.values())) <= {str}:
            raise ValueError("weight_map is not a table of names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        weights.problems.append(f"{INDEX} is not readable ({type(e).__name__}: {str(e)[:80]})")
        return [], {}
    paths = []
    for name in sorted(set(table.values())):
        checked = _inside(folder, name)
        if isinstance(checked, str):
            weights.problems.append(checked)
        else:
            paths.append(checked)
    return paths, table


def read_weights(folder: Path, keep: tuple[str, ...] | None = None) -> Weights:
    """Every tensor of a model folder (one file, or hub-style shards with or without an index), and what is wrong.

    keep: endings of the names to be kept in `tensors`; all are counted in `nbytes`. Shards that by the index hold none
    of them are only looked at for being whole: a target may have 70,000 tensors in 64 files."""
    weights = Weights()
    try:
        weights.pickles = sorted(
            p for pattern in PICKLES for p in folder.glob(pattern) if not p.name.startswith(("training_", "optimizer"))
        )
        paths, table = _shards(folder, weights)
    except OSError as e:
        weights.problems.append(f"{folder} cannot be listed: {e.strerror or e}")
        return weights
    home: dict[str, str] = {}
    needed = {file for name, file in table.items() if keep is None or name.endswith(keep)}
    glanced = set()
    for path in paths:
        weights.files.append(path)
        try:
            if table and path.name not in needed and (size := _glance(path)) is not None:
                glanced.add(path.name)
                weights.nbytes += size
                continue
            tensors, names, size = _parse(path, keep)
        except _HeaderError as e:
            weights.problems.append(f"{path.name} {e}")
            continue
        except OSError as e:
            weights.problems.append(f"{path.name} cannot be read: {e.strerror or e}")
            continue
        if twice := home.keys() & names:
            name = min(twice)
            weights.problems.append(f"{name!r} is both in {home[name]} and in {path.name}")
        home.update(dict.fromkeys(names, path.name))
        weights.tensors.update(tensors)
        weights.nbytes += size
    if table and not weights.problems and home.items() != table.items():
        lost = [n for n, f in table.items() if home.get(n) != f and f not in glanced]
        if lost:
            weights.problems.append(f"{len(lost)} tensors of the index are not in their file, first {lost[0]!r}")
    return weights


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """`read_weights(folder).tensors`; UserError naming the first problem where there is one."""
    weights = read_weights(folder)
    if weights.problems:
        raise UserError(f"{folder}: {weights.problems[0]}", "its weights cannot be listed", "copy the folder again")
    return weights.tensors


def read_bytes(tensor: TensorHeader) -> bytes:
    """The tensor's bytes; the caller has looked at its size."""
    with tensor.file.open("rb") as f:
        f.seek(tensor.start)
        return f.read(tensor.end - tensor.start)


def read_array(tensor: TensorHeader, max_bytes: int) -> np.ndarray:
    """The tensor's values as numpy (bf16 becomes float32); UserError beyond `max_bytes` or for exotic dtypes."""
    if tensor.end - tensor.start > max_bytes:
        raise UserError(f"{tensor.name} takes {tensor.end - tensor.start:,} bytes", f"more than {max_bytes:,}", "")
    return next(read_blocks(tensor, max_bytes + 8, max_bytes)).reshape(tensor.shape)


def read_blocks(tensor: TensorHeader, block_bytes: int, max_bytes: int) -> Iterator[np.ndarray]:
    """The tensor's values as flat numpy blocks of at most `block_bytes`, the first `max_bytes` of it."""
    import numpy as np

    if tensor.dtype != "BF16" and tensor.dtype not in _NUMPY:
        raise UserError(f"{tensor.name} is {tensor.dtype}", "its values cannot be looked at", "")
    item = BITS[tensor.dtype] // 8
    left = min(tensor.end - tensor.start, max_bytes) // item * item
    if left == 0:
        yield np.zeros(0, "f4")
        return
    with tensor.file.open("rb") as f:
        f.seek(tensor.start)
        while left > 0:
            raw = f.read(min(left, max(block_bytes // item * item, item)))
            if len(raw) < item:
                return
            left -= len(raw)
            if tensor.dtype == "BF16":
                yield (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
            else:
                yield np.frombuffer(raw, _NUMPY[tensor.dtype])
