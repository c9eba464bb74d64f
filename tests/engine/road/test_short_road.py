"""The demo, short: SmolLM2 through every stage in the real engine, in a few minutes; figures are of no worth here,
that they are there and agree with each other is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

QUESTIONS = (
    "Write one sentence about the sea.", "What is 12 plus 30?", "Name three colours.", "Why do leaves fall in autumn?",
    "Give me a short recipe for soup.", "Who wrote Hamlet?", "Explain gravity to a child.", "Translate 'good night' to French.",
    "Write a haiku about rain.", "What is a prime number?", "List two uses of salt.", "How do birds fly?",
)  # fmt: skip


def run(recipe: Path) -> dict[str, Any]:
    """`draftsmith run --json` on the recipe; its parsed answer."""
    command = [sys.executable, "-m", "draftsmith.cli.main", "run", str(recipe), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.engine
@pytest.mark.ci
@pytest.mark.timeout(1800)
def test_every_stage_runs_in_the_real_engine(tmp_path: Path, real_engine: Any) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": q}) + "\n" for q in QUESTIONS))
    recipe = tmp_path / "short.yaml"
    plan = {
        "name": "short",
        "out": str(tmp_path),
        "target": {"model": "smollm2"},
        "engine": {"path": str(real_engine.python), "max_model_len": 512},
        "capture": {"prompts": [str(prompts)], "held_out": [], "max_tokens": 32, "concurrency": 12},
        "vocab": {"size": 512, "min_coverage": 0},
        "train": {"ttt_steps": 2, "epochs": 2, "batch_tokens": 512, "eval_every": 2, "held_out_rows": 0.2},
        "bench": {
            "sets": [f"{prompts}:4"],
            "ways": ["drafter", "none"],
            "concurrency": [4, 1],
            "max_tokens": 16,
            "single_prompts": 2,
            "single_max_tokens": 12,
            "num_speculative_tokens": 2,
        },
    }
    recipe.write_text(yaml.safe_dump(plan))
    rows = run(recipe)["stages"]
    assert [r["stage"] for r in rows] == ["capture", "vocab", "extract", "train", "export", "check", "bench", "report"]
    results = {r["stage"]: r["result"] for r in rows}
    assert results["capture"]["rows"] == len(QUESTIONS)
    assert results["check"]["verdict"] == "yes"
    bench = json.loads((tmp_path / "short" / "bench" / "bench.json").read_text())
    assert bench["drafts"] > 0 and len(bench["acceptance_per_position"]) == 2
    assert bench["acceptance_length"] == pytest.approx(1 + sum(bench["acceptance_per_position"]), abs=2e-3)
    assert bench["lossless"] is True, "greedy texts with and without the drafter differ"
    assert set(bench["tokens_per_second"]) >= {"drafter", "none"}
    assert "tokens per target step" in (tmp_path / "short" / "report" / "index.html").read_text()
    again = run(recipe)["stages"]
    assert all(r["status"] == "already done" for r in again if r["stage"] != "report")
