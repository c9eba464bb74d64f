"""Every command that README and the guides show is run, and every output that they show is what comes out."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))
sys.path.insert(0, str(ROOT / "tests"))

from blocks import PAGES, blocks, comparable, walk  # noqa: E402

from docs_world import FIRST, MAKERS, make_world  # noqa: E402

SHELL = ("sh", "bash", "shell", "console")
HOW = ("fast", "engine", "by hand")


def check(page: str, world: Path, tier: str) -> int:
    """Walk a page; the number of blocks that were run."""
    count = 0
    for block, got, shown in walk(page, world, tier):
        count += 1
        if shown is not None:
            assert comparable(got) == comparable(shown), (
                f"{page} shows another output than this command gives (python docs/blocks.py --paste {page}):\n"
                f"{block.body}\n--- now ---\n{got}"
            )
    return count


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first guide, walked to its end; its outputs are compared on the way."""
    world = make_world(FIRST, tmp_path_factory.mktemp("first").resolve())
    assert check(FIRST, world, "fast") >= 4
    return world


@pytest.mark.parametrize("page", PAGES)
def test_every_command_says_how_it_is_run(page: str) -> None:
    for block in blocks(page):
        if block.language in SHELL:
            assert block.how in HOW, f"{page}: no `<!-- run: … -->` above\n{block.body}"
            assert block.how != "by hand" or len(block.more) > 20, (
                f"{page}: no reason why this is run by hand\n{block.body}"
            )
        assert block.language or page == "README.md", f"{page}: a block of no language\n{block.body}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_run_by_hand_are_commands(page: str) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "packaging"))
    from command_lines import parse

    for block in (b for b in blocks(page) if b.how == "by hand"):
        for line in block.commands.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" > ")[0])
            if "draftsmith.cli.main" in words:
                parse(words[words.index("draftsmith.cli.main") + 1 :])
            elif words and words[0].endswith("draftsmith"):
                parse(words[1:])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.how == "fast" for b in blocks(p))])
def test_commands_run_and_outputs_are_as_shown(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if page == FIRST:
        assert (request.getfixturevalue("finished") / "runs" / "mine" / "report" / "index.html").is_file()
        return
    done = None if page in MAKERS else request.getfixturevalue("finished")
    assert check(page, make_world(page, tmp_path.resolve(), done), "fast")


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.how == "engine" for b in blocks(p))])
def test_commands_run_with_a_real_engine(
    page: str, tmp_path: Path, finished: Path, real_engine: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.engine.find import managed_engines

    if os.environ.get("DRAFTSMITH_ENGINE") and not managed_engines():
        pytest.skip("an engine of your own is tested; the page installs the managed one")
    world = make_world(page, tmp_path.resolve(), finished) if page != FIRST else finished
    monkeypatch.setattr(
        "blocks.environment", lambda w: {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    )
    assert check(page, world, "engine")
