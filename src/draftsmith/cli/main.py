"""`draftsmith`: gathers the commands, renders UserError as one block, and keeps start-up light.

A command is a module here with `def register(app: typer.Typer) -> None`. Modules import what they need inside the
command function, so that `draftsmith check` answers without loading torch. `main` registers the command that is asked
for and no other (an eighth of a second, of the one that a check takes); `app` has them all.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from draftsmith import __version__, cli
from draftsmith.cli.common import console, error_console
from draftsmith.errors import UserError

ORDER = (
    "demo",
    "recipe",
    "run",
    "capture",
    "vocab",
    "extract",
    "train",
    "export",
    "check",
    "serve",
    "bench",
    "report",
    "diagnose",
    "parity",
    "engine",
    "target",
    "releases",
    "explain",
    "remedy",
    "plan",
    "convert",
    "states",
    "watch",
    "compare",
    "publish",
)
"""The order of `draftsmith --help`: the road first, then the tools beside it."""

GOES_ON = ("demo", "run", "capture", "vocab", "extract", "train", "export", "bench", "report", "engine", "states")
"""Commands that, stopped and given again, go on where they were."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

REFUSED = {
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "it is a folder, not a file",
    errno.ENAMETOOLONG: "the name is too long",
}
"""What the system says of a path that the user gave: answered as wrong input, without a traceback."""


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


class _Root(TyperGroup):
    """Lists its commands in ORDER, whichever modules they come from; ends on Ctrl-C with 130, as older typers do not.
    (Contexts are Any: newer typers carry a click of their own.)"""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=_rank)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None


def stopped() -> NoReturn:
    """Say whether the command that was interrupted can be given again, and end with 130."""
    resumes = len(sys.argv) > 1 and sys.argv[1] in GOES_ON
    error_console.print("stopped; the same command goes on from here" if resumes else "stopped", markup=False)
    raise SystemExit(INTERRUPTED)


@cache
def build(asked: str = "") -> typer.Typer:
    """The command line; with the command `asked` alone where it has a module of that name."""
    made = typer.Typer(
        name="draftsmith",
        cls=_Root,
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
    except SystemExit as e:
        if e.code != INTERRUPTED:
            raise
        stopped()  # typer ends on Ctrl-C without a word
    except KeyboardInterrupt:
        stopped()
    except OSError as e:
        found = of_the_system(e)
        if found is None:
            raise
        show_error(found, "--json" in sys.argv)
        raise SystemExit(int(found.code)) from None


def of_the_system(e: OSError) -> UserError | None:
    """What the user can put right of an error of the system; None: it is none of theirs."""
    if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(
            f"the disk is full: {e}",
            "nothing that was finished is lost",
            "make room and run the same command again; it goes on from here",
        )
    if e.errno in REFUSED and e.filename is not None:
        path = Path(os.fsdecode(e.filename))
        if path.name.startswith("."):  # a name of our own, for what is not whole yet
            path = path.resolve().parent
        return UserError(
            f"{path}: {REFUSED[e.errno]}",
            "it has to be read or written here",
            "give another path, or put its permissions right",
        )
    return None


if __name__ == "__main__":
    main()
