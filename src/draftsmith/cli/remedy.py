"""`draftsmith remedy TARGET DRAFTER`: the least that makes this engine take the pair; printed, or applied."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftsmith.cli.common import console, print_json

if TYPE_CHECKING:
    from draftsmith.engine.remedy import Plan


def register(app: typer.Typer) -> None:
    app.command("remedy")(remedy)


def remedy(
    target: str | None = typer.Argument(None, help="folder of the target (or a hub id in the local cache)"),
    drafter: str | None = typer.Argument(None, help="folder of the drafter"),
    engine: str | None = typer.Option(
        None, help="interpreter, environment, site-packages or folder that holds vllm/; none = the managed one"
    ),
    rung: str | None = typer.Option(
        None, help="take this rung for the gate instead of the first that suffices: plugin, release or patch"
    ),
    method: str | None = typer.Option(None, help="method of the speculative config, as you would give it"),
    platform: str | None = typer.Option(None, help="cuda, rocm or cpu; none = the installation's"),
    out: Path | None = typer.Option(None, help="folder for the shadow drafter; none = beside the drafter"),
    apply: bool = typer.Option(False, "--apply", help="do it: write the shadow folder, the plugin folder, the patch"),
    revert: bool = typer.Option(False, "--revert", help="put back every source file of the engine that was patched"),
    as_json: bool = typer.Option(False, "--json", help="print the plan as JSON"),
) -> None:
    """Find the smallest change that makes the engine take the pair.

    It goes down a ladder: nothing, flags, shadow folder (of the drafter: weights linked, config rewritten), runtime
    plugin, another release, source patch. Without --apply it only says what it would do.

    Exit codes: 0 something suffices (or is applied, or put back), 1 nothing does, 2 bad input.
    """
    from draftsmith.errors import Exit, UserError

    if revert:
        _revert(engine, as_json)
        return
    if target is None or drafter is None:
        raise UserError("target and drafter are needed", "", "draftsmith remedy TARGET DRAFTER, or --revert")
    if rung is not None and rung not in ("plugin", "release", "patch"):
        raise UserError(f"--rung {rung!r} is none of plugin, release, patch", "", "leave it out for the whole ladder")
    from draftsmith.check.run import load_checks, make_context
    from draftsmith.check.types import Options
    from draftsmith.cli.check import _engine_env
    from draftsmith.engine.remedy import climb

    load_checks()
    ctx = make_context(target, drafter, engine, Options(method=method, platform=platform, env=_engine_env()))
    if ctx.engine is None:
        raise UserError(
            "no engine given and none found", "the remedy depends on it", "draftsmith engine install, or --engine PATH"
        )
    if ctx.engine.name != "vllm":
        raise UserError(
            f"remedies are for vLLM; this is {ctx.engine.name}", "", "draftsmith check says what SGLang needs"
        )
    plan = climb(ctx, rung)  # type: ignore[arg-type]
    diff = _patch_of(plan, ctx.engine.source.path(""))
    done = _apply(plan, ctx, out) if apply and plan.suffices else {}
    if as_json:
        print_json(plan.to_json() | {"diff": diff, "applied": done})
    else:
        show(plan, diff, done, ctx.engine.version)
    raise typer.Exit(int(Exit.OK if plan.suffices else Exit.NO))


def _site(engine: str | None) -> Path:
    from draftsmith.engine.find import find_engine
    from draftsmith.engine.reader import locate
    from draftsmith.errors import UserError

    where = locate(engine if engine is not None else find_engine(None).package.parent)
    site = where.source.path("")
    if site is None or not site.is_dir():
        raise UserError(f"{where.path} is packed or on another host", "files there are not changed", "name a folder")
    return site


def _revert(engine: str | None, as_json: bool) -> None:
    from draftsmith.engine.patch import revert

    files = [str(p) for p in revert(_site(engine))]
    if as_json:
        print_json({"reverted": files})
        return
    for file in files:
        console.print(f"put back: {file}", markup=False, highlight=False, soft_wrap=True)
    if not files:
        console.print("nothing is patched there", highlight=False)


def _patch_of(plan: Plan, site: Path | None) -> str:
    """The unified diff of the plan's patch, "" where it has none."""
    from draftsmith.engine.patch import widen_list

    for step in plan.steps:
        if step.rung == "patch" and site is not None:
            return widen_list(site, step.data["file"], step.data["line"], step.data["model_type"]).diff()
    return ""


def _apply(plan: Plan, ctx: Any, out: Path | None) -> dict[str, Any]:
    from draftsmith.engine.inject import plugin_env
    from draftsmith.engine.patch import apply, widen_list
    from draftsmith.engine.remedy_shadow import shadow_path, write_shadow
    from draftsmith.errors import UserError

    done: dict[str, Any] = {}
    site = ctx.engine.source.path("")
    for step in plan.steps:
        if step.rung == "shadow":
            where = out or shadow_path(plan.drafter)
            done["drafter"] = str(write_shadow(plan.drafter, plan.config, list(plan.changes), where).absolute())
        elif step.rung == "plugin":
            done["env"] = plugin_env(site, step.data["features"])
        elif step.rung == "patch":
            if site is None:
                raise UserError("this engine is packed or on another host", "files there are not changed", "")
            made = widen_list(site, step.data["file"], step.data["line"], step.data["model_type"])
            done["patched"] = str(apply(made))
    return done


def show(plan: Plan, diff: str, done: dict[str, Any], version: str | None) -> None:
    """For people."""
    import shlex

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    if not plan.suffices:
        say("nothing on the ladder suffices", "bold red")
    elif plan.rung == "nothing":
        say(f"nothing is needed: vLLM {version or ''} takes the pair as it is", "bold green")
    for n, step in enumerate(plan.steps, 1):
        say(f"{n}. {step.rung}: {step.title}", "bold")
        say(f"   because {step.why}")
        for change in step.data.get("changes", ()):
            say(f"   - {change}")
    if diff:
        say("")
        say(diff.rstrip("\n"))
    for row in plan.left:
        say(f"still in the way: {row.id}: {row.found}", "red")
        if row.fix:
            say(f"  fix: {row.fix}")
    if not plan.suffices:
        return
    drafter = Path(done["drafter"]) if "drafter" in done else None
    for key, value in done.get("env", {}).items():
        say(f"export {key}={shlex.quote(value)}")
    if "patched" in done:
        say(f"patched: {done['patched']} (draftsmith remedy --revert puts it back)")
    release = next((s for s in plan.steps if s.rung == "release"), None)
    if release is not None:
        say(f"then: pip install 'vllm>={release.data['first']}', or draftsmith engine install, and check again")
        return
    kinds = {s.rung for s in plan.steps}
    if not done and kinds & {"shadow", "plugin", "patch"}:
        say("--apply does this" + ("; draftsmith serve injects the plugin by itself" if "plugin" in kinds else ""))
    say(f"launch: {shlex.join(plan.launch(drafter))}")
