"""`check` as a function: target, drafter and engine in, a verdict out.

verdict = check_pair("models/target", "models/drafter-eagle3", engine="/opt/vllm")
verdict.verdict, verdict.exit_code, verdict.to_json()
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from draftsmith.check.inputs import load_json, model_folder
from draftsmith.check.types import CheckRow, Context, EngineId, Options, Verdict, run_checks
from draftsmith.errors import UserError

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

DECISIVE = frozenset({"form.files", "form.inventory", "form.map_values"})
"""Beside the gate: where one of these could not be made, nobody can say yes."""

PRINT_ORDER = "gate form pair runner silence engine"


def load_checks() -> None:
    """Register every check."""
    for name in MODULES:
        import_module(f"draftsmith.check.{name}")


def engine_path(engine: str | None) -> tuple[str | None, str]:
    """(what the reader is given, why there is none)."""
    if engine is not None:
        return engine, ""
    from draftsmith.engine.find import find_engine

    try:
        found = find_engine(None)
    except UserError as e:
        return None, e.what
    return str(found.site), ""


def make_context(
    target: str,
    drafter: str | None,
    engine: str | None,
    options: Options,
    rows: Path | None = None,
) -> Context:
    """Resolve what the user typed and read both configs. UserError for input that cannot be looked at at all."""
    target_folder = model_folder(target, "target")
    target_config = load_json(target_folder / "config.json")
    known: dict[str, object] = {"target_config": target_config}
    drafter_folder = None
    if drafter is not None:
        drafter_folder = model_folder(drafter, "drafter")
        known["drafter_config"] = load_json(drafter_folder / "config.json")
    where, _ = engine_path(engine)
    ctx = Context(target_folder, drafter_folder, where, options, **known)
    if where is not None and options.platform is not None:
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
) -> Verdict:
    """All checks of a pair. dry_run: also the engine's own config creation, in its own environment."""
    load_checks()
    ctx = make_context(target, drafter, engine, options or Options(), rows)
    found = list(run_checks(ctx))
    if dry_run:
        from draftsmith.check.dryrun import dry_run as own_verdict

        found.append(own_verdict(ctx))
    return verdict_of(ctx, found)
