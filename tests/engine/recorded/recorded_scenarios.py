"""What is asked of a real engine and, later, of its recording: the same calls through the project's own code."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from draftsmith.bench.adhoc import Asked, measure
from draftsmith.capture.rows import iter_rows
from draftsmith.capture.stage import STAGE
from draftsmith.engine.client import EngineClient
from draftsmith.engine.metrics import read_counters
from draftsmith.recipe import parse_recipe
from draftsmith.stage import Run, execute
from draftsmith.ui import QuietUi

NEW_TOKENS = 48
"""One from the prefill, then 12 full steps of 3 + 1, the last cut; or 47 steps of one."""
QUESTIONS = ("What is the sea?", "Name a colour.", "Count to three.", "Say good night.")


def exact(url: str, folder: Path) -> dict[str, Any]:
    """Of a pair with known acceptance: one answer with its counters, and a whole bench of the endpoint.
    {"token_ids", "drafts", "drafted", "accepted", "accepted_per_position", "bench": {…}}."""

    async def ask() -> dict[str, Any]:
        async with EngineClient(url) as client:
            before = read_counters(await client.metrics())
            answer = await client.complete([1, 7, 9, 11], max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
            await asyncio.sleep(0.5)
            counts = read_counters(await client.metrics()).since(before)
            return {
                "token_ids": answer.token_ids,
                "drafts": counts.drafts,
                "drafted": counts.drafted,
                "accepted": counts.accepted,
                "accepted_per_position": counts.accepted_per_position,
            }

    found = asyncio.run(ask())
    prompts = folder / "questions.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": q}) + "\n" for q in QUESTIONS))
    asked = Asked(
        prompts=[str(prompts)],
        ways=["drafter"],
        endpoint=url,
        concurrency=[2, 1],
        max_tokens=17,
        single_prompts=2,
        single_max_tokens=9,
    )
    bench = measure(asked, folder / "bench", QuietUi())
    keys = ("drafts", "acceptance_per_position", "acceptance_length", "tokens_per_target_step")
    return found | {"bench": {k: bench[k] for k in keys}, "speculative": bench["engine"]["speculative"]}


def captured(url: str, folder: Path, target: Path) -> dict[str, Any]:
    """The capture stage against the server: what its rows and self-check references hold, without times."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": q}) + "\n" for q in QUESTIONS))
    section = {
        "prompts": [str(prompts)],
        "held_out": [],
        "endpoints": [url],
        "concurrency": 2,
        "temperature": 0.0,
        "max_tokens": 20,
    }
    recipe = {"name": "r", "out": str(folder), "target": {"model": str(target)}, "capture": section}
    run = Run(parse_recipe(recipe, "test"), folder / "r", QuietUi())
    result = execute(STAGE, run)["result"]
    rows = sorted(iter_rows(run.stage_dir("capture")), key=lambda r: r.row_id)
    references = json.loads((run.stage_dir("capture") / "self_check.json").read_text())
    return {
        "rows": [[r.row_id, list(map(int, r.token_ids)), r.boundary, r.finish_reason] for r in rows],
        "count": result["rows"],
        "references": references,
    }
