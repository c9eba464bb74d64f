"""draftsmith check: will this engine take this pair, and if not, which line says so?"""

from __future__ import annotations

from pathlib import Path

import typer

from draftsmith.cli.common import console, print_json


def register(app: typer.Typer) -> None:
    app.command("check")(check)


def check(
    target: str | None = typer.Argument(None, help="folder of the target (or a hub id in the local cache)"),
    drafter: str | None = typer.Argument(None, help="folder of the exported drafter"),
    engine: str | None = typer.Option(
        None, help="interpreter, environment, site-packages, wheel, checkout or ssh:// path; none = the managed one"
    ),
    max_model_len: int | None = typer.Option(None, min=1, help="context the engine will be started with"),
    tensor_parallel: int = typer.Option(1, help="devices that share each layer"),
    pipeline_parallel: int = typer.Option(1, help="pipeline stages"),
    num_speculative_tokens: int | None = typer.Option(None, help="draft tokens per step"),
    method: str | None = typer.Option(None, help="method of the speculative config; none = by the drafter's path"),
    platform: str | None = typer.Option(None, help="cuda, rocm or cpu; none = the installation's"),
    model_impl: str = typer.Option("auto", help="the engine's --model-impl: auto, vllm or transformers"),
    plugin: bool = typer.Option(
        False, "--plugin", help="ask for the engine with draftsmith's runtime plugin, as serve, bench and run launch it"
    ),
    gpu_memory: float | None = typer.Option(None, help="memory of one device, GiB, for the forecast"),
    rows: Path | None = typer.Option(None, help="captured rows, to measure the draft vocabulary's coverage"),
    deep: bool = typer.Option(False, "--deep", help="also read blocks of the weights (NaN, untrained norms)"),
    dry_run: bool = typer.Option(False, "--dry-run", help="also let the engine create its config (no weights)"),
    before_training: bool = typer.Option(
        False, "--before-training", help="ask for the target alone: can any release serve a drafter for it?"
    ),
    all_rows: bool = typer.Option(False, "--all", help="show evidence of passes and every skipped check"),
    list_checks: bool = typer.Option(False, "--list", help="list every check and the fault that it finds"),
    as_json: bool = typer.Option(False, "--json", help="print the verdict as JSON"),
) -> None:
    """Will this engine take this target and drafter?

    Answered from the engine's source and the files' headers in about a second; nothing is run.

    Exit codes: 0 yes, 1 no, 2 bad input, 3 could not tell.
    """
    import gc

    from draftsmith.errors import UserError

    gc.disable()  # one short run over many small objects (syntax trees, headers): collecting takes a sixth of it
    if list_checks:
        show_catalog(as_json)
        return
    if target is None:
        raise UserError("no target given", "", "draftsmith check TARGET DRAFTER, or --list")
    from draftsmith.check.types import Options

    options = Options(
        max_model_len=max_model_len,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        num_speculative_tokens=num_speculative_tokens,
        method=method,
        platform=platform,
        model_impl=model_impl,
        gpu_memory=int(gpu_memory * 2**30) if gpu_memory else None,
        deep=deep,
        env=_engine_env(),
        plugin=plugin,
    )
    if before_training:
        from draftsmith.check.before import before_training as ask

        verdict = ask(target, engine, options)
        title = f"a drafter for {target}, before training"
    elif drafter is None:
        raise UserError(
            "no drafter given", "", "draftsmith check TARGET DRAFTER, or --before-training for the target alone"
        )
    else:
        from draftsmith.check.run import check_pair

        verdict = check_pair(target, drafter, engine, options, rows, dry_run)
        title = f"target {target}, drafter {drafter}"
    if as_json:
        print_json(verdict.to_json())
    else:
        from draftsmith.check.render import show

        show(console, verdict, title, all_rows)
    raise typer.Exit(int(verdict.exit_code))


def _engine_env() -> dict[str, str]:
    """The variables of this shell that engines look at."""
    import os

    return {k: x for k, x in os.environ.items() if k.startswith(("VLLM_", "SGLANG_"))}


def show_catalog(as_json: bool) -> None:
    """Every check, what it finds, what it needs, where the fault was seen."""
    from dataclasses import asdict

    from draftsmith.check.catalog import CATALOG

    if as_json:
        print_json([asdict(s) | {"group": s.group} for s in CATALOG.values()])
        return
    for spec in CATALOG.values():
        needs = f" [needs {', '.join(spec.needs)}]" if spec.needs else ""
        console.print(
            f"{spec.id:24} {spec.finds}{needs} ({spec.source})", markup=False, highlight=False, soft_wrap=True
        )
