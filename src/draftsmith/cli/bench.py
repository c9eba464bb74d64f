"""`draftsmith bench`: acceptance, speed and losslessness, of a recipe's drafter, of any pair, or of a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from draftsmith.cli.common import console, print_json
from draftsmith.errors import Exit, UserError


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    recipe: Path | None = typer.Argument(
        None, help="YAML recipe: measure its exported drafter as one stage of its run"
    ),
    overrides: list[str] = typer.Option([], "--set", help="section.key=value laid over the recipe; may be repeated"),
    target: str | None = typer.Option(None, help="target folder or hub id, instead of a recipe"),
    drafter: Path | None = typer.Option(None, help="exported drafter folder, instead of a recipe"),
    engine: str | None = typer.Option(None, help="engine environment; none = the managed one; 'reference' = no vLLM"),
    endpoint: str | None = typer.Option(None, help="measure this running server (URL) instead of launching one"),
    baseline: str | None = typer.Option(None, help="a server of the same model without a drafter, beside --endpoint"),
    model: str | None = typer.Option(None, help="served model name at the endpoint; none = its first"),
    api_key_env: str | None = typer.Option(None, help="environment variable that holds the endpoint's key"),
    prompts: list[str] = typer.Option(
        [], help="prompt set: mt_bench, gsm8k, humaneval or a file, each with an optional :COUNT; may be repeated"
    ),
    ways: str = typer.Option("drafter,none,ngram", help="what to compare, comma-separated"),
    concurrency: str = typer.Option("8,1", help="requests at once, comma-separated; the first above 1 is the headline"),
    max_tokens: int = typer.Option(128, help="answer tokens when several at once"),
    single_prompts: int = typer.Option(20, help="prompts of the one-at-a-time pass and the losslessness test"),
    single_max_tokens: int = typer.Option(64, help="answer tokens of that pass"),
    temperature: float = typer.Option(0.0, help="sampling temperature of the measurement"),
    sampling_test: float | None = typer.Option(
        None, help="also test at this temperature that the drafter leaves the distribution as it is"
    ),
    repeats: int = typer.Option(1, min=1, help="measure every pass so many times"),
    num_speculative_tokens: int = typer.Option(3, min=1, help="draft tokens per step"),
    tune: str | None = typer.Option(
        None,
        help="measure these numbers of draft tokens (e.g. 1,5) at each --concurrency, predict those between, and recommend",
    ),
    max_model_len: int = typer.Option(2048, help="context the engine is launched with"),
    out: Path = typer.Option(Path("runs/bench"), help="folder of the results; the same command goes on there"),
    conditions: list[str] = typer.Option(
        [], "--assert", help="e.g. 'tokens_per_target_step>=1.4,speedup_1>=1.3'; exit 1 if one does not hold"
    ),
    markdown: Path | None = typer.Option(None, help="also write the tables to this file"),
    force: bool = typer.Option(False, help="measure again even if it is done"),
    as_json: bool = typer.Option(False, "--json", help="print bench.json"),
) -> None:
    """Measure a drafter in the engine that will serve it.

    It is compared with no drafter and with ngram (the engine's own drafting by repetition). Reports acceptance per
    position and length, tokens per target step (definitions are printed with them), tokens per second, latencies and
    losslessness. Exit codes: 0 done, 1 an assertion failed, 2 bad input.
    """
    from draftsmith.bench.asserts import check, parse
    from draftsmith.bench.markdown import to_markdown
    from draftsmith.record import atomic_write, read_json
    from draftsmith.ui import ConsoleUi, QuietUi

    ui: Any = QuietUi() if as_json else ConsoleUi()
    parse(conditions)  # a condition that cannot be read must not cost a measurement first
    if recipe is not None:
        from draftsmith.cli.stages import parse_overrides
        from draftsmith.pipeline import open_run, run_stage
        from draftsmith.recipe import load_recipe

        run = open_run(load_recipe(recipe, parse_overrides(overrides)), ui)
        run_stage(run, "bench", force)
        found = read_json(run.stage_dir("bench") / "bench.json")
    else:
        from draftsmith.bench.adhoc import Asked, measure

        asked = Asked(
            target=target,
            drafter=drafter,
            engine=engine,
            endpoint=endpoint,
            baseline=baseline,
            model=model,
            api_key_env=api_key_env,
            prompts=prompts or ["mt_bench:40", "gsm8k:20", "humaneval:20"],
            ways=[w.strip() for w in ways.split(",") if w.strip()],
            concurrency=numbers("--concurrency", concurrency),
            max_tokens=max_tokens,
            single_prompts=single_prompts,
            single_max_tokens=single_max_tokens,
            temperature=temperature,
            sampling_test=sampling_test,
            repeats=repeats,
            num_speculative_tokens=num_speculative_tokens,
            tune=numbers("--tune", tune) if tune else [],
            max_model_len=max_model_len,
        )
        found = measure(asked, out, ui, force)
    if markdown is not None:
        atomic_write(markdown, to_markdown(found))
    rows = check(conditions, found)
    if as_json:
        print_json(found | {"assertions": rows})
    else:
        console.print(to_markdown(found), markup=False, highlight=False, soft_wrap=True)
        for row in rows:
            console.print(f"{'ok  ' if row['held'] else 'FAIL'} {row['condition']} (is {row['value']})", markup=False)
    if not all(row["held"] for row in rows):
        raise typer.Exit(int(Exit.NO))


def numbers(option: str, text: str) -> list[int]:
    """ "8,1" → [8, 1]; UserError on what is no positive number."""
    words = [w.strip() for w in text.split(",") if w.strip()]
    if not words or not all(w.isdigit() and int(w) > 0 for w in words):
        raise UserError(f"{option} is {text!r}", "", "give positive numbers separated by commas, e.g. 8,1")
    return list(dict.fromkeys(int(w) for w in words))
