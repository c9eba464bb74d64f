"""Logs of real crashes of vLLM 0.32.0 (CPU), recorded and trimmed: the root error in each, and, where that release is
installed, its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.engine.trace_log import errors

LOGS = Path(__file__).with_name("logs")
EXPECTED: dict[str, dict[str, Any]] = json.loads((LOGS / "expected.json").read_text(encoding="utf-8"))


def test_every_recording_has_an_expectation() -> None:
    assert {p.stem for p in LOGS.glob("*.log")} == set(EXPECTED)
    assert len(EXPECTED) >= 10


@pytest.mark.parametrize("name", EXPECTED)
def test_the_root_error(name: str) -> None:
    found = errors((LOGS / f"{name}.log").read_text(encoding="utf-8"))[0]
    wanted = EXPECTED[name]
    assert found.type.rpartition(".")[2] == wanted["type"]
    assert wanted["says"] in found.message


@pytest.mark.parametrize("keep", [25, 60])
@pytest.mark.parametrize("name", EXPECTED)
def test_the_root_error_of_a_tail(name: str, keep: int) -> None:
    """The last lines alone: the root where it is among them, never a made-up one."""
    rows = (LOGS / f"{name}.log").read_text(encoding="utf-8").split("\n")[-keep:]
    wanted = EXPECTED[name]
    if any(wanted["says"] in row for row in rows):
        assert wanted["says"] in errors("\n".join(rows))[0].message


@pytest.mark.engine
@pytest.mark.parametrize("name", EXPECTED)
def test_the_line(name: str, real_engine: Any) -> None:
    from draftsmith.engine.reader import locate
    from draftsmith.engine.trace import explain
    from draftsmith.engine.trace_index import Index

    wanted = EXPECTED[name]
    if wanted.get("release", "0.32.0") != real_engine.version:
        pytest.skip(f"recorded with {wanted.get('release', '0.32.0')}")
    located = locate(real_engine.package.parent)
    found = explain((LOGS / f"{name}.log").read_text(encoding="utf-8"), Index(located.source, "vllm"))
    assert found is not None
    if wanted["place"] is None:
        assert found.place is None
        return
    assert found.place is not None
    assert f"{found.place.file}:{found.place.line}" == wanted["place"]
    assert found.place.function == wanted["function"]
