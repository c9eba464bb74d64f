"""Where an engine's source is read from: a folder, a packed wheel, or a folder on another host; never imported, never run.

All three give the same few functions, with paths relative to the folder that holds the package
("vllm/config/speculative.py"). Everything above this file is pure.
"""

from __future__ import annotations

import zipfile
import zlib
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Protocol

from draftsmith.errors import UserError

LARGEST = 32 << 20
"""Bytes. A source file above this is not read: it is no source file."""


class Source(Protocol):
    """Read-only files of one installation. `name` is what the user is shown."""

    @property
    def name(self) -> str: ...

    def read_bytes(self, rel: str) -> bytes:
        """FileNotFoundError where there is none; UserError where it is larger than LARGEST."""
        ...

    def read(self, rel: str) -> str: ...

    def exists(self, rel: str) -> bool:
        """Whether a file or a folder of this name is there."""
        ...

    def names(self, rel: str) -> list[str]:
        """Names of the files and folders directly in `rel` ("" is the root), sorted; empty where there is no such folder."""
        ...

    def path(self, rel: str) -> Path | None:
        """The real file, where it lies on this machine and is not packed."""
        ...


def text_of(data: bytes) -> str:
    """Python source as text; bytes that are not UTF-8 are replaced, since only names and lines matter here."""
    return data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")


def too_large(name: str, rel: str, size: int) -> UserError:
    return UserError(
        f"{rel} in {name} is {size:,} bytes", "no source file is that large", "give the folder of an engine"
    )


class FolderSource:
    """Files below a folder of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def name(self) -> str:
        return str(self.root)

    def read_bytes(self, rel: str) -> bytes:
        file = self.root / rel
        if not file.is_file():
            raise FileNotFoundError(str(file))
        size = file.stat().st_size
        if size > LARGEST:
            raise too_large(self.name, rel, size)
        return file.read_bytes()

    def read(self, rel: str) -> str:
        return text_of(self.read_bytes(rel))

    def exists(self, rel: str) -> bool:
        return (self.root / rel).exists()

    def names(self, rel: str) -> list[str]:
        folder = self.root / rel
        return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []

    def path(self, rel: str) -> Path | None:
        return self.root / rel


class ZipSource:
    """Files of a packed wheel; `prefix` is the folder inside it that plays the root ("" or "a/b/")."""

    def __init__(self, file: Path, prefix: str = "") -> None:
        self.file, self.prefix = file, prefix
        try:
            self.zip = zipfile.ZipFile(file)
        except (OSError, zipfile.BadZipFile, ValueError) as e:
            raise UserError(f"{file} is not a readable wheel: {e}", fix="download it again") from None

    @property
    def name(self) -> str:
        return str(self.file)

    @cached_property
    def _folders(self) -> dict[str, set[str]]:
        """Folder → names directly in it. One pass over the archive's table of contents."""
        folders: dict[str, set[str]] = {"": set()}
        for entry in self.zip.namelist():
            if not entry.startswith(self.prefix):
                continue
            parts = PurePosixPath(entry[len(self.prefix) :]).parts
            for depth in range(len(parts)):
                folders.setdefault("/".join(parts[:depth]), set()).add(parts[depth])
        return folders

    def read_bytes(self, rel: str) -> bytes:
        try:
            info = self.zip.getinfo(self.prefix + rel)
        except KeyError:
            raise FileNotFoundError(f"{rel} in {self.file}") from None
        if info.file_size > LARGEST:
            raise too_large(self.name, rel, info.file_size)
        try:
            return self.zip.read(info)
        except (zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, EOFError) as e:
            raise UserError(f"{rel} in {self.file} cannot be unpacked: {e}", fix="download the wheel again") from None

    def read(self, rel: str) -> str:
        return text_of(self.read_bytes(rel))

    def exists(self, rel: str) -> bool:
        parent, _, last = rel.rstrip("/").rpartition("/")
        return last in self._folders.get(parent, ())

    def names(self, rel: str) -> list[str]:
        return sorted(self._folders.get(rel.rstrip("/"), ()))

    def path(self, rel: str) -> Path | None:
        return None


class Below:
    """A folder of another source as a source of its own."""

    def __init__(self, source: Source, folder: str) -> None:
        self.source, self.folder = source, folder.strip("/")

    @property
    def name(self) -> str:
        return f"{self.source.name}/{self.folder}"

    def read_bytes(self, rel: str) -> bytes:
        return self.source.read_bytes(f"{self.folder}/{rel}")

    def read(self, rel: str) -> str:
        return text_of(self.read_bytes(rel))

    def exists(self, rel: str) -> bool:
        return self.source.exists(f"{self.folder}/{rel}")

    def names(self, rel: str) -> list[str]:
        return self.source.names(f"{self.folder}/{rel}".rstrip("/"))

    def path(self, rel: str) -> Path | None:
        return self.source.path(f"{self.folder}/{rel}")
