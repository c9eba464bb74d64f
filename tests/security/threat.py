"""What a threat's test is made of: an attack on the real code, and a way to take its defence away.

An attack raises `HarmError` if it succeeds. Each is run twice: as things are, where it must not succeed, and without its
defence, where it must; so no test here can pass because its attack is none.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from draftsmith.errors import UserError


class HarmError(AssertionError):
    """The attack succeeded."""


@dataclass(frozen=True)
class Threat:
    id: str
    title: str
    attack: Callable[[Path], None]
    off: Callable[[pytest.MonkeyPatch], None]


THREATS: list[Threat] = []


def threat(id: str, title: str, off: Callable[[pytest.MonkeyPatch], None]) -> Callable[[Callable[[Path], None]], None]:
    """Decorator: the function is the attack; `off` takes its defence away."""

    def add(attack: Callable[[Path], None]) -> None:
        THREATS.append(Threat(id, title, attack, off))

    return add


@contextmanager
def refused(words: str = "") -> Iterator[None]:
    """HarmError unless the block ends in a UserError that says `words`."""
    try:
        yield
    except UserError as e:
        if words not in str(e):
            raise HarmError(f"refused for another reason: {e}") from e
        return
    except RecursionError as e:
        raise HarmError("the interpreter's stack ran out") from e
    raise HarmError("it went through")


@contextmanager
def little_memory(limit: int = 30 << 20) -> Iterator[None]:
    """HarmError if Python allocates more than `limit` bytes within."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak > limit:
        raise HarmError(f"{peak:,} bytes were allocated")


def require(condition: bool, what: str) -> None:
    if not condition:
        raise HarmError(what)
