"""A dry run: a few rows as they would be stored, with the supervised tokens coloured, before hours are spent."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.capture.imported import Renderer, rows_of
from draftsmith.capture.plan import Plan
from draftsmith.capture.rows import LEDGER, Row, iter_rows
from draftsmith.capture.run import Servers, capture_rows
from draftsmith.stage import Run
from draftsmith.target.tokenizer import TargetTokenizer

if TYPE_CHECKING:
    from rich.text import Text

OPEN, CLOSE = "⟦", "⟧"
"""Around the supervised part where colours do not show."""


def first_of(plan: Plan, count: int) -> Plan:
    """The plan's first `count` prompts."""
    left, keep = count, []
    for flags in plan.keep:
        some = flags.copy()
        at = some.nonzero()[0]
        some[at[left:]] = False
        left -= min(left, len(at))
        keep.append(some)
    return Plan(plan.sources, plan.rules, keep, plan.hashes[:count], plan.dropped)


def preview_rows(run: Run, count: int) -> Iterator[Row]:
    """`count` prompts' rows: those stored already, else from the logs or from the target, stored nowhere."""
    from draftsmith.capture.stage import _api_key, _engine, _folder, _in_process, plan_of, settings_of, tokenizer_of
    from draftsmith.engine.ensure import REFERENCE

    stored = run.stage_dir("capture")
    if (stored / "rows" / LEDGER).is_file():
        yield from islice(iter_rows(stored), count)
        return
    section, target = run.recipe.capture, _folder(run)
    tokenizer = tokenizer_of(run, target)
    plan = first_of(plan_of(run), count)
    if section.trust_answers:
        renderer = Renderer(tokenizer, section.thinking) if tokenizer else None
        for prompt in plan:
            found = rows_of(prompt, renderer, section.thinking, Counter())
            if isinstance(found, str):
                run.ui.warn(f"no row: {found}")
            else:
                yield from found
        return
    with tempfile.TemporaryDirectory(prefix="draftsmith.") as tmp, ExitStack() as stack:
        if section.endpoints:
            servers = Servers(section.endpoints, api_key=_api_key(section), limit=section.concurrency)
        elif run.recipe.engine.path == REFERENCE:
            servers = _in_process(run, target, tokenizer)
        else:
            server = stack.enter_context(_engine(run, target, Path(tmp)))
            servers = Servers([server.url], model=server.name, limit=section.concurrency)
        capture_rows(plan, Path(tmp) / "rows", settings_of(section), servers, tokenizer, run.ui, max_dropped=1.0)
        yield from iter_rows(Path(tmp) / "rows")


def coloured(row: Row, tokenizer: TargetTokenizer | None, colours: bool = True) -> Text:
    """A row as text: the prompt dim, the answer (what is learnt) green; ids where no tokenizer can be loaded."""
    from rich.text import Text

    def say(ids: list[int]) -> str:
        return tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids)) + " "

    prompt, answer = row.token_ids[: row.boundary], row.token_ids[row.boundary :]
    out = Text(
        f"{row.row_id} from {row.source}: {len(prompt)} prompt tokens, {len(answer)} supervised, ended by "
        f"{row.finish_reason}, thinking {row.thinking}\n",
        style="bold",
    )
    out.append(say(prompt), style="dim")
    out.append(say(answer) if colours else f"{OPEN}{say(answer)}{CLOSE}", style="bold green")
    return out.append("\n")


def show_preview(run: Run, count: int) -> int:
    """Print `count` prompts' rows to standard output; returns how many rows."""
    from draftsmith.capture.stage import _folder, tokenizer_of
    from draftsmith.cli.common import console

    tokenizer = tokenizer_of(run, _folder(run))
    shown = 0
    for row in preview_rows(run, count):
        console.print(coloured(row, tokenizer, console.color_system is not None), soft_wrap=True)
        shown += 1
    return shown
