"""What replay predicts is what the real engine counts: greedy, the same prompts, within 0.02 at every position."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import overfitted

FORMS = {"qwen3": "llama", "deepseek_v3": "mla"}


@pytest.mark.engine
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", FORMS)
def test_predicted_is_measured(kind: str, real_engine: Any, tmp_path: Path) -> None:
    target = overfitted.write_target(tmp_path / "target", kind)
    rows = overfitted.answers(target, overfitted.prompts())
    drafter = overfitted.overfit(target, rows, tmp_path / "drafter-eagle3", form=FORMS[kind])
    found = overfitted.predicted_and_measured(target, drafter, overfitted.prompts(), real_engine, tmp_path / "bench")
    assert found["measured"][0] >= 0.2 and found["drafts"] > 100
    assert found["texts"] == overfitted.ROWS
    gaps = [abs(a - b) for a, b in zip(found["predicted"], found["measured"], strict=True)]
    assert max(gaps) <= 0.02, found
