"""The stage of a run: a verdict beside the run, NO ends it, a second call skips it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from asked import engine
from mutant_case import good_case

from draftsmith.check.stage import STAGE
from draftsmith.errors import Exit, UserError
from draftsmith.recipe import parse_recipe
from draftsmith.record import write_record
from draftsmith.stage import Run, execute
from draftsmith.ui import QuietUi


def make_run(root: Path, **changes: Any) -> tuple[Run, QuietUi]:
    """A run whose export stage is done: the good tiny pair, with `changes` laid over the drafter's config."""
    case = good_case(root / "scratch", with_contract=False)
    case.c.update(changes)
    recipe = parse_recipe(
        {
            "name": "tiny", "out": str(root / "runs"), "target": {"model": str(root / "target")},
            "engine": {"path": engine("modern-v1"), "max_model_len": 256}, "capture": {"prompts": ["gsm8k_train:1"]},
        },
        "test",
    )  # fmt: skip
    ui = QuietUi()
    run = Run(recipe, Path(recipe.folder), ui)
    case.folder = "runs/tiny/export/tiny-eagle3"
    (root / "runs/tiny/export").mkdir(parents=True)
    case.write(root)
    write_record(
        run.stage_dir("export"), stage="export", key="k", inputs={}, config={}, result={"output_hash": "h"},
        started=time.time(),
    )  # fmt: skip
    return run, ui


def test_a_sound_pair_is_written_down_and_skipped_the_second_time(tmp_path: Path) -> None:
    run, ui = make_run(tmp_path)
    record = execute(STAGE, run)
    assert record["result"]["verdict"] == "yes"
    verdict = json.loads((run.stage_dir("check") / "verdict.json").read_text())
    rows = {r["id"]: r for r in verdict["checks"]}
    assert rows["pair.positions"]["found"].endswith("a served length of 256")
    assert rows["form.deep_values"]["status"] == "pass" and rows["runner.tokens"]["found"].startswith("3 draft")
    assert any("check: yes" in n for n in ui.notes)
    assert execute(STAGE, run)["skipped"]


def test_no_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, vocab_size=500)
    with pytest.raises(UserError) as caught:
        execute(STAGE, run)
    assert caught.value.code == Exit.NO and "pair.vocab" in caught.value.what and caught.value.fix
    assert json.loads((run.stage_dir("check") / "verdict.json").read_text())["verdict"] == "no"


def test_warnings_reach_the_user(tmp_path: Path) -> None:
    run, ui = make_run(tmp_path, tie_word_embeddings=True)
    execute(STAGE, run)
    assert any(w.startswith("form.tie") for w in ui.warnings)
