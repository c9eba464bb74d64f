"""Reads torch.distributed.checkpoint's index without letting it run code.

torch keeps the index of a sharded checkpoint as a pickle and loads it with the full unpickler. Run folders are copied
between machines and people, so here only the classes that an honest index is made of are found; anything else ends it.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from draftsmith.errors import UserError

ALLOWED = frozenset(
    {("torch.distributed.checkpoint.metadata", n) for n in (
        "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "StorageMeta",
        "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    )}
    | {("torch.distributed.checkpoint.filesystem", n) for n in ("_StorageInfo", "_StoragePrefix")}
    | {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib", "Path"),
       ("collections", "OrderedDict"), ("pathlib._local", "PosixPath")}
)  # fmt: skip
"""Module and name of everything in an index of torch 2.11 to 2.13, besides torch's own dtypes."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


class CarefulReader(FileSystemReader):
    """torch's own reader with an index that can name nothing but its own classes. Parts are read by torch.load, which
    takes weights alone."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(str(self._get_metadata_path(kwargs.get("rank"))))
        try:
            with path.open("rb") as f:
                found = _Unpickler(f).load()
        except (pickle.UnpicklingError, EOFError, AttributeError) as e:
            raise UserError(
                f"{path} is no index of a checkpoint: {e}",
                "an index is a pickle, and one that names other things could run code",
                "remove the folder; training goes on from an older state, or begins anew",
            ) from None
        if not isinstance(found, Metadata):
            raise UserError(f"{path} holds a {type(found).__name__}", "", "remove the folder")
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found
