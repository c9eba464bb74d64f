"""Puts a diagnosis' subject together from a run's folder or from the parts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.contract import FILE, Contract
from draftsmith.diagnose import signals
from draftsmith.diagnose.audit import PROVEN
from draftsmith.diagnose.causes import Cause
from draftsmith.diagnose.subject import Sampler, SampleRow, Subject
from draftsmith.errors import UserError
from draftsmith.record import read_json
from draftsmith.ui import Ui

if TYPE_CHECKING:
    from draftsmith.engine.reader import EngineFacts


PROMPTS = 200
"""Prompts that are compared with the served template."""


def _from_run(run: Path) -> dict[str, Any]:
    from draftsmith.dialects.stage import export_name
    from draftsmith.recipe import parse_recipe
    from draftsmith.target.resolve import resolve_target

    if not (run / "recipe.json").exists():
        raise UserError(
            f"{run} is no run: it has no recipe.json", "", "give the folder that `draftsmith run` made, or the parts"
        )
    recipe = parse_recipe(read_json(run / "recipe.json"), str(run / "recipe.json"))
    states = run / "extract"
    return {
        "target": str(resolve_target(recipe.target)),
        "drafter": run / "export" / export_name(recipe),
        "rows": run / "capture",
        "states": states if any(states.glob("*.safetensors")) else None,
        "steps": recipe.bench.num_speculative_tokens,
        "held_out": recipe.train.held_out_rows,
        "engine": recipe.engine.path,
    }


def load_subject(
    run: Path | None,
    target: str | None,
    drafter: Path | None,
    rows: Path | None,
    states: Path | None,
    sample: int,
    max_tokens: int,
    steps: int,
    engine: str | None,
    ui: Ui,
    facts: EngineFacts | None = None,
    bench: dict[str, Any] | None = None,
    sampler: Sampler | None = None,
    train_sample: int = 8,
) -> Subject | dict[str, Any]:
    """The subject; or, where the drafter's files cannot be read as a drafter at all, the finished diagnosis that says so.

    facts: an engine that was read before; bench: what was measured, in place of the run's; sampler: a target that is
    loaded already (many diagnoses, one target)."""
    found: dict[str, Any] = _from_run(run) if run is not None else {}
    target = target or found.get("target")
    drafter = drafter or found.get("drafter")
    rows = rows or found.get("rows")
    states = states or found.get("states")
    steps = found.get("steps", steps)
    if target is None or drafter is None or rows is None:
        raise UserError("target, drafter and rows are needed", "", "give --run, or --target, --drafter and --rows")
    folder = Path(target)
    from draftsmith.capture.rows import iter_rows
    from draftsmith.check.run import engine_path
    from draftsmith.dialects import foreign
    from draftsmith.engine.ensure import REFERENCE
    from draftsmith.engine.reader import read_engine
    from draftsmith.target.config import target_facts
    from draftsmith.target.weights import read_embedding
    from draftsmith.train.data import split_rows

    given = engine or found.get("engine")
    # The built-in engine has no source of its own to read; the machine's real one, if any, will serve the files.
    if facts is None and (where := engine_path(None if given == REFERENCE else given)) is not None:
        facts = read_engine(where)
    layers = target_facts(folder).num_layers
    contract = Contract.load(drafter) if (drafter / FILE).exists() else None
    try:
        checkpoint = foreign.read(drafter, aux_meaning="entering", target_layers=layers)
    except UserError as e:
        subject = Subject(drafter, folder, None, [], None, layers, steps, facts=facts)  # type: ignore[arg-type]
        causes = sorted(signals.check_rows(subject), key=lambda c: -c.score)
        listed = [c.as_dict() for c in causes]
        if not listed:
            listed = [Cause("files", e.what, PROVEN, [e.why], e.fix).as_dict()]
        # Nothing was replayed: what such files accept in an engine is not for us to say in a number.
        return {
            "acceptance": None,
            "nats_per_token": None,
            "rows": 0,
            "causes": listed,
            "verdict": "likely cause found",
        }
    if facts is not None and (ids := served_ids(folder, drafter, facts)) is not None:
        checkpoint.config.aux_layer_ids = list(ids)
    every = [r for r in iter_rows(rows) if len(r.token_ids) > r.boundary + 8]
    if len(every) < 2:
        raise UserError(f"{rows} holds {len(every)} usable rows", "the diagnosis replays real answers", "capture some")
    prompt_of = {r.row_id: r.prompt_id for r in every}
    entries = [_Entry(r.row_id, len(r.token_ids), r.boundary) for r in every]
    held = {e.row_id for e in split_rows(entries, found.get("held_out", 0.04), lambda i: prompt_of[i]).held_out}
    # a prompt that fills the replayed length leaves nothing to look at
    usable = [r for r in every if min(len(r.token_ids), max_tokens) >= r.boundary + 4]
    fresh = [r for r in usable if r.row_id in held]
    trained = [r for r in usable if r.row_id not in held]
    ui.note(
        f"running the target over {min(len(fresh), sample)} held-out and {min(len(trained), train_sample)} trained rows"
    )
    sampler = sampler or Sampler(folder)
    out = Subject(
        drafter=drafter,
        target=folder,
        checkpoint=checkpoint,
        rows=sampler.rows(fresh or trained, sample, max_tokens),
        embedding=read_embedding(folder).float(),
        num_layers=layers,
        steps=steps,
        contract=contract,
        facts=facts,
        answer_tokens=sum(len(r.token_ids) - r.boundary for r in every),
        answer_spans=[(r.boundary, len(r.token_ids)) for r in every],
        prompts=[r.token_ids[: r.boundary] for r in _spread(every, PROMPTS)],
        states_folder=states,
        run_folder=run,
        train_rows=sampler.rows(_spread(trained, train_sample), train_sample, max_tokens),
    )
    from draftsmith.diagnose.rank import load_bench

    out.bench = bench if bench is not None else load_bench(run)
    return out


def served_ids(target: Path, drafter: Path, facts: EngineFacts) -> tuple[int, ...] | None:
    """The aux ids that this engine's runner would take from these files: what is written is not always what is read."""
    from draftsmith.check.look import Look
    from draftsmith.check.run import make_context
    from draftsmith.check.types import Options

    look = Look(make_context(str(target), str(drafter), None, Options(method="eagle3"), facts=facts))
    ids = look.release.used_ids(look.drafter, look.target, look.options).ids
    # an id that is no layer, or too few of them, is a fault of the form: the check says so
    layers = look.target.layers
    usable = ids is not None and layers is not None and all(0 <= k <= layers for k in ids)
    return ids if usable and ids is not None and len(ids) == look.release.aux_count(look.drafter)[0] else None


class _Entry:
    def __init__(self, row_id: str, tokens: int, boundary: int) -> None:
        self.row_id, self.tokens, self.boundary = row_id, tokens, boundary


def _spread(rows: list[Any], count: int) -> list[Any]:
    step = max(len(rows) // max(count, 1), 1)
    return rows[::step][:count]


__all__ = ["SampleRow", "load_subject"]
