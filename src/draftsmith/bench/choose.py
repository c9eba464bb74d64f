"""`train.select: engine`: measure the checkpoints that training kept in the engine that will serve them; keep the best.

Every candidate is exported as it would be and measured over prompts that neither training nor the bench sees: those of
the rows held out from training. Restartable: what was measured is not measured again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.bench.run import run_bench
from draftsmith.bench.ways import Opener, Plan
from draftsmith.capture.prompts import Prompt
from draftsmith.capture.rows import iter_rows
from draftsmith.capture.sources import open_source
from draftsmith.capture.stage import rules_of
from draftsmith.dialects import native, vllm
from draftsmith.dialects.stage import export_name
from draftsmith.errors import UserError
from draftsmith.record import read_json, write_json
from draftsmith.stage import Run
from draftsmith.target.resolve import resolve_target
from draftsmith.train.candidates import FOLDER, HELD_OUT, OFFLINE, candidates

CHOSEN = "selected.json"
PROMPTS, TOKENS, AT_ONCE = 32, 96, 8
"""Prompts of the sample, answer tokens of each, requests at once."""

FIGURES = ("tokens_per_target_step", "acceptance_length", "acceptance_per_position", "drafts")
Open = Callable[[Path, Path], tuple[Opener, dict[str, Any]]]
"""(exported drafter, folder) → the engine's opener, and what it is."""


def choose_by_engine(run: Run, folder: Path, opened: Open | None = None) -> dict[str, Any]:
    """Put the candidate with the most tokens per target step into `folder`/best; returns the stage's further figures.

    opened: in place of the recipe's engine. UserError where no held-out prompt can be asked."""
    if (folder / CHOSEN).is_file():
        return _figures(read_json(folder / CHOSEN))
    target = resolve_target(run.recipe.target)
    tokens = {k: v for k, v in read_json(target / "config.json").items() if k in ("bos_token_id", "eos_token_id") and v}
    held_out = held_out_prompts(run, set(read_json(folder / FOLDER / HELD_OUT)))
    plan = Plan({"held_out": held_out}, [AT_ONCE], max_tokens=TOKENS)
    rows = []
    found = candidates(folder)
    for i, place in enumerate(found, 1):
        drafter = place / export_name(run.recipe)
        if not (drafter / "config.json").is_file():
            shutil.rmtree(drafter, ignore_errors=True)
            vllm.write(native.read(place), drafter, run.recipe.export.dtype, tokens)
        opener, about = (opened or _recipes_engine(run, target))(drafter, place / "bench")
        bench = run_bench(plan, ["drafter"], opener, place / "bench", about, run.ui)
        offline = read_json(place / OFFLINE)
        row = {"step": int(place.name.removeprefix("step-")), "offline_acceptance_length": offline["acceptance_length"]}
        rows.append(row | {k: bench[k] for k in FIGURES})
        run.ui.note(
            f"candidate {i} of {len(found)}, step {row['step']}: {bench['tokens_per_target_step']:.3f} tokens per target "
            f"step in the engine (acceptance length {bench['acceptance_length']:.3f}; offline {offline['acceptance_length']:.3f})"
        )
    best = max(range(len(rows)), key=lambda i: rows[i]["tokens_per_target_step"])
    native.write(native.read(found[best]), folder / "best")
    chosen = {"step": rows[best]["step"], "prompts": len(held_out), "engine": about, "candidates": rows}
    write_json(folder / CHOSEN, chosen)
    shutil.rmtree(folder / FOLDER)
    return _figures(chosen)


def _figures(chosen: dict[str, Any]) -> dict[str, Any]:
    best = next(r for r in chosen["candidates"] if r["step"] == chosen["step"])
    return {
        "selected_by": f"{chosen['engine']['name']} {chosen['engine']['version']}",
        "selected_step": chosen["step"],
        "selected_tokens_per_target_step": best["tokens_per_target_step"],
        "candidates": chosen["candidates"],
    }


def _recipes_engine(run: Run, target: Path) -> Open:
    from draftsmith.bench.stage import make_opener

    return lambda drafter, folder: make_opener(run.recipe, target, drafter, folder, run)


def held_out_prompts(run: Run, row_ids: set[str]) -> list[Prompt]:
    """The prompts of some captured rows, at their first turn to answer."""
    wanted = {r.prompt_id for r in iter_rows(run.stage_dir("capture")) if r.row_id in row_ids}
    found: dict[str, Prompt] = {}
    rules = rules_of(run.recipe.capture)
    for spec in run.recipe.capture.prompts:
        for p in open_source(spec).prompts(rules):  # all of it: which COUNT were asked was drawn by the seed
            if isinstance(p, Prompt) and p.prompt_id in wanted and p.points:
                found.setdefault(p.prompt_id, Prompt(p.prompt_id, "held_out", p.messages[: p.points[0]], p.tools))
    if not found:
        raise UserError(
            "none of the held-out rows' prompts is in capture.prompts any more",
            "the engine must be asked something that training has not seen",
            "restore the prompts, or set train.select: offline",
        )
    return list(found.values())[:PROMPTS]
