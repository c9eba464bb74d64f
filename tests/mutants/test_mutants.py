"""Every mutant is caught by the check that the table promises, with its status, and by nothing that the table does not
name; the good pair passes everything."""

from __future__ import annotations

import json
from pathlib import Path

import mutants_form
import mutants_pair  # noqa: F401 (registers)
import pytest
from asked import facts
from mutant_case import MUTANTS, Case, good_case

from draftsmith.check.catalog import CATALOG
from draftsmith.check.run import check_pair
from draftsmith.check.types import Verdict
from draftsmith.engine.reader import EngineFacts

TABLE = json.loads((Path(__file__).parent / "table.json").read_text())
NEEDS = {"config", "headers", "--deep", "contract", "captured rows", "launch options"}
NEVER_FAIL = {"runner.which", "gate.releases", "form.choice", "pair.mappable", "runner.default_ids"}
"""Checks that inform, or belong to --before-training (tests/check/test_before.py)."""
ELSEWHERE = {"engine.faults", "engine.dry_run"}
assert mutants_form


def verdict_of(case: Case, root: Path, asked: EngineFacts | None = None) -> Verdict:
    """asked: an engine that was read before, in place of the case's own kind."""
    target, drafter = case.write(root)
    rows = None
    if case.rows is not None:
        from draftsmith.capture.rows import Row, write_rows

        rows = root / "rows"
        write_rows(
            rows,
            [
                Row(
                    row_id=f"r{i}",
                    prompt_id="p",
                    sample=0,
                    turn=0,
                    source="s",
                    token_ids=ids,
                    boundary=3,
                    finish_reason="stop",
                    thinking="default",
                    temperature=0.7,
                    top_p=1.0,
                    server_model="m",
                    answer_text="",
                )
                for i, ids in enumerate(case.rows)
            ],
        )
    return check_pair(str(target), str(drafter), None, case.make_options(), rows, facts=asked or facts(case.engine))


def trouble(verdict: Verdict) -> dict[str, str]:
    return {r.id: r.status for r in verdict.checks if r.status in ("warn", "fail")}


@pytest.mark.parametrize("engine", ["modern-v1", "modern-v2", "old"])
@pytest.mark.parametrize("deep", [False, True])
def test_the_good_pair_passes_everything(tmp_path: Path, engine: str, deep: bool) -> None:
    case = good_case(tmp_path / "scratch")
    case.engine, case.options = engine, {"deep": deep, "num_speculative_tokens": 3}
    verdict = verdict_of(case, tmp_path)
    assert trouble(verdict) == {}
    assert verdict.verdict == "yes" and verdict.exit_code == 0


@pytest.mark.parametrize("name", sorted(TABLE))
def test_mutant(tmp_path: Path, name: str) -> None:
    promise = TABLE[name]
    case = good_case(tmp_path / "scratch")
    MUTANTS[name](case)
    verdict = verdict_of(case, tmp_path)
    found = trouble(verdict)
    assert found.pop(promise["check"], None) == promise["status"], found
    assert sorted(found) == promise["also"], "a check that the table does not name speaks up"
    row = next(r for r in verdict.checks if r.id == promise["check"])
    assert row.found and row.fix
    if promise["status"] == "fail":
        assert verdict.verdict == "no" and verdict.exit_code == 1


def test_what_a_check_needs_is_what_the_table_says(tmp_path: Path) -> None:
    """Without --deep, contract or rows, a mutant that needs them is not caught by that check (it is skipped)."""
    for name in ("embedding_random", "norm_output_lost", "answers_not_covered"):
        case = good_case(tmp_path / "scratch")
        MUTANTS[name](case)
        case.options, case.contract, case.rows = {}, None, None
        found = verdict_of(case, tmp_path / name)
        assert next(r.status for r in found.checks if r.id == TABLE[name]["check"]) == "skip", name


def test_table_and_mutants_agree() -> None:
    assert set(TABLE) == set(MUTANTS)
    assert len(TABLE) >= 45
    assert {p["needs"] for p in TABLE.values()} <= NEEDS
    assert {p["check"] for p in TABLE.values()} <= set(CATALOG)


def test_every_check_has_a_mutant() -> None:
    assert {p["check"] for p in TABLE.values()} | NEVER_FAIL | ELSEWHERE == set(CATALOG)
