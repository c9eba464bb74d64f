"""Find the errors in an engine's log: undo colours, process prefixes and interleaving, read the tracebacks and their
chains, and tell the root from what only reports it.

A log may be a truncated tail, may hold several processes' lines mixed, and may have been through docker or kubernetes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from draftsmith.engine.trace_fatal import SIGNAL, fatal

ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
# What collectors put before each line: "vllm-1  | ", an RFC 3339 time, "stderr F ".
_COLLECTOR = re.compile(
    r"^(?:[\w.-]+\s+\|\s)?(?:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*(?:Z|[+-]\d\d:?\d\d)\s+)?(?:std(?:out|err) [FP] )?"
)
_PROCESS = re.compile(
    r"^\((?P<name>[A-Za-z_][\w .:-]*?)(?:[ ,]*pid=(?P<pid>\d+))?(?:, ip=[\d.]+)?\)(?: |$)"
    r"|^\[rank(?P<rank>\d+)\]:? ?"
)
_LEVEL = re.compile(
    r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<date>\d\d-\d\d) (?P<time>\d\d:\d\d:\d\d) "
    r"\[(?P<file>[\w./<>-]+):(?P<line>\d+)\] ?"
)
_SGLANG = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] ")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$')
_HEADER = "Traceback (most recent call last):"
_CAUSE = "The above exception was the direct cause of the following exception:"
_CONTEXT = "During handling of the above exception, another exception occurred:"
_EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z_]\w*(?:Error|Exception|Exit|Interrupt|Warning|Failed|Timeout|Failure|Stop\w*)?)"
    r"(?:: (?P<message>.*))?$"
)
_ERRORISH = re.compile(r"(?:Error|Exception|SystemExit|KeyboardInterrupt|Timeout|Failure|Failed)$")
_USAGE = re.compile(r"^(?P<program>[\w./ -]{1,60}): error: (?P<message>.+)$")
_PYDANTIC = re.compile(r"^(?P<head>\d+ validation errors? for (?P<model>[\w.\[\], ?]+))\n(?P<rest>.*)", re.DOTALL)
_PYDANTIC_TAIL = re.compile(r"^\s*(?:Value error|Assertion failed), ")
_GROUP = re.compile(r"^ +\| (?=Traceback \(most| +File \"|    |[\w.]+(?:Error|Exception)\b)")
_BAR = re.compile(r"^\s*\+-{8,}")
"""The frame of an exception group's members."""
_PYDANTIC_END = re.compile(r"\s*\[type=(?P<type>\w+), input_value=")

SECONDARY = (
    "Engine core initialization failed",
    "EngineCore failed to start",
    "EngineCore encountered an issue",
    "EngineCore encountered a fatal error",
    "EngineCore died",
    "Engine process failed to start",
    "WorkerProc initialization failed",
    "WorkerProc failed to start",
    "WorkerProc hit an exception",
    "Worker failed with error",
    "Executor failed",
    "RPC call to",
    "Cancelled",
    "cancelled",
    "AsyncLLM output_handler failed",
    "Exception in ASGI application",
    "Dumping input data",
    "Invocation of",
    "Failed core proc",
    "See root cause above",
    "see the stack trace above",
    "Received signal",
    "shutting down",
    "Broken pipe",
    "Connection reset by peer",
    "leaked semaphore",
    "leaked shared_memory",
    "destroy_process_group() was not called",
)
"""Beginnings of what one process says because another one failed (vllm/v1/engine/{core,core_client,utils,async_llm}.py,
vllm/v1/executor/multiproc_executor.py)."""
SECONDARY_TYPES = (
    "EngineDeadError",
    "EngineGenerateError",
    "BrokenPipeError",
    "CancelledError",
    "SystemExit",
    "KeyboardInterrupt",
)


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str
    code: str = ""


@dataclass(frozen=True)
class Logged:
    """An error as a log tells it. type "" where only a message is known; place: (file name, line) that the logger
    printed; fatal: it ended a process, or was logged as an error; first: number of its first line, 1-based;
    wrapped: what stood around the message ("ValidationError for SpeculativeConfig"); cut: the log ends inside it."""

    message: str
    type: str = ""
    frames: tuple[Frame, ...] = ()
    process: str = ""
    level: str = ""
    place: tuple[str, int] | None = None
    first: int = 0
    wrapped: str = ""
    cut: bool = False
    rank: float = 0.0

    @property
    def secondary(self) -> bool:
        said = self.message.strip()
        return self.type.rpartition(".")[2] in SECONDARY_TYPES or any(w in said[:200] for w in SECONDARY)


@dataclass
class _Line:
    number: int
    text: str
    level: str = ""
    place: tuple[str, int] | None = None


@dataclass
class _Stream:
    process: str
    lines: list[_Line] = field(default_factory=list)


def streams(text: str) -> list[_Stream]:
    """The log taken apart by process; within one process the order stays."""
    found: dict[str, _Stream] = {}
    for number, raw in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        line = _COLLECTOR.sub("", ANSI.sub("", raw.rpartition("\r")[2]), count=1)
        process = ""
        prefix = _PROCESS.match(line)
        if prefix:
            process = f"rank {prefix['rank']}" if prefix["rank"] else f"{prefix['name']} {prefix['pid'] or ''}".strip()
            line = line[prefix.end() :]
        if line.startswith("{") and (entries := _from_json(line, number)):
            found.setdefault(process, _Stream(process)).lines.extend(entries)
            continue
        # Members of an exception group are drawn with a bar before them.
        line = _GROUP.sub("", line, count=1)
        level = _LEVEL.match(line)
        if level:
            place = (level["file"].rpartition("/")[2], int(level["line"]))
            entry = _Line(number, line[level.end() :], level["level"], place)
        else:
            entry = _Line(number, _SGLANG.sub("", line, count=1))
        found.setdefault(process, _Stream(process)).lines.append(entry)
    return list(found.values())


def _from_json(line: str, number: int) -> list[_Line]:
    """The lines in a JSON record as structured loggers write it; [] where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return []
    if not isinstance(record, dict):
        return []
    words = {str(k).lower(): x for k, x in record.items() if isinstance(x, str)}
    level = next((words[k].upper() for k in ("level", "levelname", "severity", "lvl") if k in words), "")
    texts = [
        words[k] for k in ("message", "msg", "event", "exc_info", "exception", "stack_trace", "traceback") if k in words
    ]
    known = level if level in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL") else ""
    # A traceback is no error line: its own last line says what it is. An empty line ends what belongs to the record.
    return [
        _Line(number, one, known if "\n" not in text else "")
        for text in texts
        for one in (*ANSI.sub("", text).split("\n"), "")
    ]


def _is_exception(text: str) -> re.Match[str] | None:
    found = _EXCEPTION.match(text)
    if found is None:
        return None
    name = found["type"].rpartition(".")[2]
    return found if _ERRORISH.search(name) or (found["type"].count(".") >= 1 and found["message"]) else None


def _tracebacks(stream: _Stream) -> Iterator[Logged]:
    """Every exception of a stream that has frames, with the one that caused it first."""
    lines = stream.lines
    i = 0
    while i < len(lines):
        text = lines[i].text
        if text.strip() != _HEADER and not _FRAME.match(text):
            i += 1
            continue
        first = lines[i]
        frames: list[Frame] = []
        i += text.strip() == _HEADER
        while i < len(lines):
            frame = _FRAME.match(lines[i].text)
            if frame is None:
                break
            i += 1
            code: list[str] = []
            while i < len(lines) and lines[i].text.startswith("    ") and not _FRAME.match(lines[i].text):
                if lines[i].text.strip(" ^~"):
                    code.append(lines[i].text.strip())
                i += 1
            frames.append(Frame(frame["file"], int(frame["line"]), frame["function"] or "", " ".join(code)))
            while i < len(lines) and re.match(r"^\s+\[Previous line repeated", lines[i].text):
                i += 1
        if i >= len(lines):
            if frames:
                yield Logged("", "", tuple(frames), stream.process, first.level, first.place, first.number, cut=True)
            return
        found = _is_exception(lines[i].text)
        if found is None:
            # A name that does not look like an error, but stands where one must.
            found = re.match(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: (?P<message>.*))?$", lines[i].text)
        if found is None or not (frames or _is_exception(lines[i].text)):
            continue
        message = [found["message"] or ""]
        i += 1
        while i < len(lines) and _continues(lines[i], first):
            message.append(lines[i].text)
            i += 1
        yield Logged(
            "\n".join(message).rstrip(),
            found["type"],
            tuple(frames),
            stream.process,
            first.level,
            first.place,
            first.number,
            cut=i >= len(lines),
        )


def _continues(line: _Line, first: _Line) -> bool:
    """Whether a line still belongs to the message of the exception whose traceback began at `first`."""
    text = line.text
    if line.level != first.level or (line.level and line.place != first.place):
        return False
    if text.strip() in (_HEADER, _CAUSE, _CONTEXT) or _FRAME.match(text) or _USAGE.match(text):
        return False
    if not text.strip() or _BAR.match(text) or SIGNAL.match(text):
        return False
    return not (_is_exception(text) and not text.startswith(" "))


def _bare(stream: _Stream, covered: set[int]) -> Iterator[Logged]:
    """Errors without frames: error logs, argparse's refusals, a traceback's last line in a cut log."""
    lines = stream.lines
    for i, line in enumerate(lines):
        if line.number in covered or not line.text.strip():
            continue
        if _PYDANTIC_TAIL.match(line.text):
            # A cut log may begin in the middle of pydantic's report.
            report = "\n".join(["1 validation error for ?", *(e.text for e in lines[i : i + 40])])
            yield Logged(report, "ValidationError", (), stream.process, line.level, line.place, line.number)
            continue
        usage = _USAGE.match(line.text)
        found = _is_exception(line.text)
        last = i == len(lines) - 1
        if usage:
            yield Logged(usage["message"], "usage", (), stream.process, "", None, line.number, cut=last)
        elif found and (found["message"] or line.level in ("ERROR", "CRITICAL", "")):
            more = []
            for later in lines[i + 1 : i + 40]:
                if not _continues(later, line) or (not line.level and not later.text.startswith(" ")):
                    break
                more.append(later.text)
            text = "\n".join([found["message"] or "", *more]).rstrip()
            yield Logged(text, found["type"], (), stream.process, line.level, line.place, line.number, cut=last)
        elif line.level in ("ERROR", "CRITICAL"):
            before = lines[i - 1] if i else None
            if before is not None and before.level == line.level and before.place == line.place and i and _same(before):
                continue
            more = []
            for later in lines[i + 1 : i + 20]:
                if not _continues(later, line):
                    break
                more.append(later.text)
            text = "\n".join([line.text, *more]).rstrip()
            yield Logged(text, "", (), stream.process, line.level, line.place, line.number, cut=last)


def _same(before: _Line) -> bool:
    return bool(before.text.strip()) and before.text.strip() != _HEADER


def _covered(stream: _Stream) -> set[int]:
    """Line numbers that lie in tracebacks."""
    inside: set[int] = set()
    open_ = False
    first: _Line | None = None
    for line in stream.lines:
        text = line.text
        if text.strip() == _HEADER or _FRAME.match(text):
            open_, first = True, first if open_ and first else line
        if open_:
            inside.add(line.number)
            if not text.startswith(" ") and text.strip() != _HEADER and text.strip() not in (_CAUSE, _CONTEXT, ""):
                open_ = False
    # The lines behind the exception's own that continue its message.
    last: _Line | None = None
    for line in stream.lines:
        if line.number in inside:
            last = line
        elif last is not None and _continues(line, last):
            inside.add(line.number)
        else:
            last = None
    return inside


def unwrap(error: Logged) -> Logged:
    """Take a message out of what was put around it: pydantic's report, `repr` in an error log."""
    found = _PYDANTIC.match(error.message)
    if found:
        rest = found["rest"]
        end = _PYDANTIC_END.search(rest)
        inner = rest[: end.start()] if end else rest
        where, _, said = ("", "", inner.strip()) if inner.startswith("  ") else inner.partition("\n")
        said = said.strip()
        kind = "ValidationError"
        for words, name in (("Value error, ", "ValueError"), ("Assertion failed, ", "AssertionError")):
            if said.startswith(words):
                said, kind = said[len(words) :], name
        wrapped = f"{error.type.rpartition('.')[2] or 'ValidationError'} for {found['model']}"
        field_ = f", field {where.strip()}" if where.strip() else ""
        named = "" if found["model"] == "?" else f"{wrapped}{field_}"
        return replace(error, message=said, type=kind, wrapped=named, cut=error.cut and end is None)
    return error


def errors(text: str) -> list[Logged]:
    """All errors of a log, the likeliest root first."""
    found: list[Logged] = []
    for stream in streams(text):
        covered = _covered(stream)
        found += [unwrap(e) for e in _tracebacks(stream)]
        found += [unwrap(e) for e in _bare(stream, covered)]
        found += [
            Logged(message, kind, frames, stream.process, first=number)
            for number, kind, message, frames in fatal(stream.lines)
        ]
    found.sort(key=lambda e: e.first)
    return sorted((replace(e, rank=_rank(e, found)) for e in found), key=lambda e: (-e.rank, e.first))


def _rank(error: Logged, others: list[Logged]) -> float:
    """Higher is likelier the root: it ended a process or was logged as an error, it says something, it came first in
    its chain, others report it; lower if it only reports another, or was a warning that the engine survived."""
    if not error.message and not error.frames:
        return -10.0
    rank = 0.0
    if error.secondary:
        rank -= 6.0
    if error.level in ("DEBUG", "INFO", "WARNING"):
        rank -= 4.0
    elif error.level:
        rank += 1.0
    elif error.frames or error.type == "usage":
        rank += 2.0
    if error.frames and error.type:
        rank += 1.0
    if not error.type and not error.frames and error.level == "ERROR":
        rank -= 0.5
    said = error.message[:160]
    if said and sum(o.message[:160] == said for o in others) > 1:
        rank += 1.0
    if any(o.secondary and o.first > error.first and o.process != error.process for o in others):
        rank += 0.5
    return rank
