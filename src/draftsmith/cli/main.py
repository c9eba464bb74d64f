"""`draftsmith`: gathers the commands, renders UserError as one block, and keeps start-up light.

A command is a module here with `def register(app: typer.Typer) -> None`. Modules import what they need inside the
command function, so that `draftsmith check` answers without loading torch. `main` registers the command that is asked
for and no other (an eighth of a second, of the one that a check takes); `app` has them all.
"""

from __future__ import annotations

import errno
import json
import sys
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import typer

from draftsmith import __version__, cli
from draftsmith.cli.common import console, error_console
from draftsmith.errors import Exit, UserError

ORDER = (
    "demo",
    "run",
    "capture",
    "vocab",
    "extract",
    "train",
    "export",
    "check",
    "serve",
    "bench",
    "diagnose",
    "parity",
    "report",
    "engine",
    "target",
    "explain",
    "remedy",
    "releases",
    "convert",
    "plan",
    "states",
    "watch",
    "compare",
    "publish",
)
"""The order of `draftsmith --help`: the road first, then the tools beside it."""


def _version(value: bool) -> None:
    if value:
        console.print(f"draftsmith {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def _rank(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)


@cache
def build(asked: str = "") -> typer.Typer:
    """The command line; with the command `asked` alone where it has a module of that name."""
    made = typer.Typer(
        name="draftsmith",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="Make an EAGLE-3 draft model for a language model and prove that it works in the engine that will serve it.",
    )
    made.callback()(_root)
    names = sorted((m.name for m in iter_modules(cli.__path__) if m.name not in ("main", "common")), key=_rank)
    for name in [asked] if asked in names else names:
        import_module(f"draftsmith.cli.{name}").register(made)
    return made


def __getattr__(name: str) -> typer.Typer:
    if name == "app":
        return build()
    raise AttributeError(name)


def show_error(e: UserError, as_json: bool) -> None:
    """The one block that a user sees: what, why, fix."""
    if as_json:
        sys.stdout.write(json.dumps({"error": e.as_dict()}) + "\n")
        return
    error_console.print(f"error: {e.what}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    if e.why:
        error_console.print(f"  why: {e.why}", markup=False, highlight=False, soft_wrap=True)
    if e.fix:
        error_console.print(f"  fix: {e.fix}", markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point: runs the app, turns UserError into its block and exit code."""
    try:
        build(sys.argv[1] if len(sys.argv) > 1 else "")(standalone_mode=True)
    except UserError as e:
        show_error(e, "--json" in sys.argv)
        raise SystemExit(int(e.code)) from None
    except KeyboardInterrupt:
        error_console.print("stopped; the same command goes on from here", markup=False)
        raise SystemExit(130) from None
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            show_error(
                UserError(
                    f"the disk is full: {e}",
                    "nothing that was finished is lost",
                    "make room and run the same command again; it goes on from here",
                    Exit.BAD_INPUT,
                ),
                "--json" in sys.argv,
            )
            raise SystemExit(int(Exit.BAD_INPUT)) from None
        raise


if __name__ == "__main__":
    main()
