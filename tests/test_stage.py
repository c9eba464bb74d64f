"""Stages: skipped when done, resumed when killed, re-made when an input changed."""

import pytest

from draftsmith.errors import UserError
from draftsmith.recipe import parse_recipe
from draftsmith.stage import Run, Stage, execute
from draftsmith.ui import QuietUi


class Killed(BaseException):
    pass


@pytest.fixture
def run(tmp_path):
    return Run(parse_recipe({"target": {"model": "m"}, "capture": {"prompts": ["p"]}}, "r"), tmp_path, QuietUi())


def counting(calls, inputs=lambda run: {"x": "1"}, resumable=True, kill_at=None):
    def work(run, folder):
        found = sorted(p.name for p in folder.iterdir() if p.name.startswith("part"))
        calls.append(found)
        (folder / f"part{len(calls)}").write_text("x")
        if kill_at == len(calls):
            raise Killed
        return {"n": len(calls), "output_hash": "h"}

    return Stage("vocab", ("vocab",), inputs, work, resumable)


def test_second_run_skips(run):
    calls = []
    stage = counting(calls)
    assert execute(stage, run)["result"]["n"] == 1
    assert execute(stage, run)["skipped"] and len(calls) == 1
    assert execute(stage, run, force=True)["result"]["n"] == 2


def test_killed_stage_finds_its_leftovers(run):
    calls = []
    stage = counting(calls, kill_at=1)
    with pytest.raises(Killed):
        execute(stage, run)
    with pytest.raises(UserError, match="has not been run"):
        run.output_hash("vocab")
    assert "skipped" not in execute(stage, run)
    assert calls == [[], ["part1"]]


def test_changed_input_empties_the_folder(run):
    calls = []
    value = {"x": "1"}
    stage = counting(calls, inputs=lambda run: dict(value))
    execute(stage, run)
    value["x"] = "2"
    execute(stage, run)
    assert calls == [[], []]


def test_killed_under_other_inputs_does_not_mix(run):
    calls = []
    value = {"x": "1"}
    stage = counting(calls, inputs=lambda run: dict(value), kill_at=1)
    with pytest.raises(Killed):
        execute(stage, run)
    value["x"] = "2"
    execute(stage, run)
    assert calls == [[], []]


def test_unresumable_stage_starts_empty(run):
    calls = []
    stage = counting(calls, resumable=False, kill_at=1)
    with pytest.raises(Killed):
        execute(stage, run)
    execute(stage, run)
    assert calls == [[], []]


def test_recipe_section_is_part_of_the_key(run):
    calls = []
    stage = counting(calls)
    execute(stage, run)
    run.recipe.vocab.size = 100
    assert "skipped" not in execute(stage, run)
