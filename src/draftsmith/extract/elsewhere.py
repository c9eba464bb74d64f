"""Stores of states that lie elsewhere: on any path that fsspec knows (s3://…, gs://…, sftp://…, memory://…).

Only the records come here (a few kB a shard); a row is read as the byte ranges of its tensors. `copy_store` brings a
store from anywhere to anywhere, the records of a shard after its bytes, so that a copy cut off is a smaller store and
goes on when it is repeated.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.extract import scratch
from draftsmith.extract.shard import DTYPES
from draftsmith.extract.store import FILE, SKIPPED, StateStore

_BLOCK = 8 << 20
_TYPES = {name: dtype for dtype, name in DTYPES.items()}
RECORDS = ("contract.json", SKIPPED)


def is_url(place: str | Path) -> bool:
    """Whether this is fsspec's business and no local path."""
    return "://" in str(place)


def file_system(place: str | Path) -> tuple[Any, str]:
    """fsspec's file system of a URL or local path, and the path within it. UserError where its driver is missing."""
    import fsspec

    text = str(place) if is_url(place) else Path(place).expanduser().resolve().as_uri()
    try:
        fs, root = fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as e:
        raise UserError(
            f"{place}: {e}", "fsspec has a driver for each kind of storage", "pip install that driver"
        ) from None
    return fs, root.rstrip("/")


class RemoteShard:
    """Tensors of a safetensors file by byte ranges. UserError where its header is none."""

    def __init__(self, fs: Any, path: str) -> None:
        self.fs, self.path = fs, path
        try:
            length = int.from_bytes(fs.cat_file(path, start=0, end=8), "little")
            if not 2 <= length <= fs.size(path) - 8:
                raise ValueError(f"a header of {length} bytes")
            self.header: dict[str, Any] = json.loads(fs.cat_file(path, start=8, end=8 + length))
        except (ValueError, OSError) as e:
            raise UserError(f"{path} is no safetensors file: {e}", "its rows are lost", "copy it again") from None
        self.start = 8 + length

    def get_tensor(self, name: str) -> Tensor:
        """KeyError where there is none of that name."""
        found = self.header[name]
        first, last = found["data_offsets"]
        raw = bytearray(self.fs.cat_file(self.path, start=self.start + first, end=self.start + last))
        if len(raw) != last - first:
            raise OSError(f"{self.path} ends within {name}")
        dtype = _TYPES[found["dtype"]]
        if not raw:
            return torch.empty(found["shape"], dtype=dtype)
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(found["shape"])


class RemoteStore(StateStore):
    """A store behind a URL; reads as any other."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.fs, self.root = file_system(url)
        here, lock = scratch.make(Path(tempfile.gettempdir()), "draftsmith-index-")
        self._forget = weakref.finalize(self, scratch.remove, here, lock)
        try:
            names = sorted(p.rsplit("/", 1)[-1] for p in self.fs.ls(self.root, detail=False))
        except (OSError, KeyError) as e:
            raise UserError(f"{url} cannot be listed: {e}", "", "check the address, and that you may read it") from None
        for name in names:
            if name == FILE or name in RECORDS or (name.startswith("shard-") and name.endswith(".json")):
                (here / name).write_bytes(self.fs.cat_file(f"{self.root}/{name}"))
        super().__init__(here)

    def _path(self, shard: str) -> str:
        return f"{self.root}/{shard}.safetensors"

    def _size(self, shard: str) -> int | None:
        path = self._path(shard)
        return int(self.fs.size(path)) if self.fs.exists(path) else None

    def _digest(self, shard: str) -> str:
        digest = hashlib.sha256()
        with self.fs.open(self._path(shard), "rb") as f:
            while block := f.read(_BLOCK):
                digest.update(block)
        return digest.hexdigest()

    def _open_shard(self, shard: str) -> Any:
        return RemoteShard(self.fs, self._path(shard))


def copy_store(source: str | Path, target: str | Path) -> dict[str, Any]:
    """Copy a store; either side may be a URL. Shards that are there whole are left. Returns shards, copied, bytes.

    UserError where another store lies at the target."""
    store = StateStore.open(source)
    fs, root = file_system(source)
    to, base = file_system(target)
    to.makedirs(base, exist_ok=True)
    facts, copied = fs.cat_file(f"{root}/{FILE}"), 0
    if to.exists(f"{base}/{FILE}") and to.cat_file(f"{base}/{FILE}") != facts:
        raise UserError(
            f"{target} holds another store", "two would be mixed", "give an empty place, or remove the other store"
        )
    to.pipe_file(f"{base}/{FILE}", facts)
    to.pipe_file(f"{base}/contract.json", fs.cat_file(f"{root}/contract.json"))
    for shard in store.shards:
        index = fs.cat_file(f"{root}/{shard}.json")
        there, mine = f"{base}/{shard}.json", f"{base}/{shard}.safetensors"
        if to.exists(there) and to.cat_file(there) == index and to.exists(mine) and to.size(mine) == store.size(shard):
            continue
        with fs.open(f"{root}/{shard}.safetensors", "rb") as f, to.open(mine, "wb") as out:
            while block := f.read(_BLOCK):
                out.write(block)
        to.pipe_file(there, index)
        copied += 1
    if fs.exists(f"{root}/{SKIPPED}"):
        to.pipe_file(f"{base}/{SKIPPED}", fs.cat_file(f"{root}/{SKIPPED}"))
    return {"shards": len(store.shards), "copied": copied, "bytes": store.bytes}
