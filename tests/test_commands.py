"""What a newcomer meets first: the list of commands, recipes to start from, and short words where something is wrong."""

from __future__ import annotations

import errno
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from draftsmith.check.inputs import model_folder
from draftsmith.cli.main import ORDER, build, main, of_the_system
from draftsmith.errors import UserError
from draftsmith.recipe import TargetSection, parse_recipe
from draftsmith.recipe_keys import sections
from draftsmith.target.loading import bars_for_people_only
from draftsmith.target.resolve import resolve_target

ROOT = Path(__file__).parent.parent


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run the command line in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["draftsmith", *words])
    build.cache_clear()
    with pytest.raises(SystemExit) as e:
        main()
    return e.value.code if isinstance(e.value.code, int) else 0


def listed(columns: int = 80) -> dict[str, str]:
    """Name and line of every command, as `draftsmith --help` shows them on a terminal of so many columns."""
    build.cache_clear()
    command = get_command(build())
    context = command.context_class(command, info_name="draftsmith", terminal_width=columns, max_content_width=columns)
    lines = command.get_help(context).partition("Commands:\n")[2].splitlines()
    return {m[1]: m[2] for line in lines if (m := re.match(r"  (\S+) +(.*)$", line))}


def test_help_lists_every_command_in_order_and_whole() -> None:
    found = listed()
    assert tuple(found) == ORDER
    cut = {name: line for name, line in found.items() if line.endswith("...") or not line.endswith((".", "?"))}
    assert not cut


def test_readme_names_every_command() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The road")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)", table))
    assert set(ORDER) <= named


@pytest.mark.parametrize("name", ["demo", "quick", "first", "gemma3"])
def test_a_recipe_to_start_from(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "recipe", name) == 0
    assert parse_recipe(yaml.safe_load(capsys.readouterr().out), name).name == name


def test_a_recipe_that_there_is_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "recipe", "qick") == 2
    assert "did you mean 'quick'" in capsys.readouterr().err


def test_every_key_of_a_recipe_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not [f"{s.name}.{k.name}" for s in sections() for k in s.keys if len(k.meaning) < 8]
    assert not [s.name for s in sections() if not s.about]
    assert call(monkeypatch, "recipe", "--keys", "--json") == 0
    shown = {s["section"]: {k["name"]: k for k in s["keys"]} for s in json.loads(capsys.readouterr().out)}
    assert shown["train"]["dtype"]["type"] == "float32 or bfloat16 or null"
    assert shown["train"]["from"]["default"] == "null"
    assert shown["capture"]["temperatures"]["type"] == "list[float]"
    assert shown["target"]["model"]["default"] == "required"
    assert call(monkeypatch, "recipe", "--keys") == 0
    assert "  ttt_steps" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "says"), [("run", "stopped; the same command goes on"), ("recipe", "stopped\n")])
def test_ctrl_c_says_what_it_left(
    command: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftsmith.recipe.load_recipe", interrupted)
    monkeypatch.setattr("draftsmith.recipe_keys.shipped", interrupted)
    assert call(monkeypatch, command, "demo") == 130
    assert says in capsys.readouterr().err


def test_ctrl_c_before_the_command_is_reached(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftsmith.cli.main._Root.make_context", interrupted)
    assert call(monkeypatch, "recipe") == 130
    assert "stopped\n" in capsys.readouterr().err


def test_what_the_system_refuses_is_one_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "runs"))

    monkeypatch.setattr("draftsmith.recipe_keys.shipped", refused)
    assert call(monkeypatch, "recipe", "demo") == 2
    said = capsys.readouterr().err
    assert f"error: {tmp_path}/runs: permission denied" in said and "fix:" in said
    assert of_the_system(OSError(errno.EIO, "i/o", "x")) is None
    own = of_the_system(PermissionError(errno.EACCES, "Permission denied", str(tmp_path / ".conv.part")))
    assert own is not None and own.what == f"{tmp_path}: permission denied"
    full = of_the_system(OSError(errno.ENOSPC, "No space left"))
    assert full is not None and "disk is full" in full.what


def test_a_relative_target_says_from_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as e:
        resolve_target(TargetSection(model="my-model"))
    assert str(tmp_path) in e.value.why


def test_the_demos_target_is_known_by_name_wherever_a_target_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    monkeypatch.setattr("draftsmith.target.smollm2.smollm2_folder", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    assert model_folder("smollm2", "target") == tmp_path
    assert call(monkeypatch, "releases", "smollm2") == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("convert", "a", "b", "--to", "sglnag"), "did you mean 'sglang'"),
        (("parity",), "give --run"),
        (("run", "no.yaml"), "draftsmith recipe"),
    ],
)
def test_what_is_missing_is_told_first(
    words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("people", [True, False])
def test_bars_of_loading_are_for_people(people: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import logging

    was = logging.is_progress_bar_enabled()
    monkeypatch.setattr("sys.stderr.isatty", lambda: people, raising=False)
    try:
        logging.enable_progress_bar()
        bars_for_people_only()
        assert logging.is_progress_bar_enabled() is people
    finally:
        (logging.enable_progress_bar if was else logging.disable_progress_bar)()
