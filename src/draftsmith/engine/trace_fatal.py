"""Ends that no exception tells: a fatal error of the interpreter (faulthandler's stack, most recent call first), a
process that a signal ended, as the shell or the engine's parent says it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftsmith.engine.trace_log import Frame, _Line

_FATAL = re.compile(r"^Fatal Python error: (?P<message>.+)$")
_STACK = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$')
SIGNAL = re.compile(
    r"^(?:\S+: line \d+: +)?(?:\d+ )?(?P<what>Killed|Segmentation fault|Aborted|Bus error|Illegal instruction)"
    r"(?: \(core dumped\))?(?:\s{2,}.*)?$"
)
REACH = 60
"""Lines behind a fatal error in which its stack must begin."""

Fatal = tuple[int, str, str, tuple["Frame", ...]]
"""(number of the line, type, message, frames with the most recent last)."""


def fatal(lines: Sequence[_Line]) -> Iterator[Fatal]:
    """Every such end in the lines of one process."""
    from draftsmith.engine.trace_log import Frame

    for i, line in enumerate(lines):
        found = _FATAL.match(line.text)
        if found:
            frames: list[Frame] = []
            for later in lines[i + 1 : i + REACH]:
                frame = _STACK.match(later.text)
                if frame:
                    frames.append(Frame(frame["file"], int(frame["line"]), frame["function"].strip()))
                elif frames:
                    break  # the stack of another thread
            yield line.number, "Fatal Python error", found["message"], tuple(reversed(frames))
            continue
        ended = SIGNAL.match(line.text)
        if ended:
            yield line.number, "signal", ended["what"], ()
