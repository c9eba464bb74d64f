"""Where streamed states wait for the trainer: in memory, or as a ring of files that never grows beyond its size.

Both hold packs by number and give each back once. Both put rows through the recipe's codec, so that a streamed run
reads the numbers that a stored one would.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.extract.codecs import Codec, make_codec
from draftsmith.extract.rows import Item
from draftsmith.extract.states import States
from draftsmith.record import free_bytes
from draftsmith.tensor_file import write_tensors


def pack_bytes(codec: Codec, pack: Sequence[Item], layers: int, hidden: int) -> int:
    """Bytes of a pack's rows under a codec."""
    return sum(codec.row_bytes(i.tokens, i.supervised, layers, hidden) for i in pack)


def through(codec: Codec, states: States) -> States:
    """What reading the row from a store would give."""
    if codec.name == "bf16":
        return states
    return codec.decode(codec.encode(states), states.boundary, states.final_start)


def to_tensors(codec: Codec, states: Sequence[States]) -> dict[str, Tensor]:
    """A pack as named tensors: what the codec makes of each row, and where its answer and its teacher begin."""
    rows = torch.tensor([[s.boundary, s.final_start] for s in states], dtype=torch.int64)
    fields = {f"{i}.{n}": t.contiguous() for i, s in enumerate(states) for n, t in codec.encode(s).items()}
    return {"rows": rows, **fields}


def from_tensors(codec: Codec, tensors: dict[str, Tensor]) -> list[States]:
    """The other way."""
    rows = tensors["rows"].tolist()
    fields: list[dict[str, Tensor]] = [{} for _ in rows]
    for key, value in tensors.items():
        number, dot, name = key.partition(".")
        if dot:
            fields[int(number)][name] = value
    return [codec.decode(f, boundary, start) for f, (boundary, start) in zip(fields, rows, strict=True)]


class Buffer(Protocol):
    """put/take are called from several threads; a number is put once and taken once."""

    def size(self, pack: Sequence[Item]) -> int:
        """Bytes that the pack will take here."""

    def put(self, number: int, states: Sequence[States]) -> None: ...

    def take(self, number: int) -> list[States]: ...

    def close(self) -> None: ...


class MemoryBuffer:
    """Packs as tensors. layers, hidden: of the aux streams."""

    def __init__(self, codec: Codec, layers: int, hidden: int) -> None:
        self.codec, self.layers, self.hidden = codec, layers, hidden
        self._packs: dict[int, list[States]] = {}
        # decoded rows are bf16, whatever they went through; only a short teacher stays short
        self._kept = codec if codec.needs_topk else make_codec("bf16")

    def size(self, pack: Sequence[Item]) -> int:
        aux = sum(i.tokens for i in pack) * self.layers * self.hidden  # the second byte of decoded fp8
        return pack_bytes(self._kept, pack, self.layers, self.hidden) + (aux if self.codec.needs_topk else 0)

    def put(self, number: int, states: Sequence[States]) -> None:
        self._packs[number] = [through(self.codec, s) for s in states]

    def take(self, number: int) -> list[States]:
        return self._packs.pop(number)

    def close(self) -> None:
        self._packs.clear()


class FileRing:
    """Packs as files in a folder of their own, gone once they are read. limit: bytes that the disk must have for it."""

    def __init__(self, folder: Path, codec: Codec, layers: int, hidden: int, limit: int) -> None:
        self.folder, self.codec, self.layers, self.hidden = folder, codec, layers, hidden
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed: those packs are made again
        try:
            folder.mkdir(parents=True)
        except OSError as e:
            raise UserError(
                f"{folder} cannot be made: {e}", "streamed states wait there", "give another `out`"
            ) from None
        if free_bytes(folder) < limit:
            raise UserError(
                f"the ring of files may hold {limit / 1e9:.2f} GB, the disk under {folder} has "
                f"{free_bytes(folder) / 1e9:.2f} GB free",
                "training would stop when the disk is full",
                "make room, lower train.stream_buffer_gb, or set train.stream: memory",
            )

    def size(self, pack: Sequence[Item]) -> int:
        return pack_bytes(self.codec, pack, self.layers, self.hidden)

    def _path(self, number: int) -> Path:
        return self.folder / f"pack-{number}.safetensors"

    def put(self, number: int, states: Sequence[States]) -> None:
        try:
            write_tensors(self._path(number), to_tensors(self.codec, states))
        except OSError as e:
            raise UserError(
                f"a pack of states cannot be written to {self.folder}: {e}",
                "the disk is full, or was taken away",
                "make room and start again (training goes on where it was), or set train.stream: memory",
            ) from None

    def take(self, number: int) -> list[States]:
        from safetensors import safe_open

        path = self._path(number)
        with safe_open(str(path), framework="pt", device="cpu") as f:
            # cloned: mapped pages of a file that is gone would keep its disk space until the last tensor goes
            found = from_tensors(self.codec, {k: f.get_tensor(k).clone() for k in f.keys()})  # noqa: SIM118
        path.unlink()
        return found

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
