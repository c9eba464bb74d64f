"""`draftsmith serve`: launch vLLM with a drafter, watch over it, and take it down in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftsmith.cli.common import console, error_console, print_json
from draftsmith.errors import Exit, UserError

if TYPE_CHECKING:
    from draftsmith.engine.find import Engine
    from draftsmith.engine.remote import RemoteServer
    from draftsmith.engine.server import Server
    from draftsmith.ui import Ui

DEFAULT_PORT = 8000


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    target: str = typer.Argument(
        help="target folder or hub id; or a recipe (YAML), whose target and drafter are served"
    ),
    drafter: Path | None = typer.Argument(None, help="exported drafter folder; none = serve the target alone"),
    overrides: list[str] = typer.Option([], "--set", help="section.key=value laid over a recipe; may be repeated"),
    engine: str | None = typer.Option(None, help="engine environment; none = the managed one"),
    host: str | None = typer.Option(
        None, help="serve on this host by ssh (user@machine or an alias); paths are then that machine's"
    ),
    listen: str = typer.Option("127.0.0.1", help="address to listen on"),
    port: int | None = typer.Option(None, help="port; none = 8000 if it is free, else a free one"),
    num_speculative_tokens: int = typer.Option(3, min=1, help="draft tokens per step"),
    max_model_len: int = typer.Option(2048, help="context, tokens"),
    dtype: str = typer.Option("auto", help="the engine's compute type; auto = bfloat16 where the machine has it"),
    name: str | None = typer.Option(None, help="served model name; none = the target's folder name"),
    arg: list[str] = typer.Option([], "--arg", help="further flag for the engine, e.g. --arg=--max-num-seqs=16"),
    timeout: float = typer.Option(900, help="seconds to wait for ready"),
    log: Path = typer.Option(Path("runs/serve/engine.log"), help="file that gets the engine's output"),
    check: bool = typer.Option(True, help="ask the gate first; a drafter that it refuses is not served"),
    print_only: bool = typer.Option(
        False, "--print", help="print the plain engine command (for systemd, docker, Kubernetes) and end"
    ),
    as_json: bool = typer.Option(
        False, "--json", help="print {url, name, pid, ready_seconds} when ready, errors as JSON"
    ),
) -> None:
    """Serve a drafter in vLLM with the right flags, until Ctrl-C.

    If the engine dies, its root error, the condition and the remedy are shown instead of its log. Nothing of it
    survives draftsmith, however that ends. Exit codes: 0 stopped by you, 1 the engine died or the gate refused.
    """
    from draftsmith.engine.find import find_engine
    from draftsmith.engine.serve import run_until_stopped
    from draftsmith.engine.sglang_server import server_class
    from draftsmith.ui import ConsoleUi, QuietUi

    ui: Any = QuietUi() if as_json else ConsoleUi()
    panel = None if as_json or not error_console.is_terminal else error_console

    def ready(facts: dict[str, Any]) -> None:
        if as_json:
            print_json(facts)

    settings = {"max_model_len": max_model_len, "dtype": dtype, "timeout": timeout, "args": arg}
    if host is not None:
        away = remote_server(host, engine, target, drafter, num_speculative_tokens, settings | {"log": log, "ui": ui})
        away.name, away.local_port = name or Path(target).name, port or away.local_port
        if print_only:
            show_command(away, as_json)
        else:
            run_until_stopped(away, ready, ui, panel)
        return
    if drafter is None and target.endswith((".yaml", ".yml")):
        wanted = wanted_of_recipe(Path(target), overrides, ui)
    else:
        from draftsmith.recipe import TargetSection
        from draftsmith.target.resolve import resolve_target

        folder = resolve_target(TargetSection(model=target))
        wanted = Wanted(folder, drafter, engine, num_speculative_tokens, settings)
    found = find_engine(wanted.engine)
    if check and wanted.drafter is not None:
        wanted.require_gate(found)
    server = server_class(found.name)(
        found,
        wanted.target,
        speculative=wanted.speculative(),
        host=listen,
        port=port or wanted.free_default(listen),
        name=name or wanted.target.name,
        log=log,
        ui=ui,
        **wanted.settings,
    )
    if print_only:
        show_command(server, as_json)
    else:
        run_until_stopped(server, ready, ui, panel)


def show_command(server: Server, as_json: bool) -> None:
    """The plain engine command, for people who launch it themselves."""
    if as_json:
        print_json({"command": server.command(), "environment": server.environment()})
    else:
        console.print(server.shell_command(), markup=False, highlight=False, soft_wrap=True)


def remote_server(
    host: str, engine: str | None, target: str, drafter: Path | None, k: int, settings: dict[str, Any]
) -> RemoteServer:
    """A server on another machine; the gate is asked there by hand (draftsmith check … ssh://host/path)."""
    from draftsmith.engine.remote import RemoteServer

    if engine is None:
        raise UserError(
            f"no engine named on {host}",
            "the managed engine is this machine's",
            "give --engine PATH of the vLLM environment there",
        )
    spec = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": k} if drafter else None
    return RemoteServer(host, engine, target, speculative=spec, **settings)


@dataclass(frozen=True)
class Wanted:
    """What shall be served. settings: further arguments of Server."""

    target: Path
    drafter: Path | None
    engine: str | None
    num_speculative_tokens: int
    settings: dict[str, Any] = field(default_factory=dict)

    def speculative(self) -> dict[str, Any] | None:
        if self.drafter is None:
            return None
        if not self.drafter.is_dir():
            raise UserError(f"no drafter at {self.drafter}", "", "give the exported folder")
        model = str(self.drafter.absolute())
        return {"method": "eagle3", "model": model, "num_speculative_tokens": self.num_speculative_tokens}

    def free_default(self, host: str) -> int | None:
        """8000 if nobody listens there, else None: then a free one is taken."""
        from draftsmith.engine.process import require_free

        try:
            return require_free(DEFAULT_PORT, host)
        except UserError:
            return None

    def require_gate(self, engine: Engine) -> None:
        """UserError with the failing checks if the gate says no."""
        from draftsmith.check.run import check_pair
        from draftsmith.check.types import Options

        options = Options(
            max_model_len=self.settings.get("max_model_len"),
            num_speculative_tokens=self.num_speculative_tokens,
            method="eagle3",
            dtype=self.settings.get("dtype", "bfloat16"),
            plugin=True,
        )
        verdict = check_pair(str(self.target), str(self.drafter), str(engine.site), options, None)
        bad = [r for r in verdict.checks if r.status == "fail"]
        if bad:
            raise UserError(
                f"the gate refuses {self.drafter}: " + "; ".join(f"{r.id}: {r.found}" for r in bad[:4]),
                "served all the same it would crash or accept nothing, and most engines do not say so",
                "; ".join(dict.fromkeys(r.fix for r in bad[:4] if r.fix)) or "draftsmith check shows all rows",
                Exit.NO,
            )


def wanted_of_recipe(path: Path, overrides: list[str], ui: Ui) -> Wanted:
    """The target and the exported drafter of a recipe's run; UserError if it has not exported one."""
    from draftsmith.cli.stages import parse_overrides
    from draftsmith.dialects.stage import exported_folder
    from draftsmith.engine.server import serve_section
    from draftsmith.pipeline import open_run
    from draftsmith.recipe import load_recipe
    from draftsmith.target.resolve import resolve_target

    recipe = load_recipe(path, parse_overrides(overrides))
    run = open_run(recipe, ui)
    run.output_hash("export")
    k = recipe.bench.num_speculative_tokens
    return Wanted(
        resolve_target(recipe.target), exported_folder(run), recipe.engine.path, k, serve_section(recipe.engine)
    )
