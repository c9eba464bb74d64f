"""Which server flags an installed vLLM knows, read from its source; and our wishes said in its words.

Flags come and go between releases (`--disable-log-requests` became `--enable-log-requests`), and an unknown one ends
the server at once. They are written as literals in engine/arg_utils.py and, for the front end, as dataclass fields.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

SOURCES = ("engine/arg_utils.py", "entrypoints/openai/cli_args.py", "entrypoints/launchers/cli_args.py")
_LITERAL = re.compile(r"""["'](--[a-z0-9][a-z0-9-]*)["']""")


def _fields(source: str) -> set[str]:
    """Dataclass fields of the front-end classes as flags."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    found.add("--" + item.target.id.replace("_", "-"))
    return found


def flags_in(sources: Mapping[str, str]) -> frozenset[str]:
    """All `--flags` in the texts of SOURCES (name → text)."""
    found: set[str] = set()
    for name, text in sources.items():
        found |= set(_LITERAL.findall(text))
        if name.endswith("cli_args.py"):
            found |= _fields(text)
    return frozenset(found)


@lru_cache(maxsize=8)
def known_flags(package: Path) -> frozenset[str]:
    """All `--flags` of the server in the vLLM package folder `package`; empty where its source is laid out in a way
    that we do not know (then nothing optional is passed)."""
    return flags_in({n: (package / n).read_text(encoding="utf-8") for n in SOURCES if (package / n).is_file()})


def wish(known: Iterable[str], *alternatives: list[str]) -> list[str]:
    """The first alternative whose flag the release knows, [] if none. `--no-x` counts as known where `--x` is."""
    names = set(known)
    for words in alternatives:
        flag = words[0]
        if flag in names or (flag.startswith("--no-") and "--" + flag.removeprefix("--no-") in names):
            return words
    return []
