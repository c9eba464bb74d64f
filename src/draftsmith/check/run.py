"""`check` as a function: target, drafter and engine in, a verdict out.

verdict = check_pair("models/target", "models/drafter-eagle3", engine="/opt/vllm")
verdict.verdict, verdict.exit_code, verdict.to_json()
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.check.inputs import load_json, model_folder
from draftsmith.check.types import CheckRow, Context, EngineId, Options, Verdict, run_checks
from draftsmith.errors import UserError

if TYPE_CHECKING:
    from draftsmith.engine.reader import EngineFacts

MODULES = (
    "gate",
    "form_config",
    "form_tensors",
    "form_map",
    "pair",
    "contract_rows",
    "parallel",
    "coverage",
    "runner",
    "silence",
    "deep",
    "known_faults",
)
"""Modules whose import registers checks; their order is the order of rows within a group."""

DECISIVE = frozenset({"form.files", "form.inventory", "form.map_values", "form.aux_ids"})
"""Beside the gate: where one of these could not be made, nobody can say yes."""


def load_checks() -> None:
    """Register every check."""
    for name in MODULES:
        import_module(f"draftsmith.check.{name}")


def engine_path(engine: str | None) -> str | None:
    """What the reader is given: the path as typed, else the managed engine's; None where there is none."""
    if engine is not None:
        return engine
    from draftsmith.engine.find import find_engine

    try:
        return str(find_engine(None).site)
    except UserError:
        return None  # the gate's rows say so, and the verdict is "unknown"


def make_context(
    target: str,
    drafter: str | None,
    engine: str | None,
    options: Options,
    rows: Path | None = None,
    facts: EngineFacts | None = None,
) -> Context:
    """Resolve what the user typed and read both configs. UserError for input that cannot be looked at at all.

    facts: an engine that was read before, in place of `engine`."""
    target_folder = model_folder(target, "target")
    target_config = load_json(target_folder / "config.json")
    known: dict[str, object] = {"target_config": target_config}
    drafter_folder = None
    if drafter is not None:
        drafter_folder = model_folder(drafter, "drafter")
        known["drafter_config"] = load_json(drafter_folder / "config.json")
    where = facts.path if facts is not None else engine_path(engine)
    if facts is not None:
        known["engine"] = facts
    ctx = Context(target_folder, drafter_folder, where, options, **known)
    if facts is None and where is not None and options.platform is not None:
        from draftsmith.engine.reader import read_engine

        ctx.__dict__["engine"] = read_engine(where, platform=options.platform)
    if drafter is not None:
        ctx.__dict__["typed_drafter"] = drafter
    if rows is not None:
        ctx.__dict__["rows_folder"] = rows
    return ctx


def verdict_of(ctx: Context, rows: list[CheckRow]) -> Verdict:
    engine = ctx.engine.id if ctx.engine is not None else EngineId()
    verdict = Verdict.of(engine, rows)
    undecided = ctx.drafter_folder is not None and any(r.id in DECISIVE and r.status == "skip" for r in rows)
    return Verdict("unknown", engine, rows) if verdict.verdict == "yes" and undecided else verdict


def check_pair(
    target: str,
    drafter: str,
    engine: str | None = None,
    options: Options | None = None,
    rows: Path | None = None,
    dry_run: bool = False,
    facts: EngineFacts | None = None,
) -> Verdict:
    """All checks of a pair. dry_run: also the engine's own config creation, in its own environment. facts: an engine
    that was read before (many pairs, one engine)."""
    load_checks()
    ctx = make_context(target, drafter, engine, options or Options(), rows, facts)
    found = list(run_checks(ctx))
    if dry_run:
        from draftsmith.check.dryrun import dry_run as own_verdict

        found.append(own_verdict(ctx))
    return verdict_of(ctx, found)
