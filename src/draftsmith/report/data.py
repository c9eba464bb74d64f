"""Gathers what a run left behind into one plain dict, from its files alone; a stage that did not run is absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.recipe import STAGES
from draftsmith.record import RECORD, read_json, read_record

DEFINITIONS = {
    "acceptance at position i": "drafted tokens accepted at position i, divided by the number of drafts (unconditional, as vLLM counts)",
    "conditional acceptance": "accepted at position i, divided by the drafts whose earlier positions were all accepted",
    "acceptance length": "1 + accepted tokens / drafts",
    "tokens per target step": "generated tokens / (generated tokens − accepted tokens): comparable between methods that draft at "
    "different times",
    "lossless": "greedy texts with and without the drafter, one request at a time, are equal; a first difference whose two top logits "
    "lie within two bf16 steps is a tie",
}


def read_optional(path: Path) -> Any:
    """A JSON file's content, or None where it is missing or broken."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a log; a cut last line (a killed run) is left out."""
    if not path.exists():
        return []
    out = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            out.append(json.loads(line))
        except ValueError:
            continue
    return out


def gather(run_folder: Path) -> dict[str, Any]:
    """Everything the page shows: records, curves, bench, verdict, contract, forecast."""
    records = {s: r for s in STAGES if s != "report" and (r := read_record(run_folder / s))}
    exported = records.get("export", {}).get("result", {}).get("folder")
    contract = None
    for place in ([Path(exported)] if exported else []) + [
        run_folder / s for s in ("export", "train", "extract", "capture")
    ]:
        contract = contract or read_optional(place / "contract.json")
    metrics = read_lines(run_folder / "train" / "metrics.jsonl")
    bench = read_optional(run_folder / "bench" / "bench.json")
    return {
        "name": run_folder.name,
        "recipe": read_optional(run_folder / "recipe.json"),
        "records": records,
        "metrics": metrics,
        "bench": bench,
        "samples": read_optional(run_folder / "bench" / "samples.json") or (bench or {}).get("samples") or [],
        "verdict": read_optional(run_folder / "check" / "verdict.json"),
        "diagnosis": read_optional(run_folder / "diagnose" / "diagnosis.json"),
        "contract": contract,
        "record_file": RECORD,
    }
