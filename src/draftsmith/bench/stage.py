"""Stage `bench`: what the exported drafter does in the engine, against none and against ngram."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.bench.asserts import check
from draftsmith.bench.predict import engine_texts, predict
from draftsmith.bench.run import VllmOpener, load_sets, run_bench
from draftsmith.bench.ways import Opener, Plan
from draftsmith.dialects.stage import exported_folder
from draftsmith.engine.find import find_engine
from draftsmith.engine.server import serve_section
from draftsmith.errors import Exit, UserError
from draftsmith.recipe import Recipe
from draftsmith.record import content_hash, read_json, write_json
from draftsmith.stage import Run, Stage
from draftsmith.target.resolve import resolve_target

REFERENCE = "reference"
RAW_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}"
)
"""What capture's raw mode asks (capture/ask.py), as a chat template: a base model has none of its own."""


def plan_of(recipe: Recipe) -> Plan:
    b = recipe.bench
    return Plan(
        load_sets(b.sets),
        list(dict.fromkeys(b.concurrency)),
        b.max_tokens,
        b.single_prompts,
        b.single_max_tokens,
        b.temperature,
    )


def engine_label(recipe: Recipe) -> str:
    """Name and version of the engine that the recipe measures in."""
    return REFERENCE if recipe.engine.path == REFERENCE else find_engine(recipe.engine.path).label


def _inputs(run: Run) -> dict[str, str]:
    recipe = run.recipe
    prompts = {s: [p.prompt_id for p in some] for s, some in load_sets(recipe.bench.sets).items()}
    return {
        "export": run.output_hash("export"),
        "check": run.output_hash("check"),
        "target": content_hash(read_json(resolve_target(recipe.target) / "config.json")),
        "engine": content_hash(engine_label(recipe)),
        "prompts": content_hash(prompts),
    }


def decoder(target: Path, trust_remote_code: bool = False) -> Callable[[list[int]], str]:
    from draftsmith.target.tokenizer import TargetTokenizer

    tokenizer = TargetTokenizer.load(target, trust_remote_code)
    return lambda ids: tokenizer.decode(ids)


def make_opener(recipe: Recipe, target: Path, drafter: Path, folder: Path, run: Run) -> tuple[Opener, dict[str, Any]]:
    """The opener of the recipe's engine, and what bench.json says about it."""
    k = recipe.bench.num_speculative_tokens
    if recipe.engine.path == REFERENCE:
        from draftsmith.bench.reference import ReferenceOpener, describe_reference

        return ReferenceOpener(target, drafter, k, run.ui), describe_reference()
    from draftsmith.engine.facts import describe

    engine = find_engine(recipe.engine.path)
    about = describe(engine)
    about = {"name": about.pop("engine"), **about, "path": "managed" if engine.managed else "own"}
    settings = serve_section(recipe.engine)
    if recipe.capture.mode == "raw":
        settings["args"] = [*settings["args"], "--chat-template", RAW_TEMPLATE]
    return VllmOpener(engine, target, drafter, k, folder, run.ui, settings), about


def _work(run: Run, folder: Path) -> dict[str, Any]:
    recipe = run.recipe
    target = resolve_target(recipe.target)
    opener, about = make_opener(recipe, target, exported_folder(run), folder, run)
    plan = plan_of(recipe)
    decode = decoder(target, recipe.target.trust_remote_code)
    bench = run_bench(plan, list(dict.fromkeys(recipe.bench.ways)), opener, folder, about, run.ui, decode)
    _predict(run, folder, target, plan, bench)
    for notice in bench["notices"]:
        run.ui.warn(notice)
    failed = [row for row in check(recipe.bench.assertions, bench) if not row["held"]]
    if failed:
        raise UserError(
            "the bench does not hold: " + "; ".join(f"{r['condition']} (is {r['value']})" for r in failed),
            "the recipe's bench.assertions say what it must reach",
            f"see {folder / 'bench.json'}",
            Exit.NO,
        )
    keys = ("tokens_per_target_step", "acceptance_length", "acceptance_per_position", "drafts", "lossless", "ties")
    return {k: bench[k] for k in keys} | {
        "tokens_per_second": bench["tokens_per_second"],
        "speedup": bench["speedup"],
        "notices": bench["notices"],
    }


def _predict(run: Run, folder: Path, target: Path, plan: Plan, bench: dict[str, Any]) -> None:
    """Put the offline prediction beside the measured acceptance: bench.json's `predicted`."""
    recipe = run.recipe
    if "drafter" not in recipe.bench.ways or recipe.bench.temperature > 0 or recipe.capture.mode != "chat":
        return
    texts = engine_texts(folder / "ways" / "drafter", plan.prompts, target, plan.main)
    if not texts:
        return
    run.ui.note(f"replaying {len(texts)} answers for the prediction")
    bench["predicted"] = predict(target, exported_folder(run), texts, recipe.bench.num_speculative_tokens)
    write_json(folder / "bench.json", bench)


STAGE = Stage("bench", ("bench", "engine"), _inputs, _work)
