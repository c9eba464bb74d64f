"""Broken inputs for check: byte mutations of config.json and safetensors headers, and configs with any value anywhere."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from asked import facts
from mutant_case import Case, good_case

from draftsmith.check.run import check_pair
from draftsmith.errors import UserError

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, 1.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "8",
    "\u0000", [], [[]], [None], [1, 2, 3], [3, 2, 1], [10**30], ["a"], {}, {"a": 1}, {"rope_type": 3}, {"": None},
    {"rope_type": "yarn", "factor": "a"}, {"full_attention": 7}, {"quant_method": []}, [{"a": []}] * 3,
)  # fmt: skip
TOKENS = (
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"[]",
    b"{}",
    b'"',
    b"\\u0000",
    b"\xff",
    b"99999999999999999999",
    b"NaN",
    b",",
)


def write_good(root: Path) -> tuple[Path, Path]:
    case: Case = good_case(root / "scratch")
    return case.write(root)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every value in a document, containers included."""
    out = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for k, v in items:
        out += leaves(v, (*path, k))
    return out


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with one value replaced."""
    if not path:
        return new
    if isinstance(value, dict):
        return {k: replaced(v, path[1:], new) if k == path[0] else v for k, v in value.items()}
    return [replaced(v, path[1:], new) if i == path[0] else v for i, v in enumerate(value)]


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """A few random edits: flips, cuts, insertions, repeats, tokens."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + rng.choice((1, 2, 8, 200))]
        elif kind == 2:
            data[at:at] = rng.choice(TOKENS)
        elif kind == 3:
            data[at:at] = data[at : at + rng.choice((1, 10, 100))]
        elif kind == 4 and data:
            data[at % len(data)] = rng.randrange(256)
        else:
            end = at + rng.choice((1, 4, 20))
            data[at:end] = bytes(rng.randrange(32, 127) for _ in range(rng.choice((0, 3, 30))))
    return bytes(data)


def must_answer(target: Path, drafter: Path, kind: str = "modern-v1", limit: float = 1.0) -> str:
    """The verdict, or "bad input"; fails on anything but a verdict or a UserError, and beyond `limit` CPU seconds.
    (CPU, not wall: another process on the machine is not the input's fault.)"""
    started = time.process_time()
    try:
        verdict = check_pair(str(target), str(drafter), facts=facts(kind))
        json.dumps(verdict.to_json(), allow_nan=True)
        answer = verdict.verdict
    except UserError as e:
        assert e.what
        answer = "bad input"
    spent = time.process_time() - started
    assert spent < limit, f"took {spent:.2f} s"
    return answer
