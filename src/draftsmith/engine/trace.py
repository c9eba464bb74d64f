"""From a crashed engine's log to the line that raised: root error, file, line, function, conditions, values.

found = explain(text, Index.of(source, "vllm", version))
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from draftsmith.engine.reader.source import text_of
from draftsmith.engine.trace_guard import Around, around
from draftsmith.engine.trace_index import Budget, Index
from draftsmith.engine.trace_log import Frame, Logged, errors
from draftsmith.engine.trace_match import Match, match, squeeze
from draftsmith.engine.trace_templates import Site

_VERSION = re.compile(r"(?:API server version|LLM engine \(v)\s*(\d+\.\d+\.\d+(?:\.?\w+\d)?)")
SHOWN = 12
"""Source lines shown at most."""


@dataclass(frozen=True)
class Place:
    """A site that can have said it. How it was found: "message" (its words), "frame" (the traceback's line) or both."""

    file: str
    line: int
    end: int
    function: str
    kind: str
    exc: str
    how: str
    score: float
    values: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Explanation:
    """error: the root error; place: the best site or None; others: sites that fit equally well; guards and lines
    belong to `place`; caused: the other errors of the log, which follow from it or have nothing to do with it."""

    error: Logged
    place: Place | None
    around: Around | None
    lines: tuple[tuple[int, str], ...] = ()
    others: tuple[Place, ...] = ()
    caused: tuple[Logged, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """{"error": {"type", "message", "process", "log_line", "wrapped"}, "place": {"file", "line", "function",
        "values", …} | null, "guards": [{"kind", "text", "line"}], "lines": [[n, text]], "others": […], "notes": […]}"""
        e = self.error
        return {
            "error": {
                "type": e.type,
                "message": e.message,
                "process": e.process,
                "log_line": e.first,
                "wrapped": e.wrapped,
            },
            "place": None if self.place is None else asdict(self.place) | {"values": dict(self.place.values)},
            "guards": [] if self.around is None else [asdict(g) for g in self.around.guards],
            "lines": [list(row) for row in self.lines],
            "others": [f"{p.file}:{p.line}" for p in self.others],
            "caused": [{"type": c.type, "message": c.message.split("\n")[0], "log_line": c.first} for c in self.caused],
            "notes": list(self.notes),
        }


def holds_error(text: str) -> bool:
    """Whether a log holds anything that `explain` could be asked about."""
    return _any(errors(text))


def _any(found: list[Logged]) -> bool:
    return bool(found) and found[0].rank > -10


def explain(text: str, index: Index, seconds: float = 4.0, version: str | None = None) -> Explanation | None:
    """The root error of a log and where it came from; None where the log holds no error.

    seconds: how long to go on parsing files beyond the likeliest ones. version: of the engine that the index is of."""
    found = errors(text)
    if not _any(found):
        return None
    best: Explanation | None = None
    for error in found[:4]:
        one = _explained(error, index, seconds)
        best = best or one
        # A lower-ranked error with a sure place beats a higher one that the engine's source does not know.
        if one.place is not None and error.rank >= found[0].rank - 2:
            best = one
            break
    index.save()
    assert best is not None
    notes = best.notes
    spoken = _VERSION.search(text)
    if version and spoken and spoken[1] != version.split("+")[0]:
        notes = (*notes, f"the log is of {spoken[1]}, the source read here is {version}: lines may differ")
    first = best.error
    said = {first.message}
    others = []
    for other in found:
        if other.message and other.message not in said and other.rank > -10:
            said.add(other.message)
            others.append(other)
    return Explanation(
        first,
        best.place,
        best.around,
        best.lines,
        best.others,
        tuple(sorted(others, key=lambda e: e.first)),
        best.notes,
    )


def _explained(error: Logged, index: Index, seconds: float) -> Explanation:
    frames = engine_frames(error, index)
    places = find(error, index, frames, seconds)
    notes: list[str] = []
    if not places:
        return Explanation(error, None, None, notes=("no line of this engine's source produces this text",))
    first, *rest = places
    others = tuple(p for p in rest if p.score >= first.score)
    if first.how == "frame" and frames and error.frames[-1] != frames[-1][0]:
        last = error.frames[-1]
        notes.append(
            f"raised outside the engine, in {_short(last.file)}:{last.line}; shown is the engine's line that led there"
        )
    if others:
        notes.append(f"{len(others)} other place(s) produce the same text")
    source = text_of(index.source.read_bytes(first.file))
    found = around(source, first.line)
    return Explanation(error, first, found, _lines(source, first), others, notes=tuple(notes))


def _short(path: str) -> str:
    parts = PurePosixPath(path).parts
    for mark in ("site-packages", "dist-packages"):
        if mark in parts:
            return "/".join(parts[parts.index(mark) + 1 :])
    return "/".join(parts[-3:])


def _lines(source: str, place: Place) -> tuple[tuple[int, str], ...]:
    rows = source.split("\n")
    start, end = max(place.line - 3, 1), min(place.end + 1, place.line + SHOWN - 4, len(rows))
    return tuple((n, rows[n - 1]) for n in range(start, end + 1))


def engine_frames(error: Logged, index: Index) -> list[tuple[Frame, str]]:
    """Frames that lie in the engine's package, with their path below the folder that holds it."""
    found = []
    mark = f"/{index.package}/"
    for frame in error.frames:
        path = frame.file.replace("\\", "/")
        at = path.rfind(mark)
        rel = path[at + 1 :] if at >= 0 else path if path.startswith(f"{index.package}/") else ""
        # "…/vllm/bin/python3.11/…" has the name too; only what exists in the source is the engine's.
        while rel and not index.source.exists(rel):
            at = rel.find(mark)
            rel = rel[at + 1 :] if at >= 0 else ""
        if rel:
            found.append((frame, rel))
    return found


def find(error: Logged, index: Index, frames: list[tuple[Frame, str]], seconds: float = 4.0) -> list[Place]:
    """Places that can have produced the error, best first."""
    message = squeeze(error.message).strip()
    places: list[Place] = []
    if error.wrapped and message:
        # pydantic reports the message alone: the frames end where it was called, not where the validator raised.
        places = by_message(error, message, index, seconds)
        if places:
            return places
    if frames:
        frame, rel = frames[-1]
        source = text_of(index.source.read_bytes(rel)).split("\n")
        line = frame.line if _same_code(frame.code, source, frame.line) else _line_of_code(frame.code, source)
        if line:
            here = [s for s in index.sites(rel) if s.line <= line <= s.end]
            site = min(here, key=lambda s: s.end - s.line) if here else None
            fit = _best(site, message, error.cut) if site else None
            if site is not None and (fit is not None or error.frames[-1] == frame):
                how = "frame and message" if fit else "frame"
                values = fit.values if fit else ()
                return [Place(rel, site.line, site.end, site.function, site.kind, site.exc, how, 1e6, values)]
            # Raised by the interpreter itself (an import, an index, a missing key), or outside the engine.
            return [Place(rel, line, line, frame.function, "call", error.type, "frame", 1e6)]
    if message:
        places += by_message(error, message, index, seconds)
    if not places and frames:
        frame, rel = frames[-1]
        if index.source.exists(rel):
            places = [Place(rel, frame.line, frame.line, frame.function, "call", error.type, "frame", 1.0)]
    return places


def _same_code(code: str, source: list[str], line: int) -> bool:
    """Whether the traceback's code stands at this line of the installed source (an engine of another release may not
    have it there). A traceback without code is believed."""
    if not code:
        return True
    here = squeeze(" ".join(source[line - 1 : line + 12])).replace(" ", "")
    return here.startswith(code.replace(" ", "")[:60])


def _line_of_code(code: str, source: list[str]) -> int:
    """Where the traceback's code stands in the installed file, if that is another release's; 0 where it does not."""
    wanted = code.replace(" ", "")[:60]
    for n, row in enumerate(source, 1):
        if row.strip() and squeeze(" ".join(source[n - 1 : n + 12])).replace(" ", "").startswith(wanted):
            return n
    return 0


def _best(site: Site, message: str, cut: bool) -> Match | None:
    fits = [m for t in site.templates if (m := match(t, message, cut)) is not None]
    return max(fits, key=lambda m: m.score, default=None)


def by_message(error: Logged, message: str, index: Index, seconds: float) -> list[Place]:
    """Sites whose texts fit the message. The likeliest files by a few pieces of it first; if none of them accounts for
    all of the message, more files by more pieces, for `seconds` at most."""
    found: dict[tuple[str, int], Place] = {}
    looked: set[str] = set()
    letters = sum(c.isalnum() for c in message)
    for most, files in ((10, 10), (48, 120)):
        budget = Budget(seconds)
        for rel in index.ranked(error.message, most, files):
            if rel in looked:
                continue
            if most > 10 and budget.spent:
                break
            looked.add(rel)
            for place in _fitting(error, message, index, rel):
                found[place.file, place.line] = place
        if any(p.score >= 0.4 * letters for p in found.values()):
            break
    return sorted(found.values(), key=lambda p: (-p.score, p.file, p.line))


def _fitting(error: Logged, message: str, index: Index, rel: str) -> list[Place]:
    wanted = error.type.rpartition(".")[2]
    found = []
    for site in index.sites(rel):
        fit = _best(site, message, error.cut)
        if fit is None:
            continue
        score = fit.score * (1.0 if fit.whole else 0.97) * _type_agrees(site, wanted, error)
        if error.place and error.place[0] == rel.rpartition("/")[2] and site.line <= error.place[1] <= site.end:
            score *= 1.5
        score = round(score, 3)
        found.append(Place(rel, site.line, site.end, site.function, site.kind, site.exc, "message", score, fit.values))
    return found


def _type_agrees(site: Site, wanted: str, error: Logged) -> float:
    """Less than 1 where the log names another kind of error than the site makes."""
    if wanted in ("", "usage"):
        return 1.0 if (site.kind == "log") == (error.type == "") else 0.9
    if site.kind in ("log", "response"):
        return 0.6
    if site.exc == wanted or re.sub(r"^VLLM", "", site.exc) == wanted:
        return 1.0
    return 0.8
