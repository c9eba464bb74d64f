"""A production server's counters over time: has acceptance fallen below what the drafter was measured at, and since when?

    watcher = Watcher(Expected.of(bench))
    for event in watcher.observe(Reading(at, counters, identity)): print(event.text)

Readings are differenced into windows of at least `min_drafts` drafts; a restart ends a window and begins another, and is
told. A fall is told where two windows in a row lie below the measured acceptance by more than chance and more than
`tolerance`; its beginning is that of the first of them. What changed at the same time (engine, model, kind of traffic)
is told beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from draftsmith.engine.metrics import CounterResetError, Counters
from draftsmith.errors import UserError

SIGMAS = 3.0
"""Standard errors below the measured figure that chance is granted."""
TRAFFIC = 1.5
"""Factor by which prompt tokens per answer token must change to be told as other traffic."""


@dataclass(frozen=True)
class Expected:
    """What the drafter was measured at. length: acceptance length (1 + accepted / drafts); rates: per position."""

    length: float
    rates: list[float] = field(default_factory=list)
    source: str = ""

    @staticmethod
    def of(bench: dict[str, Any], source: str = "bench.json") -> Expected:
        """UserError where bench.json measured no drafter."""
        length = bench.get("acceptance_length")
        if not isinstance(length, int | float) or not bench.get("drafts"):
            raise UserError(
                f"{source} measured no drafter", "there is no acceptance to hold the server to", "give --expect NUMBER"
            )
        return Expected(float(length), list(bench.get("acceptance_per_position") or []), source)


@dataclass(frozen=True)
class Reading:
    """One look at the server. at: unix seconds. identity: what it says of itself (model, root, version)."""

    at: float
    counters: Counters
    identity: dict[str, str] = field(default_factory=dict)


def spread_of(rates: list[float], length: float, drafts: int) -> float:
    """Standard error of an acceptance length over so many drafts, from the rates per position.

    Position i accepted means that at least i + 1 were: so the mean square of a draft's accepted tokens is the sum of
    (2i + 1) · rate_i. Without rates (SGLang) the widest law of this mean is assumed: all or none of three."""
    if not drafts:
        return float("inf")
    mean = length - 1
    square = sum((2 * i + 1) * r for i, r in enumerate(rates)) if rates else 3 * mean
    return float(max(square - mean * mean, 0.0) / drafts) ** 0.5


@dataclass(frozen=True)
class Window:
    """Counts between two looks."""

    begin: float
    end: float
    counts: Counters

    @property
    def length(self) -> float:
        return self.counts.length

    @property
    def spread(self) -> float:
        """Standard error of its acceptance length."""
        return spread_of(self.counts.rates, self.counts.length, self.counts.drafts)

    @property
    def prompt_share(self) -> float | None:
        """Prompt tokens per answer token."""
        return self.counts.prompt_tokens / self.counts.tokens if self.counts.tokens else None

    @property
    def tokens_per_second(self) -> float:
        return self.counts.tokens / max(self.end - self.begin, 1e-9)


@dataclass(frozen=True)
class Event:
    """kind: "window", "fallen", "back", "restart", "changed", "down". at: when it happened; since: when it began."""

    kind: str
    at: float
    text: str
    since: float | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "at": self.at, "since": self.since, "text": self.text, **self.figures}


class Watcher:
    """expected: None = only tell what is seen. tolerance: share of the measured gain (length − 1) that may be lost."""

    def __init__(self, expected: Expected | None, tolerance: float = 0.1, min_drafts: int = 200) -> None:
        self.expected, self.tolerance, self.min_drafts = expected, tolerance, min_drafts
        self.fallen_since: float | None = None
        self._told = False
        self._low: list[Window] = []
        self._start: Reading | None = None
        self._last: Reading | None = None
        self._identity: dict[str, str] = {}
        self._share: float | None = None
        self._changes: list[tuple[float, str]] = []

    @property
    def fallen(self) -> bool:
        """Whether the server now accepts less than was measured (and it was told)."""
        return self._told

    def observe(self, reading: Reading) -> Iterator[Event]:
        """What this look shows."""
        yield from self._changed(reading)
        if self._start is None or self._last is None:
            self._start = self._last = reading
            return
        try:
            reading.counters.since(self._last.counters)
        except CounterResetError as e:
            # The part before the restart that was seen is whole; what came between the last look and it is lost.
            if self._last is not self._start:
                yield from self._close(self._window(self._last))
            self._changes.append((reading.at, "the server was restarted"))
            yield Event("restart", reading.at, f"the server was restarted: {e.what}", self._last.at)
            self._start = self._last = reading
            return
        self._last = reading
        window = self._window(reading)
        if window.counts.drafts >= self.min_drafts:
            yield from self._close(window)
            self._start = reading

    def finish(self) -> Iterator[Event]:
        """The last, perhaps short, window."""
        if self._start is not None and self._last is not None and self._last is not self._start:
            window = self._window(self._last)
            if window.counts.drafts:
                yield from self._close(window, last=True)
            self._start = self._last

    def lost(self, at: float, why: str) -> Event:
        """The server did not answer."""
        return Event("down", at, f"the server does not answer: {why}")

    def _window(self, end: Reading) -> Window:
        assert self._start is not None
        return Window(self._start.at, end.at, end.counters.since(self._start.counters))

    def _changed(self, reading: Reading) -> Iterator[Event]:
        for name, value in reading.identity.items():
            before = self._identity.get(name)
            if before is not None and before != value:
                text = f"{name} changed: {before} → {value}"
                self._changes.append((reading.at, text))
                yield Event("changed", reading.at, text)
        self._identity |= reading.identity

    def _close(self, window: Window, last: bool = False) -> Iterator[Event]:
        c = window.counts
        figures = {
            "begin": window.begin,
            "drafts": c.drafts,
            "acceptance_length": round(c.length, 4),
            "acceptance_per_position": [round(r, 4) for r in c.rates],
            "tokens_per_second": round(window.tokens_per_second, 2),
        }
        rates = " ".join(f"{r:.3f}" for r in c.rates)
        text = f"{c.drafts:,} drafts, acceptance length {c.length:.3f}{f' ({rates})' if rates else ''}"
        yield Event("window", window.end, f"{text}, {window.tokens_per_second:.1f} tokens/s", window.begin, figures)
        yield from self._traffic(window)
        if self.expected is not None:
            yield from self._judge(window, self.expected, figures, last)

    def _traffic(self, window: Window) -> Iterator[Event]:
        share = window.prompt_share
        if share is None:
            return
        if self._share and share and not 1 / TRAFFIC < share / self._share < TRAFFIC:
            text = f"other traffic: {share:.2f} prompt tokens per answer token, {self._share:.2f} before"
            self._changes.append((window.begin, text))
            yield Event("changed", window.begin, text)
        self._share = share

    def _judge(self, window: Window, expected: Expected, figures: dict[str, Any], last: bool) -> Iterator[Event]:
        # What chance does to a window of so many drafts is known from the measurement; a low window's own spread is low.
        spread = max(window.spread, spread_of(expected.rates, expected.length, window.counts.drafts))
        floor = expected.length - max(self.tolerance * (expected.length - 1), SIGMAS * spread)
        if window.length >= floor:
            if self._told:
                text = f"acceptance is back: length {window.length:.3f}, measured {expected.length:.3f}"
                yield Event("back", window.end, text, window.begin, figures)
            self._low, self.fallen_since, self._told = [], None, False
            return
        self._low.append(window)
        if self._told or (len(self._low) < 2 and not (last and self.fallen_since)):
            self.fallen_since = self.fallen_since or window.begin
            return
        self.fallen_since, self._told = self._low[0].begin, True
        drafts = sum(w.counts.drafts for w in self._low)
        accepted = sum(w.counts.accepted for w in self._low)
        text = f"acceptance has fallen: length {1 + accepted / drafts:.3f} over {drafts:,} drafts, measured {expected.length:.3f}"
        near = [t for at, t in self._changes if self._low[0].begin - (window.end - window.begin) <= at <= window.end]
        if near:
            text += "; at that time: " + "; ".join(dict.fromkeys(near))
        yield Event("fallen", window.end, text, self.fallen_since, figures | {"near": near})
