"""The road in a loop for half an hour, with random kills: nothing is lost, nothing is left behind, nothing grows.

$DRAFTSMITH_SOAK_MINUTES shortens it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from soak_road import Round, growth, soak

SEEDS = (7, 11, 13, 17, 19, 23, 29, 31)
MINUTES = float(os.environ.get("DRAFTSMITH_SOAK_MINUTES", "30"))


@pytest.mark.slow
@pytest.mark.timeout(int(60 * MINUTES) + 1200)
def test_nothing_is_lost_left_or_grown(tmp_path: Path, tiny_target: Path) -> None:
    rounds = soak(tmp_path / "soak", tiny_target, MINUTES, SEEDS)
    assert sum(r.kills for r in rounds) >= len(rounds), "too few kills met a run at work"
    for n, r in enumerate(rounds):
        assert not r.lost, f"round {n} (seed {r.seed}): {r.lost}"
        assert not r.left, f"round {n} (seed {r.seed}): {r.left}"
    assert not growth(rounds), f"{growth(rounds)} in {len(rounds)} walks"


def test_growth_is_seen() -> None:
    steady = [Round(1, rss=500 << 20, fds=30, threads=4) for _ in range(12)]
    assert growth(steady) == []
    leaking = [Round(1, rss=(500 + 20 * n) << 20, fds=30 + n, threads=4 + n) for n in range(12)]
    assert [w.partition(":")[0] for w in growth(leaking)] == ["memory", "open files", "threads"]
