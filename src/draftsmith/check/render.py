"""A verdict as text: one line per check, evidence and remedy under those that are not a plain pass."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from draftsmith.check.types import CheckRow, Verdict

MARK = {"pass": ("pass", "green"), "warn": ("WARN", "yellow"), "fail": ("FAIL", "bold red"), "skip": ("skip", "dim")}
NO_ENGINE = "no engine given and none found"
QUIET = ("needs --", "no contract.json", NO_ENGINE)
"""Skips that only say what the user left out: counted, not shown."""
SAY = {"yes": ("YES", "bold green"), "no": ("NO", "bold red"), "unknown": ("CANNOT TELL", "bold yellow")}


def _row(console: Console, row: CheckRow, wide: int, everything: bool) -> None:
    mark, style = MARK[row.status]
    line = Text.assemble((f"  {mark:4}  ", style), (f"{row.id:<{wide}}  ", "bold" if row.status == "fail" else ""))
    console.print(line + Text(row.found), soft_wrap=True, highlight=False)
    if row.status in ("warn", "fail") or everything:
        for e in row.evidence:
            console.print(Text(f"{'':8}{e.file}:{e.line}", "cyan"), soft_wrap=True, highlight=False)
            for number, text in enumerate(e.text.splitlines()):
                console.print(Text(f"{'':8}{e.line + number:>6} | {text}", "dim"), soft_wrap=True, highlight=False)
    if row.fix and row.status != "pass":
        console.print(Text(f"{'':8}fix: {row.fix}", "" if row.status == "skip" else style), soft_wrap=True)


def show(console: Console, verdict: Verdict, title: str, everything: bool = False) -> None:
    """everything: also evidence of passes and all skipped rows."""
    e = verdict.engine
    name = "no engine found"
    if e.name:
        name = f"{e.name} {e.version or '(unknown version)'} at {e.path}"
    console.print(f"{title}; {name}", markup=False, highlight=False, soft_wrap=True)
    rows = verdict.checks
    wide = max((len(r.id) for r in rows), default=0)
    quiet = [] if everything else [r for r in rows if r.status == "skip" and r.found.startswith(QUIET)]
    for row in rows:
        if row not in quiet:
            _row(console, row, wide, everything)
    counts = {s: sum(r.status == s for r in rows) for s in MARK}
    word, style = SAY[verdict.verdict]
    summary = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
    note = ""
    if quiet:
        left = {"those of the engine" if r.found == NO_ENGINE else r.found.removeprefix("needs ") for r in quiet}
        note = f"; not made: {', '.join(sorted(left))}"
    console.print(Text.assemble((word, style), f"  {summary}{note}"), soft_wrap=True)
    if verdict.verdict == "unknown":
        why = [
            f"{r.id}: {r.found}" for r in rows if r.status == "skip" and (r.group == "gate" or r.id.startswith("form."))
        ]
        if e.name is None:
            why = [f"{NO_ENGINE}: draftsmith engine install, or --engine PATH"]
        for text in [w for w in why if "needs --" not in w][:4]:
            console.print(f"  because {text}", markup=False, highlight=False, soft_wrap=True)
