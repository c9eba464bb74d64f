"""Names, prompts and answers that others wrote, where they are shown: the report and the terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from threat import require, threat

from draftsmith.report import charts, page

TAG = "<script>owned()</script>"
CLOSE = "</script><img src=x onerror=owned()>"
LINK = "<a href='https://evil.example'>log in again</a>"


def shown(tmp: Path) -> str:
    """The page of a run in which everything that can be named is named by an attacker."""
    from plotly.offline import get_plotlyjs

    from draftsmith.record import write_json, write_record
    from draftsmith.report.data import gather

    rates = {"acceptance_per_position": [0.5], "drafts": 3, "acceptance_length": 1.5}
    bench = rates | {"tokens_per_second": {CLOSE: {"1": 2.0}}, "sets": {CLOSE: rates, LINK: rates}, "notices": [TAG]}
    write_json(tmp / "bench" / "bench.json", bench)
    sample = {"set": TAG, "prompt": TAG, "tokens": [{"text": TAG, "accepted": True}]}
    write_json(tmp / "bench" / "samples.json", [sample])
    check = {"id": TAG, "status": "fail", "found": TAG, "group": "form", "evidence": [], "fix": TAG}
    write_json(tmp / "check" / "verdict.json", {"verdict": "no", "checks": [check]})
    write_json(tmp / "recipe.json", {"name": TAG})
    write_record(tmp / "train", stage="train", key="k" * 64, inputs={}, config={}, result={"steps": 3}, started=0)
    return page.render(gather(tmp)).replace(get_plotlyjs(), "")


def _no_escaping(mp: pytest.MonkeyPatch) -> None:
    import jinja2

    class Plain(jinja2.Environment):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"autoescape": False}))

    mp.setattr(jinja2, "Environment", Plain)


@threat("T18", "HTML in prompts, answers, names and check texts of the report", _no_escaping)
def _(tmp: Path) -> None:
    require(TAG not in shown(tmp), "a tag of an attacker's stands in the page")


@threat("T19", "a name that closes the report's script", lambda mp: mp.setattr(page, "embed_json", json.dumps))
def _(tmp: Path) -> None:
    with pytest.MonkeyPatch.context() as mp:
        mp.setattr(charts, "plain", str)  # a defence of its own, against plotly (T20)
        require(CLOSE not in shown(tmp), "the script was closed")


@threat("T20", "links and tags in the names of charts", lambda mp: mp.setattr(charts, "plain", str))
def _(tmp: Path) -> None:
    rates = {"acceptance_per_position": [0.5]}
    figure = charts.acceptance(rates | {"sets": {LINK: rates}})
    require(not any("<a" in t["name"] for t in figure["data"]), "plotly would make a link of it")


def _rich_alone(mp: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from draftsmith.cli.common import CarefulConsole

    mp.setattr(CarefulConsole, "render", Console.render)


@threat("T21", "terminal escapes in names and messages", _rich_alone)
def _(tmp: Path) -> None:
    from rich.table import Table

    from draftsmith.cli.common import CarefulConsole

    out = io.StringIO()
    console = CarefulConsole(file=out, force_terminal=True, width=80)
    table = Table()
    table.add_column("model")
    table.add_row("kimi\x1b]0;owned\x07\x1b[2J")
    console.print(table)
    console.print("error: \x1b[1A\x1b[2Kall is well \u202egnp", markup=False)
    text = out.getvalue()
    require(not any(s in text for s in ("\x1b]", "\x1b[2J", "\x1b[1A", "\u202e")), "the terminal was steered")
