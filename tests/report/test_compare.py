"""Runs side by side: each figure under its run, differences of recipes named, the page drawn from the same numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftsmith.cli.main import app
from draftsmith.errors import UserError
from draftsmith.record import write_json, write_record
from draftsmith.report.compare import compare, differences, render


def a_run(folder: Path, first: float, **recipe: object) -> Path:
    bench = {
        "tokens_per_target_step": 1 + first, "acceptance_length": 1 + first, "drafts": 1000, "lossless": True, "ties": 0,
        "acceptance_per_position": [first, 0.1], "interval": {"tokens_per_target_step": [1 + first - 0.05, 1 + first + 0.05]},
        "speedup": {"8": 1.1, "1": 1.3}, "tokens_per_second": {"none": {"8": 100.0}, "drafter": {"8": 110.0}},
        "sets": {"gsm8k": {"tokens_per_target_step": 1.7}}, "engine": {"name": "vllm", "version": "0.32.0"},
        "predicted": {"acceptance_per_position": [first + 0.01, 0.1]},
    }  # fmt: skip
    write_json(folder / "bench" / "bench.json", bench)
    write_json(folder / "recipe.json", {"name": folder.name, "train": {"lr": 0.001} | recipe})
    write_record(folder / "train", stage="train", key="k" * 64, inputs={}, config={}, result={"steps": 300}, started=0)
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [a_run(tmp_path / "a", 0.34), a_run(tmp_path / "b", 0.52, lr=0.002, seed=1)]


def row(found: dict[str, object], key: str) -> list[object]:
    return next(r["values"] for r in found["figures"] if r["key"] == key)  # type: ignore[attr-defined]


def test_figures_stand_under_their_runs(runs: list[Path]) -> None:
    found = compare(runs)
    assert found["runs"] == ["a", "b"]
    assert row(found, "tokens_per_target_step") == [1.34, 1.52]
    assert row(found, "acceptance_0") == [0.34, 0.52]
    assert row(found, "predicted_0") == pytest.approx([0.35, 0.53])
    assert row(found, "speedup_1") == [1.3, 1.3]
    assert row(found, "gsm8k.tokens_per_target_step") == [1.7, 1.7]
    assert row(found, "train.steps") == [300, 300]
    assert found["recipe"] == {"train.lr": [0.001, 0.002], "train.seed": [None, 1]}
    assert "no chance" in found["note"]


def test_overlapping_intervals_are_said(tmp_path: Path) -> None:
    assert "may be chance" in compare([a_run(tmp_path / "a", 0.34), a_run(tmp_path / "b", 0.38)])["note"]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    found = compare([a_run(tmp_path / "x" / "demo", 0.3), a_run(tmp_path / "y" / "demo", 0.4)])
    assert found["runs"] == ["x/demo", "y/demo"]


def test_nested_differences() -> None:
    found = differences([{"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, None])
    assert found == {"a.b": [1, 1, None], "a.c": [2, 3, None]}


def test_the_command_writes_the_page(runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    done = CliRunner().invoke(app, ["compare", *map(str, runs), "--out", str(page), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["runs"] == ["a", "b"]
    html = page.read_text()
    cells = re.search(r'data-row="acceptance_0">(.*?)</tr>', html, re.S)
    assert cells and re.findall(r"<td[^>]*>(.*?)</td>", cells[1]) == ["acceptance at position 0", "0.340", "0.520"]
    assert 'data-differs="train.lr"' in html
    body = re.sub(r"<script>.*?</script>", "", html, flags=re.S)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", body) and "default-src 'none'" in html


def test_names_cannot_script_the_page(runs: list[Path], tmp_path: Path) -> None:
    evil = runs[0].rename(tmp_path / "<img src=x onerror=alert(1)>")
    html = render(compare([evil, runs[1]]))
    assert "<img src=x" not in html and "&lt;img src=x" in html


@pytest.mark.parametrize("count", [0, 1])
def test_one_run_is_no_comparison(runs: list[Path], count: int) -> None:
    with pytest.raises(UserError, match="run given"):
        compare(runs[:count])


def test_a_folder_of_something_else(tmp_path: Path, runs: list[Path]) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="neither a run"):
        compare([runs[0], tmp_path / "other"])
