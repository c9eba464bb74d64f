"""--dry-run against the real engine: its own config creation agrees with the static checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mutant_case import Case, good_case

from draftsmith.check.run import check_pair
from draftsmith.check.types import CheckRow

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def dry(root: Path, engine: Any, change: Any = None) -> dict[str, CheckRow]:
    case: Case = good_case(root / "scratch", with_contract=False)
    if change:
        change(case)
    target, drafter = case.write(root)
    verdict = check_pair(str(target), str(drafter), str(engine.site), case.make_options(), dry_run=True)
    return {r.id: r for r in verdict.checks}


def test_the_engine_takes_the_good_config(tmp_path: Path, real_engine: Any) -> None:
    rows = dry(tmp_path, real_engine)
    assert rows["engine.dry_run"].status == "pass", rows["engine.dry_run"].found
    assert "eagle3" in rows["engine.dry_run"].found


def test_the_engine_refuses_what_the_checks_refuse(tmp_path: Path, real_engine: Any) -> None:
    rows = dry(tmp_path, real_engine, lambda c: c.c.update(architectures=["MiniCPMForCausalLMEagle3"]))
    assert rows["engine.dry_run"].status == rows["form.architecture"].status == "fail"
    assert "MiniCPMForCausalLMEagle3" in rows["engine.dry_run"].found
