"""The sites of an installed engine, found without parsing all of it.

Parsing every file of vLLM takes 20 s and more. A message's own words say which few files can have made it: runs of
words that stand next to each other both in the message and in a file are looked for in the raw text, rare ones count
more, and only the best files are parsed. What was parsed is kept on disk by file size and time.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from draftsmith.engine.inject import home
from draftsmith.engine.reader.source import Source, text_of
from draftsmith.engine.trace_templates import Hole, Site, Template, sites
from draftsmith.errors import UserError
from draftsmith.record import atomic_write, content_hash

FORMAT = 1
_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]{2,}|[A-Za-z]+")


def needles(message: str, most: int = 48) -> list[bytes]:
    """Pieces of the message that stand in a source if the message came from there: two words with what is between them
    (one literal may be broken anywhere), and single long words."""
    found: dict[str, int] = {}
    words = list(_WORD.finditer(message[:2000]))
    for one, two in pairwise(words):
        piece = message[one.start() : two.end()]
        if two.start() - one.end() <= 2 and "\n" not in piece:
            found.setdefault(piece, len(piece))
    for one in words:
        if len(one.group()) >= 5:
            found.setdefault(one.group(), len(one.group()) // 2)
    best = sorted(found, key=lambda p: -found[p])[:most]
    return [p.encode() for p in best]


@dataclass
class Index:
    """Sites of one engine, by file. `package` is the folder read ("vllm"); `kept` the cache file, None for no cache."""

    source: Source
    package: str
    kept: Path | None = None
    _raw: dict[str, bytes] | None = None
    _sites: dict[str, list[Site]] = field(default_factory=dict)
    _stamps: dict[str, str] = field(default_factory=dict)
    _dirty: bool = False

    @staticmethod
    def of(source: Source, package: str, version: str | None) -> Index:
        """With its cache loaded. Sources that are no folder of this machine are cached by name and version alone."""
        key = content_hash([FORMAT, source.name, package, version])[:20]
        index = Index(source, package, home() / "trace" / f"{key}.json")
        index._load()
        return index

    def files(self) -> Iterator[str]:
        """Every .py file below the package."""
        folders = [self.package]
        while folders:
            folder = folders.pop()
            for name in self.source.names(folder):
                rel = f"{folder}/{name}"
                if name.endswith(".py"):
                    yield rel
                elif "." not in name and name != "__pycache__":
                    folders.append(rel)

    @property
    def raw(self) -> dict[str, bytes]:
        """Path → bytes of all files; read once."""
        if self._raw is None:
            self._raw = {}
            for rel in self.files():
                try:
                    self._raw[rel] = self.source.read_bytes(rel)
                except (FileNotFoundError, UserError, OSError):
                    continue
        return self._raw

    def ranked(self, message: str, most: int = 48, files: int = 10) -> list[str]:
        """Files that may have made the message, best first, by `most` pieces of it: the first `files`, and those that
        are as likely as the first (copies of one model file)."""
        total = max(len(self.raw), 1)
        points: dict[str, float] = {}
        for needle in needles(message, most):
            holders = [rel for rel, data in self.raw.items() if needle in data]
            if holders:
                # A word in half of all files says nothing; one in three files says nearly all.
                worth = math.log(total / len(holders)) * (2 if b" " in needle else 1)
                for rel in holders:
                    points[rel] = points.get(rel, 0.0) + worth
        order = sorted(points, key=lambda rel: (-points[rel], rel))
        return [rel for n, rel in enumerate(order[:150]) if n < files or points[rel] >= 0.98 * points[order[0]]]

    def sites(self, rel: str) -> list[Site]:
        """Sites of one file: from the cache if the file is the one that was parsed."""
        if rel in self._sites and self._stamps.get(rel) == self._stamp(rel):
            return self._sites[rel]
        try:
            data = self._raw[rel] if self._raw is not None and rel in self._raw else self.source.read_bytes(rel)
        except (FileNotFoundError, UserError, OSError):
            return []
        self._sites[rel], self._stamps[rel], self._dirty = sites(text_of(data), rel), self._stamp(rel), True
        return self._sites[rel]

    def _stamp(self, rel: str) -> str:
        path = self.source.path(rel)
        if path is None:
            return "packed"
        try:
            stat = path.stat()
        except OSError:
            return "gone"
        return f"{stat.st_size}:{stat.st_mtime_ns}"

    def _load(self) -> None:
        try:
            value = json.loads(self.kept.read_text(encoding="utf-8")) if self.kept else {}
            for rel, (stamp, rows) in value.items():
                self._stamps[rel], self._sites[rel] = str(stamp), [_site(rel, row) for row in rows]
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            # No cache, or one that was written by something else: everything is parsed again.
            self._stamps, self._sites = {}, {}

    def save(self) -> None:
        """Write what was parsed; failing to (a full or read-only disk) costs time later, nothing else."""
        if not self._dirty or self.kept is None:
            return
        value = {rel: [self._stamps[rel], [_row(s) for s in found]] for rel, found in self._sites.items()}
        try:
            atomic_write(self.kept, json.dumps(value, separators=(",", ":")))
        except OSError:
            return
        self._dirty = False


def _row(site: Site) -> list[object]:
    templates = [[p if isinstance(p, str) else [p.expr] for p in t] for t in site.templates]
    return [site.line, site.end, site.kind, site.exc, site.function, templates]


def _site(rel: str, row: list) -> Site:  # type: ignore[type-arg]
    line, end, kind, exc, function, templates = row
    made: Iterable[Template] = (tuple(p if isinstance(p, str) else Hole(p[0]) for p in t) for t in templates)
    return Site(rel, int(line), int(end), kind, exc, function, tuple(made))


class Budget:
    """Seconds that a search may take beyond its best files."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds

    @property
    def spent(self) -> bool:
        return time.monotonic() > self.until
