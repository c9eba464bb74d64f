"""The recipe of a road that takes seconds: a tiny target, a stub server, a few short prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml


def write_recipe(folder: Path, target: Path, endpoint: str, prompts: int, **sections: dict[str, Any]) -> Path:
    """recipe.yaml of a run named "tiny" in `folder`. sections: keys of the recipe's sections that go over these."""
    asked = folder / "prompts.jsonl"
    asked.write_text("".join(json.dumps({"prompt": f"What is {i} plus {i * 7 % 11}?"}) + "\n" for i in range(prompts)))
    recipe: dict[str, Any] = {
        "target": {"model": str(target)},
        "capture": {"prompts": [str(asked)], "held_out": [], "endpoints": [endpoint], "samples": 2, "concurrency": 2},
        "vocab": {"size": 96, "min_coverage": 0},
        "extract": {"max_length": 128, "batch_tokens": 256},
        "train": {"ttt_steps": 2, "epochs": 2, "batch_tokens": 256, "eval_every": 4, "held_out_rows": 0.1},
    }
    merged = {name: keys | sections.get(name, {}) for name, keys in recipe.items()}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"name": "tiny", "out": str(folder), **merged}))
    return path
