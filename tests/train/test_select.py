"""`train.select: engine`: the checkpoint that the engine accepts most of is kept, whatever replay thought of it."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
import yaml

from draftsmith.bench import choose
from draftsmith.bench.ways import Opened
from draftsmith.capture.prompts import load_prompts
from draftsmith.capture.rows import iter_rows, write_rows
from draftsmith.capture.sources import open_source
from draftsmith.capture.stage import rules_of
from draftsmith.dialects import native
from draftsmith.engine.client import EngineClient
from draftsmith.errors import UserError
from draftsmith.pipeline import open_run
from draftsmith.recipe import load_recipe
from draftsmith.record import folder_hash
from draftsmith.stage import execute
from draftsmith.train.candidates import KEPT, candidates
from draftsmith.train.stage import STAGE, train_on
from draftsmith.ui import QuietUi

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from fake_endpoint import FakeEndpoint

ENGINE = {"name": "fake", "version": "1"}


def answer_prompts(run, prompts):
    """The captured rows again, as answers to these prompts."""
    folder = run.stage_dir("capture")
    rows = list(iter_rows(folder))
    for part in folder.rglob("*"):
        if part.name == "ledger.jsonl" or part.suffix == ".parquet":
            part.unlink()
    renamed = [type(r)(**(r.__dict__ | {"prompt_id": p.prompt_id})) for r, p in zip(rows, prompts, strict=True)]
    write_rows(folder, renamed)
    return renamed


@pytest.fixture
def run(recipe, monkeypatch):
    """The run of `recipe` with prompts that can be asked, measured by the reference engine."""
    monkeypatch.setattr(choose, "PROMPTS", 2)
    monkeypatch.setattr(choose, "TOKENS", 5)
    questions = recipe.parent / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"What is {i}?"}) + "\n" for i in range(16)))
    plan = yaml.safe_load(recipe.read_text())
    plan["capture"]["prompts"] = [str(questions)]
    plan["engine"] = {"path": "reference"}
    plan["train"] |= {"steps": 8, "select": "engine"}
    recipe.write_text(yaml.safe_dump(plan))
    found = open_run(load_recipe(recipe), QuietUi())
    prompts = load_prompts(str(questions))
    answer_prompts(found, prompts)
    return found


def test_the_stage_asks_the_engine(run):
    result = execute(STAGE, run)["result"]
    folder = run.stage_dir("train")
    assert result["selected_by"].startswith("reference")
    assert len(result["candidates"]) == KEPT and all(c["drafts"] > 0 for c in result["candidates"])
    assert result["output_hash"] == folder_hash(folder / "best")
    assert not (folder / "candidates").exists() and (folder / "selected.json").exists()
    assert execute(STAGE, run)["skipped"]


class Fakes:
    """Openers over fake servers, one for each candidate in the order in which they are asked; `dies`: at that one."""

    def __init__(self, servers, dies=None):
        self.servers, self.dies, self.opened = servers, dies, []

    def __call__(self, drafter, folder):
        @contextlib.contextmanager
        def opener(way):
            step = drafter.parent.name
            if len(self.opened) == self.dies:
                raise KeyboardInterrupt
            self.opened.append(step)
            yield Opened(lambda: EngineClient(self.servers[len(self.opened) - 1].url), {})

        return opener, ENGINE


def test_the_engines_choice_is_kept_and_a_kill_costs_nothing(run):
    folder = run.stage_dir("train")
    folder.mkdir(parents=True)
    train_on(run, folder)
    kept = candidates(folder)
    assert len(kept) == KEPT and (kept[0] / "offline.json").exists()
    third = folder_hash(kept[2], ["model.safetensors", "drafter.json", "contract.json"])
    quick = {"ttft": 0.0, "itl": 0.0}
    with FakeEndpoint([1], **quick) as a, FakeEndpoint([0, 1], **quick) as b, FakeEndpoint([3], **quick) as c:
        first = Fakes([a, b, c], dies=2)
        with pytest.raises(KeyboardInterrupt):
            choose.choose_by_engine(run, folder, first)
        second = Fakes([c])
        found = choose.choose_by_engine(run, folder, second)
    assert first.opened == [kept[0].name, kept[1].name] and second.opened == [kept[2].name]
    assert f"step-{found['selected_step']:06d}" == kept[2].name
    lengths = [r["acceptance_length"] for r in found["candidates"]]
    assert lengths[1] < lengths[0] < lengths[2]
    assert folder_hash(folder / "best", ["model.safetensors", "drafter.json", "contract.json"]) == third
    assert native.read(folder / "best").contract.ttt_steps == 2
    assert choose.choose_by_engine(run, folder, Fakes([])) == found, "what was chosen stays chosen"


def test_without_its_prompts_it_says_so(run):
    folder = run.stage_dir("train")
    folder.mkdir(parents=True)
    train_on(run, folder)
    Path(run.recipe.capture.prompts[0]).write_text('{"prompt": "Something else"}\n')
    with pytest.raises(UserError, match="held-out rows' prompts"):
        choose.choose_by_engine(run, folder, Fakes([]))
    with pytest.raises(UserError, match="held-out rows' prompts"):
        train_on(run, run.stage_dir("again"))  # said before the training, not after it
    assert not (run.stage_dir("again") / "metrics.jsonl").exists()


def test_prompts_that_capture_drew_are_found_again(run):
    """COUNT takes a draw by the seed, not the first ones; a system prompt is part of what was asked."""
    capture = run.recipe.capture
    path = Path(capture.prompts[0])
    path.write_text("".join(json.dumps({"prompt": f"What is {i}?"}) + "\n" for i in range(40)))
    capture.__dict__ |= {"prompts": [f"{path}:16"], "system": "Be brief."}
    drawn = list(open_source(str(path)).prompts(rules_of(capture)))[-16:]
    renamed = answer_prompts(run, drawn)
    found = choose.held_out_prompts(run, {renamed[3].row_id, renamed[9].row_id})
    assert [p.prompt_id for p in found] == [drawn[3].prompt_id, drawn[9].prompt_id]
    assert found[0].messages[0] == {"role": "system", "content": "Be brief."}
