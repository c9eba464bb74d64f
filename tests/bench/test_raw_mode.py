"""A run of raw completions is benched with the prompts that capture asked: its server gets a template that adds nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest

sys.path.append(str(Path(__file__).parents[1] / "engine" / "server"))
from fake_vllm import make_engine

from draftsmith.bench import stage
from draftsmith.recipe import parse_recipe
from draftsmith.stage import Run
from draftsmith.ui import QuietUi


def opener(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    engine = make_engine(tmp_path)
    monkeypatch.setattr(stage, "find_engine", lambda path: engine)
    recipe = parse_recipe(
        {
            "target": {"model": "x"},
            "capture": {"prompts": ["sharegpt:4"], "mode": mode},
            "engine": {"args": ["--seed=1"]},
        },
        "r",
    )
    run = Run(recipe, tmp_path, QuietUi())
    return stage.make_opener(recipe, tmp_path, tmp_path, tmp_path, run)[0]


def test_the_template_says_what_capture_asked() -> None:
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    text = jinja2.Template(stage.RAW_TEMPLATE).render(messages=messages, bos_token="<bos>")
    assert text == "<bos>" + "\n\n".join(m["content"] for m in messages)


def test_only_a_raw_run_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = opener("raw", tmp_path / "a", monkeypatch).server["args"]
    assert raw == ["--seed=1", "--chat-template", stage.RAW_TEMPLATE]
    assert opener("chat", tmp_path / "b", monkeypatch).server["args"] == ["--seed=1"]
