"""The drafter's own table against the target's, where the two are of different types."""

from __future__ import annotations

from pathlib import Path

import mutants_pair
import numpy as np
import pytest
import tiny_pair as tp
from mutant_case import good_case

from draftsmith.check import deep
from draftsmith.check.run import check_pair
from draftsmith.check.types import Options

assert mutants_pair


@pytest.mark.parametrize("own, status", [("another", "fail"), ("the target's", "pass")])
def test_a_wider_type_holds_fewer_rows_of_as_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, status: str
) -> None:
    monkeypatch.setattr(deep, "COMPARED", 40 * tp.HIDDEN * 2)
    case = good_case(tmp_path, with_contract=False)
    table = case.pair.target["model.embed_tokens.weight"]
    wide = np.random.default_rng(4).standard_normal(table.shape) if own == "another" else tp.as_f32(table)
    case.t["embed_tokens.weight"] = wide.astype("<f4")
    (tmp_path / "pair").mkdir()
    target, drafter = case.write(tmp_path / "pair")
    verdict = check_pair(str(target), str(drafter), None, Options(method="eagle3", deep=True))
    row = next(r for r in verdict.checks if r.id == "silence.embedding")
    assert row.status == status, row.found
