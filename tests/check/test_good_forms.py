"""No false alarm: good drafters of the public forms, at their true sizes, get neither a fail nor a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
from asked import facts
from public_forms import FORMS

from draftsmith.check.run import check_pair
from draftsmith.check.types import Options


@pytest.mark.parametrize("name", sorted(FORMS))
def test_good_form(tmp_path: Path, name: str) -> None:
    form = FORMS[name]()
    target, drafter = form.write(tmp_path)
    verdict = check_pair(str(target), str(drafter), None, Options(**form.options), facts=facts(form.engine))
    assert [(r.id, r.status, r.found) for r in verdict.checks if r.status in ("warn", "fail")] == []
    assert verdict.verdict == "yes"
    memory = next(r for r in verdict.checks if r.id == "pair.memory")
    assert memory.status == "pass" and "KiB a token" in memory.found
