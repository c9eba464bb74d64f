"""`ask(tmp_path, change, engine=…)`: the good tiny pair, one change, the rows of the verdict by id."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from engine_tree import write_engine
from mutant_case import Case, good_case

from draftsmith.check.run import check_pair
from draftsmith.check.types import CheckRow, Verdict
from draftsmith.engine.reader import EngineFacts, read_engine


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="engines-")


@cache
def engine(kind: str) -> str:
    """The path of an engine tree of this kind, made once."""
    return str(write_engine(Path(_root().name) / kind, kind))


@cache
def facts(kind: str) -> EngineFacts:
    """The same engine, read once for many pairs."""
    return read_engine(engine(kind))


def ask_verdict(root: Path, change: Callable[[Case], Any] | None = None, engine_kind: str = "modern-v1") -> Verdict:
    case = good_case(root / "scratch", with_contract=False)
    if change is not None:
        change(case)
    target, drafter = case.write(root)
    return check_pair(str(target), str(drafter), None, case.make_options(), facts=facts(engine_kind))


def ask(root: Path, change: Callable[[Case], Any] | None = None, engine_kind: str = "modern-v1") -> dict[str, CheckRow]:
    return {r.id: r for r in ask_verdict(root, change, engine_kind).checks}
