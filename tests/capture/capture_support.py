"""What tests of capture share: a target without weights, prompt files, and a run against the stub server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stub_server import Change, StubServer

from draftsmith.capture.rows import Row, iter_rows
from draftsmith.capture.stage import STAGE
from draftsmith.recipe import parse_recipe
from draftsmith.stage import Run, execute
from draftsmith.ui import QuietUi

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 320,
}


def as_target(folder: Path) -> Path:
    """A tokenizer's folder with a config.json: all that capture from a server needs."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write_prompts(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    return path


def make_run(out: Path, target: Path, prompts: list[str], endpoints: list[str], **capture: Any) -> Run:
    recipe = parse_recipe(
        {
            "name": "t",
            "out": str(out / "runs"),
            "target": {"model": str(target)},
            "extract": {"self_check_rows": 0},  # the stub gives no prompt logprobs
            "capture": {"prompts": prompts, "held_out": [], "endpoints": endpoints, "concurrency": 4, **capture},
        },
        "test",
    )
    return Run(recipe, recipe.folder, QuietUi())


def capture(
    out: Path, target: Path, records: list[Any], change: Change | None = None, **section: Any
) -> tuple[list[Row], dict[str, Any], QuietUi]:
    """Rows, result and what was said of one capture of `records` from the stub."""
    prompts = write_prompts(out / "prompts.jsonl", records)
    with StubServer(target, change) as server:
        run = make_run(out, target, [str(prompts)], [server.url], **section)
        record = execute(STAGE, run)
    assert isinstance(run.ui, QuietUi)
    return list(iter_rows(run.stage_dir("capture"))), record["result"], run.ui
