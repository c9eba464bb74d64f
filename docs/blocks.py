"""The commands that README and docs show: found, run and their output pasted. `python docs/blocks.py --paste [PAGE…]`.

Above each block of commands stands how it is run:

    <!-- run: fast -->             in the fast tests, in a small world made for the page (tests/docs_world.py)
    <!-- run: fast, exit 1 -->     … and ends with that exit code (exit 0 or 1: with either)
    <!-- run: engine -->           in the tests with a real vLLM
    <!-- run: by hand, REASON -->  needs hardware, a network or an hour; the reason says what, and where it was run

and above a file that the reader writes:

    <!-- file: mine.yaml -->                         written as it is shown
    <!-- file: mine.yaml, with vocab.size=96 -->     … with these values laid over it, for the small world

A block of `text` right below a block that is run holds its output; `--paste` renews it and a test compares it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "docs/index.md",
    *sorted(f"docs/guides/{p.name}" for p in (ROOT / "docs" / "guides").glob("*.md")),
)
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n+)?^(?P<indent> *)```(?P<lang>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```\n",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """One fenced block. how: "fast", "engine", "by hand", "file" or "" (none given); more: what follows it."""

    page: str
    number: int
    language: str
    how: str
    more: str
    body: str
    start: int
    end: int

    @property
    def exit_codes(self) -> tuple[int, ...]:
        """The exit codes that are right: 0 unless told."""
        found = re.search(r"exit (\d+)(?: or (\d+))?", self.more)
        return tuple(int(n) for n in found.groups() if n) if found else (0,)

    @property
    def commands(self) -> str:
        """The lines without trailing comments."""
        return "".join(re.sub(r"\s{2,}#.*$", "", line) + "\n" for line in self.body.splitlines())


def blocks(page: str) -> list[Block]:
    """Every fenced block of a page of the repository, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for n, m in enumerate(_BLOCK.finditer(text)):
        how, _, more = (m["mark"] or "").partition(", ")
        how = how.removeprefix("run: ").strip()
        if how.startswith("file: "):
            how, more = "file", how.removeprefix("file: ") + (f", {more}" if more else "")
        found.append(Block(page, n, m["lang"], how, more, m["body"], m.start("body"), m.end("body")))
    return found


def output_of(page: list[Block], block: Block) -> Block | None:
    """The block of text that holds a command block's output, if one follows it."""
    after = page[block.number + 1] if block.number + 1 < len(page) else None
    text = (ROOT / block.page).read_text(encoding="utf-8")
    if after is None or after.language != "text" or after.how:
        return None
    between = text[block.end : after.start]
    return after if re.fullmatch(r" *```\n\s*```text\n", between) else None


def write_file(block: Block, world: Path) -> None:
    """Write a block that is a file, with the values that are laid over it."""
    import yaml

    name, _, over = block.more.partition(", with ")
    path = world / name.strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not over:
        path.write_text(block.body, encoding="utf-8")
        return
    raw: dict[str, Any] = yaml.safe_load(block.body)
    for pair in over.split("; "):
        dotted, _, value = pair.strip().partition("=")
        *parents, leaf = dotted.split(".")
        node = raw
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = yaml.safe_load(value)
    path.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")


def environment(world: Path) -> dict[str, str]:
    """What commands of the docs run with: draftsmith of this checkout first on the path, plain output, no colours."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("DRAFTSMITH_", "HF_")) or k == "DRAFTSMITH_ENGINE"}
    more = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "DRAFTSMITH_HOME": str(world / ".home"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    if (world / "vllm-env").is_dir():
        more["DRAFTSMITH_ENGINE"] = str(world / "vllm-env")
    return keep | more


def run(block: Block, world: Path, timeout: float = 600.0) -> str:
    """Run a block's commands in `world` as one shell script; its standard output. AssertionError on another exit code."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.commands],
        cwd=world, env=environment(world), capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode in block.exit_codes, (
        f"{block.page}: exit code {done.returncode}, not {block.exit_codes}, of\n{block.body}\n{done.stdout}\n{done.stderr}"
    )
    return plain(done.stdout, world)


_CHANGING = (
    (re.compile(r"\b\d+(?:\.\d+)? ?(?:s|seconds|ms)\b"), "… s"),
    (re.compile(r"\b[0-9a-f]{12,64}\b"), "…"),
    (re.compile(r" \(does not fit\)"), ""),  # the machine's own memory
    (re.compile(r"\b20\d\d-\d\d-\d\d(?:T[\d:]+Z?)?\b"), "…"),
)
"""What may differ between two runs: times, hashes, dates."""


def plain(text: str, world: Path) -> str:
    """Output as it is pasted: the world's folder is not shown, nor are trailing blanks."""
    text = text.replace(str(world.resolve()) + "/", "").replace(str(world) + "/", "")
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"


def comparable(text: str) -> str:
    """Output with all that changes from run to run left out; a table's lines are as long as its longest word."""
    for pattern, sign in _CHANGING:
        text = pattern.sub(sign, text)
    text = re.sub(r"[─━═]+", "─", text)
    return re.sub(r"[ \t]+", " ", text).strip()


def cut(new: str, shown: str) -> str:
    """`new` cut as `shown` was: from a line `…` on only its last lines are kept."""
    lines = shown.splitlines()
    if "…" not in lines:
        return new
    at, fresh = lines.index("…"), new.splitlines()
    head, tail = fresh[:at], fresh[len(fresh) - (len(lines) - at - 1) :] if lines[at + 1 :] else []
    return "\n".join([*head, "…", *tail]) + "\n"


def walk(page: str, world: Path, tier: str) -> Iterator[tuple[Block, str, str | None]]:
    """Run a page's blocks of one tier in order; yields block, output and the output that the page shows."""
    found = blocks(page)
    for block in found:
        if block.how == "file":
            write_file(block, world)
        elif block.how == tier:
            shown = output_of(found, block)
            got = run(block, world)
            yield block, cut(got, shown.body) if shown else got, shown.body if shown else None


def paste(pages: list[str]) -> None:
    """Renew the outputs that the pages show."""
    import tempfile

    sys.path.insert(0, str(ROOT / "tests"))
    from docs_world import make_world

    for page in pages:
        with tempfile.TemporaryDirectory() as tmp:
            world = make_world(page, Path(tmp).resolve())
            for block, got, shown in list(walk(page, world, "fast")):
                now = blocks(page)  # what was pasted above has moved what is below
                after = output_of(now, now[block.number])
                if after is not None and shown is not None and comparable(got) != comparable(shown):
                    text = (ROOT / page).read_text(encoding="utf-8")
                    (ROOT / page).write_text(text[: after.start] + got + text[after.end :], encoding="utf-8")
                    print(f"{page}: renewed the output of block {block.number}")


if __name__ == "__main__":
    names = [a for a in sys.argv[1:] if a != "--paste"]
    if "--paste" not in sys.argv:
        raise SystemExit(__doc__)
    paste(names or list(PAGES))
