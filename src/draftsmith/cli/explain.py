"""`draftsmith explain LOG`: the line of the engine that raised a crash, its conditions and values, and the remedy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from draftsmith.cli.common import console, print_json

if TYPE_CHECKING:
    from draftsmith.engine.trace import Explanation

LARGEST = 64 << 20
"""Bytes of a log that are read; of a longer one the end."""


def register(app: typer.Typer) -> None:
    app.command("explain")(explain)


def explain(
    log: str = typer.Argument(help="the engine's log, or - for standard input; a truncated tail will do"),
    engine: str | None = typer.Option(
        None, help="interpreter, environment, site-packages, wheel, checkout or ssh:// path; none = the managed one"
    ),
    as_json: bool = typer.Option(False, "--json", help="print the finding as JSON"),
) -> None:
    """Name the line of the engine that raised the error in a log.

    Exit codes: 0 found, 1 the log holds no error, 2 bad input, 3 an error, but not its line.
    """
    from draftsmith.engine.find import find_engine
    from draftsmith.engine.flags import known_flags
    from draftsmith.engine.reader import locate
    from draftsmith.engine.trace import explain as trace
    from draftsmith.engine.trace import holds_error
    from draftsmith.engine.trace_advice import advice_for, flag_advice
    from draftsmith.engine.trace_index import Index
    from draftsmith.errors import Exit

    text = _read(log)
    located = locate(engine) if engine is not None else None
    if not holds_error(text):  # before an engine is looked for: there is nothing to look up in it
        if as_json:
            print_json({"error": None, "place": None, "engine": None})
        else:
            console.print("no error in this log", highlight=False)
        raise typer.Exit(int(Exit.NO))
    located = located or locate(find_engine(None).package.parent)
    found = trace(text, Index.of(located.source, located.engine, located.version), version=located.version)
    called = f"{located.engine} {located.version or '(version unknown)'}"
    assert found is not None
    place = found.place
    advice = advice_for(f"{found.error.message} {found.error.wrapped}", place.file if place else "")
    package = located.source.path(located.engine)
    if advice is None and found.error.type == "usage" and package is not None:
        advice = flag_advice(found.error.message, known_flags(package))
    if as_json:
        print_json(found.to_json() | {"engine": called, "advice": advice})
    else:
        show(found, called, advice)
    raise typer.Exit(int(Exit.OK if place else Exit.UNKNOWN))


def _read(log: str) -> str:
    from pathlib import Path

    from draftsmith.errors import UserError

    if log == "-":
        data = sys.stdin.buffer.read()
    else:
        path = Path(log).expanduser()
        try:
            with path.open("rb") as f:
                size = path.stat().st_size
                f.seek(max(size - LARGEST, 0))
                data = f.read()
        except OSError as e:
            raise UserError(
                f"{log} cannot be read: {e.strerror or e}", fix="give the log's path, or - and pipe it in"
            ) from None
    return data[-LARGEST:].decode("utf-8", errors="replace")


def show(found: Explanation, called: str, advice: dict[str, Any] | None) -> None:
    """For people: the error, the place, the conditions, the lines, the values, the remedy."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    error, place = found.error, found.place
    who = f" in {error.process}" if error.process else ""
    say(f"root error{who}, line {error.first} of the log:", "bold")
    kind = error.type.rpartition(".")[2]
    for n, row in enumerate((error.message or "(no message)").split("\n")[:12]):
        say(f"  {kind + ': ' if kind and kind != 'usage' and n == 0 else ''}{row}")
    if error.wrapped:
        say(f"  (inside a {error.wrapped})")
    if place is None:
        say(f"no line of {called} produces this text")
    else:
        say(f"{place.file}:{place.line} in {place.function or 'the module itself'} ({called})", "bold")
        for guard in found.around.guards if found.around else ():
            words = {"not": "not", "if": "if"}.get(guard.kind, guard.kind)
            say(f"  {guard.line:>5}  {words} {guard.text}")
        say("")
        for n, row in found.lines:
            say(f"{'>' if place.line <= n <= place.end else ' '} {n:>5} | {row}")
        if place.values:
            say("")
            for expr, value in place.values:
                say(f"  {expr} = {value}")
        for other in found.others[:5]:
            say(f"  same text: {other.file}:{other.line} in {other.function}")
    for note in found.notes:
        say(f"note: {note}")
    if found.caused:
        say(f"{len(found.caused)} other error(s) in the log, e.g. line {found.caused[0].first}: "
            f"{found.caused[0].type.rpartition('.')[2]} {found.caused[0].message.splitlines()[0][:120]}")  # fmt: skip
    if advice:
        say(f"fix: {advice['fix']}", "green")
        if advice["checks"]:
            say(f"draftsmith check finds this before a start ({', '.join(advice['checks'])})")
